"""One statement of the newest source, put where it belongs in older ones, or a refusal."""

import ast
from dataclasses import dataclass

from rearview.source.flow import uses
from rearview.source.match import Matching, match
from rearview.source.names import Votes, absent_members, resolve
from rearview.source.place import Nowhere, Place, locate
from rearview.source.splice import indent_of, put, render
from rearview.source.text import Parsed, newline, parse
from rearview.source.tree import Node, Tree, first_line, grow, last_line

SURE = 0.5  # below this a place is a guess, and a guess is refused


@dataclass(frozen=True, slots=True)
class Carried:
    """Where the text goes: before 1-based `line` of the old text; `line` is None if refused."""

    line: int | None
    text: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""

    @property
    def refused(self) -> bool:
        """Say whether there is no place for it."""
        return self.line is None

    def into(self, old: str) -> str:
        """Return the old text with the statement in it."""
        return old if self.line is None else put(old, self.line, self.text)


def refuse(reason: str, *reasons: str, confidence: float = 0.0) -> Carried:
    """Return a refusal with its reason."""
    return Carried(None, "", confidence, reasons, reason)


def carry(new: str, lines: tuple[int, int], old: str) -> Carried:
    """Return where the statements on `lines` of the new text belong in the old one, and as what text.

    Lines are 1-based and inclusive. Every other byte of the old text stays. Where a variable is not
    there, two places are equally good, or the code around it did not exist yet, the answer is a
    refusal that says so.

    >>> new = "for x in data:\\n    cost = f(x)\\n    print(cost)\\n    step(cost)\\n"
    >>> old = "for x in data:\\n    loss = f(x)\\n    step(loss)\\n"
    >>> found = carry(new, (3, 3), old)
    >>> found.line, found.text
    (3, '    print(loss)\\n')
    >>> carry(new, (3, 3), "for x in data:\\n    pass\\n").reason
    'the statements around it did not exist yet'
    """
    here, there = parse(new), parse(old)
    if isinstance(here, str):
        return refuse(f"the new text cannot be read: {here}")
    if isinstance(there, str):
        return refuse(f"the old text cannot be read: {there}")
    chosen = chosen_statements(here.tree, lines)
    if isinstance(chosen, str):
        return refuse(chosen)
    one = grow(here, without=lines)
    two = grow(there)
    found = match(one, two)
    spot = _spot(one, chosen[0])
    used = uses(chosen)
    place = locate(found, *spot, used)
    if isinstance(place, Nowhere):
        return refuse(place.reason)
    return _write(here, lines, chosen, found, spot, place)


def chosen_statements(tree: ast.Module, lines: tuple[int, int]) -> list[ast.stmt] | str:
    """Return the whole statements on the lines, all of one block, or why they are not that."""
    start, end = lines
    todo: list[list[ast.stmt]] = [tree.body]
    while todo:
        body = todo.pop()
        inside = [s for s in body if start <= first_line(s) and last_line(s) <= end]
        cut = [s for s in body if s not in inside and first_line(s) <= end and last_line(s) >= start]
        if inside and not cut:
            return inside
        if inside or len(cut) > 1:
            return f"lines {start} to {end} of the new text do not hold whole statements of one block"
        for stmt in cut:
            todo.extend(b for b in _bodies(stmt))
    return f"lines {start} to {end} of the new text do not hold whole statements"


def _bodies(stmt: ast.AST) -> list[list[ast.stmt]]:
    from rearview.source.tree import blocks_of

    return [body for _, _, body in blocks_of(stmt)]


def _spot(tree: Tree, stmt: ast.stmt) -> tuple[Node, int]:
    """Return the block and index at which a statement left out of the tree stands."""
    for node in tree.nodes:
        if not node.is_block:
            continue
        owner, role = node.tree, node.role if node.role in {"orelse", "finalbody"} else "body"
        body = getattr(owner, role, [])
        if any(each is stmt for each in body):
            line = first_line(stmt)
            return node, sum(1 for child in node.children if child.start < line)
    raise AssertionError("a statement stands in some block")


