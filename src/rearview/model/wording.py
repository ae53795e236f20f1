"""Words for names that are Rearview's own: a person never reads `$clock` or `__rearview_walk__2`.

Text that a terminal may be shown: nothing in it moves the cursor, sets a title or turns text round.

Words for names that are Rearview's own: a person never reads `$clock` or `__rearview_walk__2`.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""C0 but tab and newline, DEL, C1, zero-width and bidirectional controls, tags, lone surrogates."""
_LINE = re.compile("[\t\n]")


def printable(text: str, *, line: bool = False) -> str:
    r"""Return `text` with every control character written out; with `line`, newlines and tabs too.

    >>> printable("\x1b]0;title\x07"), printable("a\nb", line=True)
    ('\\x1b]0;title\\x07', 'a\\nb')
    """
    text = _UNSAFE.sub(_written_out, text)
    return _LINE.sub(_written_out, text) if line else text


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(found[0])
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
}
"""By internal name: what it stands for."""
_GLOBALS = {
    "random": "the random state of Python",
    "numpy": "the random state of NumPy",
    "torch": "the random state of torch",
    "devices": "the random state of the accelerators",
    "modes": "the modes of torch (gradients, autocast, deterministic algorithms)",
}
"""By the name under which global state is kept."""
_OWN = re.compile(
    "(?:[\\w.]+\\.)?("
    + "|".join(re.escape(name) for name in sorted(WORDS, key=len, reverse=True))
    + r")\d*((?:\[[^\]]*\])*)"
)
_GLOBAL = re.compile(r"<global state of ([\w.]+)>((?:\[[^\]]*\])*)")


def in_words(text: str) -> str:
    """Return a text with every internal name replaced by what it stands for.

    >>> in_words("$chance[0] at epoch=3: recorded 80, now 158")
    'the random bytes drawn from the system at epoch=3: recorded 80, now 158'
    >>> in_words("<global state of numpy>['state'] at epoch=3")
    'the random state of NumPy at epoch=3'
    """
    if "$" not in text and "__rearview" not in text and "<global" not in text:
        return text
    text = _GLOBAL.sub(lambda found: _GLOBALS.get(found[1], f"the state of {found[1]}"), text)
    return _OWN.sub(lambda found: WORDS[found[1]], text)
