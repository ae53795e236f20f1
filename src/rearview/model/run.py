"""Runs (`Run`), points in a run (`Point`), records at points (`Record`), and what is stored about a run.

`RunStart` is written once, before the program begins, and `RunEnd` when the program ends. Both are stored as JSON and
read tolerantly: a key that is missing, or that another version of Rearview wrote with another type, gets
its default, so that runs of every version stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Any, TypeVar

import msgspec

EXIT_PAUSED = 85
"""Exit code of a process that has saved its state and must be started again to continue."""
Value = int | str | float | None
CELL = "cell"
"""Name of the outermost step of points in a notebook, and in a script that is divided into cells."""
NOTEBOOK = ".ipynb"
"""File name suffix of a notebook."""
NAMED = "loop:"
"""Prefix of the id of a loop to which the program gives a name with `rearview.loop`."""


def name_of(loop: str) -> str:
    """Return the name of a loop, given its id.

    >>> name_of("train.py:fit:0:epoch"), name_of("loop:my:loop"), name_of("epoch")
    ('epoch', 'my:loop', 'epoch')
    """
    return loop.removeprefix(NAMED) if loop.startswith(NAMED) else loop.rpartition(":")[2]


def columns_of(loops: Iterable[str]) -> list[str]:
    """Return a distinct column name for each loop of a loop path, given the ids or names of the loops.

    A loop inside another loop of equal name gets a number, such as `i_2`.

    >>> columns_of(["a.py:f:0:i", "a.py:f:1:j", "a.py:g:0:i"])
    ['i', 'j', 'i_2']
    """
    columns: list[str] = []
    for loop in map(name_of, loops):
        count = sum(column == loop or column.rpartition("_")[0] == loop for column in columns)
        columns.append(f"{loop}_{count + 1}" if count else loop)
    return columns


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of one loop.

    `index` counts from 0 and gives the order; `value` is the value of the loop's target, if this is a number or string
    other than the index, and else None. Messages and tables show the value, and programs use the index.
    """

    loop: str
    index: int
    value: Value = None

    @property
    def label(self) -> int | str | float:
        """The value that messages and tables show for the iteration: `value`, or `index` if `value` is None."""
        return self.index if self.value is None else self.value

    def __str__(self) -> str:
        return f"{self.loop}={self.label}"


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a run, as the iterations of the running loops, outermost first; the empty point is outside all loops.

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
        """Iteration numbers, outermost first. Points in the same loops can be sorted by these numbers."""
        return tuple(step.index for step in self.steps)


class Origin(StrEnum):
    """Where a record comes from, which decides how far it can be trusted."""

    RECORDED = "recorded"
    """Logged by the run itself."""
    REPLAYED = "replayed"
    """Logged by a replay that was proved exact."""
    UNPROVED = "unproved"
    """Logged by a replay that was interrupted, or for which the run recorded nothing to compare with."""
    REDONE = "redone"
    """Logged by a replay that a second try, a replay from the start of the run, has replaced."""
    INEXACT = "not exact"
    """Logged by a replay that differed from the recording."""
    WANDB = "wandb"
    """Passed to Weights & Biases by the run."""
    MLFLOW = "mlflow"
    """Passed to MLflow by the run."""
    TENSORBOARD = "tensorboard"
    """Passed to TensorBoard or tensorboardX by the run."""
    LIGHTNING = "lightning"
    """Passed to a logger of Lightning by the run."""
    TRANSFORMERS = "transformers"
    """Logged by the Hugging Face Trainer of the run."""
    KERAS = "keras"
    """Logged by Keras at the end of an epoch of the run."""
    ASSIGNED = "assigned"
    """The value of a variable at the end of an iteration of the run."""
    PRINTED = "printed"
    """A number in a line that the run printed."""
    LOGGING = "logging"
    """A number in a message that the run passed to Python's `logging`."""
    INNER = "inner"
    """The last value that a variable had in an inner loop, in an iteration of the run."""


LOGGERS = (
    *(Origin.WANDB, Origin.MLFLOW, Origin.TENSORBOARD),
    *(Origin.LIGHTNING, Origin.TRANSFORMERS, Origin.KERAS),
)
"""Origins of values that a run passed to a logger. If two values have the same name, tables show the value whose origin
comes first here.
"""
CAPTURED = (*LOGGERS, Origin.ASSIGNED, Origin.PRINTED, Origin.LOGGING, Origin.INNER)
"""Origins of values that a run did not log with Rearview; tables prefer a value whose origin comes first here."""
UNASKED = frozenset({Origin.ASSIGNED, Origin.PRINTED, Origin.LOGGING, Origin.INNER})
"""Origins of values that the program passed to no logger."""
SEEN = "rearview_seen"
"""Name of an attribute of a logger's patched method: a function that captures one call of the method. If a background
writer makes the call in another process, it calls this function in the program's process with the same arguments.
"""
MARK = "$"
"""Prefix of the origin in a captured record, which stores its origin in the field that holds a replay's id
otherwise."""


