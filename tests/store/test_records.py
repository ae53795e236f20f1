"""A record that was acknowledged is never lost, and comes back exactly."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest

from rearview.errors import DamagedError, StoreError
from rearview.model import Origin, Point, Record, Step
from rearview.store.records import STDOUT, RecordFile, encode_point, read

SRC = str(Path(__file__).parents[2] / "src")
AT = Point((Step("epoch", 3), Step("step", 20)))
GOLD = Path(__file__).parents[1] / "gold/records"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("records-*.jsonl"))


def logged(folder: Path) -> list[Record]:
    return [record for file in files(folder) for record in read(file)]


def test_records_come_back_in_order_with_their_point(tmp_path):
    out = RecordFile(tmp_path, "r")
    out.append(encode_point(Point()), [("lr", 0.1)])
    out.append(encode_point(AT), [("loss", 0.5), ("n", 3), ("ok", True), ("none", None)])
    out.append(encode_point(Point((Step("fold", 0, "a"), Step("x", 1)))), [("s", "text")])
    found = logged(tmp_path)
    assert [(r.seq, str(r.point), r.name, r.value) for r in found] == [
        (0, "", "lr", 0.1),
        (1, "epoch=3/step=20", "loss", 0.5),
        (2, "epoch=3/step=20", "n", 3),
        (3, "epoch=3/step=20", "ok", True),
        (4, "epoch=3/step=20", "none", None),
        (5, "fold=a/x=1", "s", "text"),
    ]
    assert {(r.run, r.origin) for r in found} == {("r", Origin.RECORDED)}
    assert found[0].time > 1_600_000_000


def test_awkward_values_and_names_come_back(tmp_path):
    values = [math.inf, -math.inf, -0.0, 2**70, "\ud800x", b"\x00\xff", [1, math.nan], {"$int": 1}]
    out = RecordFile(tmp_path, "r")
    out.append(encode_point(AT), [(f"n{i}", value) for i, value in enumerate(values)])
    out.append(encode_point(AT), [("line\nbreak \ud800", math.nan)])
    found = logged(tmp_path)
    assert repr([r.value for r in found[:-1]]) == repr(values)
    assert found[-1].name == "line\nbreak \\ud800"
    assert math.isnan(found[-1].value)


def test_an_odd_object_is_kept_as_repr_with_one_warning(tmp_path):
    out = RecordFile(tmp_path, "r")
    with pytest.warns(RuntimeWarning, match="type object was logged"):
        out.append(b"{", [("o", object())])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out.append(b"{", [("o", object())])
    assert all(r.value.startswith("<object object") for r in logged(tmp_path))


def test_a_replay_has_its_own_file_and_its_origin(tmp_path):
    RecordFile(tmp_path, "r").append(b"{", [("a", 1)])
    RecordFile(tmp_path, "r", "replay-7").append(b"{", [("a", 2)])
    assert [(r.value, r.origin) for r in logged(tmp_path)] == [(1, "recorded"), (2, "unproved")]


def test_a_last_line_torn_at_any_byte_is_not_read(tmp_path):
    out = RecordFile(tmp_path, "r")
    for i in range(3):
        out.append(encode_point(AT), [("loss", i), ("text", "é")])
    (file,) = files(tmp_path)
    data = file.read_bytes()
    whole = data[:-1].rindex(b"\n") + 1
    for size in range(whole, len(data)):
        file.write_bytes(data[:size])
        assert [r.value for r in read(file)] == [0, "é", 1, "é"]
    for size in range(data.index(b"\n") + 1):
        file.write_bytes(data[:size])
        assert list(read(file)) == []
    file.write_bytes(b"rubbish\n" + data)
    with pytest.raises(DamagedError, match="header"):
        list(read(file))


WRITER = """
import os
import sys
from pathlib import Path
from rearview.model import Point, Step
from rearview.store.records import RecordFile, encode_point
out = RecordFile(Path(sys.argv[1]), "r", part=50_000)
for i in range(10**9):
    out.append(encode_point(Point((Step("i", i),))), [("a", i), ("b", i / 7), ("c", "x" * (i % 50))])
    os.write(1, b"%d\\n" % i)  # acknowledged
