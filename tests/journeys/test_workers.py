"""Journey: workers come, go and die while a backfill runs; every cell is filled, once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parent.parent.parent / "src"
RUNS = 3
SCRIPT = """\
import random
import sys

import gate

weight = float(sys.argv[1])
for epoch in range(3):
    for step in range(4):
        weight = weight * 0.9 + random.random()
    gate.wait()
    print(epoch, weight)
"""
PROBED = "import rearview\n" + SCRIPT.replace(
    "random.random()\n", "random.random()\n        rearview.log('weight', weight)\n"
)
GATE = """\
import os, time

def wait():
    while os.path.exists({!r}):
        time.sleep(0.02)
"""


def started(folder, *words):
    env = {key: value for key, value in os.environ.items() if not key.startswith("REARVIEW_")}
    return subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env=env | {"PYTHONPATH": os.pathsep.join((str(SRC), str(folder.parent / "site")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(folder, *words):
    process = started(folder, *words)
    out, err = process.communicate(timeout=HUNG)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    around = tmp_path_factory.mktemp("recorded")
    folder, site = around / "project", around / "site"
    folder.mkdir()
    site.mkdir()
    (site / "gate.py").write_text(GATE.format(str(around / "shut")))
    (folder / "train.py").write_text(SCRIPT)
    many = [started(folder, "run", "-q", "--every", "train.py", str(k)) for k in range(RUNS)]
    for process in many:
        _, err = process.communicate(timeout=HUNG)
        assert process.returncode == 0, err
    (folder / "train.py").write_text(PROBED)
    return folder


def events(process):
    """Yield the events that a backfill prints, as they come."""
    for line in process.stdout:
        yield json.loads(line)


def filled(folder, name):
    code, out, err = done(folder, "table", name, "--format", "json")
    assert code == 0, err
    return [row for row in json.loads(out) if row[name] is not None]


@pytest.fixture
def asked(recorded):
    """Return how to begin a backfill whose replays stop after their first epoch until `open`."""
    gate = recorded.parent / "shut"
    gate.touch()
    processes = contextlib.ExitStack()

    def begin(name, workers):
        (recorded / "train.py").write_text(PROBED.replace("'weight'", repr(name)))
        process = started(recorded, "backfill", name, "--workers", str(workers), "--json")
        return processes.enter_context(process)

    begin.open = lambda: gate.unlink(missing_ok=True)
    with processes:
        yield begin
        begin.open()


def under_way(event):
    return len(event.get("under_way", ()))


def test_added_workers_take_waiting_segments_at_once(recorded, asked):
    process, seen, told = asked("added", 1), [], None
    for event in events(process):
        seen.append(event)
        if event["event"] == "progress" and told is None:
            assert under_way(event) == 1
            told = done(recorded, "workers", "3")
        if under_way(event) == 3:
            asked.open()
    assert process.wait(HUNG) == 0
    assert told[0] == 0, told
    assert {"event": "workers", "workers": 3} in seen
    assert max(map(under_way, seen)) == 3
    assert (seen[-1]["exact"], len(filled(recorded, "added"))) == (True, RUNS * 12)


def test_workers_that_are_taken_away_leave_nothing_undone(recorded, asked):
    process, seen, told = asked("fewer", 3), [], None
    for event in events(process):
        seen.append(event)
        if event["event"] == "progress" and told is None:
            told = done(recorded, "workers", "1")
        if event["event"] == "workers":
            assert len(json.loads(done(recorded, "workers", "--json")[1])) == 1
            asked.open()
    assert process.wait(HUNG) == 0
    assert told[0] == 0, told
    assert {"event": "workers", "workers": 1} in seen
    assert (seen[-1]["exact"], len(filled(recorded, "fewer"))) == (True, RUNS * 12)
    assert done(recorded, "workers")[0] == 1


def test_records_of_a_killed_worker_do_not_count_twice(recorded, asked):
    process, seen, victims = asked("killed", 1), [], []
    for event in events(process):
        seen.append(event)
        if event["event"] == "rows" and not victims:
            victims = [one for parent in children(process.pid) for one in children(parent)]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            asked.open()
    assert process.wait(HUNG) == 0
    assert victims
    assert [one["event"] for one in seen].count("lost") == 1
    rows = filled(recorded, "killed")
    assert len(rows) == RUNS * 12
    assert len({(row["run"], row["epoch"], row["step"]) for row in rows}) == RUNS * 12


def test_two_backfills_at_once_do_the_work_once(recorded, asked):
    first = asked("shared", 3)
    await_all(first)
    second, seen = asked("shared", 2), []
    for event in events(second):
        seen.append(event)
        if event.get("held") == RUNS:
            asked.open()
    assert second.wait(HUNG) == 0
    assert list(events(first))[-1]["exact"]
    assert first.wait(HUNG) == 0
    assert "is filling shared now" in " ".join(seen[0]["notes"])
    assert (seen[-1]["written"], seen[-1]["elsewhere"]) == (0, RUNS)
    assert written(recorded, "shared") == RUNS * 12


def test_segments_of_a_killed_backfill_are_taken_over_by_another(recorded, asked):
    first = asked("heir", 3)
    await_all(first)
    second, seen = asked("heir", 3), []
    for event in events(second):
        seen.append(event)
        if event.get("held") == RUNS and first.poll() is None:
            for pid in (first.pid, *children(first.pid)):
                os.kill(pid, signal.SIGKILL)
            first.wait()
            asked.open()
    assert second.wait(HUNG) == 0
    assert (seen[-1]["exact"], seen[-1]["elsewhere"]) == (True, 0)
    assert len(filled(recorded, "heir")) == RUNS * 12


def await_all(process):
    """Return when all segments of a backfill are under way."""
    for event in events(process):
        if under_way(event) == RUNS:
            return


def written(folder, name):
    """Return how many values there are in all, those that no table shows included."""
    query = f"SELECT count(*) AS n FROM records WHERE name = '{name}' AND (origin = 'recorded' OR replay IS NOT NULL)"
    return json.loads(done(folder, "sql", query, "--format", "json")[1])[0]["n"]


def children(pid):
    """Return the processes that a process started; segments are those of the one they share."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found
