"""Pair the statements of a recorded text with those of the edited text; the others were added or are missing.

Statements are compared by their syntax tree without positions, so formatting, comments and docstrings do
not count. A recorded block may gain statements; it stays the same block as long as its head
(`for epoch in range(10)`) is the same. For each missing recorded statement, the added statement that most
likely replaced it is named.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rearview.source.log_calls import log_call
from rearview.source.loops import FUNCTIONS
from rearview.source.probes.extracted_variables import (
    ExtractedVariable,
    Rebindable,
    RewrittenStatement,
    rebindable,
    rewritten,
)
from rearview.source.text import BODIES, blocks, effective, parse


@dataclass(frozen=True, slots=True)
class Added:
    """A statement that only the edited text has, with the nodes around it, outermost first."""

    node: ast.stmt
    parents: tuple[ast.AST, ...]


@dataclass(frozen=True, slots=True)
class MissingStatement:
    """A recorded statement that the edited text lacks; `instead` is the statement in its place, if any."""

    node: ast.stmt
    instead: ast.stmt | None
    line: int
    """Line of the edited text where it was expected."""
    why: str = ""
    """Why `instead` does not compute the same, if it differs only a little."""
    inside: ast.stmt | None = None
    """The added statement into which it was moved, unchanged."""
    contained: bool = False
    """`instead` contains everything that it evaluates."""
    moved: bool = False
    """`instead` is the same statement at another place."""


@dataclass(slots=True)
class StatementComparison:
    """Which statements of two texts are paired, added or missing."""

    old: ast.Module
    new: ast.Module
    matched: list[tuple[ast.stmt, ast.stmt]] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    missing: list[MissingStatement] = field(default_factory=list)
    widened: list[tuple[ast.stmt, tuple[ast.alias, ...]]] = field(default_factory=list)
    """Recorded imports that now import further names."""
    extracted_variables: list[tuple[ExtractedVariable, tuple[ast.AST, ...]]] = field(
        default_factory=list
    )
    """Names that recorded statements now give to their values, each with the nodes around it."""

    @property
    def changed(self) -> list[ast.stmt]:
        """Statements of the edited text that replace recorded ones."""
        return [missing.instead for missing in self.missing if missing.instead is not None]


ALIKE = 0.35  # two statements of the same kind that share less are unrelated
OTHER = 0.6  # two statements of different kinds must share this much
_WORD = re.compile(r"\w+|[^\w\s]")


def most_similar(old: ast.stmt, added: list[ast.stmt]) -> ast.stmt | None:
    """Return the added statement whose text is most similar to `old`; None if none is similar enough.

    >>> old, *new = ast.parse("lr = 0.1; rearview.log('lr', lr); lr = 0.2").body
    >>> ast.unparse(most_similar(old, new))
    'lr = 0.2'
    """
    words = _words(old)
    best: tuple[float, ast.stmt | None] = (0.0, None)
    for new in added:
        if isinstance(new, ast.Import | ast.ImportFrom) and type(new) is not type(old):
            continue
        if _logs(new) and not _logs(old):
            continue  # it is a probe
        new_words = _words(new)
        alike = 2 * (words & new_words).total() / max(1, words.total() + new_words.total())
        if alike >= (ALIKE if type(new) is type(old) else OTHER) and alike > best[0]:
            best = (alike, new)
    return best[1]


def _logs(stmt: ast.stmt) -> bool:
    return (
        isinstance(stmt, ast.Expr)
        and isinstance(stmt.value, ast.Call)
        and log_call(stmt.value) is not None
    )


def _words(stmt: ast.stmt) -> Counter[str]:
    text = ast.unparse(stmt)
    if hasattr(stmt, "body"):
        text = text.splitlines()[0]
    return Counter(_WORD.findall(text))


SAME, NEAR = 8, 7
"""Weights of two equal statements, and of two statements of which one only names a value in addition."""


class _Shapes:
    """Numbers for statements: equal numbers mean equal code."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.of: dict[int, tuple[int, int, int]] = {}

    def look(self, node: ast.stmt) -> tuple[int, int, int]:
        """Return (number of the statement, number of its head, count of statements in it)."""
        cached = self.of.get(id(node))
        if cached is not None:
            return cached
        head: list[object] = [type(node).__name__]
        inner: list[tuple[int, ...]] = []
        size = 1
        for name, value in ast.iter_fields(node):
            if name in {"handlers", "cases"}:
                for part in value:
                    head.append([ast.dump(x) for x in _part_head(part)])
                    head.append(getattr(part, "name", None))
            elif name in BODIES and isinstance(value, list):
                continue
            else:
                head.append(_dump(value))
        for block in blocks(node):
            looks = [self.look(stmt) for stmt in effective(block)]
            inner.append(tuple(whole for whole, _, _ in looks))
            size += sum(count for _, _, count in looks)
        head_key = repr(head)
        shape = (self._number((head_key, tuple(inner))), self._number(head_key), size)
        self.of[id(node)] = shape
        return shape

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _part_head(part: ast.AST) -> Iterator[ast.AST]:
    for name in ("type", "pattern", "guard"):
        value = getattr(part, name, None)
        yield value if value is not None else ast.Constant(None)


