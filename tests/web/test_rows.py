"""Filter, sort and group runs as the table of the page does."""

import math

import pytest

from rearview.errors import UsageError
from rearview.web.rows import Columns, Points, Query, Rows, Sort, completions, csv_lines, point_rows
from rearview.web.run_index import Index
from recorded import Recorded, at


@pytest.fixture
def grid(tmp_path):
    """Six runs: two rates, three seeds each; the loss is the rate plus a tenth of the seed."""
    made = Recorded(tmp_path)
    for rate in (0.1, 0.5):
        for seed in range(3):
            loss = rate + seed / 10
            made.run(
                *((at(epoch=e), {"loss": loss + 1 / (e + 1), "Loss": -loss}) for e in range(3)),
                args={"lr": rate, "seed": seed, "kind": "a" if seed else "b"},
            )
    index = Index(made.project)
    index.refresh()
    yield made, index
    index.close()


def answer(index, **query):
    return Rows(index, Columns.of(index), Query(**query)).answer()


def test_last_lowest_highest_and_mean_of_a_name_are_columns(grid):
    _, index = grid
    keys = ["last:loss", "min:loss", "max:loss", "mean:loss", "count:loss"]
    found = answer(index, columns=keys, where="lr = 0.1 and seed = 0")
    [[_, last, low, high, mean, count]] = found["rows"]
    assert (last, low, high, count) == (0.1 + 1 / 3, 0.1 + 1 / 3, 1.1, 3)
    assert math.isclose(mean, 0.1 + (1 + 1 / 2 + 1 / 3) / 3)


def test_names_that_differ_in_case_are_two_columns(grid):
    _, index = grid
    found = answer(index, columns=["last:loss", "last:Loss"], sort=[Sort("last:loss")], limit=1)
    assert found["rows"][0][1:] == [0.1 + 1 / 3, -0.1]


def test_runs_are_filtered_by_sql_over_parameters_and_results(grid):
    _, index = grid
    found = answer(index, columns=["arg:lr"], where="lr > 0.2 AND kind = 'a'")
    assert found["total"] == 2
    assert answer(index, where='"loss.max" > 1.6')["total"] == 1


def test_empty_values_come_last_whichever_way_is_sorted(grid):
    made, index = grid
    made.run((at(epoch=0), {"other": 1.0}))
    index.refresh()
    for desc in (False, True):
        found = answer(index, columns=["last:loss"], sort=[Sort("last:loss", desc)])
        assert found["rows"][-1][1] is None


def test_groups_have_the_mean_and_the_deviation_over_seeds(grid):
    _, index = grid
    found = answer(index, columns=["last:loss"], group=["arg:lr"])
    assert [one["values"] for one in found["groups"]] == [[0.1], [0.5]]
    mean, deviation = found["groups"][0]["cells"][0]
    assert math.isclose(mean, 0.2 + 1 / 3)
    assert math.isclose(deviation, math.sqrt(2 / 300))
    inside = answer(index, columns=["arg:seed"], group=["arg:lr"], within={"arg:lr": 0.5})
    assert inside["total"] == 3


def test_a_search_takes_signs_of_sql_as_they_are(grid):
    _, index = grid
    assert answer(index, search="train.py")["total"] == 6
    assert answer(index, search="%")["total"] == 0
    assert answer(index, search="' OR 1=1 --")["total"] == 0


def test_runs_are_found_by_a_tag_once_each(grid):
    made, index = grid
    run = index.runs()[0].id
    made.runs.append_event(run, "tag", {"tags": ["a", "b"]})
    index.refresh()
    assert answer(index, where="tag IS NOT NULL")["rows"] == [[run]]
    assert answer(index, columns=["fact:tags"], where="tag = 'b'")["rows"] == [[run, ["a", "b"]]]


def test_a_wrong_filter_is_reported_in_the_words_of_the_filter(grid):
    _, index = grid
    with pytest.raises(UsageError, match="lr > and"):
        answer(index, where="lr > and")
    with pytest.raises(UsageError, match="nonsense"):
        answer(index, where="nonsense > 1")


def test_nan_is_distinguished_from_an_empty_cell(grid):
    made, index = grid
    made.run((at(epoch=0), {"loss": float("nan")}))
    index.refresh()
    found = answer(index, columns=["last:loss", "last:other"], limit=1)
    assert found["rows"][0][1:] == ["NaN", None]


def test_completion_offers_columns_that_begin_with_the_word(grid):
    _, index = grid
    found = completions(Columns.of(index), "lr > 1 and se")
    assert found[0] == {"insert": "seed", "label": "seed", "what": "parameter"}


def test_csv_has_every_row(grid):
    _, index = grid
    text = b"".join(csv_lines(index, Columns.of(index), Query(columns=["arg:lr"]), 100)).decode()
    assert text.splitlines()[0] == "run,lr"
    assert len(text.splitlines()) == 7


def test_a_name_that_can_be_filled_has_a_row_for_every_point(grid):
    _, index = grid
    runs = [index.runs()[0].id]
    found = point_rows(index, Points(["loss", "norm"], runs), [("norm", ("epoch",))])
    assert found["columns"] == ["run", "epoch", "loss", "norm"]
    assert found["fillable"] == ["norm"]
    assert [row[1] for row in found["rows"]] == [0, 1, 2]
    assert all(row[3] is None for row in found["rows"])
