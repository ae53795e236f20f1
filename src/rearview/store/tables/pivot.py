"""Build the SQL of pivoted tables: one row per point, one column per loop and per name. Nothing is executed here.

Columns whose name begins with `$` are internal: the order of runs, the ranks and iterations of loops, and the
occurrence (several values of one name at one point are occurrences 0, 1, …). Columns `n:` and `o:` before a name
hold its values and their origins at one loop path. The kind of a value or column is its type, as in the SQL column
`records.kind`. If a column holds values of several kinds, all are converted to a kind that can express each of them.

On request, missing numbers are filled by linear interpolation between the values of a name before and after, in one
execution of one loop of one run; the distance is counted in iterations. Nothing is extrapolated, and nothing is
interpolated next to a value that is infinite or not a number.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rearview.store.tables.duckdb_connection import ident, key, quoted
from rearview.store.values_as_json import restore, restore_json

TYPES = {
    "float": "DOUBLE",
    "int": "BIGINT",
    "bool": "BOOLEAN",
    "str": "VARCHAR",
    "bytes": "BLOB",
    "json": "VARCHAR",
    "object": "VARCHAR",
    "bigint": "VARCHAR",
    "mixed": "VARCHAR",
}
"""Kind of a column -> its SQL type; a column of the kind `mixed` holds JSON text as in `store.values_as_json`."""


def common_kind(kinds: Iterable[str]) -> str:
    """Return the kind of a column that can hold values of all of the `kinds` exactly; `float` if there are none.

    >>> common_kind(["float", "int", "null"]), common_kind(["str", "float"]), common_kind([])
    ('float', 'mixed', 'float')
    """
    present = set(kinds) - {"null"}
    for kind, fits in (
        ("float", {"float", "int"}),
        ("str", {"str", "repr"}),
        ("bigint", {"int", "long", "bigint"}),
    ):
        if present <= fits and present & ({kind} if kind != "str" else fits):
            return kind
    if present and present <= {"int", "long"}:
        return "int"
    if len(present) == 1 and next(iter(present)) in TYPES:
        return present.pop()
    return "mixed" if present else "float"


_JSON = {
    "float": """CASE WHEN isfinite({0}) THEN CAST({0} AS VARCHAR)
        ELSE '{{"$float":"' || CAST({0} AS VARCHAR) || '"}}' END""",
    "int": "CAST({0} AS VARCHAR)",
    "bool": "CAST({0} AS VARCHAR)",
    "str": "CAST(to_json({0}) AS VARCHAR)",
    "bytes": """'{{"$bytes":"' || to_base64({0}) || '"}}'""",
    "json": """'{{"$json":' || {0} || '}}'""",
    "object": "{0}",
    "bigint": """'{{"$int":"' || {0} || '"}}'""",
    "mixed": "{0}",
}


def cell_sql(kind: str) -> str:
    """Return SQL that converts a row of the table of records to the value of a column of the given kind."""
    if kind == "mixed":
        as_json = " ".join(
            f"WHEN '{stored_kind}' THEN {_JSON[key].format(column)}"
            for stored_kind, key, column in (
                ("float", "float", "number"),
                ("int", "int", "whole"),
                ("long", "int", "whole"),
                ("bool", "bool", "CAST(number AS BOOLEAN)"),
                ("str", "str", '"text"'),
                ("repr", "str", '"text"'),
                ("json", "json", '"text"'),
                ("object", "object", '"text"'),
                ("bigint", "bigint", '"text"'),
            )
        )
        coded = """WHEN 'bytes' THEN '{"$bytes":"' || "text" || '"}'
            WHEN 'str64' THEN '{"$str":"' || "text" || '"}'"""
        return f"CASE kind {as_json} {coded} END"
    return {
        "float": "number",
        "int": "whole",
        "bool": "CAST(number AS BOOLEAN)",
        "bytes": """CASE kind WHEN 'bytes' THEN from_base64("text") END""",
        "bigint": 'coalesce("text", CAST(whole AS VARCHAR))',
    }.get(kind, '"text"')


def cast_sql(column: str, kind: str, to: str) -> str:
    """Return SQL that converts the SQL column `column` from its kind to the more general kind `to`."""
    if kind == to:
        return column
    if to == "mixed":
        return _JSON[kind].format(column)
    return f"CAST({column} AS {TYPES[to]})"


def decode(value: Any, kind: str, stored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the Python value of a cell in a column of the given kind.

    `stored` is called with the description of an array, tensor, image or histogram, and returns the value to put
    in its place; if `stored` is None, the description is returned.
    """
    if value is None or kind in {"float", "int", "bool", "str"}:
        return value
    if kind == "bytes":
        return bytes(value)
    if kind == "bigint":
        return restore({"$int": value})
    out = json.loads(value)
    return restore_json(out, stored) if kind == "json" else restore(out, stored)


