"""Put the statements of the newest source into every past version.

`carry` (in `carry_statement`) handles two texts. `through` handles whole projects and a chain of versions: it carries
the statements from the newest source to each version directly and, in doubt, also from the version next to it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff

from rearview.source.data_flow import uses
from rearview.source.probes.probe import VariableExtraction
from rearview.source.propagate.carry_statement import (
    MIN_CONFIDENCE,
    Carried,
    candidate_files,
    carry,
    carry_to,
    refuse,
    statements_on,
    too_uncertain,
)
from rearview.source.propagate.extract_variable import extract_variables
from rearview.source.propagate.splice import insert_lines
from rearview.source.text import newline, split, try_parse

CLEAR = 0.95  # with at least this confidence, a place is not compared with a second attempt
Files = Mapping[str, str]
Disproved = Mapping[int, Mapping[tuple[str, int], str]]
"""Index of a statement -> {(file, line) before which the statement proved to be wrong in a replay: reason}."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement to carry: its file and its (first, last) line, counted from 1."""

    path: str
    lines: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """An inserted statement: `text` before `line`, counted from 1; '' if the file had the statement already."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class HandPlace:
    """A place that the user gave: before `line`, counted from 1, or with `after`, after the statement on it."""

    path: str
    line: int
    after: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    """New name -> old name of variables of the statement, as the user gave them."""


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """The result for one version: its changed files and their diff, or the reason why it remains unchanged."""

    version: int
    files: Files
    placed: tuple[Placed, ...]
    diff: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    locations: tuple[Statement, ...] = ()
    """File and lines of each statement in the changed version."""

    @property
    def refused(self) -> bool:
        """Whether this version remains unchanged because no place is certain."""
        return bool(self.reason)


@dataclass(frozen=True, slots=True)
class _Source:
    """A version that contains the statements, from which they are carried into other versions."""

    files: Files
    statements: tuple[Statement, ...]
    confidence: float
    extractions: tuple[VariableExtraction, ...] = ()


_Insertions = list[tuple[int, int]]
"""(line before which lines were inserted, number of lines) of each insertion into a text, in order."""
_Positions = tuple[tuple[Statement, ...], tuple[VariableExtraction, ...]]


def through(
    new: Files,
    statements: Sequence[Statement],
    chain: Sequence[Files],
    corrections: Mapping[int, Mapping[int, HandPlace]] | None = None,
    extractions: Sequence[VariableExtraction] = (),
    min_confidence: float = MIN_CONFIDENCE,
    disproved: Mapping[int, Disproved] | None = None,
) -> tuple[VersionOutcome, ...]:
    """Carry `statements` of the source `new` into each version of `chain`, newest first, and return the outcomes.

    A version gets all statements or none. `corrections` maps the index of a version to {index of a statement: place
    that the user gave}. A version that is nearer to a corrected version than to the newest source gets the statements
    from the corrected version, unless only the newest source gives a place. `extractions` are the recorded statements
    of the newest source from which the user extracted variables; the variables are extracted in every version, too.
    Places with less confidence than `min_confidence` are refused. `disproved` maps the index of a version to the
    places at which a replay showed that a statement is wrong.
    """
    newest = _Source(new, tuple(statements), 1.0, tuple(extractions))
    sources = {-1: newest}
    outcomes: dict[int, VersionOutcome] = {}
    carried_sources: dict[int, _Source] = {}

    def store(index: int, outcome: VersionOutcome, positions: _Positions | None) -> None:
        outcomes[index] = outcome
        if positions is not None:
            texts = {**chain[index], **outcome.files}
            carried_sources[index] = _Source(texts, positions[0], outcome.confidence, positions[1])

    for index, places in (corrections or {}).items():
        corrected = _carry_all(newest, chain[index], places)
        store(index, corrected.outcome(index, chain[index]), corrected.positions)
        if index in carried_sources:
            sources[index] = carried_sources[index]
    origins = {
        index: min(sources, key=lambda g: (abs(g - index), g)) for index in range(len(chain))
    }
    for index in sorted(origins, key=lambda k: (abs(k - origins[k]), k)):
        if index in outcomes:
            continue
        for origin in dict.fromkeys((origins[index], -1)):
            direction = 1 if index > origin else -1
            neighbour = next(
                (k for k in range(index - direction, origin, -direction) if k in carried_sources),
                None,
            )
            outcome, positions = _version(
                index,
                sources[origin],
                carried_sources[neighbour] if neighbour is not None else None,
                chain[index],
                min_confidence,
                (disproved or {}).get(index, {}),
            )
            if index not in outcomes or not outcome.refused:
                store(index, outcome, positions)
            if not outcome.refused:
                break
    return tuple(outcomes[index] for index in range(len(chain)))


def _version(
    index: int,
    origin: _Source,
    neighbour: _Source | None,
    old: Files,
    min_confidence: float,
    disproved: Disproved,
) -> tuple[VersionOutcome, _Positions | None]:
    """Return (outcome for the version `old`, positions of the statements in it, or None if it is refused).

    The statements are carried directly from `origin` and, in doubt, also from `neighbour`.
    """
    direct = _carry_all(origin, old, min_confidence=min_confidence, disproved=disproved)
    if neighbour is None or (not direct.reason and direct.confidence >= CLEAR):
        return direct.outcome(index, old), direct.positions
    stepwise = _carry_all(neighbour, old, min_confidence=min_confidence, disproved=disproved)
    stepwise_confidence = min(stepwise.confidence, neighbour.confidence)
    if direct.reason and stepwise.reason:
        return direct.outcome(index, old), None
    if direct.reason:
        best = stepwise.adjusted(stepwise_confidence, "carried step by step")
    elif stepwise.reason:
        best = direct.adjusted(direct.confidence * 0.9, "the version next to it gives no place")
    elif stepwise.files == direct.files:
        both = 1 - (1 - direct.confidence) * (1 - stepwise_confidence)
        best = direct.adjusted(both, "the same place directly and step by step")
    elif abs(stepwise_confidence - direct.confidence) < 0.1:
        best = _Attempt(
            {}, (), None, 0.0, (), "directly and step by step, the statement gets different places"
        )
    elif stepwise_confidence > direct.confidence:
        best = stepwise.adjusted(stepwise_confidence, "carried step by step")
    else:
        best = direct
    if not best.reason and best.confidence < min_confidence:
        best = _Attempt(
            {}, (), None, best.confidence, (), too_uncertain(best.confidence, min_confidence)
        )
    return best.outcome(index, old), best.positions


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of carrying all statements of one source into one version."""

    files: Files
    placed: tuple[Placed, ...]
    positions: _Positions | None
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""

    def adjusted(self, confidence: float, why: str) -> "_Attempt":
        return _Attempt(self.files, self.placed, self.positions, confidence, (*self.reasons, why))

    def outcome(self, at: int, old: Files) -> VersionOutcome:
        if self.reason:
            return VersionOutcome(at, {}, (), "", self.confidence, self.reasons, self.reason)
        diff = difference(old, self.files)
        locations = self.positions[0] if self.positions is not None else ()
        return VersionOutcome(
            at, self.files, self.placed, diff, self.confidence, self.reasons, locations=locations
        )


