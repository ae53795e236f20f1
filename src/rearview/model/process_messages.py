"""Messages between processes: to and from a process that runs the user's program, and between backfills.

`runtime` and `execute` meet here and nowhere else: an executor starts a process with a `Control`, hands the process
a `SegmentFile`, and reads the `ReplayReport` of the process. A `ReplayStart`, stored when a replay starts, tells other
backfills what the replay covers. Messages to and from the fork server are here as well. The *set-up* is the code that
a program runs before its main loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

VARIABLE = "REARVIEW_CONTROL"
"""Environment variable that holds the `Control`, because the command line holds only the arguments of the user's
program."""
LAUNCHER = f"{__file__.removesuffix('model/process_messages.py')}runtime/bootstrap.py"
"""Path of the Python file that a new process executes: the file reads the `Control` and runs the user's program."""


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """Start message from `rearview run` or an executor to the process in which the user's program runs.

    With `segment` the process replays a segment, with `resume` it resumes a run, and with neither it records a new run.
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
    """Most loops that may be around the checkpoint to resume from; None for any number, 0 to run the program from its
    start."""
    afresh: bool = False
    """Whether files that the run has created are hidden from the set-up when the run is resumed."""
    repeat_loops: bool = False
    """Whether loops that ended before the checkpoint run again when the run is resumed."""
    run: str | None = None
    """Id that is reserved for the new run, or None if the process chooses an id."""
    signals: tuple[int, ...] = ()
    """Signals at which the run saves its state before the next iteration and exits with `EXIT_PAUSED`."""
    exit_every: float | None = None
    """Seconds after which the run saves its state and exits without a signal, for batch systems that then transfer
    files; None: no such limit.
    """
    remote: str | None = None
    """Address of the remote to which the run is pushed, so that another machine can resume the run; None: do not
    push."""
    settings: dict[str, Any] = {}
    """Name of a setting -> value given on the command line."""
    given: dict[str, str] = {}
    """Name of an argument -> value that `rearview.arg` returns for it."""
    lent: dict[str, str] = {}
    """Name -> value of environment variables that the process needs to start, and that the program must not see."""
    fork_server: ForkServerStart | None = None
    """Start message if the process is a fork server; each forked segment gets another `Control`."""
    cells: bool = False
    """Whether a script is divided into cells; the points of the run then begin with the cell."""
    reuse_cells: bool = False
    """Whether a cell of a notebook with unchanged inputs gets the results of an earlier run and does not run."""
    repeat_seeds: bool = False
    """Whether random generators of libraries start in the states in which they started in the notebook's last run."""
    kernel: str | None = None
    """Path of the connection file of the front end that sends the cells of a notebook; None: all cells run in order."""


class ForkServerStart(msgspec.Struct, frozen=True):
    """Start message for the fork server: a process that imports libraries once and is then forked for each segment."""

    channel: int
    """File descriptor of the fork server's socket; the fork server exits when the socket closes."""
    imports: tuple[str, ...]
    """Import statements with which every program that will be forked begins."""
    left_out: str = ""
    """Why imports after `imports` are left out, such as: the process could not be forked after them; empty if none
    are."""
    tried: float = 0.0
    """Seconds that the process had spent on an attempt with more imports, before it started again with `imports`
    only."""


class ForkServerReady(msgspec.Struct, frozen=True):
    """Answer of the fork server after its imports."""

    seconds: float
    """Seconds from the start of the fork server to this answer, without `ForkServerStart.tried`."""
    left_out: str = ""
    """Why some imports, or statements of the set-up, were left out; empty if all were executed."""
    usable: bool = True
    """Whether segments can be forked from the fork server; if False, the fork server ends, and `left_out` says why."""


UNLIKE = 87
"""Exit code of a segment that cannot continue from a shared set-up; the segment has computed and reported nothing."""


