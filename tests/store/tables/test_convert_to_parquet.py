"""Sealing changes the form of records and nothing else, whatever goes wrong on the way."""

import contextlib
import math
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rearview.errors import DamagedError, StoreError
from rearview.store.maintenance.verify import check_records
from rearview.store.records import RecordFile, read
from rearview.store.tables import convert_to_parquet as summary_module
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.convert_to_parquet import load, seal
from rearview.store.tables.duckdb_connection import Duck
from rearview.store.tables.read_record_files import gather
from recorded import Recorded, at, rechecked

GOLD = Path(__file__).parents[2] / "gold/records"


@pytest.fixture
def store(tmp_path):
    return Recorded(tmp_path)


def lines(store, run) -> list[Path]:
    return sorted(store.runs.folder(run).glob("records-*.jsonl"))


def values(store) -> list:
    """Return everything that can be asked for, in order."""
    query = "SELECT name, kind, number, whole, text, path, indices, labels, seq FROM records ORDER BY run, process, seq"
    return [tuple(row.values()) for row in Tables(store.project).sql(query)]


any_value = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(blacklist_categories=()), max_size=8)
    | st.binary(max_size=5)
    | st.lists(st.integers(), max_size=2)
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(items=[("s", 5)])
@example(items=[("x", 0), ("x", 0.5)])
@example(items=[("x", 2**60 + 1), ("x", 0.5)])
@example(items=[("x", 2**70), ("x", 0.5)])
@given(items=st.lists(st.tuples(st.text(min_size=1, max_size=4), any_value), min_size=1))
def test_sealed_records_equal_the_logged_records(tmp_path_factory, items):
    store = Recorded(tmp_path_factory.mktemp("p"))
    run = store.run((at(e=1, s=(0, "v")), items))
    before = [r for file in lines(store, run) for r in read(file)]
    table = Tables(store.project)
    rows = table.sql("SELECT name, kind, number, whole, text FROM records ORDER BY seq").rows()
    assert not lines(store, run)
    assert [row["name"] for row in rows] == [record.name for record in before]
    for record, row in zip(before, rows, strict=True):
        value = record.value
        if isinstance(value, float):
            assert struct.pack("d", row["number"]) == struct.pack("d", value) or math.isnan(value)
        elif isinstance(value, bool) or value is None:
            assert row["number"] == value
        elif isinstance(value, int) and abs(value) < 2**63:
            assert row["whole"] == value
        elif isinstance(value, str) and row["kind"] == "str":
            assert row["text"] == value
    names = {record.name for record in before if not record.name.startswith("$")}
    for name in sorted(names)[:2]:
        found = [row for row in table.table([name]) if row]
        column = name if name not in {"e", "s", "run"} else f"{name}_logged"
        wanted = [record.value for record in before if record.name == name]
        whole = [value for value in wanted if type(value) is int]
        if {type(value) for value in wanted} - {type(None)} == {int, float}:
            if max(map(abs, whole)) <= 2**53:  # beyond that, they would not be the same as floats
                wanted = [float(value) if type(value) is int else value for value in wanted]
        assert repr([row[column] for row in found]) == repr(wanted)


def test_a_name_that_looks_like_a_mark_of_ours_is_a_name(store):
    store.run((at(e=0), {"l:x": 1, "n:x": 2, "a:x": 3}))
    row = Tables(store.project).table(["l:x", "n:x", "a:x"]).rows()[0]
    assert [row["l:x"], row["n:x"], row["a:x"]] == [1, 2, 3]


def test_open_and_sealed_records_answer_alike(store):
    calls = [(at(e=i), {"a": i, "b": [i], "c": f"{i}", "d": i / 3}) for i in range(5)]
    run = store.run(*calls, over=False)
    growing = values(store)
    assert lines(store, run)
    store.open.close()
    assert values(store) == growing
    assert not lines(store, run)
    assert values(store) == growing


