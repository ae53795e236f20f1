"""Build the SQL of one table: its columns, its rows and their order (`"acc desc, epoch"`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from rearview.errors import UsageError
from rearview.model.proof import TRUSTED
from rearview.store.tables.connection import ident, key, quoted
from rearview.store.tables.pivot import (
    INTERPOLATED,
    Catalogue,
    RowPaths,
    depth,
    fill,
    hidden,
    inside,
    loop_columns,
    rows_of,
    union_of_paths,
    with_interpolated,
)
from rearview.store.tables.select_records import SelectedRecords

_COMMA = re.compile(r""",(?=(?:[^"]*"[^"]*")*[^"]*$)""")
"""A comma outside of double quotes."""
_KEY = re.compile(
    r"""(?P<minus>-?)(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<plain>.+?))(?:\s+(?P<way>asc|desc))?""",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class OrderKey:
    """A column that rows are ordered by."""

    column: str
    """As the user wrote it."""
    descending: bool = False


def order_keys(
    order: str | Iterable[str] | None, is_column: Callable[[str], bool]
) -> list[OrderKey]:
    """Return the keys that a text or several texts name, the most important first.

    A column whose name has commas, blanks or a leading minus is written in double quotes, unless the
    whole text is its name.

    >>> order_keys("acc desc, epoch", lambda name: False)
    [OrderKey(column='acc', descending=True), OrderKey(column='epoch', descending=False)]
    >>> order_keys(["-acc", '"val, acc" DESC'], lambda name: False)
    [OrderKey(column='acc', descending=True), OrderKey(column='val, acc', descending=True)]
    """
    keys: list[OrderKey] = []
    for text in [order] if isinstance(order, str) else (order or ()):
        if is_column(text):
            keys.append(OrderKey(text))
            continue
        for piece in _COMMA.split(text):
            match = _KEY.fullmatch(piece.strip())
            if match is None:
                raise _unreadable(text)
            way = (match["way"] or "asc").lower()
            column = match["quoted"].replace('""', '"') if match["quoted"] else match["plain"]
            keys.append(OrderKey(column, (way == "desc") != bool(match["minus"])))
    return keys


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"The order {text!r} cannot be read. Write columns separated by commas, each with desc "
        'after it if large values come first: "acc desc, epoch".',
        slug="order",
    )


def order_sql(label: str, kind: str, *, descending: bool) -> list[str]:
    """Return the SQL terms that order rows by one column; rows without a value come last.

    Not-a-number comes behind all numbers in both directions. A column of several types is ordered
    by its numbers first, then by text.
    """
    way = f"{'DESC' if descending else 'ASC'} NULLS LAST"
    column = ident(label)
    if kind == "float":
        return [f"{column} IS NULL", f"coalesce(isnan({column}), false)", f"{column} {way}"]
    if kind == "bigint":
        return [
            f"TRY_CAST({column} AS HUGEINT) {way}",
            f"length({column}) {way}",
            f"{column} {way}",
        ]
    if kind == "mixed":
        return [f"TRY_CAST({column} AS DOUBLE) {way}", f"{column} {way}"]
    return [f"{column} {way}"]


RUN_COLUMNS = (
    *("status", "script", "version", "started", "ended", "exit_code", "host", "parent"),
    *("name", "tags", "note"),
)
"""Facts of runs that can be columns."""
MARK = "unproved"
"""Name of the column that lists the unproved values of each row."""
_RUN = "r:run"
"""Key of an order: runs in the order they started."""
WORD = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")+)"|([^\W\d]\w*)""")
_NEVER = frozenset(
    ("and", "or", "not", "in", "is", "null", "like", "between", "true", "false", "case", "when")
) | {"then", "else", "end"}


class TableQuery:
    """The columns of a table, and the SQL that selects them.

    With `level`, only values that were logged that many loops deep. With `every`, a query without names
    means all names, also captured ones that a table leaves out by default. With `interpolate`, missing
    numbers between known ones are filled.
    """

    def __init__(
        self,
        selected: SelectedRecords,
        names: Iterable[str],
        *,
        origins: bool,
        level: int | None = None,
        every: bool = False,
        interpolate: bool = False,
    ) -> None:
        self._selected = selected
        self._interpolate = interpolate
        self._shows_origins = origins
        self._cat = selected.catalogue if level is None else at_level(selected.catalogue, level)
        self._all_loops = self._cat.loops(self._cat.rank)
        self._logged: list[str] = []
        self._facts: list[str] = []
        name_list = list(names)
        if not name_list:
            self._logged = list(self._cat.names) if every else selected.names_by_default()
            self._facts = [f"a:{name}" for name in selected.args]
        for text in name_list:
            # a name means the logged value rather than a loop of the same name
            self._add(f"n:{text}" if text in self._cat.names else self.column_of(text))
        self.mark = ""
        """Column that lists the unproved values of each row; empty if there is none."""
        self.interpolated = ""
        """Column that lists the interpolated values of each row; empty if there is none."""
        self.kinds: dict[str, str] = {}
        """Kind of every recorded column, by its label."""
        self.labels: list[str] = []
        """The columns of the answer, each as it was logged."""

    @property
    def unproved(self) -> list[str]:
        """The columns of the answer that may hold unproved values."""
        return [name for name in self._logged if name in self._selected.unproved]

    @property
    def _origins(self) -> Collection[str]:
        """Names whose origins are needed."""
        return self._logged if self._shows_origins else self.unproved

    @property
    def bare(self) -> bool:
        """Whether no column holds logged values."""
        return not self._logged

    def _add(self, column: str) -> None:
        if column.startswith("l:"):
            return  # loops have their columns anyway
        into = self._logged if column.startswith("n:") else self._facts
        column = column.removeprefix("n:")
        if column not in into:
            into.append(column)

    def column_of(self, text: str) -> str:
        """Return the column that a text names: `n:` logged, `a:` argument, `l:` loop, `r:` fact."""
        column = self._find(text)
        if column is None:
            raise UsageError(
                f"Nothing is known by the name {text!r}. {self._nearest(text)}", slug="unknown-name"
            )
        return column

    def _find(self, text: str) -> str | None:
        names, args = self._cat.names, self._selected.args
        short = text.removesuffix("_logged").removesuffix("_arg")
        for column, holds in (
            (f"l:{text}", text in self._all_loops),
            (f"n:{text}", text in names),
            (f"a:{text}", text in args),
            (f"r:{text}", text in RUN_COLUMNS),
            (f"n:{short}", text.endswith("_logged") and short in names),
            (f"a:{short}", text.endswith("_arg") and short in args),
        ):
            if holds:
                return column
        return None

    def _nearest(self, text: str) -> str:
        columns = [*self._cat.names, *self._selected.args, *self._all_loops]
        if not self._cat.names and not self._selected.args:
            return "No run has logged anything yet."
        word = text.lower()
        near = [name for name in columns if _contains(name.lower(), word)]
        for names, cutoff in ((columns, 0.6), (RUN_COLUMNS, 0.75)):
            lower = {name.lower(): name for name in reversed(names)}
            near += [lower[n] for n in difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)]
        if near:
            return f"Did you mean {' or '.join(list(dict.fromkeys(near))[:5])}?"
        shown = ", ".join(columns[:8])
        return f"Known are: {shown}. To have it, log it: `rearview.log({text!r}, ...)`."

    def explain(self, message: str) -> UsageError | None:
        """Return a better error for a column that DuckDB did not find."""
        match = re.search(r'[Cc]olumn "([^"]+)" (?:not found|does not exist)', message)
        if match is None:
            return None
        return UsageError(
            f"Nothing is known by the name {match[1]!r}. {self._nearest(match[1])} If it is a text, put it "
            f"in single quotes inside the condition: \"name = '{match[1]}'\".",
            slug="unknown-name",
        )

    def sql(
        self,
        where: str | None,
        order: str | Iterable[str] | None = None,
        limit: int | None = None,
        *,
        keys: bool = False,
    ) -> str:
        """Return the SELECT; with `keys` it returns run, path and iterations only."""
        keys_of_order = [
            (self._order_column(key.column), key)
            for key in order_keys(order, lambda text: self._find(text) is not None)
        ]
        ordering = [column for column, _ in keys_of_order]
        extra = [*self._mentioned(where or ""), *(c for c in ordering if c != _RUN)]
        inline: list[str] = []
        apart: list[str] = []
        rows = self._rows(self._logged)
        for column in dict.fromkeys(extra):
            name = column.removeprefix("n:")
            if column.startswith("n:") and name not in self._logged:
                fits = all(any(inside(q, p) for q in rows.paths) for p in self._cat.names[name])
                (inline if fits else apart).append(name)
        self._check_order(keys_of_order, rows, apart)
        facts = [*self._facts, *(c for c in extra if c[:2] in ("a:", "r:"))]
        deepest = max((depth(path) for path in rows.paths), default=0)
        place = [f"$r{k}" for k in range(1, deepest + 1)], [f"$i{k}" for k in range(1, deepest + 1)]
        speaks = any(MARK in match.groups() for match in WORD.finditer(where or ""))
        self.mark = self.interpolated = ""
        if speaks or (self.unproved and not self._shows_origins):
            self.mark = self._free_label(MARK, rows)
        if self._interpolate and not self._shows_origins:
            self.interpolated = self._free_label(INTERPOLATED, rows)
        columns = dict(self._visible(rows))
        names = _distinct(columns)
        self.labels = list(columns)
        self.kinds = {label: kind for label, (_, kind) in columns.items() if kind}
        beside = {path for name in inline for path in self._cat.names[name]} - set(rows.paths)
        rows = replace(rows, joined=frozenset(beside))
        selected = self._selected
        if limit is not None and not where and not ordering and not self._interpolate:
            selected = self._near(rows, limit)
        logged = [*self._logged, *inline]
        text = self._rows_sql(logged, rows, facts, selected)
        if where and not apart:
            text = f"SELECT * FROM ({text}) WHERE (\n{where}\n)"
        elif where:
            text = self._rows_containing(text, rows, [*logged, *apart], facts, where)
        if keys:
            shown = ", ".join(map(ident, ["run", *hidden(deepest)]))
        else:
            shown = ", ".join(ident(name) for name in names.values())
        ranked = self._order_terms(keys_of_order, rows, logged, facts)
        steps = [ident(c) for pair in zip(*place, strict=True) for c in pair]
        by = ", ".join([*ranked, ident("$ord"), *_in_order([*steps, ident("$occ")])])
        end = f" LIMIT {int(limit)}" if limit is not None else ""
        return f"SELECT {shown} FROM ({text}) ORDER BY {by}{end}"

    def _order_column(self, text: str) -> str:
        """Return the column that a key of the order names; the case of letters may differ."""
        if text == "run":
            return _RUN
        every = (*self._cat.names, *self._selected.args, *self._all_loops)
        same = [name for name in every if name.lower() == text.lower()]
        return next(filter(None, map(self._find, (text, *same))), None) or self.column_of(text)

    def _check_order(
        self, keys: list[tuple[str, OrderKey]], rows: RowPaths, apart: Collection[str]
    ) -> None:
        """Raise if rows cannot be ordered by one of the keys."""
        loops = self._cat.loops(rows.paths)
        for column, key_of_order in keys:
            name = column[2:]
            if column.startswith("n:") and name in apart:
                why = "it has several values in each of them, as it is logged in a loop inside"
                todo = "Add it to the names"
            elif column.startswith("l:") and name not in loops:
                why, todo = "they are not in that loop", "Add a name that is logged in it"
            elif column.startswith("n:") and self._cat.kind(name) == "object":
                why, todo = "it holds arrays, tensors or images", "Log a number of it, its norm say"
            else:
                continue
            raise UsageError(
                f"Rows cannot be ordered by {key_of_order.column!r}: {why}. {todo}.", slug="order"
            )

    def _order_terms(
        self,
        keys: list[tuple[str, OrderKey]],
        rows: RowPaths,
        names: Iterable[str],
        facts: Iterable[str],
    ) -> list[str]:
        """Return the SQL terms of the requested order."""
        loops = self._cat.loops(rows.paths)
        labels = _distinct(self._available(rows, names, facts))
        out: list[str] = []
        for column, key_of_order in keys:
            name, kind, down = column[2:], "", key_of_order.descending
            if column == _RUN:
                out.append(f"{ident('$ord')} {'DESC' if down else 'ASC'}")
                continue
            if column.startswith("n:"):
                label, kind = self._label(name, loops), self._kind(name)
            elif column.startswith("l:"):
                label, kind = name, loops[name]
            else:
                label, (_, kind) = self._fact(column, loops)
            out += order_sql(labels[label], kind, descending=down)
        return out

    def _kind(self, name: str) -> str:
        """Return the kind of the column of a logged name in the answer."""
        return "float" if self._fills(name) else self._cat.kind(name)

    def _fills(self, name: str) -> bool:
        """Return True if missing values of a name are to be interpolated: if it holds numbers."""
        if not self._interpolate or self._cat.kind(name) not in {"float", "int"}:
            return False
        return not any("long" in kinds for kinds in self._cat.names[name].values())

    def _near(self, rows: RowPaths, limit: int) -> SelectedRecords:
        """Return selected that hold the first rows and little more."""
        if not self._logged:
            return self._selected
        selected = self._selected.first(limit, self._logged)
        if len({path.split("/")[0] for path in rows.paths if path}) != 1 or not selected.plain:
            return selected
        leaf = max(rows.paths, key=depth)
        here = {n: self._cat.kind(n) for n in self._logged if leaf in self._cat.names[n]}
        return selected.until(leaf, limit, here)

    def _rows(self, names: Iterable[str]) -> RowPaths:
        paths_by_name = {name: self._cat.names[name] for name in names}
        fillable = {
            (n, path) for n, at in paths_by_name.items() for path, kinds in at.items() if not kinds
        }
        rows = rows_of(paths_by_name, fillable)
        if not rows.paths:
            return RowPaths(("",), frozenset({""}))
        if fillable and "" not in rows.paths:  # runs without a known point still have a row
            return RowPaths(("", *rows.paths), rows.kept)
        return rows

    def _visible(self, rows: RowPaths) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield label, SQL and kind of every column of the answer."""
        loops = self._cat.loops(rows.paths)
        yield "run", ("b.run", "")
        for loop in loops:
            yield loop, (f"b.{key('l', loop)}", "")
        for name in self._logged:
            label = self._label(name, loops)
            yield label, (f"b.{key('n', name)}", self._kind(name))
            if self._shows_origins:
                origin = f"b.{key('o', name)}"
                if self._fills(name):
                    origin = f"CASE WHEN b.{fill(name)} IS NOT NULL THEN {quoted(INTERPOLATED)} ELSE {origin} END"
                yield f"{label}.origin", (origin, "")
        for column in self._facts:
            yield self._fact(column, loops)
        if self.mark:
            yield self.mark, (self._marks(loops), "")
        if self.interpolated:
            yield self.interpolated, (self._fill_marks(loops), "")

    def _marks(self, loops: Iterable[str]) -> str:
        """Return the SQL of the names of the unproved values of a row; null if it has none."""
        trusted = ", ".join(map(quoted, sorted(TRUSTED)))
        marks = [
            f"CASE WHEN b.{key('o', name)} NOT IN ({trusted}) "
            f"THEN {quoted(self._label(name, loops))} END"
            for name in self.unproved
        ]
        return _listed(marks)

    def _fill_marks(self, loops: Iterable[str]) -> str:
        """Return the SQL of the names of the interpolated values of a row; null if it has none."""
        return _listed(
            f"CASE WHEN b.{fill(name)} IS NOT NULL THEN {quoted(self._label(name, loops))} END"
            for name in self._logged
            if self._fills(name)
        )

    def _free_label(self, word: str, rows: RowPaths) -> str:
        """Return a name for a column of marks that no other column has."""
        taken = {label.lower() for label, _ in self._visible(rows)}
        return next(label for k in range(len(taken) + 1) if (label := word + "_" * k) not in taken)

    def _available(
        self, rows: RowPaths, names: Iterable[str], facts: Iterable[str]
    ) -> dict[str, tuple[str, str]]:
        """Return all that a condition or an order may mention: SQL and kind by label."""
        loops = self._cat.loops(rows.paths)
        out = dict(self._visible(rows))
        for name in names:
            out.setdefault(self._label(name, loops), (f"b.{key('n', name)}", ""))
        for column in facts:
            label, fact = self._fact(column, loops)
            out.setdefault(label, fact)
        return out

    def _label(self, name: str, loops: Iterable[str]) -> str:
        return f"{name}_logged" if name in loops or name == "run" else name

    def _fact(self, column: str, loops: Iterable[str]) -> tuple[str, tuple[str, str]]:
        name = column[2:]
        if column.startswith("r:"):
            return name, (f"r.{ident(name)}", "")
        taken = name in self._logged or name in loops or name == "run"
        label = f"{name}_arg" if taken else name
        return label, (f"a.{key('a', name)}", self._selected.args[name])

    def _rows_sql(
        self, names: list[str], rows: RowPaths, facts: list[str], selected: SelectedRecords
    ) -> str:
        """Return all rows with everything that a condition or an order may mention."""
        kinds = {name: self._cat.kind(name) for name in names}
        columns = {name: dict.fromkeys(self._cat.names[name], kinds[name]) for name in names}

        def source(path: str) -> str:
            here = {name: kinds[name] for name in names if path in columns[name]}
            return selected.wide(path, here, origins=self._origins)

        text = union_of_paths(self._cat, columns, rows, source, origins=self._origins)
        if filled := {name: self._cat.names[name] for name in names if self._fills(name)}:
            text = with_interpolated(text, rows.paths, filled)
        shown = self._available(rows, names, facts)
        labels = _distinct(shown)
        cells = ", ".join(f"{sql} AS {ident(labels[label])}" for label, (sql, _) in shown.items())
        deepest = max((depth(path) for path in rows.paths), default=0)
        place = ", ".join(f"b.{ident(column)}" for column in hidden(deepest))
        return (
            f"SELECT {cells}, {place}, b.{ident('$s')}, r.ord AS {ident('$ord')} FROM ({text}) b "
            "JOIN own.runs r ON r.run = b.run LEFT JOIN own.args a ON a.run = b.run"
        )

    def _rows_containing(
        self, text: str, rows: RowPaths, names: list[str], facts: list[str], where: str
    ) -> str:
        """Return the rows in which, or inside which, the condition holds somewhere."""
        deeper = self._rows(names)
        inner = self._rows_sql(names, deeper, facts, self._selected)
        shared = min(
            _common(p, q)
            for p in rows.paths
            for name in names
            for q in self._cat.names[name]
            if q not in rows.paths
        )
        keys = [ident("run"), *(ident(f"${c}{k}") for k in range(1, shared + 1) for c in "ri")]
        on = " AND ".join(f"o.{key} = s.{key}" for key in keys)
        matching = f"SELECT {', '.join(keys)} FROM ({inner}) WHERE (\n{where}\n)"
        return f"SELECT o.* FROM ({text}) o SEMI JOIN ({matching}) s ON {on}"

    def _mentioned(self, where: str) -> Iterator[str]:
        """Yield the columns that a condition mentions."""
        for match in WORD.finditer(where):
            word = match[1].replace('""', '"') if match[1] else match[2]
            if word and not (match[2] and word.lower() in _NEVER):
                every = (*self._cat.names, *self._selected.args)
                same = [word, *(name for name in every if name.lower() == word.lower())]
                column = next(filter(None, map(self._find, same)), None)
                if column is not None:
                    yield column


def _listed(marks: Iterable[str]) -> str:
    """Return SQL that joins the marks that are not null by commas; null if all are."""
    texts = ", ".join(marks)
    return f"nullif(concat_ws(', ', {texts}), '')" if texts else "NULL::VARCHAR"


def _contains(name: str, word: str) -> bool:
    """Return True if one of two names is a part of the other: `loss` of `train_loss`."""
    short, long = sorted((name, word), key=len)
    return (len(short) > 2 and short in long) or long.endswith((f".{short}", f"/{short}"))


def _in_order(steps: list[str]) -> list[str]:
    """Return the SQL that orders the rows of one run by the time of logging.

    A row of a replay follows the last row that the run itself logged before that point in the same
    outermost loop, by iterations; if the run logged nothing there, it follows all rows of the run.
    """
    own, outermost = ident("$s"), steps[0] if len(steps) > 1 else "NULL"
    near = (
        f"last_value({own} IGNORE NULLS) OVER (PARTITION BY {ident('$ord')}, {outermost} ORDER BY "
        f"{', '.join(steps)} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )
    first = f"min({own}) OVER (PARTITION BY {ident('$ord')}, {outermost})"
    return [f"coalesce({own}, {near}, {first} - 1) NULLS LAST", f"{own} IS NULL", *steps]


def at_level(catalogue: Catalogue, level: int) -> Catalogue:
    """Return the catalogue of values that were logged exactly that many loops deep."""
    out = Catalogue()
    for path in sorted(catalogue.rank, key=lambda path: catalogue.rank[path]):
        if depth(path) == level:
            out.see(path)
            out.labels[path] = catalogue.labels.get(path, out.labels[path])
    for name, paths in catalogue.names.items():
        for path, kinds in paths.items():
            if depth(path) == level:
                out.add(path, name, kinds)
    return out


def _distinct(labels: Iterable[str]) -> dict[str, str]:
    """Return a unique name for each label, because SQL does not distinguish `Loss` from `loss`.

    >>> _distinct(["loss", "Loss"])
    {'loss': 'loss', 'Loss': 'Loss_2'}
    """
    out: dict[str, str] = {}
    taken: set[str] = set()
    for label in labels:
        n, name = 1, label
        while name.lower() in taken:
            n += 1
            name = f"{label}_{n}"
        taken.add(name.lower())
        out[label] = name
    return out


def _common(a: str, b: str) -> int:
    columns_a, columns_b = loop_columns(a), loop_columns(b)
    return next(
        (k for k, (x, y) in enumerate(zip(columns_a, columns_b, strict=False)) if x != y),
        min(len(columns_a), len(columns_b)),
    )
