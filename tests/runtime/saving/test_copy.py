"""Copies on several cores hold the same bytes as copies on one."""

import random
import threading
import time

import pytest

from rearview.runtime.saving import late_copy
from rearview.runtime.saving.dirty_pages import address_of
from rearview.runtime.saving.late_copy import PIECE_BYTES, CopyRange, copy_in_parallel


def copied(sizes):
    sources = [bytearray(random.Random(n).randbytes(n)) for n in sizes]
    into = bytearray(sum(sizes) + len(sizes))
    base, at, stretches = address_of(memoryview(into)), 0, []
    for source in sources:
        stretches.append(CopyRange(base + at, address_of(memoryview(source)), len(source)))
        at += len(source) + 1  # a byte between them, to see that nothing spills over
    copy_in_parallel(stretches)
    return into, b"".join(bytes(source) + b"\0" for source in sources)


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (1,),
        (PIECE_BYTES,),
        (PIECE_BYTES + 1, PIECE_BYTES - 1, 7),
        (3 * PIECE_BYTES, 5 * PIECE_BYTES + 3, 2 * PIECE_BYTES),
    ],
)
def test_every_byte_arrives_and_no_other_is_touched(sizes):
    into, expected = copied(sizes)
    assert into == expected


def test_copy_threads_stop_when_training_is_interrupted(monkeypatch):
    trainer, at_work = threading.current_thread(), []

    def move(_to, _source, nbytes):
        if threading.current_thread() is trainer:
            raise KeyboardInterrupt
        time.sleep(0.01)
        at_work.append(nbytes)

    monkeypatch.setattr(late_copy, "cores", lambda: 2)
    monkeypatch.setattr(late_copy.ctypes, "memmove", move)
    with pytest.raises(KeyboardInterrupt):
        copy_in_parallel([CopyRange(0, 0, 100 * PIECE_BYTES)])
    done = len(at_work)
    assert done <= 2
    time.sleep(0.05)
    assert len(at_work) == done


def test_a_machine_of_one_core_copies_alone(monkeypatch):
    monkeypatch.setattr(late_copy, "cores", lambda: 1)
    monkeypatch.setattr(threading, "Thread", None)
    into, expected = copied((6 * PIECE_BYTES,))
    assert into == expected


def test_no_more_threads_to_have_is_no_reason_to_fail(monkeypatch):
    def refused(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(late_copy, "cores", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", refused)
    into, expected = copied((6 * PIECE_BYTES,))
    assert into == expected
