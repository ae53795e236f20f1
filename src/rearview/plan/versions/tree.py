"""The execution tree of many versions, and the steps that replay the tree.

A node is a cell: a notebook cell, a group of top-level statements, or the part of a loop between two
checkpoints. Versions share a node if all their cells up to this node have the same code and lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from rearview.errors import PlanError

START = -1
"""Node number of the state before the first cell, which is that of a new process. START is the parent of every root."""
EXISTING = -1
"""Cache level of checkpoints that existed before the replay: they take no room and are never evicted."""
SIMILAR = 10.0
"""Two measurements of one cell are similar if the larger is at most this many times the smaller."""
SMALL_SECONDS, SMALL_BYTES = 1.0, 64 << 20
"""Seconds and sizes up to these limits always count as similar, because they vary randomly."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of one version: hashes that identify it, and the cost of computing, saving and loading it."""

    code: str
    """Hash of the cell's code."""
    lineage: str
    """Hash of everything that the cell read, and of the lineage of the previous cell."""
    seconds: float
    size: int
    """Bytes of the state after the cell."""
    save: float = 0.0
    """Seconds to checkpoint the state after the cell, in addition to `CacheLevel.save_byte` for each byte."""
    load: float = 0.0
    """Seconds to restore the state after the cell, in addition to `CacheLevel.load_byte` for each byte."""
    has_checkpoint: bool = False
    """Whether a checkpoint of the state after the cell existed before the replay."""

    def similar(self, other: Cell) -> bool:
        """Return True if both cells have seconds and sizes of similar magnitude (definition 5 of CHEX)."""
        return _similar(self.seconds, other.seconds, SMALL_SECONDS) and _similar(
            float(self.size), float(other.size), float(SMALL_BYTES)
        )


def _similar(a: float, b: float, small: float) -> bool:
    return max(a, b) <= small or max(a, b) <= SIMILAR * min(a, b)


@dataclass(frozen=True, slots=True)
class CacheLevel:
    """One part of the cache, such as memory or disk, that holds checkpoints."""

    room: float
    """Bytes that the checkpoints of this level may take at any time."""
    name: str = "memory"
    save_byte: float = 0.0
    """Seconds to write one byte of a checkpoint."""
    load_byte: float = 0.0
    """Seconds to read one byte of a checkpoint."""


Levels = Sequence[CacheLevel]


def levels_of(room: float | Levels) -> tuple[CacheLevel, ...]:
    """Return `room` as a tuple of cache levels; a number is one level of so many bytes, with free writes and reads."""
    return (CacheLevel(float(room)),) if isinstance(room, (int, float)) else tuple(room)


