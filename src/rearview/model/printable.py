"""Text that a terminal may be shown: nothing in it moves the cursor, sets a title or turns text round."""

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