def difference(old: Files, files: Files) -> str:
    """Return the unified diff between the version `old` and its changed `files`, both path -> text."""
    parts: list[str] = []
    for path in sorted(files):
        old_lines, new_lines = split(old[path]), split(files[path])
        for line in unified_diff(old_lines, new_lines, f"a/{path}", f"b/{path}"):
            ended = line.endswith(("\n", "\r"))
            parts.append(line if ended else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _carry_all(
    source: _Source,
    old: Files,
    by_hand: Mapping[int, HandPlace] | None = None,
    min_confidence: float = MIN_CONFIDENCE,
    disproved: Disproved | None = None,
) -> _Attempt:
    """Carry all statements of `source` into the version `old`: those that bind a variable before those that read it.

    `by_hand` maps indexes of statements to places that the user gave, with line numbers of the unchanged version.
    """
    extracted = _extract_all(source, old)
    if isinstance(extracted, str):
        return _Attempt({}, (), None, 0.0, (), extracted)
    texts, extractions = extracted
    placed: dict[int, Placed] = {}
    positions: dict[int, Statement] = {}
    insertions: dict[str, _Insertions] = defaultdict(list)
    for each in sorted(extractions, key=lambda extraction: extraction.line):
        if each.into is not None:  # a new line assigns the variables
            insertions[each.path].append((each.line, 1))
    confidence, reasons = 1.0, []
    order = _order(source)
    for position, number in enumerate(order):
        statement = source.statements[number]
        later = [source.statements[k] for k in order[position + 1 :]]
        new = _blanked(source.files[statement.path], statement.path, later)
        place = by_hand.get(number) if by_hand else None
        if place is not None:
            path = place.path
            carried = _put_by_hand(new, statement, texts.get(path), place, insertions[path])
        else:
            disproved_places = (disproved or {}).get(number, {})
            path, carried = _carry_one(
                source.files, new, statement, texts, min_confidence, disproved_places, insertions
            )
        if carried.line is None and carried.present is None:
            return _Attempt({}, (), None, carried.confidence, carried.reasons, carried.reason)
        confidence = min(confidence, carried.confidence)
        reasons += [reason for reason in carried.reasons if reason not in reasons]
        if carried.line is None or carried.present is not None:
            assert carried.present is not None
            placed[number] = Placed(path, carried.present[0], "")
            positions[number] = Statement(path, carried.present)
            reasons.append("it is there already")
            continue
        count = len(split(carried.text.strip("\r\n")))
        for k, inserted in positions.items():
            if inserted.path == path and inserted.lines[0] >= carried.line:
                positions[k] = Statement(
                    path, (inserted.lines[0] + count, inserted.lines[1] + count)
                )
        texts[path] = insert_lines(texts[path], carried.line, carried.text)
        insertions[path].append((carried.line, count))
        extractions = tuple(each.shifted(path, carried.line, count) for each in extractions)
        placed[number] = Placed(path, carried.line, carried.text)
        positions[number] = Statement(path, (carried.line, carried.line + count - 1))
    files = {path: text for path, text in texts.items() if old[path] != text}
    numbers = range(len(source.statements))
    return _Attempt(
        files,
        tuple(placed[k] for k in numbers),
        (tuple(positions[k] for k in numbers), extractions),
        confidence,
        tuple(reasons),
    )


def _extract_all(
    source: _Source, old: Files
) -> tuple[dict[str, str], tuple[VariableExtraction, ...]] | str:
    """Return (texts of the version with the variables extracted, the extractions), or why that is impossible."""
    texts = dict(old)
    old_extractions: list[VariableExtraction] = []
    for extraction in source.extractions:
        path = extraction.path
        if path not in texts:
            return f"{path} is not in that version"
        result = extract_variables(source.files[path], extraction, texts[path])
        if isinstance(result, str):
            return result
        texts[path], old_extraction = result
        if old_extraction.into is not None:  # a new line assigns the variables
            old_extractions = [
                each.shifted(path, old_extraction.line, 1) for each in old_extractions
            ]
        old_extractions.append(old_extraction)
    return texts, tuple(old_extractions)


def _order(source: _Source) -> list[int]:
    """Return the indexes of the statements in the order in which they are carried.

    A statement that binds a variable comes before those that read it; otherwise, the given order is kept.
    """
    statement_uses = []
    for statement in source.statements:
        parsed = try_parse(source.files[statement.path])
        statements = statements_on(parsed, statement.lines) if not isinstance(parsed, str) else ""
        statement_uses.append(uses(statements) if isinstance(statements, list) else uses([]))
    remaining, order = list(range(len(statement_uses))), []
    while remaining:
        independent = [
            k
            for k in remaining
            if not any(
                statement_uses[k].reads & statement_uses[j].writes for j in remaining if j != k
            )
        ]
        number = (independent or remaining)[0]
        order.append(number)
        remaining.remove(number)
    return order


def _blanked(text: str, path: str, later: Sequence[Statement]) -> str:
    """Return the text of the file `path` with blank lines, or `pass`, in place of the statements `later`.

    These statements are not in the old version yet.
    """
    lines = split(text)
    for filler in ("", "pass"):
        lines_without = list(lines)
        for statement in later:
            if statement.path == path:
                start, end = statement.lines
                indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
                line_end = newline(lines, start - 1)
                lines_without[start - 1 : end] = [
                    f"{indent.rstrip(line_end) if filler else ''}{filler}{line_end}"
                ] + [line_end] * (end - start)
        text = "".join(lines_without)
        if not isinstance(try_parse(text), str):
            break
    return text


def _carry_one(
    files: Files,
    new: str,
    statement: Statement,
    old: Mapping[str, str],
    min_confidence: float,
    disproved: Mapping[tuple[str, int], str],
    insertions: Mapping[str, _Insertions],
) -> tuple[str, Carried]:
    """Carry a statement into the old file of the same name, or into the one that has the code around the statement.

    Return (path of the old file, insertion or refusal).
    """
    path = statement.path
    carried = refuse(f"{path} is not in that version")
    if path in old:
        disproved_lines = {line: why for (file, line), why in disproved.items() if file == path}
        carried = carry(
            new,
            statement.lines,
            old[path],
            min_confidence,
            disproved_lines,
            insertions.get(path, ()),
        )
        if carried.line is not None or carried.present is not None:
            return path, carried
    moves: list[tuple[str, Carried]] = []
    for old_path in candidate_files(files, new, statement.path, statement.lines, old):
        moved_insertion = carry(new, statement.lines, old[old_path])
        unusable = moved_insertion.line is None or (old_path, moved_insertion.line) in disproved
        if not unusable and moved_insertion.confidence >= max(min_confidence, 0.75):
            moves.append((old_path, moved_insertion))
    if len(moves) > 1:
        names = " and ".join(name for name, _ in moves)
        return path, refuse(f"two places are equally good: {names}")
    if not moves:
        return path, carried
    old_path, moved_insertion = moves[0]
    reasons = (*moved_insertion.reasons, f"that code was in {old_path} then")
    return old_path, Carried(
        moved_insertion.line, moved_insertion.text, moved_insertion.confidence * 0.95, reasons
    )


def _put_by_hand(
    new: str, statement: Statement, text: str | None, place: HandPlace, insertions: _Insertions
) -> Carried:
    """Return the insertion of a statement at the place that the user gave, or a refusal.

    It goes below other statements that were inserted at the place already; `insertions` tells how lines moved.
    """
    if text is None:
        return refuse(f"{place.path} is not in that version")
    line = place.line
    for at, count in insertions:
        line += count * (at <= line)
    if place.after:
        while inserted_lines := next((n for at, n in insertions if at == line + 1), 0):
            line += inserted_lines
    return carry_to(
        new,
        statement.lines,
        text,
        line,
        after=place.after,
        renames=place.renames,
        inserted=insertions,
    )


__all__ = ["Carried", "HandPlace", "Placed", "Statement", "VersionOutcome", "carry", "through"]
