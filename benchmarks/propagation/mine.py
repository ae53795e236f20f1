"""Cases mined from histories: a statement, two versions, and the place that is right.

A statement of the newer version is followed through every version in between: line by line, by the
one statement of the same hunk that differs only in names, or by the one same statement that the
change took away elsewhere. If it arrives in the older one, it is taken out there, and the place it
leaves is the truth: the two ends are never compared. If it was born
in between together with something it needs (a variable, a function, a loop), there is no right
place, and the only right answer is a refusal.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import random
import re
import sys
import tokenize
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from history import LineMap, Version, busy_files, line_map, sources_of, versions

LOGGERS = re.compile(
    r"^(print\w*|log\w*|info|debug|warning|add_(scalar|image|histogram|text|figure|batch|embedding)s?|write"
    r"|update|append|record\w*|logkv\w*|dump\w*|set_(description|postfix)\w*|store|pprint|report\w*)$"
)
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}
SEVERITIES = {"debug", "info", "warn", "warning", "error", "critical", "exception"}
LEVELS = {
    "plain": "easy",
    "one-changed": "medium",
    "nesting": "medium",
    "both-changed": "hard",
    "function": "hard",
    "renamed": "hard",
    "moved": "hard",
    "file": "hard",
    "labelled": "hard",
}
DISTANCES = (1, 4, 12, 30, 70)


@dataclass(frozen=True)
class Case:
    """One question with its answer: `line` is None where a refusal is right."""

    repo: str
    path: str
    commits: tuple[str, str]
    distance: int
    kind: str  # of LEVELS; no-variable, -function, -loop where a refusal is right
    shape: str  # simple or compound
    new: str
    lines: tuple[int, int]
    old: str
    line: int | None
    text: str | None
    old_path: str = ""  # the file it came from, if that is another one
    others: dict[str, str] | None = None  # other files of the older version
    beside: dict[str, str] | None = None  # other files of the newer version

    @property
    def level(self) -> str:
        """How much changed around it; what must be refused has no level."""
        return LEVELS.get(self.kind, "none")

    @property
    def name(self) -> str:
        key = f"{self.repo}{self.path}{self.commits}{self.lines}{self.kind}"
        return hashlib.sha256(key.encode()).hexdigest()[:10]


def parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def blocks(tree: ast.AST):
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield node, body


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def is_log(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return bool(LOGGERS.match(name))
    if isinstance(node, ast.AugAssign):
        return bool(re.search(r"loss|acc|total|sum|count|correct|reward", ast.unparse(node.target)))
    return False


@lru_cache(maxsize=256)
def statements(tree: ast.AST, text: str) -> list:
    """Return (node, block, index) of log-like statements that own their lines."""
    return list(_statements(tree, text.split("\n")))


def _statements(tree: ast.AST, lines: list[str]):
    for _, body in blocks(tree):
        if len(body) < 2:
            continue  # taking it out would leave an empty block
        for index, node in enumerate(body):
            compound = isinstance(node, ast.If) and not node.orelse and all(map(is_log, node.body))
            if not compound and not is_log(node):
                continue
            owns = not lines[node.lineno - 1][: node.col_offset].strip()
            owns = owns and all(
                other is node or other.lineno > node.end_lineno or other.end_lineno < node.lineno
                for other in body
            )
            if owns:
                yield node, body, index


@lru_cache(maxsize=4096)
def tokens(text: str) -> list[tuple[int, str]]:
    try:
        found = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return [(0, word) for word in text.split()]
    return [(token.type, token.string) for token in found if token.type not in LAYOUT]


@lru_cache(maxsize=256)
def containers(tree: ast.AST) -> list:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@lru_cache(maxsize=256)
def joined(text: str) -> str:
    return " ".join(word for _, word in tokens(text))


def word_in(name: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def track(line: int, maps: list[LineMap]) -> tuple[int, int | None]:
    """Return the line after all maps, or 0 and the index of the map in which it was born."""
    for at, step in enumerate(maps):
        moved = step.older[line] if line < len(step.older) else 0
        if not moved:
            return line, at
        line = moved
    return line, None


def statement_of(case: Case) -> str:
    return "\n".join(case.new.split("\n")[case.lines[0] - 1 : case.lines[1]]).strip()


def _times(text: str, wanted: list[str]) -> int:
    """Return how often stripped lines stand one after another in a text."""
    lines = [line.strip() for line in text.split("\n")]
    return sum(
        lines[at : at + len(wanted)] == wanted
        for at in range(len(lines) - len(wanted) + 1)
        if lines[at] == wanted[0]
    )


class Miner:
    """Cases of one repository, chosen so that half of those with a place are hard."""

    def __init__(self, repo: Path, seed: int = 0) -> None:
        self.repo = repo
        self.name = repo.parent.name.replace("+", "/")
        self.random = random.Random(f"{self.name}{seed}")

    def cases(self, files: int, limit: int, positives: int, negatives: int) -> list[Case]:
        good: list[Case] = []
        bad: list[Case] = []
        for path in busy_files(self.repo, files):
            history = versions(self.repo, path, limit)
            usable = [v for v in history if len(v.text) < 200_000]
            if len(usable) < 4:
                continue
            maps = [line_map(a, b) for a, b in pairwise(usable)]
            trees = [parse(v.text) for v in usable]
            for case in self.pairs(usable, trees, maps):
                (bad if case.line is None else good).append(case)
            good += self.born_elsewhere(usable, trees, maps)
        chosen: list[Case] = []
        for level, share in (("hard", 0.5), ("medium", 0.25), ("easy", 0.25)):
            chosen += self.spread([c for c in good if c.level == level], round(positives * share))
        return chosen + self.spread(bad, negatives)

    def spread(self, cases: list[Case], count: int) -> list[Case]:
        """Pick cases over kinds, distances and statements, the rarer first."""
        self.random.shuffle(cases)
        cases = cases[:400]
        left = [(case, statement_of(case)) for case in cases]
        taken: list[Case] = []
        seen: Counter[tuple] = Counter()

        def crowd(entry: tuple[Case, str]) -> tuple:
            case, statement = entry
            kind = seen[case.kind, case.distance]
            return seen[case.path, statement], kind, seen[case.path, ""]

        while left and len(taken) < count:
            best = min(left, key=crowd)
            left.remove(best)
            case, statement = best
            seen.update([(case.path, statement), (case.kind, case.distance), (case.path, "")])
            taken.append(case)
        return taken

    def pairs(self, history, trees, maps):
        for _ in range(8):
            i = self.random.randrange(len(history) - 1)
            if trees[i] is None:
                continue
            for distance in DISTANCES:
                j = i + distance
                if j < len(history) and trees[j] is not None and history[i].text != history[j].text:
                    yield from self.pair(history, trees, maps[i:j], i, j)

    def pair(self, history, trees, maps, i, j):
        new, old = history[i], history[j]
        found = list(statements(trees[i], new.text))
        self.random.shuffle(found)
        kept: Counter[str] = Counter()
        for node, body, index in found[:40]:
            shape = "simple" if is_log(node) else "compound"
            fixed = (self.name, new.path, (new.commit, old.commit), j - i)
            truth = self.arrive(history, trees, maps, (i, j), node)
            if truth is not None:
                kind, line, without, text = truth
                if kind == "plain":
                    kind = self.difficulty(new, body, index, maps, text)
                if kind in {"plain", "one-changed"}:
                    renamed = self.in_another_function(trees[i], node, trees[j], line)
                    kind = "function" if renamed else kind
                kept[kind] += 1
                if kept[kind] <= 4:
                    yield Case(*fixed, kind, shape, new.text, (node.lineno, node.end_lineno), without, line, text)  # fmt: skip
            elif kept["missing"] < 3:
                kind = self.missing(new, old, trees[i], maps, node)
                if kind is not None:
                    kept["missing"] += 1
                    yield Case(*fixed, kind, shape, new.text, (node.lineno, node.end_lineno), old.text, None, None)  # fmt: skip

    def arrive(self, history, trees, maps, ends, node):
        """Return (kind, line, old text without the statement, its old text) if it arrives."""
        i, j = ends
        span = list(range(node.lineno, node.end_lineno + 1))
        kind = "plain"
        for step, mapping in enumerate(maps):
            moved = [mapping.older[x] if x < len(mapping.older) else 0 for x in span]
            if 0 not in moved and moved == list(range(moved[0], moved[0] + len(moved))):
                span = moved
                continue
            here, there = history[i + step], history[i + step + 1]
            twin = self.renamed(here, there, trees[i + step + 1], mapping, span)
            if twin is not None:
                kind, span = "renamed", twin
                continue
            twin = self.moved(here, there, trees[i + step + 1], mapping, span)
            if twin is None:
                return None
            kind, span = ("renamed" if kind == "renamed" else "moved"), twin
        found = self.taken_out(history[j].text, trees[j], span, type(node))
        if found is None:
            return None
        without, text = found
        if kind == "renamed":
            mine = tokens("\n".join(history[i].text.split("\n")[node.lineno - 1 : node.end_lineno]).strip())  # fmt: skip
            if mine == tokens(text.strip()):
                kind = "plain"  # renamed and renamed back
            elif not self.consistent(mine, tokens(text.strip()), without):
                return None
        return kind, span[0], without, text

    @staticmethod
    def taken_out(text: str, tree, span: list[int], shape: type):
        """Return the text without the statement on the lines, and the statement."""
        lines = text.split("\n")
        there = [
            s
            for s, _, _ in statements(tree, text)
            if (s.lineno, s.end_lineno) == (span[0], span[-1])
        ]
        if len(there) != 1 or type(there[0]) is not shape:
            return None
        without = "\n".join(lines[: span[0] - 1] + lines[span[-1] :])
        return without, "\n".join(lines[span[0] - 1 : span[-1]])

    def renamed(self, newer: Version, older: Version, tree, mapping: LineMap, span: list[int]):
        """Return the lines of the one older statement that differs only in names, hunk by hunk."""
        if tree is None:
            return None
        before = next((mapping.older[x] for x in range(span[0] - 1, 0, -1) if mapping.older[x]), 0)
        after = next((mapping.older[x] for x in range(span[-1] + 1, len(mapping.older)) if mapping.older[x]), older.text.count("\n") + 2)  # fmt: skip
        mine = tokens("\n".join(newer.text.split("\n")[span[0] - 1 : span[-1]]).strip())
        lines = older.text.split("\n")
        twins = []
        for node, _, _ in statements(tree, older.text):
            if before < node.lineno and node.end_lineno < after:
                theirs = tokens("\n".join(lines[node.lineno - 1 : node.end_lineno]).strip())
                if self.same_but_names(mine, theirs):
                    twins.append(list(range(node.lineno, node.end_lineno + 1)))
        return twins[0] if len(twins) == 1 else None

    @staticmethod
    def same_but_names(mine, theirs) -> bool:
        """Say whether two statements differ in names only, and in not too many of them."""
        if len(mine) != len(theirs):
            return False
        pairs = list(zip(mine, theirs, strict=True))
        if not all(a == b or a[0] == b[0] == tokenize.NAME for a, b in pairs):
            return False
        names = [(a, b) for a, b in pairs if a[0] == tokenize.NAME]
        return sum(a == b for a, b in names) * 3 >= len(names) and len(mine) >= 4

    @staticmethod
    def consistent(mine, theirs, without: str) -> bool:
        """Say whether one renaming turns one statement into the other.

        A name that the older version has as well was exchanged for another, not renamed; so was
        the severity of a message.
        """
        if len(mine) != len(theirs):
            return False
        found: dict[str, str] = {}
        modules = set(re.findall(r"(?m)^\s*(?:import|from .* import) .*?(\w+)\s*$", without))
        for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b and (a[0] != b[0] or a[0] != tokenize.NAME):
                return False
            if a != b and at > 1 and mine[at - 1][1] == "." and mine[at - 2][1] in modules:
                return False  # another function of a library
            if a[0] == tokenize.NAME and found.setdefault(a[1], b[1]) != b[1]:
                return False
            if a != b and (word_in(a[1], without) or {a[1], b[1]} <= SEVERITIES):
                return False
        return True

    def moved(self, newer: Version, older: Version, tree, mapping: LineMap, span: list[int]):
        """Return the lines of the one same statement among those that the change took away."""
        if tree is None:
            return None
        text = [line.strip() for line in newer.text.split("\n")[span[0] - 1 : span[-1]]]
        if sum(map(len, text)) < 16 or _times(newer.text, text) != 1:
            return None  # one that moved alone is another statement: only its surroundings tell
        if _times(older.text, text) != 1:
            return None
        kept = set(mapping.older)
        lines = [line.strip() for line in older.text.split("\n")]
        for at in range(1, len(lines) - len(text) + 2):
            if lines[at - 1 : at - 1 + len(text)] == text:
                found = list(range(at, at + len(text)))
                along = self.neighbour(newer.text, span[0], -1) == self.neighbour(
                    older.text, at, -1
                )
                along |= self.neighbour(newer.text, span[-1], 1) == self.neighbour(older.text, found[-1], 1)  # fmt: skip
                return found if along and not kept & set(found) else None
        return None

    @staticmethod
    def neighbour(text: str, line: int, step: int) -> str:
        """Return the next line with code above or below a line."""
        lines = text.split("\n")
        at = line - 1 + step
        while 0 <= at < len(lines) and (not lines[at].strip() or lines[at].strip()[0] == "#"):
            at += step
        return lines[at].strip() if 0 <= at < len(lines) else ""

    @staticmethod
    def in_another_function(new_tree, node: ast.stmt, old_tree, line: int) -> bool:
        """Say whether the function around the statement had another name."""

        def around(tree, at: int) -> str:
            inside = [
                n for n in containers(tree)
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.lineno < at <= n.end_lineno
            ]  # fmt: skip
            return max(inside, key=lambda n: n.lineno).name if inside else ""

        return around(new_tree, node.lineno) != around(old_tree, line)

    def born_elsewhere(self, history, trees, maps):
        """Yield statements that came from another file in the change that made this file."""
        last = len(history) - 1
        if trees[last] is None or not (sources := sources_of(self.repo, history[last])):
            return
        old = {path: before for path, before, _ in sources if parse(before) is not None}
        now = {path: after for path, _, after in sources if after}
        found = 0
        for i in sorted({max(0, last - d) for d in (0, 2, 6, 15)}, reverse=True):
            if trees[i] is None:
                continue
            for node, _, _ in statements(trees[i], history[i].text):
                truth = self.arrive(history, trees, maps[i:last], (i, last), node)
                if truth is None or truth[0] not in {"plain", "moved"} or found >= 8:
                    continue
                text = [x.strip() for x in truth[3].split("\n")]
                hits = [p for p, before in old.items() if _times(before, text) == 1]
                if len(hits) != 1 or sum(map(len, text)) < 16 or _times(now.get(hits[0], ""), text):
                    continue
                if _times(history[i].text, text) != 1:
                    continue
                lines = [x.strip() for x in old[hits[0]].split("\n")]
                at = next(k for k in range(len(lines)) if lines[k : k + len(text)] == text) + 1
                taken = self.taken_out(old[hits[0]], parse(old[hits[0]]), [at, at + len(text) - 1], type(node))  # fmt: skip
                if taken is None:
                    continue
                without, was = taken
                found += 1
                yield Case(
                    self.name, history[i].path, (history[i].commit, f"{history[last].commit}^"), last - i,
                    "file", "simple" if is_log(node) else "compound", history[i].text,
                    (node.lineno, node.end_lineno), without, at, was,
                    hits[0], {p: t for p, t in old.items() if p != hits[0]}, now,
                )  # fmt: skip

    def difficulty(self, new: Version, body, index: int, maps, text: str) -> str:
        """Say what changed around the statement: its nesting, both neighbours, one, or none."""
        node = body[index]
        lines = new.text.split("\n")
        if len(text) - len(text.lstrip()) != node.col_offset:
            return "nesting"
        here, _ = track(node.lineno, maps)
        changed = 0
        for edge, step in ((node.lineno - 1, -1), (node.end_lineno + 1, 1)):
            at = edge
            while 0 < at <= len(lines) and not lines[at - 1].strip():
                at += step
            if not 0 < at <= len(lines):
                continue
            there, born = track(at, maps)
            changed += born is not None or abs(there - here) > abs(at - node.lineno) + 2
        return ("plain", "one-changed", "both-changed")[changed]

    def missing(self, new: Version, old: Version, tree, maps, node) -> str | None:
        """Name what the statement needs and the older text cannot have, or None if unsure."""
        if track(node.lineno, maps)[1] is None:
            return None
        mine = [
            t
            for _, t in tokens(
                "\n".join(new.text.split("\n")[node.lineno - 1 : node.end_lineno]).strip()
            )
        ]
        if len(mine) < 5 or " ".join(mine[:6]) in joined(old.text):
            return None
        said = {w for t in mine if t[:1] in "'\"fFrR" for w in re.findall(r"[A-Za-z]{4,}", t)}
        if said and any(
            len(said & set(re.findall(r"[A-Za-z]{4,}", line))) * 2 >= len(said)
            for line in old.text.split("\n")
        ):
            return None  # the same may be said there in other words
        old_lines = {line.strip() for line in old.text.split("\n")}
        lines = new.text.split("\n")

        def fresh(container: ast.stmt) -> bool:
            _, born = track(container.lineno, maps)
            if born is None:
                return False
            inner = [lines[x].strip() for x in range(container.lineno - 1, container.end_lineno)]
            inner = [x for x in inner if len(x) > 8]
            known = sum(x in old_lines for x in inner)
            return self.inserted(container.lineno, maps) and known < 0.2 * len(inner)

        inside = [
            n for n in containers(tree) if n.lineno < node.lineno and n.end_lineno >= node.end_lineno
        ]  # fmt: skip
        functions = [n for n in inside if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        if functions and not word_in(functions[-1].name, old.text) and fresh(functions[-1]):
            return "no-function"
        scope = functions[-1] if functions else tree
        stored: dict[str, list[int]] = {}
        for n in ast.walk(scope):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                stored.setdefault(n.id, []).append(n.lineno)
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in stored:
                outside = [x for x in stored[n.id] if not node.lineno <= x <= node.end_lineno]
                if (
                    outside
                    and not hasattr(builtins, n.id)
                    and not word_in(n.id, old.text)
                    and all(self.inserted(x, maps) for x in outside)
                ):
                    return "no-variable"
        loops = [n for n in inside if isinstance(n, (ast.For, ast.While))]
        if loops and fresh(loops[-1]):
            return "no-loop"
        return None

    @staticmethod
    def inserted(line: int, maps) -> bool:
        """Say whether the line was born in a change that only inserts."""
        at, born = track(line, maps)
        return born is not None and at in maps[born].inserted
