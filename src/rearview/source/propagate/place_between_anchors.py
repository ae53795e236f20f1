"""Choose among the places between the same two anchors, by data flow, order, comments and adjacency.

A place is between two statements of a block. `place` finds the block, and the anchors: the nearest statements above
and below that both texts have.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from rearview.source.data_flow import (
    Uses,
    binds,
    bound_in,
    conflict,
    definition,
    rebinds,
    uses,
    visible,
)
from rearview.source.propagate.match import Matching
from rearview.source.statement_trees import StatementNode, lead

REACH = 8  # number of statements above and of statements below a place that count as evidence
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class NewPlace:
    """The place of the statement to carry in the new tree: before child `index` of `block`, below `comment`.

    `uses` has the names that the statement to carry reads and writes. The tree does not contain the statement.
    """

    block: StatementNode
    index: int
    uses: Uses
    comment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoPlace:
    """The reason why there is no certain place: `template`, in which the numbers `lines` replace each `{}`.

    The numbers are those of lines of the old text.
    """

    template: str
    lines: tuple[int, ...] = ()

    def reason(self, inserted: Sequence[tuple[int, int]] = ()) -> str:
        """Return the reason, with line numbers as they were before lines were inserted.

        `inserted` has (line before which lines were inserted, number of lines), in the order of the insertions.

        >>> NoPlace("before or after line {}", (9,)).reason([(2, 3), (9, 1)])
        'before or after line 6'
        """
        return self.template.format(*(line_before(line, inserted) for line in self.lines))


def line_before(line: int, inserted: Sequence[tuple[int, int]]) -> int:
    """Return the number that `line` had before the insertions `inserted`.

    Each is (line before which lines were inserted, number of lines); they are in the order in which they were made.
    """
    for at, count in reversed(inserted):
        line = max(at, line - count) if line >= at else line
    return line


def index_of_child(old: StatementNode, target: StatementNode) -> int | None:
    """Return the index of the child of `target` that is or contains the node `old`, or None if there is none."""
    node = old
    while node.parent is not None:
        if node.parent is target:
            return node.index
        node = node.parent
    return None


def siblings(matching: Matching, new_place: NewPlace, *, before: bool) -> list[StatementNode]:
    """Return the new statements of the block before or, if not `before`, after the place, nearest first.

    If the compound statement around the block is not in the old text, the statements before or after the compound
    statement follow.
    """
    block, index = new_place.block, new_place.index
    run: list[StatementNode] = []
    while True:
        children = block.children
        run += children[:index][::-1] if before else children[index:]
        owner = block.parent
        if owner is None or owner.is_scope or owner in matching.old_of or len(run) >= REACH:
            return run
        if owner.kind not in {"With", "Try"} and not any(
            n in matching.old_of for n in block.children
        ):
            return run  # the branch or loop is new: the old text has no statement in it
        assert owner.parent is not None
        block, index = owner.parent, owner.index + (not before)


def choose_place(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int, high: int
) -> tuple[int, float] | NoPlace:
    """Return (index in `target` from `low` to `high`, confidence), or a refusal if two places are equally good."""
    if low == high:
        return low, 1.0
    under_comment = _under_comment(matching, new_place, target, low, high)
    if under_comment is not None:
        return under_comment, 1.0
    low, high = _possible_range(new_place, target, low, high)
    if low >= high:
        return low, 0.97
    unpaired_before = _unpaired(siblings(matching, new_place, before=True), matching)
    unpaired_after = _unpaired(siblings(matching, new_place, before=False), matching)
    gap = target.children[low:high]
    dependent_nodes = [node for node in gap if conflict(new_place.uses, uses([node.tree]))]
    moved_nodes = [node for node in gap if node in matching.new_of]
    sides = [(node, index_of_child(matching.new_of[node], new_place.block)) for node in moved_nodes]
    ordered = [(node, at < new_place.index) for node, at in sides if at is not None]
    if len(ordered) < len(moved_nodes) and not (unpaired_before or unpaired_after):
        if any(_decides(new_place.uses, node) for node in dependent_nodes):
            return NoPlace(
                "two places are equally good: before or after line {} of the old text, which was "
                "moved elsewhere",
                (moved_nodes[0].start,),
            )
    # a statement of the gap that moved within the block is on the same side of the place as in the new text
    low = max([low, *(node.index + 1 for node, above in ordered if above)])
    high = min([high, *(node.index for node, above in ordered if not above)])
    if low >= high:
        return max(low, high) if low == high else low, 0.9
    dependent_nodes = [node for node in dependent_nodes if low <= node.index < high]
    by_similarity = _split_gap(
        matching, new_place, (unpaired_before, unpaired_after), target, (low, high)
    )
    if not dependent_nodes:
        return by_similarity, 1.0
    if not unpaired_before and unpaired_after:
        return low, 0.9
    if unpaired_before and not unpaired_after:
        return high, 0.9
    deciding = [node for node in dependent_nodes if _decides(new_place.uses, node)]
    if not deciding:
        return by_similarity, 0.85
    at_end = high == len(target.children) and new_place.index == len(new_place.block.children)
    if at_end and not any(_rebinds_or_leaves(new_place.uses, node) for node in deciding):
        return high, 0.8  # the last statement of a block reads objects in their last state
    after_definitions = _after_definitions_of(matching, new_place, deciding)
    if after_definitions is not None:
        return after_definitions, 0.85
    by_variables = _by_assigned_variables(
        new_place, unpaired_before, unpaired_after, target.children[low:high]
    )
    if by_variables is not None:
        return by_variables, 0.8
    return NoPlace(
        "two places are equally good: before or after line {} of the old text, which changes what "
        "it reads",
        (deciding[0].start,),
    )


def _follows_definition(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int
) -> bool:
    """Return True if the statement above the new place sets a variable that the statement to carry reads.

    It must also be unchanged, and be directly before index `low` of `target` in the old text.
    """
    if not new_place.index or not low:
        return False
    above = new_place.block.children[new_place.index - 1]
    sets = bool(binds(above) & new_place.uses.reads)
    return (
        sets and matching.is_unchanged(above) and matching.old_of[above] is target.children[low - 1]
    )


def _split_gap(
    matching: Matching,
    new_place: NewPlace,
    runs: tuple[list[StatementNode], list[StatementNode]],
    target: StatementNode,
    ends: tuple[int, int],
) -> int:
    """Return the index in `target`, between `ends`, that divides the rewritten old statements best.

    Each old statement should be on the side of the similar new statements. `runs` are the new statements that are
    not in the old text: (before the place, after the place).
    """
    before, after = runs
    low, high = ends
    gap = target.children[low:high]
    if not new_place.index and new_place.block.children and not after:
        return high  # the first statement of a block remains directly before the second statement
    if _follows_definition(matching, new_place, target, low):
        return low
    least = low if len(before) <= len(after) else high
    if len(gap) > 30:
        return least
    if not (before and after):  # take new statements that are farther away, too
        before, after = (
            [
                n
                for n in siblings(matching, new_place, before=side)[:REACH]
                if n not in matching.old_of
            ]
            for side in (True, False)
        )
    gains = [
        like_before - like_after
        if max(like_before, like_after) >= (0.2 if all(runs) else 0.5)
        else 0.0
        for node in gap
        for like_before, like_after in [
            (_closest_similarity(node, before), _closest_similarity(node, after))
        ]
    ]
    totals = [0.0]
    for gain in gains:
        totals.append(totals[-1] + gain)
    best = max(totals)
    if best - totals[least - low] < 0.2:
        return least
    return low + totals.index(best)


def _closest_similarity(node: StatementNode, candidates: list[StatementNode]) -> float:
    """Return the fraction of words, from 0 to 1, that `node` shares with the most similar of `candidates`."""
    words = _vocabulary(node)
    best = 0.0
    for candidate in candidates[:REACH]:
        candidate_words = _vocabulary(candidate)
        best = max(
            best, 2 * len(words & candidate_words) / max(1, len(words) + len(candidate_words))
        )
    return best


def _vocabulary(node: StatementNode) -> set[str]:
    parts = (part for word in node.words for part in word.lower().strip("'").split("_"))
    return {part for part in parts if len(part) > 2}


def _possible_range(
    new_place: NewPlace, target: StatementNode, low: int, high: int
) -> tuple[int, int]:
    """Return `low` and `high` after excluding indexes at which the statement to carry cannot be.

    These are indexes before a docstring, after a `return` or other jump, and before a variable that the statement
    reads has a value.
    """
    if low == 0 and high and _docstring(target):
        low = 1
    for node in target.children[low:high]:
        if isinstance(node.tree, LEAVING):
            high = node.index
            break
    unset_names = new_place.uses.reads - visible(target, low)
    for node in target.children[low:high]:
        set_by_node = unset_names & (bound_in(node) | binds(node))
        if set_by_node:
            low = node.index + 1
            unset_names -= set_by_node
    return low, high


def _after_definitions_of(
    matching: Matching, new_place: NewPlace, deciding: list[StatementNode]
) -> int | None:
    """Return the index after the old statements that together set what one new statement sets, or None.

    `x, y = f(z)` may have been `x = f(z)` and an `if` that sets `x` and `y`. All statements in `deciding` must
    set one of the variables.
    """
    for name in new_place.uses.reads:
        new_definition = definition(new_place.block, new_place.index, name)
        old_definition = (
            matching.old_of.get(new_definition)
            if new_definition is not None and not new_definition.is_scope
            else None
        )
        if new_definition is None or old_definition is None:
            continue
        other_names = binds(new_definition) - binds(old_definition)
        if other_names and all(other_names & uses([node.tree]).writes for node in deciding):
            return max(node.index for node in deciding) + 1
    return None


def _rebinds_or_leaves(statement_uses: Uses, node: StatementNode) -> bool:
    """Return True if `node` binds a variable that the statement to carry reads, or leaves the block."""
    node_uses = uses([node.tree])
    return node_uses.leaves or bool(node_uses.writes & statement_uses.reads)


def _docstring(block: StatementNode) -> bool:
    """Return True if a block begins with a docstring, which must stay first."""
    first = block.children[0].tree
    return (
        (block.parent is None or block.parent.is_scope)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def _decides(statement_uses: Uses, node: StatementNode) -> bool:
    """Return True if it matters whether the statement to carry is before or after the old statement `node`."""
    node_uses = uses([node.tree])
    return node_uses.leaves or rebinds(statement_uses, node_uses)


def _by_assigned_variables(
    new_place: NewPlace,
    before: list[StatementNode],
    after: list[StatementNode],
    gap: list[StatementNode],
) -> int | None:
    """Return the index in the block at which the old statements `gap` are divided as in the new text, or None.

    Old statements correspond to the new statements `before` and `after` the place that set the same variables.
    """
    sets_before = {lead(node) for node in before} - {()}
    sets_after = {lead(node) for node in after} - {()}
    at: int | None = None
    for node in gap:
        if lead(node) in sets_before - sets_after:
            at = node.index + 1
        elif lead(node) in sets_after - sets_before:
            at = at if at is not None else node.index
            break
    if at is None:
        return None
    following = [n for n in gap if n.index >= at and lead(n) not in sets_after]
    return None if any(_decides(new_place.uses, n) for n in following) else at


def _under_comment(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int, high: int
) -> int | None:
    """Return the index from `low` to `high` that is below the comment of the statement to carry.

    Return None if not exactly one index is below such a comment.
    """
    if not new_place.comment:
        return None
    lines = matching.old.parsed.lines
    places: list[int] = []
    for at in range(low, high + 1):
        start = target.children[at - 1].end + 1 if at else target.children[0].start
        stop = target.children[at].start if at < len(target.children) else start
        if at == len(target.children):
            while stop <= len(lines) and lines[stop - 1].strip().startswith("#"):
                stop += 1
        if not at:
            while start > 1 and lines[start - 2].strip().startswith("#"):
                start -= 1
        if new_place.comment[-1] in {line.strip() for line in lines[start - 1 : stop - 1]}:
            places.append(at)
    return places[0] if len(places) == 1 else None


def _unpaired(siblings: list[StatementNode], matching: Matching) -> list[StatementNode]:
    """Return the `siblings` before the first one that is paired with an old statement."""
    unpaired: list[StatementNode] = []
    for node in siblings:
        if node in matching.old_of:
            break
        unpaired.append(node)
    return unpaired
