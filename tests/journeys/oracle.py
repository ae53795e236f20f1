"""The oracle: what a probed script logs when it runs from the start, against what a backfill says.

A corpus program is a file, or a folder with several, in which probes stand as comments:

    # outer: rearview.log("gnorm", norm)

`Program.text({"outer"})` takes those comment marks away. Truth is a run of the probed text with the
same entropy; the answer is a backfill of the unprobed run. All values are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rearview
from rearview import _history
from rearview.execute.executor import Task
from rearview.model import Checkpoint
from rearview.model.run import CAPTURED
from rearview.store.records import read, scan

CORPUS = Path(__file__).parent / "corpus"
MARK = re.compile(r"^(\s*)# (outer|inner|after|before|use): ?(.*)$", re.MULTILINE)
NAME = re.compile(r"rearview\.log\(\s*[\"'](\w+)[\"']")
SEED = "11"
KEY = "5a" * 32
LIMIT = 120.0
"""Seconds after which a program that should take two is killed."""

Key = tuple[tuple[str, ...], tuple[int, ...], str]
"""Loops, iterations, name."""
Values = dict[Key, list[str]]


@dataclass(frozen=True)
class Program:
    """One program of the corpus."""

    name: str
    path: Path

    @property
    def main(self) -> Path:
        """The file that says how it is started."""
        return self.path if self.path.is_file() else self.path / "start.txt"

    def directive(self, word: str, default: str = "") -> str:
        """Return what a line `# word: …` at the head of the program says."""
        found = re.search(rf"^# {word}: (.*)$", self.main.read_text(), re.MULTILINE)
        return found[1] if found else default

    @property
    def command(self) -> list[str]:
        """Script and arguments, as typed after `rearview run`."""
        default = self.path.name if self.path.is_file() else "train.py"
        return shlex.split(self.directive("run", default))

    @property
    def probes(self) -> dict[str, list[str]]:
        """Names that each kind of probe logs."""
        found: dict[str, list[str]] = {}
        for file in self.files():
            for _, kind, text in MARK.findall(file.read_text()):
                if kind != "use":
                    found.setdefault(kind, []).extend(NAME.findall(text))
        return {kind: names for kind, names in found.items() if names}

    def files(self) -> list[Path]:
        """Return its Python files."""
        return [self.path] if self.path.is_file() else sorted(self.path.rglob("*.py"))

    def lay_out(self, folder: Path, kinds: set[str]) -> None:
        """Put the program into `folder` with these kinds of probes in it."""
        for file in self.files():
            relative = file.name if self.path.is_file() else file.relative_to(self.path)
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            text = probed(file.read_text(), kinds)
            if not target.exists() or target.read_text() != text:
                target.write_text(text)


def probed(text: str, kinds: set[str]) -> str:
    """Return a program's text with the probes of some kinds made live."""

    def live(match: re.Match[str]) -> str:
        wanted = match[2] in kinds or (match[2] == "use" and kinds)
        return f"{match[1]}{match[3]}" if wanted else match[0]

    return MARK.sub(live, text)


def programs() -> list[Program]:
    """Return the corpus."""
    found = [
        p for p in sorted(CORPUS.iterdir()) if p.suffix == ".py" or (p / "start.txt").is_file()
    ]
    return [Program(p.stem, p) for p in found]


class Zygote:
    """Starts programs by forking a process that has torch; an executor for replays too."""

    slots = 1

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "zygote")
        source = str(Path(rearview.__file__).parent.parent.resolve())
        self.environment = {
            **os.environ,
            "PYTHONHASHSEED": SEED,
            "PYTHONPATH": source,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "REARVIEW_DEBUG": "1",
            "PYTHONWARNINGS": "default",
        }
        script = Path(__file__).with_name("zygote.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), self.address], env=self.environment
        )
        while not Path(self.address).exists():
            assert self.process.poll() is None, "the zygote could not start"
            time.sleep(0.05)

    def start(self, task: Task, slot: int) -> Forked:
        """Start a replay."""
        del slot
        return Forked(task, self.ask(task.environment, task.folder, task.log))

    def ask(
        self, environment: Mapping[str, str], folder: Path, log: Path, *, everywhere: bool = False
    ) -> socket.socket:
        """Start a program; the exit code will come over the socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        request = {
            "environment": dict(environment),
            "folder": str(folder),
            "log": str(log),
            "everywhere": everywhere,
        }
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def close(self) -> None:
        """Leave it running: another replay may follow."""

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@dataclass
class Forked:
    """A program that a zygote started."""

    task: Task | None
    connection: socket.socket

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds."""
        self.connection.settimeout(timeout)
        try:
            answer = self.connection.recv(64)
        except TimeoutError:
            return None
        self.connection.close()
        return int(answer or b"-1")

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self.connection.close()


@dataclass
class Answer:
    """What a backfill said, with what it wrote."""

    asked: frozenset[str]
    values: Values
    report: Any

    @property
    def proof(self) -> str:
        """The line a user would see."""
        return self.report.proof if self.report.outcomes else str(self.report.refusals)


