"""Compare the outputs of a replayed cell with the author's outputs: same, different, or not comparable."""

from __future__ import annotations

import base64
import difflib
import html.parser
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rearview.model.wording import plural

MOST_DIFF_LINES = 60
"""Number of lines after which the difference in a verdict is cut off."""
MOST_DIFF_INPUT = 20_000
"""Largest number of lines of a text that `difflib` compares as a whole."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)\b"
)
_VARYING = (
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "an address in memory"),
    (
        re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"),
        "a time",
    ),
    (
        re.compile(
            r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]* \w{3} +\d+ \d\d:\d\d:\d\d(?: \w+)? \d{4}"
        ),
        "a time",
    ),
    (re.compile(r"(?<![\w-])\d\d:\d\d:\d\d(?:\.\d+)?(?![\w-])"), "a time"),
    (
        re.compile(
            r"\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\s?"
            r"(?:ns|\u00b5s|\u03bcs|us|ms|s|sec|seconds?|min|it/s|s/it)\b"
        ),
        "a duration",
    ),
    (
        re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
        "a random id",
    ),
    (re.compile(r"(?:/tmp|/var/folders)/[^\s'\"<>]+"), "a temporary path"),
    (
        # match only at the start of a file path, so that many slashes in a row do not take quadratic time
        re.compile(
            r"(?<![^\s'\"<>:])/[^\s'\"<>:]*/(?:ipykernel_\d+|rearview-replay-[^\s'\"<>:/]+)[^\s'\"<>:]*"
        ),
        "a path",
    ),
)
_CELL_FILE = re.compile(r"<ipython-input-\d+-\w+>|\b\d+\.py(?=, line \d)")
"""Matches a file name that a kernel has given to a cell, in the message of a syntax error."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class OutputMatch(StrEnum):
    """Verdict about a replay's outputs: the same as the author's, different, or not comparable."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class OutputVerdict:
    """The result of comparing outputs, with the reason and the difference as text; both empty if they are the same."""

    match: OutputMatch
    why: str = ""
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits within which numbers and images in outputs count as the same."""

    relative: float = 0.0
    absolute: float = 0.0
    perceptual: bool = False
    """Whether images are reduced to small grey images and compared roughly, not pixel by pixel."""


SAME = OutputVerdict(OutputMatch.SAME)


def compare(
    author: Sequence[dict[str, Any]] | None,
    replayed: Sequence[dict[str, Any]],
    tolerance: Tolerance | None = None,
) -> OutputVerdict:
    """Compare the outputs `replayed` of a cell with the author's, or None if these were not recorded."""
    tolerance = tolerance or Tolerance()
    if author is None:
        return OutputVerdict(OutputMatch.NOT_COMPARABLE, "the author's outputs were not recorded")
    author_items, replayed_items = _items(author), _items(replayed)
    if [kind for kind, _ in author_items] != [kind for kind, _ in replayed_items]:
        return _compare_different_counts(author_items, replayed_items, tolerance)
    verdicts = [
        _compare_contents(kind, a, b, tolerance)
        for (kind, a), (_, b) in zip(author_items, replayed_items, strict=True)
    ]
    for outcome in (OutputMatch.DIFFERENT, OutputMatch.NOT_COMPARABLE):
        for verdict in verdicts:
            if verdict.match is outcome:
                return verdict
    return SAME


def _compare_different_counts(
    author_items: list[tuple[str, Any]], replayed_items: list[tuple[str, Any]], tolerance: Tolerance
) -> OutputVerdict:
    """Compare two lists of outputs that differ in length or kinds.

    They are not comparable if only one contains standard error and they are the same without it; else different.
    """
    a = [item for item in author_items if item[0] != "stderr"]
    b = [item for item in replayed_items if item[0] != "stderr"]
    if [kind for kind, _ in a] == [kind for kind, _ in b]:
        for (kind, x), (_, y) in zip(a, b, strict=True):
            verdict = _compare_contents(kind, x, y, tolerance)
            if verdict.match is not OutputMatch.SAME:
                return verdict
        return OutputVerdict(OutputMatch.NOT_COMPARABLE, "only one of them wrote to standard error")
    error = next((item for kind, item in replayed_items if kind == "error"), None)
    why = f"{len(replayed_items)} outputs instead of {len(author_items)}"
    if error is not None and not any(kind == "error" for kind, _ in author_items):
        why = f"{error['ename']}: {error['evalue']}"
    return OutputVerdict(
        OutputMatch.DIFFERENT, why, _diff(_as_text(author_items), _as_text(replayed_items))
    )


