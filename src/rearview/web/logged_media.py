"""Logged values that are not numbers: images, sounds, tables, texts, and heat maps of histograms."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from rearview.errors import RearviewError, UsageError
from rearview.media import ConfusionMatrix, DataTable, Text
from rearview.store.checkpoints.objects import Objects
from rearview.store.stored_arrays_and_media import StoredValue, is_png, value_in_text
from rearview.store.tables.duckdb_connection import quoted
from rearview.web.rows import plain
from rearview.web.run_index import Index
from rearview.web.series import records

HEAT_COLUMNS = 400
"""Maximum number of histograms in one heat map; if there are more, only every k-th is drawn."""
HEAT_BINS = 48
MOST_MEDIA = 400
"""Maximum number of values in one answer of `Media.listed`."""
MOST_TABLE = 500
"""Maximum number of rows of a logged table that are shown."""
MOST_TEXT = 20_000
"""Maximum number of characters of a logged text that are shown."""


class Media:
    """Reads logged values that are not numbers. Objects of the store that are no logged values are never returned."""

    def __init__(self, index: Index, objects: Objects) -> None:
        self._index, self._objects = index, objects
        self._listed: OrderedDict[str, StoredValue] = OrderedDict()

    def listed(self, name: str, runs: Sequence[str]) -> list[dict[str, Any]]:
        """Return the values logged under `name` in `runs`, each with run, point, and text or description.

        Only the first 50 runs and `MOST_MEDIA` values are returned.
        """
        indexed = [run for run in runs if run in self._index.entries][:50]
        source = records(self._index, name, indexed)
        if source is None:
            return []
        answer = self._index.ask(
            f"SELECT run, path, indices, labels, kind, text, number, origin FROM ({source}) "
            f"ORDER BY run, indices, process, seq LIMIT {MOST_MEDIA}"
        )
        out = []
        for run, path, indices, labels, kind, text, number, origin in answer.fetchall():
            entry: dict[str, Any] = {
                "run": run,
                "point": _point(path, indices, labels),
                "kind": kind,
            }
            entry["origin"] = origin
            value = value_in_text(text, self._objects.get) if kind == "object" else None
            if value is not None:
                entry |= {"kind": value.kind, "oid": value.oid, "text": str(value)}
                self._keep(value)
            else:
                entry["text"] = text[:4000] if text is not None else str(number)
            out.append(entry)
        return out

    def _keep(self, value: StoredValue) -> None:
        self._listed[value.oid] = value
        while len(self._listed) > 20 * MOST_MEDIA:
            self._listed.popitem(last=False)

    def _value(self, oid: str, kinds: Sequence[str]) -> StoredValue:
        """Return the logged value with id `oid` and one of `kinds`; raise if there is no such logged value."""
        value = self._listed.get(oid)
        if value is None:
            row = self._index.ask(
                "SELECT text FROM page.summaries WHERE kind = 'object' AND "
                f"contains(text, {quoted(oid)}) LIMIT 1"
            ).fetchone()
            value = value_in_text(row[0], self._objects.get) if row else None
        if value is None or value.oid != oid or value.kind not in kinds:
            kind_names = " or ".join(kinds)
            raise UsageError(f"No run logged the {kind_names} {oid[:12]!r}.", slug="page-question")
        return value

    def _bytes(self, oid: str, kind: str) -> bytes:
        value = self._value(oid, [kind])
        try:
            return value.raw()
        except OSError as exc:
            raise UsageError(
                f"The {kind} {oid[:12]!r} is gone: {exc}.", slug="page-question"
            ) from exc

    def image(self, oid: str) -> bytes:
        """Return the bytes of the logged image `oid`; raise if they are not a PNG image."""
        data = self._bytes(oid, "image")
        if not is_png(data):
            raise UsageError(f"{oid[:12]} is not a PNG image.", slug="page-question")
        return data

    def sound(self, oid: str) -> bytes:
        """Return the bytes of the logged sound `oid`; raise if they are not a WAV file."""
        data = self._bytes(oid, "audio")
        if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
            raise UsageError(f"{oid[:12]} is not a WAV file.", slug="page-question")
        return data

    def content(self, oid: str) -> dict[str, Any]:
        """Return the logged table, confusion matrix or text `oid` as values for JSON."""
        value = self._value(oid, ["table", "confusion", "text"])
        try:
            loaded = value.load()
        except OSError as exc:
            raise UsageError(
                f"The {value.kind} {oid[:12]!r} is gone: {exc}.", slug="page-question"
            ) from exc
        if isinstance(loaded, DataTable):
            rows = list(loaded.rows)
            return {
                "kind": "table",
                "columns": list(loaded.columns),
                "rows": [[plain(cell) for cell in row] for row in rows[:MOST_TABLE]],
                "total": len(rows),
            }
        if isinstance(loaded, ConfusionMatrix):
            return {
                "kind": "confusion",
                "columns": list(loaded.labels),
                "rows": [list(row) for row in loaded.counts],
                "total": len(loaded.counts),
            }
        text = loaded.text if isinstance(loaded, Text) else str(loaded)
        return {"kind": "text", "text": text[:MOST_TEXT], "total": len(text)}

    def heat(self, name: str, run: str) -> dict[str, Any]:
        """Return the histograms logged under `name` in `run` as the matrix of a heat map.

        `x` are iterations, `edges` the edges of bins common to all histograms, `counts` has a list per iteration.
        """
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
    """Return the histogram `counts` converted to the common bins, which begin at `low` and have width `width`.

    The count of a bin is divided among the common bins in proportion to their overlap with the bin.

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
