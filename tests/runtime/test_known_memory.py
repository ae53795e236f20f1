"""Memory that holds what it held is known without looking; any write ends that."""

import ctypes

import numpy as np
import pytest

from rearview.runtime.restore_checkpoints import KnownFrom, KnownMemory
from rearview.runtime.saving.dirty_pages import Pages
from rearview.store.checkpoints.objects import as_bytes

MB = 1 << 20

pytestmark = pytest.mark.skipif(
    not Pages().available, reason="LOUD: this system does not note writes to pages"
)


@pytest.fixture
def held():
    one = KnownMemory()
    yield one
    one.pages.close()


def test_memory_found_equal_twice_is_remembered(held):
    data = as_bytes(np.ones(MB, np.uint8))
    assert not held.holds(data, "a")
    held.remember(data, "a", KnownFrom.READ)
    assert not held.holds(data, "a")  # it may have changed since: nobody watched
    held.remember(data, "a", KnownFrom.READ)
    assert held.holds(data, "a")
    assert not held.holds(data, "b")
    assert not held.holds(data[: MB // 2], "a")


def test_memory_read_and_then_compared_is_not_watched_yet(held):
    data = as_bytes(np.ones(MB, np.uint8))
    for oid in ("a", "b"):
        held.remember(data, oid, KnownFrom.READ)
        held.remember(data, oid, KnownFrom.HASHED)
        assert not held.holds(data, oid)
    held.remember(data, "b", KnownFrom.READ)
    assert held.holds(data, "b")


def test_any_write_ends_the_knowledge_about_memory(held):
    array = np.ones(MB, np.uint8)
    for _ in range(2):
        held.remember(as_bytes(array), "a", KnownFrom.READ)
    ctypes.memset(array.ctypes.data + 5000, 3, 1)
    assert not held.holds(as_bytes(array), "a")
    held.remember(as_bytes(array), "b", KnownFrom.READ)
    held.remember(as_bytes(array), "b", KnownFrom.READ)
    assert held.holds(as_bytes(array), "b")


def test_small_memory_is_not_remembered(held):
    small = as_bytes(np.ones(100, np.uint8))
    held.remember(small, "a", KnownFrom.READ)
    held.remember(small, "a", KnownFrom.READ)
    assert not held.holds(small, "a")