def _items(outputs: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return (kind, content) pairs: first one per stream, with its joined text, then one per other output."""
    items: list[tuple[str, Any]] = []
    streams: dict[str, str] = {}
    for output in outputs:
        kind = output.get("output_type")
        if kind == "stream":
            name = str(output.get("name", "stdout"))
            text = streams.get(name, "") + _text(output.get("text", ""))
            streams[name] = text
        elif kind in {"display_data", "execute_result", "update_display_data"}:
            data = output.get("data", {})
            items.append(("data", data if isinstance(data, dict) else {}))
        elif kind == "error":
            items.append(("error", output))
    # the order of streams among other outputs depends on timing
    return [*sorted(streams.items()), *items]


def _text(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_text(items: Sequence[tuple[str, Any]]) -> str:
    parts = []
    for kind, item in items:
        if kind == "error":
            parts.append(f"{item.get('ename')}: {item.get('evalue')}")
        elif kind == "data":
            parts.append(_text(item.get("text/plain", f"<{', '.join(item)}>")))
        else:
            parts.append(item)
    return "\n".join(parts)


def _compare_contents(kind: str, a: Any, b: Any, tolerance: Tolerance) -> OutputVerdict:
    if kind == "error":
        if a.get("ename") != b.get("ename"):
            text = f"{b.get('ename')} instead of {a.get('ename')}"
            return OutputVerdict(
                OutputMatch.DIFFERENT, text, _diff(_as_text([(kind, a)]), _as_text([(kind, b)]))
            )
        old, new = (_CELL_FILE.sub("cell", _text(item.get("evalue", ""))) for item in (a, b))
        return _compare_texts(old, new, tolerance)
    if kind == "data":
        return _compare_data(a, b, tolerance)
    verdict = _compare_texts(_visible_text(a), _visible_text(b), tolerance)
    if kind == "stderr" and verdict.match is OutputMatch.DIFFERENT:
        return OutputVerdict(OutputMatch.NOT_COMPARABLE, "standard error differs", verdict.diff)
    return verdict


def _visible_text(text: str) -> str:
    """Return the text that a terminal shows in the end: each line without what a carriage return overwrote."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _compare_data(a: dict[str, Any], b: dict[str, Any], tolerance: Tolerance) -> OutputVerdict:
    for kind in ("image/png", "image/jpeg"):
        if kind in a and kind in b:
            return _compare_images(_text(a[kind]), _text(b[kind]), tolerance)
    if "text/html" in a and "text/html" in b:
        tables = _table_rows(_text(a["text/html"])), _table_rows(_text(b["text/html"]))
        if all(tables):
            return _compare_tables(*tables, tolerance)
    for kind in ("application/json", "image/svg+xml", "text/latex", "text/markdown", "text/plain"):
        if kind in a and kind in b:
            return _compare_texts(_text(a[kind]), _text(b[kind]), tolerance)
    shared = sorted(set(a) & set(b))
    if not shared:
        return OutputVerdict(OutputMatch.DIFFERENT, f"{', '.join(b)} instead of {', '.join(a)}")
    if all(a[kind] == b[kind] for kind in shared):
        return SAME
    return OutputVerdict(
        OutputMatch.NOT_COMPARABLE, f"outputs of kind {shared[0]} cannot be compared"
    )


def _compare_texts(a: str, b: str, tolerance: Tolerance) -> OutputVerdict:
    a, b = _ANSI.sub("", a), _ANSI.sub("", b)
    if a == b:
        return SAME
    if _close_text(a, b, tolerance):
        return SAME
    plain_a, plain_b, reasons = a, b, []
    for pattern, why in _VARYING:
        changed_a, changed_b = pattern.sub("…", plain_a), pattern.sub("…", plain_b)
        if (changed_a, changed_b) != (plain_a, plain_b):
            reasons.append(why)
        plain_a, plain_b = changed_a, changed_b
    if reasons and (plain_a == plain_b or _close_text(plain_a, plain_b, tolerance)):
        return OutputVerdict(OutputMatch.NOT_COMPARABLE, f"it shows {reasons[0]}", _diff(a, b))
    return OutputVerdict(OutputMatch.DIFFERENT, _first_difference(a, b), _diff(a, b))


def _close_text(a: str, b: str, tolerance: Tolerance) -> bool:
    """Return True if a tolerance is set and two texts differ only in numbers whose differences are within it."""
    if not tolerance.relative and not tolerance.absolute:
        return False
    if [part.split() for part in _NUMBER.split(a)] != [part.split() for part in _NUMBER.split(b)]:
        return False
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return all(_close(float(x), float(y), tolerance) for x, y in pairs)


def _close(a: float, b: float, tolerance: Tolerance) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return math.isclose(a, b, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)


def _first_difference(a: str, b: str) -> str:
    for number, (x, y) in enumerate(zip(a.splitlines(), b.splitlines(), strict=False), 1):
        if x != y:
            return f"line {number}: {_short(y)} instead of {_short(x)}"
    return f"{plural(len(b.splitlines()), 'line')} instead of {len(a.splitlines())}"


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _diff(a: str, b: str) -> str:
    old, new = a.splitlines(), b.splitlines()
    if max(len(old), len(new)) > MOST_DIFF_INPUT:  # the time of `difflib` is quadratic
        first = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), 0)
        old, new = old[first : first + MOST_DIFF_LINES], new[first : first + MOST_DIFF_LINES]
    lines = list(difflib.unified_diff(old, new, "author", "replay", lineterm="", n=1))
    if len(lines) > MOST_DIFF_LINES:
        lines = [*lines[:MOST_DIFF_LINES], f"… {plural(len(lines) - MOST_DIFF_LINES, 'line')} more"]
    return "\n".join(lines)


