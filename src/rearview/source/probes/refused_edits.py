"""Edits that are always refused: changed or removed statements, shadowed modules, reflection."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from rearview.source.loops import FUNCTIONS
from rearview.source.probes.align import Added, MissingStatement, StatementComparison
from rearview.source.probes.naming_edits import NamedValue
from rearview.source.probes.side_effects import ProbeRefusal
from rearview.source.scopes import Scope
from rearview.source.text import BODIES, blocks

REFLECTS = {"globals", "locals", "vars", "dir"}


def _shown(node: ast.stmt) -> str:
    text = ast.unparse(node)
    if blocks(node):
        text = text.splitlines()[0]
    text = " ".join(text.split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def missing_file_refusal(path: str, candidates: Sequence[str]) -> ProbeRefusal:
    """Return the refusal for a file of the run that is missing; it lists names the file may have now."""
    if not candidates:
        why = "the run used this file and it is gone"
        return ProbeRefusal(path, 1, f"`{path}`", why, "Bring it back.")
    shown = " or ".join(f"`{each}`" for each in candidates)
    but = "which fit equally well" if len(candidates) > 1 else "and so may another file"
    return ProbeRefusal(
        path,
        1,
        f"`{path}`",
        f"the run used this file; it may be {shown} now, {but}",
        "Rename it back.",
    )


def missing_statement_refusal(path: str, missing: MissingStatement) -> ProbeRefusal:
    """Return the refusal for a recorded statement that was changed, moved or removed."""
    was = f"line {missing.node.lineno} of the version"
    if missing.inside is not None:
        return ProbeRefusal(
            path,
            missing.line,
            _shown(missing.node),
            f"this recorded statement ({was}) was put inside {_shown(missing.inside)} (line "
            f"{missing.inside.lineno}), so it would not run as it did",
            "Take it out again; put only the log statements into a new block.",
        )
    if missing.moved:
        return ProbeRefusal(
            path,
            missing.line,
            _shown(missing.node),
            f"this recorded statement ({was}) is at another place now",
            "Move it back; put the log statement where the value exists.",
        )
    if missing.instead is None:
        return ProbeRefusal(
            path,
            missing.line,
            _shown(missing.node),
            f"this recorded statement ({was}) is gone",
            "Put it back; a probe only adds statements.",
        )
    if missing.contained and missing.instead is not None:
        value = ast.unparse(missing.node)
        return ProbeRefusal(
            path,
            missing.line,
            _shown(missing.instead),
            f"the recorded {_shown(missing.node)} ({was}) is a part of it now",
            f"Write `value = {value}` in its place, and log `value` in a statement below."
            if len(value) <= 60
            else "Put it back as `value = ...`, and log `value` in a statement below.",
        )
    if missing.why:
        return ProbeRefusal(
            path,
            missing.line,
            _shown(missing.instead),
            f"in the recorded {_shown(missing.node)} ({was}), {missing.why}, so the order would differ",
            "Put the recorded statement back and name the value in it, "
            "`(value := ...)`; then log it in a statement below.",
        )
    parts = differing(missing.node, missing.instead)
    change = f": `{parts[1]}` where `{parts[0]}` was" if parts is not None else ""
    return ProbeRefusal(
        path,
        missing.line,
        _shown(missing.instead),
        f"it replaces the recorded {_shown(missing.node)} ({was}){change}",
        "Put the recorded statement back and log in a separate statement; to change the program, "
        "run it again.",
    )


def named_value_refusal(
    path: str,
    named_value: NamedValue,
    scope: Scope,
    comparison: StatementComparison,
    parents: tuple[ast.AST, ...],
) -> ProbeRefusal | None:
    """Return why an edit may not give this name to a value of the run; None if it may."""
    name = named_value.target.id
    home = scope.owner_of(name) or scope
    line = home.recorded_use(name)
    if home.is_class:
        return ProbeRefusal(
            path,
            named_value.stmt.lineno,
            _shown(named_value.stmt),
            f"it gives the recorded class an attribute `{name}`",
            "Log the value where the class is used.",
        )
    if line is not None:
        return ProbeRefusal(
            path,
            named_value.stmt.lineno,
            _shown(named_value.stmt),
            f"it gives the value the name `{name}`, which the recorded code uses (line {line})",
            "Choose a name that the recorded code does not use.",
        )
    return reflection_refusal(path, Added(named_value.stmt, parents), [name], comparison, scope)


def differing(old: ast.AST, new: ast.AST) -> tuple[str, str] | None:
    """Return the only part in which two statements differ, as text; None if they differ in several.

    >>> differing(*ast.parse("f(a, lr=0.1); f(a, lr=0.2)").body)
    ('0.1', '0.2')
    """
    difference: tuple[ast.AST, ast.AST] | None = None
    whole = old.value if isinstance(old, ast.Expr) else None
    while type(old) is type(new):
        pairs = _unlike(old, new)
        if pairs is None or len(pairs) != 1:
            break
        difference = old, new = pairs[0]
    if difference is None or difference[0] is whole:
        return None  # both are shown anyway
    was, now = (" ".join(ast.unparse(part).split()) for part in difference)
    return (was, now) if max(len(was), len(now)) <= 60 else None


def _unlike(old: ast.AST, new: ast.AST) -> list[tuple[ast.AST, ast.AST]] | None:
    """Return the children in which two nodes differ; None if they differ in more than children."""
    pairs: list[tuple[ast.AST, ast.AST]] = []
    for name in old._fields:
        if name in BODIES and blocks(old):
            continue
        old_field, new_field = getattr(old, name, None), getattr(new, name, None)
        if not isinstance(old_field, list) or not isinstance(new_field, list):
            old_field, new_field = [old_field], [new_field]
        if len(old_field) != len(new_field):
            return None
        for a, b in zip(old_field, new_field, strict=True):
            if isinstance(a, ast.AST) and isinstance(b, ast.AST):
                if ast.dump(a) != ast.dump(b):
                    pairs.append((a, b))
            elif a != b or type(a) is not type(b):
                return None
    return pairs


def class_refusal(
    path: str, item: Added, attributes: frozenset[str], methods: frozenset[str]
) -> ProbeRefusal | None:
    """Return why a statement may not be added to a recorded class; None if it may."""
    inner = [node for node in item.parents if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    if not inner or not isinstance(inner[-1], ast.ClassDef):
        return None
    node = item.node
    if not isinstance(node, FUNCTIONS):
        return ProbeRefusal(
            path,
            node.lineno,
            _shown(node),
            f"it changes the recorded class `{inner[-1].name}`",
            "Put it into a function, or outside the class.",
        )
    dunder = node.name.startswith("__") and node.name.endswith("__")
    if dunder or node.name in attributes or node.name in methods:
        return ProbeRefusal(
            path,
            node.lineno,
            f"`def {node.name}`",
            "recorded code may call this method, or it takes the place of an inherited one",
            "Choose a name that the recorded code does not use.",
        )
    return None


def reflection_refusal(
    path: str, item: Added, names: list[str], comparison: StatementComparison, scope: Scope
) -> ProbeRefusal | None:
    """Return the refusal for a probe that binds a variable before recorded code lists the variables there."""
    if not names or scope.is_class:
        return None
    for _, stmt in comparison.matched:
        if stmt.lineno <= item.node.lineno or isinstance(stmt, (*FUNCTIONS, ast.ClassDef)):
            continue
        for node in ast.walk(stmt):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in REFLECTS
                and not node.args
                and (scope.parent is None or node.func.id != "globals")
                and _is_in_scope(stmt, scope)
            ):
                return ProbeRefusal(
                    path,
                    item.node.lineno,
                    _shown(item.node),
                    f"recorded code lists all variables (`{ast.unparse(node)}` in line "
                    f"{node.lineno}) and would see `{names[0]}`",
                    f"Put the statement below line {node.lineno}.",
                )
    return None


def _is_in_scope(stmt: ast.stmt, scope: Scope) -> bool:
    stack: list[ast.AST] = list(getattr(scope.node, "body", ()))
    while stack:
        node = stack.pop()
        if node is stmt:
            return True
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        stack.extend(child for child in ast.iter_child_nodes(node))
    return False


def shadow_refusals(trees: Mapping[str, ast.Module], fresh: set[str]) -> list[ProbeRefusal]:
    """Return refusals for new files that take the place of a module which recorded code imports."""
    imported: dict[str, tuple[str, int]] = {}
    folders = {path.rpartition("/")[0] for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imported.setdefault(alias.name.split(".")[0], (path, node.lineno))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.setdefault(node.module.split(".")[0], (path, node.lineno))
    refusals: list[ProbeRefusal] = []
    for path in sorted(fresh):
        folder, _, file = path.removesuffix("/__init__.py").rpartition("/")
        name = file.removesuffix(".py")
        if path.endswith(".py") and folder in folders and name in imported:
            where, line = imported[name]
            refusals.append(
                ProbeRefusal(
                    path,
                    1,
                    f"`{path}`",
                    f"it takes the place of the module `{name}` that {where}:{line} imports",
                    "Give the file another name.",
                )
            )
    return refusals
