"""Messages between processes: to and from a process that runs the user's program, and between backfills.

`runtime` and `execute` meet here and nowhere else: an executor starts a process with a `Control`, hands the process
a `SegmentFile`, and reads its `ReplayReport`. A `ReplayStart`, stored when a replay starts, tells other backfills what
the replay covers. Messages to and from the fork server are here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

VARIABLE = "REARVIEW_CONTROL"
"""Environment variable that holds a `Control`: the command line has only the arguments of the program."""
LAUNCHER = f"{__file__.removesuffix('model/process_messages.py')}runtime/bootstrap.py"
"""Python file to run in a new process; it reads the `Control` and runs the user's program."""


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """Start message from `rearview run` or an executor to the process in which the user's program runs.

    With `segment` the process replays, with `resume` it resumes a run, and with neither it records a new run.
    """

    root: str
    """Folder of the project."""
    target: str
    """Path of the script as the user typed it, or the module's name."""
    module: bool = False
    args: tuple[str, ...] = ()
    segment: str | None = None
    """Path of the segment file to replay, or None to record."""
    resume: str | None = None
    """Id of the run to resume, or None to start a new run."""
    source: str | None = None
    """Version with which to resume the run, or None for the version that the run used."""
    depth: int | None = None
    """Most loops around the checkpoint to resume from; None for any number, 0 to start the program from its start."""
    afresh: bool = False
    """Whether the set-up of a resumed run does not see the files that the run has created."""
    repeat_loops: bool = False
    """Whether loops that ended before the checkpoint run again when the run is resumed."""
    run: str | None = None
    """Id that is reserved for the new run, or None to choose an id."""
    signals: tuple[int, ...] = ()
    """Signals at which the run saves its state before the next iteration and exits with `EXIT_PAUSED`."""
    exit_every: float | None = None
    """Seconds after which the run saves and exits without a signal, for batch systems that then transfer files."""
    remote: str | None = None
    """Remote to which the run is pushed, so that another machine can resume it."""
    settings: dict[str, Any] = {}
    """Settings given on the command line, by name."""
    given: dict[str, str] = {}
    """Values for `rearview.arg`, by name."""
    lent: dict[str, str] = {}
    """Environment variables that the process needs to start, and that the program does not see."""
    fork_server: ForkServerStart | None = None
    """Start message if the process is a fork server; each forked segment gets another `Control`."""
    cells: bool = False
    """Whether a script is divided into cells; the points of the run then begin with the cell."""
    reuse_cells: bool = False
    """Whether a cell of a notebook with unchanged inputs gets the results of an earlier run and does not run."""
    repeat_seeds: bool = False
    """Whether the random generators of libraries start with the states that they had in the notebook's last run."""
    kernel: str | None = None
    """Connection file of the front end that sends the cells of a notebook; None: all cells run in order."""


class ForkServerStart(msgspec.Struct, frozen=True):
    """Start message for the fork server: a process that imports libraries once and is then forked for each segment."""

    channel: int
    """File descriptor of the fork server's socket; the fork server exits when the socket closes."""
    imports: tuple[str, ...]
    """Import statements at the start of all programs that will be forked."""
    left_out: str = ""
    """Why later imports are left out: after these imports, the process could not be forked."""
    tried: float = 0.0
    """Seconds that an attempt to make the imports took that are left out."""


class ForkServerReady(msgspec.Struct, frozen=True):
    """Answer of the fork server after its imports."""

    seconds: float
    """Seconds since the start of the fork server."""
    left_out: str = ""
    """Why some imports, or statements of the set-up, were left out; empty if all were executed."""
    usable: bool = True
    """Whether segments can be forked from the process; if False, the process ends, and `left_out` says why."""


UNLIKE = 87
"""Exit code of a segment that cannot continue from a shared set-up: it has computed and reported nothing."""


class SetupStart(msgspec.Struct, frozen=True):
    """Request to a forked process: run the set-up that several segments share, and then fork each segment."""

    statements: int | None
    """How many top-level statements of the script the segments share; None: all statements before the main loop,
    for segments of one run."""
    loops: tuple[str, ...] = ()
    """Ids of the loops at whose first entry the set-up ends."""


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to the fork server: fork a process that runs one segment, and answer with the pid of the process."""

    environment: dict[str, str]
    folder: str
    """Working directory of the process."""
    log: str
    """Path of the file that gets what the process prints."""
    module_folder: str
    """Folder of the program's own modules (`sys.path[0]`)."""
    cores: tuple[int, ...] = ()
    """Processor cores that the process may use; empty: all cores."""
    waited: float = 0.0
    """Seconds that the segment has waited for the imports."""
    setup: SetupStart | None = None
    """Request if the process runs a shared set-up and forks segments; its socket comes with the message."""


class ReapRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to the fork server: answer with the exit code of a process that has ended."""

    pid: int


AGAIN = "again.json"
"""File next to a kernel's connection file, with the `Control` for starting the kernel again."""
DEEPEST = 8
"""Most nested loops to which recursion is followed in the text of a program."""
TEXTS = "recorded"
"""Folder next to a replay's work tree: the recorded text of probed files."""


class SegmentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The segment file: the part of a run to replay, and where to write the results."""

    run: str
    """Id of the run to replay."""
    replay: str
    """Id of the replay."""
    report: str
    """Path at which to write the `ReplayReport`."""
    tree: str = ""
    """Work tree of the replay: a folder that is laid out like the project."""
    folded: tuple[str, ...] = ()
    """Folders of the work tree that are symbolic links and that the program must see as folders."""
    names: tuple[str, ...] = ()
    """Names that the probes log."""
    chains: list[list[str]] = []
    """Loop paths in which probes may run: ids of loops, from the outermost in."""
    everywhere: bool = False
    """Whether any loop may lead to a probe, so that the replay skips no requested iteration."""
    jump: bool = True
    """Whether to start from checkpoints; False: run from the start, and only compare with the checkpoints."""
    thorough: bool = False
    """Whether to compare with every checkpoint, however long that takes, to find the first difference."""
    levels: int = 99
    """How many loops, from the outermost in, the replay may enter in the middle."""
    main: str = ""
    """Id of the outermost loop whose iterations are divided among segments; empty if there is none."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    """By id of the main loop and of loops directly inside it: requested iterations, as (first, after the last). All
    iterations are requested of a loop that is not listed."""
    spans: dict[str, dict[int, tuple[int, int]]] = {}
    """By id of an inner loop and iteration of the main loop: requested iterations of the inner loop."""
    owed: dict[str, int] = {}
    """By id of each loop that logs a requested value: how many iterations the run counted. With fewer iterations in
    the replay, values are missing."""
    after: bool = False
    """Whether values that are logged after the outermost loops are requested, too."""
    head: bool = True
    """Whether this segment writes the values that are logged before the main loop."""
    tail: bool = True
    """Whether this segment writes the values that are logged after the main loop."""
    until: str | None = None
    """Id of a loop at whose entry to stop, because all requested values are logged before it; None: do not stop."""
    probes: dict[str, list[tuple[int, int, list[str]]]] = {}
    """By file: line and column of each probe, and the random generators of the program from which it draws."""
    ids: dict[str, dict[int, str]] = {}
    """Ids that loops had in the recorded version, by file and line."""
    kinds: dict[str, str] = {}
    """Kind of the values that other versions logged, by name: a probe that logs another kind is misplaced."""


def may_hold(chain: Sequence[str], sites: Iterable[str]) -> bool:
    """Return True if the program, while it runs the loops `sites`, may come to a probe in the loops `chain`.

    Both are loop paths: ids of loops, from the outermost in. A loop of the chain may be missing in `sites`, because
    short loops are not always watched. Loops of libraries and of probes are in no chain. A chain of `DEEPEST` loops may
    continue with any loop.

    >>> may_hold(["t.py:f:0:epoch", "t.py:f:1:step"], ["t.py:f:0:epoch"])
    True
    >>> may_hold(["t.py:f:0:epoch", "t.py:f:1:step"], ["t.py:f:0:epoch", "t.py:g:0:step"])
    False
    """
    remaining = iter(chain)
    reachable = all(site in remaining for site in sites if not _is_in_no_chain(site))
    return reachable or len(chain) >= DEEPEST


def _is_in_no_chain(site: str) -> bool:
    if site.count(":") < 3:
        return False
    path, _, qualified = site.partition(":")
    return not path.endswith(".py") or qualified.split(":")[-2].startswith("+")


LoopLimit = tuple[str, float | str | None, float | str | None, bool]
"""Requested iterations of a loop: name of the loop, first and last value, whether one iteration is requested."""


class ReplayStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replay will compute: stored when the replay starts, so that other backfills do not compute it, too."""

    version: str = ""
    """The version that the replay runs: the source with probes."""
    names: tuple[str, ...] = ()
    """Names that the probes log; empty if the replay only proves the run."""
    operator: str = ""
    """How the main loop is replayed (`model.plan.Operator`)."""
    covered: tuple[int, int] | None = None
    """First iteration of the main loop that the replay runs, and the iteration after the last; None if unknown."""
    only: tuple[int, ...] | None = None
    """The iterations of the main loop that the replay runs; None: all iterations in `covered`."""
    predicted: float = 0.0
    """Predicted seconds of the replay."""
    head: bool | None = None
    """Whether the replay logs values before the main loop; None in old stores."""
    tail: bool | None = None
    """Whether the replay logs values after the main loop; None in old stores."""
    limits: tuple[LoopLimit, ...] = ()
    """Requested iterations of all loops but the main loop."""
    same: dict[str, str] = {}
    """By name: a digest of the code that logs it; replays with equal digests log equal values."""
    inner: dict[str, dict[int, tuple[int, int]]] = {}
    """By inner loop and by iteration of the main loop: the iterations of the inner loop that the replay covers."""
    crew: str = ""
    """Id of the backfill that started the replay."""
    redoes: str | None = None
    """Id of the first try that this replay replaces; None for a first try, and in old stores."""
    because: str = ""
    """Why the first try was not enough; empty for a first try."""


