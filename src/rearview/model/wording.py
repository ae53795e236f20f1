"""Format texts, counts, durations and sizes for messages, and parse numbers and durations from texts."""

from __future__ import annotations

import re
from typing import Any

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Unsafe characters: control characters except tab and newline, invisible characters, and lone surrogates."""
_LINE = re.compile("[\t\n]")
_DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*")
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Seconds per unit of a duration."""


def printable(text: str, *, line: bool = False) -> str:
    r"""Return `text` with an escape such as `\x1b` for each control character; with `line`, also for newline and tab.

    >>> printable("\x1b]0;title\x07"), printable("a\nb", line=True)
    ('\\x1b]0;title\\x07', 'a\\nb')
    """
    text = _UNSAFE.sub(_escaped, text)
    return _LINE.sub(_escaped, text) if line else text


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(match[0])
    if short is not None:
        return short
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


WORDS = {
    "$chance": "the random bytes drawn from the system",
    "$clock": "the clock",
    "$stdout": "the printed lines",
    "__rearview__": "the wrapper of a loop",
    "__rearview_parts__": "the wrapper of a loop",
    "__rearview_turn__": "the iteration of a `while` loop",
    "__rearview_part__": "the iteration of a loop",
    "__rearview_iter__": "the iterator of a loop",
    "__rearview_walk__": "the iterator of a loop",
    "__rearview_probe__": "the guard of the added statement",
    "__rearview_cell__": "the mark of a cell",
}
"""Internal name of a value or variable -> words that messages show in its place."""
_GLOBALS = {
    "random": "the random state of Python",
    "numpy": "the random state of NumPy",
    "torch": "the random state of torch",
    "devices": "the random state of the accelerators",
    "modes": "the modes of torch (gradients, autocast, deterministic algorithms)",
}
"""Name under which a skeleton stores a global state -> words that messages show in its place."""
_OWN = re.compile(
    "(?:[\\w.]+\\.)?("
    + "|".join(re.escape(name) for name in sorted(WORDS, key=len, reverse=True))
    + r")\d*((?:\[[^\]]*\])*)"
)
_GLOBAL = re.compile(r"<global state of ([\w.]+)>((?:\[[^\]]*\])*)")


def in_words(text: str) -> str:
    """Return `text` with plain words in place of each internal name of Rearview.

    >>> in_words("$chance[0] at epoch=3: recorded 80, now 158")
    'the random bytes drawn from the system at epoch=3: recorded 80, now 158'
    >>> in_words("<global state of numpy>['state'] at epoch=3")
    'the random state of NumPy at epoch=3'
    """
    if "$" not in text and "__rearview" not in text and "<global" not in text:
        return text
    text = _GLOBAL.sub(lambda match: _GLOBALS.get(match[1], f"the state of {match[1]}"), text)
    return _OWN.sub(lambda match: WORDS[match[1]], text)


def plural(count: int, word: str) -> str:
    """Return a count and its word as text, in the plural unless the count is 1. Use this in all messages.

    >>> plural(1, "row"), plural(1200, "row"), plural(0, "recorded value"), plural(2, "process")
    ('1 row', '1,200 rows', '0 recorded values', '2 processes')
    """
    end = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count:,} {word}{end}"


def duration(seconds: float | None) -> str:
    """Return a time span as text, in at most two units; an empty text for None.

    >>> [duration(s) for s in (0.0123, 0.9999, 5.25, 75, 4000, 200_000)]
    ['12 ms', '1.0 s', '5.2 s', '1 min 15 s', '1 h 6 min', '2 d 7 h']
    """
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Return a number of bytes as text, in the largest unit that fits.

    >>> size(999), size(1_500_000), size(0)
    ('999 B', '1.5 MB', '0 B')
    """
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def parse_duration(text: str, *, unit: str = "") -> float | None:
    """Return the seconds of a duration such as "90s", "10 min" or "1.5h", or None if the text is no duration.

    `unit` is the unit of a number without a unit; by default, a number without a unit is no duration.

    >>> parse_duration("10 min"), parse_duration("1.5h"), parse_duration("90", unit="s")
    (600.0, 5400.0, 90.0)
    >>> parse_duration("90"), parse_duration("soon")
    (None, None)
    """
    match = _DURATION.fullmatch(text.lower())
    seconds = _SECONDS.get(match[2] or unit) if match else None
    return float(match[1]) * seconds if match and seconds else None


def number_or_text(text: str) -> int | float | str:
    """Return the int or float that a text contains, or the text itself if it is no number.

    >>> number_or_text("3"), number_or_text("0.1"), number_or_text("adam")
    (3, 0.1, 'adam')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parameter_in_text(text: Any) -> Any:
    """Return the number or truth value that a parameter's text contains, or else the text itself.

    MLflow stores parameters as texts.

    >>> parameter_in_text("0.9"), parameter_in_text("12"), parameter_in_text("True"), parameter_in_text("adam")
    (0.9, 12, True, 'adam')
    """
    if type(text) is not str or len(text) > _LONGEST_NUMBER:
        return text
    if text in {"True", "False"}:
        return text == "True"
    return number_or_text(text)


_LONGEST_NUMBER = 40
"""Texts with more characters than this are not read as numbers."""
