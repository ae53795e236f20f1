"""Choose among the places between the same two anchors: by data flow, order, comment, adjacency.

A place is between two statements of a block; `place` finds the block and the anchors around it.
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

REACH = 8  # siblings looked at on either side
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class NewPlace:
    """A statement's place in the new tree: before child `index` of `block`, under `comment`.

    `used` are the names that the statement uses.
    """

    block: StatementNode
    index: int
    used: Uses
    comment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nowhere:
    """The reason why there is no certain place; `{}` in it stands for a line of the old text."""

    template: str
    lines: tuple[int, ...] = ()

    def reason(self, inserted: Sequence[tuple[int, int]] = ()) -> str:
        """Return the reason, with line numbers as they were before lines were inserted.

        `inserted` has (line before which lines were inserted, how many), in that order.

        >>> Nowhere("before or after line {}", (9,)).reason([(2, 3), (9, 1)])
        'before or after line 6'
        """
        return self.template.format(*(line_before(line, inserted) for line in self.lines))


def line_before(line: int, inserted: Sequence[tuple[int, int]]) -> int:
    """Return the number that a line had before the insertions, which were made one after the other."""
    for at, count in reversed(inserted):
        line = max(at, line - count) if line >= at else line
    return line


def child_of(old: StatementNode, target: StatementNode) -> int | None:
    """Return the index in `target` of the child that contains a node; None if none does."""
    node = old
    while node.parent is not None:
        if node.parent is target:
            return node.index
        node = node.parent
    return None


def siblings(matching: Matching, new_place: NewPlace, *, before: bool) -> list[StatementNode]:
    """Return the siblings on one side, nearest first, through blocks that the old text does not have."""
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
            return run  # a branch or loop that is all new, not one put around old statements
        assert owner.parent is not None
        block, index = owner.parent, owner.index + (not before)


def between(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int, high: int
) -> tuple[int, float] | Nowhere:
    """Choose among places between the same anchors: by data flow, order, comment, adjacency."""
    if low == high:
        return low, 1.0
    under = _under_comment(matching, new_place, target, low, high)
    if under is not None:
        return under, 1.0
    low, high = _possible(new_place, target, low, high)
    if low >= high:
        return low, 0.97
    before = _run(siblings(matching, new_place, before=True), matching)
    after = _run(siblings(matching, new_place, before=False), matching)
    gap = target.children[low:high]
    tied = [node for node in gap if conflict(new_place.used, uses([node.tree]))]
    moved = [node for node in gap if node in matching.new_of]
    sides = [(node, child_of(matching.new_of[node], new_place.block)) for node in moved]
    ordered = [(node, at < new_place.index) for node, at in sides if at is not None]
    if len(ordered) < len(moved) and not (before or after):
        if any(_decides(new_place.used, node) for node in tied):
            return Nowhere(
                "two places are equally good: line {} of the old text moved over it",
                (moved[0].start,),
            )
    # statements that moved elsewhere in the new text still show which side they were on
    low = max([low, *(node.index + 1 for node, above in ordered if above)])
    high = min([high, *(node.index for node, above in ordered if not above)])
    if low >= high:
        return max(low, high) if low == high else low, 0.9
    tied = [node for node in tied if low <= node.index < high]
    near = _split_gap(matching, new_place, (before, after), target, (low, high))
    if not tied:
        return near, 1.0
    if not before and after:
        return low, 0.9
    if before and not after:
        return high, 0.9
    deciding = [node for node in tied if _decides(new_place.used, node)]
    if not deciding:
        return near, 0.85
    last = high == len(target.children) and new_place.index == len(new_place.block.children)
    if last and not any(_parts_with(new_place.used, node) for node in deciding):
        return high, 0.8  # the objects that it reads change up to the end of the block
    completed = _completed(matching, new_place, deciding)
    if completed is not None:
        return completed, 0.85
    counterpart = _counterparts(new_place, before, after, target.children[low:high])
    if counterpart is not None:
        return counterpart, 0.8
    return Nowhere(
        "two places are equally good: before or after line {} of the old text, which changes what "
        "it reads",
        (deciding[0].start,),
    )


def _follows_definition(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int
) -> bool:
    """Return True if the unchanged statement above, which sets the variables that are read, is right before a place."""
    if not new_place.index or not low:
        return False
    above = new_place.block.children[new_place.index - 1]
    sets = bool(binds(above) & new_place.used.reads)
    return sets and matching.same(above) and matching.old_of[above] is target.children[low - 1]


def _split_gap(
    matching: Matching,
    new_place: NewPlace,
    runs: tuple[list[StatementNode], list[StatementNode]],
    target: StatementNode,
    ends: tuple[int, int],
) -> int:
    """Return the place that leaves rewritten statements on the side of the statements they resemble."""
    before, after = runs
    low, high = ends
    gap = target.children[low:high]
    if not new_place.index and new_place.block.children and not after:
        return high  # the first statement of its block stays next to the one after it
    if _follows_definition(matching, new_place, target, low):
        return low
    least = low if len(before) <= len(after) else high
    if len(gap) > 30:
        return least
    if not (before and after):  # rewritten statements may be farther away
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
        for like_before, like_after in [(_closest(node, before), _closest(node, after))]
    ]
    totals = [0.0]
    for gain in gains:
        totals.append(totals[-1] + gain)
    best = max(totals)
    if best - totals[least - low] < 0.2:
        return least
    return low + totals.index(best)


def _closest(node: StatementNode, others: list[StatementNode]) -> float:
    """Return how much of a statement's vocabulary the closest of some statements shares."""
    words = _vocabulary(node)
    best = 0.0
    for other in others[:REACH]:
        other_words = _vocabulary(other)
        best = max(best, 2 * len(words & other_words) / max(1, len(words) + len(other_words)))
    return best


