import importlib
import io
import socket
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from rearview.errors import StateError
from rearview.state.codecs.data_loaders import watch_loaders
from rearview.state.compare import compare, differences


def test_buffers_in_memory_resume(resumes):
    def step(names, i):
        names["text"].write(f"line {i}\n")
        names["bytes"].write(bytes([i]))
        names["bytes"].seek(1 if i % 2 else 0)
        return names["text"].getvalue(), names["bytes"].getvalue(), names["bytes"].tell()

    resumes(lambda: {"text": io.StringIO(), "bytes": io.BytesIO(b"start")}, step)


def test_a_file_being_written_is_set_back_to_its_position(program, tmp_path):
    path = tmp_path / "log.txt"

    def setup():
        return {"log": path.open("w")}

    def step(names, i):
        names["log"].write(f"step {i}\n")
        names["log"].flush()

    truth = program(setup, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    assert captured.missing == []
    truth.run(2, 4)
    truth.names["log"].close()
    whole = path.read_text()

    resumed = program(setup, step)
    path.write_text(whole)
    resumed.restore(captured.skeleton, buffers)
    resumed.run(2, 4)
    resumed.names["log"].close()
    assert path.read_text() == whole


@pytest.mark.parametrize("mode", ["w", "a", "wb"])
def test_a_file_opened_in_the_loop_is_opened_again(mode, program, tmp_path):
    path = tmp_path / "log.bin"

    def line(i):
        return f"step {i}\n".encode() if "b" in mode else f"step {i}\n"

    def step(names, i):
        if "log" not in names:
            names["log"] = path.open(mode)
        names["log"].write(line(i))

    truth = program(dict, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    assert captured.missing == []
    truth.run(2, 4)
    truth.names["log"].close()
    whole = path.read_text()

    resumed = program(dict, step)
    resumed.restore(captured.skeleton, buffers)
    resumed.run(2, 4)
    resumed.names["log"].close()
    assert path.read_text() == whole


def test_a_file_being_read_continues_at_its_position(resumes, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("".join(f"row {i}\n" for i in range(20)))
    opened = []

    def setup():
        opened.append(path.open())
        return {"file": opened[-1]}

    resumes(setup, lambda names, i: names["file"].readline())
    for file in opened:
        file.close()


def test_a_text_file_that_is_being_iterated_over_is_reported(program, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a\nb\nc\n")
    run = program(lambda: {"file": path.open()}, lambda names, i: next(names["file"]))
    run.run(0, 1)
    captured, _ = run.capture()
    run.names["file"].close()
    assert len(captured.missing) == 1
    assert str(captured.missing[0]).startswith("file: the position in this file is not known")


def test_a_file_position_that_is_unknown_on_one_side_is_no_difference(program, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a\nb\n")
    run = program(lambda: {"file": path.open(), "seen": [0]}, None)
    list(zip("ab", run.names["file"], strict=True))  # exhausted: it can tell again
    then, buffers = run.capture()
    run.names["file"].seek(0)
    next(run.names["file"])
    run.names["seen"][0] = None  # known on both sides
    now, _ = run.capture()
    run.names["file"].close()

    def paths(now):
        return [one.path for one in differences(run.anchors, now, then.skeleton, buffers.get)]

    assert paths(now) == ["seen[0]"]
    assert set(paths(replace(now, missing=[]))) > {"seen[0]", "file[0]"}


def test_standard_streams_go_by_reference(resumes):
    def step(names, i):
        names["n"] += 1
        names["err"] = sys.stderr
        return names["n"]

    _, resumed = resumes(lambda: {"out": sys.stdout, "n": 0}, step)
    assert resumed.names["err"] is sys.stderr


def numbers(limit):
    for i in range(limit):
        yield i * 10


def test_a_generator_in_the_middle_is_reported_with_its_place(program):
    run = program(
        lambda: {"source": {"rows": numbers(9)}}, lambda names, i: next(names["source"]["rows"])
    )
    run.run(0, 1)
    captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == [
        "source['rows']: the generator numbers holds an iterator that cannot be seen (as in a generator expression)"
    ]


def test_a_generator_not_started_or_finished_is_no_obstacle(resumes):
    def setup():
        return {"later": numbers(3), "done": numbers(1), "n": 0}

    def step(names, i):
        names["n"] += sum(names["done"]) + 1
        names["over"] = names.get("over") or numbers(0)
        list(names["over"])
        return names["n"], list(names["later"]) if i == 4 else None

    resumes(setup, step)


def test_a_generator_born_in_the_loop_is_lost_and_any_use_of_it_refused(program):
    def step(names, i):
        names["fresh"] = numbers(5)
        next(names["fresh"])

    run = program(lambda: {"n": 1}, step)
    run.run(0, 1)
    captured, buffers = run.capture()
    assert [str(part) for part in captured.missing] == [
        "fresh: the generator numbers holds an iterator that cannot be seen (as in a generator expression)"
    ]
    again = program(lambda: {"n": 1}, step)
    again.restore(captured.skeleton, buffers)
    assert again.names["n"] == 1
    with pytest.raises(StateError, match="not part of the checkpoint"):
        next(again.names["fresh"])
    with pytest.raises(StateError, match="not part of the checkpoint"):
        again.names["fresh"].send(None)


def test_the_iterator_of_a_data_loader_continues_at_its_position(resumes, monkeypatch):
    module = torch.utils.data.dataloader
    base = module._BaseDataLoaderIter
    monkeypatch.setattr(base, "_next_index", base._next_index)  # put back after the test
    watch_loaders(module)

    def setup():
        loader = torch.utils.data.DataLoader(list(range(16)), batch_size=2, shuffle=True)
        return {"loader": loader, "it": iter(loader)}

    resumes(setup, lambda names, i: next(names["it"]).tolist())


def test_a_loader_iterator_whose_workers_live_on_is_reported(program):
    watch_loaders(torch.utils.data.dataloader)

    def setup():
        loader = torch.utils.data.DataLoader(
            list(range(8)), batch_size=2, num_workers=1, persistent_workers=True
        )
        return {"it": iter(loader)}

    run = program(setup, None)
    captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == [
        "it: this loader keeps its workers from epoch to epoch"
    ]


def test_sockets_databases_and_children_are_reported(program):
    child = subprocess.Popen(["sleep", "0"])
    with socket.socket() as plug, sqlite3.connect(":memory:") as base:
        run = program(lambda: {"plug": plug, "base": base, "child": child}, None)
        captured, _ = run.capture()
        assert [m.path for m in captured.missing] == ["plug", "base", "child"]
        fresh = program(lambda: {"n": 0}, None)
        fresh.names["plug"] = plug
        captured, _ = fresh.capture()
        assert [str(part) for part in captured.missing] == [
            "plug: the state of a socket is outside this process"
        ]
    base.close()
    child.wait()


def test_a_running_thread_of_the_project_is_reported_and_a_library_one_is_not(program):
    stop = threading.Event()

    def work():
        stop.wait()

    mine = threading.Thread(target=work, name="mine")
    theirs = threading.Thread(target=stop.wait, name="theirs")
    mine.start()
    theirs.start()
    try:
        captured, _ = program(lambda: {"a": mine, "b": theirs}, None).capture()
    finally:
        stop.set()
        mine.join()
        theirs.join()
    assert [str(part) for part in captured.missing] == ["a: the thread mine is running"]


def test_an_hdf5_file_is_an_input_while_it_is_read_and_reported_while_it_is_written(
    program, tmp_path
):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1.0, 2.0]
        run = program(lambda: {"file": file, "x": file["x"]}, None)
        missing = run.capture()[0].missing
        assert [m.path for m in missing] == ["file", "x"]
    assert run.capture()[0].missing == []
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert program(lambda: {"file": file, "x": file["x"]}, None).capture()[0].missing == []


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
@pytest.mark.parametrize("mode", ["wb", "wt"])
def test_a_compressed_file_that_is_being_written_is_reported_and_left_alone(
    module, mode, program, tmp_path
):
    with importlib.import_module(module).open(tmp_path / "out", mode) as file:
        file.write("text" if mode == "wt" else b"text")
        before = (tmp_path / "out").read_bytes()
        missing = program(lambda: {"file": file}, None).capture()[0].missing
        assert str(missing[0]) == "file: this file is being compressed while it is written"
        assert (tmp_path / "out").read_bytes() == before  # flushing would change what it writes
    with importlib.import_module(module).open(tmp_path / "out", mode.replace("w", "r")) as file:
        assert program(lambda: {"file": file}, None).capture()[0].missing == []


def test_a_profiler_only_watches(program):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as watching:
        assert program(lambda: {"watching": watching}, None).capture()[0].missing == []


def test_a_file_that_the_loop_opened_and_closed_is_the_same_once_restored(program, tmp_path):
    def step(names, i):
        with (tmp_path / "out.txt").open("w") as names["out"]:
            names["out"].write(str(i))

    run = program(dict, step)
    run.run(0, 1)
    captured, buffers = run.capture()
    run.restore(captured.skeleton, buffers)
    assert run.names["out"].closed
    now, _ = run.capture()
    assert now.missing == []
    assert compare(run.anchors, now, captured.skeleton, buffers.__getitem__) is None
