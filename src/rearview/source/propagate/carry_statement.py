"""Insert statements of the newest source where they belong in an older text, or refuse with the reason.

The code around the statements may be in another file of the older version: `candidate_files` lists such files.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rearview.source.data_flow import uses
from rearview.source.propagate.match import Matching, match
from rearview.source.propagate.place import (
    Place,
    further_places,
    locate,
    place_at_line,
    place_of_definitions,
)
from rearview.source.propagate.place_between_anchors import NewPlace, NoPlace
from rearview.source.propagate.splice import (
    comment_above,
    indent_of,
    indent_unit,
    insert_lines,
    insertion_line,
    is_blank_or_comment,
    render,
)
from rearview.source.propagate.variable_names import (
    Votes,
    imports_for,
    overwritten_variable,
    resolve_attributes,
    resolve_keywords,
    resolve_variables,
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
MIN_CONFIDENCE = 0.7  # the default limit: an insertion with less confidence is refused
CALIBRATION = (
    (0.0, 0.0),
    (0.679, 0.712),
    (0.808, 0.896),
    (0.869, 0.916),
    (0.978, 0.996),
)
"""(score of the evidence for an insertion, fraction of insertions with this score that were right), by rising score.

Fitted by benchmarks/propagation/calibrate.py on 1,161 insertions in the repositories used for tuning; the README
there says for which code the numbers hold.
"""


@dataclass(frozen=True, slots=True)
class Carried:
    """Statements of the new text as they are inserted into an old text, or a refusal."""

    line: int | None
    """Line of the old text, from 1, before which `text` is inserted; None if the statements are refused."""
    text: str
    confidence: float
    reasons: tuple[str, ...]
    """The evidence for the place in the old text and for the old names of variables, as sentences."""
    reason: str = ""
    """Reason why the statements are refused, or ''."""
    score: float = 0.0
    """Strength of the evidence, from which `calibrated` computes `confidence`."""
    present: tuple[int, int] | None = None
    """First and last line of these statements if the old text has them already at this place; otherwise None."""

    @property
    def refused(self) -> bool:
        """Whether the old text has no certain place for the statements."""
        return self.line is None

    def into(self, old: str) -> str:
        """Return the old text with the statements inserted, or unchanged if they are refused."""
        return old if self.line is None else insert_lines(old, self.line, self.text)


@dataclass(frozen=True, slots=True)
class _Selection:
    """The statements to carry, with the new text and their first and last line in it."""

    parsed: Parsed
    lines: tuple[int, int]
    statements: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class _HandPlace:
    """A line of the old text that the user chose, and the old names (new name -> old name) that the user gave."""

    line: int
    renames: Mapping[str, str]


def calibrated(score: float) -> float:
    """Return the expected fraction of right insertions among those with `score`, interpolated in `CALIBRATION`.

    >>> calibrated(0.0) < calibrated(0.7) < calibrated(1.0) <= 1.0
    True
    """
    for (low, least), (high, most) in pairwise(CALIBRATION):
        if score <= high:
            fraction = (score - low) / (high - low) if high > low else 1.0
            return least + max(0.0, fraction) * (most - least)
    return CALIBRATION[-1][1]


def refuse(reason: str, *reasons: str, confidence: float = 0.0) -> Carried:
    """Return a refusal because of `reason`; `reasons` is the evidence that was found for a place."""
    return Carried(None, "", confidence, reasons, reason)


def carry(
    new: str,
    lines: tuple[int, int],
    old: str,
    min_confidence: float = MIN_CONFIDENCE,
    disproved: Mapping[int, str] | None = None,
    inserted: Sequence[tuple[int, int]] = (),
) -> Carried:
    r"""Return where the statements on `lines` of the new text belong in the old text, and their text there.

    Lines are 1-based and inclusive. The statements are refused if the confidence is less than `min_confidence`, a
    variable does not exist in the old text, two places are equally good, or the code around them cannot be found.
    `disproved` maps lines of the old text to the reason why the statements were wrong before that line; then the next
    most likely place is used. `inserted` has (line, number of lines) of earlier insertions into the old text, in order;
    messages give line numbers as they were before these insertions.

    >>> new = "for x in data:\n    cost = f(x)\n    print(cost)\n    step(cost)\n"
    >>> old = "for x in data:\n    loss = f(x)\n    step(loss)\n"
    >>> carried = carry(new, (3, 3), old)
    >>> carried.line, carried.text
    (3, '    print(loss)\n')
    >>> carry(new, (3, 3), "for x in data:\n    pass\n").reason
    'none of the statements around it can be found there'
    """
    prepared = _prepare(new, lines, old)
    if isinstance(prepared, str):
        return refuse(prepared)
    selection, matching, new_place = prepared
    place = locate(matching, new_place)
    if isinstance(place, NoPlace):
        place_of_definition = place_of_definitions(selection.statements, new_place, matching.old)
        if place_of_definition is None:
            return refuse(place.reason(inserted))
        place = place_of_definition
    answer = _insertion(selection, matching, new_place, place, min_confidence=min_confidence)
    if not disproved or answer.line not in disproved:
        return answer
    for further_place in further_places(matching, new_place):
        answer = _insertion(
            selection, matching, new_place, further_place, min_confidence=min_confidence
        )
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
    r"""Return the statements on `lines` of the new text as they read at `line` of the old text, chosen by the user.

    The statements go before `line` of the old text or, with `after`, after the statement on that line. Variables get
    the names that they have in the old text, or the names of `renames` (new name -> old name) without a check.

    >>> new = "for x in data:\n    cost = f(x)\n    print(cost)\n    step(cost)\n"
    >>> old = "for x in data:\n    loss = f(x)\n    loss = loss / 2\n    step(loss)\n"
    >>> carry_to(new, (3, 3), old, 4).text
    '    print(loss)\n'
    """
    prepared = _prepare(new, lines, old)
    if isinstance(prepared, str):
        return refuse(prepared)
    selection, matching, new_place = prepared
    place = place_at_line(matching.old, line, after=after)
    if isinstance(place, NoPlace):
        return refuse(place.reason(inserted))
    block, index, at = place
    by_hand = Place(block, index, 1.0, (BY_HAND,))
    return _insertion(selection, matching, new_place, by_hand, _HandPlace(at, renames or {}))


def _prepare(
    new: str, lines: tuple[int, int], old: str
) -> tuple[_Selection, Matching, NewPlace] | str:
    """Return (statements on `lines`, matching of both texts, place of the statements in the new text).

    If one of the texts or the lines cannot be used, return the reason as a text.
    """
    new_parsed, old_parsed = try_parse(new), try_parse(old)
    if isinstance(new_parsed, str):
        return f"the new text cannot be read: {new_parsed}"
    if isinstance(old_parsed, str):
        return f"the old text cannot be read: {old_parsed}"
    statements = statements_on(new_parsed, lines)
    if isinstance(statements, str):
        return statements
    if is_notebook(old):
        return "the old text is a notebook; carry into the text of its cells"
    new_tree = grow(new_parsed, without=lines)
    matching = match(new_tree, grow(old_parsed))
    new_place = NewPlace(
        *_place_in_new_tree(new_tree, statements[0]),
        uses(statements),
        comment_above(new_parsed, lines),
    )
    return _Selection(new_parsed, lines, statements), matching, new_place


def too_uncertain(confidence: float, min_confidence: float) -> str:
    """Return the message that `confidence` is less than `min_confidence`."""
    return f"the best place is only {int(100 * confidence)}% sure, less than {min_confidence:.0%}"


def statements_on(parsed: Parsed, lines: tuple[int, int]) -> list[ast.stmt] | str:
    """Return the statements on `lines` (first, last), or the reason why these lines are not whole statements."""
    start, end = lines
    todo: list[list[ast.stmt]] = [parsed.tree.body]
    while todo:
        body = todo.pop()
        inside = [s for s in body if start <= first_line(s) and last_line(s) <= end]
        partly_inside = [
            s for s in body if s not in inside and first_line(s) <= end and last_line(s) >= start
        ]
        if inside and not partly_inside:
            statement_lines = {at for s in inside for at in range(first_line(s), last_line(s) + 1)}
            other_lines = [
                at
                for at in range(start, min(end, len(parsed.lines)) + 1)
                if at not in statement_lines
            ]
            if all(is_blank_or_comment(parsed.lines[at - 1]) for at in other_lines if at > 0):
                return inside
            return f"lines {start} to {end} of the new text hold more than whole statements"
        if inside or len(partly_inside) > 1:
            return (
                f"lines {start} to {end} of the new text do not hold whole statements of one block"
            )
        for stmt in partly_inside:
            todo.extend(inner for _, _, inner in blocks_of(stmt))
    return f"lines {start} to {end} of the new text do not hold whole statements"


def is_notebook(text: str) -> bool:
    """Return True if a text is a notebook file: JSON, which Python can parse although it is no program."""
    return (
        text.lstrip("\ufeff \r\n\t").startswith("{") and '"cells"' in text and '"nbformat"' in text
    )


def _place_in_new_tree(tree: StatementTree, stmt: ast.stmt) -> tuple[StatementNode, int]:
    """Return (block, index in the block) of the position of `stmt` in `tree`, from which `stmt` was left out."""
    for node in tree.nodes:
        if not node.is_block:
            continue
        owner, role = node.tree, node.role if node.role in {"orelse", "finalbody"} else "body"
        body = getattr(owner, role, [])
        if any(each is stmt for each in body):
            line = first_line(stmt)
            return node, sum(1 for child in node.children if child.start < line)
    raise AssertionError("every statement is in a block")


def _insertion(
    selection: _Selection,
    matching: Matching,
    new_place: NewPlace,
    place: Place,
    by_hand: _HandPlace | None = None,
    min_confidence: float = MIN_CONFIDENCE,
) -> Carried:
    """Return the statements as they read at `place` of the old text, or a refusal.

    With `by_hand`, the place is certain: its line and renamed variables are used without a check.
    """
    new_parsed, lines, statements = selection.parsed, selection.lines, selection.statements
    statement_uses = new_place.uses
    old = matching.old
    renames = by_hand.renames if by_hand is not None else {}
    used_without_renames = replace(statement_uses, reads=statement_uses.reads - renames.keys())
    votes = Votes(matching)
    names = resolve_variables(
        matching,
        votes,
        used_without_renames,
        (new_place.block, new_place.index),
        (place.block, place.index),
    )
    imports = imports_for(names.missing_names, matching)
    unknown = [name for name in names.missing_names if name not in imports]
    if unknown:
        return refuse(_absence([f"`{name}`" for name in unknown]), *place.reasons)
    attributes, absent_members = resolve_attributes(matching, votes, statement_uses)
    if absent_members:
        return refuse(
            _absence([f"`{root}.{member}`" for root, member in absent_members]), *place.reasons
        )
    arguments = resolve_keywords(matching, statements)
    clash = overwritten_variable(statement_uses, (new_place.block, place.block))
    if clash:
        return refuse(f"it would overwrite `{clash}`, which the old text uses for something else")
    certainty = names.certainty * (0.9 if attributes else 1.0)
    score = place.confidence * certainty
    confidence = calibrated(score) if by_hand is None else 1.0
    if confidence < min_confidence:
        return refuse(
            too_uncertain(confidence, min_confidence), *place.reasons, confidence=confidence
        )
    block, index = place.block, place.index
    indent = _indent(old, block, index)
    if indent is None:
        return refuse("a place inside a one-line block would change that line")
    line = by_hand.line if by_hand else insertion_line(new_parsed, lines, old.parsed, block, index)
    if line == 1 and old.parsed.text.startswith("\ufeff"):
        return refuse("it would come before the byte order mark")
    old_lines = old.parsed.lines
    end = newline(old_lines, min(line, len(old_lines)) - 1)
    text = "".join(f"{indent}{each}{end}" for each in sorted(set(imports.values())))
    text += render(
        new_parsed,
        lines,
        statements,
        renamed={
            **names.renamed,
            **renames,
            **{f".{a}": b for a, b in attributes.items()},
            **{f"{a}=": b for a, b in arguments.items()},
        },
        indent=indent,
        unit=indent_unit(old),
        end=end,
    )
    if line == len(old_lines) + 1 and old_lines and not old_lines[-1].endswith(("\n", "\r")):
        text = end + text.removesuffix(end)
    present = _present(old_lines, line, text)
    if present is not None and by_hand is None and not _is_partner(matching, present):
        why = f"the same statement is there already, on line {present[0]}"
        return Carried(None, "", confidence, place.reasons, why, score, present)
    syntax_error = _syntax_error_with(old, line, text)
    if syntax_error is not None:
        return refuse(f"the old text would no longer parse: {syntax_error}")
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
    """Return (first line, last line) if the statements `text` are in `old` directly before or at `line`, or None."""
    inserted = [each.strip() for each in split(text) if each.strip()]
    for start in (line - len(inserted), line):
        near = old[max(0, start - 1) : start - 1 + len(inserted)]
        if start >= 1 and [each.strip() for each in near] == inserted:
            return start, start + len(inserted) - 1
    return None


def _is_partner(matching: Matching, lines: tuple[int, int]) -> bool:
    """Return True if the old statement that starts on the first of `lines` is paired with a new statement."""
    return any(old.start == lines[0] and not old.is_block for old in matching.new_of)


def _absence(listed: list[str]) -> str:
    return f"{', '.join(listed)} {'is' if len(listed) == 1 else 'are'} not there"


def _indent(old: StatementTree, block: StatementNode, index: int) -> str | None:
    """Return the indentation of the statements of a block, or None if no whole line can be inserted at `index`."""
    if not block.children:
        return ""
    for at in {0, min(index, len(block.children) - 1)}:
        if not block.children[at].leads:
            return None
    first = old.parsed.lines[block.children[0].start - 1]
    return indent_of(first)


def _syntax_error_with(old: StatementTree, line: int, text: str) -> str | None:
    """Return the syntax error that results if `text` is inserted before `line`, or None if there is none.

    Only the top-level statement around the line is parsed.
    """
    lines = old.parsed.code_lines
    around = next((n for n in reversed(old.root.children) if n.start < line), None)
    if around is None:
        result = try_parse(text)
    else:
        stop = max(around.end, line - 1)
        result_lines = [*lines[around.start - 1 : line - 1], text, *lines[line - 1 : stop]]
        result = try_parse("".join(result_lines))
    return result if isinstance(result, str) else None


NEAR = 12  # number of lines above and of lines below that count as the code around a statement
MAX_FILES = 3  # maximal number of files that `candidate_files` returns


def candidate_files(
    files: Mapping[str, str], new: str, path: str, lines: tuple[int, int], old: Mapping[str, str]
) -> list[str]:
    r"""Return the paths of the old files that contain the code around `lines` of the file `path`, best first.

    `old` and `files` map paths to texts of the old and the new version. An old file that contains this code in the
    new version, too, is left out: it has a copy of the code.

    >>> new = {"a.py": "loss = compute(x)\nprint(loss)\nstep_with(loss)\n"}
    >>> old = {"b.py": "loss = compute(x)\nstep_with(loss)\n", "c.py": "other()\n"}
    >>> candidate_files(new, new["a.py"], "a.py", (2, 2), old)
    ['b.py']
    """
    all_lines = split(new)
    start, end = lines
    lines_around = all_lines[max(0, start - 1 - NEAR) : start - 1] + all_lines[end : end + NEAR]
    context = {line.strip() for line in lines_around}
    context = {line for line in context if len(line) > 8 and not line.startswith("#")}
    ranked: list[tuple[int, str]] = []
    for old_path, text in old.items():
        if old_path == path or not old_path.endswith(".py"):
            continue
        shared = _shared(context, text)
        shared_now = _shared(context, files[old_path]) if old_path in files else 0
        if shared >= 2 and shared > shared_now:
            ranked.append((-shared, old_path))
    ranked.sort()
    best = -ranked[0][0] if ranked else 0
    return [old_path for score, old_path in ranked[:MAX_FILES] if -score * 2 > best]


def _shared(context: set[str], text: str) -> int:
    return len(context & {line.strip() for line in split(text)})