class SetupStart(msgspec.Struct, frozen=True):
    """Request to a forked process: run the set-up that several segments share, and then fork each segment."""

    statements: int | None
    """How many top-level statements of the script the segments share. None: all statements before the main loop,
    because the segments are of one run.
    """
    loops: tuple[str, ...] = ()
    """Ids of the loops at whose first entry the set-up ends."""


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to the fork server: fork a process that runs one segment, and answer with the pid of the process."""

    environment: dict[str, str]
    folder: str
    """Working directory of the process."""
    log: str
    """Path of the file to which the output of the process is written."""
    module_folder: str
    """Folder of the program's own modules (`sys.path[0]`)."""
    cores: tuple[int, ...] = ()
    """Processor cores that the process may use; empty: all cores."""
    waited: float = 0.0
    """Seconds that the segment has waited until the fork server had made its imports."""
    setup: SetupStart | None = None
    """Request for a process that runs a shared set-up and then forks segments, or None. The socket of such a process
    comes with this message.
    """


class ReapRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to the fork server: answer with the exit code of a process that has ended."""

    pid: int


AGAIN = "again.json"
"""Name of the file next to a kernel's connection file that holds the `Control` for starting the kernel again."""
DEEPEST = 8
"""Most loops in a loop path that is read from the text of a program; of a longer path, only the outermost loops are
kept."""
TEXTS = "recorded"
"""Name of the folder, next to a replay's work tree, with the recorded texts of the files to which probes were added."""


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
    """Folders of the work tree that are symbolic links, and that the program must see as ordinary folders."""
    names: tuple[str, ...] = ()
    """Names that the probes log."""
    chains: list[list[str]] = []
    """Loop paths in which probes may run."""
    everywhere: bool = False
    """Whether any loop may contain a probe, so that the replay skips no requested iteration."""
    jump: bool = True
    """Whether to start from checkpoints; False: run the program from its start, and only compare with the
    checkpoints."""
    thorough: bool = False
    """Whether to compare with every checkpoint, even if this takes long, to find the first difference."""
    levels: int = 99
    """How many nested loops, counted from the outermost in, the replay may enter at a later iteration than the
    first."""
    main: str = ""
    """Id of the outermost loop whose iterations are divided among segments; empty if there is none."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    """Id of the main loop, or of a loop directly inside it -> requested iterations, as (first, after the last). All
    iterations are requested of a loop that is not listed.
    """
    spans: dict[str, dict[int, tuple[int, int]]] = {}
    """Id of an inner loop -> iteration of the main loop -> requested iterations of the inner loop, as (first, after the
    last)."""
    owed: dict[str, int] = {}
    """Id of a loop in which requested values are logged -> how many iterations of the loop the run counted. If the
    replay has fewer iterations, values are missing.
    """
    after: bool = False
    """Whether values that are logged after the outermost loops are requested, too."""
    head: bool = True
    """Whether the segment writes the records of values that the program logs before the main loop."""
    tail: bool = True
    """Whether the segment writes the records of values that the program logs after the main loop."""
    until: str | None = None
    """Id of a loop at whose entry to stop, because all requested values are logged before it; None: do not stop."""
    probes: dict[str, list[tuple[int, int, list[str]]]] = {}
    """Path of a file -> (line, column, names) of each probe in the file. The names are those of the program's random
    generators that the probe uses.
    """
    ids: dict[str, dict[int, str]] = {}
    """Path of a file -> line of a loop -> id that the loop had in the recorded version."""
    kinds: dict[str, str] = {}
    """Name -> kind of the values (such as a number or a text) that other versions logged under it. A probe that logs
    another kind of value is in the wrong place.
    """


def may_hold(chain: Sequence[str], sites: Iterable[str]) -> bool:
    """Return True if the program, while it runs the loops `sites`, may reach a probe that is inside the loops `chain`.

    Both are loop paths: ids of loops, from the outermost in. A loop of the chain may be missing in `sites`, because
    short loops are not always watched. Loops of libraries and of probes are in no chain, and are ignored in `sites`. A
    chain of `DEEPEST` loops may continue with any loop.

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
"""Requested iterations of a loop: (name of the loop, first value, value after the last, whether only one is requested).
The values are those of the loop's target; None as first or last value: no limit.
"""


class ReplayStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values that a replay will compute, stored when it starts, so that no other backfill computes these values."""

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
    """Whether the replay logs the values that the program logs before the main loop; None in old stores."""
    tail: bool | None = None
    """Whether the replay logs the values that the program logs after the main loop; None in old stores."""
    limits: tuple[LoopLimit, ...] = ()
    """Limits on the requested iterations of loops other than the main loop."""
    same: dict[str, str] = {}
    """Name of a value -> digest of the code that logs the value. Replays with equal digests log equal values."""
    inner: dict[str, dict[int, tuple[int, int]]] = {}
    """Inner loop -> iteration of the main loop -> (first, after the last) iteration of the inner loop that the replay
    covers."""
    crew: str = ""
    """Id of the backfill that started the replay."""
    redoes: str | None = None
    """Id of the replay that this second try replaces; None for a first try, and in old stores."""
    because: str = ""
    """In words: why the replay `redoes` was not enough; empty for a first try."""


def read_replay_start(values: Mapping[str, Any]) -> ReplayStart:
    """Return a `ReplayStart` from its stored fields; unknown fields are ignored.

    If a field cannot be read, the result has no `names`. A backfill then computes the values again, because the replay
    may have logged fewer values than the readable fields say.

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
    """Reason why a replay failed, if code reacts to this reason; `ReplayReport.error` gives every reason in words."""

    PROBE_RAISED = "probe-raised"
    """The added statement raised an exception, which ended the program."""
    WRONG_PLACE = "wrong-place"
    """The added statement used a name or attribute that does not exist, or logged another kind of value than other
    versions."""
    DISK_FULL = "disk-full"
    """A write failed because the disk, or the user's quota on it, is full."""


class ReplayReport(msgspec.Struct, omit_defaults=True):
    """The result of a replay: what the replay ran and compared, and how it differed from the run."""

    states: int = 0
    """How many recorded checkpoints the replay compared with its own state and found equal."""
    repeated: int = 0
    """How many recorded values the replay logged again and found equal."""
    restored: int = 0
    """How many checkpoints the replay restored."""
    skipped: int = 0
    """How many loops the replay skipped, by restoring the state after the loop."""
    iterations: int = 0
    """How many iterations of outermost loops the replay executed."""
    open: int = 0
    """How many times the replay executed a part of the run at whose end there was no recorded state or value to compare
    with."""
    written: int = 0
    """Number of records that the replay added."""
    lacking: list[str] = msgspec.field(default_factory=list)
    """A phrase for each loop that had fewer iterations than in the run, so that values are missing."""
    retry: bool = False
    """Whether a checkpoint could not be restored, so that the segment must be replayed from the start of the run."""
    difference: str | None = None
    """The first variable that differed, with the point and both values; None if no variable differed."""
    differing: list[str] = msgspec.field(default_factory=list)
    """Names of recorded values that the replay logged again with another value."""
    surroundings: list[str] = msgspec.field(default_factory=list)
    """A phrase for each library version or thread count that differed from the run."""
    error: str | None = None
    """The error that ended the replay, in words; None if there was no error."""
    failure: ReplayFailure | None = None
    """The reason for the error, if it is one to which code reacts; else None."""
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
    """Seconds saved because several segments shared one execution of the same first statements."""
    finished: bool = False
    """Whether the segment was replayed to its end."""

    @property
    def proved(self) -> bool:
        """Whether the replay finished, compared at least one state or value, and found no difference.

        A replay that compared nothing counts as proved as well if it restored recorded states and `open` is 0.
        """
        compared = self.states + self.repeated > 0
        checked = compared or (self.restored > 0 and not self.open)
        same = self.difference is None and not self.differing and not self.lacking
        return self.finished and checked and same

    @property
    def uncompared(self) -> bool:
        """Whether the replay finished without error or difference, but the run recorded nothing to compare with.

        >>> ReplayReport(finished=True).uncompared, ReplayReport(finished=True, difference="w").uncompared
        (True, False)
        """
        unequal = self.difference is not None or self.differing or self.lacking
        wrong = self.error or self.retry or unequal
        return self.finished and not wrong and not self.proved
