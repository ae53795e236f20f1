"""What a run logged itself is found again, whatever form it has, and nothing else is read."""

import sys
from pathlib import Path

import duckdb
import msgspec
import pytest

from rearview.errors import DamagedError
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.convert_to_parquet import MARK, read_summary
from rearview.store.tables.read_record_files import own_values, recorded_names
from recorded import Recorded, at

GOLD = Path(__file__).parents[2] / "gold/records/format-1.parquet"


@pytest.fixture
def store(tmp_path):
    return Recorded(tmp_path)


def seal(store):
    Tables(store.project).sql("SELECT 1 FROM records").rows()


def sealed(store, run):
    return sorted(store.runs.folder(run).glob("records-*.parquet"))


def told(file):
    sql = "SELECT value FROM parquet_kv_metadata(?) WHERE key = ?"
    (value,) = duckdb.execute(sql, [str(file), MARK.encode()]).fetchone()
    return msgspec.json.decode(value)


def test_a_sealed_file_describes_its_content(store):
    names = {f"name {k} \x18\x08{MARK}\x18 ü": k for k in range(300)}  # longer than one length byte
    run = store.run((at(epoch=1), {"loss": 0.5, "text": f"\x18\x08{MARK}\x18\x02{{}}"}))
    store.replay(run, f"{run}.a", (at(epoch=1), names))
    seal(store)
    files = sealed(store, run)
    assert {read_summary(file)["replay"] for file in files} == {None, f"{run}.a"}
    for file in (*files, GOLD):
        assert read_summary(file) == told(file)


def test_records_of_replays_are_not_read_to_find_the_values_of_the_run(store, monkeypatch):
    run = store.run()
    store.replay(run, f"{run}.a", (at(epoch=1), {"asked": 1.5}))
    seal(store)
    assert sealed(store, run)
    monkeypatch.setitem(sys.modules, "duckdb", None)  # cannot be imported
    assert list(own_values(store.runs.folder(run))) == []


def test_logged_values_are_found_in_sealed_and_unsealed_files(store):
    run = store.run((at(epoch=1), {"loss": 0.5}), (at(epoch=2), {"loss": None}))
    before = list(own_values(store.runs.folder(run)))
    seal(store)
    assert sealed(store, run)
    assert list(own_values(store.runs.folder(run))) == before
    assert before == [(("epoch",), (1,), "loss", 0.5), (("epoch",), (2,), "loss", None)]


@pytest.mark.parametrize("keep", [0, 3, 8, 200])
def test_a_torn_file_is_reported_as_damaged(tmp_path, keep):
    file = tmp_path / "records-1-0.parquet"
    file.write_bytes(GOLD.read_bytes()[-keep:] if keep else b"")
    with pytest.raises(DamagedError, match="is damaged: "):
        read_summary(file)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_names_that_a_run_logged_itself_are_known_without_a_database(
    store, monkeypatch, is_sealed
):
    run = store.run((at(epoch=1), {"loss": 0.5, "acc": 1}))
    store.replay(run, f"{run}.a", (at(epoch=1), {"asked": 2}))
    store.add(run, (at(epoch=1), {"taken": 3}), origin="$assigned")
    if is_sealed:
        seal(store)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert recorded_names(store.runs.folder(run)) == {"loss", "acc"}


def test_a_damaged_file_has_no_names(store):
    run = store.run((at(epoch=1), {"loss": 0.5}))
    store.add(run, (at(epoch=1), {"late": 3}), attempt=1)
    seal(store)
    first, _ = sealed(store, run)
    first.write_bytes(first.read_bytes()[:-5])
    assert len(recorded_names(store.runs.folder(run))) == 1
