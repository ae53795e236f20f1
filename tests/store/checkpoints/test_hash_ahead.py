import threading

import pytest

from rearview.store.checkpoints.objects import HashAhead, reference_of

VIEWS = [memoryview(bytes([i]) * 1000) for i in range(20)]


def test_references_come_in_order():
    with HashAhead(VIEWS) as ahead:
        assert [ahead.next() for _ in VIEWS] == [reference_of(view) for view in VIEWS]
    assert ahead.cpu > 0


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with HashAhead(VIEWS) as ahead:
        ahead.next()
    assert threading.active_count() == before


def test_without_a_thread_the_hash_is_computed_in_the_caller(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with HashAhead(VIEWS) as ahead:
        assert [ahead.next() for _ in VIEWS] == [reference_of(view) for view in VIEWS]


def test_a_failure_in_the_thread_is_raised_where_the_reference_is_wanted():
    with HashAhead([VIEWS[0], "not bytes", VIEWS[1]]) as ahead:
        assert ahead.next() == reference_of(VIEWS[0])
        with pytest.raises(TypeError):
            ahead.next()
