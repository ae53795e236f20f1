"""`--at` means iterations by the numbers people know them by, half-open as slices."""

import pytest

from rearview.errors import UsageError
from rearview.plan.facts import At, parse_at


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch=3", [At("epoch", 3, None, single=True)]),
        ("epoch=3:5", [At("epoch", 3, 5)]),
        ("step=1000:1100", [At("step", 1000, 1100)]),
        ("epoch=3/step=10:20", [At("epoch", 3, None, single=True), At("step", 10, 20)]),
        (" epoch = :5 ", [At("epoch", None, 5)]),
        ("epoch=7:", [At("epoch", 7, None)]),
        ("epoch=:", [At("epoch", None, None)]),
        ("lr=0.1", [At("lr", 0.1, None, single=True)]),
        ("fold=left", [At("fold", "left", None, single=True)]),
    ],
)
def test_forms_are_read(text, expected):
    assert list(parse_at(text)) == expected
    assert parse_at("/".join(map(str, expected))) == tuple(expected)


@pytest.mark.parametrize(
    "text", ["", "epoch", "epoch=", "=3", "epoch=1:2:3", "a=1//b=2", "a=1/a=2"]
)
def test_a_malformed_selection_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match=r"Write|Name each") as caught:
        parse_at(text)
    assert caught.value.slug == "at-form"


def test_an_empty_range_says_how_to_mean_one_iteration():
    with pytest.raises(UsageError, match="write `epoch=5`") as caught:
        parse_at("epoch=5:5")
    assert caught.value.slug == "at-empty"


def test_values_are_meant_where_the_loop_has_them_and_indices_elsewhere():
    at = At("epoch", 2, 4)
    assert at.indices(10) == [2, 3]
    assert at.indices(3) == [2]
    assert at.indices(4, [1, 2, 3, 4]) == [1, 2]
    assert At("epoch", 4, None, single=True).indices(4, [1, 2, 3, 4]) == [3]
    assert At("epoch", 4, None, single=True).indices(4) == []
    assert At("fold", "a", None, single=True).indices(2, ["b", "a"]) == [1]
    assert At("fold", 1, 3).indices(2, ["b", "a"]) == []
    assert At("lr", None, 0.15).indices(2, [0.1, 0.2]) == [0]
