"""Where a script makes Python look for the modules that it imports."""

from __future__ import annotations

import ast

from rearview.source.text import try_parse

_CHANGES = {"append", "extend", "insert"}


def reaches_up(text: str) -> bool:
    r"""Return True if a script changes `sys.path` and computes a folder above its own.

    >>> reaches_up("import sys\nsys.path.append('../..')\nfrom lib import step\n")
    True
    >>> reaches_up("import sys\nroot = Path(__file__).parents[1]\nsys.path.insert(0, str(root))\n")
    True
    >>> reaches_up("sys.path.append('tools')\n"), reaches_up("open('../data.csv')\n")
    (False, False)
    """
    parsed = try_parse(text)
    if isinstance(parsed, str):
        return False
    nodes = list(ast.walk(parsed.tree))
    return any(map(_changes_path, nodes)) and sum(map(_upward, nodes)) >= 2


def _is_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _changes_path(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGES and _is_path(node.func.value)
    if isinstance(node, ast.Assign):
        return any(_is_path(getattr(target, "value", target)) for target in node.targets) or any(
            map(_is_path, node.targets)
        )
    return isinstance(node, ast.AugAssign) and _is_path(node.target)


def _upward(node: ast.AST) -> int:
    """Return how many folders up a path expression leads; the first `dirname` or `.parent` is the script's own folder."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        return 2 if ".." in text.replace("\\", "/").split("/") else 0
    if isinstance(node, ast.Attribute):
        return {"parents": 2, "pardir": 2, "parent": 1, "dirname": 1}.get(node.attr, 0)
    return int(isinstance(node, ast.Name) and node.id == "dirname")