def _write(
    here: Parsed,
    lines: tuple[int, int],
    chosen: list[ast.stmt],
    found: Matching,
    spot: tuple[Node, int],
    place: Place,
) -> Carried:
    used = uses(chosen)
    names = resolve(found, Votes(found), used, spot, (place.block, place.index))
    if names.missing:
        listed = ", ".join(f"`{name}`" for name in names.missing)
        return refuse(f"{listed} is not there", *place.reasons)
    absent = absent_members(found, used)
    if absent:
        listed = ", ".join(f"`{root}.{member}`" for root, member in absent)
        return refuse(f"{listed} is not there", *place.reasons)
    confidence = place.confidence * names.certainty
    if confidence < SURE:
        return refuse("no place is certain enough", *place.reasons, confidence=confidence)
    there = found.old.parsed
    block, index = place.block, place.index
    inline = "a place inside a one-line block would change that line"
    if block.children:
        lead = block.children[0]
        if there.lines[lead.start - 1].removeprefix("\ufeff")[: lead.tree.col_offset].strip():  # type: ignore[attr-defined]
            return refuse(inline)
        indent = indent_of(there.lines[lead.start - 1])
    else:
        indent = ""
    if index < len(block.children) and index and block.children[index - 1].end == block.children[index].start:
        return refuse(inline)
    line = _line(here, lines, found, spot, block, index)
    if line == 1 and there.text.startswith("\ufeff"):
        return refuse("it would stand before the byte order mark")
    end = newline(there.lines, min(line, len(there.lines)) - 1)
    text = render(
        here, lines, chosen, renamed=names.renamed, indent=indent, unit=_step(found.old), end=end
    )
    if line == len(there.lines) + 1 and there.lines and not there.lines[-1].endswith(("\n", "\r")):
        text = end + text.removesuffix(end)
    result = parse(put(there.text, line, text))
    if isinstance(result, str):
        return refuse(f"the old text would no longer parse: {result}")
    return Carried(line, text, confidence, (*place.reasons, *names.reasons))


def _line(
    here: Parsed,
    lines: tuple[int, int],
    found: Matching,
    spot: tuple[Node, int],
    block: Node,
    index: int,
) -> int:
    """Return the line of the old text, comments and blank lines around it placed as in the new."""
    there = found.old.parsed.lines
    if not block.children:
        return len(there) + 1
    if index < len(block.children):
        stop = block.children[index].start
        start = stop
        least = block.children[index - 1].end + 1 if index else 1
        while start > least and _idle(there[start - 2]):
            start -= 1
    else:
        start = stop = block.children[-1].end + 1
        depth = len(indent_of(there[block.children[0].start - 1]))
        at = start
        while at <= len(there) and _idle(there[at - 1]):
            at += 1
            if there[at - 2].strip() and len(indent_of(there[at - 2])) >= depth > 0:
                stop = at
    gap = [line.strip() for line in there[start - 1 : stop - 1]]
    if not gap:
        return stop
    above, below = _around(here.lines, lines)
    if not above and index:
        return start
    best, choice = -1.0, start
    for at in range(len(gap) + 1):
        score = 2.0 * _same(gap[:at][::-1], above[::-1]) + 2.0 * _same(gap[at:], below)
        score -= 0.1 * (abs(at - len(above)) if above or not below else abs(len(gap) - at - len(below)))
        if score > best or at == 0:
            best, choice = score, start + at
    return choice


def _same(ones: list[str], twos: list[str]) -> int:
    count = 0
    for one, two in zip(ones, twos, strict=False):
        if one != two:
            break
        count += 1
    return count


def _idle(line: str) -> bool:
    line = line.strip()
    return not line or line.startswith("#")


def _around(all_lines: tuple[str, ...], lines: tuple[int, int]) -> tuple[list[str], list[str]]:
    start, end = lines
    above: list[str] = []
    while start > 1 and _idle(all_lines[start - 2]):
        above.insert(0, all_lines[start - 2].strip())
        start -= 1
    below: list[str] = []
    while end < len(all_lines) and _idle(all_lines[end]):
        below.append(all_lines[end].strip())
        end += 1
    return above, below


def _step(tree: Tree) -> str:
    """Return one step of indentation as the text makes it."""
    for node in tree.nodes:
        if node.is_block and node.parent is not None and node.children:
            inner = indent_of(tree.parsed.lines[node.children[0].start - 1])
            outer = indent_of(tree.parsed.lines[node.parent.start - 1])
            if inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
