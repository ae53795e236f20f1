"""Pair the statements of a recorded text with the statements of the edited text.

A recorded statement that is not paired is missing; an edited statement that is not paired was added. Statements
are compared by their syntax trees without positions, so formatting, comments and docstrings do not count. A block
that gained statements is still paired if its head (`for epoch in range(10)`) is equal. For each missing statement,
`MissingStatement.replacement` is the added statement that most likely replaced it.
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
    rewrite_of,
)
from rearview.source.text import BODIES, blocks, effective, parse


@dataclass(frozen=True, slots=True)
class AddedStatement:
    """A statement that only the edited text has."""

    node: ast.stmt
    parents: tuple[ast.AST, ...]
    """The syntax nodes that enclose the statement, outermost first."""


@dataclass(frozen=True, slots=True)
class MissingStatement:
    """A recorded statement that the edited text lacks."""

    node: ast.stmt
    replacement: ast.stmt | None
    """The added statement that most likely replaced the recorded statement, or None."""
    line: int
    """Line of the edited text where the statement was expected."""
    why: str = ""
    """Why `replacement`, which only extracts variables, may compute something else; empty if no reason is known."""
    inside: ast.stmt | None = None
    """The added statement into which the recorded statement was moved, unchanged, or None."""
    contained: bool = False
    """Whether `replacement` contains the expression of the recorded statement."""
    moved: bool = False
    """Whether `replacement` is equal to the recorded statement and is only at another place in the edited text."""


@dataclass(slots=True)
class StatementComparison:
    """The comparison of two texts: which statements are paired, added or missing."""

    old: ast.Module
    new: ast.Module
    matched: list[tuple[ast.stmt, ast.stmt]] = field(default_factory=list)
    added_statements: list[AddedStatement] = field(default_factory=list)
    missing_statements: list[MissingStatement] = field(default_factory=list)
    widened: list[tuple[ast.stmt, tuple[ast.alias, ...]]] = field(default_factory=list)
    """(import in the edited text, names that it imports and the recorded import did not)."""
    extracted_variables: list[tuple[ExtractedVariable, tuple[ast.AST, ...]]] = field(
        default_factory=list
    )
    """Variables extracted from recorded statements, each with the syntax nodes that enclose the statement."""

    @property
    def changed(self) -> list[ast.stmt]:
        """Statements of the edited text that replace recorded statements."""
        return [
            each.replacement for each in self.missing_statements if each.replacement is not None
        ]


SIMILAR = 0.35
"""Least similarity of a missing statement and its replacement, from 0 to 1, if their types are equal."""
SIMILAR_ACROSS_TYPES = 0.6
"""Least similarity of a missing statement and its replacement if their types differ."""
_WORD = re.compile(r"\w+|[^\w\s]")


def most_similar(old: ast.stmt, added_statements: list[ast.stmt]) -> ast.stmt | None:
    """Return the added statement whose text is most similar to `old`, or None if none is similar enough.

    >>> old, *new = ast.parse("lr = 0.1; rearview.log('lr', lr); lr = 0.2").body
    >>> ast.unparse(most_similar(old, new))
    'lr = 0.2'
    """
    words = _words(old)
    best: tuple[float, ast.stmt | None] = (0.0, None)
    for new in added_statements:
        if isinstance(new, ast.Import | ast.ImportFrom) and type(new) is not type(old):
            continue
        if _logs(new) and not _logs(old):
            continue  # an added log statement is a probe, not the replacement of a recorded statement
        new_words = _words(new)
        similarity = 2 * (words & new_words).total() / max(1, words.total() + new_words.total())
        least = SIMILAR if type(new) is type(old) else SIMILAR_ACROSS_TYPES
        if similarity >= least and similarity > best[0]:
            best = (similarity, new)
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
"""Weights of a pair of statements for the choice of pairs: SAME if they are equal, NEAR if the edited one only
extracts variables or imports further names."""


class _Shapes:
    """Numbers the code of statements: statements with equal numbers have equal code."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.cache: dict[int, tuple[int, int, int]] = {}

    def shape(self, node: ast.stmt) -> tuple[int, int, int]:
        """Return (number of the whole statement, number of its head, count of statements in it and itself)."""
        cached = self.cache.get(id(node))
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
            inner_shapes = [self.shape(stmt) for stmt in effective(block)]
            inner.append(tuple(whole for whole, _, _ in inner_shapes))
            size += sum(count for _, _, count in inner_shapes)
        head_key = repr(head)
        shape = (self._number((head_key, tuple(inner))), self._number(head_key), size)
        self.cache[id(node)] = shape
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
    """Return the names that import `new` adds to import `old`, or None if `new` does not extend `old`."""
    if isinstance(old, ast.Import) and isinstance(new, ast.Import):
        pass
    elif isinstance(old, ast.ImportFrom) and isinstance(new, ast.ImportFrom):
        if (old.module, old.level) != (new.module, new.level):
            return None
    else:
        return None
    old_names = {(alias.name, alias.asname) for alias in old.names}
    new_names = {(alias.name, alias.asname) for alias in new.names}
    if not old_names < new_names or any(alias.name == "*" for alias in new.names):
        return None
    return tuple(alias for alias in new.names if (alias.name, alias.asname) not in old_names)