@dataclass(frozen=True, slots=True)
class Tree:
    """The cells of all versions as a tree: versions share the nodes of their equal first cells.

    Nodes are numbers from 0. The parent of a node has a lower number than the node.
    """

    parent: tuple[int, ...]
    """Item i is the parent of node i, or START if the node is a root."""
    cells: tuple[Cell, ...]
    """Item i is the cell of node i."""
    versions: tuple[int, ...] = ()
    """Last node of each version, in the order of the versions."""
    start: float = 0.0
    """Seconds to start a process."""
    children: tuple[tuple[int, ...], ...] = field(default=())
    """Item i are the children of node i."""
    reach: tuple[float, ...] = field(default=())
    """Item i: seconds of computing all cells from the root up to and including node i."""

    @classmethod
    def of(
        cls,
        parent: Sequence[int],
        cells: Sequence[Cell],
        *,
        start: float = 0.0,
        versions: Sequence[int] = (),
    ) -> Tree:
        """Return the tree whose node i has the parent `parent[i]` (START for a root) and the cell `cells[i]`.

        `versions` are the last nodes of the versions, by default all leaves. Raise if a parent comes after its child.
        """
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
            tuple(versions) or tuple(n for n, nodes in enumerate(below) if not nodes),
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
        """Nodes without children. A replay that computes all leaves has computed every version."""
        return tuple(node for node, below in enumerate(self.children) if not below)

    @property
    def one_by_one(self) -> float:
        """Seconds to replay all versions one after the other, each from the start and without checkpoints."""
        return sum(self.start + self.reach[end] for end in self.versions if end != START)

    def path(self, above: int, node: int) -> list[int]:
        """Return the nodes on the path from `above` (not included) down to `node`; raise if `above` is not above it."""
        nodes: list[int] = []
        while node != above:
            if node == START:
                raise PlanError(f"Node {above} is not above the node asked for.", slug="tree-order")
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def between(self, above: int, node: int) -> float:
        """Return the seconds of computing all cells after `above` up to and including `node`, which is below `above`."""
        return self.reach[node] - (self.reach[above] if above != START else 0.0)

    def load(self, node: int, level: CacheLevel | None = None) -> float:
        """Return the seconds to restore the state after `node` from `level`, or for START, to start a process.

        If `level` is None, the bytes cost nothing.
        """
        if node == START:
            return self.start
        cell = self.cells[node]
        return cell.load + (cell.size * level.load_byte if level else 0.0)

    def save(self, node: int, level: CacheLevel) -> float:
        """Return the seconds to checkpoint the state after `node` in the cache level `level`."""
        cell = self.cells[node]
        return cell.save + cell.size * level.save_byte

    def parts(self) -> list[tuple[int, list[int], Tree]]:
        """Split the tree at existing checkpoints; return (base, nodes, tree of these nodes) for each part.

        `base` is the node whose checkpoint is restored to replay the part, or START. Node i of the part's tree is
        `nodes[i]`. The tree is not split at a checkpoint that takes longer to load than to compute again. Nodes that
        lead only to existing checkpoints are in no part.
        """
        is_base = [False] * len(self)
        base_of = [START] * len(self)
        for node, above in enumerate(self.parent):
            if above != START:
                base_of[node] = above if is_base[above] else base_of[above]
            cell, base = self.cells[node], base_of[node]
            seconds_to_compute = self.load(base) + self.between(base, node)
            is_base[node] = (
                cell.has_checkpoint
                and bool(self.children[node])
                and cell.load <= seconds_to_compute
            )
        is_needed = [not below for below in self.children]
        for node in range(len(self) - 1, -1, -1):
            above = self.parent[node]
            if above != START and is_needed[node] and not is_base[node]:
                is_needed[above] = True
        bases: dict[int, list[int]] = {}
        for node in range(len(self)):
            if is_needed[node] and not is_base[node]:
                bases.setdefault(base_of[node], []).append(node)
        parts: list[tuple[int, list[int], Tree]] = []
        for base, nodes in sorted(bases.items()):
            number = {node: i for i, node in enumerate(nodes)}
            parent = [number.get(self.parent[node], START) for node in nodes]
            cells = [replace(self.cells[node], has_checkpoint=False) for node in nodes]
            ends = [number[node] for node in dict.fromkeys(self.versions) if node in number]
            part = Tree.of(parent, cells, start=self.load(base), versions=ends)
            parts.append((base, nodes, part))
        return parts

    def subtree_sizes(self) -> list[int]:
        """Return a list whose item i is the number of nodes in the subtree of node i, including node i."""
        count = [1] * len(self)
        for node in range(len(self) - 1, -1, -1):
            if self.parent[node] != START:
                count[self.parent[node]] += count[node]
        return count


def merge(versions: Iterable[Sequence[Cell]], *, start: float = 0.0) -> Tree:
    """Return the tree in which `versions`, lists of cells, share their equal first cells.

    Two cells are equal if code and lineage are equal, and if seconds and size are similar. `start` are the seconds to
    start a process.

    >>> a, b, c = (Cell(x, x, 1.0, 1) for x in "abc")
    >>> merge([[a, b], [a, c], [a, b]]).parent
    (-1, 0, 0)
    """
    parent: list[int] = []
    cells: list[Cell] = []
    nodes: dict[tuple[int, str, str], list[int]] = {}
    ends: list[int] = []
    for version in versions:
        at = START
        for cell in version:
            candidates = nodes.setdefault((at, cell.code, cell.lineage), [])
            node = next((n for n in candidates if cells[n].similar(cell)), None)
            if node is None:
                node = len(cells)
                candidates.append(node)
                parent.append(at)
                cells.append(cell)
            elif cell.has_checkpoint and not cells[node].has_checkpoint:
                cells[node] = replace(cells[node], has_checkpoint=True, load=cell.load)
            at = node
        ends.append(at)
    return Tree.of(parent, cells, start=start, versions=ends)


class Do(StrEnum):
    """The action of one step of a replay. The values are the names that CHEX uses."""

    COMPUTE = "CT"
    CHECKPOINT = "CP"
    RESTORE = "RS"
    EVICT = "EV"


class ReplayStep(NamedTuple):
    """One step of a replay: compute `node`, or checkpoint, restore or evict the state after it."""

    do: Do
    node: int
    child: int = START
    """If the step restores: the node that is computed next."""
    level: int = 0
    """Unless the step computes: index of the cache level, or EXISTING for a checkpoint made before the replay."""

    def __str__(self) -> str:
        if self.do is Do.RESTORE:
            return f"RS({'start' if self.node == START else self.node}, {self.child})"
        return f"{self.do}({self.node}{f', level {self.level}' if self.level > 0 else ''})"


