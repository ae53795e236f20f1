"""All that FlorDB's relational model names can be asked for, and every example of docs/schema.md has an answer."""

import re

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.store.tables import schema

pytestmark = pytest.mark.usefixtures("warm_start")

FIRST = """\
import argparse
import time
import numpy
import rearview
from steps import train_step

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.5)
lr = parser.parse_args().lr
rearview.log("seed", 7)
rearview.log("counts", numpy.arange(3))
weight = 1.0
for epoch in range(4):
    for step in range(3):
        weight = train_step(weight, lr)
        time.sleep(0.005)
    rearview.log({"loss": weight})
"""
STEPS = """\
import rearview


def train_step(weight, lr):
    weight = weight * lr + 1
    rearview.log(
        "weight",
        weight,
    )
    return weight
"""
SECOND = FIRST.replace("weight = 1.0", "weight = 2.0")
PROBED = SECOND.replace(
    '    rearview.log({"loss"', '    rearview.log("square", weight**2)\n    rearview.log({"loss"'
)


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for text in (FIRST, SECOND):
        write(folder, train=text, steps=STEPS)
        assert recorded(folder, "train.py", "--lr", "0.25").code == 0
    write(folder, train=PROBED)
    found = history(folder)
    assert found.backfill(["square"], workers=1).verdict == "exact"
    return found


@pytest.mark.parametrize("name", schema.EXAMPLES)
def test_the_example_of_every_relation_has_an_answer(past, name):
    assert past.sql(schema.EXAMPLES[name]).rows()


def test_every_relation_has_an_example():
    assert schema.EXAMPLES.keys() == {*schema.TABLES, *schema.PIVOTS} - {"pivot_N"}


@pytest.mark.parametrize("symbol", schema.PAPER)
def test_every_symbol_of_the_paper_has_a_column_with_values(past, symbol):
    for column in schema.PAPER[symbol][0].split(", "):
        table, name = column.split(".")
        assert name in schema.TABLES[table][1]
        assert past.sql(f"select count({name}) as n from {table}").rows()[0]["n"], column


def test_a_record_knows_the_statement_that_logged_it(past):
    rows = past.sql(schema.EXAMPLES["records"]).rows()
    statements = {(row["name"], row["source"]): row["statement"] for row in rows}
    assert statements == {
        ("seed", "train.py"): 'rearview.log("seed", 7)',
        ("counts", "train.py"): 'rearview.log("counts", numpy.arange(3))',
        ("loss", "train.py"): 'rearview.log({"loss": weight})',
        ("weight", "steps.py"): "rearview.log(",
        ("square", "train.py"): 'rearview.log("square", weight**2)',
    }
    assert {row["name"]: row["level"] for row in rows} == {
        "seed": "setup",
        "counts": "setup",
        "weight": "inner",
        "loss": "outer",
        "square": "outer",
    }


def test_versions_know_their_parents(past):
    first, second = (run.version for run in past.runs())
    rows = past.sql("select * from versions").rows()
    assert {(row["run"] is None, row["version"], row["parent"]) for row in rows} >= {
        (False, first, None),
        (False, second, first),
    }
    derived = {row["version"]: row["parent"] for row in rows if row["run"] is None}
    replayed = past.sql("select distinct version from replays").rows()
    assert {derived[row["version"]] for row in replayed} == {first, second}


def test_source_texts_are_those_of_the_version(past):
    rows = past.sql("select version, text from files where path = 'train.py'").rows()
    texts = {row["version"]: row["text"] for row in rows}
    first, second = (run.version for run in past.runs())
    assert (texts[first], texts[second]) == (FIRST, SECOND)
    frame = past.sql("select * from files where path = 'steps.py'").pandas()
    assert set(frame["text"]) == {STEPS}


def test_the_project_is_named(past):
    (row,) = past.sql(
        "select distinct p.name, p.project = r.project as same from projects p, runs r"
    )
    assert row == {"name": past.project.root.name, "same": True}


def test_the_bytes_of_a_stored_value_have_a_name(past):
    (row,) = past.sql("select distinct value_oid(text) as oid from records where name = 'counts'")
    assert row["oid"]
    (row,) = past.sql("select any_value(text) as counts from records where name = 'counts'")
    assert row["counts"].tolist() == [0, 1, 2]


def test_the_page_shows_every_example():
    shown = re.findall(r"```sql\n(.*?)\n```", schema.markdown(), re.DOTALL)
    assert [" ".join(sql.split("\n")) for sql in shown] == list(schema.EXAMPLES.values())