def encode(value: Any) -> tuple[str, str | None]:
    """Return (kind, text) of an argument of a run, as `values_as_json.convert` wrote it; the text of None is None.

    >>> encode(0.1), encode({"$json": [1]}), encode(True)
    (('float', '0.1'), ('json', '[1]'), ('bool', 'true'))
    """
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "bool", json.dumps(value)
    if isinstance(value, int):
        return ("int" if abs(value) <= 2**53 else "long"), str(value)
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, str):
        return "str", value
    marker = next(iter(value))
    if marker == "$float":
        return "float", value[marker]
    if marker == "$json":
        return "json", json.dumps(value[marker])
    if marker == "$str":
        return "str", base64.b64decode(value[marker]).decode("utf-8", "backslashreplace")
    return {"$int": "bigint", "$bytes": "bytes", "$repr": "repr"}.get(marker, "object"), (
        json.dumps(value) if marker == "$object" else value[marker]
    )


ORIGIN = (
    "CASE WHEN l.replay IS NULL THEN 'recorded' WHEN starts_with(l.replay, '$') "
    "THEN substr(l.replay, 2) ELSE coalesce(r.origin, 'unproved') END"
)
"""SQL for the origin of a record `l`, joined with the row `r` of its replay."""
RANKED = """
  SELECT *, row_number() OVER (PARTITION BY run, path, indices, name ORDER BY process, seq) - 1 AS occ
  FROM (SELECT l.*, {origin} AS origin
    FROM ({source}) l LEFT JOIN own.replays r ON l.run = r.run AND l.replay = r.replay
    QUALIFY rank() OVER (PARTITION BY l.run, path, indices, name ORDER BY l.replay IS NULL DESC,
      starts_with(l.replay, '$'), attempt DESC, r.rank NULLS LAST, r.ord DESC NULLS LAST, l.replay) = 1)""".replace(
    "{origin}", ORIGIN
)
"""SQL that selects among several values of one name at one point. Values of the run itself win over values of
replays, the last attempt over earlier attempts, a replay with a better verdict (exact is best) over other replays,
and a newer replay over an older replay; captured values lose. All values from the winning source are selected."""

UNRANKED = "SELECT *, 'recorded' AS origin, 0 AS occ FROM ({source})"
"""SQL to use in place of `RANKED` if no two records have the same name and point."""


def depth(path: str) -> int:
    """Return the number of loops in the loop path `path`, which are separated by slashes."""
    return path.count("/") + 1 if path else 0


def prefixes(path: str) -> list[str]:
    """Return the loop paths around the loop path `path`, the outermost first.

    >>> prefixes("epoch/step")
    ['', 'epoch']
    """
    parts = path.split("/") if path else []
    return ["/".join(parts[:n]) for n in range(len(parts))]


def inside(path: str, outer: str) -> bool:
    """Return True if the loop path `path` is `outer`, or is inside the loops of `outer`."""
    return path == outer or not outer or path.startswith(outer + "/")


@dataclass(slots=True)
class Catalogue:
    """The names, loop paths and kinds of values of some runs, collected from summaries of files."""

    names: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Name -> loop path -> kinds of the values that were logged there."""
    labels: dict[str, list[set[str]]] = field(default_factory=dict)
    """Loop path -> kinds of the values of its loops, one set per loop."""
    rank: dict[str, int] = field(default_factory=dict)
    """Loop path -> its position in the order in which loop paths first had records."""

    def add(self, path: str, name: str, kinds: Iterable[str]) -> None:
        """Record that the name `name` has values of these `kinds` at the loop path `path`."""
        self.names.setdefault(name, {}).setdefault(path, set()).update(kinds)
        self.add_path(path)

    def add_path(self, path: str, labels: Sequence[str] = ()) -> None:
        """Add the loop path `path`; `labels` has the kind of the values of each loop, "" for iteration numbers."""
        for level in (*prefixes(path), path):
            self.rank.setdefault(level, len(self.rank))
        kinds_by_loop = self.labels.setdefault(path, [set() for _ in range(depth(path))])
        for kinds, kind in zip(kinds_by_loop, labels, strict=False):
            kinds.update({kind} if kind else ())

    def kind(self, name: str, path: str | None = None) -> str:
        """Return the kind of a column with the values of `name` at the loop path `path`, or everywhere if it is None."""
        paths = self.names.get(name, {})
        return common_kind({k for at, kinds in paths.items() if path in (None, at) for k in kinds})

    def loops(self, paths: Iterable[str]) -> dict[str, str]:
        """Return a mapping for the loops of all loop paths in `paths`: name of the loop's column -> kind of the column."""
        out: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: self.rank.get(path, 0)):
            kinds = self.labels.get(path, [])
            for k, column in enumerate(loop_columns(path)):
                path_kinds = kinds[k] if k < len(kinds) else set()
                known_kind = out.get(column, "")
                all_kinds = path_kinds | ({known_kind} if known_kind else set())
                out[column] = (
                    "str" if "str" in all_kinds else "float" if "float" in all_kinds else "int"
                )
        return out