@pytest.mark.parametrize("step", range(14))
def test_a_failure_at_any_step_loses_nothing(store, monkeypatch, step):
    """The n-th thing that sealing does to the disk or the database fails."""
    store.run((at(e=0), {"a": 1, "b": "x"}), (at(e=1), {"a": 2}))
    wanted = [("a", 1.0), ("b", None), ("a", 2.0)]
    left = [step]

    def maybe(real):
        def act(*args, **options):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
            return real(*args, **options)

        return act

    with monkeypatch.context() as patch:
        duck = Duck(store.project.store)
        patch.setattr(os, "fsync", maybe(os.fsync))
        patch.setattr(Path, "replace", maybe(Path.replace))
        patch.setattr(Path, "unlink", maybe(Path.unlink))
        patch.setattr(duck, "execute", maybe(duck.execute))
        with contextlib.suppress(OSError):
            gather(store.project, duck)
    found = Tables(store.project).sql("SELECT name, number FROM records ORDER BY seq").rows()
    assert [tuple(row.values()) for row in found] == wanted


def test_a_parquet_file_that_does_not_hold_the_written_records_is_not_kept(store, monkeypatch):
    run = store.run((at(e=0), {"a": 1}))
    real = Duck.execute

    def lossy(self, sql, values=None):
        if sql.startswith("COPY"):
            sql = sql.replace("WHERE file = 0", "WHERE false")
        return real(self, sql, values)

    monkeypatch.setattr(Duck, "execute", lossy)
    tables = Tables(store.project)
    assert "check the disk" in tables.problems[0]
    assert lines(store, run)
    assert [row["a"] for row in tables.table(["a"])] == [1]


def test_a_damaged_line_costs_only_itself_and_the_file_is_kept(store):
    run = store.run(*((at(e=i), {"a": i}) for i in range(5)), over=False)
    store.open.close()
    (file,) = lines(store, run)
    data = file.read_bytes().split(b"\n")
    data[3] = b"\x00\x01" + data[3][:10]
    file.write_bytes(b"\n".join(data))
    damaged = file.read_bytes()
    for _ in range(2):
        tables = Tables(store.project)
        assert [row["a"] for row in tables.table(["a"])] == [0, 1, 3, 4]
        assert "lost at least 1 of its records" in tables.problems[0]
    assert file.read_bytes() == damaged


def test_a_damaged_line_of_the_first_format_costs_only_itself_and_the_file_is_kept(store):
    run = store.run(over=False)
    file = store.runs.folder(run) / "records-7-0.jsonl"
    head = b'{"format":1,"run":"%b","process":"p"}' % run.encode()
    rows = [b'{"s":%d,"t":1.0,"n":["a"],"v":[%d]}' % (k, k) for k in range(5)]
    rows[2] = b"\x00\x01"
    file.write_bytes(b"\n".join([head, *rows, b'{"end":true}', b""]))
    for _ in range(2):
        assert [row["a"] for row in Tables(store.project).table(["a"])] == [0, 1, 3, 4]
    assert file.with_suffix(".damaged").exists()


def test_a_file_without_a_header_is_reported_and_the_others_are_read(store):
    run = store.run((at(), {"a": 1}))
    (store.runs.folder(run) / "records-7-0.jsonl").write_bytes(b"rubbish\n")
    tables = Tables(store.project)
    assert [row["a"] for row in tables.table(["a"])] == [1]
    assert "header" in tables.problems[0]


def test_a_killed_writer_leaves_a_file_that_is_sealed_once_it_is_dead(store):
    run = store.run((at(), {"a": 1}), over=False)
    assert [row["a"] for row in Tables(store.project).table(["a"])] == [1]
    (file,) = lines(store, run)
    data = file.read_bytes()
    file.write_bytes(rechecked(data.replace(b'"host":"', b'"host":"other-')))  # who knows
    assert [row["a"] for row in Tables(store.project).table(["a"])] == [1]
    assert file.exists()
    file.write_bytes(rechecked(re.sub(rb'"born":\d+', b'"born":1', data)))
    assert [row["a"] for row in Tables(store.project).table(["a"])] == [1]
    assert not file.exists()


def test_lines_that_a_dead_reader_left_next_to_the_sealed_file_do_not_count_twice(store):
    run = store.run((at(), {"a": 1}))
    (file,) = lines(store, run)
    data = file.read_bytes()
    Tables(store.project).refresh()
    file.write_bytes(data)
    assert len(values(store)) == 1
    assert not file.exists()


def test_concurrent_readers_see_the_same(store):
    for k in range(8):
        store.run((at(), {"a": k}))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: Tables(store.project).table(["a"]).rows(), range(3)))
    assert [[row["a"] for row in rows] for rows in found] == [list(range(8))] * 3