def read_replay_start(values: Mapping[str, Any]) -> ReplayStart:
    """Return a `ReplayStart` from its stored fields; unknown fields are ignored.

    If a field cannot be read, the result has no names: the values are then computed again, because the replay may
    have logged fewer values than the readable fields say.

    >>> read_replay_start({"names": ["w"], "covered": [0, 3], "color": "red"}).names
    ('w',)
    >>> read_replay_start({"names": ["w"], "limits": "all"}).names
    ()
    """
    try:
        return msgspec.convert(values, ReplayStart, str_keys=True)
    except msgspec.ValidationError:
        version, redoes = values.get("version"), values.get("redoes")
        return ReplayStart(
            version=version if isinstance(version, str) else "",
            redoes=redoes if isinstance(redoes, str) else None,
        )


class ReplayFailure(StrEnum):
    """Reason why a replay failed, for those reasons on which code acts; `ReplayReport.error` says it in words."""

    PROBE_RAISED = "probe-raised"
    """The added statement raised an exception, which ended the program."""
    WRONG_PLACE = "wrong-place"
    """The added statement found a name or attribute missing, or logged another kind of value."""
    DISK_FULL = "disk-full"
    """A write failed because the disk, or the user's quota on it, is full."""


class ReplayReport(msgspec.Struct, omit_defaults=True):
    """The result of a replay: what the replay ran and compared, and how it differed from the run."""

    states: int = 0
    """How many recorded checkpoints equalled the state of the replay."""
    repeated: int = 0
    """How many recorded values the replay logged again, with an equal value."""
    restored: int = 0
    """How many checkpoints were restored."""
    skipped: int = 0
    """Loops that were skipped and restored."""
    iterations: int = 0
    """Iterations of outermost loops that were executed."""
    open: int = 0
    """How many executed parts of the run ended where the run recorded no state or value to compare with."""
    written: int = 0
    """Number of new records."""
    lacking: list[str] = msgspec.field(default_factory=list)
    """In words: loops that had fewer iterations than in the run, so that values are missing."""
    retry: bool = False
    """Whether a checkpoint could not be restored, so that only a replay from the start can decide."""
    difference: str | None = None
    """The first variable that differed, with the point and both values; None if no variable differed."""
    differing: list[str] = msgspec.field(default_factory=list)
    """Names of recorded values that differed."""
    surroundings: list[str] = msgspec.field(default_factory=list)
    """Differences of library versions and thread counts, one phrase each."""
    error: str | None = None
    """The error that ended the replay, in words; None if there was no error."""
    failure: ReplayFailure | None = None
    """The reason for the error, if code acts on it; else None."""
    probe: tuple[str, int] | None = None
    """File and line of the added statement that raised an exception; None if no added statement raised one."""
    raised: str = ""
    """The exception that the added statement raised."""
    seconds: float = 0.0
    """Seconds that the replay took."""
    restoring: float = 0.0
    """Seconds that restoring checkpoints took."""
    setup: float = 0.0
    """Seconds that the set-up took."""
    spared: float = 0.0
    """Seconds saved because segments with an equal start shared it."""
    finished: bool = False
    """Whether the segment was replayed to its end."""

    @property
    def proved(self) -> bool:
        """Whether everything that could be compared was equal, and something was compared.

        A replay that only restored states, and computed nothing that was left uncompared, starts from recorded states
        and counts as proved as well.
        """
        compared = self.states + self.repeated > 0
        checked = compared or (self.restored > 0 and not self.open)
        same = self.difference is None and not self.differing and not self.lacking
        return self.finished and checked and same

    @property
    def uncompared(self) -> bool:
        """Whether the replay ended without an error or difference, and the run recorded nothing to compare with.

        >>> ReplayReport(finished=True).uncompared, ReplayReport(finished=True, difference="w").uncompared
        (True, False)
        """
        unequal = self.difference is not None or self.differing or self.lacking
        wrong = self.error or self.retry or unequal
        return self.finished and not wrong and not self.proved