def loop_columns(path: str) -> list[str]:
    """Return the name of the column of each loop of a loop path; if a loop name occurs twice, a number is added.

    >>> loop_columns("i/j/i")
    ['i', 'j', 'i_2']
    """
    out: list[str] = []
    for loop in path.split("/") if path else ():
        count = sum(column == loop or column.rpartition("_")[0] == loop for column in out)
        out.append(f"{loop}_{count + 1}" if count else loop)
    return out


def loop_value_sql(k: int, labels: str) -> str:
    """Return SQL for the value of the k-th loop (from 1) as JSON; it is null if the value is the iteration number.

    `labels` is SQL for the values of all loops of the loop path, as JSON.
    """
    return f"nullif(CAST(json_extract({labels}, '/{k - 1}') AS VARCHAR), 'null')"


def order_columns(deepest: int) -> list[str]:
    """Return the internal columns that rows are ordered by, for a table with up to `deepest` nested loops."""
    return ["$path", *(f"${c}{k}" for k in range(1, deepest + 1) for c in "rix"), "$occ"]


def wide_sql(
    source: str,
    path: str,
    names: Mapping[str, str],
    origins: Container[str],
    *,
    numbered: bool = False,
) -> str:
    """Return SQL with one row per point and occurrence at the loop path `path`, and the values of `names` as columns.

    `source` is SQL for the records, made with `RANKED` or `UNRANKED`. `names` has the kind of each column. Names in
    `origins` have a column with the origins of their values as well. The column `s` is the number of the first record
    that the run itself logged at the point, or null. With `numbered`, there is also such a column for each name.
    """
    n = range(1, depth(path) + 1)
    keys = "".join(f", indices[{k}] AS i{k}" for k in n)
    labels = "".join(f", {loop_value_sql(k, 'any_value(labels)')} AS x{k}" for k in n)
    cells = ""
    for name, kind in names.items():
        filter_sql = f"FILTER (WHERE name = {quoted(name)})"
        cells += f", any_value({cell_sql(kind)}) {filter_sql} AS {key('n', name)}"
        if name in origins:
            cells += f", any_value(origin) {filter_sql} AS {key('o', name)}"
        if numbered:
            of_run = f"FILTER (WHERE replay IS NULL AND name = {quoted(name)})"
            cells += f", min(seq) {of_run} AS {key('s', name)}"
    only_names = f" AND name IN ({', '.join(map(quoted, names))})" if names else " AND false"
    group = ", ".join(["run", "occ", *(f"indices[{k}]" for k in n)])
    return (
        f"SELECT run{keys}{labels}, occ, min(seq) FILTER (WHERE replay IS NULL) AS s{cells} "
        f"FROM ({source}) "
        f"WHERE path = {quoted(path)}{only_names} GROUP BY {group}"
    )


@dataclass(frozen=True, slots=True)
class RowPaths:
    """The loop paths whose points have rows in a table."""

    paths: tuple[str, ...]
    always_shown: frozenset[str]
    """Loop paths whose points always have a row, even if there are rows of points inside them."""
    joined: frozenset[str] = frozenset()
    """Further loop paths, whose points have no rows; their values are repeated on the rows of points inside."""


def rows_of(
    names: Mapping[str, Iterable[str]], fillable: Container[tuple[str, str]] = ()
) -> RowPaths:
    """Return the loop paths whose points have rows in a table; `names` maps its names to their loop paths.

    A point has a row if no name is logged in loops inside it. Else its values are repeated on the rows inside, and
    it has a row only if one of its names is also logged inside, because this name has other values on these rows.
    Pairs (name, loop path) in `fillable` do not count: they have no values yet that need a row.
    """
    paths = sorted({path for name_paths in names.values() for path in name_paths})
    always_shown = {
        path
        for name, name_paths in names.items()
        for path in name_paths
        if (name, path) not in fillable
        and any(other != path and inside(other, path) for other in name_paths)
    }
    leaves = {path for path in paths if not any(p != path and inside(p, path) for p in paths)}
    return RowPaths(tuple(paths), frozenset(always_shown | leaves))


