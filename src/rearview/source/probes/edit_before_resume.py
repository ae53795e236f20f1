"""Find what an edit changed in the source of a stopped run before the run is resumed.

A run that is resumed with an edited source restores a state that the old source computed. So a changed
line must not run before that state is restored: its effect would disappear, or happen twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rearview.source.loops import FUNCTIONS, LOOPS, loop_ids, recorded_loop_ids
from rearview.source.probes.align import MissingStatement, compare
from rearview.source.statement_trees import first_line, last_line
from rearview.source.text import Parsed, decode, try_parse

_DEFINITIONS = (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)
_FRESH = 1000
"""Added to the ordinal in the id of each new loop, so that no recorded loop has the same id."""


@dataclass
class EditBeforeResume:
    """The changes in the source of a stopped run, with file paths and lines of the edited source."""

    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    """Path -> {changed line: how it was changed}. A changed line must not run before the state is restored."""
    trees: dict[str, ast.Module] = field(default_factory=dict)
    """Path -> syntax tree of the edited text."""
    ids: dict[str, dict[int, str]] = field(default_factory=dict)
    """Path -> {first line of a loop: id of the loop}. A recorded loop keeps its recorded id."""

    def changed_lines_in(self, loop: str) -> Iterator[tuple[str, int]]:
        """Yield (path, line) of each changed line in a loop and in the functions that it may call.

        `loop` is the id of the loop. A function counts if code of the loop, or of a function that counts, contains
        its name.
        """
        names: set[str] = set()
        todo: list[ast.stmt] = [
            node
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, LOOPS) and self.ids[path].get(node.lineno) == loop
        ]
        functions = {
            (path, node)
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, FUNCTIONS)
        }
        path_of = {id(node): path for path, tree in self.trees.items() for node in ast.walk(tree)}
        while todo:
            node = todo.pop()
            path = path_of[id(node)]
            inside = range(node.lineno, last_line(node) + 1)
            yield from ((path, line) for line in self.lines.get(path, ()) if line in inside)
            new_names = set(_names(node)) - names
            names |= new_names
            todo += [function for _, function in functions if function.name in new_names]


def edit_before_resume(
    recorded: Mapping[str, bytes], old: Mapping[str, bytes], new: Mapping[str, bytes]
) -> EditBeforeResume:
    """Return the changes from the source `old` to the source `new`; all three arguments map file paths to contents.

    A loop keeps its id if `recorded`, the source with which the run started, has the loop.
    """
    edit = EditBeforeResume()
    for path in sorted(path for path in new if path.endswith(".py")):
        tree_after = _parsed(new[path])
        if tree_after is None:
            continue
        edit.trees[path] = tree_after
        first_tree = _parsed(recorded.get(path, b""))
        edit.ids[path] = _ids(first_tree, tree_after, path)
        tree_before = _parsed(old.get(path, b""))
        if tree_before is not None and old.get(path) != new[path]:
            edit.lines[path] = dict(_changed(tree_before, tree_after))
    return edit


def _parsed(data: bytes) -> ast.Module | None:
    parsed = try_parse(decode(data))
    return parsed.tree if isinstance(parsed, Parsed) else None


def _ids(recorded: ast.Module | None, new: ast.Module, path: str) -> dict[int, str]:
    new_ids = loop_ids(new, path)
    recorded_ids = (
        {}
        if recorded is None
        else recorded_loop_ids(recorded, compare(recorded, new).matched, path)
    )
    return {
        line: str(recorded_ids[line])
        if line in recorded_ids
        else f"{path}:{loop.function}:{loop.ordinal + _FRESH}:{loop.name}"
        for line, loop in new_ids.items()
    }


def _changed(old: ast.Module, new: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line of `new`, description of the change) for added and changed statements and next to removed ones."""
    comparison = compare(old, new)
    partners = {id(before): after for before, after in comparison.matched}
    for added_statement in comparison.added_statements:
        if not isinstance(added_statement.node, _DEFINITIONS) and not _is_text(
            added_statement.node
        ):
            yield from ((line, "was added") for line in _lines(added_statement.node))
    for missing_statement in comparison.missing_statements:
        if missing_statement.replacement is not None:
            yield from (
                (line, "was changed")
                for line in _replaced_lines(missing_statement, missing_statement.replacement)
            )
        elif not isinstance(missing_statement.node, _DEFINITIONS) and not _is_text(
            missing_statement.node
        ):
            line = _neighbour(old, missing_statement.node, partners) or missing_statement.line
            yield (
                line,
                f"is next to `{ast.unparse(missing_statement.node)[:60]}`, which was removed",
            )


def _lines(node: ast.stmt) -> range:
    return range(first_line(node), last_line(node) + 1)


def _replaced_lines(missing_statement: MissingStatement, replacement: ast.stmt) -> Iterator[int]:
    """Yield the lines of `replacement`; only those of its body if a function was changed in its body alone."""
    old = missing_statement.node
    if isinstance(old, FUNCTIONS) and isinstance(replacement, FUNCTIONS):
        # changed defaults and decorators count: their values are part of the state that is restored
        if old.name == replacement.name and _values(old) == _values(replacement):
            for stmt in replacement.body:
                yield from _lines(stmt)
            return
    if not _is_text(replacement):
        yield from _lines(replacement)


def _values(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the decorators and defaults of a function, as texts to compare."""
    parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    return ["" if part is None else ast.dump(part) for part in parts]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _neighbour(tree: ast.Module, node: ast.stmt, partners: Mapping[int, ast.stmt]) -> int | None:
    """Return the edited line of a statement near the removed `node` that runs when `node` ran, or None.

    `partners` maps the `id()` of a statement of `tree` to the equal statement of the edited text.
    """
    for parent in ast.walk(tree):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and any(statement is node for statement in block):
                index = next(n for n, statement in enumerate(block) if statement is node)
                for nearby in (*block[:index][::-1], *block[index + 1 :]):
                    silent = isinstance(nearby, ast.Global | ast.Nonlocal) or _is_text(nearby)
                    if id(nearby) in partners and not silent:
                        return partners[id(nearby)].lineno
                return partners[id(parent)].lineno if id(parent) in partners else None
    return None


def _names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
