"""Insert one statement of the newest source at its place in an older text, or refuse with the reason.

The code around it may have been in another file of the older version, so `candidates` lists such files.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rearview.source.data_flow import uses
from rearview.source.propagate.match import Matching, match
from rearview.source.propagate.place import Place, anywhere, locate, others, place_at
from rearview.source.propagate.place_between_anchors import NewPlace, Nowhere
from rearview.source.propagate.splice import (
    comment_above,
    idle,
    indent_of,
    line_at,
    put,
    render,
    step,
)
from rearview.source.propagate.variable_names import (
    Votes,
    imports_for,
    keywords,
    members,
    overwritten,
    resolve,
)
from rearview.source.statement_trees import (
    StatementNode,
    StatementTree,
    blocks_of,
    first_line,
    grow,
    last_line,
)
from rearview.source.text import Parsed, newline, split, try_parse

BY_HAND = "put there by hand"
SURE = 0.7  # a place with less confidence is refused, unless the user sets another limit
CALIBRATION = (
    (0.0, 0.0),
    (0.679, 0.712),
    (0.808, 0.896),
    (0.869, 0.916),
    (0.978, 0.996),
)
"""Score of the evidence, and the share of insertions with that score that were right.

Fitted on 1,161 insertions of the tuning repositories by benchmarks/propagation/calibrate.py; its README says for which code the numbers hold.
"""


@dataclass(frozen=True, slots=True)
class Carried:
    """The insertion: the text goes before 1-based `line` of the old text; `line` is None if refused."""

    line: int | None
    text: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    score: float = 0.0
    """Strength of the evidence, from which `confidence` is read off (`calibrated`)."""
    present: tuple[int, int] | None = None
    """The lines at which the old text already has the same statement."""

    @property
    def refused(self) -> bool:
        """Return True if there is no place for it."""
        return self.line is None

    def into(self, old: str) -> str:
        """Return the old text with the statement in it."""
        return old if self.line is None else put(old, self.line, self.text)


@dataclass(frozen=True, slots=True)
class _Selection:
    parsed: Parsed
    lines: tuple[int, int]
    statements: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class _HandPlace:
    """A place given by hand: its line, and the names that variables of the statement have there."""

    line: int
    renames: Mapping[str, str]


def calibrated(score: float) -> float:
    """Return the share of insertions with a score that are right, as `CALIBRATION` has it.

    >>> calibrated(0.0) < calibrated(0.7) < calibrated(1.0) <= 1.0
    True
    """
    for (low, least), (high, most) in pairwise(CALIBRATION):
        if score <= high:
            share = (score - low) / (high - low) if high > low else 1.0
            return least + max(0.0, share) * (most - least)
    return CALIBRATION[-1][1]


def refuse(reason: str, *reasons: str, confidence: float = 0.0) -> Carried:
    """Return a refusal with its reason."""
    return Carried(None, "", confidence, reasons, reason)


def carry(
    new: str,
    lines: tuple[int, int],
    old: str,
    sure: float = SURE,
    disproved: Mapping[int, str] | None = None,
    inserted: Sequence[tuple[int, int]] = (),
) -> Carried:
    r"""Return where the statements on `lines` of the new text belong in the old one, and as what text.

    Lines are 1-based and inclusive. Every other byte of the old text stays. The answer is a refusal with
    the reason if the confidence is less than `sure`, a variable does not exist there, two places are
    equally good, or the code around the statement cannot be found. `disproved` maps lines of the old text
    to the reason why the statement was wrong before that line; the next likely place is taken instead.
    `inserted` has the (line, count) of earlier insertions, in order, so that messages give the line
    numbers from before them.

    >>> new = "for x in data:\n    cost = f(x)\n    print(cost)\n    step(cost)\n"
    >>> old = "for x in data:\n    loss = f(x)\n    step(loss)\n"
    >>> carried = carry(new, (3, 3), old)
    >>> carried.line, carried.text
    (3, '    print(loss)\n')
    >>> carry(new, (3, 3), "for x in data:\n    pass\n").reason
    'none of the statements around it can be found there'
    """
    read = _read(new, lines, old)
    if isinstance(read, str):
        return refuse(read)
    selection, matching, new_place = read
    place = locate(matching, new_place)
    if isinstance(place, Nowhere):
        loose = anywhere(selection.statements, new_place, matching.old)
        if loose is None:
            return refuse(place.reason(inserted))
        place = loose
    answer = _write(selection, matching, new_place, place, sure=sure)
    if not disproved or answer.line not in disproved:
        return answer
    for other in others(matching, new_place):
        answer = _write(selection, matching, new_place, other, sure=sure)
        if answer.line is not None and answer.line not in disproved:
            return answer
    return refuse(f"{' and '.join(dict.fromkeys(disproved.values()))}; no other place is certain")


def carry_to(
    new: str,
    lines: tuple[int, int],
    old: str,
    line: int,
    *,
    after: bool = False,
    renames: Mapping[str, str] | None = None,
    inserted: Sequence[tuple[int, int]] = (),
) -> Carried:
    r"""Return the statements on `lines` of the new text as they read at a line given by hand.

    They go before `line` of the old text, or with `after`, after the statement on it, with the old
    text's names; `renames` (new name to old name) are used as they are.

    >>> new = "for x in data:\n    cost = f(x)\n    print(cost)\n    step(cost)\n"
    >>> old = "for x in data:\n    loss = f(x)\n    loss = loss / 2\n    step(loss)\n"
    >>> carry_to(new, (3, 3), old, 4).text
    '    print(loss)\n'
    """
    read = _read(new, lines, old)
    if isinstance(read, str):
        return refuse(read)
    selection, matching, new_place = read
    place = place_at(matching.old, line, after=after)
    if isinstance(place, Nowhere):
        return refuse(place.reason(inserted))
    block, index, at = place
    by_hand = Place(block, index, 1.0, (BY_HAND,))
    return _write(selection, matching, new_place, by_hand, _HandPlace(at, renames or {}))


def _read(
    new: str, lines: tuple[int, int], old: str
) -> tuple[_Selection, Matching, NewPlace] | str:
    """Return the statements, how the two texts match, and their place; or why they cannot be read."""
    here, there = try_parse(new), try_parse(old)
    if isinstance(here, str):
        return f"the new text cannot be read: {here}"
    if isinstance(there, str):
        return f"the old text cannot be read: {there}"
    chosen = chosen_statements(here, lines)
    if isinstance(chosen, str):
        return chosen
    if is_notebook(old):
        return "the old text is a notebook; carry into the text of its cells"
    new_tree = grow(here, without=lines)
    matching = match(new_tree, grow(there))
    new_place = NewPlace(*_new_place(new_tree, chosen[0]), uses(chosen), comment_above(here, lines))
    return _Selection(here, lines, chosen), matching, new_place


def unsure(confidence: float, sure: float) -> str:
    """Return the reason of a refusal for lack of certainty."""
    return f"the best place is only {int(100 * confidence)}% sure, less than {sure:.0%}"


def chosen_statements(parsed: Parsed, lines: tuple[int, int]) -> list[ast.stmt] | str:
    """Return the statements on the lines, or the reason why the lines are not whole statements of one block."""
    start, end = lines
    todo: list[list[ast.stmt]] = [parsed.tree.body]
    while todo:
        body = todo.pop()
        inside = [s for s in body if start <= first_line(s) and last_line(s) <= end]
        cut = [
            s for s in body if s not in inside and first_line(s) <= end and last_line(s) >= start
        ]
        if inside and not cut:
            statement_lines = {at for s in inside for at in range(first_line(s), last_line(s) + 1)}
            other_lines = [
                at
                for at in range(start, min(end, len(parsed.lines)) + 1)
                if at not in statement_lines
            ]
            if all(idle(parsed.lines[at - 1]) for at in other_lines if at > 0):
                return inside
            return f"lines {start} to {end} of the new text hold more than whole statements"
        if inside or len(cut) > 1:
            return (
                f"lines {start} to {end} of the new text do not hold whole statements of one block"
            )
        for stmt in cut:
            todo.extend(inner for _, _, inner in blocks_of(stmt))
    return f"lines {start} to {end} of the new text do not hold whole statements"


def is_notebook(text: str) -> bool:
    """Return True if a text is a notebook file, which parses as Python but is data."""
    return (
        text.lstrip("\ufeff \r\n\t").startswith("{") and '"cells"' in text and '"nbformat"' in text
    )


def _new_place(tree: StatementTree, stmt: ast.stmt) -> tuple[StatementNode, int]:
    """Return the block and index of a statement that was left out of the tree."""
    for node in tree.nodes:
        if not node.is_block:
            continue
        owner, role = node.tree, node.role if node.role in {"orelse", "finalbody"} else "body"
        body = getattr(owner, role, [])
        if any(each is stmt for each in body):
            line = first_line(stmt)
            return node, sum(1 for child in node.children if child.start < line)
    raise AssertionError("every statement is in a block")


def _write(
    selection: _Selection,
    matching: Matching,
    new_place: NewPlace,
    place: Place,
    by_hand: _HandPlace | None = None,
    sure: float = SURE,
) -> Carried:
    here, lines, chosen = selection.parsed, selection.lines, selection.statements
    used = new_place.used
    old = matching.old
    renames = by_hand.renames if by_hand is not None else {}
    free = replace(used, reads=used.reads - renames.keys())
    votes = Votes(matching)
    names = resolve(
        matching, votes, free, (new_place.block, new_place.index), (place.block, place.index)
    )
    imports = imports_for(names.missing_names, matching)
    unknown = [name for name in names.missing_names if name not in imports]
    if unknown:
        return refuse(_absent([f"`{name}`" for name in unknown]), *place.reasons)
    attributes, absent = members(matching, votes, used)
    if absent:
        return refuse(_absent([f"`{root}.{member}`" for root, member in absent]), *place.reasons)
    arguments = keywords(matching, chosen)
    clash = overwritten(used, (new_place.block, place.block))
    if clash:
        return refuse(f"it would overwrite `{clash}`, which the old text uses for something else")
    certainty = names.certainty * (0.9 if attributes else 1.0)
    score = place.confidence * certainty
    confidence = calibrated(score) if by_hand is None else 1.0
    if confidence < sure:
        return refuse(unsure(confidence, sure), *place.reasons, confidence=confidence)
    block, index = place.block, place.index
    indent = _indent(old, block, index)
    if indent is None:
        return refuse("a place inside a one-line block would change that line")
    line = by_hand.line if by_hand else line_at(here, lines, old.parsed, block, index)
    if line == 1 and old.parsed.text.startswith("\ufeff"):
        return refuse("it would come before the byte order mark")
    there = old.parsed.lines
    end = newline(there, min(line, len(there)) - 1)
    text = "".join(f"{indent}{each}{end}" for each in sorted(set(imports.values())))
    text += render(
        here,
        lines,
        chosen,
        renamed={
            **names.renamed,
            **renames,
            **{f".{a}": b for a, b in attributes.items()},
            **{f"{a}=": b for a, b in arguments.items()},
        },
        indent=indent,
        unit=step(old),
        end=end,
    )
    if line == len(there) + 1 and there and not there[-1].endswith(("\n", "\r")):
        text = end + text.removesuffix(end)
    present = _present(there, line, text)
    if present is not None and by_hand is None and not _has_partner(matching, present):
        why = f"the same statement is there already, on line {present[0]}"
        return Carried(None, "", confidence, place.reasons, why, score, present)
    broken = _still_parses(old, line, text)
    if broken is not None:
        return refuse(f"the old text would no longer parse: {broken}")
    reasons = (
        *place.reasons,
        *names.reasons,
        *(f"`.{new}` is called `.{old_name}` there" for new, old_name in attributes.items()),
        *(f"`{new}=` is called `{old_name}=` there" for new, old_name in arguments.items()),
        *(f"`{new}` is called `{old_name}` there" for new, old_name in sorted(renames.items())),
        *(f"`{each}` comes with it" for each in imports.values()),
    )
    return Carried(line, text, confidence, reasons, score=score)


def _present(old: Sequence[str], line: int, text: str) -> tuple[int, int] | None:
    """Return the lines next to a place that already contain the same statement."""
    inserted = [each.strip() for each in split(text) if each.strip()]
    for start in (line - len(inserted), line):
        near = old[max(0, start - 1) : start - 1 + len(inserted)]
        if start >= 1 and [each.strip() for each in near] == inserted:
            return start, start + len(inserted) - 1
    return None


def _has_partner(matching: Matching, lines: tuple[int, int]) -> bool:
    """Return True if the old statement on some lines is another one of the new text."""
    return any(old.start == lines[0] and not old.is_block for old in matching.new_of)


def _absent(listed: list[str]) -> str:
    return f"{', '.join(listed)} {'is' if len(listed) == 1 else 'are'} not there"


def _indent(old: StatementTree, block: StatementNode, index: int) -> str | None:
    """Return the indentation of a block; None if no whole line can be inserted at the index."""
    if not block.children:
        return ""
    for at in {0, min(index, len(block.children) - 1)}:
        if not block.children[at].leads:
            return None
    first = old.parsed.lines[block.children[0].start - 1]
    return indent_of(first)


def _still_parses(old: StatementTree, line: int, text: str) -> str | None:
    """Return what breaks if lines are inserted before a line; only the top statement there is parsed."""
    lines = old.parsed.code_lines
    around = next((n for n in reversed(old.root.children) if n.start < line), None)
    if around is None:
        result = try_parse(text)
    else:
        stop = max(around.end, line - 1)
        result_lines = [*lines[around.start - 1 : line - 1], text, *lines[line - 1 : stop]]
        result = try_parse("".join(result_lines))
    return result if isinstance(result, str) else None


NEAR = 12  # lines on either side that count as surroundings
MOST = 3  # files tried


def candidates(
    files: Mapping[str, str], new: str, path: str, lines: tuple[int, int], old: Mapping[str, str]
) -> list[str]:
    r"""Return the paths of the old version that contain the surroundings of lines, best first.

    A file that contains them in the new version as well is a copy, not the file they came from.

    >>> new = {"a.py": "loss = compute(x)\nprint(loss)\nstep_with(loss)\n"}
    >>> old = {"b.py": "loss = compute(x)\nstep_with(loss)\n", "c.py": "other()\n"}
    >>> candidates(new, new["a.py"], "a.py", (2, 2), old)
    ['b.py']
    """
    all_lines = split(new)
    start, end = lines
    near = all_lines[max(0, start - 1 - NEAR) : start - 1] + all_lines[end : end + NEAR]
    context = {line.strip() for line in near}
    context = {line for line in context if len(line) > 8 and not line.startswith("#")}
    ranked: list[tuple[int, str]] = []
    for other, text in old.items():
        if other == path or not other.endswith(".py"):
            continue
        shared = _shared(context, text)
        still = _shared(context, files[other]) if other in files else 0
        if shared >= 2 and shared > still:
            ranked.append((-shared, other))
    ranked.sort()
    best = -ranked[0][0] if ranked else 0
    return [other for score, other in ranked[:MOST] if -score * 2 > best]


def _shared(context: set[str], text: str) -> int:
    return len(context & {line.strip() for line in split(text)})