def union_of_paths(
    catalogue: Catalogue,
    columns: Mapping[str, Mapping[str, str]],
    rows: RowPaths,
    source: Callable[[str], str],
    *,
    origins: Container[str],
) -> str:
    """Return SQL for the rows of all loop paths of a table, with columns to order by, loops and names.

    `columns` is a mapping: name -> loop path -> kind of the values. `source(path)` returns SQL for one loop path, as
    `wide_sql` does. Names in `origins` have a column with the origins of their values as well.
    """
    deepest = max((depth(path) for path in rows.paths), default=0)
    loops = catalogue.loops(rows.paths)
    out = []
    for path in rows.paths:
        deeper = [q for q in rows.paths if q != path and inside(q, path)]
        n = depth(path)
        text = [
            f"SELECT k.run AS run, k.occ AS {ident('$occ')}, k.s AS {ident('$s')}",
            f", {quoted(path)} AS {ident('$path')}",
        ]
        for k in range(1, deepest + 1):
            prefix = "/".join(path.split("/")[:k])
            rank = str(catalogue.rank.get(prefix, 0)) if k <= n else "NULL::INTEGER"
            index = f"k.i{k}" if k <= n else "NULL::BIGINT"
            label = f"k.x{k}" if k <= n else "NULL::VARCHAR"
            for letter, value in (("r", rank), ("i", index), ("x", label)):
                text.append(f", {value} AS {ident(f'${letter}{k}')}")
        depth_of_loop = dict(zip(loop_columns(path), range(1, n + 1), strict=True))
        for loop, kind in loops.items():
            shown = (
                _shown(depth_of_loop[loop], kind)
                if loop in depth_of_loop
                else f"NULL::{TYPES[kind]}"
            )
            text.append(f", {shown} AS {key('l', loop)}")
        outer = [p for p in prefixes(path) if p in rows.paths or p in rows.joined]
        tables = {path: "k", **{p: f"p{depth(p)}" for p in outer}}
        for name, paths in columns.items():
            paths_of_name = [p for p in sorted(tables, key=depth, reverse=True) if p in paths]
            for letter, sql_type in (("n", TYPES[shared_kind(paths)]), ("o", "VARCHAR")):
                if letter == "o" and name not in origins:
                    continue
                cells = [f"{tables[p]}.{key(letter, name)}" for p in paths_of_name]
                value = f"coalesce({', '.join(cells)})" if cells else f"NULL::{sql_type}"
                text.append(f", {value} AS {key(letter, name)}")
        text.append(f" FROM ({source(path)}) k")
        for p in outer:
            here_names = [name for name, paths in columns.items() if p in paths]
            text.append(
                f" LEFT JOIN ({_last(source(p), p, here_names, origins=origins)}) {tables[p]} ON "
                + _on(tables[p], "k", depth(p))
            )
        if deeper and path not in rows.always_shown:
            missing_inside = " AND ".join(
                f"NOT EXISTS (SELECT 1 FROM ({source(q)}) d WHERE {_on('d', 'k', n)})"
                for q in deeper
            )
            text.append(f" WHERE {missing_inside}")
        out.append("".join(text))
    return "\nUNION ALL\n".join(out)


def shared_kind(paths: Mapping[str, str]) -> str:
    """Return the kind of the values of one name; `paths` maps each of its loop paths to this same kind."""
    return next(iter(paths.values()), "float")


def _shown(k: int, kind: str) -> str:
    index = f"k.i{k}" if kind == "int" else f"CAST(k.i{k} AS {TYPES[kind]})"
    return f"coalesce(TRY_CAST(json_extract_string(k.x{k}, '$') AS {TYPES[kind]}), {index})"


def _on(a: str, b: str, n: int) -> str:
    return " AND ".join([f"{a}.run = {b}.run", *(f"{a}.i{k} = {b}.i{k}" for k in range(1, n + 1))])


def _last(source: str, path: str, names: Iterable[str], *, origins: Container[str]) -> str:
    """Return SQL with one row per point at the loop path `path`, with the last value of each name at the point.

    `source` is SQL that `wide_sql` returned. The values are repeated on the rows of points inside.
    """
    keys = "".join(f", i{k}" for k in range(1, depth(path) + 1))
    cells = ""
    for name in names:
        value = key("n", name)
        for column in (value, key("o", name))[: 1 + (name in origins)]:
            cells += f", arg_max({column}, occ) FILTER (WHERE {value} IS NOT NULL) AS {column}"
    return f"SELECT run{keys}{cells} FROM ({source}) GROUP BY run{keys}"


