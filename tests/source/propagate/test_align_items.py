from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rearview.source.propagate import match as room
from rearview.source.propagate.match import align_items

ITEMS = st.lists(st.integers(0, 5), max_size=30)


@given(ITEMS, ITEMS)
def test_pairs_are_equal_items_in_rising_order(firsts, seconds):
    pairs = align_items(firsts, seconds)
    assert all(firsts[i] == seconds[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


@given(ITEMS)
def test_a_sequence_aligns_with_itself_whole(items):
    assert align_items(items, items) == [(k, k) for k in range(len(items))]


@given(ITEMS, st.integers(0, 29))
def test_one_item_taken_out_leaves_the_rest_aligned(items, at):
    without = items[:at] + items[at + 1 :]
    assert len(align_items(items, without)) == len(without)


def test_long_sequences_of_repeated_items_do_not_take_quadratic_room(monkeypatch):
    monkeypatch.setattr(room, "MAX_TABLE", 10)
    assert align_items([1, 1, 2, 1, 1, 3], [1, 1, 3, 3, 1, 1]) == [(0, 0), (1, 1)]
