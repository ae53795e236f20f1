"""Rows come in the order of interest: several keys, both ways, rows without a value last."""

import math

import pytest

from rearview.errors import UsageError
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


def column(store, name, *names, **options):
    return [row[name] for row in Tables(store.project).table(names or [name], **options)]


def accuracies(store, *values, **options):
    calls = [(at(epoch=k), {"acc": v} if v is not None else {"x": 0}) for k, v in enumerate(values)]
    return store.run(*calls, **options)


def test_the_best_come_first(store):
    accuracies(store, 0.1, 0.9, 0.5)
    assert column(store, "acc", order="acc desc") == [0.9, 0.5, 0.1]
    assert column(store, "acc", order="acc DESC", limit=1) == [0.9]
    assert column(store, "acc", order="acc") == column(store, "acc", order="acc asc")
    assert column(store, "acc", order=["-acc"]) == [0.9, 0.5, 0.1]


@pytest.mark.parametrize("way", ["asc", "desc"])
def test_rows_without_a_value_come_last_both_ways(store, way):
    accuracies(store, 0.1, None, math.nan, 0.9)
    found = column(store, "acc", "acc", "x", order=f"acc {way}")
    assert found[:2] == ([0.1, 0.9] if way == "asc" else [0.9, 0.1])
    assert math.isnan(found[2]), "what is not a number comes behind all numbers"
    assert found[3] is None


def test_several_keys_in_one_text_or_in_several(store):
    a, b = accuracies(store, 0.5, 0.9), accuracies(store, 0.5, 0.7)
    expected = [(b, 0.5), (a, 0.5), (b, 0.7), (a, 0.9)]
    for order in ("acc, run desc", ["acc", "run desc"], ["acc asc", "-run"]):
        rows = Tables(store.project).table(["acc"], order=order)
        assert [(row["run"], row["acc"]) for row in rows] == expected


def test_equal_rows_keep_the_order_in_which_they_were_logged(store):
    accuracies(store, 0.5, 0.5, 0.5)
    assert column(store, "epoch", "acc", order="acc desc") == [0, 1, 2]


def test_columns_that_are_not_shown_order_too(store):
    a = accuracies(store, 0.1, args={"lr": 0.2})
    b = accuracies(store, 0.2, args={"lr": 0.1})
    assert column(store, "run", "acc", order="lr") == [b, a]
    store.run((at(epoch=0), {"acc": 0.3, "loss": 9.0}))
    assert column(store, "acc", order="loss desc, acc")[0] == 0.3


def test_loops_and_names_in_quotes_order(store):
    calls = [(at(epoch=k), {"val, acc desc": float(k % 3), "Loss": k}) for k in range(4)]
    store.run(*calls)
    odd = "val, acc desc"
    assert column(store, "epoch", odd, order=f'"{odd}" desc, epoch desc') == [2, 1, 3, 0]
    assert column(store, "epoch", odd, order=[odd, "epoch"]) == [0, 3, 1, 2]
    assert column(store, "epoch", odd, order="epoch desc") == [3, 2, 1, 0]
    assert column(store, "epoch", odd, order="loss desc") == [3, 2, 1, 0], "letters may be small"


def test_values_of_several_types_are_ordered_by_their_numbers_first(store):
    store.run(*[(at(epoch=k), {"mix": v}) for k, v in enumerate([10, "a", 9, "b"])])
    assert column(store, "mix", order="mix") == [9, 10, "a", "b"]


def test_an_unknown_key_names_the_nearest(store):
    accuracies(store, 0.1)
    with pytest.raises(UsageError, match=r"'axc'.*Did you mean acc") as error:
        column(store, "acc", order="axc desc")
    assert error.value.slug == "unknown-name"


@pytest.mark.parametrize("order", ["", "acc,,epoch", ",", "acc desc,"])
def test_an_order_that_cannot_be_read_says_how_to_write_one(store, order):
    accuracies(store, 0.1)
    with pytest.raises(UsageError, match='"acc desc, epoch"') as error:
        column(store, "acc", order=order)
    assert error.value.slug == "order"


def test_rows_are_not_ordered_by_a_loop_that_they_are_not_in(store):
    store.run((at(epoch=0), {"acc": 1}), (at(epoch=0, step=0), {"loss": 1}))
    with pytest.raises(UsageError, match="'step': they are not in that loop"):
        column(store, "acc", order="step")


def test_runs_are_ordered_by_last_values_arguments_and_facts(store):
    a = accuracies(store, 0.9, 0.1, args={"lr": 0.1})
    b = accuracies(store, 0.2, 0.8, args={"lr": 0.1})
    c = store.run((at(), {"other": 1}), args={"lr": 0.3})
    tables = Tables(store.project)
    assert tables.matching(None, "acc desc") == [b, a, c], "by the last value, none of it last"
    assert tables.matching(None, "lr desc, acc") == [c, a, b]
    assert tables.matching("lr < 0.2", "run desc") == [b, a]
    with pytest.raises(UsageError, match=r"'acd'.*acc"):
        tables.matching(None, "acd")