INTERPOLATED = "interpolated"
"""Name of the column that lists the interpolated values of each row; also the origin of interpolated values."""


def interpolated_column(name: str) -> str:
    """Return the SQL column with the interpolated values of `name`; it is null in rows without an interpolated value."""
    return key("f", name)


def with_interpolated(rows: str, paths: Sequence[str], names: Mapping[str, Iterable[str]]) -> str:
    """Return SQL for `rows` in which missing numbers of `names` are interpolated.

    `rows` is SQL that `union_of_paths` returned, and `paths` are the loop paths of these rows. `names` has the paths
    at which each name was logged. For each name a column is added: `interpolated_column(name)`.
    """
    cells: list[str] = []
    window_names: dict[tuple[str, str], str] = {}
    fill_sql: list[str] = []
    for name, logged_at in names.items():
        loops_by_path = {q: p for q in paths if (p := _deepest(q, logged_at))}
        value, iteration = (
            key("n", name),
            _case({q: f"$i{depth(p)}" for q, p in loops_by_path.items()}),
        )
        w = window_names.setdefault((_partition(loops_by_path), iteration), f"w{len(window_names)}")
        frames = {
            "p": f"last_value({{}} IGNORE NULLS) OVER {w}_before",
            "q": f"first_value({{}} IGNORE NULLS) OVER {w}_after",
        }
        for letter, frame in frames.items():
            cells.append(f"{frame.format(value)} AS {key(letter, name)}")
            known_iteration = f"CASE WHEN {value} IS NOT NULL THEN {iteration} END"
            cells.append(f"{frame.format(known_iteration)} AS {key(letter + 'x', name)}")
        before, after = key("p", name), key("q", name)
        x0, x1 = key("px", name), key("qx", name)
        fraction = f"(CAST({iteration} - {x0} AS DOUBLE) / ({x1} - {x0}))"
        fill_sql.append(
            f"CASE WHEN {value} IS NULL AND {x0} < {iteration} AND {iteration} < {x1} "
            f"AND isfinite(CAST({before} AS DOUBLE)) AND isfinite(CAST({after} AS DOUBLE)) "
            f"THEN {before} * (1 - {fraction}) + {after} * {fraction} END AS {interpolated_column(name)}"
        )
    if not fill_sql:
        return rows
    # if a name has several values at one point, the last is used, as for values that are repeated on inner rows
    occurrence = ident("$occ")
    frames_sql = ", ".join(
        f"{w}_before AS (PARTITION BY {by} ORDER BY {iteration}, {occurrence} "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), "
        f"{w}_after AS (PARTITION BY {by} ORDER BY {iteration}, {occurrence} DESC "
        "ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)"
        for (by, iteration), w in window_names.items()
    )
    neighbours = f"SELECT *, {', '.join(cells)} FROM ({rows}) WINDOW {frames_sql}"
    filled = f"SELECT *, {', '.join(fill_sql)} FROM ({neighbours})"
    replaced = ", ".join(
        f"coalesce(CAST({key('n', name)} AS DOUBLE), {interpolated_column(name)}) AS {key('n', name)}"
        for name in names
    )
    return f"SELECT * REPLACE ({replaced}) FROM ({filled})"


def _deepest(path: str, logged_at: Iterable[str]) -> str:
    """Return the innermost of the loop paths `logged_at` that is `path` or around it, or "" if there is none."""
    return max((p for p in logged_at if p and inside(path, p)), key=depth, default="")


def _case(columns: Mapping[str, str]) -> str:
    """Return SQL for the value of the column that `columns` has for the loop path of a row; null for other loop paths."""
    if not columns:
        return "NULL::BIGINT"
    cases = " ".join(f"WHEN {quoted(path)} THEN {ident(c)}" for path, c in columns.items())
    return f"CASE {ident('$path')} {cases} END"


def _partition(loops_by_path: Mapping[str, str]) -> str:
    """Return SQL for columns that are equal in all rows of one execution of a loop, and differ between executions.

    `loops_by_path` maps the loop path of a row to the loop path of this loop.
    """
    loops = " ".join(f"WHEN {quoted(q)} THEN {quoted(p)}" for q, p in loops_by_path.items())
    loop = f"CASE {ident('$path')} {loops} END" if loops_by_path else "NULL"
    outer = [
        _case({q: f"$i{k}" for q, p in loops_by_path.items() if depth(p) > k})
        for k in range(1, max(map(depth, loops_by_path.values()), default=0))
    ]
    return ", ".join(["run", loop, *outer])
