"""A place in a tree of statements, and what stands around it."""

from dataclasses import dataclass

from rearview.source.match import Matching
from rearview.source.tree import Node
from rearview.source.uses import Uses

REACH = 8  # siblings looked at on either side


@dataclass(frozen=True, slots=True)
class Spot:
    """A statement's place in the new tree: before child `index` of `block`, under `comment`."""

    block: Node
    index: int
    used: Uses
    comment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Before child `index` of `block` of the old tree, with the evidence for it."""

    block: Node
    index: int
    confidence: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nowhere:
    """No place can be named, and why."""

    reason: str


def child_of(old: Node, target: Node) -> int | None:
    """Return the index in `target` of the child that holds a node, None if none does."""
    node = old
    while node.parent is not None:
        if node.parent is target:
            return node.index
        node = node.parent
    return None


def siblings(found: Matching, spot: Spot, *, before: bool) -> list[Node]:
    """Return what stands on one side, nearest first, beyond blocks the old text does not have."""
    block, index = spot.block, spot.index
    run: list[Node] = []
    while True:
        children = block.children
        run += children[:index][::-1] if before else children[index:]
        owner = block.parent
        if owner is None or owner.is_scope or owner in found.there or len(run) >= REACH:
            return run
        if owner.kind not in {"With", "Try"} and not any(n in found.there for n in block.children):
            return run  # a branch or loop that is all new, not one put around old statements
        assert owner.parent is not None
        block, index = owner.parent, owner.index + (not before)
