"""The index of the page follows the store by reading only what changed."""

import pytest

from rearview.model import ReplayReport
from rearview.web import run_index as module
from rearview.web.run_index import Index
from recorded import Recorded, at


@pytest.fixture
def made(tmp_path):
    return Recorded(tmp_path)


@pytest.fixture
def index(made):
    found = Index(made.project)
    yield found
    found.close()


def stats(index, name="loss"):
    rows = index.ask(f"SELECT run, n, last FROM page.stats WHERE name = '{name}' ORDER BY run")
    return {run: (n, last) for run, n, last in rows.fetchall()}


def test_a_second_look_reads_nothing_where_nothing_changed(made, index):
    made.run((at(epoch=0), {"loss": 1.0}))
    assert len(index.refresh()) == 1
    before = index.revision
    assert index.refresh() == []
    assert index.revision == before


def test_values_of_a_run_in_progress_show_as_they_come(made, index):
    run = made.run((at(epoch=0), {"loss": 1.0}), over=False)
    made.open.flush() if hasattr(made.open, "flush") else None
    index.refresh()
    assert index.entries[run].live
    made.add(run, (at(epoch=1), {"loss": 0.5}))
    index.refresh()
    assert stats(index)[run][1] == 0.5


def test_a_run_that_ended_is_read_once_more_and_then_left_alone(made, index):
    run = made.run((at(epoch=0), {"loss": 1.0}), over=False)
    index.refresh()
    made.open.close()
    made.runs.end(run, 0)
    index.refresh()
    assert index.entries[run].run.status.value == "finished"
    assert index.refresh() == []


def test_a_tag_shows_without_the_records_being_read_again(made, index, monkeypatch):
    run = made.run((at(epoch=0), {"loss": 1.0}))
    index.refresh()
    made.runs.append_event(run, "tag", {"tags": ["baseline"]})
    index.refresh()
    assert index.entries[run].run.tags == ("baseline",)
    assert stats(index) == {run: (1, 1.0)}


def test_a_removed_run_is_gone(made, index):
    import shutil

    run = made.run((at(epoch=0), {"loss": 1.0}))
    index.refresh()
    shutil.rmtree(made.runs.folder(run))
    assert index.refresh() == [run]
    assert stats(index) == {}


def test_values_of_a_replay_that_was_not_exact_are_left_out(made, index):
    run = made.run((at(epoch=0), {"loss": 1.0}))
    made.replay(run, "good", (at(epoch=0), {"norm": 3.0}))
    index.refresh()
    assert stats(index, "norm") == {run: (1, 3.0)}
    report = ReplayReport(finished=True, difference="w differs")
    made.runs.end_replay(run, "good", proved=False, report=report)
    index.refresh()
    assert stats(index, "norm") == {}


def test_the_index_is_there_at_once_the_next_time(made, monkeypatch):
    runs = [made.run((at(epoch=e), {"loss": float(e)})) for e in range(3)]
    first = Index(made.project)
    first.refresh()
    first.close()

    def never(*_):
        raise AssertionError("it was read again")

    monkeypatch.setattr(module, "gather_records", never)
    second = Index(made.project)
    assert second.refresh() == []
    assert sorted(stats(second)) == sorted(runs)
    second.close()


def test_numbers_in_printed_lines_are_found_again_in_the_cache(tmp_path):
    from plainly import recorded, write
    from rearview.store.project import Project
    from rearview.web.rows import Columns
    from rearview.web.series import Chart, Series

    write(tmp_path, train="for epoch in range(3):\n    print(f'epoch {epoch} loss {epoch / 4}')\n")
    assert recorded(tmp_path, "train.py", capture="printed").code == 0
    for _ in range(2):  # the second index knows the runs from its cache
        index = Index(Project.find(tmp_path))
        index.refresh()
        [run] = index.entries
        assert stats(index)[run] == (3, 0.5)
        assert not Columns.of(index).names["loss"]["asked"]
        assert b'"points": 3' in Series(index).chart(Chart("loss", [run]))
        index.close()


def test_a_damaged_cache_is_made_again(made):
    run = made.run((at(epoch=0), {"loss": 1.0}))
    first = Index(made.project)
    first.refresh()
    first.close()
    file = made.project.cache / "page" / "index.msgpack"
    file.write_bytes(file.read_bytes()[:-20])
    second = Index(made.project)
    second.refresh()
    assert stats(second) == {run: (1, 1.0)}
    second.close()


def test_many_runs_are_read_in_portions_the_newest_first(made, index, monkeypatch):
    runs = [made.run((at(epoch=0), {"loss": 1.0})) for _ in range(5)]
    monkeypatch.setattr(module, "AT_ONCE", 2)
    first = index.refresh()
    assert len(first) == 2
    assert index.pending == 3
    assert set(first) == set(sorted(runs)[-2:])
    while index.pending:
        index.refresh()
    assert len(index.entries) == 5