def test_a_very_long_line_is_read(store):
    text = "é" * (9 << 20)
    store.run((at(), {"a": text, "b": 1}))
    assert [row["a"] for row in Tables(store.project).table(["a"])] == [text]


def test_a_sealed_file_of_a_newer_format_is_refused(store, monkeypatch):
    store.run((at(), {"a": 1}))
    monkeypatch.setattr(summary_module, "FORMAT", 4)
    with pytest.raises(StoreError, match="format 4"):
        Tables(store.project).table(["a"])


def test_a_process_with_the_number_of_a_sealed_file_gets_another_name(store):
    run = store.run((at(), {"a": 1}))
    assert Tables(store.project).loops_by_name()
    out = RecordFile(store.runs.folder(run), run, attempt=1)
    out.append(b"{", [("a", 2)])
    out.close()
    assert len(list(store.runs.folder(run).glob("records-*"))) == 2
    assert [row["a"] for row in Tables(store.project).table(["a"])] == [2]


@pytest.mark.parametrize("file", sorted(GOLD.glob("format-*.jsonl")), ids=lambda f: f.name)
def test_lines_of_every_past_format_are_sealed(file, tmp_path):
    copy = tmp_path / "records-1-0.jsonl"
    copy.write_bytes(file.read_bytes())
    duck = Duck(tmp_path)
    wanted = msgspec.json.decode(file.with_suffix(".expected.json").read_bytes())
    loaded = load(duck, [copy])
    assert loaded[0].summary.rows == len(wanted)
    (sealed,) = seal(duck, loaded)
    found = duck.execute(f"SELECT seq, name, time FROM read_parquet('{sealed}') ORDER BY seq")
    assert [list(row) for row in found.fetchall()] == [[row[0], row[2], row[4]] for row in wanted]


@pytest.mark.parametrize("file", sorted(GOLD.glob("format-*.parquet")), ids=lambda f: f.name)
def test_sealed_files_of_every_past_format_are_read(file, store):
    wanted = msgspec.json.decode(file.with_suffix(".expected.json").read_bytes())
    run = store.run()
    target = store.runs.folder(run) / "records-1-0.parquet"
    target.write_bytes(file.read_bytes())
    query = "SELECT seq, name, time FROM records ORDER BY seq"
    assert [list(row.values()) for row in Tables(store.project).sql(query)] == [
        [row[0], row[2], row[4]] for row in wanted
    ]


def test_records_have_a_place_in_the_source_from_format_3_on(store):
    run = store.run()
    for number in (2, 3):
        target = store.runs.folder(run) / f"records-{number}-0.parquet"
        target.write_bytes((GOLD / f"format-{number}.parquet").read_bytes())
    store.add(store.run(), (at(), {"a": 1}), close=False)
    query = "SELECT DISTINCT source, line FROM records WHERE line IS NOT NULL ORDER BY line"
    assert [tuple(row.values()) for row in Tables(store.project).sql(query)] == [
        ("train.py", 3),
        ("lib/steps.py", 17),
    ]


def test_files_that_are_not_sound_are_an_error_unless_cleaned(tmp_path):
    file = tmp_path / "records-1-0.jsonl"
    file.write_bytes(b'{"format":1,"run":"r"}\n{"s":0,"t":1.0,"n":["a"],"v":[1]}\nrubbish\n')
    with pytest.raises(DamagedError, match="unchanged"):
        load(Duck(tmp_path), [file])
    (found,) = load(Duck(tmp_path), [file], clean=True)
    assert (found.summary.rows, found.summary.damaged) == (1, 1)


def test_a_check_names_the_damaged_files_and_no_others(store):
    good = store.run((at(), {"a": 1}))
    sealed = store.run((at(), {"a": 2}))
    Tables(store.project).refresh()
    torn = store.run((at(), {"a": 3}), (at(), {"a": 4}))
    assert list(check_records(store.project)) == []
    (file,) = lines(store, torn)
    file.write_bytes(file.read_bytes().replace(b'{"s":0', b"rubbish"))
    (parquet,) = store.runs.folder(sealed).glob("*.parquet")
    data = parquet.read_bytes()
    parquet.write_bytes(data[: len(data) // 2])
    (store.runs.folder(good) / "run.json").write_bytes(b"{")
    found = "\n".join(check_records(store.project))
    assert found.count("\n") == 2
    for path in (file, parquet, store.runs.folder(good) / "run.json"):
        assert str(path) in found
