"""Comments and blank lines: where between two statements a line goes, and how far it is indented."""

from rearview.source.splice import indent_of
from rearview.source.text import Parsed
from rearview.source.tree import Node, Tree


def line_at(here: Parsed, lines: tuple[int, int], there: Parsed, block: Node, index: int) -> int:
    """Return the line of the old text, comments and blank lines around it placed as in the new."""
    old = there.lines
    if not block.children:
        return len(old) + 1
    if index < len(block.children):
        stop = block.children[index].start
        start = stop
        least = block.children[index - 1].end + 1 if index else 1
        while start > least and idle(old[start - 2]):
            start -= 1
    else:
        start = stop = block.children[-1].end + 1
        depth = len(indent_of(old[block.children[0].start - 1]))
        at = start
        while at <= len(old) and idle(old[at - 1]):
            at += 1
            if old[at - 2].strip() and len(indent_of(old[at - 2])) >= depth > 0:
                stop = at
    above, below = around(here.lines, lines)
    if index == len(block.children) and start == stop:
        for line in above:  # as many blank lines between as in the new text
            if line or stop > len(old) or old[stop - 1].strip():
                break
            stop += 1
        return stop
    gap = [line.strip() for line in old[start - 1 : stop - 1]]
    if not gap:
        return stop
    if not above and index:
        return start
    best, choice = -1.0, start
    for at in range(len(gap) + 1):
        score = 2.0 * _same(gap[:at][::-1], above[::-1]) + 2.0 * _same(gap[at:], below)
        score -= 0.1 * (
            abs(at - len(above)) if above or not below else abs(len(gap) - at - len(below))
        )
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


def idle(line: str) -> bool:
    """Say whether a line is blank or a comment."""
    line = line.strip()
    return not line or line.startswith("#")


def around(all_lines: tuple[str, ...], lines: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Return the blank lines and comments directly above and below lines, stripped."""
    start, end = lines
    above: list[str] = []
    while start > 1 and idle(all_lines[start - 2]):
        above.insert(0, all_lines[start - 2].strip())
        start -= 1
    below: list[str] = []
    while end < len(all_lines) and idle(all_lines[end]):
        below.append(all_lines[end].strip())
        end += 1
    return above, below


def comment_above(parsed: Parsed, lines: tuple[int, int]) -> tuple[str, ...]:
    """Return the comment that stands directly on top of lines, line by line."""
    above, _ = around(parsed.lines, lines)
    found: list[str] = []
    for line in reversed(above):
        if not line:
            break
        found.insert(0, line)
    return tuple(found)


def step(tree: Tree) -> str:
    """Return one step of indentation as the text makes it."""
    for node in tree.nodes:
        if node.is_block and node.parent is not None and node.children:
            inner = indent_of(tree.parsed.lines[node.children[0].start - 1])
            outer = indent_of(tree.parsed.lines[node.parent.start - 1])
            if inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
