import json
import math

import pytest

from fakehistory import a_run
from rearview._history import Refusal
from rearview.model import Status
from recorded import Recorded, at


def test_runs_are_listed_oldest_first(command, past):
    _, out, _ = command("runs")
    lines = out.splitlines()
    assert lines[0].split() == ["run", "status", "started", "took", "command"]
    assert [line.split()[0] for line in lines[1:]] == [run.id for run in past.found]
    assert "train.py --lr 0.1" in lines[1]


def test_a_project_without_runs_is_reported_on_stderr(command, past):
    past.found = []
    code, out, err = command("runs")
    assert (code, out) == (0, "")
    assert "rearview run" in err


def test_a_run_that_failed_shows_its_status(command, past):
    past.found = [a_run(1, Status.FAILED, exit_code=3)]
    assert "failed" in command("runs")[1]


def test_show_prints_the_facts_of_a_run(command, past):
    code, out, _ = command("show", "-1")
    assert code == 0
    assert past.asked == [("show", "-1", {})]
    for told in ("loss (20 records)", "epoch (20 iterations)", "a generator", "exact: 20 states"):
        assert told in out
    assert "2.0 MB of state, 500.0 kB stored" in out
    for cost in (
        "2.00% beside 1 min 0 s",
        "500 ms blocking",
        "20 saved",
        "the disk is busy",
        "odd: 1",
    ):
        assert cost in out


def test_show_as_json(command, past):
    told = json.loads(command("show", "--json")[1])
    assert told["run"]["id"] == past.found[0].id
    assert told["names"] == {"loss": 20}


def test_a_table_as_json_round_trips_floats_and_never_lies(command, past):
    code, out, _ = command("table", "loss", "--format", "json")
    assert code == 0
    assert json.loads(out) == [
        {"run": "a", "epoch": 0, "loss": 0.1 + 0.2},
        {"run": "a", "epoch": 1, "loss": "NaN"},
        {"run": "a", "epoch": 2, "loss": None},
    ]


def test_an_empty_table_is_an_empty_list(command, past):
    past.rows = ()
    assert json.loads(command("table", "loss", "--format", "json")[1]) == []


def test_a_table_as_csv_keeps_every_digit(command, past):
    _, out, _ = command("table", "loss", "-f", "csv")
    assert out == f"run,epoch,loss\na,0,{0.1 + 0.2!r}\na,1,NaN\na,2,\n"


def test_a_table_as_markdown(command, past):
    _, out, _ = command("table", "-f", "markdown")
    assert out.splitlines()[:3] == ["| run | epoch | loss |", "|---|---|---|", "| a | 0 | 0.3 |"]


def test_a_table_for_people_is_aligned(command, past):
    past.rows = (("a", 0, 0.5), ("b", 10, 0.25))
    assert command("table")[1] == "run  epoch  loss\na        0   0.5\nb       10  0.25\n"


def test_a_long_table_for_people_says_how_much_more_there_is(command, past):
    past.rows = tuple(("a", n, 0.5) for n in range(1000))
    _, out, err = command("table")
    assert len(out.splitlines()) == 201
    assert "800 rows more" in err


def test_all_options_of_table_are_passed_on(command, past):
    asked = ("table", "loss", "acc", "--where", "acc < 1", "--runs", "-1", "--limit", "5")
    command(*asked, "--unproved", "--order-by", "acc desc, epoch", "--interpolate")
    assert past.asked == [
        (
            "table",
            ("loss", "acc"),
            {
                "where": "acc < 1",
                "runs": ["-1"],
                "limit": 5,
                "order": ("acc desc, epoch",),
                "unproved": True,
                "interpolate": True,
            },
        )
    ]


def test_sql_passes_the_query(command, past):
    command("sql", "select 1", "-f", "json")
    assert past.asked == [("sql", "select 1", {"unproved": False})]


@pytest.mark.parametrize(("text", "code"), [("", 0), ("--- a\n+++ b\n+x = 1\n", 1)])
def test_diff_ends_like_diff(command, past, text, code):
    past.difference = text
    assert command("diff", "-2")[:2] == (code, text)
    assert past.asked == [("diff", ("-2", "worktree"), {})]


def test_infinities_have_names(command, past):
    past.rows = (("a", 0, math.inf), ("a", 1, -math.inf))
    rows = json.loads(command("table", "-f", "json")[1])
    assert [row["loss"] for row in rows] == ["Infinity", "-Infinity"]


def test_an_empty_column_has_a_note_with_its_missing_cells_and_their_cost(command, past):
    past.virtual = ("g",)
    code, _, err = command("table", "loss", "g")
    assert code == 0
    assert "g: 5 cells missing, about 4.0 s of computing to fill: `rearview backfill g`." in err
    past.refusals, past.segments = [Refusal("r", "no place")], ()
    assert "g: no values yet; 1 run refused." in command("table", "g")[2]
    assert command("table", "loss")[2] == ""
    assert command("table", "g", "--format", "json")[2] == ""


@pytest.fixture
def gaps(tmp_path, monkeypatch):
    """A run that logged acc in its first and third epoch only."""
    monkeypatch.chdir(tmp_path)
    Recorded(tmp_path).run(
        (at(epoch=0), {"loss": 3.0, "acc": 0.5}),
        (at(epoch=1), {"loss": 2.0}),
        (at(epoch=2), {"loss": 1.0, "acc": 1.0}),
    )


def test_interpolated_values_carry_a_sign_and_a_legend(command, gaps):
    for form in ("table", "markdown"):
        code, out, _ = command("table", "loss", "acc", "--interpolate", "-f", form)
        assert code == 0
        assert out.count("0.75~") == 1
        assert "~ interpolated: never logged" in out
        assert "interpolated" not in out.splitlines()[0], "the sign needs no column"
    plain = command("table", "loss", "acc")[1]
    assert "~" not in plain


def test_interpolated_values_are_named_in_a_column_of_csv_and_json(command, gaps):
    rows = json.loads(command("table", "loss", "acc", "--interpolate", "-f", "json")[1])
    assert [(row["acc"], row["interpolated"]) for row in rows] == [
        (0.5, None),
        (0.75, "acc"),
        (1.0, None),
    ]
    lines = command("table", "loss", "acc", "--interpolate", "-f", "csv")[1].splitlines()
    assert [line.rpartition(",")[2] for line in lines] == ["interpolated", "", "acc", ""]


def test_rows_come_in_the_order_asked_for(command, gaps):
    rows = json.loads(command("table", "loss", "acc", "--order-by", "acc desc", "-f", "json")[1])
    assert [row["acc"] for row in rows] == [1.0, 0.5, None]
    code, _, err = command("table", "acc", "--order-by", "axc")
    assert (code, "Did you mean acc" in err) == (2, True)


def test_runs_come_in_the_order_asked_for(command, gaps, tmp_path):
    (first,) = (run["id"] for run in json.loads(command("runs", "--json")[1]))
    best = Recorded(tmp_path).run((at(epoch=0), {"acc": 2.0}))
    none = Recorded(tmp_path).run((at(epoch=0), {"other": 2.0}))
    listed = json.loads(command("runs", "--json", "--order-by", "acc desc")[1])
    assert [run["id"] for run in listed] == [best, first, none]
    top = json.loads(command("runs", "--json", "--order-by", "acc desc", "-n", "1")[1])
    assert [run["id"] for run in top] == [best]
