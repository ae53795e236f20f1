"""The data of charts: one line per run, or the mean and standard deviation of each group of runs.

Long lines are summarized per pixel. `Series` keeps the lines in memory as arrays, long lines at several resolutions.
An answer to the page is a line of JSON, followed by the numbers as 64-bit floats.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rearview.errors import UsageError
from rearview.store.tables.duckdb_connection import quoted
from rearview.store.tables.pivot import RANKED, UNRANKED
from rearview.store.tables.read_record_files import long_sql, needs_no_ranking
from rearview.web.run_index import Index, load_replays

Array = Any
"""A NumPy array of numbers; typed as Any, because NumPy is imported only in the functions that use it."""
MOST_RUNS = 500
"""Maximum number of runs, and so of lines, in one chart."""
MOST_KEPT = 24_000_000
"""Maximum number of points of all lines in memory; the least recently used lines are dropped first."""
STEP = 16
"""Number of points of one level of a line that one point of the next coarser level summarizes."""
DRAWN_POINTS_PER_PIXEL = 4
"""A line with more points per pixel than this is not drawn point by point, but summarized per pixel."""
LEVEL_POINTS_PER_PIXEL = 8
"""Minimum number of points per pixel that a level must have to be used: with fewer, bins and pixels differ visibly."""
LOADING = 120.0
"""Maximum number of seconds for the query that reads lines for the first time."""
_AXES = {"loop", "step", "time"}


class Chart(msgspec.Struct, forbid_unknown_fields=True):
    """A request for one chart: logged name, runs, horizontal axis, width in pixels."""

    name: str
    runs: list[str]
    x: str = "loop"
    """`loop`: iteration of the outermost loop, with inner iterations as fractions; `step`: number of
    earlier values; `time`: seconds since the start of the run."""
    lo: float | None = None
    hi: float | None = None
    pixels: int = 800
    group: dict[str, int] | None = None
    """Run -> number of its group, to draw the mean of each group; None to draw each run."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """A line at one resolution. A point has the sum, number, minimum and maximum of the values that it summarizes."""

    x: Array
    total: Array
    """Sum of the finite values that each point summarizes."""
    count: Array
    """Number of finite values that each point summarizes."""
    low: Array
    high: Array

    @classmethod
    def of(cls, x: Array, y: Array) -> Resolution:
        """Return the line through the values `y` at full resolution; values that are not finite have count 0."""
        import numpy as np

        finite = np.isfinite(y)
        if finite.all():
            return cls(x, y, np.ones(len(y), "f4"), y, y)
        return cls(
            x,
            np.where(finite, y, 0.0),
            finite.astype("f4"),
            np.where(finite, y, np.inf),
            np.where(finite, y, -np.inf),
        )

    def binned(self, starts: Array, x: Array | None = None) -> Resolution:
        """Return a coarser resolution, whose points summarize the points from each index in `starts` to the next.

        `x` has the positions of the new points; if None, the position of the first point of each group is used.
        """
        import numpy as np

        return Resolution(
            self.x[starts] if x is None else x,
            np.add.reduceat(self.total, starts),
            np.add.reduceat(self.count, starts),
            np.minimum.reduceat(self.low, starts),
            np.maximum.reduceat(self.high, starts),
        )


@dataclass(frozen=True, slots=True)
class Line:
    """The values `y` of one name in one run at the positions `x`, in order of `x`."""

    x: Array
    y: Array
    levels: tuple[Resolution, ...]
    """The line at coarser resolutions, from fine to coarse; empty if the line has few values."""

    @classmethod
    def of(cls, x: Array, y: Array) -> Line:
        """Return the line through the points (x, y), which must be sorted by `x`."""
        import numpy as np

        levels: list[Resolution] = []
        if len(x) > STEP * STEP * STEP:
            level = Resolution.of(x, y)
            while len(level.x) > STEP * STEP:
                level = level.binned(np.arange(0, len(level.x), STEP))
                levels.append(level)
        return cls(x, y, tuple(levels))

    def __len__(self) -> int:
        return len(self.x)

    def points(self, lo: float, hi: float) -> tuple[Array, Array]:
        """Return (x, y) of the logged values whose position is from `lo` to `hi`, both included."""
        a, b = _between(self.x, lo, hi)
        return self.x[a:b], self.y[a:b]

    def pixels(self, lo: float, hi: float, pixels: int) -> list[Array]:
        """Return arrays of x, mean, lowest and highest value, with an item per pixel that has a value.

        `pixels` is the number of pixels between `lo` and `hi`.
        """
        import numpy as np

        level = next(
            (
                values
                for values in reversed(self.levels)
                if np.subtract(*_between(values.x, lo, hi)[::-1]) >= pixels * LEVEL_POINTS_PER_PIXEL
            ),
            None,
        )
        if level is None:
            level = Resolution.of(*self.points(lo, hi))
        a, b = _between(level.x, lo, hi)
        if a == b:
            return [np.empty(0) for _ in range(4)]
        width = (hi - lo) / pixels or 1.0
        bins = np.floor((level.x[a:b] - lo) / width)
        starts = np.flatnonzero(np.r_[True, bins[1:] != bins[:-1]])
        part = Resolution(*(getattr(level, name)[a:b] for name in Resolution.__slots__))
        binned = part.binned(starts, lo + (bins[starts] + 0.5) * width)
        empty = binned.count == 0
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = binned.total / binned.count
        return [
            binned.x,
            *(np.where(empty, np.nan, values) for values in (mean, binned.low, binned.high)),
        ]


def _between(x: Array, lo: float, hi: float) -> tuple[int, int]:
    import numpy as np

    return int(np.searchsorted(x, lo, "left")), int(np.searchsorted(x, hi, "right"))


class Series:
    """Answers requests for charts; the lines that were read are kept in memory."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lines: OrderedDict[tuple[str, str, int, str], Line] = OrderedDict()
        self._kept = 0
        self._lock = threading.Lock()

    def chart(self, chart: Chart) -> bytes:
        """Return the lines that `chart` requests as bytes: one line of JSON that describes them, then their numbers."""
        import numpy as np

        if chart.x not in _AXES or not 1 <= chart.pixels <= 8000 or len(chart.runs) > MOST_RUNS:
            raise UsageError(
                f"A chart has at most {MOST_RUNS} runs and 8000 pixels, over loop, step or time.",
                slug="page-question",
            )
        runs = [run for run in dict.fromkeys(chart.runs) if run in self._index.entries]
        lines = self._ready(chart.name, runs, chart.x)
        span = _span(chart, lines)
        drawn_lines = (
            _grouped(chart, lines, span) if chart.group is not None else _drawn(chart, lines, span)
        )
        head: list[dict[str, Any]] = []
        blocks: list[Any] = []
        for line, columns in drawn_lines:
            head.append({**line, "n": len(columns[0]), "columns": len(columns)})
            blocks += [np.ascontiguousarray(column, dtype="<f8") for column in columns]
        description = {"lines": head, "span": span, "points": sum(map(len, lines.values()))}
        text = json.dumps(description, allow_nan=False).encode()
        # pad the text: the numbers must begin at a multiple of eight bytes
        text += b" " * (-(len(text) + 1) % 8) + b"\n"
        return b"".join([text, *(block.data for block in blocks)])

    def _ready(self, name: str, runs: Sequence[str], x: str) -> dict[str, Line]:
        """Return run -> line of `name` over the axis `x`, without empty lines; read lines that are not in memory."""
        keys = {run: (run, name, self._index.entries[run].revision, x) for run in runs}
        with self._lock:
            missing_runs = [run for run in runs if keys[run] not in self._lines]
        read_lines = self._read(name, missing_runs, x) if missing_runs else {}
        with self._lock:
            lines: dict[str, Line] = {}
            for run, key in keys.items():
                if run in read_lines and key not in self._lines:
                    self._lines[key] = read_lines[run]
                    self._kept += len(read_lines[run])
                if key in self._lines:
                    self._lines.move_to_end(key)
                    lines[run] = self._lines[key]
            while self._kept > MOST_KEPT and len(self._lines) > len(lines):
                self._kept -= len(self._lines.popitem(last=False)[1])
        return {run: line for run, line in lines.items() if len(line)}

    def _read(self, name: str, runs: Sequence[str], x: str) -> dict[str, Line]:
        """Read the values of `name` in `runs` with one query; return run -> line, empty if there are no values."""
        import numpy as np

        empty = Line(np.empty(0), np.empty(0), ())
        out = dict.fromkeys(runs, empty)
        with self._index.lock if _ranked(self._index, runs) else contextlib.nullcontext():
            source = records(self._index, name, runs)
            if source is None:
                return out
            answer = self._index.ask(_values(source, x, runs), patience=LOADING).fetchnumpy()
        run_numbers = np.asarray(answer["k"])
        started = np.array([self._index.entries[run].run.started for run in runs])
        positions = _positions(answer, run_numbers, x, started)
        values = _filled(answer["y"])
        rises = (run_numbers[1:] > run_numbers[:-1]) | (
            (run_numbers[1:] == run_numbers[:-1]) & (positions[1:] >= positions[:-1])
        )
        if not rises.all():
            order = np.lexsort((positions, run_numbers))
            run_numbers, positions, values = run_numbers[order], positions[order], values[order]
        ends: Array = np.searchsorted(run_numbers, np.arange(len(runs) + 1))
        for k, run in enumerate(runs):
            a, b = ends[k], ends[k + 1]
            if a < b:
                out[run] = Line.of(positions[a:b].copy(), values[a:b].copy())
        return out