def _dump(value: object) -> object:
    if isinstance(value, ast.AST):
        return ast.dump(value)
    if isinstance(value, list):
        return [_dump(item) for item in value]
    return value


def _wider(old: ast.stmt, new: ast.stmt) -> tuple[ast.alias, ...] | None:
    """Return the names that the import `new` adds to the import `old`; None if it is another import."""
    if isinstance(old, ast.Import) and isinstance(new, ast.Import):
        pass
    elif isinstance(old, ast.ImportFrom) and isinstance(new, ast.ImportFrom):
        if (old.module, old.level) != (new.module, new.level):
            return None
    else:
        return None
    before = {(alias.name, alias.asname) for alias in old.names}
    after = {(alias.name, alias.asname) for alias in new.names}
    if not before < after or any(alias.name == "*" for alias in new.names):
        return None
    return tuple(alias for alias in new.names if (alias.name, alias.asname) not in before)


class _Aligner:
    def __init__(self, result: StatementComparison, rebindable: Rebindable) -> None:
        self.shapes = _Shapes()
        self.result = result
        self.rebindable = rebindable
        self.weights: dict[tuple[int, int], int] = {}
        self.rewrites: dict[tuple[int, int], RewrittenStatement | None] = {}
        self.places: dict[int, tuple[list[ast.stmt], int]] = {}
        """Block and index of each statement of the edited text."""
        self.gaps: list[_Gap] = []
        for node in ast.walk(result.new):
            for block in blocks(node):
                self.places.update({id(stmt): (block, at) for at, stmt in enumerate(block)})

    def weight(self, old: ast.stmt, new: ast.stmt, spare: tuple[set[int], set[int]]) -> int:
        """Return how many statements are paired if `old` is paired with `new`; 0 if that is impossible.

        `spare` are the heads that occur in one of the two blocks more often than in the other.
        """
        whole_old, head_old, size = self.shapes.look(old)
        whole_new, head_new, _ = self.shapes.look(new)
        if whole_old == whole_new:
            return SAME * size
        if head_old != head_new and not (head_old in spare[0] and head_new in spare[1]):
            return 0
        key = (id(old), id(new))
        if key not in self.weights:
            self.weights[key] = self._weigh(old, new, same_head=head_old == head_new)
        return self.weights[key]

    def _weigh(self, old: ast.stmt, new: ast.stmt, *, same_head: bool) -> int:
        if not same_head:
            if _wider(old, new):
                return NEAR
            rewrite = rewritten(old, new, lambda name: self._above(new, name), self.rebindable)
            self.rewrites[id(old), id(new)] = rewrite
            if rewrite is None or rewrite.why:
                return 0
        pairs = zip(blocks(old), blocks(new), strict=True)
        return (SAME if same_head else NEAR) + sum(
            sum(weight for _, _, weight in self.pair(effective(a), effective(b))) for a, b in pairs
        )

    def _above(self, stmt: ast.stmt, name: str) -> ast.Assign | ast.AnnAssign | None:
        """Return the statement before `stmt`, in its block, that assigns to `name` and nothing else."""
        block, at = self.places[id(stmt)]
        for k in range(at - 1, -1, -1):
            above = block[k]
            if isinstance(above, ast.Assign) and len(above.targets) == 1:
                target = above.targets[0]
            elif isinstance(above, ast.AnnAssign) and above.value is not None:
                target = above.target
            else:
                continue
            if isinstance(target, ast.Name) and target.id == name:
                return above
        return None

    def pair(
        self, olds: list[ast.stmt], news: list[ast.stmt]
    ) -> list[tuple[ast.stmt, ast.stmt, int]]:
        """Return the heaviest common subsequence of two blocks."""
        shapes = (
            [self.shapes.look(stmt) for stmt in olds],
            [self.shapes.look(stmt) for stmt in news],
        )
        first = 0
        while first < min(len(olds), len(news)) and shapes[0][first][0] == shapes[1][first][0]:
            first += 1
        tail = 0
        limit = min(len(olds), len(news)) - first
        while tail < limit and shapes[0][-1 - tail][0] == shapes[1][-1 - tail][0]:
            tail += 1
        head = [(olds[i], news[i], SAME * shapes[0][i][2]) for i in range(first)]
        rows = olds[first : len(olds) - tail]
        cols = news[first : len(news) - tail]
        best = [[0] * (len(cols) + 1) for _ in range(len(rows) + 1)]
        heads = [Counter(self.shapes.look(stmt)[1] for stmt in block) for block in (rows, cols)]
        spare = set(heads[0] - heads[1]), set(heads[1] - heads[0])
        weights = [[self.weight(a, b, spare) for b in cols] for a in rows]
        for i in range(len(rows) - 1, -1, -1):
            for j in range(len(cols) - 1, -1, -1):
                weight = weights[i][j]
                best[i][j] = max(
                    best[i + 1][j], best[i][j + 1], weight + best[i + 1][j + 1] if weight else 0
                )
        i = j = 0
        while i < len(rows) and j < len(cols):
            weight = weights[i][j]
            if weight and best[i][j] == weight + best[i + 1][j + 1]:
                head.append((rows[i], cols[j], weight))
                i, j = i + 1, j + 1
            elif best[i][j] == best[i][j + 1]:
                j += 1
            else:
                i += 1
        start = len(olds) - tail
        shift = len(news) - len(olds)
        head.extend(
            (olds[k], news[k + shift], SAME * shapes[0][k][2]) for k in range(start, len(olds))
        )
        return head

    def walk(
        self, olds: list[ast.stmt], news: list[ast.stmt], parents: tuple[ast.AST, ...]
    ) -> None:
        """Record for each statement of two blocks, and of the blocks inside, whether it is paired."""
        olds, news = effective(olds), effective(news)
        pairs = self._settled([(a, b) for a, b, _ in self.pair(olds, news)], news)
        above = {
            id(variable.stmt) for pair in pairs for variable in self._extracted_variables(*pair)
        }
        for pair in pairs:
            self.result.extracted_variables.extend(
                (variable, parents) for variable in self._extracted_variables(*pair)
            )
        place_old = {id(stmt): i for i, stmt in enumerate(olds)}
        place_new = {id(stmt): i for i, stmt in enumerate(news)}
        at_old = at_new = 0
        for old, new in [*pairs, (None, None)]:
            to_old = len(olds) if old is None else place_old[id(old)]
            to_new = len(news) if new is None else place_new[id(new)]
            added = [stmt for stmt in news[at_new:to_new] if id(stmt) not in above]
            line = new.lineno if new is not None else _end(parents)
            self.gaps.append(_Gap(olds[at_old:to_old], added, parents, line))
            at_old, at_new = to_old + 1, to_new + 1
            if old is None or new is None:
                continue
            self.result.matched.append((old, new))
            wider = _wider(old, new)
            if wider:
                self.result.widened.append((new, wider))
            outside = isinstance(new, ast.For | ast.AsyncFor | ast.While)
            for a, b in zip(blocks(old), blocks(new), strict=True):
                # the `else` of a loop runs once, after it
                after = outside and b is getattr(new, "orelse", None)
                self.walk(a, b, parents if after else (*parents, new))

    def _extracted_variables(self, old: ast.stmt, new: ast.stmt) -> tuple[ExtractedVariable, ...]:
        rewrite = self.rewrites.get((id(old), id(new)))
        return rewrite.extracted_variables if rewrite is not None else ()

    def _settled(
        self, pairs: list[tuple[ast.stmt, ast.stmt]], news: list[ast.stmt]
    ) -> list[tuple[ast.stmt, ast.stmt]]:
        """Return the pairs, without those whose edit would compute a value earlier than other recorded code."""
        place = {id(stmt): at for at, stmt in enumerate(news)}
        recorded = {place[id(new)]: new for _, new in pairs}
        kept = []
        for old, new in pairs:
            above = [
                place[id(g.stmt)] for g in self._extracted_variables(old, new) if g.read is not None
            ]
            between = (
                [recorded[k] for k in range(min(above), place[id(new)]) if k in recorded]
                if above
                else []
            )
            if not between:
                kept.append((old, new))
                continue
            self.rewrites[id(old), id(new)] = RewrittenStatement(
                (),
                f"`{ast.unparse(between[0]).splitlines()[0]}` (line {between[0].lineno}) ran before it",
            )
        return kept

    def find_replacements(self) -> None:
        """Find, for each missing statement, the added statement in its place."""
        while self.gaps:
            gaps, self.gaps = self.gaps, []
            added: dict[int, ast.stmt] = {}
            for gap in gaps:
                for stmt in gap.added:
                    added.setdefault(self.shapes.look(stmt)[0], stmt)
            used: set[int] = set()
            for gap in gaps:
                for stmt in gap.missing:
                    self._note_missing(stmt, gap, added, used)
            self.result.added.extend(
                Added(stmt, gap.parents)
                for gap in gaps
                for stmt in gap.added
                if id(stmt) not in used
            )

    def _note_missing(
        self, stmt: ast.stmt, gap: _Gap, added: Mapping[int, ast.stmt], used: set[int]
    ) -> None:
        missing = self.result.missing
        shape = self.shapes.look(stmt)[0]
        twin = added.get(shape)
        if twin is not None and id(twin) not in used:
            used.add(id(twin))
            missing.append(MissingStatement(stmt, twin, twin.lineno, moved=True))
            return
        around = [
            each for each in added.values() if each in gap.added or isinstance(each, FUNCTIONS)
        ]
        for outer in around:
            inner = self._inner(outer, shape)
            if inner is not None:
                missing.append(MissingStatement(stmt, None, inner.lineno, inside=outer))
                return
        for outer in gap.added:
            if isinstance(stmt, ast.Expr) and id(outer) not in used and _holds(outer, stmt.value):
                used.add(id(outer))
                missing.append(MissingStatement(stmt, outer, outer.lineno, contained=True))
                return
        instead = most_similar(stmt, [each for each in gap.added if id(each) not in used])
        if instead is None:
            first = next((each.lineno for each in gap.added), gap.line)
            missing.append(MissingStatement(stmt, None, first))
            return
        used.add(id(instead))
        near = self.rewrites.get((id(stmt), id(instead)))
        missing.append(
            MissingStatement(stmt, instead, instead.lineno, near.why if near is not None else "")
        )
        pairs = list(zip(blocks(stmt), blocks(instead), strict=False))
        if type(stmt) is type(instead) and len(blocks(stmt)) == len(blocks(instead)):
            for a, b in pairs:  # statements may have been added inside
                self.walk(a, b, (*gap.parents, instead))

    def _inner(self, outer: ast.stmt, shape: int) -> ast.stmt | None:
        for node in ast.walk(outer):
            if node is not outer and isinstance(node, ast.stmt):
                if self.shapes.look(node)[0] == shape:
                    return node
        return None


