"""Build the SQL of one table: its columns, its rows, and the order of rows, such as `"acc desc, epoch"`.

The kind of a value is its type, as in the SQL column `records.kind`. A value is unproved if a replay computed it,
and it is not proved that the replay repeated the run exactly.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from rearview.errors import UsageError
from rearview.model.proof import TRUSTED
from rearview.store.tables.duckdb_connection import ident, key, quoted
from rearview.store.tables.pivot import (
    INTERPOLATED,
    Catalogue,
    RowPaths,
    depth,
    inside,
    interpolated_column,
    loop_columns,
    order_columns,
    rows_of,
    union_of_paths,
    with_interpolated,
)
from rearview.store.tables.select_records import SelectedRecords

_COMMA = re.compile(r""",(?=(?:[^"]*"[^"]*")*[^"]*$)""")
"""Matches a comma that is not in double quotes."""
_KEY = re.compile(
    r"""(?P<minus>-?)(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<plain>.+?))(?:\s+(?P<way>asc|desc))?""",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class OrderKey:
    """A column by which rows are ordered."""

    column: str
    """Name of the column, as the user wrote the name."""
    descending: bool = False


def order_keys(
    order: str | Iterable[str] | None, is_column: Callable[[str], bool]
) -> list[OrderKey]:
    """Return the keys in an order such as `"acc desc, epoch"` or `["-acc", "epoch"]`, the most important first.

    A column whose name has commas, blanks or a leading minus must be in double quotes, unless the whole text is the
    name of a column (`is_column` returns True).

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
    """Return SQL terms that order rows by the column `label`, which has the kind `kind`; rows without a value come last.

    NaN comes after all numbers, in ascending and descending order. In a column of several types, numbers come first,
    ordered by size, then all other values, ordered by their text.
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
"""Columns of the SQL table `runs` that can also be columns of a table of records."""
MARK = "unproved"
"""Name of the column that lists, for each row, the names whose values in this row are unproved."""
_RUN = "r:run"
"""Column name in an order that sorts runs by their start."""
WORD = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")+)"|([^\W\d]\w*)""")
_NEVER = frozenset(
    ("and", "or", "not", "in", "is", "null", "like", "between", "true", "false", "case", "when")
) | {"then", "else", "end"}


class TableQuery:
    """The columns of one table, and the SQL that computes its rows.

    `names` are the columns that the user asked for. Without `names`, the table has the names that tables show by
    default or, with `every`, all names. With `level`, only values that were logged in exactly `level` nested loops
    are shown. With `origins`, each name has a second column with the origins of its values. With `interpolate`,
    missing numbers between known numbers are interpolated.
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
        self._catalogue = (
            selected.catalogue if level is None else at_level(selected.catalogue, level)
        )
        self._all_loops = self._catalogue.loops(self._catalogue.rank)
        self._logged: list[str] = []
        self._facts: list[str] = []
        name_list = list(names)
        if not name_list:
            self._logged = list(self._catalogue.names) if every else selected.names_by_default()
            self._facts = [f"a:{name}" for name in selected.args]
        for text in name_list:
            # if both a loop and a logged value have this name, the logged value is meant
            self._add(f"n:{text}" if text in self._catalogue.names else self.column_of(text))
        self.mark = ""
        """Name of the column that lists the unproved values of each row; empty if there is no such column."""
        self.interpolated = ""
        """Name of the column that lists the interpolated values of each row; empty if there is no such column."""
        self.kinds: dict[str, str] = {}
        """Label of each column of the answer with recorded values -> kind of the column."""
        self.labels: list[str] = []
        """Labels of the columns of the answer. Unlike names in SQL, labels may differ in upper and lower case only."""

    @property
    def unproved(self) -> list[str]:
        """Names of logged columns of the answer that may hold unproved values."""
        return [name for name in self._logged if name in self._selected.unproved]

    @property
    def _origins(self) -> Collection[str]:
        """Names for which the SQL has a column of origins, which is shown, or used to find unproved values."""
        return self._logged if self._shows_origins else self.unproved

    @property
    def has_no_values(self) -> bool:
        """Whether the table has no column with logged values."""
        return not self._logged

    def _add(self, column: str) -> None:
        if column.startswith("l:"):
            return  # loops always have columns
        into = self._logged if column.startswith("n:") else self._facts
        column = column.removeprefix("n:")
        if column not in into:
            into.append(column)

    def column_of(self, text: str) -> str:
        """Return the column that `text` names, with a prefix that says what it holds; raise if there is no such column.

        The prefix is `n:` for logged values, `a:` for an argument, `l:` for a loop, `r:` for one of `RUN_COLUMNS`.
        """
        column = self._find(text)
        if column is None:
            raise UsageError(
                f"Nothing is known by the name {text!r}. {self._nearest(text)}", slug="unknown-name"
            )
        return column

    def _find(self, text: str) -> str | None:
        """Return the column that `text` names, with a prefix as in `column_of`, or None if there is no such column."""
        names, args = self._catalogue.names, self._selected.args
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
        """Return a sentence that suggests names similar to an unknown name."""
        columns = [*self._catalogue.names, *self._selected.args, *self._all_loops]
        if not self._catalogue.names and not self._selected.args:
            return "No run has logged anything yet."
        word = text.lower()
        similar = [name for name in columns if _contains(name.lower(), word)]
        for names, cutoff in ((columns, 0.6), (RUN_COLUMNS, 0.75)):
            lower = {name.lower(): name for name in reversed(names)}
            similar += [
                lower[n] for n in difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)
            ]
        if similar:
            return f"Did you mean {' or '.join(list(dict.fromkeys(similar))[:5])}?"
        first_columns = ", ".join(columns[:8])
        return f"Known are: {first_columns}. To have it, log it: `rearview.log({text!r}, ...)`."

    def explain(self, message: str) -> UsageError | None:
        """Return a helpful error if `message` of DuckDB says that a column was not found, else None."""
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
        """Return the SELECT of the rows for which the condition `where` is true, ordered by `order`, at most `limit`.

        With `keys`, only run, loop path and iterations of each row are selected.
        """
        keys_of_order = [
            (self._order_column(key.column), key)
            for key in order_keys(order, lambda text: self._find(text) is not None)
        ]
        ordering = [column for column, _ in keys_of_order]
        mentioned = [*self._mentioned(where or ""), *(c for c in ordering if c != _RUN)]
        repeatable: list[str] = []
        deeper: list[str] = []
        rows = self._rows(self._logged)
        for column in dict.fromkeys(mentioned):
            name = column.removeprefix("n:")
            if column.startswith("n:") and name not in self._logged:
                is_outside = all(
                    any(inside(q, p) for q in rows.paths) for p in self._catalogue.names[name]
                )
                (repeatable if is_outside else deeper).append(name)
        self._check_order(keys_of_order, rows, deeper)
        facts = [*self._facts, *(c for c in mentioned if c[:2] in ("a:", "r:"))]
        deepest = max((depth(path) for path in rows.paths), default=0)
        rank_and_index = (
            [f"$r{k}" for k in range(1, deepest + 1)],
            [f"$i{k}" for k in range(1, deepest + 1)],
        )
        mentions_mark = any(MARK in match.groups() for match in WORD.finditer(where or ""))
        self.mark = self.interpolated = ""
        if mentions_mark or (self.unproved and not self._shows_origins):
            self.mark = self._free_label(MARK, rows)
        if self._interpolate and not self._shows_origins:
            self.interpolated = self._free_label(INTERPOLATED, rows)
        columns = dict(self._visible(rows))
        names = _distinct(columns)
        self.labels = list(columns)
        self.kinds = {label: kind for label, (_, kind) in columns.items() if kind}
        other_paths = {path for name in repeatable for path in self._catalogue.names[name]} - set(
            rows.paths
        )
        rows = replace(rows, joined=frozenset(other_paths))
        selected = self._selected
        if limit is not None and not where and not ordering and not self._interpolate:
            selected = self._first_records(rows, limit)
        logged = [*self._logged, *repeatable]
        text = self._rows_sql(logged, rows, facts, selected)
        if where and not deeper:
            text = f"SELECT * FROM ({text}) WHERE (\n{where}\n)"
        elif where:
            text = self._rows_containing(text, rows, [*logged, *deeper], facts, where)
        if keys:
            selected_columns = ", ".join(map(ident, ["run", *order_columns(deepest)]))
        else:
            selected_columns = ", ".join(ident(name) for name in names.values())
        order_terms = self._order_terms(keys_of_order, rows, logged, facts)
        steps = [ident(c) for pair in zip(*rank_and_index, strict=True) for c in pair]
        order_by = ", ".join([*order_terms, ident("$ord"), *_in_order([*steps, ident("$occ")])])
        end = f" LIMIT {int(limit)}" if limit is not None else ""
        return f"SELECT {selected_columns} FROM ({text}) ORDER BY {order_by}{end}"

    def _order_column(self, text: str) -> str:
        """Return the column, with its prefix, that the key `text` of an order names; upper and lower case may differ."""
        if text == "run":
            return _RUN
        all_names = (*self._catalogue.names, *self._selected.args, *self._all_loops)
        same_name = [name for name in all_names if name.lower() == text.lower()]
        return next(filter(None, map(self._find, (text, *same_name))), None) or self.column_of(text)

    def _check_order(
        self, keys: list[tuple[str, OrderKey]], rows: RowPaths, deeper: Collection[str]
    ) -> None:
        """Raise if rows cannot be ordered by one of the `keys` (column with prefix, key as the user wrote it).

        `deeper` are names that are logged in loops inside those of the rows.
        """
        loops = self._catalogue.loops(rows.paths)
        for column, key_of_order in keys:
            name = column[2:]
            if column.startswith("n:") and name in deeper:
                why = "it has several values in each of them, as it is logged in a loop inside"
                remedy = "Add it to the names"
            elif column.startswith("l:") and name not in loops:
                why, remedy = "they are not in that loop", "Add a name that is logged in it"
            elif column.startswith("n:") and self._catalogue.kind(name) == "object":
                why, remedy = (
                    "it holds arrays, tensors or images",
                    "Log a number of it, its norm say",
                )
            else:
                continue
            raise UsageError(
                f"Rows cannot be ordered by {key_of_order.column!r}: {why}. {remedy}.", slug="order"
            )

    def _order_terms(
        self,
        keys: list[tuple[str, OrderKey]],
        rows: RowPaths,
        names: Iterable[str],
        facts: Iterable[str],
    ) -> list[str]:
        """Return SQL terms that order the rows by `keys`: pairs of a column with its prefix, and the user's key."""
        loops = self._catalogue.loops(rows.paths)
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
        """Return the kind of the column of the logged name `name` in the answer: `float` if it is interpolated."""
        return "float" if self._fills(name) else self._catalogue.kind(name)

    def _fills(self, name: str) -> bool:
        """Return True if missing values of the logged name `name` are interpolated; its column must hold numbers."""
        if not self._interpolate or self._catalogue.kind(name) not in {"float", "int"}:
            return False
        return not any("long" in kinds for kinds in self._catalogue.names[name].values())

    def _first_records(self, rows: RowPaths, limit: int) -> SelectedRecords:
        """Return records that suffice for the first `limit` rows: of the first runs, or of the first iterations."""
        if not self._logged:
            return self._selected
        selected = self._selected.first_runs(limit, self._logged)
        if len({path.split("/")[0] for path in rows.paths if path}) != 1 or not selected.plain:
            return selected
        deepest_path = max(rows.paths, key=depth)
        kinds = {
            n: self._catalogue.kind(n)
            for n in self._logged
            if deepest_path in self._catalogue.names[n]
        }
        return selected.first_iterations(deepest_path, limit, kinds)

    def _rows(self, names: Iterable[str]) -> RowPaths:
        """Return the loop paths whose points have rows in a table of `names`."""
        paths_by_name = {name: self._catalogue.names[name] for name in names}
        fillable = {
            (n, path) for n, at in paths_by_name.items() for path, kinds in at.items() if not kinds
        }
        rows = rows_of(paths_by_name, fillable)
        if not rows.paths:
            return RowPaths(("",), frozenset({""}))
        if fillable and "" not in rows.paths:  # so that a run without a known point has a row
            return RowPaths(("", *rows.paths), rows.always_shown)
        return rows

    def _visible(self, rows: RowPaths) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield (label, (SQL, kind)) of every column of the answer; the kind is "" if no recorded value is in it."""
        loops = self._catalogue.loops(rows.paths)
        yield "run", ("b.run", "")
        for loop in loops:
            yield loop, (f"b.{key('l', loop)}", "")
        for name in self._logged:
            label = self._label(name, loops)
            yield label, (f"b.{key('n', name)}", self._kind(name))
            if self._shows_origins:
                origin = f"b.{key('o', name)}"
                if self._fills(name):
                    origin = f"CASE WHEN b.{interpolated_column(name)} IS NOT NULL THEN {quoted(INTERPOLATED)} ELSE {origin} END"
                yield f"{label}.origin", (origin, "")
        for column in self._facts:
            yield self._fact(column, loops)
        if self.mark:
            yield self.mark, (self._marks(loops), "")
        if self.interpolated:
            yield self.interpolated, (self._fill_marks(loops), "")

    def _marks(self, loops: Iterable[str]) -> str:
        """Return SQL for a text with the names whose values in a row are unproved; it is null if there are none."""
        trusted = ", ".join(map(quoted, sorted(TRUSTED)))
        marks = [
            f"CASE WHEN b.{key('o', name)} NOT IN ({trusted}) "
            f"THEN {quoted(self._label(name, loops))} END"
            for name in self.unproved
        ]
        return _listed(marks)

    def _fill_marks(self, loops: Iterable[str]) -> str:
        """Return SQL for a text with the names whose values in a row are interpolated; it is null if there are none."""
        return _listed(
            f"CASE WHEN b.{interpolated_column(name)} IS NOT NULL THEN {quoted(self._label(name, loops))} END"
            for name in self._logged
            if self._fills(name)
        )

    def _free_label(self, word: str, rows: RowPaths) -> str:
        """Return `word` as the name of a column; underscores are added if another column already has the name."""
        labels = {label.lower() for label, _ in self._visible(rows)}
        return next(
            label for k in range(len(labels) + 1) if (label := word + "_" * k) not in labels
        )

    def _available(
        self, rows: RowPaths, names: Iterable[str], facts: Iterable[str]
    ) -> dict[str, tuple[str, str]]:
        """Return the columns that a condition or an order may mention, as a mapping: label -> (SQL, kind)."""
        loops = self._catalogue.loops(rows.paths)
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
        is_taken = name in self._logged or name in loops or name == "run"
        label = f"{name}_arg" if is_taken else name
        return label, (f"a.{key('a', name)}", self._selected.args[name])

    def _rows_sql(
        self, names: list[str], rows: RowPaths, facts: list[str], selected: SelectedRecords
    ) -> str:
        """Return SQL for all rows of the loop paths `rows`, with all columns that a condition or order may mention."""
        kinds = {name: self._catalogue.kind(name) for name in names}
        columns = {name: dict.fromkeys(self._catalogue.names[name], kinds[name]) for name in names}

        def source(path: str) -> str:
            path_kinds = {name: kinds[name] for name in names if path in columns[name]}
            return selected.wide_sql(path, path_kinds, origins=self._origins)

        text = union_of_paths(self._catalogue, columns, rows, source, origins=self._origins)
        if filled := {name: self._catalogue.names[name] for name in names if self._fills(name)}:
            text = with_interpolated(text, rows.paths, filled)
        available = self._available(rows, names, facts)
        labels = _distinct(available)
        cells = ", ".join(
            f"{sql} AS {ident(labels[label])}" for label, (sql, _) in available.items()
        )
        deepest = max((depth(path) for path in rows.paths), default=0)
        position_columns = ", ".join(f"b.{ident(column)}" for column in order_columns(deepest))
        return (
            f"SELECT {cells}, {position_columns}, b.{ident('$s')}, r.ord AS {ident('$ord')} FROM ({text}) b "
            "JOIN own.runs r ON r.run = b.run LEFT JOIN own.args a ON a.run = b.run"
        )

    def _rows_containing(
        self, text: str, rows: RowPaths, names: list[str], facts: list[str], where: str
    ) -> str:
        """Return SQL for the rows of `text` (SQL) for which the condition `where` is true.

        `where` mentions values that were logged in other loops than the rows, such as inner loops. A row is selected
        if the condition is true at a point in the same iterations of the loops that the row and these values share.
        """
        deeper = self._rows(names)
        inner = self._rows_sql(names, deeper, facts, self._selected)
        shared = min(
            _common(p, q)
            for p in rows.paths
            for name in names
            for q in self._catalogue.names[name]
            if q not in rows.paths
        )
        keys = [ident("run"), *(ident(f"${c}{k}") for k in range(1, shared + 1) for c in "ri")]
        on = " AND ".join(f"o.{key} = s.{key}" for key in keys)
        matching = f"SELECT {', '.join(keys)} FROM ({inner}) WHERE (\n{where}\n)"
        return f"SELECT o.* FROM ({text}) o SEMI JOIN ({matching}) s ON {on}"

    def _mentioned(self, where: str) -> Iterator[str]:
        """Yield the columns, each with its prefix as in `column_of`, that the condition `where` mentions."""
        for match in WORD.finditer(where):
            word = match[1].replace('""', '"') if match[1] else match[2]
            if word and not (match[2] and word.lower() in _NEVER):
                all_names = (*self._catalogue.names, *self._selected.args)
                same_name = [word, *(name for name in all_names if name.lower() == word.lower())]
                column = next(filter(None, map(self._find, same_name)), None)
                if column is not None:
                    yield column


def _listed(marks: Iterable[str]) -> str:
    """Return SQL for a text that joins the `marks` (SQL) by commas, without nulls; it is null if all are null."""
    texts = ", ".join(marks)
    return f"nullif(concat_ws(', ', {texts}), '')" if texts else "NULL::VARCHAR"


def _contains(name: str, word: str) -> bool:
    """Return True if one of the two names contains the other, as `train_loss` contains `loss`."""
    short, long = sorted((name, word), key=len)
    return (len(short) > 2 and short in long) or long.endswith((f".{short}", f"/{short}"))


def _in_order(steps: list[str]) -> list[str]:
    """Return SQL terms that order the rows of one run as they were logged; `steps` are SQL columns of iterations.

    A row whose values only replays logged comes after the run's own last row with earlier iterations of the same
    outermost loop, or before the run's own first row of this loop. If the run itself logged nothing in this loop, the
    row comes last.
    """
    own_number, outermost = ident("$s"), steps[0] if len(steps) > 1 else "NULL"
    previous_number = (
        f"last_value({own_number} IGNORE NULLS) OVER (PARTITION BY {ident('$ord')}, {outermost} ORDER BY "
        f"{', '.join(steps)} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )
    first = f"min({own_number}) OVER (PARTITION BY {ident('$ord')}, {outermost})"
    return [
        f"coalesce({own_number}, {previous_number}, {first} - 1) NULLS LAST",
        f"{own_number} IS NULL",
        *steps,
    ]


def at_level(catalogue: Catalogue, level: int) -> Catalogue:
    """Return a catalogue with the values of `catalogue` that were logged in exactly `level` nested loops."""
    out = Catalogue()
    for path in sorted(catalogue.rank, key=lambda path: catalogue.rank[path]):
        if depth(path) == level:
            out.add_path(path)
            out.labels[path] = catalogue.labels.get(path, out.labels[path])
    for name, paths in catalogue.names.items():
        for path, kinds in paths.items():
            if depth(path) == level:
                out.add(path, name, kinds)
    return out


def _distinct(labels: Iterable[str]) -> dict[str, str]:
    """Return a mapping: label -> unique name for SQL, which does not distinguish `Loss` from `loss`.

    >>> _distinct(["loss", "Loss"])
    {'loss': 'loss', 'Loss': 'Loss_2'}
    """
    out: dict[str, str] = {}
    used_names: set[str] = set()
    for label in labels:
        n, name = 1, label
        while name.lower() in used_names:
            n += 1
            name = f"{label}_{n}"
        used_names.add(name.lower())
        out[label] = name
    return out


def _common(a: str, b: str) -> int:
    """Return the number of outermost loops that the loop paths `a` and `b` have in common."""
    columns_a, columns_b = loop_columns(a), loop_columns(b)
    return next(
        (k for k, (x, y) in enumerate(zip(columns_a, columns_b, strict=False)) if x != y),
        min(len(columns_a), len(columns_b)),
    )
