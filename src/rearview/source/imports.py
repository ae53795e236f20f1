"""Imports of modules that have another name now, written as they were."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from rearview.source.text import parse, split


def imports_as_then(text: str, path: str, renamed: Mapping[str, str]) -> str:
    r"""Return a text that imports modules by the names they had; its lines stay where they are.

    `renamed` is path now -> path then. What `import module` binds is renamed wherever it is read;
    where that is not certain, the text stays as it is, and so differs from what was recorded.

    >>> imports_as_then("from tools import f\n", "main.py", {"tools.py": "util.py"})
    'from util import f\n'
    >>> imports_as_then("import tools\ntools.f()\n", "main.py", {"tools.py": "util.py"})
    'import util\nutil.f()\n'
    """
    modules = {_parts(now): _parts(then) for now, then in renamed.items() if now != path}
    parsed = parse(text) if modules else ""
    if isinstance(parsed, str) or parsed.repaired:
        return text
    here = (_folder(path), _folder(renamed.get(path, path)))
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for node in ast.walk(parsed.tree):
        if isinstance(node, ast.ImportFrom):
            done = _from(node, modules, here)
        elif isinstance(node, ast.Import):
            done = _import(node, modules, here)
        else:
            continue
        if done is None:
            return text
        edits += done[0]
        bound |= done[1]
    if bound:
        reads = _reads(parsed.tree, bound)
        if reads is None:
            return text
        edits += reads
    return _edited(text, edits)


_Edit = tuple[int, int, str, str]
"""Line, column, what stands there, what is to stand there."""
_Modules = Mapping[tuple[str, ...], tuple[str, ...]]
_Here = tuple[tuple[str, ...], tuple[str, ...]]
_Done = tuple[list[_Edit], dict[str, str]]
"""What changes in an import, and the names that it bound instead of those it binds."""


def _import(node: ast.Import, modules: _Modules, here: _Here) -> _Done | None:
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        then = _then(alias.name, 0, modules, here)
        if then is None:
            continue
        edits.append((alias.lineno, alias.col_offset, alias.name, then))
        if alias.asname is None and "." in alias.name + then:
            return None
        if alias.asname is None:
            bound[alias.name] = then
    return edits, bound


def _from(node: ast.ImportFrom, modules: _Modules, here: _Here) -> _Done | None:
    """Return the changes of `from … import …`, where modules may stand on both sides."""
    name = node.module or ""
    usual = (_then(name, node.level, modules, here) if name else None) or name
    bases: set[str] = set()
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        then = _then(f"{name}.{alias.name}".lstrip("."), node.level, modules, here)
        base, _, last = then.rpartition(".") if then is not None else (usual, "", alias.name)
        bases.add(base)
        if last != alias.name:
            edits.append((alias.lineno, alias.col_offset, alias.name, last))
            if alias.asname is None:
                bound[alias.name] = last
    base = bases.pop()
    if bases or bool(base) != bool(name):
        return None  # what came from one place came from two
    if base != name:
        edits.append((node.lineno, node.col_offset + len("from ") + node.level, name, base))
    return edits, bound


def _then(name: str, level: int, modules: _Modules, here: _Here) -> str | None:
    """Return the dotted name that a module had, or None if it had the same."""
    parts = tuple(name.split("."))
    for now, then in modules.items():
        root = now[: len(now) - len(parts)]
        if now[len(root) :] != parts:
            continue
        mine, was = here
        if level:
            if mine[: len(mine) - level + 1] != root:
                continue
            before = was[: len(was) - level + 1]
        else:
            before = was if root == mine and then[: len(root)] != root else root
        if then[: len(before)] != before:
            continue
        old = ".".join(then[len(before) :])
        return old if old and old != name else None
    return None


def _reads(tree: ast.Module, bound: Mapping[str, str]) -> list[_Edit] | None:
    """Return where names of modules are read; None if they, or the old ones, mean something else."""
    other = {*bound, *bound.values()}
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in other:
            if node.id not in bound or not isinstance(node.ctx, ast.Load):
                return None
            edits.append((node.lineno, node.col_offset, node.id, bound[node.id]))
        elif other & set(_named(node, bound)):
            return None
    return edits


def _named(node: ast.AST, bound: Mapping[str, str]) -> list[str]:
    """Return names that a node gives a meaning to without a `Name` that says so."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.alias):
        return [node.asname or ("" if node.name in bound else node.name)]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name or ""]
    return []


def _edited(text: str, edits: list[_Edit]) -> str:
    """Return the text with words replaced; as it is if one of them is not where the tree says."""
    lines = split(text)
    for line, column, now, then in sorted(set(edits), reverse=True):
        raw = lines[line - 1].encode()
        if raw[column : column + len(now.encode())] != now.encode():
            return text
        lines[line - 1] = (
            raw[:column] + then.encode() + raw[column + len(now.encode()) :]
        ).decode()
    return "".join(lines)


def _parts(path: str) -> tuple[str, ...]:
    """Return the dotted name of a file's module, in parts, from the project's folder."""
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == "__init__" else parts


def _folder(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[:-1])
