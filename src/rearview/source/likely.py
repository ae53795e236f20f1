"""Which added statement, if any, a user wrote in place of a recorded one."""

from __future__ import annotations

import ast
import re
from collections import Counter

from rearview.source.logged import log_call

ALIKE = 0.35  # statements of one kind that share less are two statements
OTHER = 0.6  # as much must statements of two kinds share
_WORD = re.compile(r"\w+|[^\w\s]")


def likeliest(old: ast.stmt, added: list[ast.stmt]) -> ast.stmt | None:
    """Return the added statement that reads most like `old`; None if each is something else.

    >>> old, *new = ast.parse("lr = 0.1; rearview.log('lr', lr); lr = 0.2").body
    >>> ast.unparse(likeliest(old, new))
    'lr = 0.2'
    """
    words = _words(old)
    best: tuple[float, ast.stmt | None] = (0.0, None)
    for new in added:
        if isinstance(new, ast.Import | ast.ImportFrom) and type(new) is not type(old):
            continue
        if _logs(new) and not _logs(old):
            continue  # that is what a probe looks like
        theirs = _words(new)
        alike = 2 * (words & theirs).total() / max(1, words.total() + theirs.total())
        if alike >= (ALIKE if type(new) is type(old) else OTHER) and alike > best[0]:
            best = (alike, new)
    return best[1]


def _logs(stmt: ast.stmt) -> bool:
    return (
        isinstance(stmt, ast.Expr)
        and isinstance(stmt.value, ast.Call)
        and log_call(stmt.value) is not None
    )


def _words(stmt: ast.stmt) -> Counter[str]:
    text = ast.unparse(stmt)
    if hasattr(stmt, "body"):
        text = text.splitlines()[0]
    return Counter(_WORD.findall(text))
