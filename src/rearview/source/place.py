"""The place in the old tree that corresponds to a place in the new one."""

import ast
from collections import defaultdict
from dataclasses import dataclass

from rearview.source.flow import Uses, conflict, definition, earlier, uses
from rearview.source.match import Matching, likeness
from rearview.source.tree import Node

REACH = 8  # siblings looked at on either side


@dataclass(frozen=True, slots=True)
class Place:
    """Before child `index` of `block`, with the evidence for it."""

    block: Node
    index: int
    confidence: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nowhere:
    """No place can be named, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Anchor:
    new: Node
    old: Node
    before: bool
    weight: float
    near: bool  # the very next sibling


def locate(found: Matching, block: Node, index: int, used: Uses) -> Place | Nowhere:
    """Return where a statement at (block, index) of the new tree belongs in the old one."""
    anchors = _anchors(found, block, index)
    home = found.block(block)
    target = _block(anchors, home)
    if target is None:
        return Nowhere(_why_nowhere(block))
    spots = {a: at for a in anchors if (at := _spot(a.old, target)) is not None}
    if not spots and target.children:
        return _only_home(found, block, index, used, target)
    low, high, agree = _range(spots, len(target.children))
    low, high = _bounds(found, block, index, used, target, low, high)
    if low > high:
        return Nowhere("what it reads is set only after the place where it would stand")
    reasons: list[str] = []
    chosen = _within(found, block, index, used, target, low, high)
    if isinstance(chosen, Nowhere):
        return chosen
    at, certainty = chosen
    direct = [a for a in spots if a.old.parent is target]
    touching = [
        a
        for a in direct
        if a.near and (a.old.index == at - 1 if a.before else a.old.index == at)
    ]
    sides = {a.before for a in touching}
    confidence = agree * certainty
    if len(sides) == 2:
        reasons.append("both neighbours are there")
    elif sides:
        reasons.append("one neighbour is there")
        confidence *= 0.97
    elif direct:
        reasons.append("statements around it are there")
        confidence *= 0.9
    else:
        reasons.append("code inside the same block is there")
        confidence *= 0.75
    if home is not target:
        reasons.append("the block around it has changed")
        confidence *= 0.9
    return Place(target, at, confidence, tuple(reasons))


def _anchors(found: Matching, block: Node, index: int) -> list[_Anchor]:
    anchors: list[_Anchor] = []
    sides = ((True, block.children[:index][::-1]), (False, block.children[index:]))
    for before, siblings in sides:
        for far, new in enumerate(siblings[:REACH]):
            old = found.there.get(new)
            if old is None:
                continue
            alike = likeness(new, old)
            if new.children:
                alike = max(alike, 0.6)
            anchors.append(_Anchor(new, old, before, alike / (1 + far), far == 0))
    return anchors


def _block(anchors: list[_Anchor], home: Node | None) -> Node | None:
    """Return the old block most of the evidence speaks for."""
    votes: dict[Node, float] = defaultdict(float)
    if home is not None:
        votes[home] += 0.6
    for anchor in anchors:
        share = 1.0
        node: Node = anchor.old
        while node.parent is not None:
            node = node.parent
            if node.is_block:
                votes[node] += share * anchor.weight
                share = min(0.3, share * 0.3)
            elif node.is_scope:
                break
    if not votes:
        return None
    return max(votes, key=lambda node: (votes[node], node.order))


def _spot(old: Node, target: Node) -> int | None:
    """Return the index in `target` of the child that holds a node, None if none does."""
    node = old
    while node.parent is not None:
        if node.parent is target:
            return node.index
        node = node.parent
    return None


def _range(spots: dict[_Anchor, int], count: int) -> tuple[int, int, float]:
    """Return the first and last index most anchors agree on, and the share that agrees."""
    gains = [0.0] * (count + 1)
    total = 0.0
    for anchor, spot in spots.items():
        total += anchor.weight
        for at in range(count + 1):
            if (spot < at) == anchor.before:
                gains[at] += anchor.weight
    if not total:
        return 0, count, 1.0
    best = max(gains)
    tied = [at for at in range(count + 1) if gains[at] > best - 1e-9]
    # one run of indices: the first one, unless a later run is longer evidence of nothing
    stop = tied[0]
    for at in tied[1:]:
        if at != stop + 1:
            break
        stop = at
    return tied[0], stop, best / total


def _bounds(
    found: Matching, block: Node, index: int, used: Uses, target: Node, low: int, high: int
) -> tuple[int, int]:
    """Narrow the range so that what is read is set before."""
    for name in used.reads:
        home = definition(block, index, name)
        partner = found.there.get(home) if home is not None else None
        if partner is None or partner.is_scope:
            continue
        spot = _spot(partner, target)
        if spot is not None and home is not None and _spot(home, block) is not None:
            low = max(low, spot + 1)
    return low, high


def _within(
    found: Matching, block: Node, index: int, used: Uses, target: Node, low: int, high: int
) -> tuple[int, float] | Nowhere:
    """Choose among places between the same anchors: by order, by dependence, by adjacency."""
    if low == high:
        return low, 1.0
    gap = target.children[low:high]
    for node in gap:  # what went elsewhere in the new text still tells before from after
        partner = found.back.get(node)
        if partner is None:
            continue
        spot = _spot(partner, block)
        if spot is not None and spot < index:
            low = max(low, node.index + 1)
        elif spot is not None:
            high = min(high, node.index)
    if low >= high:
        return low, 0.9
    before = [n for n in _run(block.children[:index][::-1], found)]
    after = [n for n in _run(block.children[index:], found)]
    gap = target.children[low:high]
    tied = [node for node in gap if conflict(used, uses([node.tree]))]
    default = low if not before else high if not after else low
    if not tied:
        return default, 1.0
    if not before and after:
        return low, 0.9
    if before and not after:
        return high, 0.9
    if not before and not after:
        return Nowhere(
            "two places are equally good: before or after line "
            f"{tied[0].start} of the old text, which changes what it reads"
        )
    writes_before = {name for n in before for name in uses([n.tree]).writes}
    writes_after = {name for n in after for name in uses([n.tree]).writes}
    at = low
    for node in gap:
        bound = uses([node.tree]).writes
        if bound & writes_before and not bound & writes_after:
            at = node.index + 1
    rest = [node for node in tied if node.index >= at]
    if at > low and not any(
        uses([node.tree]).writes & used.reads for node in rest
    ):
        return at, 0.8
    return Nowhere(
        "two places are equally good: the statements around it were rewritten, "
        f"and line {tied[0].start} of the old text changes what it reads"
    )


def _run(siblings: list[Node], found: Matching) -> list[Node]:
    """Return the unpaired siblings up to the first paired one."""
    run: list[Node] = []
    for node in siblings:
        if node in found.there:
            break
        run.append(node)
    return run


def _only_home(
    found: Matching, block: Node, index: int, used: Uses, target: Node
) -> Place | Nowhere:
    del found, block, index, used, target
    return Nowhere("the statements around it did not exist yet")


def _why_nowhere(block: Node) -> str:
    for node in (block, *block.above()):
        tree = node.tree
        if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return f"the code around it in `{tree.name}` did not exist yet"
        if isinstance(tree, (ast.For, ast.AsyncFor, ast.While)):
            return f"the loop around it (line {node.start}) did not exist yet"
    return "the code around it did not exist yet"


__all__ = ["Nowhere", "Place", "earlier", "locate"]
