"""A real store of every kind of file, one bit of which is changed: what is answered then, and what is said."""

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.cli.main import BUG, _run
from rearview.store.tables import read_record_files

SCRIPT = """\
import os, random, signal, time
import rearview

rate = rearview.arg("rate", 0.1)
weights = [random.random() for _ in range(200)]
for epoch in range(4):
    for step in range(3):
        weights = [w * (1 - rate) + time.time() * 0 for w in weights]
        rearview.log("loss", sum(weights))
    print("epoch", epoch)
    rearview.log("acc", epoch / 4)
    if epoch == 2 and os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
LINE = '    rearview.log("spread", max(weights) - min(weights))\n'
SPARED = ("cache/machines",)
"""How fast this machine is: no answer rests on it."""


def rearview(folder: Path, *words: str, **extra: str) -> None:
    """Run a command as a user does."""
    command = [sys.executable, "-m", "rearview", *words]
    env = {**os.environ, **extra, "REARVIEW_TRUST": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in {0, -signal.SIGKILL, 128 + signal.SIGKILL}, done.stderr


def build(folder: Path) -> Path:
    """Make a project with four runs: sealed, with replays, of two versions, killed and unsealed."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    rearview(folder, "run", "--every", "train.py")
    rearview(folder, "run", "--every", "--arg", "rate=0.2", "train.py")
    rearview(folder, "table")
    script.write_text(SCRIPT.replace('    print("epoch"', LINE + '    print("epoch"'))
    rearview(folder, "run", "--every", "train.py")
    rearview(folder, "backfill", "spread", "--yes", "--quiet")
    read_record_files.ENOUGH = 10  # so that small runs are pivoted once, too
    ask(folder, "table")
    rearview(folder, "run", "--every", "train.py", DIES="1")
    rearview(folder, "run", "--every", "--arg", "rate=0.3", "train.py")
    return folder


def ask(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and the output of a command, run in this process."""
    return ask_all(folder, *words)[:2]


def ask_all(folder: Path, *words: str) -> tuple[int, str, str]:
    """Return the exit code, the output and what was said on stderr; never an internal error."""
    out, err = io.StringIO(), io.StringIO()
    before, root = Path.cwd(), os.environ.get("REARVIEW_ROOT")
    os.chdir(folder)
    os.environ["REARVIEW_ROOT"] = str(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _run(list(words))
    finally:
        os.chdir(before)
        os.environ.pop("REARVIEW_ROOT")
        if root is not None:
            os.environ["REARVIEW_ROOT"] = root
    assert code != BUG, f"{words} ended with 70: {err.getvalue()}"
    return code, out.getvalue(), err.getvalue()


def run_ids(folder: Path) -> list[str]:
    """Return the runs of a project, oldest first."""
    return sorted(path.name for path in (folder / ".rearview" / "runs").iterdir())


def expected_of(whole: Path, at: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the answers of a project, which stays as it is: a reader seals what is complete."""
    shutil.copytree(whole, at, symlinks=True)
    try:
        return answers(at, run_ids(whole))
    finally:
        shutil.rmtree(at)


def answers(
    folder: Path, ids: list[str], shown: list[str] | None = None
) -> dict[str, list[tuple[Any, ...]]]:
    """Return what every reading command says, by the run it speaks of; '' for all of them.

    Only the runs that are `shown` are looked at one by one; without, all are.
    """
    found: dict[str, list[tuple[Any, ...]]] = {run: [] for run in (*ids, "")}
    code, text = ask(folder, "runs", "--json")
    found[""].append(("row", code))
    for about in json.loads(text) if code == 0 else ():
        found.setdefault(about["id"], []).append(("row", about))
    sql = "select run, origin, path, indices, name, number, text, seq from records order by all"
    for words in (("table", "--format", "json"), ("sql", sql, "--format", "json")):
        code, text = ask(folder, *words)
        found[""].append(("row", code))
        for line in text.splitlines() if code == 0 else ():
            row = json.loads(line.strip().rstrip(",").strip("[]")) if len(line) > 2 else None
            if isinstance(row, dict):
                if (
                    row.get("unproved", "") is None
                ):  # a column that a value of another run brings in
                    del row["unproved"]
                found.setdefault(row["run"], []).append(("row", row))
    for run in ids if shown is None else shown:
        found[run].append(("show", *ask(folder, "show", run, "--json")))
        found[run].append(("show", *ask(folder, "show", run, "--printed")))
    for a, b in itertools.pairwise(ids):
        if shown is None or a in shown:
            found[a].append(("show", *ask(folder, "diff", a, b)))
    return found


@dataclass
class Verdict:
    """What came of one changed bit."""

    file: str
    offset: int
    bit: int
    changed: bool = False
    """Some answer is not what it was."""
    named: bool = False
    """`verify` said that something is damaged."""
    wrong: list[str] = field(default_factory=list)
    """What must not be."""


def flips(folder: Path, count: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield file, offset and bit: every file in turn, so that small ones are met as often as large."""
    chosen = random.Random(seed)
    store = folder / ".rearview"
    files = sorted(
        str(path.relative_to(store))
        for path in store.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size
    )
    files = [name for name in files if not name.startswith(SPARED)]
    chosen.shuffle(files)
    for number in range(count):
        name = files[number % len(files)]
        yield name, chosen.randrange((store / name).stat().st_size), chosen.randrange(8)


def judge(
    intact: Path, expected: dict[str, list[tuple[Any, ...]]], flip: tuple[str, int, int], at: Path
) -> Verdict:
    """Change one bit in a copy of the project and return what comes of it."""
    name, offset, bit = flip
    out = Verdict(*flip)
    shutil.copytree(intact, at, symlinks=True)
    try:
        path = at / ".rearview" / name
        data = bytearray(path.read_bytes())
        data[offset] ^= 1 << bit
        path.chmod(0o644)
        path.write_bytes(data)
        ids = [run for run in expected if run]
        try:
            _look(out, expected, ids, at)
        except AssertionError as exc:
            out.wrong.append(str(exc)[:300])
        except Exception as exc:
            out.wrong.append(repr(exc)[:300])
    finally:
        shutil.rmtree(at)
    return out


def _look(
    out: Verdict, expected: dict[str, list[tuple[Any, ...]]], ids: list[str], at: Path
) -> None:
    parts = Path(out.file).parts
    own = parts[1] if parts[0] in {"runs", "checkpoints", "packs"} else None
    own = parts[1].partition(".")[0] if parts[0] == "replays" else own
    code, _ = ask(at, "verify")
    out.named = code != 0
    shown = ids if own is None else [own, *(run for run in ids if run != own)][:2]
    found = answers(at, ids, shown)
    # `runs`, `table` and `sql` speak of every run; the others were asked about some
    expected = {
        run: [one for one in said if run in shown or one[0] == "row"]
        for run, said in expected.items()
    }
    out.changed = found != expected
    if out.changed and not out.named:
        out.wrong.append("an answer changed, and verify says ok")
    if own is not None:
        # what two runs have in common tells of both
        near = {own, "", *(a for a, b in itertools.pairwise(ids) if b == own)}
        hurt = [run for run in ids if run not in near and found[run] != expected[run]]
        if hurt:
            out.wrong.append(f"it changed the answers about {', '.join(hurt)}")
    if not out.named:
        return
    ask(at, "verify", "--repair")
    code, text = ask(at, "verify")
    if code != 0:
        out.wrong.append(f"after the repair: {text[:300]}")
    again = answers(at, ids, [own] if own in ids else [])
    if any(code != 0 for _, code in again[""]):
        out.wrong.append("after the repair, something cannot be asked")
