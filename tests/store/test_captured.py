"""Captured records in tables: values that a run did not log with Rearview."""

import pytest

from rearview.store.tables.answer_queries import Tables
from recorded import Recorded, at


@pytest.fixture
def made(tmp_path):
    return Recorded(tmp_path)


def rows(made, *names, **options):
    return Tables(made.project).table(names, **options).rows()


def test_a_variable_is_a_column_with_its_origin(made):
    run = made.run()
    made.add(run, (at(epoch=0), {"loss": 0.5}), (at(epoch=1), {"loss": 0.25}), origin="$assigned")
    assert rows(made, "loss", origins=True) == [
        {"run": run, "epoch": 0, "loss": 0.5, "loss.origin": "assigned"},
        {"run": run, "epoch": 1, "loss": 0.25, "loss.origin": "assigned"},
    ]


def test_logged_values_win_over_captured_values_of_the_same_name(made):
    run = made.run((at(epoch=0), {"loss": 0.5}))
    made.add(run, (at(epoch=0, step=3), {"loss": 9.0}), origin="$assigned")
    made.add(run, (at(epoch=0), {"loss": 8.0}), origin="$printed")
    assert rows(made, "loss") == [{"run": run, "epoch": 0, "loss": 0.5}]


def test_a_probe_that_was_filled_wins_over_captured_values_at_its_points(made):
    run = made.run()
    points = [(at(epoch=k), {"loss": float(k)}) for k in range(3)]
    made.add(run, *points, origin="$assigned", attempt=1)
    made.replay(run, "r1", (at(epoch=1), {"loss": 10.0}))
    found = rows(made, "loss", origins=True)
    assert [(row["loss"], row["loss.origin"]) for row in found] == [
        (0.0, "assigned"),
        (10.0, "replayed"),
        (2.0, "assigned"),
    ]


def test_all_values_of_a_captured_name_come_from_the_same_origin(made):
    run = made.run()
    made.add(run, (at(epoch=0), {"loss": 1.0, "acc": 0.5}), origin="$printed")
    made.add(run, (at(epoch=0), {"loss": 2.0}), (at(epoch=1), {"loss": 3.0}), origin="$assigned")
    made.add(run, (at(epoch=0, step=4), {"loss": 4.0}), origin="$wandb")
    found = rows(made, "loss", "acc", origins=True)
    assert [(r["step"], r["loss"], r["loss.origin"]) for r in found] == [(4, 4.0, "wandb")]
    assert found[0]["acc.origin"] == "printed"


def test_captured_values_are_shown_while_the_run_is_in_progress(made):
    run = made.run(over=False)
    made.add(run, (at(epoch=0), {"loss": 2.0}), origin="$assigned", close=False)
    first = made.open
    made.add(run, (at(epoch=0), {"loss": 1.0, "acc": 0.5}), origin="$printed", close=False)
    assert rows(made, "loss", "acc") == [{"run": run, "epoch": 0, "loss": 2.0, "acc": 0.5}]
    first.close()
    made.open.close()


def test_captured_columns_are_left_out_of_a_table_of_runs_that_all_log(made):
    run = made.run((at(epoch=0), {"acc": 0.9}))
    made.add(run, (at(epoch=0), {"total": 2.0}), origin="$assigned")
    assert rows(made) == [{"run": run, "epoch": 0, "acc": 0.9}]
    assert rows(made, "total") == [{"run": run, "epoch": 0, "total": 2.0}]
    other = made.run()
    made.add(other, (at(epoch=0), {"total": 3.0}), origin="$assigned")
    assert {"acc", "total"} <= rows(made)[0].keys()


def test_a_table_without_names_shows_captured_columns_of_outermost_loops_first(made):
    run = made.run()
    made.add(run, (at(epoch=0), {"total": 2.0}), origin="$assigned")
    made.add(run, (at(epoch=0, step=1), {"batch_loss": 2.0}), origin="$printed")
    assert rows(made) == [{"run": run, "epoch": 0, "total": 2.0}]
    deep = Recorded(made.project.root / "deep")
    run = deep.run()
    deep.add(run, (at(epoch=0, step=1), {"batch_loss": 2.0}), origin="$printed")
    assert rows(deep) == [{"run": run, "epoch": 0, "step": 1, "batch_loss": 2.0}]


def test_a_name_in_the_source_stays_virtual_where_only_captured_values_are_there(made):
    run = made.run()
    made.add(run, (at(epoch=0), {"loss": 2.0}), origin="$assigned")
    found = rows(made, "loss", "norm", fillable=[("loss", ("epoch",)), ("norm", ("epoch",))])
    assert [(row["epoch"], row["loss"], row["norm"]) for row in found] == [(0, 2.0, None)]
    sql = Tables(made.project).sql("SELECT origin, replay FROM records").rows()
    assert sql == [{"origin": "assigned", "replay": None}]


def test_long_captured_runs_are_pivoted_once_and_alike(made):
    run = made.run()
    points = [(at(epoch=k), {"loss": float(k), "acc": 1.0}) for k in range(4000)]
    made.add(run, *points, origin="$assigned")
    made.add(run, *((p, {"loss": -1.0, "seen": 1.0}) for p, _ in points), origin="$printed")
    found = rows(made, "loss", "seen")
    assert len(found) == 4000
    assert found[-1] == {"run": run, "epoch": 3999, "loss": 3999.0, "seen": 1.0}
