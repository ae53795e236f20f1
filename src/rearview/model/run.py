"""A run, the points in it, and the records it leaves at them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Any

from rearview.model.run_facts import Continuation, RunEnd, RunStart

EXIT_PAUSED = 85
"""Exit code of a process that has saved its state and must be started again."""
Value = int | str | float | None
CELL = "cell"
"""Outermost step of the points of a notebook, and of a script that is divided into cells."""
NOTEBOOK = ".ipynb"
"""File name suffix of a notebook."""
NAMED = "loop:"
"""Prefix of the id of a loop that the program names with `rearview.loop`."""


def name_of(loop: str) -> str:
    """Return the name of a loop, given its id.

    >>> name_of("train.py:fit:0:epoch"), name_of("loop:my:loop"), name_of("epoch")
    ('epoch', 'my:loop', 'epoch')
    """
    return loop.removeprefix(NAMED) if loop.startswith(NAMED) else loop.rpartition(":")[2]


def columns_of(loops: Iterable[str]) -> list[str]:
    """Return names that distinguish the loops of a stack for people, given their ids or names.

    A loop inside one of the same name is numbered, as the columns of a table are.

    >>> columns_of(["a.py:f:0:i", "a.py:f:1:j", "a.py:g:0:i"])
    ['i', 'j', 'i_2']
    """
    out: list[str] = []
    for loop in map(name_of, loops):
        seen = sum(other == loop or other.rpartition("_")[0] == loop for other in out)
        out.append(f"{loop}_{seen + 1}" if seen else loop)
    return out


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of one loop.

    `index` counts from 0 and gives the order; `value` is the value of the loop's target, if it is a
    plain number or string other than the index. People use the value, programs the index.
    """

    loop: str
    index: int
    value: Value = None

    @property
    def shown(self) -> int | str | float:
        """The value people know this iteration by."""
        return self.index if self.value is None else self.value

    def __str__(self) -> str:
        return f"{self.loop}={self.shown}"


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a run; the empty point is outside all loops.

    >>> str(Point((Step("epoch", 3), Step("step", 20))))
    'epoch=3/step=20'
    """

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return "/".join(map(str, self.steps))

    @property
    def loops(self) -> tuple[str, ...]:
        """Names of the loops, outermost first."""
        return tuple(step.loop for step in self.steps)

    @property
    def indices(self) -> tuple[int, ...]:
        """Iteration numbers, outermost first; orders points of the same loops."""
        return tuple(step.index for step in self.steps)


class Origin(StrEnum):
    """Where a record comes from, and how far it can be trusted."""

    RECORDED = "recorded"
    """Logged by the run itself."""
    REPLAYED = "replayed"
    """Logged by a replay that was proved exact."""
    UNPROVED = "unproved"
    """Logged by a replay that was interrupted, or that nothing could be compared with."""
    REDONE = "redone"
    """Logged by a first try, which a second try from the start of the run replaces."""
    INEXACT = "not exact"
    """Logged by a replay that differed from the recording."""
    WANDB = "wandb"
    """Given to Weights & Biases by the run."""
    MLFLOW = "mlflow"
    """Given to MLflow by the run."""
    TENSORBOARD = "tensorboard"
    """Given to TensorBoard or tensorboardX by the run."""
    LIGHTNING = "lightning"
    """Given to Lightning's loggers by the run."""
    TRANSFORMERS = "transformers"
    """Logged by the Hugging Face Trainer of the run."""
    KERAS = "keras"
    """Logged by Keras at the end of an epoch of the run."""
    ASSIGNED = "assigned"
    """Value that a variable had when an iteration of a loop of the run ended."""
    PRINTED = "printed"
    """Read from a line that the run printed."""
    LOGGING = "logging"
    """Read from a message that the run gave to Python's `logging`."""
    INNER = "inner"
    """Last value that a variable had in a loop inside an iteration of the run."""


LOGGERS = (
    *(Origin.WANDB, Origin.MLFLOW, Origin.TENSORBOARD),
    *(Origin.LIGHTNING, Origin.TRANSFORMERS, Origin.KERAS),
)
"""Origins of values that a run gave to a logger. Of two with one name, tables show the first here."""
CAPTURED = (*LOGGERS, Origin.ASSIGNED, Origin.PRINTED, Origin.LOGGING, Origin.INNER)
"""Origins of values that a run did not log with Rearview, the strongest first."""
UNASKED = frozenset({Origin.ASSIGNED, Origin.PRINTED, Origin.LOGGING, Origin.INNER})
"""Origins of values that the program gave to no logger."""
SEEN = "rearview_seen"
"""Attribute of a logger's method that captures its calls: a background writer, which has the method called
in another process, calls this here with the same arguments."""
MARK = "$"
"""Prefix of the origin of captured records, in the field that holds a replay's id otherwise."""