def captured_origin(replay: str | None) -> Origin | None:
    """Return the origin in a record's field `replay`, or None if the field is empty or holds a replay's id.

    >>> captured_origin("$printed"), captured_origin("20261118-r1"), captured_origin(None)
    (<Origin.PRINTED: 'printed'>, None, None)
    """
    if replay is None or not replay.startswith(MARK):
        return None
    name = replay.removeprefix(MARK)
    return next((origin for origin in CAPTURED if origin.value == name), None)


@dataclass(frozen=True, slots=True)
class Record:
    """A value that was logged under a name at a point.

    `value` is a JSON scalar, or a dict with the key `"$object"`, which names the stored bytes of
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
    """Return True if a path is the path of a notebook.

    >>> is_notebook("study.ipynb"), is_notebook("train.py")
    (True, False)
    """
    return path.endswith(NOTEBOOK)


class Status(StrEnum):
    """Status of a run: it is running, or the way in which it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    """The run ended with an exception or a non-zero exit code."""
    PAUSED = "paused"
    """The run ended with `EXIT_PAUSED`: its state is saved, and the run can be resumed."""
    DEAD = "dead"
    """The process of the run no longer exists, and did not record how the run ended."""


RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored when a run starts: how the program was started, on which machine, and what else a replay needs."""

    target: str | None = None
    """Path of the script as the user typed it, or the module's name; None if this value was lost."""
    module: bool = False
    """Whether `target` names a module (`rearview run -m`)."""
    root: str = ""
    """Path of the project's folder when the run started; empty in old runs."""
    given: dict[str, str] = {}
    """Name of an argument -> value that the command line gave for `rearview.arg`; secrets are hidden."""
    watched: bool = True
    """Whether Rearview started the program; False if plain `python` ran a program that imports Rearview."""
    autolog: bool | None = None
    """Whether scalars that the program assigns to variables in loops are logged; None in old runs."""
    settings: dict[str, Any] = {}
    """Name of a setting -> value given on the command line."""
    entropy: str = ""
    """Key that decides all random numbers that the program does not seed, hexadecimal (`runtime.sandbox.entropy`)."""
    cells: bool = False
    """Whether the script was divided into cells; its points then begin with the cell."""
    clock: int = 1
    """Number of the rule that decided which readings of the clock belong to the program (`runtime.sandbox.clock`)."""
    hash_seed: str = "0"
    """PYTHONHASHSEED of the process."""
    python: str = ""
    executable: str = ""
    machine: str | None = None
    """Operating system and processor type, as `platform.platform` names them."""
    hardware: dict[str, Any] = {}
    """Processor, cores and accelerators (`store.machine_and_process.hardware`)."""
    threads: dict[str, str] = {}
    """Name -> value of the environment variables that limit the number of threads."""
    imported: dict[str, str] = {}
    """For a run imported from an experiment tracker: tracker, key, name and location (`from`, `key`, `name`,
    `source`)."""
    rebuilt: bool = False
    """Whether the stored facts were damaged, and were written again from the id and version of the run."""


class LoopTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Entries, iterations and seconds of one loop, summed over the whole run."""

    entries: int = 0
    """How many times the program entered the loop."""
    iterations: int = 0
    seconds: float = 0.0
    outermost: bool = False
    loose: bool = True
    """Whether the loop is in a generator, which may run inside any other loop."""


class DeepLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration counts of a loop inside at least two other loops."""

    site: str
    """Id of the loop."""
    path: list[str] = []
    """Loop path without the outermost loop: ids of loops, ending with this loop; empty in old runs."""
    entries: int = 0
    """How many times the program entered the loop."""
    counts: list[int] = []
    """Number of this loop's iterations in each iteration of the outermost loop."""


class MainLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and iteration counts of the main loop (the outermost loop that took longest), and of the loops inside it.

    `counts` and `counted` are None in runs of older versions of Rearview.
    """

    start: float = 0.0
    """Seconds from the start of the process until the program began."""
    site: str | None = None
    """Id of the loop; None if the program has no loop."""
    name: str = ""
    entered: float = 0.0
    """When the program entered the loop: seconds after the program began."""
    left: float = 0.0
    """When the loop ended: seconds after the program began."""
    iterations: list[tuple[int, float]] = []
    """(count, average seconds) of successive groups of iterations."""
    inner: dict[str, list[tuple[float, int]]] = {}
    """Id of an inner loop -> (seconds, iterations) of the inner loop in each iteration of the main loop."""
    deep: dict[str, DeepLoop] = {}
    """Loop path without the main loop (ids joined by ` > `; in old runs, names joined by `/`) -> counts of the
    innermost loop of this path. Paths have at least two loops.
    """
    counts: dict[str, list[int]] | None = None
    """Id of a loop at any depth -> number of the loop's iterations in each iteration of the main loop."""
    counted: tuple[int, int] | None = None
    """(first, after the last) iteration of the main loop in which the iterations of loops inside it were counted."""
    alone: bool = True
    """Whether the main loop was entered only once."""
    span: tuple[int, int] | None = None
    """First value and step of the loop's target, if the loop is over a `range` or `enumerate`; else None."""
    range: list[Any] | None = None
    """In old runs, the value of `span`, in the form start, stop, step."""
    held: list[Any] | None = None
    """Value of the loop's target in each iteration, if `span` does not describe the values; else None."""
    spans: dict[str, tuple[int, int]] = {}
    """Id of an inner loop -> first value and step of that loop's target, as in `span`."""
    helds: dict[str, list[Any]] = {}
    """Id of an inner loop -> value of that loop's target in each iteration, as in `held`."""
    varied: list[str] = []
    """Ids of inner loops whose target did not have the same values at every entry of the loop."""


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The loops that a program was in when an exception or an exit ended it."""

    exception: str = ""
    """Name of the exception's class; empty if the program ended by `os._exit`."""
    path: list[tuple[str, int, int]] = []
    """(id of the loop, number of its entry, iteration), outermost first; empty if the program was in no loop."""

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted the program; without an interruption it would have continued."""
        return self.exception == KeyboardInterrupt.__name__


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a run, and how it ended."""

    time: float = 0.0
    attempts: int | None = None
    """How many times the run had been resumed when it ended; None in old runs."""
    exit_code: int = 1
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds of processor time of the process."""
    costs: dict[str, Any] = {}
    """Costs of recording (`runtime.saving.overhead`)."""
    main: MainLoop = MainLoop()
    imports: dict[str, float] = {}
    """Name of a library -> seconds that importing the library took."""
    surroundings: dict[str, str] = {}
    """Name -> text of library versions and thread counts during the run."""
    inputs: dict[str, list[Any]] = {}
    """Path of a data file that the program read -> size, time of last change and hash of the file."""
    loops: dict[str, LoopTotals] = {}
    """Id of a loop -> totals of the loop. Loops that were not watched until they ended are left out."""
    files: list[str] | None = None
    """Paths of the source files that ran, relative to the project; None in old runs."""
    early: EarlyEnd | None = None
    """The loops that the program was in when it ended early; None if the program did not end early, and in old runs."""
    captured: dict[str, Any] = {}
    """Names of the values that Rearview captured from other loggers and from variables, and seconds that capturing
    took."""


class Continuation(msgspec.Struct, frozen=True):
    """The event that a run was resumed with a corrected source."""

    version: str
    """The corrected version."""
    point: str
    """Point from which the run was resumed."""


def read_record(kind: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return an instance of the class `kind`, such as `RunStart`, made from stored values.

    Keys that are missing or have a value of a wrong type get their defaults; unknown keys are ignored.

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
    """A run: the facts about one execution of a program, read from the run's folder."""

    id: str
    version: str
    """Version of the source with which the run started: its tree hash (`store.versions`)."""
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
    """Seconds between the times at which the process shows that it is running."""
    cwd: str = ""
    """Working directory in which the program was started."""
    parent: str | None = None
    """Id of the run that this run replays or resumes; None if there is none."""
    args: dict[str, Any] = field(default_factory=dict)
    """Name of a hyper-parameter -> value."""
    facts: RunStart = field(default_factory=RunStart)
    """The facts about the start of the run."""
    end: RunEnd = field(default_factory=RunEnd)
    """Measurements at the end of the run. While `ended` is None, also after a resumption, all fields have their
    defaults."""
    arg_origins: dict[str, str] = field(default_factory=dict)
    """Name of a hyper-parameter -> library that read the hyper-parameter, such as argparse, if known."""
    attempts: int = 0
    """How many times the run was resumed."""
    continued: tuple[Continuation, ...] = ()
    """Resumptions with a corrected source, in order."""
    damaged: str = ""
    """In words: how the files of the run are damaged; empty if the files can be read."""
    name: str = ""
    """Name that the user gave the run; empty if the run has no name."""
    tags: tuple[str, ...] = ()
    """Tags that the user gave the run, in order."""
    note: str = ""
    """Notes that the user wrote about the run, one line or paragraph each."""

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
        """The version with which the run was last resumed, or else the version with which it started."""
        return self.continued[-1].version if self.continued else self.version

    @property
    def has_cells(self) -> bool:
        """Whether points of the run begin with a cell, as in a notebook or in a script divided into cells."""
        return is_notebook(self.script) or self.facts.cells

    def recorded_root(self, root: str) -> str:
        """Return the folder that the project had when the run was recorded; `root` is its current folder."""
        return self.facts.root or root

    def current_path(self, path: str, root: str) -> str:
        """Return the current path of a file that had the path `path` in the run; `root` is the project's current folder.

        >>> run = Run("", "", "", (), 0.0, Status.DEAD, facts=RunStart(root="/old"))
        >>> run.current_path("/old/data.txt", "/new"), run.current_path("/older/data.txt", "/new")
        ('/new/data.txt', '/older/data.txt')
        """
        recorded_root = self.recorded_root(root)
        return (
            f"{root}{path[len(recorded_root) :]}"
            if f"{path}/".startswith(f"{recorded_root}/")
            else path
        )
