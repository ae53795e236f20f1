"""SQL of the pivoted tables: one row per point, one column per loop and per name. Text only.

Columns with a `$` in front are internal: the order of runs, the ranks and iterations of loops, and the
occurrence. `n:` and `o:` before a name are its value and its origin at one depth. A column that holds values of
several kinds gets one kind that loses none of them.

On request, missing numbers are filled by linear interpolation: if the same run has a value of that name
before and after it in the same execution of the same loop; the distance is counted in iterations. Nothing is
extrapolated, and nothing is filled between values that are infinite or not a number.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rearview.store.tables.connection import ident, key, quoted
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
"""SQL type of a column by its kind; `mixed` is the JSON text of `store.values_as_json`."""


def common_kind(kinds: Iterable[str]) -> str:
    """Return the kind of a column that holds values of these kinds without losing any.

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


def cell(kind: str) -> str:
    """Return the SQL that reads a value of the table of records as a column of that kind."""
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


def recast(column: str, kind: str, to: str) -> str:
    """Return the SQL that converts a column of one kind to a wider kind."""
    if kind == to:
        return column
    if to == "mixed":
        return _JSON[kind].format(column)
    return f"CAST({column} AS {TYPES[to]})"


def decode(value: Any, kind: str, stored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the Python value of a cell of that kind.

    `stored` returns the replacement for the description of an array, tensor, image or histogram.
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
    """Return (kind, text) of a converted value, for the arguments of a run.

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
"""SQL of the origin of a record `l`, given the row `r` of its replay."""
RANKED = """
  SELECT *, row_number() OVER (PARTITION BY run, path, indices, name ORDER BY process, seq) - 1 AS occ
  FROM (SELECT l.*, {origin} AS origin
    FROM ({source}) l LEFT JOIN own.replays r ON l.run = r.run AND l.replay = r.replay
    QUALIFY rank() OVER (PARTITION BY l.run, path, indices, name ORDER BY l.replay IS NULL DESC,
      starts_with(l.replay, '$'), attempt DESC, r.rank NULLS LAST, r.ord DESC NULLS LAST, l.replay) = 1)""".replace(
    "{origin}", ORIGIN
)
"""SQL that picks among several values of one name and point: the run's own before those of replays, the last
attempt before earlier ones, then by the verdict on the replay (exact first), newer before older; captured
values last. All values of the winning source are kept."""

UNRANKED = "SELECT *, 'recorded' AS origin, 0 AS occ FROM ({source})"
"""The same for records of which no two have one name and point."""


def depth(path: str) -> int:
    """Return how many loops a path has."""
    return path.count("/") + 1 if path else 0


def prefixes(path: str) -> list[str]:
    """Return the proper prefixes of a path, outermost first.

    >>> prefixes("epoch/step")
    ['', 'epoch']
    """
    parts = path.split("/") if path else []
    return ["/".join(parts[:n]) for n in range(len(parts))]


def inside(path: str, outer: str) -> bool:
    """Return True if `path` is `outer` or inside it."""
    return path == outer or not outer or path.startswith(outer + "/")


@dataclass(slots=True)
class Catalogue:
    """Names, loops and kinds of the records of chosen runs, known without reading a record."""

    names: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Kinds by name and path."""
    labels: dict[str, list[set[str]]] = field(default_factory=dict)
    """Kinds of loop values by path, one set per loop."""
    rank: dict[str, int] = field(default_factory=dict)
    """Order in which paths first had records."""

    def add(self, path: str, name: str, kinds: Iterable[str]) -> None:
        """Note that a name has values of these kinds at that path."""
        self.names.setdefault(name, {}).setdefault(path, set()).update(kinds)
        self.see(path)

    def see(self, path: str, labels: Sequence[str] = ()) -> None:
        """Note that a path exists, and the kinds of its loop values."""
        for level in (*prefixes(path), path):
            self.rank.setdefault(level, len(self.rank))
        seen = self.labels.setdefault(path, [set() for _ in range(depth(path))])
        for kinds, kind in zip(seen, labels, strict=False):
            kinds.update({kind} if kind else ())

    def kind(self, name: str, path: str | None = None) -> str:
        """Return the kind of the column of a name."""
        paths = self.names.get(name, {})
        return common_kind({k for at, kinds in paths.items() if path in (None, at) for k in kinds})

    def loops(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the loop columns of these paths with the kind of each."""
        out: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: self.rank.get(path, 0)):
            kinds = self.labels.get(path, [])
            for k, column in enumerate(loop_columns(path)):
                here = kinds[k] if k < len(kinds) else set()
                known = out.get(column, "")
                every = here | ({known} if known else set())
                out[column] = "str" if "str" in every else "float" if "float" in every else "int"
        return out


def loop_columns(path: str) -> list[str]:
    """Return the column of each loop of a path; a loop inside one of the same name is numbered.

    >>> loop_columns("i/j/i")
    ['i', 'j', 'i_2']
    """
    out: list[str] = []
    for loop in path.split("/") if path else ():
        same = sum(column == loop or column.rpartition("_")[0] == loop for column in out)
        out.append(f"{loop}_{same + 1}" if same else loop)
    return out


def label(k: int, labels: str) -> str:
    """Return the SQL of the value of the k-th loop as JSON; null if it is the iteration number."""
    return f"nullif(CAST(json_extract({labels}, '/{k - 1}') AS VARCHAR), 'null')"


def hidden(deepest: int) -> list[str]:
    """Return the internal columns that order rows and are not shown."""
    return ["$path", *(f"${c}{k}" for k in range(1, deepest + 1) for c in "rix"), "$occ"]


def wide(
    source: str,
    path: str,
    names: Mapping[str, str],
    origins: Container[str],
    *,
    numbered: bool = False,
) -> str:
    """Return one row per point and occurrence of `path`, with the named values as columns.

    Names in `origins` have a column with their origin as well; `s` is the number of the first record, null
    if only replays logged there. With `numbered`, each name has such a column.
    """
    n = range(1, depth(path) + 1)
    keys = "".join(f", indices[{k}] AS i{k}" for k in n)
    labels = "".join(f", {label(k, 'any_value(labels)')} AS x{k}" for k in n)
    cells = ""
    for name, kind in names.items():
        only = f"FILTER (WHERE name = {quoted(name)})"
        cells += f", any_value({cell(kind)}) {only} AS {key('n', name)}"
        if name in origins:
            cells += f", any_value(origin) {only} AS {key('o', name)}"
        if numbered:
            own = f"FILTER (WHERE replay IS NULL AND name = {quoted(name)})"
            cells += f", min(seq) {own} AS {key('s', name)}"
    only_names = f" AND name IN ({', '.join(map(quoted, names))})" if names else " AND false"
    group = ", ".join(["run", "occ", *(f"indices[{k}]" for k in n)])
    return (
        f"SELECT run{keys}{labels}, occ, min(seq) FILTER (WHERE replay IS NULL) AS s{cells} "
        f"FROM ({source}) "
        f"WHERE path = {quoted(path)}{only_names} GROUP BY {group}"
    )


@dataclass(frozen=True, slots=True)
class RowPaths:
    """Which paths have rows in a table, and which of them keep rows next to deeper ones.

    The values of the paths in `joined` are repeated on the rows, but create none.
    """

    paths: tuple[str, ...]
    kept: frozenset[str]
    joined: frozenset[str] = frozenset()


def rows_of(
    names: Mapping[str, Iterable[str]], fillable: Container[tuple[str, str]] = ()
) -> RowPaths:
    """Return the rows of a table of these names, given the paths of each.

    A point has a row if nothing is logged deeper inside it. Otherwise it keeps its own row only if one
    of its names is logged deeper as well, because then its value cannot be repeated there. A
    name that is `fillable` at a path has no value there to keep.
    """
    paths = sorted({path for name_paths in names.values() for path in name_paths})
    kept = {
        path
        for name, name_paths in names.items()
        for path in name_paths
        if (name, path) not in fillable
        and any(other != path and inside(other, path) for other in name_paths)
    }
    leaves = {path for path in paths if not any(p != path and inside(p, path) for p in paths)}
    return RowPaths(tuple(paths), frozenset(kept | leaves))


def union_of_paths(
    catalogue: Catalogue,
    columns: Mapping[str, Mapping[str, str]],
    rows: RowPaths,
    source: Callable[[str], str],
    *,
    origins: Container[str],
) -> str:
    """Return the union of the rows of all paths: hidden order columns, loops, names.

    `columns` gives the paths of each name with the kind it has there; `source(path)` is a
    relation as `wide` returns it. Names in `origins` have a column with their origin as well.
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
        own = dict(zip(loop_columns(path), range(1, n + 1), strict=True))
        for loop, kind in loops.items():
            shown = _shown(own[loop], kind) if loop in own else f"NULL::{TYPES[kind]}"
            text.append(f", {shown} AS {key('l', loop)}")
        outer = [p for p in prefixes(path) if p in rows.paths or p in rows.joined]
        tables = {path: "k", **{p: f"p{depth(p)}" for p in outer}}
        for name, paths in columns.items():
            here = [p for p in sorted(tables, key=depth, reverse=True) if p in paths]
            for letter, missing in (("n", TYPES[shared_kind(paths)]), ("o", "VARCHAR")):
                if letter == "o" and name not in origins:
                    continue
                cells = [f"{tables[p]}.{key(letter, name)}" for p in here]
                value = f"coalesce({', '.join(cells)})" if cells else f"NULL::{missing}"
                text.append(f", {value} AS {key(letter, name)}")
        text.append(f" FROM ({source(path)}) k")
        for p in outer:
            here_names = [name for name, paths in columns.items() if p in paths]
            text.append(
                f" LEFT JOIN ({_last(source(p), p, here_names, origins=origins)}) {tables[p]} ON "
                + _on(tables[p], "k", depth(p))
            )
        if deeper and path not in rows.kept:
            missing_inside = " AND ".join(
                f"NOT EXISTS (SELECT 1 FROM ({source(q)}) d WHERE {_on('d', 'k', n)})"
                for q in deeper
            )
            text.append(f" WHERE {missing_inside}")
        out.append("".join(text))
    return "\nUNION ALL\n".join(out)


def shared_kind(paths: Mapping[str, str]) -> str:
    """Return the kind that the paths of one name share."""
    return next(iter(paths.values()), "float")


def _shown(k: int, kind: str) -> str:
    index = f"k.i{k}" if kind == "int" else f"CAST(k.i{k} AS {TYPES[kind]})"
    return f"coalesce(TRY_CAST(json_extract_string(k.x{k}, '$') AS {TYPES[kind]}), {index})"


def _on(a: str, b: str, n: int) -> str:
    return " AND ".join([f"{a}.run = {b}.run", *(f"{a}.i{k} = {b}.i{k}" for k in range(1, n + 1))])


def _last(source: str, path: str, names: Iterable[str], *, origins: Container[str]) -> str:
    """Return one row per point with the value logged last, which deeper rows repeat."""
    keys = "".join(f", i{k}" for k in range(1, depth(path) + 1))
    cells = ""
    for name in names:
        value = key("n", name)
        for column in (value, key("o", name))[: 1 + (name in origins)]:
            cells += f", arg_max({column}, occ) FILTER (WHERE {value} IS NOT NULL) AS {column}"
    return f"SELECT run{keys}{cells} FROM ({source}) GROUP BY run{keys}"


INTERPOLATED = "interpolated"
"""Name of the column that lists the interpolated values of each row, and origin of such a value."""


def fill(name: str) -> str:
    """Return the column with the interpolated value of a name; null where none was filled."""
    return key("f", name)


def with_interpolated(rows: str, paths: Sequence[str], names: Mapping[str, Iterable[str]]) -> str:
    """Return `rows` with missing numbers of `names` filled in.

    `rows` is SQL as `pivot.union_of_paths` returns it, `paths` the paths of its rows; `names` has the paths at
    which each name was logged. Each name gets a column more, `fill(name)`.
    """
    cells: list[str] = []
    windows: dict[tuple[str, str], str] = {}
    fills: list[str] = []
    for name, logged_at in names.items():
        here = {q: p for q in paths if (p := _deepest(q, logged_at))}
        value, place = key("n", name), _case({q: f"$i{depth(p)}" for q, p in here.items()})
        w = windows.setdefault((_partition(here), place), f"w{len(windows)}")
        frames = {
            "p": f"last_value({{}} IGNORE NULLS) OVER {w}_before",
            "q": f"first_value({{}} IGNORE NULLS) OVER {w}_after",
        }
        for letter, frame in frames.items():
            cells.append(f"{frame.format(value)} AS {key(letter, name)}")
            known_place = f"CASE WHEN {value} IS NOT NULL THEN {place} END"
            cells.append(f"{frame.format(known_place)} AS {key(letter + 'x', name)}")
        before, after = key("p", name), key("q", name)
        x0, x1 = key("px", name), key("qx", name)
        share = f"(CAST({place} - {x0} AS DOUBLE) / ({x1} - {x0}))"
        fills.append(
            f"CASE WHEN {value} IS NULL AND {x0} < {place} AND {place} < {x1} "
            f"AND isfinite(CAST({before} AS DOUBLE)) AND isfinite(CAST({after} AS DOUBLE)) "
            f"THEN {before} * (1 - {share}) + {after} * {share} END AS {fill(name)}"
        )
    if not fills:
        return rows
    # of several values at one point the last one counts, as where outer values are repeated
    occurrence = ident("$occ")
    frames_sql = ", ".join(
        f"{w}_before AS (PARTITION BY {by} ORDER BY {place}, {occurrence} "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), "
        f"{w}_after AS (PARTITION BY {by} ORDER BY {place}, {occurrence} DESC "
        "ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)"
        for (by, place), w in windows.items()
    )
    neighbours = f"SELECT *, {', '.join(cells)} FROM ({rows}) WINDOW {frames_sql}"
    filled = f"SELECT *, {', '.join(fills)} FROM ({neighbours})"
    replaced = ", ".join(
        f"coalesce(CAST({key('n', name)} AS DOUBLE), {fill(name)}) AS {key('n', name)}"
        for name in names
    )
    return f"SELECT * REPLACE ({replaced}) FROM ({filled})"


def _deepest(path: str, logged_at: Iterable[str]) -> str:
    """Return the innermost loop around rows of `path` in which a name was logged, or ''."""
    return max((p for p in logged_at if p and inside(path, p)), key=depth, default="")


def _case(columns: Mapping[str, str]) -> str:
    """Return SQL that picks a column by the path of the row."""
    if not columns:
        return "NULL::BIGINT"
    cases = " ".join(f"WHEN {quoted(path)} THEN {ident(c)}" for path, c in columns.items())
    return f"CASE {ident('$path')} {cases} END"


def _partition(here: Mapping[str, str]) -> str:
    """Return the columns that are equal in one execution of a loop."""
    loops = " ".join(f"WHEN {quoted(q)} THEN {quoted(p)}" for q, p in here.items())
    loop = f"CASE {ident('$path')} {loops} END" if here else "NULL"
    outer = [
        _case({q: f"$i{k}" for q, p in here.items() if depth(p) > k})
        for k in range(1, max(map(depth, here.values()), default=0))
    ]
    return ", ".join(["run", loop, *outer])
