"""Edits with which a stopped run is resumed: the lines they change, and the ids of the loops after them.

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
"""Added to the ordinal of loops that the recorded text does not have."""


@dataclass
class EditBeforeResume:
    """What an edit changes, by file and line of the edited text."""

    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    """Lines that must not run before the state is restored, with the kind of change."""
    trees: dict[str, ast.Module] = field(default_factory=dict)
    ids: dict[str, dict[int, str]] = field(default_factory=dict)
    """Recorded ids of loops, by line."""

    def run_in(self, loop: str) -> Iterator[tuple[str, int]]:
        """Yield the changed lines that a loop may run: its own, and those of functions that it mentions."""
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
        place = {id(node): path for path, tree in self.trees.items() for node in ast.walk(tree)}
        while todo:
            node = todo.pop()
            path = place[id(node)]
            inside = range(node.lineno, last_line(node) + 1)
            yield from ((path, line) for line in self.lines.get(path, ()) if line in inside)
            fresh = set(_names(node)) - names
            names |= fresh
            todo += [function for _, function in functions if function.name in fresh]


def edit_before_resume(
    recorded: Mapping[str, bytes], old: Mapping[str, bytes], new: Mapping[str, bytes]
) -> EditBeforeResume:
    """Return what an edit of the text `old` into `new` changes.

    Loops keep the ids that they have in the `recorded` text, if they are in it.
    """
    edit = EditBeforeResume()
    for path in sorted(path for path in new if path.endswith(".py")):
        after = _parsed(new[path])
        if after is None:
            continue
        edit.trees[path] = after
        first = _parsed(recorded.get(path, b""))
        edit.ids[path] = _ids(first, after, path)
        before = _parsed(old.get(path, b""))
        if before is not None and old.get(path) != new[path]:
            edit.lines[path] = dict(_changed(before, after))
    return edit


def _parsed(data: bytes) -> ast.Module | None:
    parsed = try_parse(decode(data))
    return parsed.tree if isinstance(parsed, Parsed) else None


def _ids(recorded: ast.Module | None, new: ast.Module, path: str) -> dict[int, str]:
    own = loop_ids(new, path)
    kept = (
        {}
        if recorded is None
        else recorded_loop_ids(recorded, compare(recorded, new).matched, path)
    )
    return {
        line: str(kept[line])
        if line in kept
        else f"{path}:{loop.function}:{loop.ordinal + _FRESH}:{loop.name}"
        for line, loop in own.items()
    }


def _changed(old: ast.Module, new: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines of `new` that differ from `old`, with the kind of change."""
    comparison = compare(old, new)
    partners = {id(before): after for before, after in comparison.matched}
    for added in comparison.added:
        if not isinstance(added.node, _DEFINITIONS) and not _is_text(added.node):
            yield from ((line, "was added") for line in _lines(added.node))
    for missing in comparison.missing:
        if missing.instead is not None:
            yield from ((line, "was changed") for line in _differing(missing, missing.instead))
        elif not isinstance(missing.node, _DEFINITIONS) and not _is_text(missing.node):
            line = _neighbour(old, missing.node, partners) or missing.line
            yield line, f"is next to `{ast.unparse(missing.node)[:60]}`, which was removed"


def _lines(node: ast.stmt) -> range:
    return range(first_line(node), last_line(node) + 1)


def _differing(missing: MissingStatement, instead: ast.stmt) -> Iterator[int]:
    """Yield the lines that run differently; the lines of a function run when it is called."""
    old = missing.node
    if isinstance(old, FUNCTIONS) and isinstance(instead, FUNCTIONS):
        # defaults and decorators are values, which are part of the restored state
        if old.name == instead.name and _values(old) == _values(instead):
            for stmt in instead.body:
                yield from _lines(stmt)
            return
    if not _is_text(instead):
        yield from _lines(instead)


def _values(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the expressions that are evaluated when a function is defined."""
    parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    return ["" if part is None else ast.dump(part) for part in parts]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _neighbour(tree: ast.Module, node: ast.stmt, partners: Mapping[int, ast.stmt]) -> int | None:
    """Return the line of a statement that runs whenever the removed `node` would have run."""
    for parent in ast.walk(tree):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and any(statement is node for statement in block):
                place = next(n for n, statement in enumerate(block) if statement is node)
                for nearby in (*block[:place][::-1], *block[place + 1 :]):
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
