"""What charts draw: lines binned to pixels, groups with bands, histograms over time, images, texts.

Lines cross to the page as typed arrays: a line of JSON, then the numbers as 64-bit floats.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from rearview.errors import RearviewError, UsageError
from rearview.store.checkpoints.objects import Objects
from rearview.store.media import StoredValue, is_png, value_in_text
from rearview.store.tables.connection import quoted
from rearview.store.tables.pivot import PLAIN, WINNERS
from rearview.store.tables.record_files import long, plain
from rearview.web.index import Index, load_replays

MOST_RUNS = 500
"""Lines of one chart."""
MOST_KEPT = 24_000_000
"""Points of lines that stay in memory; the least recently asked for go first."""
STEP = 64
"""Points that one point of the next coarser level stands for."""
ENOUGH = 4
"""Points per pixel below which a finer level is read."""
HEAT_COLUMNS = 400
"""Histograms of one heat map; of more, every k-th is drawn."""
HEAT_BINS = 48
MOST_MEDIA = 400
LOADING = 120.0
"""Seconds that reading a curve for the first time may take."""
_AXES = {"loop", "step", "time"}


class Chart(msgspec.Struct, forbid_unknown_fields=True):
    """One chart: which name of which runs, over what, in how many pixels."""

    name: str
    runs: list[str]
    x: str = "loop"
    """`loop`: iterations of the outermost loop, inner ones as fractions; `step`: how many values came
    before; `time`: seconds since the start of the run."""
    lo: float | None = None
    hi: float | None = None
    pixels: int = 800
    group: dict[str, int] | None = None
    """Group of each run, if the mean of each group is to be drawn."""


class Series:
    """Answers charts from tables of points that are kept in memory."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tables: OrderedDict[tuple[str, str, int, str], tuple[str, int]] = OrderedDict()
        self._next = 0
        self._lock = threading.Lock()

    def chart(self, chart: Chart) -> bytes:
        """Return the lines of a chart: a line of JSON that describes them, then their numbers."""
        import numpy as np

        if chart.x not in _AXES or not 1 <= chart.pixels <= 8000 or len(chart.runs) > MOST_RUNS:
            raise UsageError(
                f"A chart has at most {MOST_RUNS} runs and 8000 pixels, over loop, step or time.",
                slug="page-question",
            )
        runs = [run for run in dict.fromkeys(chart.runs) if run in self._index.entries]
        with self._lock:
            tables = self._ready(chart.name, runs, chart.x)
        most = max((points for _, points in tables.values()), default=0)
        span = self._span(chart, tables)
        found = (
            self._grouped(chart, tables, span)
            if chart.group is not None
            else self._lines(chart, tables, span, most)
        )
        head: list[dict[str, Any]] = []
        blocks: list[Any] = []
        for one, columns in found:
            head.append({**one, "n": len(columns[0]), "columns": len(columns)})
            blocks += [np.ascontiguousarray(column, dtype="<f8") for column in columns]
        about = {"lines": head, "span": span, "points": sum(p for _, p in tables.values())}
        text = json.dumps(about, allow_nan=False).encode()
        text += b" " * (-(len(text) + 1) % 8) + b"\n"  # numbers begin at a multiple of eight
        return text + b"".join(block.tobytes() for block in blocks)

    def _span(self, chart: Chart, tables: dict[str, tuple[str, int]]) -> tuple[float, float] | None:
        if not tables:
            return None
        ends = " UNION ALL ".join(
            f"SELECT min(x) AS a, max(x) AS b FROM {table}_top" for table, _ in tables.values()
        )
        row = self._index.ask(f"SELECT min(a), max(b) FROM ({ends})").fetchone()
        if row[0] is None:
            return None
        lo = row[0] if chart.lo is None else max(row[0], chart.lo)
        hi = row[1] if chart.hi is None else min(row[1], chart.hi)
        return (lo, hi) if lo <= hi else (row[0], row[1])

    def _lines(
        self,
        chart: Chart,
        tables: dict[str, tuple[str, int]],
        span: tuple[float, float] | None,
        most: int,
    ) -> list[tuple[dict[str, Any], list[Any]]]:
        """Return a line per run: as it is if it is short, else mean, lowest, highest per pixel."""
        if span is None:
            return []
        lo, hi = span
        out = []
        names = {table: run for run, (table, _) in tables.items()}
        if most <= chart.pixels * ENOUGH:
            near = f"WHERE x BETWEEN {lo!r} AND {hi!r}"
            text = " UNION ALL ".join(
                f"SELECT {k} AS k, x, y FROM {table} {near}" for k, table in enumerate(names)
            )
            found = self._index.ask(f"SELECT k, x, y FROM ({text}) ORDER BY k, x").fetchnumpy()
            for k, run in enumerate(names.values()):
                mine = found["k"] == k
                columns = [found["x"][mine], _filled(found["y"])[mine]]
                out.append(({"run": run, "raw": True}, columns))
            return out
        width = (hi - lo) / chart.pixels or 1.0
        parts = []
        for k, table in enumerate(names):
            level = self._level(table, lo, hi, chart.pixels)
            parts.append(
                f"SELECT {k} AS k, floor((x - {lo!r}) / {width!r}) AS bin, sum(y * n) / sum(n) AS y, "
                f"min(low) AS low, max(high) AS high FROM {level} WHERE x BETWEEN {lo!r} AND {hi!r} "
                "GROUP BY bin"
            )
        text = " UNION ALL ".join(parts)
        found = self._index.ask(f"SELECT * FROM ({text}) ORDER BY k, bin").fetchnumpy()
        x = lo + (found["bin"] + 0.5) * width
        values = [_filled(found[column]) for column in ("y", "low", "high")]
        for k, run in enumerate(names.values()):
            mine = found["k"] == k
            columns = [x[mine], *(column[mine] for column in values)]
            out.append(({"run": run, "raw": False}, columns))
        return out

    def _level(self, table: str, lo: float, hi: float, pixels: int) -> str:
        """Return the coarsest level of a line that has enough points between `lo` and `hi`."""
        for level in (f"{table}_top", f"{table}_mid"):
            sql = f"SELECT count(*) FROM {level} WHERE x BETWEEN {lo!r} AND {hi!r}"
            if self._index.ask(sql).fetchone()[0] >= pixels * 2:
                return level
        return f"(SELECT x, y, y AS low, y AS high, 1 AS n FROM {table})"

    def _grouped(
        self,
        chart: Chart,
        tables: dict[str, tuple[str, int]],
        span: tuple[float, float] | None,
    ) -> list[tuple[dict[str, Any], list[Any]]]:
        """Return a line per group: mean and standard deviation over its runs."""
        if span is None or chart.group is None:
            return []
        lo, hi = span
        width = (hi - lo) / chart.pixels or 1.0
        most = max(points for _, points in tables.values())
        # short lines are compared point by point, long ones pixel by pixel
        place = (
            "x"
            if most <= chart.pixels
            else f"{lo!r} + (floor((x - {lo!r}) / {width!r}) + 0.5) * {width!r}"
        )
        parts = [
            f"SELECT {int(chart.group[run])} AS k, {place} AS x, avg(y) AS y FROM {table} "
            f"WHERE x BETWEEN {lo!r} AND {hi!r} AND isfinite(y) GROUP BY 2"
            for run, (table, _) in tables.items()
            if run in chart.group
        ]
        if not parts:
            return []
        text = " UNION ALL ".join(parts)
        found = self._index.ask(
            "SELECT k, x, avg(y) AS y, avg(y) - coalesce(stddev_pop(y), 0) AS low, "
            f"avg(y) + coalesce(stddev_pop(y), 0) AS high FROM ({text}) GROUP BY k, x ORDER BY k, x"
        ).fetchnumpy()
        return [
            (
                {"group": int(k), "raw": False},
                [_filled(found[c])[found["k"] == k] for c in ("x", "y", "low", "high")],
            )
            for k in dict.fromkeys(found["k"].tolist())
        ]

    def _ready(self, name: str, runs: Sequence[str], x: str) -> dict[str, tuple[str, int]]:
        """Return the tables of points of these runs, made now where they are not there yet."""
        out: dict[str, tuple[str, int]] = {}
        missing = []
        for run in runs:
            key = (run, name, self._index.entries[run].revision, x)
            if key in self._tables:
                self._tables.move_to_end(key)
                out[run] = self._tables[key]
            else:
                missing.append(run)
        if missing:
            for run, made in self._make(name, missing, x).items():
                self._tables[(run, name, self._index.entries[run].revision, x)] = made
                out[run] = made
            self._forget(keep=len(out))
        return {run: out[run] for run in runs if run in out and out[run][1]}

    def _ask(self, sql: str) -> Any:
        return self._index.ask(sql, patience=LOADING)

    def _make(self, name: str, runs: Sequence[str], x: str) -> dict[str, tuple[str, int]]:
        """Read the values of a name, all runs in one query, into a table per long run."""
        source = records(self._index, name, runs)
        made: dict[str, tuple[str, int]] = {}
        if source is None:
            return dict.fromkeys(runs, ("", 0))
        self._next += 1
        whole = f"page.s{self._next}"
        self._ask(f"CREATE TABLE {whole} AS {points_sql(self._index, source, runs, x)}")
        counts = dict(self._ask(f"SELECT run, count(*) FROM {whole} GROUP BY run").fetchall())
        for k, run in enumerate(runs):
            points = counts.get(run, 0)
            table = f"{whole}_{k}"
            made[run] = (table, points)
            if not points:
                continue
            mine = f"(SELECT x, y FROM {whole} WHERE run = {quoted(run)})"
            if points <= STEP * STEP:
                self._ask(f"CREATE VIEW {table} AS SELECT * FROM {mine}")
                self._ask(
                    f"CREATE VIEW {table}_mid AS SELECT x, y, y AS low, y AS high, 1 AS n FROM {mine}"
                )
                self._ask(f"CREATE VIEW {table}_top AS SELECT * FROM {table}_mid")
                continue
            self._ask(f"CREATE TABLE {table} AS SELECT * FROM {mine}")
            coarse = (
                "SELECT min(x) AS x, avg(y) FILTER (isfinite(y)) AS y, min(y) FILTER (isfinite(y)) AS low, "
                "max(y) FILTER (isfinite(y)) AS high, count(*) AS n FROM {0} GROUP BY rowid // {1}"
            )
            self._ask(f"CREATE TABLE {table}_mid AS {coarse.format(table, STEP)} ORDER BY x")
            top = coarse.format(table, STEP * STEP)
            self._ask(f"CREATE TABLE {table}_top AS {top} ORDER BY x")
        return made

    def _forget(self, keep: int) -> None:
        """Drop the tables that were not asked for lately, beyond `MOST_KEPT` points."""
        total = sum(points for _, points in self._tables.values())
        while total > MOST_KEPT and len(self._tables) > keep:
            _, (table, points) = self._tables.popitem(last=False)
            total -= points
            whole = table.rpartition("_")[0]
            if table and not any(t.startswith(f"{whole}_") for t, _ in self._tables.values()):
                rest = self._index.ask(
                    "SELECT table_name, table_type FROM information_schema.tables WHERE "
                    f"table_schema = 'page' AND starts_with(table_name, {quoted(whole[5:] + '_')})"
                ).fetchall()
                for one, kind in rest:
                    what = "VIEW" if kind == "VIEW" else "TABLE"
                    self._index.ask(f'DROP {what} IF EXISTS page."{one}" CASCADE')
                self._index.ask(f"DROP TABLE IF EXISTS {whole}")


