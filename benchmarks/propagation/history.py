"""Histories of programs, read from a git directory: versions, texts, line maps."""

from __future__ import annotations

import difflib
import itertools
import re
import subprocess
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

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
    """Return the files of HEAD with log statements that most commits touched."""
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
        if 1500 < len(text) < 200_000 and len(LOGGING.findall(text)) >= 4:
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
            found.append(Version(commit, paths[-1], blob, ""))
    texts = _blobs(repo, [each.blob for each in found])
    stop = next((at for at, each in enumerate(found) if each.blob not in texts), len(found))
    # what lies beyond a missing blob cannot be followed
    return [replace(each, text=texts[each.blob]) for each in found[:stop]]


def _blobs(repo: Path, blobs: list[str]) -> dict[str, str]:
    """Return the texts of blobs, those that are there."""
    command = ["git", "-C", str(repo), "cat-file", "--batch"]
    asked = "".join(f"{blob}\n" for blob in blobs).encode()
    data = subprocess.run(command, input=asked, check=True, capture_output=True).stdout
    texts: dict[str, str] = {}
    at = 0
    while at < len(data):
        line, at = data[at : data.index(b"\n", at)], data.index(b"\n", at) + 1
        if line.endswith(b" missing"):
            continue
        blob, _, size = line.decode().split()
        texts[blob] = data[at : at + int(size)].decode("utf-8", "replace")
        at += int(size) + 1
    return texts


def line_map(newer: Version, older: Version) -> LineMap:
    """Return where lines of the newer version stand in the older, where two diffs agree.

    One is difflib's, the other pairs lines that occur once on both sides first (patience). Blanks
    at the ends of lines do not count.
    """
    ones = [line.strip() for line in newer.text.split("\n")]
    twos = [line.strip() for line in older.text.split("\n")]
    if newer.blob == older.blob:
        return LineMap(tuple(range(len(ones) + 1)), frozenset())
    first, second = dict(_by_difflib(ones, twos)), dict(_by_patience(ones, twos))
    agreed = [0] * (len(ones) + 1)
    for at, there in first.items():
        if second.get(at) == there:
            agreed[at + 1] = there + 1
    inserted: set[int] = set()
    before = 0
    for at in range(1, len(ones) + 2):
        there = agreed[at] if at <= len(ones) else len(twos) + 1
        if there:
            start = next((k for k in range(at - 1, 0, -1) if agreed[k]), 0)
            if there == before + 1:
                inserted.update(range(start + 1, at))
            before = there
    return LineMap(tuple(agreed), frozenset(inserted))


def _ends(ones: list[str], twos: list[str]) -> tuple[int, int]:
    """Return how many lines are the same at the beginning and at the end."""
    head = 0
    while head < min(len(ones), len(twos)) and ones[head] == twos[head]:
        head += 1
    tail = 0
    while tail < min(len(ones), len(twos)) - head and ones[-1 - tail] == twos[-1 - tail]:
        tail += 1
    return head, tail


def _by_difflib(ones: list[str], twos: list[str]) -> list[tuple[int, int]]:
    head, tail = _ends(ones, twos)
    found = [(at, at) for at in range(head)]
    found += [(len(ones) - at, len(twos) - at) for at in range(tail, 0, -1)]
    inner = ones[head : len(ones) - tail], twos[head : len(twos) - tail]
    for block in difflib.SequenceMatcher(None, *inner, autojunk=False).get_matching_blocks():
        found += [(head + block.a + k, head + block.b + k) for k in range(block.size)]
    return found


def _by_patience(ones: list[str], twos: list[str]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    work = [(0, len(ones), 0, len(twos))]
    while work:
        i, k, j, m = work.pop()
        head, tail = _ends(ones[i:k], twos[j:m])
        found += [(i + at, j + at) for at in range(head)]
        found += [(k - at, m - at) for at in range(tail, 0, -1)]
        i, j, k, m = i + head, j + head, k - tail, m - tail
        once, also = Counter(ones[i:k]), Counter(twos[j:m])
        where = {twos[at]: at for at in range(j, m) if also[twos[at]] == 1}
        pairs = [(at, where[ones[at]]) for at in range(i, k) if once[ones[at]] == 1 and ones[at] in where]  # fmt: skip
        rising: list[list[tuple[int, int]]] = []
        lasts: list[int] = []
        for pair in pairs:
            spot = bisect_left(lasts, pair[1])
            run = [*(rising[spot - 1] if spot else ()), pair]
            lasts[spot : spot + 1] = [pair[1]]
            rising[spot : spot + 1] = [run]
        if not rising:
            continue
        found += rising[-1]
        edges = [(i - 1, j - 1), *rising[-1], (k, m)]
        work += [(a + 1, c, b + 1, d) for (a, b), (c, d) in itertools.pairwise(edges)]
    return found


def sources_of(repo: Path, born: Version) -> list[tuple[str, str, str]]:
    """Return (path, text before, text after) of the other files changed as a file was born."""
    try:
        listing = git(repo, "diff-tree", "-r", "--raw", "--no-renames", "--no-abbrev", f"{born.commit}^", born.commit)  # fmt: skip
    except subprocess.CalledProcessError:
        return []
    found: list[tuple[str, str, str]] = []
    added = False
    for line in listing.decode("utf-8", "replace").split("\n"):
        if not line.startswith(":"):
            continue
        facts, path = line[1:].split("\t", 1)
        _, _, before, after, status = facts.split()
        added |= path == born.path and status == "A"
        if path.endswith(".py") and path != born.path and status in {"M", "D"}:
            found.append((path, before, after))
    if not added:
        return []
    found = found[:40]
    texts = _blobs(repo, [blob for _, *both in found for blob in both if set(blob) != {"0"}])
    return [
        (path, texts[before], texts.get(after, ""))
        for path, before, after in found
        if len(texts.get(before, "")) in range(1, 200_000)
    ]
