"""The tree of versions is replayed in an order that nothing published beats, with a proved gap."""

import heapq
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.errors import PlanError
from rearview.plan.multiversion import dynamic, order
from rearview.plan.published import depth_first_cost, lfu, parent_choice, prp, walk
from rearview.plan.search import search
from rearview.plan.tree import START, Cell, Do, Tree, check, merge


def cells(*pairs, **more):
    return [Cell(f"c{i}", f"l{i}", float(s), z, **more) for i, (s, z) in enumerate(pairs)]


FORK = Tree.of([START, 0, 0], cells((10, 5), (1, 5), (1, 5)))


@st.composite
def trees(draw, most=7, *, costs=False, exists=True):
    count = draw(st.integers(1, most))
    parent = [START] + [draw(st.integers(START if i > 3 else 0, i - 1)) for i in range(1, count)]
    cost = st.integers(0, 3).map(float) if costs else st.just(0.0)
    exists = costs and exists
    made = [
        Cell(
            f"c{i}", "", float(draw(st.integers(0, 20))), draw(st.integers(1, 9)),
            save=draw(cost), load=draw(cost), kept=exists and draw(st.integers(0, 5)) == 0,
        )
        for i in range(count)
    ]  # fmt: skip
    return Tree.of(parent, made, start=draw(cost))


def brute(tree, room):
    """Least seconds over every order of leaves, every state to begin from, every keeping."""
    always = {n for n, cell in enumerate(tree.cells) if cell.kept}
    inner = [n for n in range(len(tree)) if tree.children[n]]
    start = (frozenset(tree.leaves), frozenset())
    best = {start: 0.0}
    heap = [(0.0, 0, start)]
    number = 0
    while heap:
        spent, _, state = heapq.heappop(heap)
        if spent > best[state]:
            continue
        left, held = state
        if not left:
            return spent
        for leaf in left:
            path = tree.path(START, leaf)
            for near in [START, *(n for n in path[:-1] if n in held | always)]:
                cost = spent + tree.load(near) + tree.between(near, leaf)
                passed = [n for n in tree.path(near, leaf)[:-1] if n in inner and n not in always]
                pool = held | set(passed)
                for size in range(len(pool) + 1):
                    for chosen in combinations(sorted(pool), size):
                        if sum(tree.cells[n].size for n in chosen) > room:
                            continue
                        more = sum(tree.cells[n].save for n in chosen if n not in held)
                        then = (left - {leaf}, frozenset(chosen))
                        if cost + more < best.get(then, float("inf")):
                            best[then] = cost + more
                            number += 1
                            heapq.heappush(heap, (cost + more, number, then))
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 20))
def test_the_order_is_the_best_there_is(tree, room):
    found = order(tree, room)
    assert found.seconds == pytest.approx(brute(tree, room))
    assert found.gap == pytest.approx(0.0)
    assert check(tree, found.steps, room) == pytest.approx(found.seconds)


@settings(max_examples=100, deadline=None)
@given(trees(most=6, costs=True), st.integers(0, 20))
def test_the_order_is_the_best_with_saving_loading_and_what_exists_counted(tree, room):
    found = order(tree, room)
    best = brute(tree, room)
    assert check(tree, found.steps, room) == pytest.approx(found.seconds)
    assert found.bound - 1e-9 <= best <= found.seconds + 1e-9
    if not any(cell.kept and cell.load > cell.seconds for cell in tree.cells):
        assert found.seconds == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(trees(most=18), st.integers(0, 40))
def test_no_published_planner_is_better_and_all_can_be_carried_out(tree, room):
    found = order(tree, room, patience=50)
    for name in ("PRP-v1", "PRP-v2", "PC", "LFU", "dynamic program", "beam"):
        assert found.seconds <= found.tried[name] + 1e-9
    assert (
        found.tried["dynamic program"]
        <= min(found.tried[name] for name in ("PRP-v1", "PRP-v2", "PC")) + 1e-9
    )
    assert found.bound <= found.seconds


@settings(max_examples=80, deadline=None)
@given(trees(most=12, costs=True, exists=False), st.integers(0, 40), st.data())
def test_the_depth_first_cost_is_what_its_steps_take(tree, room, data):
    kept = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    kept = {n for n in kept if tree.children[n]}
    cost = depth_first_cost(tree, kept, room)
    steps = walk(tree, lambda node, _: tree.children[node] if node in kept else ())
    if cost == float("inf"):
        with pytest.raises(PlanError, match="do not fit"):
            check(tree, steps, room)
    else:
        assert check(tree, steps, room) == pytest.approx(cost)


def slow_prp(tree, room, *, per_byte):
    """Algorithm 1 as it is printed: the whole tree is walked for each candidate."""
    kept, least = set(), depth_first_cost(tree, set(), room)
    while True:
        gains = []
        for node in range(len(tree)):
            if node not in kept and tree.children[node]:
                saved = least - depth_first_cost(tree, kept | {node}, room)
                gains.append((saved / tree.cells[node].size if per_byte else saved, -node))
        best, node = max(gains, default=(0.0, 0))
        if best <= 1e-12:
            return least
        kept.add(-node)
        least = depth_first_cost(tree, kept, room)


