"""The tree of versions is replayed in an order that nothing published beats, with a proved gap."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.errors import PlanError
from rearview.plan.versions.best_order import (
    by_blocks,
    depth_first_choice,
    dynamic,
    order,
    paths_of,
    schedule,
)
from rearview.plan.versions.chex_planners import (
    depth_first_cost,
    depth_first_steps,
    lfu,
    parent_choice,
    prp,
    sequential,
)
from rearview.plan.versions.search import search
from rearview.plan.versions.tree import (
    START,
    CacheLevel,
    Cell,
    Do,
    ReplayStep,
    StepBuilder,
    Tree,
    check,
    levels_of,
    merge,
)


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
            save=draw(cost), load=draw(cost), has_checkpoint=exists and draw(st.integers(0, 5)) == 0,
        )
        for i in range(count)
    ]  # fmt: skip
    return Tree.of(parent, made, start=draw(cost))


def brute(tree, room):
    """Least seconds over every legal sequence of single steps: no notion of paths or orders.

    A situation is the node in the process, the kept (node, level) pairs and the leaves done.
    """
    levels = levels_of(room)
    always = {(n, -1) for n, cell in enumerate(tree.cells) if cell.has_checkpoint}
    start = (None, frozenset(), frozenset())
    best = {start: 0.0}
    heap = [(0.0, 0, start)]
    number = 0
    while heap:
        spent, _, state = heapq.heappop(heap)
        if spent > best[state]:
            continue
        hot, held, done = state
        if len(done) == len(tree.leaves):
            return spent
        bases = [(START, 0), *held, *always]
        after = [(0.0, (hot, held - {pair}, done)) for pair in held]
        reachable = []  # (node to compute next, seconds before it)
        for base, level in bases:
            load = tree.load(base, levels[level] if level >= 0 else None)
            below = tree.roots if base == START else tree.children[base]
            reachable += [(child, load) for child in below]
        if hot is not None:
            reachable += [(child, 0.0) for child in tree.children[hot]]
            for i, level in enumerate(levels):
                used = sum(tree.cells[n].size for n, at in held if at == i)
                if (hot, i) not in held and used + tree.cells[hot].size <= level.room:
                    after.append((tree.save(hot, level), (hot, held | {(hot, i)}, done)))
        for node, load in reachable:
            leaf = not tree.children[node]
            then = (None if leaf else node, held, done | {node} if leaf else done)
            after.append((load + tree.cells[node].seconds, then))
        for cost, then in after:
            if spent + cost < best.get(then, float("inf")):
                best[then] = spent + cost
                number += 1
                heapq.heappush(heap, (spent + cost, number, then))
    raise AssertionError


def gadget(sizes, bin_size, bins):
    """The tree of figure 8, by which CHEX reduces bin packing to the order of versions."""
    parent, made = [START], [(1 / (2 * bins), 2 * bin_size)]

    def add(above, seconds, size):
        parent.append(above)
        made.append((seconds, size))
        return len(parent) - 1

    for size in sizes:
        b = add(0, 1, size)
        for _ in range(2):
            c = add(b, 1, 2 * bin_size)
            add(c, 0, 4 * bin_size)
            add(c, 0, 4 * bin_size)
    for _ in range(bins):
        e = add(0, 1, 2 * bin_size)
        add(e, 0, 4 * bin_size)
        add(e, 0, 4 * bin_size)
    return Tree.of(parent, cells(*made)), 3 * bin_size


@pytest.mark.parametrize(
    ("sizes", "bin_size", "bins", "fits"),
    [((3, 2), 5, 1, True), ((3, 3), 5, 1, False), ((3, 2, 4), 5, 2, True)],
)
def test_the_gadget_of_the_hardness_proof_has_the_cost_in_the_proof(sizes, bin_size, bins, fits):
    tree, room = gadget(sizes, bin_size, bins)
    found = order(tree, room, patience=300_000)
    assert check(tree, found.steps, room) == pytest.approx(found.seconds)
    target = 3 * len(sizes) + bins + 0.5
    assert found.bound <= found.seconds
    if fits:
        assert found.seconds == pytest.approx(target)
    else:
        assert found.seconds > target
        assert found.bound > target - 1e-9


def test_the_sequence_of_the_hardness_proof_passes_the_checker():
    # a -> b1(c1(2 leaves), c2(2 leaves)), b2(the same), e(2 leaves)
    tree, room = gadget((3, 2), 5, 1)
    b1, b2, e = tree.children[0]
    cp, ct, ev, rs = Do.CHECKPOINT, Do.COMPUTE, Do.EVICT, Do.RESTORE
    steps = [ReplayStep(ct, 0), ReplayStep(cp, 0)]
    for b in (b1, b2):
        steps += [ReplayStep(rs, 0, b), ReplayStep(ct, b), ReplayStep(cp, b)]
    steps += [ReplayStep(rs, 0, e), ReplayStep(ct, e), ReplayStep(ev, 0), ReplayStep(cp, e)]
    last = e
    for node in (e, *tree.children[b1], *tree.children[b2]):
        if node != e:
            steps += [
                ReplayStep(rs, tree.parent[node], node),
                ReplayStep(ct, node),
                ReplayStep(ev, last),
                ReplayStep(cp, node),
            ]
        for leaf in tree.children[node]:
            steps += [ReplayStep(rs, node, leaf), ReplayStep(ct, leaf)]
        last = node
    assert check(tree, steps, room, minimal=True) == 7.5


@settings(max_examples=60, deadline=None)
@given(trees(most=7), st.integers(0, 20))
def test_the_order_is_the_best_there_is(tree, room):
    found = order(tree, room)
    assert found.seconds == pytest.approx(brute(tree, room))
    assert found.gap == pytest.approx(0.0)
    assert check(tree, found.steps, room, minimal=True) == pytest.approx(found.seconds)


@settings(max_examples=50, deadline=None)
@given(trees(most=6, costs=True), st.integers(0, 20))
def test_the_order_is_the_best_if_saving_loading_and_existing_states_are_counted(tree, room):
    found = order(tree, room)
    best = brute(tree, room)
    assert check(tree, found.steps, room) == pytest.approx(found.seconds)
    assert found.bound - 1e-9 <= best <= found.seconds + 1e-9
    if not any(cell.has_checkpoint and cell.load > cell.seconds for cell in tree.cells):
        assert found.seconds == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(trees(most=18), st.integers(0, 40))
def test_no_published_planner_is_better_and_all_can_be_carried_out(tree, room):
    found = order(tree, room + 1, patience=50)
    for name in ("PRP-v1", "PRP-v2", "PC", "LFU", "dynamic program", "beam"):
        assert found.seconds <= found.tried[name] + 1e-9
    assert (
        found.tried["dynamic program"]
        <= min(found.tried[name] for name in ("PRP-v1", "PRP-v2", "PC")) + 1e-9
    )
    assert found.bound <= found.seconds


@settings(max_examples=80, deadline=None)
@given(trees(most=12, costs=True, exists=False), st.integers(0, 40), st.data())
def test_the_depth_first_cost_is_the_cost_of_its_steps(tree, room, data):
    kept = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    kept = {n for n in kept if tree.children[n]}
    cost = depth_first_cost(tree, kept, room)
    steps = depth_first_steps(
        tree, lambda node, _: (tree.children[node] if node in kept else (), 0)
    )
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


@settings(max_examples=30, deadline=None)
@given(trees(most=5, costs=True, exists=False), st.integers(0, 10), st.integers(0, 20))
def test_two_levels_are_planned_as_well_as_can_be(tree, memory, disk):
    levels = (CacheLevel(memory), CacheLevel(disk, "disk", save_byte=0.3, load_byte=0.2))
    found = order(tree, levels)
    assert check(tree, found.steps, levels) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(brute(tree, levels))
    assert found.gap == pytest.approx(0.0)


@settings(max_examples=150, deadline=None)
@given(
    trees(most=14, costs=True, exists=False),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(1, 5),
)
def test_blocks_replayed_in_any_order_are_never_worse_than_depth_first(tree, memory, disk, most):
    levels = [CacheLevel(memory), CacheLevel(disk, "disk", save_byte=0.1, load_byte=0.2)]
    choose = depth_first_choice(tree, levels)
    best = check(tree, dynamic(tree, levels), levels)
    for going in (True, False):
        steps = by_blocks(tree, levels, choose, most=most, may_continue=lambda going=going: going)
        assert check(tree, steps, levels) <= best + 1e-9


def test_blocks_of_a_large_tree_find_orders_that_are_not_depth_first():
    draw = random.Random(5)
    parent = [START] + [draw.randrange(max(0, i - 12), i) for i in range(1, 200)]
    made = [Cell(str(i), "", draw.uniform(1, 600), draw.randint(1, 6)) for i in range(200)]
    tree = Tree.of(parent, made)
    best_depth_first = check(tree, dynamic(tree, 5), 5)
    steps = by_blocks(tree, 5, depth_first_choice(tree, 5))
    assert check(tree, steps, 5) < 0.97 * best_depth_first
    found = order(tree, 5, patience=0)
    assert found.seconds <= check(tree, steps, 5)
    assert found.bound <= found.seconds


@settings(max_examples=40, deadline=None)
@given(trees(most=14, costs=True), st.integers(0, 40), st.integers(2, 4))
def test_more_workers_never_take_longer_and_never_beat_the_bound(tree, room, workers):
    one, many = order(tree, room, patience=200), order(tree, room, workers=workers, patience=200)
    assert many.bound - 1e-9 <= many.seconds <= 1.01 * one.seconds + 1e-9
    assert many.seconds == pytest.approx(schedule(tree, many.steps, room, workers))
    assert schedule(tree, one.steps, room, 1) == pytest.approx(one.seconds)


def test_workers_share_a_checkpoint():
    wide = Tree.of([START, 0, 0, 0, 0], cells((10, 5), (4, 5), (4, 5), (4, 5), (4, 5)))
    assert order(wide, 5, workers=4).seconds == 14.0
    assert order(wide, 5, workers=2).seconds == 18.0
    assert len(paths_of(order(wide, 5, workers=2).steps)) == 4


# Figure 6: sixteen cells a to p in five versions. The text gives its shape and all totals, the picture
# the costs; these are costs and sizes for which every total and every sequence of the text holds.
FIGURE_6 = Tree.of(
    [START, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 10, 13],
    cells(
        *[(2, 5), (6, 10), (1, 10), (8, 10), (9, 10), (2, 10), (5, 10), (7, 10), (19, 25), (4, 10)],
        *[(5, 10), (6, 10), (5, 10), (6, 10), (4, 10), (6, 10)],
    ),
)
A, C, F, I, J, L, M, O, P = (ord(letter) - ord("a") for letter in "acfijlmop")  # noqa: E741


def keeping(tree, kept):
    return depth_first_steps(tree, lambda node, _: (tree.children[node] if node in kept else (), 0))


def test_figures_6_and_7_of_the_paper():
    assert [len(FIGURE_6.path(START, leaf)) for leaf in (O, L, M, P, J)] == [6, 5, 5, 6, 4]
    assert FIGURE_6.one_by_one == 129.0
    assert check(FIGURE_6, sequential(FIGURE_6), 0) == 129.0
    first = keeping(FIGURE_6, {A, C, F})
    assert check(FIGURE_6, first, 25, minimal=True) == 114.0
    again = [s.node for s in first if s.do is Do.COMPUTE]
    assert {node for node in again if again.count(node) > 1} == {I}
    # the second sequence evicts a, c and f for i and computes them again: better in the same room
    second = StepBuilder(FIGURE_6)
    second.add_path(START, O, keep=[(A, 0)])
    second.add_path(A, L, keep=[(C, 0)])
    second.add_path(C, M, keep=[(I, 0)], drop=[(A, 0), (C, 0)])
    second.add_path(I, P)
    second.add_path(START, J)
    assert check(FIGURE_6, second.steps, 25, minimal=True) == 100.0
    # computing j before i is evicted for needs no recomputation at all
    assert order(FIGURE_6, 25).seconds == 95.0
    third = keeping(FIGURE_6, {A, C, F, I})
    assert check(FIGURE_6, third, 50, minimal=True) == 95.0
    assert order(FIGURE_6, 50).seconds == 95.0
    assert order(FIGURE_6, 50).gap == 0.0


@pytest.mark.parametrize(("a", "b", "best"), [(1, 10, "b"), (10, 1, "a")])
def test_figure_1_of_the_paper(a, b, best):
    # v1 = a b, v2 = a b c, v3 = a d e; the end of v1 is a node of its own, and one state fits
    tree = Tree.of([START, 0, 1, 1, 0, 4], cells((a, 9), (b, 9), (0, 1), (1, 1), (11, 9), (2, 1)))
    costs = {
        "a": check(tree, keeping(tree, {0}), 9),
        "b": check(tree, keeping(tree, {1}), 9),
    }
    assert min(costs, key=costs.get) == best
    assert order(tree, 9).seconds <= costs[best]
    assert order(tree, 18).seconds == sum(cell.seconds for cell in tree.cells)


def test_a_shared_beginning_is_computed_once_if_it_can_be_kept():
    assert order(FORK, 5).seconds == 12.0
    assert order(FORK, 4).seconds == 22.0
    kept = [step for step in order(FORK, 5).steps if step.do is Do.CHECKPOINT]
    assert kept == [ReplayStep(Do.CHECKPOINT, 0)]


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


def test_replay_starts_from_existing_checkpoints():
    tree = Tree.of([START, 0, 0], cells((10, 5), (1, 5), (1, 5), has_checkpoint=False))
    kept = Tree.of(
        tree.parent, [Cell("a", "", 10.0, 5, load=0.5, has_checkpoint=True), *tree.cells[1:]]
    )
    assert order(kept, 0).seconds == pytest.approx(1 + 1 + 2 * 0.5)


def test_deep_and_wide_trees_are_planned_without_recursion():
    count = 1100
    deep = Tree.of([i - 1 for i in range(count)], cells(*[(1, 1)] * count))
    assert order(deep, 10).seconds == count
    wide = Tree.of([START] + [0] * 200, cells((10, 1), *[(1, 1)] * 200))
    assert order(wide, 1, patience=10).seconds == 210


def test_a_search_that_is_cut_short_reports_its_gap_to_the_bound():
    parent = [START] + [(i - 1) // 2 for i in range(1, 31)]
    made = cells(*[(7 + i % 5, 3 + i % 4) for i in range(31)])
    tree = Tree.of(parent, made)
    short = order(tree, 7, patience=5)
    assert 0.0 < short.gap < 1.0
    stopped = order(tree, 7, may_continue=lambda: False)
    assert stopped.seconds >= short.seconds
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


CT0, CP0, RS01 = (
    ReplayStep(Do.COMPUTE, 0),
    ReplayStep(Do.CHECKPOINT, 0),
    ReplayStep(Do.RESTORE, 0, 1),
)
CT1, CT2, EV0 = ReplayStep(Do.COMPUTE, 1), ReplayStep(Do.COMPUTE, 2), ReplayStep(Do.EVICT, 0)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([CT1], "not in the process"),
        ([CT0, CT1, CT2], "not in the process"),
        ([CT0, EV0], "not kept"),
        ([RS01], "not kept"),
        ([CT0, CP0, RS01, EV0, CT1], r"must be followed by CT\(1\)"),
        ([CT0, CP0, RS01, CT2], "not in the process"),
        ([CT0, CP0, RS01], r"must be followed by CT\(1\)"),
        ([CT0, CT1, CP0], "not computed just before"),
        ([CT0, CP0, CP0], "kept already"),
        ([CT0, CP0, CT1], "not in the process"),
        ([CT0, CP0, EV0, RS01], "not kept"),
        ([CT0, CP0, ReplayStep(Do.RESTORE, 0, 0)], "not a child"),
        ([CT0, CP0, RS01, CT1], "never reached"),
    ],
)
def test_steps_that_break_a_rule_are_refused(steps, why):
    with pytest.raises(PlanError, match=why) as caught:
        check(FORK, steps, 100)
    assert caught.value.slug == "tree-steps"


def test_the_checker_counts_room_and_refuses_a_state_that_is_cached_already():
    steps = [CT0, CP0, RS01, CT1, ReplayStep(Do.RESTORE, START, 0), CT0, CT2]
    assert check(FORK, steps, 5) == 22.0
    with pytest.raises(PlanError, match="in the cache already"):
        check(FORK, steps, 5, minimal=True)
    with pytest.raises(PlanError, match="do not fit"):
        check(FORK, steps, 4)


def test_cells_whose_costs_differ_by_far_are_not_merged():
    fast, slow = Cell("a", "x", 2.0, 1), Cell("a", "x", 200.0, 1)
    assert merge([[fast], [slow]]).parent == (START, START)
    assert merge([[fast], [Cell("a", "x", 5.0, 1)]]).parent == (START,)


@pytest.mark.parametrize("planner", ["auto", "prp1", "prp2", "pc", "lfu", "none"])
def test_every_planner_can_be_chosen(planner):
    found = order(FIGURE_6, 25, planner=planner)
    assert check(FIGURE_6, found.steps, 25) == pytest.approx(found.seconds)
    assert found.bound <= order(FIGURE_6, 25).seconds <= found.seconds <= 129.0


def test_an_unknown_planner_is_refused():
    with pytest.raises(PlanError, match="auto, prp1"):
        order(FORK, 5, planner="best")


def test_nodes_before_their_parents_are_refused():
    with pytest.raises(PlanError, match="parents first"):
        Tree.of([1, START], cells((1, 1), (1, 1)))


def test_lfu_goes_version_by_version_in_the_order_given():
    tree = merge([[Cell("a", "", 5.0, 1), Cell(x, "", 1.0, 9)] for x in "pqr"])
    leaves = [s.node for s in lfu(tree, 1) if s.do is Do.COMPUTE and not tree.children[s.node]]
    assert leaves == list(tree.versions)
    assert check(tree, lfu(tree, 1), 1) == 5 + 3


def test_the_search_alone_finds_an_order_that_is_not_depth_first():
    steps, bound = search(FORK, 5)
    assert check(FORK, steps, 5) == bound == 12.0