def _span(chart: Chart, lines: dict[str, Line]) -> tuple[float, float] | None:
    """Return (begin, end) of the horizontal axis: the requested range, limited to the range that has points.

    Return the whole range of the points if none are in the requested range, or None if there are no lines.
    """
    if not lines:
        return None
    first = min(float(line.x[0]) for line in lines.values())
    last = max(float(line.x[-1]) for line in lines.values())
    lo = first if chart.lo is None else max(first, chart.lo)
    hi = last if chart.hi is None else min(last, chart.hi)
    return (lo, hi) if lo <= hi else (first, last)


Drawn = list[tuple[dict[str, Any], list[Any]]]


def _drawn(chart: Chart, lines: dict[str, Line], span: tuple[float, float] | None) -> Drawn:
    """Return one (description, columns) per run: its line within `span`; nothing if `span` is None.

    The columns are x and y of all values if these are few, else x, mean, lowest and highest value per pixel.
    """
    if span is None:
        return []
    if max(map(len, lines.values())) <= chart.pixels * DRAWN_POINTS_PER_PIXEL:
        return [
            ({"run": run, "raw": True}, list(line.points(*span))) for run, line in lines.items()
        ]
    return [
        ({"run": run, "raw": False}, line.pixels(*span, chart.pixels))
        for run, line in lines.items()
    ]


