"""The choice among places that stand between the same two anchors."""

from rearview.source.likeness import lead
from rearview.source.match import Matching
from rearview.source.spot import Nowhere, Spot, child_of, siblings
from rearview.source.tree import Node
from rearview.source.uses import Uses, conflict, uses


def between(
    found: Matching, spot: Spot, target: Node, low: int, high: int
) -> tuple[int, float] | Nowhere:
    """Choose among places between the same anchors: by order, comment, dependence, adjacency."""
    if low == high:
        return low, 1.0
    before = _run(siblings(found, spot, before=True), found)
    after = _run(siblings(found, spot, before=False), found)
    gap = target.children[low:high]
    tied = [node for node in gap if conflict(spot.used, uses([node.tree]))]
    under = _under_comment(found, spot, target, low, high)
    if under is not None:
        return under, 1.0
    moved = [node for node in gap if node in found.back]
    if moved and not (before or after) and any(_rebinds(spot.used, n) for n in tied):
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
    if not tied:
        return (low if len(before) <= len(after) else high), 1.0
    if not before and after:
        return low, 0.9
    if before and not after:
        return high, 0.9
    if not before and not any(_rebinds(spot.used, node) for node in tied):
        return low, 0.85
    counterpart = _counterparts(found, spot, before, after, target.children[low:high])
    if counterpart is not None:
        return counterpart, 0.8
    return Nowhere(
        "two places are equally good: before or after line "
        f"{tied[0].start} of the old text, which changes what it reads"
    )


def _rebinds(used: Uses, node: Node) -> bool:
    """Say whether a statement changes what is read, other than by adding to the same thing."""
    other = uses([node.tree])
    if other.leaves or other.writes & used.reads:
        return True
    return bool((other.changes & used.reads) - used.changes)


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
    return None if any(_rebinds(spot.used, n) for n in rest) else at


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
