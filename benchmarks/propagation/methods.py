"""The package and three line-based ways, which are asked as (new, lines, old) -> (line, text) or None."""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "src"))
from mine import Case

from rearview.source.propagate.carry_statement import carry
from rearview.source.propagate.versions import Statement, through

Answer = tuple[int, str] | None


def rearview(case: Case) -> tuple[Answer, float, str]:
    """Return the answer, how sure it is, and the reason of a refusal."""
    if case.others is None:
        found = carry(case.new, case.lines, case.old)
        answer = None if found.line is None else (found.line, found.text)
        return answer, found.confidence, found.reason
    new = {**(case.beside or {}), case.path: case.new}
    old = {**case.others, case.old_path: case.old}
    (outcome,) = through(new, [Statement(case.path, case.lines)], [old])
    if outcome.refused:
        return None, outcome.confidence, outcome.reason
    (placed,) = outcome.placed
    line = placed.line if placed.path == case.old_path else -1
    return (line, placed.text), outcome.confidence, ""


def by_difflib(new: str, lines: tuple[int, int], old: str) -> Answer:
    """Put it after the line that matches the nearest matched line above; never refuse."""
    all_new, all_old = new.split("\n"), old.split("\n")
    start, end = lines
    rest = all_new[: start - 1] + all_new[end:]
    where = {}
    for block in difflib.SequenceMatcher(None, rest, all_old, autojunk=False).get_matching_blocks():
        where.update((block.a + k, block.b + k) for k in range(block.size))
    above = next((where[at] for at in range(start - 2, -1, -1) if at in where), -1)
    return above + 2, "\n".join(all_new[start - 1 : end]) + "\n"


def by_patch(new: str, lines: tuple[int, int], old: str) -> Answer:
    """Apply the edit as a patch with three lines of context, of which two may differ."""
    with tempfile.TemporaryDirectory() as folder:
        base, theirs, ours = _write(folder, new, lines, old)
        diff = subprocess.run(["diff", "-u", base, theirs], capture_output=True, check=False).stdout
        out = Path(folder) / "out"
        done = subprocess.run(
            ["patch", "-s", "-f", "-F2", "-r", "-", "-o", str(out), str(ours)],
            input=diff, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return None
        return _inserted(old, out.read_bytes().decode("utf-8", "replace"))


def by_merge_file(new: str, lines: tuple[int, int], old: str) -> Answer:
    """Merge the edit into the old text three ways; a conflict is a refusal."""
    with tempfile.TemporaryDirectory() as folder:
        base, theirs, ours = _write(folder, new, lines, old)
        done = subprocess.run(
            ["git", "merge-file", "-p", "-q", str(ours), str(base), str(theirs)],
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return None
        return _inserted(old, done.stdout.decode("utf-8", "replace"))


def _write(folder: str, new: str, lines: tuple[int, int], old: str) -> tuple[Path, Path, Path]:
    all_new = new.split("\n")
    base, theirs, ours = (Path(folder) / name for name in ("base", "theirs", "ours"))
    base.write_bytes(
        "\n".join(all_new[: lines[0] - 1] + all_new[lines[1] :]).encode("utf-8", "replace")
    )
    theirs.write_bytes(new.encode("utf-8", "replace"))
    ours.write_bytes(old.encode("utf-8", "replace"))
    return base, theirs, ours


def _inserted(old: str, result: str) -> Answer:
    before, after = old.split("\n"), result.split("\n")
    extra = len(after) - len(before)
    if extra <= 0:
        return None
    at = 0
    while at < len(before) and before[at] == after[at]:
        at += 1
    while at > 0 and after[at + extra :] != before[at:]:
        at -= 1  # a line equal to its neighbour was inserted
    return at + 1, "\n".join(after[at : at + extra]) + "\n"


METHODS = {
    "difflib": by_difflib,
    "patch -F2": by_patch,
    "git merge-file": by_merge_file,
}