def _grouped(chart: Chart, lines: dict[str, Line], span: tuple[float, float] | None) -> Drawn:
    """Return (description, columns) of one line per group of runs.

    The columns are x, the mean over the runs, and the mean minus and plus one standard deviation.
    """
    import numpy as np

    if span is None or chart.group is None:
        return []
    # if all lines are short, average them at each point, else at each pixel
    short = max(map(len, lines.values())) <= chart.pixels
    groups: dict[int, list[tuple[Any, Any]]] = {}
    for run, line in lines.items():
        if run in chart.group:
            x, y = line.points(*span) if short else line.pixels(*span, chart.pixels)[:2]
            finite = np.isfinite(y)
            groups.setdefault(int(chart.group[run]), []).append((x[finite], y[finite]))
    out: Drawn = []
    for k, group in sorted(groups.items()):
        distinct_x, x_index = np.unique(np.concatenate([x for x, _ in group]), return_inverse=True)
        y = np.concatenate([y for _, y in group])
        count = np.bincount(x_index, minlength=len(distinct_x))
        mean = np.bincount(x_index, y, minlength=len(distinct_x)) / count
        deviation = np.sqrt(
            np.bincount(x_index, (y - mean[x_index]) ** 2, minlength=len(distinct_x)) / count
        )
        out.append(
            ({"group": k, "raw": False}, [distinct_x, mean, mean - deviation, mean + deviation])
        )
    return out


