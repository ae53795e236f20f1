"""Open pages hear of changed runs, whatever a refresh of the index runs into."""

import asyncio

import pytest

from rearview.web import live as module
from rearview.web.live import Live
from rearview.web.run_index import Index
from recorded import Recorded, at


@pytest.fixture
def store(tmp_path):
    return Recorded(tmp_path)


@pytest.fixture
def index(store):
    index = Index(store.project)
    yield index
    index.close()


async def next_change(live):
    """Return the first event of a change that a listening page gets."""
    live.start()
    events = live.listen()
    async with asyncio.timeout(20):
        async for data in events:
            if b'"changed"' in data:
                break
    await events.aclose()
    live.close()
    await asyncio.to_thread(live.join)
    return data


def test_a_page_hears_which_run_is_new(store, index):
    run = store.run((at(epoch=0), {"loss": 1.0}))
    assert run.encode() in asyncio.run(next_change(Live(index)))


def test_a_page_hears_of_runs_after_a_refresh_failed(store, index, monkeypatch):
    """A run folder may be removed while it is read; the thread used to end, and the page with it."""
    run = store.run((at(epoch=0), {"loss": 1.0}))
    monkeypatch.setattr(module, "LISTENING_PAUSE", 0.01)
    monkeypatch.setattr(module, "IDLE_PAUSE", 0.01)
    refresh, problems = index.refresh, []

    def fail_twice(runs_to_check):
        if len(problems) < 2:
            problems.append(list(index.problems))
            raise FileNotFoundError("records-0.jsonl")
        problems.append(list(index.problems))
        return refresh(runs_to_check)

    monkeypatch.setattr(index, "refresh", fail_twice)
    live = Live(index)
    live.look_now([run])
    assert run.encode() in asyncio.run(next_change(live))
    assert problems[0] == []
    assert "read again: FileNotFoundError" in problems[1][0]
    assert index.problems == []


def test_an_index_whose_first_refresh_failed_has_every_run_once(store, index, monkeypatch):
    store.run((at(epoch=0), {"loss": 1.0}))
    index.refresh()
    index._save()
    again = Index(store.project)
    apply = again._apply
    monkeypatch.setattr(again, "_apply", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again.refresh()
    monkeypatch.setattr(again, "_apply", apply)
    again.refresh()
    assert again.ask("SELECT count(*) FROM page.runs").fetchone() == (1,)
    again.close()