def _vocabulary(node: StatementNode) -> set[str]:
    parts = (part for word in node.words for part in word.lower().strip("'").split("_"))
    return {part for part in parts if len(part) > 2}


def _possible(new_place: NewPlace, target: StatementNode, low: int, high: int) -> tuple[int, int]:
    """Return the first and last place at which everything that is read has a value and control arrives."""
    if low == 0 and high and _docstring(target):
        low = 1
    for node in target.children[low:high]:
        if isinstance(node.tree, LEAVING):
            high = node.index
            break
    lacking = new_place.used.reads - visible(target, low)
    for node in target.children[low:high]:
        set_here = lacking & (bound_in(node) | binds(node))
        if set_here:
            low = node.index + 1
            lacking -= set_here
    return low, high


def _completed(
    matching: Matching, new_place: NewPlace, deciding: list[StatementNode]
) -> int | None:
    """Return the place after the statements that together set what one definition sets in the new text.

    `x, known = f(y)` may have been `x = f(y)` and an `if` that sets `x` and `known`.
    """
    for name in new_place.used.reads:
        home = definition(new_place.block, new_place.index, name)
        partner = matching.old_of.get(home) if home is not None and not home.is_scope else None
        if home is None or partner is None:
            continue
        rest = binds(home) - binds(partner)
        if rest and all(rest & uses([node.tree]).writes for node in deciding):
            return max(node.index for node in deciding) + 1
    return None


def _parts_with(used: Uses, node: StatementNode) -> bool:
    """Return True if a statement binds a variable that is read, or leaves the block."""
    other = uses([node.tree])
    return other.leaves or bool(other.writes & used.reads)


def _docstring(block: StatementNode) -> bool:
    """Return True if a block begins with a docstring, which must stay first."""
    first = block.children[0].tree
    return (
        (block.parent is None or block.parent.is_scope)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def _decides(used: Uses, node: StatementNode) -> bool:
    """Return True if it matters on which side of a statement the inserted one is."""
    other = uses([node.tree])
    return other.leaves or rebinds(used, other)


def _counterparts(
    new_place: NewPlace,
    before: list[StatementNode],
    after: list[StatementNode],
    gap: list[StatementNode],
) -> int | None:
    """Return the place if rewritten statements can be identified by the variables they set."""
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
    return None if any(_decides(new_place.used, n) for n in following) else at


def _under_comment(
    matching: Matching, new_place: NewPlace, target: StatementNode, low: int, high: int
) -> int | None:
    """Return the place under the same comment, if one of the places has it."""
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


def _run(siblings: list[StatementNode], matching: Matching) -> list[StatementNode]:
    """Return the unpaired siblings up to the first paired one."""
    run: list[StatementNode] = []
    for node in siblings:
        if node in matching.old_of:
            break
        run.append(node)
    return run
