"""Histories of training scripts, read from a git directory: versions, texts, line maps."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
TRAINING = re.compile(r"\b(loss|reward|optimizer|backward|epoch)\b")
LOGGING = re.compile(r"\b(print|log|logger|logging|add_scalar|wandb|tqdm)\b")


@dataclass(frozen=True)
class Version:
    """One state of one file: newest first in a history."""

    commit: str
    path: str
    blob: str
    text: str


@dataclass(frozen=True)
class LineMap:
    """Where each line of the newer text stands in the older one (0: nowhere), by two diffs."""

    older: tuple[
        int, ...
    ]  # index = newer line, 1-based; 0 where the two diffs disagree or unmapped
    inserted: frozenset[int]  # newer lines that lie in a hunk which only inserts


def git(repo: Path, *words: str) -> bytes:
    command = ["git", "-C", str(repo), "-c", "core.quotepath=off", *words]
    return subprocess.run(command, check=True, capture_output=True).stdout


def busy_files(repo: Path, limit: int) -> list[str]:
    """Return the training-like files of HEAD that most commits touched."""
    names = git(repo, "log", "--first-parent", "--format=", "--name-only", "--", "*.py")
    counts = Counter(names.decode("utf-8", "replace").split("\n"))
    head = set(git(repo, "ls-tree", "-r", "--name-only", "HEAD").decode().split("\n"))
    found: list[str] = []
    for path, count in counts.most_common():
        if count < 5 or len(found) >= limit:
            break
        if path not in head or "/test" in path or path.startswith("test"):
            continue
        text = git(repo, "show", f"HEAD:{path}").decode("utf-8", "replace")
        if 1500 < len(text) < 250_000 and TRAINING.search(text) and LOGGING.search(text):
            hits = len(TRAINING.findall(text))
            if hits >= 8 and re.search(r"^\s+(for|while)\b", text, re.MULTILINE):
                found.append(path)
    return found


def versions(repo: Path, path: str, limit: int) -> list[Version]:
    """Return the versions of a file, newest first, followed through renames."""
    asked = ("--format=%x00%H", "--raw", "--no-abbrev", f"-n{limit}", "--", path)
    try:
        raw_listing = git(repo, "log", "--first-parent", "--follow", "-M", *asked)
    except subprocess.CalledProcessError:  # a snapshot may lack blobs that rename search wants
        raw_listing = git(repo, "log", "--first-parent", *asked)
    listing = raw_listing.decode("utf-8", "replace")
    found: list[Version] = []
    for entry in listing.split("\0")[1:]:
        commit, _, rest = entry.partition("\n")
        for line in rest.split("\n"):
            if not line.startswith(":"):
                continue
            facts, *paths = line[1:].split("\t")
            blob, status = facts.split()[3:5]
            if status.startswith("D") or set(blob) == {"0"}:
                continue
            try:
                raw = git(repo, "cat-file", "blob", blob)
            except subprocess.CalledProcessError:
                return found  # what lies beyond a missing blob cannot be followed
            found.append(Version(commit, paths[-1], blob, raw.decode("utf-8", "replace")))
    return found


def _hunks(repo: Path, newer: str, older: str, algorithm: str) -> list[tuple[int, int, int, int]]:
    out = git(repo, "diff", "-w", "-U0", f"--diff-algorithm={algorithm}", newer, older)
    hunks = []
    for line in out.decode("utf-8", "replace").split("\n"):
        if found := HUNK.match(line):
            a, n, b, m = found.groups()
            hunks.append(
                (int(a), int(n or 1) if n != "0" else 0, int(b), int(m or 1) if m != "0" else 0)
            )
    return hunks


def _mapped(count: int, hunks: list[tuple[int, int, int, int]]) -> tuple[list[int], set[int]]:
    older = [0] * (count + 1)
    inserted: set[int] = set()
    line, shift = 1, 0
    for a, n, _, m in hunks:
        start = a if n else a + 1  # a hunk without newer lines stands after line a
        for at in range(line, start):
            older[at] = at + shift
        if not m:
            inserted.update(range(start, start + n))
        line, shift = start + n, shift + m - n
    for at in range(line, count + 1):
        older[at] = at + shift
    return older, inserted


def line_map(repo: Path, newer: Version, older: Version) -> LineMap:
    """Return where lines of the newer version stand in the older, where two diffs agree."""
    count = newer.text.count("\n") + 1
    if newer.blob == older.blob:
        return LineMap(tuple(range(count + 1)), frozenset())
    one, added = _mapped(count, _hunks(repo, newer.blob, older.blob, "histogram"))
    two, also = _mapped(count, _hunks(repo, newer.blob, older.blob, "minimal"))
    agreed = tuple(x if x == y else 0 for x, y in zip(one, two, strict=True))
    return LineMap(agreed, frozenset(added & also))