class _Aligner:
    def __init__(self, result: StatementComparison, rebindable: Rebindable) -> None:
        self.shapes = _Shapes()
        self.result = result
        self.rebindable = rebindable
        self.weights: dict[tuple[int, int], int] = {}
        self.rewrites: dict[tuple[int, int], RewrittenStatement | None] = {}
        self.places: dict[int, tuple[list[ast.stmt], int]] = {}
        """`id()` of a statement of the edited text -> (block that contains it, index in the block)."""
        self.gaps: list[_Gap] = []
        for node in ast.walk(result.new):
            for block in blocks(node):
                self.places.update({id(stmt): (block, at) for at, stmt in enumerate(block)})

    def weight(self, old: ast.stmt, new: ast.stmt, surplus: tuple[set[int], set[int]]) -> int:
        """Return the weight of the pair (`old`, `new`) and of all pairs inside, or 0 if the two cannot be paired.

        Statements with different heads are paired only if both heads are in `surplus`: (numbers of heads that are
        more frequent in the recorded block, numbers of heads that are more frequent in the edited block).
        """
        whole_old, head_old, size = self.shapes.shape(old)
        whole_new, head_new, _ = self.shapes.shape(new)
        if whole_old == whole_new:
            return SAME * size
        if head_old != head_new and not (head_old in surplus[0] and head_new in surplus[1]):
            return 0
        key = (id(old), id(new))
        if key not in self.weights:
            self.weights[key] = self._weigh(old, new, same_head=head_old == head_new)
        return self.weights[key]

    def _weigh(self, old: ast.stmt, new: ast.stmt, *, same_head: bool) -> int:
        if not same_head:
            if _wider(old, new):
                return NEAR
            rewrite = rewrite_of(old, new, lambda name: self._above(new, name), self.rebindable)
            self.rewrites[id(old), id(new)] = rewrite
            if rewrite is None or rewrite.why:
                return 0
        pairs = zip(blocks(old), blocks(new), strict=True)
        return (SAME if same_head else NEAR) + sum(
            sum(weight for _, _, weight in self.pair(effective(a), effective(b))) for a, b in pairs
        )

    def _above(self, stmt: ast.stmt, name: str) -> ast.Assign | ast.AnnAssign | None:
        """Return the nearest statement above `stmt` in its block whose only target is `name`, or None."""
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
        """Pair the statements of a recorded and an edited block so that the total weight is maximal.

        Return (recorded statement, edited statement, weight) for each pair, in the order of both blocks.
        """
        shapes = (
            [self.shapes.shape(stmt) for stmt in olds],
            [self.shapes.shape(stmt) for stmt in news],
        )
        equal_at_start = 0
        while (
            equal_at_start < min(len(olds), len(news))
            and shapes[0][equal_at_start][0] == shapes[1][equal_at_start][0]
        ):
            equal_at_start += 1
        equal_at_end = 0
        limit = min(len(olds), len(news)) - equal_at_start
        while (
            equal_at_end < limit
            and shapes[0][-1 - equal_at_end][0] == shapes[1][-1 - equal_at_end][0]
        ):
            equal_at_end += 1
        pairs = [(olds[i], news[i], SAME * shapes[0][i][2]) for i in range(equal_at_start)]
        rows = olds[equal_at_start : len(olds) - equal_at_end]
        cols = news[equal_at_start : len(news) - equal_at_end]
        best = [[0] * (len(cols) + 1) for _ in range(len(rows) + 1)]
        heads = [Counter(self.shapes.shape(stmt)[1] for stmt in block) for block in (rows, cols)]
        surplus = set(heads[0] - heads[1]), set(heads[1] - heads[0])
        weights = [[self.weight(a, b, surplus) for b in cols] for a in rows]
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
                pairs.append((rows[i], cols[j], weight))
                i, j = i + 1, j + 1
            elif best[i][j] == best[i][j + 1]:
                j += 1
            else:
                i += 1
        start = len(olds) - equal_at_end
        shift = len(news) - len(olds)
        pairs.extend(
            (olds[k], news[k + shift], SAME * shapes[0][k][2]) for k in range(start, len(olds))
        )
        return pairs

    def walk(
        self, olds: list[ast.stmt], news: list[ast.stmt], parents: tuple[ast.AST, ...]
    ) -> None:
        """Record which statements of two blocks, and of the blocks nested in them, are paired, added or missing."""
        olds, news = effective(olds), effective(news)
        pairs = self._without_reordered([(a, b) for a, b, _ in self.pair(olds, news)], news)
        extracting_ids = {
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
            added_statements = [
                stmt for stmt in news[at_new:to_new] if id(stmt) not in extracting_ids
            ]
            line = new.lineno if new is not None else _end(parents)
            self.gaps.append(_Gap(olds[at_old:to_old], added_statements, parents, line))
            at_old, at_new = to_old + 1, to_new + 1
            if old is None or new is None:
                continue
            self.result.matched.append((old, new))
            wider = _wider(old, new)
            if wider:
                self.result.widened.append((new, wider))
            is_loop = isinstance(new, ast.For | ast.AsyncFor | ast.While)
            for a, b in zip(blocks(old), blocks(new), strict=True):
                # the loop does not count as a parent of its `else` clause, which runs once, after the loop
                is_else = is_loop and b is getattr(new, "orelse", None)
                self.walk(a, b, parents if is_else else (*parents, new))

    def _extracted_variables(self, old: ast.stmt, new: ast.stmt) -> tuple[ExtractedVariable, ...]:
        rewrite = self.rewrites.get((id(old), id(new)))
        return rewrite.extracted_variables if rewrite is not None else ()

    def _without_reordered(
        self, pairs: list[tuple[ast.stmt, ast.stmt]], news: list[ast.stmt]
    ) -> list[tuple[ast.stmt, ast.stmt]]:
        """Return `pairs` without those whose edit moved the computation of a value above other recorded statements.

        For each pair that is left out, the reason is stored in `self.rewrites`.
        """
        index_of = {id(stmt): at for at, stmt in enumerate(news)}
        recorded_at = {index_of[id(new)]: new for _, new in pairs}
        valid_pairs = []
        for old, new in pairs:
            above = [
                index_of[id(g.stmt)]
                for g in self._extracted_variables(old, new)
                if g.read is not None
            ]
            between = (
                [recorded_at[k] for k in range(min(above), index_of[id(new)]) if k in recorded_at]
                if above
                else []
            )
            if not between:
                valid_pairs.append((old, new))
                continue
            self.rewrites[id(old), id(new)] = RewrittenStatement(
                (),
                f"`{ast.unparse(between[0]).splitlines()[0]}` (line {between[0].lineno}) ran before it",
            )
        return valid_pairs

    def find_replacements(self) -> None:
        """Add the missing statements, each with its replacement, and the other added statements to the result."""
        while self.gaps:
            gaps, self.gaps = self.gaps, []
            added_by_shape: dict[int, ast.stmt] = {}
            for gap in gaps:
                for stmt in gap.added_statements:
                    added_by_shape.setdefault(self.shapes.shape(stmt)[0], stmt)
            used_ids: set[int] = set()
            for gap in gaps:
                for stmt in gap.missing_statements:
                    self._record_missing(stmt, gap, added_by_shape, used_ids)
            self.result.added_statements.extend(
                AddedStatement(stmt, gap.parents)
                for gap in gaps
                for stmt in gap.added_statements
                if id(stmt) not in used_ids
            )

    def _record_missing(
        self, stmt: ast.stmt, gap: _Gap, added_by_shape: Mapping[int, ast.stmt], used_ids: set[int]
    ) -> None:
        missing_statements = self.result.missing_statements
        shape = self.shapes.shape(stmt)[0]
        twin = added_by_shape.get(shape)
        if twin is not None and id(twin) not in used_ids:
            used_ids.add(id(twin))
            missing_statements.append(MissingStatement(stmt, twin, twin.lineno, moved=True))
            return
        outer_candidates = [
            each
            for each in added_by_shape.values()
            if each in gap.added_statements or isinstance(each, FUNCTIONS)
        ]
        for outer in outer_candidates:
            inner = self._inner(outer, shape)
            if inner is not None:
                missing_statements.append(MissingStatement(stmt, None, inner.lineno, inside=outer))
                return
        for outer in gap.added_statements:
            if (
                isinstance(stmt, ast.Expr)
                and id(outer) not in used_ids
                and _contains_expression(outer, stmt.value)
            ):
                used_ids.add(id(outer))
                missing_statements.append(
                    MissingStatement(stmt, outer, outer.lineno, contained=True)
                )
                return
        replacement = most_similar(
            stmt, [each for each in gap.added_statements if id(each) not in used_ids]
        )
        if replacement is None:
            first_line = next((each.lineno for each in gap.added_statements), gap.line)
            missing_statements.append(MissingStatement(stmt, None, first_line))
            return
        used_ids.add(id(replacement))
        rewrite = self.rewrites.get((id(stmt), id(replacement)))
        missing_statements.append(
            MissingStatement(
                stmt, replacement, replacement.lineno, rewrite.why if rewrite is not None else ""
            )
        )
        pairs = list(zip(blocks(stmt), blocks(replacement), strict=False))
        if type(stmt) is type(replacement) and len(blocks(stmt)) == len(blocks(replacement)):
            for a, b in pairs:  # statements may have been added inside the changed statement
                self.walk(a, b, (*gap.parents, replacement))

    def _inner(self, outer: ast.stmt, shape: int) -> ast.stmt | None:
        for node in ast.walk(outer):
            if node is not outer and isinstance(node, ast.stmt):
                if self.shapes.shape(node)[0] == shape:
                    return node
        return None


@dataclass(frozen=True, slots=True)
class _Gap:
    """The added and the missing statements of a block between two pairs of equal statements that follow each other."""

    missing_statements: list[ast.stmt]
    added_statements: list[ast.stmt]
    parents: tuple[ast.AST, ...]
    line: int
    """Line of the edited text where the gap ends."""


def _contains_expression(stmt: ast.stmt, value: ast.expr) -> bool:
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
    """Return which statements of the recorded text `old` are in the edited text `new`, are missing, or were added.

    `recorded` has the variables and attributes of all recorded texts that calls may rebind; by default, only those
    of `old`.
    """
    result = StatementComparison(old, new)
    aligner = _Aligner(result, recorded if recorded is not None else rebindable([old]))
    aligner.walk(old.body, new.body, (new,))
    aligner.find_replacements()
    result.added_statements.sort(key=lambda item: (item.node.lineno, item.node.col_offset))
    return result


def align(old: str, new: str) -> Mapping[int, int]:
    r"""Return {line in `new`: line in `old`} for the statements that both texts have.

    >>> align("a = 1\nb = 2\n", "a = 1\n# why\nprint(a)\nb = 2\n")
    {1: 1, 4: 2}
    """
    result = compare(parse(old, "old"), parse(new, "new"))
    pairs = {b.lineno: a.lineno for a, b in result.matched}
    return dict(sorted(pairs.items()))
