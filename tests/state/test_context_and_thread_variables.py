"""Values that are not attributes (context variables, shared memory) are restored, or reported."""

import contextvars
import ctypes
import hashlib
import multiprocessing
import sys
import threading
import types
import zlib

import pytest

CURRENT = contextvars.ContextVar("current", default=0.0)
OTHER = contextvars.ContextVar("other")


def test_context_variables_resume(resumes):
    def setup():
        CURRENT.set(1.0)
        OTHER.set([0])
        return {"current": CURRENT, "other": OTHER}

    def step(names, i):
        names["current"].set(names["current"].get() * 0.9 + i)
        names["other"].get().append(i)
        return names["current"].get(), list(names["other"].get())

    contextvars.copy_context().run(resumes, setup, step)


def test_attributes_of_a_thread_resume(resumes):
    def step(names, i):
        names["mine"].n = getattr(names["mine"], "n", 0) + i
        return names["mine"].n

    resumes(lambda: {"mine": threading.local()}, step)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: multiprocessing.Value("d", 0.5), id="Value"),
        pytest.param(lambda: multiprocessing.RawValue("i", 1), id="RawValue"),
        pytest.param(lambda: ctypes.c_double(0.5), id="ctypes"),
    ],
)
def test_numbers_shared_between_processes_resume(resumes, make):
    def step(names, i):
        names["n"].value += i
        return names["n"].value

    resumes(lambda: {"n": make()}, step)


def test_arrays_shared_between_processes_resume(resumes):
    def step(names, i):
        names["a"][i % 3] += i
        names["b"][i % 3] += i
        return list(names["a"]), list(names["b"])

    resumes(
        lambda: {"a": multiprocessing.Array("d", 3), "b": (ctypes.c_int * 3)()}, step, at=3, stop=6
    )


def test_a_child_process_is_reported_only_while_it_runs(program):
    stop = multiprocessing.get_context("spawn").Event()
    child = multiprocessing.get_context("spawn").Process(target=stop.wait, name="worker")
    run = program(lambda: {"old": child}, lambda names, i: names.update(new=[child]))
    run.run(0, 1)
    assert run.capture()[0].missing == []
    child.start()
    missing = run.capture()[0].missing
    stop.set()
    child.join()
    assert [str(part) for part in missing] == ["old: the process worker is running"]
    later = program(dict, lambda names, i: names.update(new=[child]))
    later.run(0, 1)
    captured, buffers = later.capture()
    assert captured.missing == []
    assert str(child._parent_pid).encode() not in captured.skeleton
    later.restore(captured.skeleton, buffers)


def test_a_queue_between_processes_is_reported_unless_it_is_empty(program):
    queue = multiprocessing.SimpleQueue()
    run = program(lambda: {"queue": queue}, None)
    assert run.capture()[0].missing == []
    queue.put(1)
    assert [m.path for m in run.capture()[0].missing] == ["queue"]
    queue.get()
    queue.close()


@pytest.mark.parametrize(
    "make", [hashlib.sha256, zlib.compressobj, lambda: __import__("queue").SimpleQueue()]
)
def test_state_that_native_code_hides_is_reported(program, make):
    run = program(lambda: {"hidden": make()}, None)
    assert [m.path for m in run.capture()[0].missing] == ["hidden"]


def test_a_library_that_put_another_object_in_its_place_is_the_same_module(program, monkeypatch):
    first, second = types.ModuleType("lazy"), types.ModuleType("lazy")
    first.__file__ = second.__file__ = "/lib/lazy/__init__.py"
    monkeypatch.setitem(sys.modules, "lazy", second)
    run = program(lambda: {"lazy": first}, None)
    captured, buffers = run.capture()
    assert captured.missing == []
    run.restore(captured.skeleton, buffers)
    assert run.names["lazy"] is second
