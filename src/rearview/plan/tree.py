"""Versions as one tree of cells: what they share is computed once, if it can be kept.

A cell is a notebook cell, a top-level statement, or a stretch between two loop boundaries. Two
versions share a node when all cells up to it have the same code and the same lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rearview.errors import PlanError

START = -1
"""The program's start: above every root, always there to begin from."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of one version, as it was audited."""

    code: str
    """Hash of its code."""
    lineage: str
    """Hash of everything it read, and of the lineage before it."""
    seconds: float
    size: int
    """Bytes of the state after it."""
    save: float = 0.0
    """Seconds to keep that state."""
    load: float = 0.0
    """Seconds to go back to it."""
    kept: bool = False
    """A checkpoint of it exists already: it takes no room and can always be gone back to."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Cells of all versions, shared prefixes merged; nodes are numbered parents first."""

    parent: tuple[int, ...]
    cells: tuple[Cell, ...]
    versions: tuple[int, ...] = ()
    """Last node of each version, in the order given."""
    start: float = 0.0
    """Seconds to start a process."""
    children: tuple[tuple[int, ...], ...] = field(default=())
    reach: tuple[float, ...] = field(default=())
    """Seconds of computing from the start up to and including each node."""

    @classmethod
    def of(
        cls,
        parent: Sequence[int],
        cells: Sequence[Cell],
        *,
        start: float = 0.0,
        versions: Sequence[int] = (),
    ) -> Tree:
        """Return the tree with these parents; START stands above the roots."""
        below: list[list[int]] = [[] for _ in parent]
        reach: list[float] = []
        for node, above in enumerate(parent):
            if not START <= above < node:
                raise PlanError(
                    f"Node {node} comes before its parent {above}. Number parents first.",
                    slug="tree-order",
                )
            if above != START:
                below[above].append(node)
            reach.append((reach[above] if above != START else 0.0) + cells[node].seconds)
        return cls(
            tuple(parent),
            tuple(cells),
            tuple(versions) or tuple(n for n, found in enumerate(below) if not found),
            start,
            tuple(map(tuple, below)),
            tuple(reach),
        )

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def roots(self) -> tuple[int, ...]:
        """Nodes without a parent."""
        return tuple(node for node, above in enumerate(self.parent) if above == START)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children: to reach them all is to replay every version."""
        return tuple(node for node, found in enumerate(self.children) if not found)

    def path(self, above: int, node: int) -> list[int]:
        """Return the nodes below `above` down to `node`."""
        found: list[int] = []
        while node != above:
            if node == START:
                raise PlanError(f"Node {above} is not above the node asked for.", slug="tree-order")
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def between(self, above: int, node: int) -> float:
        """Return the seconds of computing from the state after `above` to that after `node`."""
        return self.reach[node] - (self.reach[above] if above != START else 0.0)

    def load(self, node: int) -> float:
        """Return the seconds to go back to the state after a node."""
        return self.start if node == START else self.cells[node].load

    def parts(self) -> list[tuple[int, list[int], Tree]]:
        """Return (node to begin from, its nodes in this tree, tree) for what is replayed apart.

        What lies below an existing checkpoint begins there, unless loading it takes longer than
        computing it again. Cells that lead only to existing checkpoints are left out.
        """
        used = [False] * len(self)
        base_of = [START] * len(self)
        for node, above in enumerate(self.parent):
            if above != START:
                base_of[node] = above if used[above] else base_of[above]
            cell, base = self.cells[node], base_of[node]
            again = self.load(base) + self.between(base, node)
            used[node] = cell.kept and bool(self.children[node]) and cell.load <= again
        needed = [not below for below in self.children]
        for node in range(len(self) - 1, -1, -1):
            above = self.parent[node]
            if above != START and needed[node] and not used[node]:
                needed[above] = True
        bases: dict[int, list[int]] = {}
        for node in range(len(self)):
            if needed[node] and not used[node]:
                bases.setdefault(base_of[node], []).append(node)
        found: list[tuple[int, list[int], Tree]] = []
        for base, nodes in sorted(bases.items()):
            number = {node: i for i, node in enumerate(nodes)}
            parent = [number.get(self.parent[node], START) for node in nodes]
            cells = [replace(self.cells[node], kept=False) for node in nodes]
            ends = [number[node] for node in dict.fromkeys(self.versions) if node in number]
            part = Tree.of(parent, cells, start=self.load(base), versions=ends)
            found.append((base, nodes, part))
        return found

    def subtree(self) -> list[int]:
        """Return how many nodes lie below each node, itself included."""
        count = [1] * len(self)
        for node in range(len(self) - 1, -1, -1):
            if self.parent[node] != START:
                count[self.parent[node]] += count[node]
        return count


def merge(versions: Iterable[Sequence[Cell]], *, start: float = 0.0) -> Tree:
    """Return the tree of versions that share the cells they begin with.

    >>> a, b, c = (Cell(x, x, 1.0, 1) for x in "abc")
    >>> merge([[a, b], [a, c], [a, b]]).parent
    (-1, 0, 0)
    """
    parent: list[int] = []
    cells: list[Cell] = []
    known: dict[tuple[int, str, str], int] = {}
    ends: list[int] = []
    for version in versions:
        at = START
        for cell in version:
            key = (at, cell.code, cell.lineage)
            if key not in known:
                known[key] = len(cells)
                parent.append(at)
                cells.append(cell)
            at = known[key]
        ends.append(at)
    return Tree.of(parent, cells, start=start, versions=ends)


class Do(StrEnum):
    """What one step of a replay sequence does."""

    COMPUTE = "compute"
    KEEP = "keep"
    GO_BACK = "go back"
    DROP = "drop"


Step = tuple[Do, int]


def check(tree: Tree, steps: Sequence[Step], room: float) -> float:
    """Return the seconds that steps take; raise if they cannot be carried out or leave gaps."""
    held = {node for node, cell in enumerate(tree.cells) if cell.kept}
    used, seconds, at = 0.0, 0.0, None
    done: set[int] = set()
    for do, node in steps:
        cell = tree.cells[node] if node != START else None
        if do is Do.GO_BACK:
            if node != START and node not in held:
                raise _wrong(do, node, "its state is not kept")
            at, seconds = node, seconds + tree.load(node)
        elif do is Do.COMPUTE:
            if at is None or tree.parent[node] != at:
                raise _wrong(do, node, "the state before it is not at hand")
            at, seconds = node, seconds + tree.cells[node].seconds
            done.add(node)
        elif do is Do.KEEP and cell is not None:
            if at != node:
                raise _wrong(do, node, "its state is not at hand")
            held.add(node)
            used, seconds = used + cell.size, seconds + cell.save
            if used > room:
                raise _wrong(do, node, f"{used} bytes do not fit into {room}")
        elif cell is not None:
            if node not in held or cell.kept:
                raise _wrong(do, node, "its state is not kept")
            held.discard(node)
            used -= cell.size
    missing = set(tree.leaves) - done
    if missing:
        raise _wrong(Do.COMPUTE, min(missing), "it is never reached")
    return seconds


def _wrong(do: Do, node: int, why: str) -> PlanError:
    return PlanError(f"Cannot {do} node {node}: {why}.", slug="tree-steps")
