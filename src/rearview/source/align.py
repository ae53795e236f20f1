"""Which statements of an edited text are the recorded ones, and which are new.

Statements are compared by their syntax tree without positions, so formatting, comments and
docstrings do not count. A recorded block may gain statements; it stays the same block as long
as its head (`for epoch in range(10)`) is the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rearview.errors import SourceError

BODIES = ("body", "orelse", "finalbody")


def parse(text: str, path: str) -> ast.Module:
    """Return the tree of `text`, or raise naming the line that does not parse."""
    try:
        return ast.parse(text, filename=path)
    except (SyntaxError, ValueError) as exc:
        line = getattr(exc, "lineno", None) or 1
        raise SourceError(
            f"{path}:{line} is not Python that this interpreter can read ({exc}). "
            f"Correct the file and ask again.",
            slug="source-syntax",
        ) from exc


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the statement lists directly inside `node`, in the order of the text."""
    found: list[list[ast.stmt]] = []
    for name, value in ast.iter_fields(node):
        if name in BODIES and isinstance(value, list):
            found.append(value)
        elif name in {"handlers", "cases"}:
            found.extend(part.body for part in value)
    return found


@dataclass(frozen=True, slots=True)
class Added:
    """A statement that only the edited text has, with the nodes around it, outermost first."""

    node: ast.stmt
    parents: tuple[ast.AST, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A recorded statement that the edited text lacks; `instead` stands in its place, if any."""

    node: ast.stmt
    instead: ast.stmt | None
    line: int
    """Line of the edited text where it was expected."""


@dataclass(slots=True)
class Comparison:
    """What became of each statement of two texts."""

    old: ast.Module
    new: ast.Module
    matched: list[tuple[ast.stmt, ast.stmt]] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    widened: list[tuple[ast.stmt, tuple[ast.alias, ...]]] = field(default_factory=list)
    """Recorded imports that bring in further names now."""


class _Shapes:
    """Numbers for statements: equal numbers mean equal code."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.of: dict[int, tuple[int, int, int]] = {}

    def look(self, node: ast.stmt) -> tuple[int, int, int]:
        """Return (number of the whole, number of its head, count of statements)."""
        known = self.of.get(id(node))
        if known is not None:
            return known
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
        found = (self._number((head_key, tuple(inner))), self._number(head_key), size)
        self.of[id(node)] = found
        return found

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


def effective(block: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a block that do something: no docstrings, no `pass`."""
    return [
        stmt
        for stmt in block
        if not isinstance(stmt, ast.Pass)
        and not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
    ]


def _wider(old: ast.stmt, new: ast.stmt) -> tuple[ast.alias, ...] | None:
    """Return the aliases that `new` imports beyond `old`, or None when it is not that import."""
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


class _Matcher:
    def __init__(self, result: Comparison) -> None:
        self.shapes = _Shapes()
        self.result = result
        self.weights: dict[tuple[int, int], int] = {}

    def weight(self, old: ast.stmt, new: ast.stmt) -> int:
        """Return how many statements can be paired when `old` is taken for `new`; 0: not at all."""
        whole_old, head_old, size = self.shapes.look(old)
        whole_new, head_new, _ = self.shapes.look(new)
        if whole_old == whole_new:
            return size
        if head_old != head_new:
            return 1 if _wider(old, new) else 0
        key = (id(old), id(new))
        if key not in self.weights:
            pairs = zip(blocks(old), blocks(new), strict=True)
            self.weights[key] = 1 + sum(
                sum(weight for _, _, weight in self.pair(effective(a), effective(b)))
                for a, b in pairs
            )
        return self.weights[key]

    def pair(
        self, olds: list[ast.stmt], news: list[ast.stmt]
    ) -> list[tuple[ast.stmt, ast.stmt, int]]:
        """Return the heaviest common subsequence of two blocks."""
        same = [self.shapes.look(stmt) for stmt in olds], [self.shapes.look(stmt) for stmt in news]
        first = 0
        while first < min(len(olds), len(news)) and same[0][first][0] == same[1][first][0]:
            first += 1
        tail = 0
        limit = min(len(olds), len(news)) - first
        while tail < limit and same[0][-1 - tail][0] == same[1][-1 - tail][0]:
            tail += 1
        head = [(olds[i], news[i], same[0][i][2]) for i in range(first)]
        rows = olds[first : len(olds) - tail]
        cols = news[first : len(news) - tail]
        best = [[0] * (len(cols) + 1) for _ in range(len(rows) + 1)]
        weights = [[self.weight(a, b) for b in cols] for a in rows]
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
        head.extend((olds[k], news[k + shift], same[0][k][2]) for k in range(start, len(olds)))
        return head

    def walk(
        self, olds: list[ast.stmt], news: list[ast.stmt], parents: tuple[ast.AST, ...]
    ) -> None:
        """Note what became of each statement of two blocks, and of the blocks inside."""
        olds, news = effective(olds), effective(news)
        pairs = self.pair(olds, news)
        place_old = {id(stmt): i for i, stmt in enumerate(olds)}
        place_new = {id(stmt): i for i, stmt in enumerate(news)}
        at_old = at_new = 0
        for old, new in [(a, b) for a, b, _ in pairs] + [(None, None)]:
            to_old = len(olds) if old is None else place_old[id(old)]
            to_new = len(news) if new is None else place_new[id(new)]
            self._gap(olds[at_old:to_old], news[at_new:to_new], parents, new)
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

    def _gap(
        self,
        lost: list[ast.stmt],
        added: list[ast.stmt],
        parents: tuple[ast.AST, ...],
        after: ast.stmt | None,
    ) -> None:
        kinds = [type(stmt) for stmt in added]
        taken: set[int] = set()
        for stmt in lost:
            # the likeliest replacement is the next one of the same kind
            free = [i for i in range(len(added)) if i not in taken]
            alike = [i for i in free if kinds[i] is type(stmt)]
            instead = next(iter(alike or free), None)
            if instead is not None:
                taken.add(instead)
                line = added[instead].lineno
            else:
                line = after.lineno if after is not None else _end(parents)
            self.result.lost.append(Lost(stmt, None if instead is None else added[instead], line))
        self.result.added.extend(
            Added(stmt, parents) for i, stmt in enumerate(added) if i not in taken
        )


def _end(parents: tuple[ast.AST, ...]) -> int:
    for parent in reversed(parents):
        end = getattr(parent, "end_lineno", None)
        if end is not None:
            return int(end)
    return 1


def compare(old: ast.Module, new: ast.Module) -> Comparison:
    """Return what became of each statement of `old` in `new`."""
    result = Comparison(old, new)
    _Matcher(result).walk(old.body, new.body, (new,))
    return result


def align(old: str, new: str) -> Mapping[int, int]:
    r"""Return the line in `old` of each statement of `new` that `old` has too.

    >>> align("a = 1\nb = 2\n", "a = 1\n# why\nprint(a)\nb = 2\n")
    {1: 1, 4: 2}
    """
    result = compare(parse(old, "old"), parse(new, "new"))
    pairs = {b.lineno: a.lineno for a, b in result.matched}
    return dict(sorted(pairs.items()))