def records(index: Index, name: str, runs: Sequence[str]) -> str | None:
    """Return the SQL of the records of a name in some runs: of several values of a point the best."""
    texts = []
    simple, ranked, some = [], [], []
    for run in runs:
        parts = [
            part
            for part in index.given_out(run)
            if any(one.name == name for one in part.summary.names)
        ]
        if plain(parts):
            simple += parts
        elif parts:
            ranked += parts
            some.append(run)
    for parts, form in ((simple, PLAIN), (ranked, WINNERS)):
        if parts:
            source = f"SELECT * FROM ({long(parts)}) WHERE name = {quoted(name)}"
            texts.append(form.format(source=source))
    if ranked:
        with index.lock:  # `own.replays` is shared with the refresh
            load_replays(index.duck, index.shelf, some)
            index.stale = True
    return " UNION ALL BY NAME ".join(texts) or None


def points_sql(index: Index, source: str, runs: Sequence[str], x: str) -> str:
    """Return the SQL of (run, x, y), each run in order."""
    order = "indices, process, seq"
    if x == "time":
        begun = " ".join(
            f"WHEN {quoted(run)} THEN {index.entries[run].run.started!r}" for run in runs
        )
        across = f"time - (CASE run {begun} END)"
    elif x == "step":
        across = f"row_number() OVER (PARTITION BY run ORDER BY {order}) - 1"
    else:
        across = "base + CASE WHEN len(indices) > 1 THEN gap * indices[2] / inner_count ELSE 0 END"
    placed = f"""SELECT *, coalesce((max(base) OVER w - min(base) OVER w)
          / nullif(max(indices[1]) OVER w - min(indices[1]) OVER w, 0), 1.0) AS gap,
        max(indices[2]) OVER w + 1.0 AS inner_count
      FROM (SELECT *, coalesce(TRY_CAST(json_extract_string(labels, '$[0]') AS DOUBLE), indices[1], 0)
        AS base FROM ({source}) WHERE number IS NOT NULL) WINDOW w AS (PARTITION BY run)"""
    return (
        f"SELECT run, CAST({across} AS DOUBLE) AS x, number AS y FROM ({placed}) "
        f"ORDER BY run, {'x' if x != 'step' else order}"
    )