"""


def test_no_acknowledged_record_is_lost_by_kill_9(tmp_path):
    dice = random.Random(1)
    for n in range(8):
        folder = tmp_path / str(n)
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            env=os.environ | {"PYTHONPATH": SRC},
            stdout=subprocess.PIPE,
        )
        wanted = dice.randrange(1, 3000)
        last = -1
        while last < wanted:
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")
        acknowledged = int(rest[-2]) if len(rest) > 1 else last
        process.wait()
        process.stdout.close()
        seen = {r.point.indices[0]: r.value for r in logged(folder) if r.name == "b"}
        assert len(seen) in {acknowledged + 1, acknowledged + 2}
        assert all(seen[i] == i / 7 for i in range(acknowledged + 1))


def test_a_long_run_continues_in_new_files(tmp_path):
    out = RecordFile(tmp_path, "r", part=500)
    for i in range(100):
        out.append(b"{", [("a", i)])
    assert len(files(tmp_path)) > 5
    assert sorted((r.seq, r.value) for r in logged(tmp_path)) == [(i, i) for i in range(100)]


def test_a_forked_child_writes_its_own_file(tmp_path):
    out = RecordFile(tmp_path, "r")
    out.append(b"{", [("who", "parent")])
    pid = os.fork()
    if pid == 0:
        out.append(b"{", [("who", "child")])
        os._exit(0)
    os.waitpid(pid, 0)
    out.append(b"{", [("who", "parent again")])
    assert len(files(tmp_path)) == 2
    assert sorted(r.value for r in logged(tmp_path)) == ["child", "parent", "parent again"]


def test_threads_do_not_mix_their_lines(tmp_path):
    out = RecordFile(tmp_path, "r", part=5_000)

    def work(k):
        for i in range(300):
            out.append(b"{", [(f"t{k}", i), (f"t{k}", "x" * 50)])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = logged(tmp_path)
    assert sorted(r.seq for r in found) == list(range(2400))
    for k in range(4):
        mine = [r for r in found if r.name == f"t{k}" and r.value != "x" * 50]
        assert [r.value for r in sorted(mine, key=lambda r: r.seq)] == list(range(300))


def test_a_full_disk_is_an_error_that_spoils_nothing_before_or_after(tmp_path, monkeypatch):
    out = RecordFile(tmp_path, "r")
    out.append(b"{", [("a", 1)])
    real = os.write

    def full(fd, data):
        if len(data) > 10:
            return real(fd, data[:10])  # a part of the line still fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match=r"No space left.*safe"):
        out.append(b"{", [("a", 2)])
    monkeypatch.undo()
    out.append(b"{", [("a", 3)])
    assert [r.value for r in logged(tmp_path)] == [1, 3]


def test_a_folder_that_is_gone_is_an_error_that_says_so(tmp_path):
    with pytest.raises(StoreError, match="cannot be created"):
        RecordFile(tmp_path / "nowhere", "r").append(b"{", [("a", 1)])


def test_a_newer_format_is_refused(tmp_path):
    file = tmp_path / "records-1-0.jsonl"
    file.write_bytes(b'{"format":3,"run":"r"}\n{"what":"ever"}\n')
    with pytest.raises(StoreError, match="format 3"):
        list(read(file))


def test_printed_lines_are_kept_under_a_reserved_name(tmp_path):
    RecordFile(tmp_path, "r").append(b"{", [(STDOUT, "epoch 1 done")])
    assert logged(tmp_path)[0].name == "$stdout"


@pytest.mark.parametrize("file", sorted(GOLD.glob("format-*.jsonl")), ids=lambda f: f.name)
def test_files_of_every_past_format_are_read(file):
    wanted = msgspec.json.decode(file.with_suffix(".expected.json").read_bytes())
    found = [[r.seq, str(r.point), r.name, repr(r.value), r.time] for r in read(file)]
    assert found == wanted