class _TableParser(html.parser.HTMLParser):
    """Parses HTML; `rows` has the texts of the cells of each table row."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Begin a new row for `<tr>` and a new cell for `<td>` and `<th>`."""
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"} and self.rows:
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        """End the cell at `</td>` and `</th>`."""
        if tag in {"td", "th"}:
            self.open = False

    def handle_data(self, data: str) -> None:
        """Add text to the current table cell; ignore text outside cells."""
        if self.open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def _table_rows(text: str) -> list[list[str]]:
    if "<table" not in text:
        return []
    parser = _TableParser()
    parser.feed(text)
    return [[cell.strip() for cell in row] for row in parser.rows if row]


def _compare_tables(a: list[list[str]], b: list[list[str]], tolerance: Tolerance) -> OutputVerdict:
    if [len(row) for row in a] != [len(row) for row in b]:
        return OutputVerdict(
            OutputMatch.DIFFERENT,
            f"a table of {plural(len(b), 'row')} instead of {len(a)}",
            _diff(_csv(a), _csv(b)),
        )
    for i, (row, other_row) in enumerate(zip(a, b, strict=True)):
        for j, (x, y) in enumerate(zip(row, other_row, strict=True)):
            verdict = _compare_texts(x, y, tolerance)
            if verdict.match is not OutputMatch.SAME:
                column = a[0][j] if i and a[0][j] else f"column {j + 1}"
                why = f"row {i}, {column}: {_short(y)} instead of {_short(x)}"
                if verdict.match is OutputMatch.NOT_COMPARABLE:
                    why = verdict.why
                return OutputVerdict(verdict.match, why, _diff(_csv(a), _csv(b)))
    return SAME


def _csv(rows: list[list[str]]) -> str:
    return "\n".join(" | ".join(row) for row in rows)


def _compare_images(a: str, b: str, tolerance: Tolerance) -> OutputVerdict:
    if a.split() == b.split():
        return SAME
    try:
        from PIL import Image
    except ImportError:
        return OutputVerdict(
            OutputMatch.NOT_COMPARABLE, "comparing images needs Pillow: pip install pillow"
        )
    try:
        left, right = (
            Image.open(io.BytesIO(base64.b64decode(text)), formats=("PNG", "JPEG")).convert("RGBA")
            for text in (a, b)
        )
    except Exception as exc:  # Pillow raises exceptions of many classes for damaged images
        return OutputVerdict(OutputMatch.NOT_COMPARABLE, f"an image cannot be read: {exc}")
    if tolerance.perceptual:
        return _compare_small_images(left, right)
    if left.size != right.size:
        sizes = f"{right.size[0]}x{right.size[1]} instead of {left.size[0]}x{left.size[1]} pixels"
        return OutputVerdict(OutputMatch.DIFFERENT, f"an image of {sizes}")
    from PIL import ImageChops

    difference = ImageChops.difference(left, right).convert("RGB")
    box = difference.getbbox()
    if box is None:
        return SAME
    histogram = difference.convert("L").histogram()
    changed_pixels = sum(histogram[1:])
    fraction = changed_pixels / (left.size[0] * left.size[1])
    return OutputVerdict(
        OutputMatch.DIFFERENT, f"{fraction:.2%} of the pixels of an image differ, in {box}"
    )


def _compare_small_images(left: Any, right: Any) -> OutputVerdict:
    """Compare two images reduced to 64 x 64 grey pixels; they are the same if the mean difference is at most 2."""
    from PIL import ImageChops

    small = [image.convert("L").resize((64, 64)) for image in (left, right)]
    histogram = ImageChops.difference(*small).histogram()
    mean = sum(i * count for i, count in enumerate(histogram)) / (64 * 64)
    if mean <= 2.0:
        return SAME
    return OutputVerdict(
        OutputMatch.DIFFERENT, f"an image looks different (mean difference {mean:.1f} of 255)"
    )