def _filled(column: Any) -> Any:
    """Return a column of DuckDB as floats, with NaN where there is nothing."""
    import numpy as np

    return np.ma.filled(column.astype("f8"), np.nan)


class Media:
    """Values that are no numbers: images, texts, histograms. Reads bytes only of what it listed."""

    def __init__(self, index: Index, objects: Objects) -> None:
        self._index, self._objects = index, objects
        self._listed: OrderedDict[str, StoredValue] = OrderedDict()

    def listed(self, name: str, runs: Sequence[str]) -> list[dict[str, Any]]:
        """Return where some runs logged a name: run, point, and text or description."""
        known = [run for run in runs if run in self._index.entries][:50]
        source = records(self._index, name, known)
        if source is None:
            return []
        found = self._index.ask(
            f"SELECT run, path, indices, labels, kind, text, number, origin FROM ({source}) "
            f"ORDER BY run, indices, process, seq LIMIT {MOST_MEDIA}"
        )
        out = []
        for run, path, indices, labels, kind, text, number, origin in found.fetchall():
            one: dict[str, Any] = {"run": run, "point": _point(path, indices, labels), "kind": kind}
            one["origin"] = origin
            value = value_in_text(text, self._objects.get) if kind == "object" else None
            if value is not None:
                one |= {"kind": value.kind, "oid": value.oid, "text": str(value)}
                self._keep(value)
            else:
                one["text"] = text[:4000] if text is not None else str(number)
            out.append(one)
        return out

    def _keep(self, value: StoredValue) -> None:
        self._listed[value.oid] = value
        while len(self._listed) > 20 * MOST_MEDIA:
            self._listed.popitem(last=False)

    def image(self, oid: str) -> bytes:
        """Return a logged image; anything in the store that is no PNG is refused."""
        value = self._listed.get(oid)
        if value is None:
            found = self._index.ask(
                "SELECT text FROM page.stats WHERE kind = 'object' AND "
                f"contains(text, {quoted(oid)}) LIMIT 1"
            ).fetchone()
            value = value_in_text(found[0], self._objects.get) if found else None
        if value is None or value.oid != oid or value.kind != "image":
            raise UsageError(f"There is no image {oid[:12]!r}.", slug="page-question")
        try:
            data = value.raw()
        except OSError as exc:
            raise UsageError(
                f"The image {oid[:12]!r} is gone: {exc}.", slug="page-question"
            ) from exc
        if not is_png(data):
            raise UsageError(f"{oid[:12]} is no PNG image.", slug="page-question")
        return data

    def heat(self, name: str, run: str) -> dict[str, Any]:
        """Return the histograms of a name over a run as one matrix with common bins."""
        source = records(self._index, name, [run]) if run in self._index.entries else None
        rows = []
        if source is not None:
            rows = self._index.ask(
                "SELECT coalesce(TRY_CAST(json_extract_string(labels, '$[0]') AS DOUBLE), indices[1], "
                f"0), text FROM ({source}) WHERE kind = 'object' ORDER BY indices, process, seq"
            ).fetchall()
        skip = -(-len(rows) // HEAT_COLUMNS) or 1
        columns: list[tuple[float, list[float], list[float]]] = []
        for x, text in rows[::skip]:
            value = value_in_text(text, self._objects.get)
            if value is not None and value.kind == "histogram":
                with contextlib.suppress(RearviewError, OSError):
                    columns.append((x, *value.histogram()))
        if not columns:
            return {"x": [], "edges": [], "counts": []}
        low = min(edges[0] for _, _, edges in columns)
        high = max(edges[-1] for _, _, edges in columns)
        width = (high - low) / HEAT_BINS or 1.0
        return {
            "x": [x for x, _, _ in columns],
            "edges": [low + k * width for k in range(HEAT_BINS + 1)],
            "counts": [_rebinned(counts, edges, low, width) for _, counts, edges in columns],
        }


def _point(path: str, indices: Sequence[int], labels: str | None) -> str:
    shown = json.loads(labels) if labels else []
    values = [
        shown[k] if k < len(shown) and shown[k] is not None else index
        for k, index in enumerate(indices)
    ]
    loops = path.split("/") if path else []
    return "/".join(f"{loop}={value}" for loop, value in zip(loops, values, strict=False))


def _rebinned(
    counts: Sequence[float], edges: Sequence[float], low: float, width: float
) -> list[float]:
    """Return counts over common bins; each bin is spread evenly over those that it covers.

    >>> _rebinned([4.0], [0.0, 2.0], 0.0, 1.0)[:3]
    [2.0, 2.0, 0.0]
    """
    out = [0.0] * HEAT_BINS
    for count, a, b in zip(counts, edges, edges[1:], strict=False):
        first, last = (a - low) / width, (b - low) / width
        k = max(0, int(first))
        while k < HEAT_BINS and k < last:
            share = (min(last, k + 1) - max(first, k)) / (last - first) if last > first else 1.0
            out[k] += count * max(0.0, share)
            k += 1
    return out
