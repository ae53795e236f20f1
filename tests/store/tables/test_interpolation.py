"""Numbers that are missing between two known ones are filled in when asked for, and marked."""

import math

import pytest

from rearview.store.tables import read_record_files
from rearview.store.tables.answer_queries import Tables
from recorded import Recorded, at


@pytest.fixture(params=["grouped", "pivoted before"])
def store(tmp_path, request, monkeypatch):
    """Every table is asked for in both ways that it can be made."""
    monkeypatch.setattr(
        read_record_files, "ENOUGH", 0 if request.param == "pivoted before" else 10**9
    )
    return Recorded(tmp_path)


def epochs(**columns):
    """Yield one call per epoch with the values of each column; None: not logged there."""
    for k, values in enumerate(zip(*columns.values(), strict=True)):
        named = dict(zip(columns, values, strict=True))
        yield at(epoch=k), {name: value for name, value in named.items() if value is not None}


def filled(store, *names, name=None, **options):
    """Return the values of a column, and in which rows it was interpolated."""
    name = name or names[-1]
    table = Tables(store.project).table(names, interpolate=True, **options)
    marked = [name in (row["interpolated"] or "").split(", ") for row in table]
    return [row[name] for row in table], marked


def test_interpolated_values_lie_on_a_straight_line(store):
    store.run(*epochs(loss=[9, 8, 7, 6, 5], acc=[0.0, None, None, None, 1.0]))
    assert filled(store, "loss", "acc") == (
        [0.0, 0.25, 0.5, 0.75, 1.0],
        [False, True, True, True, False],
    )


def test_nothing_is_filled_unless_it_is_asked_for(store):
    store.run(*epochs(loss=[9, 8, 7], acc=[0.0, None, 1.0]))
    table = Tables(store.project).table(["loss", "acc"])
    assert "interpolated" not in table.columns
    assert [row["acc"] for row in table] == [0.0, None, 1.0]


def test_nothing_is_extrapolated(store):
    store.run(*epochs(loss=[9, 8, 7, 6], acc=[None, 0.5, None, None]))
    assert filled(store, "loss", "acc") == ([None, 0.5, None, None], [False] * 4)


def test_distances_are_counted_in_iterations_also_where_rows_are_missing(store):
    store.run(
        (at(epoch=0), {"acc": 0.0, "loss": 1.0}),
        (at(epoch=3), {"loss": 1.0}),
        (at(epoch=4), {"acc": 1.0, "loss": 1.0}),
    )
    assert filled(store, "loss", "acc")[0] == [0.0, 0.75, 1.0]


def test_runs_and_executions_of_an_inner_loop_are_kept_apart(store):
    for _ in range(2):
        store.run(
            *(
                (at(epoch=i, step=j), {"x": 1} | ({"loss": float(i)} if j != 1 else {}))
                for i in range(2)
                for j in range(3)
            )
        )
    values, marks = filled(store, "x", "loss")
    assert values == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 2
    assert marks == [False, True, False] * 4
    store.run((at(epoch=0), {"acc": 1.0}), (at(epoch=1), {"loss": 1.0}))
    store.run((at(epoch=2), {"acc": 1.0}))
    assert not any(filled(store, "acc", name="acc")[1])


def test_the_end_of_one_inner_loop_is_not_joined_with_the_start_of_the_next(store):
    store.run(
        (at(epoch=0, step=0), {"x": 0, "loss": 0.0}),
        (at(epoch=0, step=1), {"x": 0}),
        (at(epoch=1, step=0), {"x": 0}),
        (at(epoch=1, step=1), {"x": 0, "loss": 1.0}),
    )
    assert filled(store, "x", "loss") == ([0.0, None, None, 1.0], [False] * 4)


def test_an_outer_value_is_filled_on_all_inner_rows(store):
    calls = [(at(epoch=i, step=j), {"loss": 1.0}) for i in range(3) for j in range(2)]
    store.run(*calls, (at(epoch=0), {"acc": 0.0}), (at(epoch=2), {"acc": 1.0}))
    values, marks = filled(store, "loss", "acc")
    assert values == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert marks == [False, False, True, True, False, False]


