"""The choice among places that stand between the same two anchors."""

import ast

from rearview.source.flow import binds, bound_in, definition, visible
from rearview.source.likeness import lead
from rearview.source.match import Matching
from rearview.source.spot import Nowhere, Spot, child_of, siblings
from rearview.source.tree import Node
from rearview.source.uses import Uses, conflict, rebinds, uses


def between(
    found: Matching, spot: Spot, target: Node, low: int, high: int
) -> tuple[int, float] | Nowhere:
    """Choose among places between the same anchors: by data flow, order, comment, adjacency."""
    if low == high:
        return low, 1.0
    under = _under_comment(found, spot, target, low, high)
    if under is not None:
        return under, 1.0
    low, high = _possible(spot, target, low, high)
    if low >= high:
        return low, 0.97
    before = _run(siblings(found, spot, before=True), found)
    after = _run(siblings(found, spot, before=False), found)
    gap = target.children[low:high]
    tied = [node for node in gap if conflict(spot.used, uses([node.tree]))]
    moved = [node for node in gap if node in found.back]
    if moved and not (before or after) and any(_decides(spot.used, n) for n in tied):
        return Nowhere(
            f"two places are equally good: line {moved[0].start} of the old text moved over it"
        )
    if len(before) + len(after):
        for node in moved:  # what went elsewhere in the new text still tells before from after
            at = child_of(found.back[node], spot.block)
            if at is not None and at < spot.index:
                low = max(low, node.index + 1)
            elif at is not None:
                high = min(high, node.index)
        if low >= high:
            return low, 0.9
    tied = [node for node in tied if low <= node.index < high]
    near = low if len(before) <= len(after) else high
    if not spot.index and spot.block.children and not after:
        near = high  # the first of its block goes with what follows it
    if not tied:
        return near, 1.0
    if not before and after:
        return low, 0.9
    if before and not after:
        return high, 0.9
    deciding = [node for node in tied if _decides(spot.used, node)]
    if not deciding:
        return near, 0.85
    last = high == len(target.children) and spot.index == len(spot.block.children)
    if last and not any(_parts_with(spot.used, node) for node in deciding):
        return high, 0.8  # what it reads is filled up to the end of the block
    completed = _completed(found, spot, deciding)
    if completed is not None:
        return completed, 0.85
    counterpart = _counterparts(found, spot, before, after, target.children[low:high])
    if counterpart is not None:
        return counterpart, 0.8
    return Nowhere(
        "two places are equally good: before or after line "
        f"{deciding[0].start} of the old text, which changes what it reads"
    )


def _possible(spot: Spot, target: Node, low: int, high: int) -> tuple[int, int]:
    """Return the first and last place at which what is read has a value and control arrives."""
    if low == 0 and high and _docstring(target):
        low = 1
    for node in target.children[low:high]:
        if isinstance(node.tree, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
            high = node.index
            break
    lacking = spot.used.reads - visible(target, low)
    for node in target.children[low:high]:
        set_here = lacking & (bound_in(node) | binds(node))
        if set_here:
            low = node.index + 1
            lacking -= set_here
    return low, high


def _completed(found: Matching, spot: Spot, deciding: list[Node]) -> int | None:
    """Return the place behind statements that set what one definition sets in the new text.

    `x, known = f(y)` may have been `x = f(y)` and an `if` that sets `x` and `known`.
    """
    for name in spot.used.reads:
        home = definition(spot.block, spot.index, name)
        partner = found.there.get(home) if home is not None and not home.is_scope else None
        if home is None or partner is None:
            continue
        rest = binds(home) - binds(partner)
        if rest and all(rest & uses([node.tree]).writes for node in deciding):
            return max(node.index for node in deciding) + 1
    return None


def _parts_with(used: Uses, node: Node) -> bool:
    """Return True if a statement binds a name that is read, or leaves, not only sets a part of it."""
    other = uses([node.tree])
    return other.leaves or bool(other.writes & used.reads)


def _docstring(block: Node) -> bool:
    """Return True if a block begins with a docstring, which has to stay first."""
    first = block.children[0].tree
    return (
        (block.parent is None or block.parent.is_scope)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def _decides(used: Uses, node: Node) -> bool:
    """Return True if it matters which side of a statement the carried one stands on."""
    other = uses([node.tree])
    return other.leaves or rebinds(used, other)


def _counterparts(
    found: Matching, spot: Spot, before: list[Node], after: list[Node], gap: list[Node]
) -> int | None:
    """Return the place if rewritten statements can be told apart by what they set."""
    del found
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
    rest = [n for n in gap if n.index >= at and lead(n) not in sets_after]
    return None if any(_decides(spot.used, n) for n in rest) else at


def _under_comment(found: Matching, spot: Spot, target: Node, low: int, high: int) -> int | None:
    """Return the place under the same comment, if one of the places has it."""
    if not spot.comment:
        return None
    lines = found.old.parsed.lines
    hits: list[int] = []
    for at in range(low, high + 1):
        start = target.children[at - 1].end + 1 if at else target.children[0].start
        stop = target.children[at].start if at < len(target.children) else start
        if at == len(target.children):
            while stop <= len(lines) and lines[stop - 1].strip().startswith("#"):
                stop += 1
        if not at:
            while start > 1 and lines[start - 2].strip().startswith("#"):
                start -= 1
        if spot.comment[-1] in {line.strip() for line in lines[start - 1 : stop - 1]}:
            hits.append(at)
    return hits[0] if len(hits) == 1 else None


def _run(siblings: list[Node], found: Matching) -> list[Node]:
    """Return the unpaired siblings up to the first paired one."""
    run: list[Node] = []
    for node in siblings:
        if node in found.there:
            break
        run.append(node)
    return run
