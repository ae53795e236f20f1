"""Refuse edits that are no probes: changed or removed statements, hidden modules, names that `locals()` would list."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from rearview.source.loops import FUNCTIONS
from rearview.source.probes.align import AddedStatement, MissingStatement, StatementComparison
from rearview.source.probes.extracted_variables import ExtractedVariable
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
    """Return the refusal for the missing file `path` of the run; `candidates` are paths that it may have now."""
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


def missing_statement_refusal(path: str, missing_statement: MissingStatement) -> ProbeRefusal:
    """Return the refusal for a recorded statement that was changed, moved or removed."""
    recorded_line = f"line {missing_statement.node.lineno} of the version"
    if missing_statement.inside is not None:
        return ProbeRefusal(
            path,
            missing_statement.line,
            _shown(missing_statement.node),
            f"this recorded statement ({recorded_line}) was put inside {_shown(missing_statement.inside)} (line "
            f"{missing_statement.inside.lineno}), so it would not run as it did",
            "Take it out again; put only the log statements into a new block.",
        )
    if missing_statement.moved:
        return ProbeRefusal(
            path,
            missing_statement.line,
            _shown(missing_statement.node),
            f"this recorded statement ({recorded_line}) is at another place now",
            "Move it back; put the log statement where the value exists.",
        )
    if missing_statement.replacement is None:
        return ProbeRefusal(
            path,
            missing_statement.line,
            _shown(missing_statement.node),
            f"this recorded statement ({recorded_line}) is gone",
            "Put it back; a probe only adds statements.",
        )
    if missing_statement.contained and missing_statement.replacement is not None:
        value = ast.unparse(missing_statement.node)
        return ProbeRefusal(
            path,
            missing_statement.line,
            _shown(missing_statement.replacement),
            f"the recorded {_shown(missing_statement.node)} ({recorded_line}) is a part of it now",
            f"Write `value = {value}` in its place, and log `value` in a statement below."
            if len(value) <= 60
            else "Put it back as `value = ...`, and log `value` in a statement below.",
        )
    if missing_statement.why:
        return ProbeRefusal(
            path,
            missing_statement.line,
            _shown(missing_statement.replacement),
            f"in the recorded {_shown(missing_statement.node)} ({recorded_line}), {missing_statement.why}, so the order would differ",
            "Put the recorded statement back and name the value in it, "
            "`(value := ...)`; then log it in a statement below.",
        )
    parts = differing(missing_statement.node, missing_statement.replacement)
    shown_change = f": `{parts[1]}` where `{parts[0]}` was" if parts is not None else ""
    return ProbeRefusal(
        path,
        missing_statement.line,
        _shown(missing_statement.replacement),
        f"it replaces the recorded {_shown(missing_statement.node)} ({recorded_line}){shown_change}",
        "Put the recorded statement back and log in a separate statement; to change the program, "
        "run it again.",
    )


def extracted_variable_refusal(
    path: str,
    variable: ExtractedVariable,
    scope: Scope,
    comparison: StatementComparison,
    parents: tuple[ast.AST, ...],
) -> ProbeRefusal | None:
    """Return the refusal for a variable that an edit extracts from a recorded statement, or None if it is allowed."""
    name = variable.target.id
    binding_scope = scope.owner_of(name) or scope
    line = binding_scope.recorded_use(name)
    if binding_scope.is_class:
        return ProbeRefusal(
            path,
            variable.stmt.lineno,
            _shown(variable.stmt),
            f"it gives the recorded class an attribute `{name}`",
            "Log the value where the class is used.",
        )
    if line is not None:
        return ProbeRefusal(
            path,
            variable.stmt.lineno,
            _shown(variable.stmt),
            f"it gives the value the name `{name}`, which the recorded code uses (line {line})",
            "Choose a name that the recorded code does not use.",
        )
    return reflection_refusal(
        path, AddedStatement(variable.stmt, parents), [name], comparison, scope
    )


def differing(old: ast.AST, new: ast.AST) -> tuple[str, str] | None:
    """Return (old text, new text) of the only part in which two statements differ.

    Return None if several parts differ, or if the part is long or the whole expression.

    >>> differing(*ast.parse("f(a, lr=0.1); f(a, lr=0.2)").body)
    ('0.1', '0.2')
    """
    difference: tuple[ast.AST, ast.AST] | None = None
    whole_expression = old.value if isinstance(old, ast.Expr) else None
    while type(old) is type(new):
        pairs = _differing_children(old, new)
        if pairs is None or len(pairs) != 1:
            break
        difference = old, new = pairs[0]
    if difference is None or difference[0] is whole_expression:
        return None  # the refusal already shows both statements as a whole
    old_text, new_text = (" ".join(ast.unparse(part).split()) for part in difference)
    return (old_text, new_text) if max(len(old_text), len(new_text)) <= 60 else None


def _differing_children(old: ast.AST, new: ast.AST) -> list[tuple[ast.AST, ast.AST]] | None:
    """Return the pairs of unequal child nodes of two nodes, or None if the nodes differ in other ways, too."""
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
    path: str, item: AddedStatement, attributes: frozenset[str], methods: frozenset[str]
) -> ProbeRefusal | None:
    """Return the refusal for a statement that is added to the body of a recorded class, or None if it is allowed.

    `attributes` and `methods` are the names of all attributes and methods in the recorded code.
    """
    enclosing_definitions = [
        node for node in item.parents if isinstance(node, (*FUNCTIONS, ast.ClassDef))
    ]
    if not enclosing_definitions or not isinstance(enclosing_definitions[-1], ast.ClassDef):
        return None
    node = item.node
    if not isinstance(node, FUNCTIONS):
        return ProbeRefusal(
            path,
            node.lineno,
            _shown(node),
            f"it changes the recorded class `{enclosing_definitions[-1].name}`",
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
    path: str, item: AddedStatement, names: list[str], comparison: StatementComparison, scope: Scope
) -> ProbeRefusal | None:
    """Return the refusal for a probe whose new variables `names` a later `locals()` of recorded code would list.

    `vars()`, `dir()` and `globals()` count, too. Return None if no later recorded code lists the variables of `scope`.
    """
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


def shadow_refusals(trees: Mapping[str, ast.Module], new_paths: set[str]) -> list[ProbeRefusal]:
    """Return a refusal for each new file whose name hides a module that recorded code imports."""
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
    for path in sorted(new_paths):
        folder, _, file = path.removesuffix("/__init__.py").rpartition("/")
        name = file.removesuffix(".py")
        if path.endswith(".py") and folder in folders and name in imported:
            importing_path, line = imported[name]
            refusals.append(
                ProbeRefusal(
                    path,
                    1,
                    f"`{path}`",
                    f"it takes the place of the module `{name}` that {importing_path}:{line} imports",
                    "Give the file another name.",
                )
            )
    return refusals