def test_whole_numbers_are_filled_with_fractions_and_large_ones_stay_exact(store):
    store.run(*epochs(x=[1, 1, 1], hits=[1, None, 2], big=[2**60 + 1, None, 2**60 + 3]))
    assert filled(store, "x", "hits")[0] == [1.0, 1.5, 2.0]
    assert filled(store, "x", "big") == ([2**60 + 1, None, 2**60 + 3], [False] * 3)


def test_texts_and_values_that_are_not_finite_are_not_interpolated(store):
    store.run(
        *epochs(
            x=[1, 1, 1, 1],
            word=["a", None, "b", "c"],
            bad=[math.inf, None, 1.0, 2.0],
            nan=[1.0, math.nan, None, 3.0],
        )
    )
    assert filled(store, "x", "word")[0] == ["a", None, "b", "c"]
    assert filled(store, "x", "bad")[0][1] is None
    assert filled(store, "x", "nan")[0][2] is None


def test_a_condition_does_not_hide_the_values_that_are_needed(store):
    store.run(*epochs(x=[1, 1, 1], acc=[0.0, None, 1.0]))
    assert filled(store, "x", "acc", where="epoch = 1") == ([0.5], [True])
    assert filled(store, "x", "acc", where="acc BETWEEN 0.4 AND 0.6") == ([0.5], [True])
    assert filled(store, "x", "acc", where="interpolated IS NOT NULL") == ([0.5], [True])
    assert filled(store, "x", "acc", limit=2)[0] == [0.0, 0.5]
    assert filled(store, "x", "acc", order="acc desc")[0] == [1.0, 0.5, 0.0]


def test_interpolation_uses_the_last_of_several_values_at_a_point(store):
    store.run(
        (at(epoch=0), [("acc", 5.0), ("acc", 0.0), ("x", 1), ("x", 2)]),
        (at(epoch=1), [("x", 1), ("x", 2)]),
        (at(epoch=2), [("acc", 5.0), ("acc", 1.0), ("x", 1), ("x", 2), ("x", 3)]),
    )
    values, marks = filled(store, "x", "acc")
    assert values == [5.0, 0.0, 0.5, 0.5, 5.0, 1.0, None]
    assert marks == [False, False, True, True, False, False, False]


def test_cells_that_a_backfill_has_not_come_to_are_filled_and_replayed_ones_hold(store):
    run = store.run(*epochs(loss=[1.0, 1.0, 1.0, 1.0]))
    store.replay(run, "a", (at(epoch=0), {"norm": 0.0}), (at(epoch=2), {"norm": 4.0}), proved=False)
    table = Tables(store.project).table(
        ["loss", "norm"], interpolate=True, fillable=[("norm", ["epoch"])]
    )
    assert [row["norm"] for row in table] == [0.0, 2.0, 4.0, None]
    assert [row["unproved"] for row in table] == ["norm", None, "norm", None]
    assert [row["interpolated"] for row in table] == [None, "norm", None, None]
    replayed = Tables(store.project).table(["norm"], interpolate=True, origins=True)
    assert [row["norm.origin"] for row in replayed] == ["unproved", "unproved"]


def test_every_form_of_a_table_has_the_marks(store, tmp_path):
    pytest.importorskip("pyarrow")
    store.run(*epochs(loss=[9, 8, 7], acc=[0.0, None, 1.0], interpolated=[1, 1, 1]))
    table = Tables(store.project).table(["loss", "acc"], interpolate=True)
    expected = [None, "acc", None]
    assert table.arrow()["interpolated"].to_pylist() == expected
    assert table.polars()["interpolated"].to_list() == expected
    assert table.pandas()["interpolated"].isna().tolist() == [True, False, True]
    assert "interpolated" in repr(table)
    every = Tables(store.project).table(interpolate=True)
    assert every.interpolated == "interpolated_", "a logged name keeps its column"


def test_origins_say_interpolated(store):
    store.run(*epochs(loss=[9, 8, 7], acc=[0.0, None, 1.0]))
    table = Tables(store.project).table(["loss", "acc"], interpolate=True, origins=True)
    assert [row["acc.origin"] for row in table] == ["recorded", "interpolated", "recorded"]
