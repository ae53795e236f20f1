"""Put the statements of the newest source into every past version.

`carry` (in `carry_statement`) handles two texts; `through` handles whole projects and a chain of versions,
directly and step by step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff

from rearview.source.data_flow import uses
from rearview.source.probes.probe import VariableExtraction
from rearview.source.propagate.carry_statement import (
    SURE,
    Carried,
    candidates,
    carry,
    carry_to,
    chosen_statements,
    refuse,
    unsure,
)
from rearview.source.propagate.extract_variable import extract_variables
from rearview.source.propagate.splice import put
from rearview.source.text import newline, split, try_parse

CLEAR = 0.95  # with at least this confidence, the direct answer needs no second one
Files = Mapping[str, str]
Disproved = Mapping[int, Mapping[tuple[str, int], str]]
"""Number of a statement -> (file, line) of a version before which it was wrong -> the reason."""


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of a file of the newest version, 1-based and inclusive."""

    path: str
    lines: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """Text inserted before a 1-based line of a file; the text is empty if the statement was already there."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class HandPlace:
    """A place given by hand: before a 1-based line of a file, or after the statement on it."""

    path: str
    line: int
    after: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    """Names that variables of the statement have there, as the user gave them."""


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """The result for one version: its changed files and their diff, or the reason for refusing."""

    version: int
    files: Files
    placed: tuple[Placed, ...]
    diff: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    locations: tuple[Statement, ...] = ()
    """Where the statements are in the changed files."""

    @property
    def refused(self) -> bool:
        """Return True if this version stays unchanged because no place is certain."""
        return bool(self.reason)


@dataclass(frozen=True, slots=True)
class _Source:
    """A version that contains the statements, and where."""

    files: Files
    statements: tuple[Statement, ...]
    confidence: float
    extractions: tuple[VariableExtraction, ...] = ()


_Puts = list[tuple[int, int]]
"""Insertions into a text, in order: (line before which, how many lines)."""
_Where = tuple[tuple[Statement, ...], tuple[VariableExtraction, ...]]


def through(
    new: Files,
    statements: Sequence[Statement],
    chain: Sequence[Files],
    corrections: Mapping[int, Mapping[int, HandPlace]] | None = None,
    extractions: Sequence[VariableExtraction] = (),
    sure: float = SURE,
    disproved: Mapping[int, Disproved] | None = None,
) -> tuple[VersionOutcome, ...]:
    """Return for each version of a chain, newest first, the statements' place or a refusal.

    A version gets all statements or none. `corrections` gives, for a version's index, the places that the
    user chose for statements (by number). Versions nearer to a corrected version than to the newest source
    get the statements from there, unless only the newest source gives a place. `extractions` are recorded
    statements of the newest source that name values which the statements read; they do so in every
    version. Places with less confidence than `sure` are refused. `disproved` has, for a version's index,
    the places where a replay showed that a statement is wrong.
    """
    newest = _Source(new, tuple(statements), 1.0, tuple(extractions))
    sources = {-1: newest}
    done: dict[int, VersionOutcome] = {}
    reached: dict[int, _Source] = {}

    def keep(at: int, outcome: VersionOutcome, where: _Where | None) -> None:
        done[at] = outcome
        if where is not None:
            texts = {**chain[at], **outcome.files}
            reached[at] = _Source(texts, where[0], outcome.confidence, where[1])

    for at, places in (corrections or {}).items():
        corrected = _carry_all(newest, chain[at], places)
        keep(at, corrected.outcome(at, chain[at]), corrected.where)
        if at in reached:
            sources[at] = reached[at]
    origins = {at: min(sources, key=lambda g: (abs(g - at), g)) for at in range(len(chain))}
    for at in sorted(origins, key=lambda k: (abs(k - origins[k]), k)):
        if at in done:
            continue
        for origin in dict.fromkeys((origins[at], -1)):
            toward = 1 if at > origin else -1
            near = next((k for k in range(at - toward, origin, -toward) if k in reached), None)
            outcome, where = _version(
                at,
                sources[origin],
                reached[near] if near is not None else None,
                chain[at],
                sure,
                (disproved or {}).get(at, {}),
            )
            if at not in done or not outcome.refused:
                keep(at, outcome, where)
            if not outcome.refused:
                break
    return tuple(done[at] for at in range(len(chain)))


def _version(
    at: int,
    origin: _Source,
    near: _Source | None,
    old: Files,
    sure: float,
    disproved: Disproved,
) -> tuple[VersionOutcome, _Where | None]:
    """Return the outcome for one version, computed directly and, if that helps, step by step."""
    straight = _carry_all(origin, old, sure=sure, disproved=disproved)
    if near is None or (not straight.reason and straight.confidence >= CLEAR):
        return straight.outcome(at, old), straight.where
    step = _carry_all(near, old, sure=sure, disproved=disproved)
    stepped = min(step.confidence, near.confidence)
    if straight.reason and step.reason:
        return straight.outcome(at, old), None
    if straight.reason:
        better = step.adjusted(stepped, "carried step by step")
    elif step.reason:
        better = straight.adjusted(
            straight.confidence * 0.9, "the version next to it gives no place"
        )
    elif step.files == straight.files:
        both = 1 - (1 - straight.confidence) * (1 - stepped)
        better = straight.adjusted(both, "the same place directly and step by step")
    elif abs(stepped - straight.confidence) < 0.1:
        better = _Attempt(
            {}, (), None, 0.0, (), "carried directly and step by step, it comes to different places"
        )
    elif stepped > straight.confidence:
        better = step.adjusted(stepped, "carried step by step")
    else:
        better = straight
    if not better.reason and better.confidence < sure:
        better = _Attempt({}, (), None, better.confidence, (), unsure(better.confidence, sure))
    return better.outcome(at, old), better.where


@dataclass(frozen=True, slots=True)
class _Attempt:
    files: Files
    placed: tuple[Placed, ...]
    where: _Where | None
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""

    def adjusted(self, confidence: float, why: str) -> "_Attempt":
        return _Attempt(self.files, self.placed, self.where, confidence, (*self.reasons, why))

    def outcome(self, at: int, old: Files) -> VersionOutcome:
        if self.reason:
            return VersionOutcome(at, {}, (), "", self.confidence, self.reasons, self.reason)
        diff = difference(old, self.files)
        locations = self.where[0] if self.where is not None else ()
        return VersionOutcome(
            at, self.files, self.placed, diff, self.confidence, self.reasons, locations=locations
        )


def difference(old: Files, files: Files) -> str:
    """Return the unified diff between a version and its changed files."""
    parts: list[str] = []
    for path in sorted(files):
        before, after = split(old[path]), split(files[path])
        for line in unified_diff(before, after, f"a/{path}", f"b/{path}"):
            ended = line.endswith(("\n", "\r"))
            parts.append(line if ended else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _carry_all(
    source: _Source,
    old: Files,
    by_hand: Mapping[int, HandPlace] | None = None,
    sure: float = SURE,
    disproved: Disproved | None = None,
) -> _Attempt:
    """Carry every statement; statements that define what others read come first.

    `by_hand` has the places that the user gave, in lines of the unchanged version.
    """
    start = _extract_all(source, old)
    if isinstance(start, str):
        return _Attempt({}, (), None, 0.0, (), start)
    texts, names = start
    placed: dict[int, Placed] = {}
    where: dict[int, Statement] = {}
    puts: dict[str, _Puts] = defaultdict(list)
    for each in sorted(names, key=lambda extraction: extraction.line):
        if each.into is not None:  # it has a separate line
            puts[each.path].append((each.line, 1))
    confidence, reasons = 1.0, []
    order = _order(source)
    for position, number in enumerate(order):
        statement = source.statements[number]
        later = [source.statements[k] for k in order[position + 1 :]]
        new = _without(source.files[statement.path], statement.path, later)
        place = by_hand.get(number) if by_hand else None
        if place is not None:
            path = place.path
            carried = _put_by_hand(new, statement, texts.get(path), place, puts[path])
        else:
            wrong = (disproved or {}).get(number, {})
            path, carried = _carry_one(source.files, new, statement, texts, sure, wrong, puts)
        if carried.line is None and carried.present is None:
            return _Attempt({}, (), None, carried.confidence, carried.reasons, carried.reason)
        confidence = min(confidence, carried.confidence)
        reasons += [reason for reason in carried.reasons if reason not in reasons]
        if carried.line is None or carried.present is not None:
            assert carried.present is not None
            placed[number] = Placed(path, carried.present[0], "")
            where[number] = Statement(path, carried.present)
            reasons.append("it is there already")
            continue
        count = len(split(carried.text.strip("\r\n")))
        for k, other in where.items():
            if other.path == path and other.lines[0] >= carried.line:
                where[k] = Statement(path, (other.lines[0] + count, other.lines[1] + count))
        texts[path] = put(texts[path], carried.line, carried.text)
        puts[path].append((carried.line, count))
        names = tuple(each.shifted(path, carried.line, count) for each in names)
        placed[number] = Placed(path, carried.line, carried.text)
        where[number] = Statement(path, (carried.line, carried.line + count - 1))
    files = {path: text for path, text in texts.items() if old[path] != text}
    numbers = range(len(source.statements))
    return _Attempt(
        files,
        tuple(placed[k] for k in numbers),
        (tuple(where[k] for k in numbers), names),
        confidence,
        tuple(reasons),
    )


def _extract_all(
    source: _Source, old: Files
) -> tuple[dict[str, str], tuple[VariableExtraction, ...]] | str:
    """Return a version in which recorded statements name their values, and where; or why not."""
    texts = dict(old)
    done: list[VariableExtraction] = []
    for extraction in source.extractions:
        path = extraction.path
        if path not in texts:
            return f"{path} is not in that version"
        named = extract_variables(source.files[path], extraction, texts[path])
        if isinstance(named, str):
            return named
        texts[path], there = named
        if there.into is not None:  # it was given a separate line
            done = [each.shifted(path, there.line, 1) for each in done]
        done.append(there)
    return texts, tuple(done)


def _order(source: _Source) -> list[int]:
    """Return the statements' numbers, definitions before readers, else in the given order."""
    used = []
    for statement in source.statements:
        parsed = try_parse(source.files[statement.path])
        chosen = chosen_statements(parsed, statement.lines) if not isinstance(parsed, str) else ""
        used.append(uses(chosen) if isinstance(chosen, list) else uses([]))
    left, order = list(range(len(used))), []
    while left:
        free = [k for k in left if not any(used[k].reads & used[j].writes for j in left if j != k)]
        number = (free or left)[0]
        order.append(number)
        left.remove(number)
    return order


