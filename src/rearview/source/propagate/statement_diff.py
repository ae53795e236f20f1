"""List the differences between two versions, statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rearview.source.propagate.match import Matching, align_items, match
from rearview.source.propagate.variable_names import aligned
from rearview.source.statement_trees import StatementNode, grow
from rearview.source.text import try_parse


class Edit(StrEnum):
    """Kind of change of one statement between two versions."""

    SAME = "same"
    RENAMED = "renamed"
    """The old and the new statement differ in names only."""
    MOVED = "moved"
    """The statement has the same text in another block, or in another order."""
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class StatementChange:
    """One statement of one or both versions, and how it changed. The line is None in a version without it."""

    edit: Edit
    path: str
    old_line: int | None
    new_line: int | None
    old_text: str = ""
    new_text: str = ""


def statement_diff(old: Mapping[str, str], new: Mapping[str, str]) -> list[StatementChange]:
    r"""Return the change of every statement, file by file, in the order of the new text.

    `old` and `new` map file paths to texts. Files that do not parse are left out. All statements of a file that only
    one version has are added or removed.

    >>> changes = statement_diff({"t.py": "a = f(1)\ng(a)\n"}, {"t.py": "b = f(1)\ng(b)\nend()\n"})
    >>> [(change.edit.value, change.new_text) for change in changes]
    [('renamed', 'b = f(1)'), ('renamed', 'g(b)'), ('added', 'end()')]
    """
    changes: list[StatementChange] = []
    for path in sorted({*old, *new}):
        old_parsed, new_parsed = try_parse(old.get(path, "")), try_parse(new.get(path, ""))
        if isinstance(old_parsed, str) or isinstance(new_parsed, str):
            continue
        changes += _file(path, match(grow(new_parsed), grow(old_parsed)))
    return changes


def _file(path: str, matching: Matching) -> list[StatementChange]:
    in_order = _in_order(matching)
    changes: list[tuple[int, StatementChange]] = []
    for node in matching.new.statements():
        partner = matching.old_of.get(node)
        text = _head(matching.new.parsed.lines, node)
        if partner is None:
            changes.append(
                (node.start, StatementChange(Edit.ADDED, path, None, node.start, "", text))
            )
            continue
        old_text = _head(matching.old.parsed.lines, partner)
        edit = _edit(node, partner)
        if edit is Edit.SAME and node not in in_order:
            edit = Edit.MOVED
        changes.append(
            (node.start, StatementChange(edit, path, partner.start, node.start, old_text, text))
        )
    for node in matching.old.statements():
        if node not in matching.new_of:
            old_text = _head(matching.old.parsed.lines, node)
            line = _listed_after(matching, node)
            changes.append(
                (line, StatementChange(Edit.REMOVED, path, node.start, None, old_text, ""))
            )
    return [change for _, change in sorted(changes, key=lambda each: each[0])]


def _edit(new: StatementNode, old: StatementNode) -> Edit:
    if new.words == old.words and new.kind == old.kind:
        return Edit.SAME
    pairs = aligned(new.words, old.words)
    if len(pairs) == len(new.words) == len(old.words) and new.kind == old.kind:
        differing = {(new_word, old_word) for new_word, old_word in pairs if new_word != old_word}
        names = all(word.isidentifier() for pair in differing for word in pair)
        if names and len({new_word for new_word, _ in differing}) == len(differing):
            return Edit.RENAMED
    return Edit.CHANGED


def _in_order(matching: Matching) -> set[StatementNode]:
    """Return the new statements whose old partners are in the corresponding block, in the same order."""
    in_order: set[StatementNode] = set()
    for block in matching.new.nodes:
        if not block.is_block:
            continue
        old_block = matching.old_block(block)
        pairs = [
            (node, partner.index)
            for node in block.children
            if (partner := matching.old_of.get(node)) is not None and partner.parent is old_block
        ]
        indexes = [index for _, index in pairs]
        in_order |= {pairs[at][0] for at, _ in align_items(indexes, sorted(indexes))}
    return in_order


def _listed_after(matching: Matching, node: StatementNode) -> int:
    """Return the line of the new text after which the removed statement `node` is listed; 0 for the top."""
    for preceding in reversed(matching.old.nodes[: node.order]):
        if not preceding.is_block and preceding in matching.new_of:
            return matching.new_of[preceding].start
    return 0


def _head(lines: tuple[str, ...], node: StatementNode) -> str:
    """Return the first line of a statement, after its decorators."""
    tree = node.tree
    line = tree.lineno if isinstance(tree, ast.stmt) else node.start
    return lines[line - 1].strip()