def _ranked(index: Index, runs: Sequence[str]) -> bool:
    """Return True if one of `runs` may have several values for one point.

    Then a query must choose one of the values, for which it needs the table `own.replays`.
    """
    return any(not needs_no_ranking(index.shown_parts(run)) for run in runs)


def records(index: Index, name: str, runs: Sequence[str]) -> str | None:
    """Return the SQL query for the records of `name` in `runs`, one per point, or None if there are no records."""
    texts = []
    simple, ranked, ranked_runs = [], [], []
    for run in runs:
        parts = [
            part
            for part in index.shown_parts(run)
            if any(summary.name == name for summary in part.summary.names)
        ]
        if needs_no_ranking(parts):
            simple += parts
        elif parts:
            ranked += parts
            ranked_runs.append(run)
    for parts, form in ((simple, UNRANKED), (ranked, RANKED)):
        if parts:
            source = f"SELECT * FROM ({long_sql(parts)}) WHERE name = {quoted(name)}"
            texts.append(form.format(source=source))
    if ranked:
        with index.lock:  # because `Index.refresh` uses `own.replays` too
            load_replays(index.duck, index.run_records, ranked_runs)
    return " UNION ALL BY NAME ".join(texts) or None


def _values(source: str, x: str, runs: Sequence[str]) -> str:
    """Return the SQL query for the numbers in `source` as `y`, with the index `k` of the run in `runs`.

    The further columns are those that `_positions` needs for the axis `x`.
    """
    order = "ORDER BY k, indices, process, seq" if x == "step" else ""
    axis_columns = {
        "time": ", time",
        "step": "",
        "loop": ", indices[1] AS outer_index, CASE WHEN len(indices) > 1 THEN indices[2] END AS "
        "inner_index, CASE WHEN labels IS NOT NULL THEN TRY_CAST(json_extract_string(labels, '$[0]') "
        "AS DOUBLE) END AS label",
    }[x]
    numbers = ", ".join(f"({quoted(run)}, {k})" for k, run in enumerate(runs))
    return (
        f"SELECT k, number AS y{axis_columns} FROM ({source}) JOIN (VALUES {numbers}) chosen(run, k) "
        f"USING (run) WHERE number IS NOT NULL {order}"
    )


def _positions(columns: dict[str, Any], run_numbers: Array, x: str, started: Array) -> Array:
    """Return the position of each value on the horizontal axis `x`: iteration, step or seconds, see `Chart.x`."""
    import numpy as np

    if x == "time":
        return np.asarray(_filled(columns["time"]) - started[run_numbers])
    if x == "step":
        ends: Array = np.searchsorted(run_numbers, np.arange(len(started)))
        return np.arange(len(run_numbers), dtype="f8") - ends[run_numbers]
    outer = np.nan_to_num(_filled(columns["outer_index"]))
    label = _filled(columns["label"])
    base = np.where(np.isnan(label), outer, label)
    inner = _filled(columns["inner_index"])
    if np.isnan(inner).all():
        return np.asarray(base)
    spans = [
        (
            _by_run(np.maximum, values, run_numbers, len(started))
            - _by_run(np.minimum, values, run_numbers, len(started))
        )
        for values in (base, outer)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.where(spans[1] > 0, spans[0] / spans[1], 1.0)
    steps = _by_run(np.maximum, np.nan_to_num(inner), run_numbers, len(started)) + 1.0
    return np.asarray(base + np.nan_to_num(inner) * gap[run_numbers] / steps[run_numbers])


def _by_run(reduce: Any, values: Array, run_numbers: Array, runs: int) -> Array:
    """Return the highest or lowest value of each run; `reduce` is `np.maximum` or `np.minimum`."""
    import numpy as np

    out = np.full(runs, -np.inf if reduce is np.maximum else np.inf)
    reduce.at(out, run_numbers, values)
    return out


def _filled(column: Any) -> Any:
    """Return a column of DuckDB as floats, with NaN for NULL."""
    import numpy as np

    return np.ma.filled(column.astype("f8"), np.nan)
