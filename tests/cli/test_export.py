"""A table as a file: whole, the same each time, or not at all."""

import csv
import json

import duckdb
import pytest

from recorded import Recorded, at


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = Recorded(tmp_path)
    return project.run(*((at(epoch=k), {"acc": k / 10, "text": f"é{k}"}) for k in range(3)))


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "md", "parquet"])
def test_the_same_question_writes_the_same_bytes(command, run, tmp_path, suffix):
    file = tmp_path / f"out.{suffix}"
    assert command("export", str(file), "acc")[:2] == (0, f"wrote 3 rows to {file}\n")
    first = file.read_bytes()
    assert command("export", str(file), "acc")[0] == 0
    assert file.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".out")] == []


def test_every_format_holds_the_values(command, run, tmp_path):
    for suffix in ("csv", "json", "jsonl", "parquet"):
        command("export", f"out.{suffix}", "acc", "text")
    expected = [0.0, 0.1, 0.2]
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert [float(row["acc"]) for row in csv.DictReader(file)] == expected
    assert [r["acc"] for r in json.loads((tmp_path / "out.json").read_text("utf-8"))] == expected
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["é0", "é1", "é2"]
    rows = duckdb.sql(f"select acc from '{tmp_path}/out.parquet' order by epoch").fetchall()
    assert [value for (value,) in rows] == expected


def test_a_suffix_that_says_nothing_is_refused(command, run):
    code, _, err = command("export", "out.xls")
    assert code == 2
    assert ".parquet" in err


def test_a_file_that_cannot_be_written_is_explained(command, run):
    code, _, err = command("export", "no/such/folder/out.csv")
    assert code == 2
    assert "file-unwritable" in err


def test_a_failed_question_does_not_change_the_file(command, run, tmp_path):
    (tmp_path / "out.csv").write_text("before")
    assert command("export", "out.csv", "nothing")[0] == 2
    assert (tmp_path / "out.csv").read_text() == "before"