@settings(max_examples=80, deadline=None)
@given(trees(most=14, costs=True, exists=False), st.integers(0, 40), st.booleans())
def test_prp_is_the_printed_algorithm(tree, room, per_byte):
    quick = check(tree, prp(tree, room, per_byte=per_byte), room)
    assert quick == pytest.approx(slow_prp(tree, room, per_byte=per_byte))


def test_a_shared_beginning_is_computed_once_if_it_can_be_kept():
    assert order(FORK, 5).seconds == 12.0
    assert order(FORK, 4).seconds == 22.0
    assert [step for step in order(FORK, 5).steps if step[0] is Do.KEEP] == [(Do.KEEP, 0)]


def test_versions_merge_as_long_as_code_and_lineage_agree():
    a, b = Cell("a", "x", 1.0, 1), Cell("b", "x", 1.0, 1)
    other = Cell("b", "other data", 1.0, 1)
    tree = merge([[a, b, a], [a, b, b], [a, other]])
    assert tree.parent == (START, 0, 1, 1, 0)
    assert tree.versions == (2, 3, 4)


def test_a_version_that_is_the_beginning_of_another_costs_nothing_more():
    a, b = Cell("a", "x", 1.0, 1), Cell("b", "x", 2.0, 1)
    tree = merge([[a], [a, b]])
    assert order(tree, 0).seconds == 3.0


def test_what_exists_already_is_begun_from():
    tree = Tree.of([START, 0, 0], cells((10, 5), (1, 5), (1, 5), kept=False))
    kept = Tree.of(tree.parent, [Cell("a", "", 10.0, 5, load=0.5, kept=True), *tree.cells[1:]])
    assert order(kept, 0).seconds == pytest.approx(1 + 1 + 2 * 0.5)


def test_deep_and_wide_trees_are_planned_without_recursion():
    count = 1100
    deep = Tree.of([i - 1 for i in range(count)], cells(*[(1, 1)] * count))
    assert order(deep, 10).seconds == count
    wide = Tree.of([START] + [0] * 200, cells((10, 1), *[(1, 1)] * 200))
    assert order(wide, 1, patience=10).seconds == 210


def test_a_gap_is_told_where_the_search_is_cut_short():
    parent = [START] + [(i - 1) // 2 for i in range(1, 31)]
    made = cells(*[(7 + i % 5, 3 + i % 4) for i in range(31)])
    tree = Tree.of(parent, made)
    short = order(tree, 7, patience=5)
    assert 0.0 < short.gap < 1.0
    stopped = order(tree, 7, going=lambda: False)
    assert stopped.seconds == short.seconds
    assert stopped.bound <= short.bound


def test_coarse_sizes_never_keep_too_much():
    parent = [START] + [max(0, i - 1 - i % 3) for i in range(1, 60)]
    made = cells(*[(5 + i % 7, 1009 * (i + 3) % 997 + 1) for i in range(60)])
    tree = Tree.of(parent, made)
    exact = check(tree, dynamic(tree, 2000), 2000)
    coarse = check(tree, dynamic(tree, 2000, states=3000), 2000)
    none = check(tree, dynamic(tree, 2000, states=10), 2000)
    assert exact <= coarse <= none


def test_parent_choice_gives_up_on_too_many_situations():
    with pytest.raises(PlanError, match="situations") as caught:
        parent_choice(FORK, 5, states=2)
    assert caught.value.slug == "parent-choice"


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(Do.COMPUTE, 0)], "not at hand"),
        ([(Do.GO_BACK, 0)], "not kept"),
        ([(Do.GO_BACK, START), (Do.COMPUTE, 0), (Do.KEEP, 0), (Do.DROP, 1)], "not kept"),
        ([(Do.GO_BACK, START), (Do.COMPUTE, 0), (Do.KEEP, 0)], "never reached"),
    ],
)
def test_steps_that_cannot_be_carried_out_are_found(steps, why):
    with pytest.raises(PlanError, match=why):
        check(FORK, steps, 100)


def test_nodes_before_their_parents_are_refused():
    with pytest.raises(PlanError, match="parents first"):
        Tree.of([1, START], cells((1, 1), (1, 1)))


def test_lfu_goes_version_by_version_in_the_order_given():
    tree = merge([[Cell("a", "", 5.0, 1), Cell(x, "", 1.0, 9)] for x in "pqr"])
    leaves = [node for do, node in lfu(tree, 1) if do is Do.COMPUTE and not tree.children[node]]
    assert leaves == list(tree.versions)
    assert check(tree, lfu(tree, 1), 1) == 5 + 3


def test_the_search_alone_finds_what_no_depth_first_order_has():
    steps, bound = search(FORK, 5)
    assert check(FORK, steps, 5) == bound == 12.0