def _without(text: str, path: str, later: Sequence[Statement]) -> str:
    """Blank the statements that are not inserted yet, so that lines keep their numbers."""
    lines = split(text)
    for filler in ("", "pass"):
        blanked = list(lines)
        for statement in later:
            if statement.path == path:
                start, end = statement.lines
                lead = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
                ends = newline(lines, start - 1)
                blanked[start - 1 : end] = [
                    f"{lead.rstrip(ends) if filler else ''}{filler}{ends}"
                ] + [ends] * (end - start)
        text = "".join(blanked)
        if not isinstance(try_parse(text), str):
            break
    return text


def _carry_one(
    files: Files,
    new: str,
    statement: Statement,
    old: Mapping[str, str],
    sure: float,
    disproved: Mapping[tuple[str, int], str],
    puts: Mapping[str, _Puts],
) -> tuple[str, Carried]:
    """Insert a statement into the same file, or into the file its surroundings came from."""
    path = statement.path
    carried = refuse(f"{path} is not in that version")
    if path in old:
        wrong = {line: why for (file, line), why in disproved.items() if file == path}
        carried = carry(new, statement.lines, old[path], sure, wrong, puts.get(path, ()))
        if carried.line is not None or carried.present is not None:
            return path, carried
    moves: list[tuple[str, Carried]] = []
    for other in candidates(files, new, statement.path, statement.lines, old):
        moved = carry(new, statement.lines, old[other])
        unusable = moved.line is None or (other, moved.line) in disproved
        if not unusable and moved.confidence >= max(sure, 0.75):
            moves.append((other, moved))
    if len(moves) > 1:
        names = " and ".join(name for name, _ in moves)
        return path, refuse(f"two places are equally good: {names}")
    if not moves:
        return path, carried
    other, moved = moves[0]
    reasons = (*moved.reasons, f"that code was in {other} then")
    return other, Carried(moved.line, moved.text, moved.confidence * 0.95, reasons)


def _put_by_hand(
    new: str, statement: Statement, text: str | None, place: HandPlace, put_before: _Puts
) -> Carried:
    """Return a statement at the place that the user gave, after statements inserted there before."""
    if text is None:
        return refuse(f"{place.path} is not in that version")
    line = place.line
    for at, count in put_before:
        line += count * (at <= line)
    if place.after:
        while beyond := next((n for at, n in put_before if at == line + 1), 0):
            line += beyond
    return carry_to(
        new,
        statement.lines,
        text,
        line,
        after=place.after,
        renames=place.renames,
        inserted=put_before,
    )


__all__ = ["Carried", "HandPlace", "Placed", "Statement", "VersionOutcome", "carry", "through"]