@dataclass
class Case:
    """One program under test in a folder of its own."""

    program: Program
    folder: Path
    zygote: Zygote
    counts: dict[str, int] = field(default_factory=dict)

    def record(
        self, where: str, kinds: set[str], *, settings: Mapping[str, Any], everywhere: bool = False
    ) -> Path:
        """Record the program with some probes, in a project of its own; returns its folder."""
        folder = self.folder / where
        folder.mkdir(parents=True)
        self.program.lay_out(folder, kinds)
        for extra in sorted(self.program.path.rglob("*")) if self.program.path.is_dir() else ():
            if extra.is_file() and extra.suffix != ".py":
                target = folder / extra.relative_to(self.program.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(extra, target)
        (folder / ".rearview").mkdir(exist_ok=True)
        command = self.program.command
        module = command[0] == "-m"
        with moved(folder, {"REARVIEW_ENTROPY": KEY, "REARVIEW_ROOT": str(folder)}):
            target, *args = command[1:] if module else command
            how = _history.start_run(target, args, module=module, settings=settings)
        environment = {**self.zygote.environment, **ours(how.environment)}
        log = folder / ".rearview" / "output.txt"
        job = Forked(None, self.zygote.ask(environment, how.folder, log, everywhere=everywhere))
        code = job.wait(LIMIT)
        output = log.read_text(errors="replace")
        wanted = int(self.program.directive("exit", "0"))
        assert code == wanted, f"{self.program.name} ended with {code}:\n{output[-3000:]}"
        assert "stopped recording" not in output, output[-3000:]
        return folder

    def truth(self, kinds: set[str]) -> Values:
        """Return what the probed program logs when it runs from the start."""
        folder = self.record("truth", kinds, settings={"epsilon": 0})
        return values(folder, wanted={n for k in kinds for n in self.program.probes[k]})

    def backfill(
        self, folder: Path, kind: str, *, at: str | None = None, workers: int = 2
    ) -> Answer:
        """Add the probes of one kind to a recorded project and fill their columns."""
        self.program.lay_out(folder, {kind})
        names = list(dict.fromkeys(self.program.probes[kind]))
        with moved(folder, self.zygote.environment):
            report = _history.history(folder).backfill(names, at=at, workers=workers)
        found: Values = {}
        replays = {outcome.replay for outcome in report.outcomes}
        for file in records(folder):
            if scan(file)[0].origin in replays:
                collect(found, file, set(names))
        return Answer(frozenset(names), found, report)


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that says what to do."""
    return {k: v for k, v in environment.items() if k.startswith("REARVIEW")}


_MOVING = threading.Lock()


@contextlib.contextmanager
def moved(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Be in another folder with another environment for a while, one thread at a time."""
    with _MOVING:
        here, before = Path.cwd(), dict(os.environ)
        os.chdir(folder)
        os.environ.update(environment)
        try:
            yield
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)


def records(folder: Path) -> list[Path]:
    """Return the record files of a project with one run."""
    return sorted((folder / ".rearview" / "runs").glob("*/records-*.jsonl"))


def values(folder: Path, wanted: set[str]) -> Values:
    """Return all values of a project with these names, by place and name, in order."""
    found: Values = {}
    for file in records(folder):
        collect(found, file, wanted)
    return found


def collect(found: Values, file: Path, wanted: set[str]) -> None:
    """Add the values of one file."""
    for record in read(file):
        if record.name in wanted and record.origin not in CAPTURED:
            key = (record.point.loops, record.point.indices, record.name)
            found.setdefault(key, []).append(json.dumps(record.value, default=repr))


def thin(folder: Path, keep: Callable[[Checkpoint], bool]) -> None:
    """Delete the checkpoints of a project that `keep` does not say to keep, and all answers."""
    history = _history.history(folder)
    for file in (folder / ".rearview" / "runs").glob("*/replays.jsonl"):
        file.unlink()
    for checkpoint in history._checkpoints.of(history.run().id):
        if not keep(checkpoint):
            history._checkpoints.delete(checkpoint.id)


def verdict(truth: Values, answer: Answer, inside: Callable[[Key], bool] = lambda key: True) -> str:
    """Return `exact`, `said: …` (not proved, and it says so), or `WRONG: …` when it does not."""
    wanted = {k: v for k, v in truth.items() if k[2] in answer.asked and inside(k)}
    if answer.values == wanted and answer.report.proved:
        return "exact"
    if not answer.report.proved:
        return f"said: {answer.proof}"
    missing = [k for k in wanted if k not in answer.values]
    more = [k for k in answer.values if k not in wanted]
    wrong = [(k, answer.values[k], v) for k, v in wanted.items() if answer.values.get(k, v) != v]
    return f"WRONG: missing {missing[:3]}, more {more[:3]}, wrong {wrong[:2]}; {answer.proof}"


def outermost(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint is between iterations of an outermost loop."""
    return checkpoint.edge == "start" and len(checkpoint.point.steps) == 1


def final(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint is after an outermost loop, where a replay can end and be proved."""
    return checkpoint.edge == "end" and len(checkpoint.point.steps) == 1


def middle(folder: Path) -> tuple[str, Callable[[Key], bool]]:
    """Return the text for `--at` that means two iterations in the middle, and what lies in them.

    Of a loop over things that can be shown it means one of them.
    """
    main = _history.history(folder).run().end.main
    loop, count = main.name, sum(n for n, _ in main.iterations)
    first = min(count // 2, count - 2)
    start, step = main.span or (0, 1)
    held = main.held
    meant = range(first, first + 2)
    if held is not None:
        meant = [k for k, value in enumerate(held) if value == held[first]]

    def inside(key: Key) -> bool:
        return bool(key[0]) and key[0][0] == loop and key[1][0] in meant

    if held is not None:
        return f"{loop}={held[first]!r}", inside
    return f"{loop}={start + first * step}:{start + (first + 2) * step}", inside
