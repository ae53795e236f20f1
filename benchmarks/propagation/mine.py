"""Cases mined from histories: a statement, two versions, and the place that is right.

A statement of the newer version is followed line by line through every version in between. If it
arrives in the older one, it is taken out there, and the place it leaves is the truth. If it was born
in between together with something it needs (a variable, a function, a loop), there is no right
place, and the only right answer is a refusal.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import json
import random
import re
import sys
import tokenize
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from history import LineMap, Version, busy_files, line_map, versions

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
DISTANCES = (1, 4, 12, 30, 70)


@dataclass(frozen=True)
class Case:
    """One question with its answer: `line` is None where a refusal is right."""

    repo: str
    path: str
    commits: tuple[str, str]
    distance: int
    kind: str  # plain, one-changed, both-changed, nesting, renamed; no-variable, -function, -loop
    shape: str  # simple or compound
    new: str
    lines: tuple[int, int]
    old: str
    line: int | None
    text: str | None

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


class Miner:
    def __init__(self, repo: Path, seed: int = 0) -> None:
        self.repo = repo
        self.name = repo.parent.name.replace("+", "/")
        self.random = random.Random(f"{self.name}{seed}")

    def cases(self, files: int, limit: int, positives: int, negatives: int) -> list[Case]:
        good: list[Case] = []
        bad: list[Case] = []
        for path in busy_files(self.repo, files):
            history = versions(self.repo, path, limit)
            usable = [v for v in history if len(v.text) < 300_000]
            if len(usable) < 4:
                continue
            maps = [line_map(self.repo, a, b) for a, b in pairwise(usable)]
            trees = [parse(v.text) for v in usable]
            for case in self.pairs(usable, trees, maps):
                (bad if case.line is None else good).append(case)
        return self.spread(good, positives) + self.spread(bad, negatives)

    def spread(self, cases: list[Case], count: int) -> list[Case]:
        """Pick cases over kinds, distances and statements, the rarer first."""
        self.random.shuffle(cases)
        left = [(case, statement_of(case)) for case in cases]
        taken: list[Case] = []
        seen: Counter[tuple] = Counter()

        def crowd(entry: tuple[Case, str]) -> tuple:
            case, statement = entry
            often = {"plain": 8, "one-changed": 2}.get(case.kind, 1)
            kind = seen[case.kind, case.distance] * often
            return seen[case.path, statement], kind, seen[case.path, ""]

        while left and len(taken) < count:
            best = min(left, key=crowd)
            left.remove(best)
            case, statement = best
            seen.update([(case.path, statement), (case.kind, case.distance), (case.path, "")])
            taken.append(case)
        return taken

    def pairs(self, history, trees, maps):
        for _ in range(10):
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
        kept = {"positive": 0, "negative": 0}
        for node, body, index in found[:24]:
            shape = "simple" if is_log(node) else "compound"
            fixed = (self.name, new.path, (new.commit, old.commit), j - i)
            if kept["positive"] < 8:
                truth = self.arrive(history, trees, maps, (i, j), node)
                if truth is not None:
                    kind, line, without, text = truth
                    if kind != "renamed":
                        kind = self.difficulty(new, body, index, maps, text)
                    kept["positive"] += 1
                    yield Case(*fixed, kind, shape, new.text, (node.lineno, node.end_lineno), without, line, text)  # fmt: skip
                    continue
            if kept["negative"] < 3:
                kind = self.missing(new, old, trees[i], maps, node)
                if kind is not None:
                    kept["negative"] += 1
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
            twin = self.renamed(
                history[i + step], history[i + step + 1], trees[i + step + 1], mapping, span
            )
            if twin is None:
                return None
            kind, span = "renamed", twin
        old = history[j].text.split("\n")
        there = [
            s
            for s, _, _ in statements(trees[j], history[j].text)
            if (s.lineno, s.end_lineno) == (span[0], span[-1])
        ]
        if len(there) != 1 or type(there[0]) is not type(node):
            return None
        text = "\n".join(old[span[0] - 1 : span[-1]])
        without = "\n".join(old[: span[0] - 1] + old[span[-1] :])
        if parse(without) is None:
            return None
        if kind == "renamed" and not self.truly_renamed(history[i].text, node, without, text):
            return None
        return kind, span[0], without, text

    def renamed(self, newer: Version, older: Version, tree, mapping: LineMap, span: list[int]):
        """Return the lines of the one older statement that differs only in names, hunk by hunk."""
        if tree is None:
            return None
        before = next((mapping.older[x] for x in range(span[0] - 1, 0, -1) if mapping.older[x]), 0)
        after = next((mapping.older[x] for x in range(span[-1] + 1, len(mapping.older)) if mapping.older[x]), older.text.count("\n") + 2)  # fmt: skip
        mine = tokens(
            newer.text and "\n".join(newer.text.split("\n")[span[0] - 1 : span[-1]]).strip()
        )
        lines = older.text.split("\n")
        twins = []
        for node, _, _ in statements(tree, older.text):
            if before < node.lineno and node.end_lineno < after:
                theirs = tokens("\n".join(lines[node.lineno - 1 : node.end_lineno]).strip())
                if len(mine) == len(theirs) and all(
                    a == b or (a[0] == b[0] == tokenize.NAME)
                    for a, b in zip(mine, theirs, strict=True)
                ):
                    twins.append(list(range(node.lineno, node.end_lineno + 1)))
        return twins[0] if len(twins) == 1 else None

    def truly_renamed(self, new: str, node: ast.stmt, without: str, text: str) -> bool:
        mine = tokens("\n".join(new.split("\n")[node.lineno - 1 : node.end_lineno]).strip())
        theirs = tokens(text.strip())
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if len(mine) != len(theirs):
            return False
        pairs = {(a[1], b[1]) for a, b in zip(mine, theirs, strict=True) if a != b}
        return bool(pairs) and all(
            a in names and not word_in(a, without) and word_in(b, without) and not word_in(b, new)
            for a, b in pairs
        )

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


def main() -> None:
    """Mine repositories into a file of cases."""
    out = Path(sys.argv[1])
    repos = [Path(word) for word in sys.argv[2:]]
    with out.open("w") as file:
        for repo in repos:
            found = Miner(repo).cases(files=8, limit=80, positives=36, negatives=12)
            print(repo.parent.name, sum(c.line is not None for c in found), sum(c.line is None for c in found), flush=True)  # fmt: skip
            for case in found:
                file.write(json.dumps(asdict(case)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
