"""A text as a tree, and the blocks of statements in it."""

from __future__ import annotations

import ast

from rearview.errors import SourceError

BODIES = ("body", "orelse", "finalbody")


def parse(text: str, path: str) -> ast.Module:
    """Return the tree of `text`, or raise naming the line that does not parse."""
    try:
        return ast.parse(text, filename=path)
    except (SyntaxError, ValueError) as exc:
        line = getattr(exc, "lineno", None) or 1
        raise SourceError(
            f"{path}:{line} is not Python that this interpreter can read ({exc}). "
            f"Correct the file and ask again.",
            slug="source-syntax",
        ) from exc


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the statement lists directly inside `node`, in the order of the text."""
    found: list[list[ast.stmt]] = []
    for name, value in ast.iter_fields(node):
        if name in BODIES and isinstance(value, list):
            found.append(value)
        elif name in {"handlers", "cases"}:
            found.extend(part.body for part in value)
    return found


def effective(block: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a block that do something: no docstrings, no `pass`."""
    return [
        stmt
        for stmt in block
        if not isinstance(stmt, ast.Pass)
        and not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
    ]
