"""Rows as text: JSON, CSV, Markdown, or cells for people."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import chain
from typing import Any

FORMATS = ("table", "json", "csv", "markdown")


_CONTROL = re.compile(
    "[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(value: Any) -> Any:
    """Return `value` in JSON's own types, nothing rounded and nothing lost silently.

    JSON has no NaN and no infinities; they become the strings "NaN", "Infinity" and "-Infinity",
    since null would claim that nothing was logged.

    >>> plain({"loss": float("nan"), "at": (1, 2)})
    {'loss': 'NaN', 'at': [1, 2]}
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if _is_stored(value):
        return plain(value.facts)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return str(value)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; floats are written so that they read back as the same float."""
    text = json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    # what JSON lets stand and a terminal would obey; it reads back as the same character
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)


def json_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    r"""Yield a JSON list of objects, one row a line, so that ten million rows need no memory.

    >>> print("\n".join(json_lines(["run", "loss"], [("a", 0.5), ("b", None)])))
    [
    {"run": "a", "loss": 0.5},
    {"run": "b", "loss": null}
    ]
    """
    before = None
    yield "["
    for row in rows:
        if before is not None:
            yield before + ","
        before = json_text(dict(zip(columns, row, strict=True)))
    if before is not None:
        yield before
    yield "]"


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield CSV with a header; nothing is an empty field, an object is its JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")  # so that it quotes both of these
    for row in chain([columns], _cells(rows)):
        writer.writerow(row)
        yield buffer.getvalue()[:-2]
        buffer.seek(0)
        buffer.truncate()


def _cells(rows: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
    for row in rows:
        yield [
            json_text(c) if isinstance(c, (dict, list)) or _is_stored(c) else plain(c) for c in row
        ]


def markdown_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    r"""Yield a Markdown table with values as people read them.

    >>> print("\n".join(markdown_lines(["run", "loss"], [("a", 0.123456789)])))
    | run | loss |
    |---|---|
    | a | 0.123457 |
    """
    yield "| " + " | ".join(map(_escape, columns)) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_escape(cell(value)) for value in row) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def cell(value: Any) -> str:
    """Return a value as a person wants to read it: six digits, no braces where avoidable.

    >>> cell(0.000123456789), cell(None), cell(True)
    ('0.000123457', '', 'true')
    >>> from rearview.store.stored_value import StoredValue
    >>> cell([StoredValue("tensor", "float32", (64, 10), "ab12", 2560), 1])
    '[float32[64, 10], 1]'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (Mapping, list, tuple)):
        return _nested(value)
    return value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(value)


def _is_stored(value: Any) -> bool:
    """Return True for a `StoredValue`; its module is there if one is, and is not loaded for this."""
    module = sys.modules.get("rearview.store.stored_value")
    return module is not None and isinstance(value, module.StoredValue)


def _nested(value: Any) -> str:
    """Return a list or dictionary as JSON, with what is stored elsewhere described."""
    if isinstance(value, Mapping):
        items = (f"{json_text(str(key))}: {_nested(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_nested, value))}]"
    return str(value) if _is_stored(value) else json_text(value)


def numeric(values: Iterable[Any]) -> bool:
    """Say whether a column holds numbers only, and so reads better on the right."""
    there = [value for value in values if value is not None]
    return bool(there) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in there
    )


def duration(seconds: float | None) -> str:
    """Return a time span in at most two units.

    >>> [duration(s) for s in (0.0123, 5.25, 75, 4000, 200_000)]
    ['12 ms', '5.2 s', '1 min 15 s', '1 h 6 min', '2 d 7 h']
    """
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: int) -> str:
    """Return a number of bytes in a readable unit.

    >>> size(999), size(1_500_000), size(0)
    ('999 B', '1.5 MB', '0 B')
    """
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def moment(seconds: float) -> str:
    """Return a time stamp in the user's own time zone."""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def short_moment(seconds: float) -> str:
    """Return a time stamp in twelve characters: the day and time, or the day and year if long ago."""
    then, now = datetime.fromtimestamp(seconds, UTC).astimezone(), datetime.now(UTC).astimezone()
    return f"{then:%b %d %H:%M}" if abs((now - then).days) < 180 else f"{then:%b %d  %Y}"


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int, *, shrink: int
) -> list[list[str]]:
    """Return rows whose last `shrink` columns are cut so that the cells of each fit `room`.

    The widest of them gives way first; none gets narrower than its heading.

    >>> fitted(["run", "command"], [["a", "train.py --lr 0.1"]], 12, shrink=1)
    [['a', 'train.py…']]
    """
    widths = [max(len(name), *(len(row[k]) for row in rows)) for k, name in enumerate(columns)]
    loose = range(len(columns) - shrink, len(columns))
    while sum(widths) > room:
        widest = max(loose, key=lambda k: widths[k] - len(columns[k]), default=None)
        if widest is None or widths[widest] <= len(columns[widest]):
            break
        widths[widest] -= 1
    return [
        [
            text if len(text) <= most else text[: most - 1] + "…"
            for text, most in zip(row, widths, strict=True)
        ]
        for row in rows
    ]


def plural(count: int, word: str) -> str:
    """Return `count` with its word.

    >>> plural(1, "row"), plural(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