@dataclass(frozen=True, slots=True)
class _Gap:
    """The added and missing statements between two pairs."""

    missing: list[ast.stmt]
    added: list[ast.stmt]
    parents: tuple[ast.AST, ...]
    line: int
    """Line of the edited text where the gap ends."""


def _holds(stmt: ast.stmt, value: ast.expr) -> bool:
    expected = ast.dump(value)
    return any(type(node) is type(value) and ast.dump(node) == expected for node in ast.walk(stmt))


def _end(parents: tuple[ast.AST, ...]) -> int:
    for parent in reversed(parents):
        end = getattr(parent, "end_lineno", None)
        if end is not None:
            return int(end)
    return 1


def compare(
    old: ast.Module, new: ast.Module, recorded: Rebindable | None = None
) -> StatementComparison:
    """Return which statements of `old` are in `new`, which are missing, and which were added.

    `recorded` names what calls may rebind, according to all recorded texts (by default, only `old`).
    """
    result = StatementComparison(old, new)
    aligner = _Aligner(result, recorded if recorded is not None else rebindable([old]))
    aligner.walk(old.body, new.body, (new,))
    aligner.find_replacements()
    result.added.sort(key=lambda item: (item.node.lineno, item.node.col_offset))
    return result


def align(old: str, new: str) -> Mapping[int, int]:
    r"""Return the line in `old` of each statement of `new` that `old` has too.

    >>> align("a = 1\nb = 2\n", "a = 1\n# why\nprint(a)\nb = 2\n")
    {1: 1, 4: 2}
    """
    result = compare(parse(old, "old"), parse(new, "new"))
    pairs = {b.lineno: a.lineno for a, b in result.matched}
    return dict(sorted(pairs.items()))
