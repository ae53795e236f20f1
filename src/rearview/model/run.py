"""A run, the points in it, the records it leaves at them, and the facts it writes about itself.

`RunStart` is written once, before the program begins; `RunEnd` when it ends. Both are stored as JSON and
read tolerantly: a key that is missing, or that another version of Rearview wrote with another type, gets
its default, so that runs of every age stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Any, TypeVar

import msgspec

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


RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was started, as far as a replay needs it."""

    target: str | None = None
    """Script as the user typed it, or the module's name; None if the facts of the start are lost."""
    module: bool = False
    """Whether `target` names a module (`rearview run -m`)."""
    root: str = ""
    """Folder of the project at that time; empty in old runs."""
    given: dict[str, str] = {}
    """Values given for `rearview.arg`, by name; secrets are hidden."""
    watched: bool = True
    """Whether Rearview started the program; False if it was attached by plain `python`."""
    autolog: bool | None = None
    """Whether scalars assigned in loops are logged; None in old runs."""
    settings: dict[str, Any] = {}
    """Settings given on the command line."""
    entropy: str = ""
    """Key that all random numbers follow, hexadecimal."""
    cells: bool = False
    """Whether the script was divided into cells, with which its points begin."""
    clock: int = 1
    """Number of the rule by which times are recorded."""
    hash_seed: str = "0"
    """PYTHONHASHSEED of the process."""
    python: str = ""
    executable: str = ""
    machine: str | None = None
    """Operating system and processor type, as `platform.platform` names them."""
    hardware: dict[str, Any] = {}
    """Processor, cores and accelerators (`store.machine.hardware`)."""
    threads: dict[str, str] = {}
    """Environment variables that bound thread counts."""
    imported: dict[str, str] = {}
    """Tracker, key, name and place (`from`, `key`, `name`, `source`) of a run that was imported."""
    rebuilt: bool = False
    """Whether these facts were damaged and rewritten from the id and version of the run."""


class LoopTotals(msgspec.Struct, frozen=True, kw_only=True):
    """How often one loop ran in the whole run."""

    entries: int = 0
    iterations: int = 0
    seconds: float = 0.0
    outermost: bool = False
    loose: bool = True
    """Whether it is in a generator, which may run inside any other loop."""


class DeepLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration counts of a loop inside two or more others."""

    site: str
    """Id of the loop."""
    path: list[str] = []
    """Ids of the loops from the outermost inner loop down to this one; empty in old runs."""
    entries: int = 0
    counts: list[int] = []
    """Its iterations in each iteration of the outermost loop."""


class MainLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of the outermost loop that took longest, and of the loops inside it.

    `counts` and `counted` are None in runs of older versions of Rearview.
    """

    start: float = 0.0
    """Seconds from the start of the process until the program began."""
    site: str | None = None
    """Id of the loop; None if the program has no loop."""
    name: str = ""
    entered: float = 0.0
    """Seconds after the program began."""
    left: float = 0.0
    iterations: list[tuple[int, float]] = []
    """(count, seconds each), in order."""
    inner: dict[str, list[tuple[float, int]]] = {}
    """By id: seconds and iterations of inner loops in each iteration of this one."""
    deep: dict[str, DeepLoop] = {}
    """Loops inside of inner loops, by the names of the loops around them."""
    counts: dict[str, list[int]] | None = None
    """By id: iterations of a loop in each iteration of this one, however deep it is nested."""
    counted: tuple[int, int] | None = None
    """First and last iteration of this loop in which inner iterations were counted."""
    alone: bool = True
    """Whether this loop was entered only once."""
    span: tuple[int, int] | None = None
    """First value and step of the loop's target, if it counted."""
    range: list[Any] | None = None
    """The span in old runs: start, stop, step."""
    held: list[Any] | None = None
    """Value of the loop's target in each iteration, if it did not count."""
    spans: dict[str, tuple[int, int]] = {}
    """Like `span`, by id of an inner loop."""
    helds: dict[str, list[Any]] = {}
    """Like `held`, by id of an inner loop."""
    varied: list[str] = []
    """Ids of inner loops whose target was not bound to the same values each time."""


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The loops that a program was in when an exception or an exit ended it."""

    exception: str = ""
    """Type of the exception; empty if the program ended by `os._exit`."""
    path: list[tuple[str, int, int]] = []
    """Loop (id), number of its entry and iteration, outermost first; empty if it was in no loop."""

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted the program, which would have continued otherwise."""
        return self.exception == KeyboardInterrupt.__name__


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a run, and how it ended."""

    time: float = 0.0
    attempts: int | None = None
    """Number of times the run was resumed before it ended; None in old runs."""
    exit_code: int = 1
    seconds: float = 0.0
    cpu: float = 0.0
    """Processor seconds of the process."""
    costs: dict[str, Any] = {}
    """Costs of recording (`runtime.saving.overhead`)."""
    main: MainLoop = MainLoop()
    imports: dict[str, float] = {}
    """Seconds that each library took to import."""
    surroundings: dict[str, str] = {}
    """Versions of libraries and thread counts."""
    inputs: dict[str, list[Any]] = {}
    """Size, time of change and hash of each data file that was read, by path."""
    loops: dict[str, LoopTotals] = {}
    """By id of the loop; loops that were not watched to their end are missing."""
    files: list[str] | None = None
    """Source files that ran, relative to the root; None in old runs."""
    early: EarlyEnd | None = None
    """The loops that the program was in when it failed; None if it did not fail, and in old runs."""
    captured: dict[str, Any] = {}
    """Which names were captured, and how long that took."""


class Continuation(msgspec.Struct, frozen=True):
    """A point from which a run was resumed with a mended source."""

    version: str
    point: str


def read_record(kind: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return stored values as a record; missing and mistyped keys get defaults, unknown keys are ignored.

    >>> read_record(RunStart, {"target": "train.py", "clock": "noon", "color": "red"}).clock
    1
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError:
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        readable: dict[str, Any] = {}
        for name in fields.keys() & values.keys():
            try:
                readable[name] = _read_value(fields[name], values[name])
            except msgspec.ValidationError:
                continue
        return kind(**readable)


def _read_value(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
        return read_record(kind, value)
    return msgspec.convert(value, kind)


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
    """Its measurements; defaults if it has not ended, or was resumed after that (`ended` is None)."""
    arg_origins: dict[str, str] = field(default_factory=dict)
    """The library that read each hyper-parameter, such as argparse, if known."""
    attempts: int = 0
    """How often it was resumed."""
    continued: tuple[Continuation, ...] = ()
    """Where it was resumed with a mended source, in order."""
    damaged: str = ""
    """The damage of its files, in words; empty if they can be read."""
    name: str = ""
    """Name that the user gave it later; empty if none."""
    tags: tuple[str, ...] = ()
    """Tags that the user gave it later, in the order given."""
    note: str = ""
    """Notes that the user wrote about it later, one line or paragraph each."""

    def __repr__(self) -> str:
        command = " ".join((self.script, *self.argv))
        took = "" if self.ended is None else f", {self.ended - self.started:.1f} s"
        name = f" {self.name!r}" if self.name else ""
        return f"<Run {self.id}{name}: {command}, {self.status}{took}>"

    def _repr_html_(self) -> str:
        """Return the facts of the run as HTML, for a notebook."""
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
        """Return the folder of the project when the run was recorded; `root` is its folder now."""
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
