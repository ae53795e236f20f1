"""Facts that a run writes about itself: how it was started, and what it measured until it ended.

`RunStart` is written once, before the program begins; `RunEnd` when it ends. Both are stored as JSON and
read tolerantly: a key that is missing, or that another version of Rearview wrote with another type, gets
its default, so that runs of every age stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

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

    `counts` and `counted` are None in runs of a Rearview that did not count yet.
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
    """The same in old runs: start, stop, step."""
    held: list[Any] | None = None
    """Value of the loop's target in each iteration, if it did not count."""
    spans: dict[str, tuple[int, int]] = {}
    """Like `span`, by id of an inner loop."""
    helds: dict[str, list[Any]] = {}
    """Like `held`, by id of an inner loop."""
    varied: list[str] = []
    """Ids of inner loops whose target was not bound to the same values each time."""


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Where a program was when an exception or an exit ended it."""

    exception: str = ""
    """Type of the exception; empty if the program ended by `os._exit`."""
    path: list[tuple[str, int, int]] = []
    """Loop (id), number of its entry and iteration, outermost first; empty if it was in no loop."""

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted the program, which would have continued otherwise."""
        return self.exception == KeyboardInterrupt.__name__


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured, and how it ended."""

    time: float = 0.0
    exit_code: int = 1
    seconds: float = 0.0
    cpu: float = 0.0
    """Processor seconds of the process."""
    costs: dict[str, Any] = {}
    """What recording cost (`runtime.saving.overhead`)."""
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
    """Where the program was when it failed; None if it did not fail, and in old runs."""
    captured: dict[str, Any] = {}
    """Which names were captured, and how long that took."""


class Continuation(msgspec.Struct, frozen=True):
    """A point from which a run was resumed with a mended source."""

    version: str
    point: str


def read_record(kind: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return stored values as a record; missing, unknown and mistyped keys do not stop it.

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