class StepBuilder:
    """Builds the steps of a replay, one path after the other: a path restores a state and computes down from it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.steps: list[ReplayStep] = []

    def add_path(
        self,
        base: int,
        end: int,
        *,
        level: int = 0,
        keep: Sequence[tuple[int, int]] = (),
        drop: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Append the steps that restore `base` from `level`, compute down to `end` and checkpoint nodes on the way.

        `keep` are (node, level) of the nodes to checkpoint. `drop` are (node, level) of checkpoints to evict: before
        the first new checkpoint, or at the end if there is no new checkpoint.
        """
        keep_at: dict[int, list[int]] = {}
        for node, at in keep:
            keep_at.setdefault(node, []).append(at)
        evictions = [ReplayStep(Do.EVICT, node, level=at) for node, at in drop]
        path = self.tree.path(base, end)
        self.steps.append(ReplayStep(Do.RESTORE, base, path[0], level))
        for i, node in enumerate(path):
            self.steps.append(ReplayStep(Do.COMPUTE, node))
            if node in keep_at:
                self.steps.extend(evictions)
                evictions = []
                self.steps.extend(ReplayStep(Do.CHECKPOINT, node, level=at) for at in keep_at[node])
                if i + 1 < len(path):
                    self.steps.append(ReplayStep(Do.RESTORE, node, path[i + 1], keep_at[node][0]))
        self.steps.extend(evictions)


def check(  # noqa: C901, PLR0912 - one check after another
    tree: Tree, steps: Sequence[ReplayStep], room: float | Levels, *, minimal: bool = False
) -> float:
    """Return the seconds that `steps` take on one worker; raise if they break a rule of CHEX or do not compute a leaf.

    The rules: A node is checkpointed right after its computation, with only evictions in between. The checkpoints of a
    level fit into its room. Only a node with a checkpoint is restored, and the child that the restore names is
    computed next. Only a node with a checkpoint is evicted. A node is computed right after its parent, or right after
    a restore of its parent. Restoring the state that was just checkpointed costs nothing, because the process still
    has this state. With `minimal`, computing a node that has a checkpoint is refused, as in CHEX.
    """
    levels = levels_of(room)
    kept_nodes = {(node, EXISTING) for node, cell in enumerate(tree.cells) if cell.has_checkpoint}
    used = [0.0] * len(levels)
    seconds, computed, process_state = 0.0, START, START
    previous: ReplayStep | None = None
    computed_nodes: set[int] = set()
    for i, step in enumerate(steps):
        do, node, child, level = step
        if previous is not None and previous.do is Do.RESTORE and do is not Do.COMPUTE:
            raise _wrong(step, f"{previous} must be followed by CT({previous.child})")
        if do is Do.COMPUTE:
            above = tree.parent[node]
            follows = previous is not None and (
                (previous.do is Do.COMPUTE and previous.node == above != START)
                or (previous.do is Do.RESTORE and (previous.node, previous.child) == (above, node))
            )
            if not follows and not (i == 0 and above == START):
                raise _wrong(step, "the state before it is not in the process")
            if minimal and any(kept == node for kept, _ in kept_nodes):
                raise _wrong(step, "its state is in the cache already")
            seconds += tree.cells[node].seconds
            computed = process_state = node
            computed_nodes.add(node)
        elif do is Do.CHECKPOINT:
            if computed != node:
                raise _wrong(step, "it was not computed just before")
            if (node, level) in kept_nodes or not 0 <= level < len(levels):
                raise _wrong(step, "it is kept already" if level >= 0 else "no such level")
            kept_nodes.add((node, level))
            used[level] += tree.cells[node].size
            seconds += tree.save(node, levels[level])
            if used[level] > levels[level].room * (1 + 1e-12):
                raise _wrong(
                    step, f"{used[level]:.0f} bytes do not fit into {levels[level].room:.0f}"
                )
        elif do is Do.RESTORE:
            if node != START and (node, level) not in kept_nodes:
                raise _wrong(step, "its state is not kept")
            if tree.parent[child] != node:
                raise _wrong(step, f"node {child} is not a child of it")
            in_process = node != START and process_state == node and previous is not None
            if not (in_process and previous is not None and previous.do is not Do.COMPUTE):
                seconds += tree.load(node, levels[level] if level >= 0 else None)
            computed = process_state = START
        else:
            if level < 0 or (node, level) not in kept_nodes:
                raise _wrong(step, "its state is not kept")
            kept_nodes.discard((node, level))
            used[level] -= tree.cells[node].size
        previous = step
    if previous is not None and previous.do is Do.RESTORE:
        raise _wrong(previous, f"it must be followed by CT({previous.child})")
    missed_leaves = set(tree.leaves) - computed_nodes
    if missed_leaves:
        raise _wrong(ReplayStep(Do.COMPUTE, min(missed_leaves)), "it is never reached")
    return seconds


def _wrong(step: ReplayStep, why: str) -> PlanError:
    return PlanError(f"Cannot do {step}: {why}.", slug="tree-steps")
