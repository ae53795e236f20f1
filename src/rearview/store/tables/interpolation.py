"""SQL that fills missing numbers of a pivoted table by linear interpolation. Text only.

A missing value is filled if the same run has a value of that name before and after it in the same
execution of the same loop; the distance is counted in iterations. Nothing is extrapolated, and nothing
is filled between values that are infinite or not a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rearview.store.tables.connection import ident, key, quoted
from rearview.store.tables.pivot import depth, inside

INTERPOLATED = "interpolated"
"""Name of the column that lists the interpolated values of each row, and origin of such a value."""


def fill(name: str) -> str:
    """Return the column with the interpolated value of a name; null where none was filled."""
    return key("f", name)


def with_interpolated(rows: str, paths: Sequence[str], names: Mapping[str, Iterable[str]]) -> str:
    """Return `rows` with missing numbers of `names` filled in.

    `rows` is SQL as `pivot.branches` returns it, `paths` the paths of its rows; `names` has the paths at
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