def captured_origin(replay: str | None) -> Origin | None:
    """Return the origin of captured records; None for those of a run or of a replay.

    >>> captured_origin("$printed"), captured_origin("20261118-r1"), captured_origin(None)
    (<Origin.PRINTED: 'printed'>, None, None)
    """
    if replay is None or not replay.startswith(MARK):
        return None
    name = replay.removeprefix(MARK)
    return next((origin for origin in CAPTURED if origin.value == name), None)


@dataclass(frozen=True, slots=True)
class Record:
    """One value under one name at one point.

    `value` is a JSON scalar, or a dict with the key `"$object"` that names the stored bytes of
    an array, tensor, image or histogram.
    """

    run: str
    seq: int
    point: Point
    name: str
    value: Any
    origin: Origin = Origin.RECORDED
    time: float = 0.0


def is_notebook(path: str) -> bool:
    """Return True if a path is that of a notebook.

    >>> is_notebook("study.ipynb"), is_notebook("train.py")
    (True, False)
    """
    return path.endswith(NOTEBOOK)


class Status(StrEnum):
    """State of a run: running, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    """Ended with an exception or a non-zero exit code."""
    PAUSED = "paused"
    """Ended with `EXIT_PAUSED`: saved, to be continued."""
    DEAD = "dead"
    """Its process no longer exists and did not record how it ended."""


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """Facts of one execution, read from its folder."""

    id: str
    version: str
    """Tree hash of the source, as kept by `store.versions`."""
    script: str
    """Path of the script relative to the project, or `-m module`."""
    argv: tuple[str, ...]
    started: float
    status: Status
    ended: float | None = None
    exit_code: int | None = None
    host: str = ""
    pid: int = 0
    heartbeat: float = 10.0
    """Seconds between its signs of life."""
    cwd: str = ""
    parent: str | None = None
    """The run this one replays or resumes, if any."""
    args: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters."""
    facts: RunStart = field(default_factory=RunStart)
    """How it was started."""
    end: RunEnd = field(default_factory=RunEnd)
    """What it measured; defaults if it has not ended, or was resumed since (`ended` is None)."""
    arg_origins: dict[str, str] = field(default_factory=dict)
    """The library that read each hyper-parameter, such as argparse, if known."""
    attempts: int = 0
    """How often it was resumed."""
    continued: tuple[Continuation, ...] = ()
    """Where it was resumed with a mended source, in order."""
    damaged: str = ""
    """What is wrong with its files; empty if they can be read."""
    name: str = ""
    """Name that the user gave it later; empty if none."""
    tags: tuple[str, ...] = ()
    """Tags that the user gave it later, in the order given."""
    note: str = ""
    """What the user wrote about it later, one line or paragraph per note."""

    def __repr__(self) -> str:
        command = " ".join((self.script, *self.argv))
        took = "" if self.ended is None else f", {self.ended - self.started:.1f} s"
        name = f" {self.name!r}" if self.name else ""
        return f"<Run {self.id}{name}: {command}, {self.status}{took}>"

    def _repr_html_(self) -> str:
        """Return the facts of the run as HTML: what a notebook shows."""
        took = "" if self.ended is None else f"{self.ended - self.started:.1f} s"
        facts = {
            "run": self.id,
            "name": self.name,
            "status": str(self.status),
            "command": " ".join((self.script, *self.argv)),
            "took": took,
            "tags": ", ".join(self.tags),
            "note": self.note,
            **{f"--{name}": str(value) for name, value in self.args.items()},
        }
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in facts.items()
            if value
        )
        return f"<table><tbody>{''.join(rows)}</tbody></table>"

    @property
    def source(self) -> str:
        """The version that the run uses now: its own, or the last that it was continued with."""
        return self.continued[-1].version if self.continued else self.version

    @property
    def has_cells(self) -> bool:
        """Whether its points begin with a cell: of a notebook, or of a script divided into cells."""
        return is_notebook(self.script) or self.facts.cells

    def home(self, root: str) -> str:
        """Return the folder that the project was in; `root` is where it is now."""
        return self.facts.root or root

    def now(self, path: str, root: str) -> str:
        """Return the current path of a file that the run named, if the project has moved to `root`.

        >>> run = Run("", "", "", (), 0.0, Status.DEAD, facts=RunStart(root="/old"))
        >>> run.now("/old/data.txt", "/new"), run.now("/older/data.txt", "/new")
        ('/new/data.txt', '/older/data.txt')
        """
        recorded_home = self.home(root)
        return (
            f"{root}{path[len(recorded_home) :]}"
            if f"{path}/".startswith(f"{recorded_home}/")
            else path
        )
