"""Edits that are refused whatever they compute: changed, removed, shadowing, reflected upon."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from rearview.source.align import Added, Comparison, Lost, blocks
from rearview.source.judge import Refusal
from rearview.source.loops import FUNCTIONS
from rearview.source.scopes import Scope, bound_by

REFLECTS = {"globals", "locals", "vars", "dir"}


def _shown(node: ast.stmt) -> str:
    text = ast.unparse(node)
    if blocks(node):
        text = text.splitlines()[0]
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def lost_refusal(path: str, lost: Lost) -> Refusal:
    """Say that a recorded statement is not there any more."""
    if lost.instead is None:
        return Refusal(
            path,
            lost.line,
            _shown(lost.node),
            f"this recorded statement (line {lost.node.lineno} of the version) is gone",
            "Put it back; a probe only adds statements.",
        )
    return Refusal(
        path,
        lost.line,
        _shown(lost.instead),
        f"it stands in place of the recorded {_shown(lost.node)}",
        "Put the recorded statement back and log in a statement of its own.",
    )


def class_refusal(
    path: str, item: Added, attributes: set[str], methods: set[str]
) -> Refusal | None:
    """Say why a statement may not be added to a recorded class, or None if it may."""
    inner = [node for node in item.parents if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    if not inner or not isinstance(inner[-1], ast.ClassDef):
        return None
    node = item.node
    if not isinstance(node, FUNCTIONS):
        return Refusal(
            path,
            node.lineno,
            _shown(node),
            f"it changes the recorded class `{inner[-1].name}`",
            "Put it into a function, or outside the class.",
        )
    dunder = node.name.startswith("__") and node.name.endswith("__")
    if dunder or node.name in attributes or node.name in methods:
        return Refusal(
            path,
            node.lineno,
            f"`def {node.name}`",
            "recorded code may call this method, or it takes the place of an inherited one",
            "Choose a name that the recorded code does not use.",
        )
    return None


def reflection_refusal(path: str, item: Added, found: Comparison, scope: Scope) -> Refusal | None:
    """Say that recorded code lists the variables of the scope after the probe binds one."""
    names = [name for name, _ in bound_by(item.node)]
    if not names or scope.is_class:
        return None
    for _, stmt in found.matched:
        if stmt.lineno <= item.node.lineno or isinstance(stmt, (*FUNCTIONS, ast.ClassDef)):
            continue
        for node in ast.walk(stmt):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in REFLECTS
                and not node.args
                and (scope.parent is None or node.func.id != "globals")
                and _stands_in(stmt, scope)
            ):
                return Refusal(
                    path,
                    item.node.lineno,
                    _shown(item.node),
                    f"recorded code lists all variables (`{ast.unparse(node)}` in line "
                    f"{node.lineno}) and would see `{names[0]}`",
                    f"Put the statement below line {node.lineno}.",
                )
    return None


def _stands_in(stmt: ast.stmt, scope: Scope) -> bool:
    stack: list[ast.AST] = list(getattr(scope.node, "body", ()))
    while stack:
        node = stack.pop()
        if node is stmt:
            return True
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        stack.extend(child for child in ast.iter_child_nodes(node))
    return False


def shadow_refusals(trees: Mapping[str, ast.Module], fresh: set[str]) -> list[Refusal]:
    """Say which new files take the place of a module that recorded code imports."""
    imported: dict[str, tuple[str, int]] = {}
    folders = {path.rpartition("/")[0] for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imported.setdefault(alias.name.split(".")[0], (path, node.lineno))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.setdefault(node.module.split(".")[0], (path, node.lineno))
    found: list[Refusal] = []
    for path in sorted(fresh):
        folder, _, file = path.removesuffix("/__init__.py").rpartition("/")
        name = file.removesuffix(".py")
        if path.endswith(".py") and folder in folders and name in imported:
            where, line = imported[name]
            found.append(
                Refusal(
                    path,
                    1,
                    f"`{path}`",
                    f"it takes the place of the module `{name}` that {where}:{line} imports",
                    "Give the file another name.",
                )
            )
    return found
