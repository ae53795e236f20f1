"""Messages to and from a process that runs the user's program, as JSON.

`runtime` and `execute` meet here and nowhere else: an executor starts a process with a `Control`, hands it a
`SegmentFile`, and reads its `ReplayReport`. The fork server has separate messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

VARIABLE = "REARVIEW_CONTROL"
"""Environment variable that holds a `Control`, so that the command line stays the program's own."""
LAUNCHER = f"{__file__.removesuffix('model/messages.py')}runtime/launcher.py"
"""Python file that starts a process which reads a `Control`."""


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """Start message from `rearview run` or an executor to the process it starts."""

    root: str
    target: str
    """Path of the script as the user typed it, or the module's name."""
    module: bool = False
    args: tuple[str, ...] = ()
    segment: str | None = None
    """Path of the segment file to replay; None: record."""
    resume: str | None = None
    """Run to resume; None: start a new one."""
    source: str | None = None
    """Version to resume it with; None: the one it ran."""
    depth: int | None = None
    """Most loops around the checkpoint to resume from; None: any number, 0: start over."""
    afresh: bool = False
    """Whether to hide the files that the run has created from the set-up of the resumed run."""
    repeat_loops: bool = False
    """Whether loops that ended before the checkpoint run again when the run is resumed."""
    run: str | None = None
    """Reserved id of the new run; None: choose one."""
    signals: tuple[int, ...] = ()
    """Signals after which to save at the next boundary and exit with `EXIT_PAUSED`."""
    exit_every: float | None = None
    """Seconds after which to save and exit without a signal, for batch systems that then transfer files."""
    remote: str | None = None
    """Remote to which the run is pushed, so that another machine can resume it."""
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}
    """Values for `rearview.arg`, by name."""
    lent: dict[str, str] = {}
    """Environment variables for the start of the process that the program does not see."""
    fork_server: ForkServerStart | None = None
    """Set for a fork server; each forked segment gets another `Control`."""
    cells: bool = False
    """Whether a script is cut into cells, which its points begin with."""
    reuse_cells: bool = False
    """Whether a notebook's cell gets the results of an earlier run, instead of running, if its inputs are the same."""
    repeat_seeds: bool = False
    """Whether the random generators of libraries begin as in the last run of the same notebook."""
    kernel: str | None = None
    """Connection file of the front end that sends the cells of a notebook; None: they run in order."""


class ForkServerStart(msgspec.Struct, frozen=True):
    """Start message for the fork server."""

    channel: int
    """Descriptor of its socket; the fork server exits when the socket closes."""
    imports: tuple[str, ...]
    """Import statements at the start of all programs to fork."""
    left_out: str = ""
    """Why later imports are left out: a process that has done them cannot be forked."""
    tried: float = 0.0
    """Seconds that an attempt to import them took."""


class ForkServerReady(msgspec.Struct, frozen=True):
    """Answer of the fork server after its imports."""

    seconds: float
    """Seconds since its start."""
    left_out: str = ""
    """Why some imports, or statements of the set-up, were left out; empty if none were."""
    usable: bool = True
    """Whether segments can be forked from it; False: it ends, and `left_out` says why."""


UNLIKE = 87
"""Exit code of a segment that cannot continue from a shared set-up; it has then done nothing and reports nothing."""


class SetupStart(msgspec.Struct, frozen=True):
    """Asks a forked process to run the set-up of several segments once, and then to fork them."""

    statements: int | None
    """How many top-level statements of the script the segments share; None: everything up to the main loop,
    for segments of one run."""
    loops: tuple[str, ...] = ()
    """Ids of the loops before which the set-up ends, wherever they are entered."""


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks the fork server for a process that runs one segment; the answer is its pid."""

    environment: dict[str, str]
    folder: str
    log: str
    module_folder: str
    """Folder of the program's own modules (`sys.path[0]`)."""
    cores: tuple[int, ...] = ()
    """Cores that it may use; empty: all."""
    waited: float = 0.0
    """Seconds that it waited for the imports."""
    setup: SetupStart | None = None
    """Set for a process that forks segments after the set-up; its socket comes with the message."""


class ReapRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks the fork server for the exit code of a process that has ended."""

    pid: int


AGAIN = "again.json"
"""File next to a kernel's connection file: the `Control` with which the kernel has to be started again."""
DEEPEST = 8
"""Loops on a stack beyond which recursion is not followed in the text of a program."""
TEXTS = "recorded"
"""Folder next to a replay's work tree: the recorded text of probed files."""


class SegmentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The segment file: the part of a run to replay, and where to write the results."""

    run: str
    replay: str
    report: str
    """Path of the report."""
    tree: str = ""
    """Work tree of the replay, laid out like the project."""
    folded: tuple[str, ...] = ()
    """Folders of the work tree that are links and that the program must see as folders."""
    names: tuple[str, ...] = ()
    chains: list[list[str]] = []
    """Stacks of loops (site ids), outermost first, that probes may run in."""
    everywhere: bool = False
    """Whether a probe may be reached from any loop, so that no requested iteration may skip the probe."""
    jump: bool = True
    """Whether to start from checkpoints; False: run from the start and only compare with them."""
    thorough: bool = False
    """Whether to compare with every checkpoint, however long that takes, to find the first difference."""
    levels: int = 99
    """How many loops, from the outermost, may be entered in the middle."""
    main: str = ""
    """Outermost loop (id) that is divided among segments; empty: none."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    """Requested iterations of the main loop and of loops directly inside it, by id; all iterations of loops that
    are not listed."""
    spans: dict[str, dict[int, tuple[int, int]]] = {}
    """By id of an inner loop and iteration of the main one: requested iterations of the inner loop."""
    owed: dict[str, int] = {}
    """By id of a loop: how many iterations the run counted in which a requested value is logged."""
    after: bool = False
    """Whether values after the outermost loops are requested, too."""
    head: bool = True
    """Whether this segment writes the values logged before the divided loop."""
    tail: bool = True
    """Whether this segment writes the values logged after it."""
    until: str | None = None
    """Loop (id) at whose entry to stop: all requested values come before it."""
    probes: dict[str, list[tuple[int, int, list[str]]]] = {}
    """By file: line and column of each probe, and the generators of the program that it draws from."""
    ids: dict[str, dict[int, str]] = {}
    """Ids that loops had in the recorded version, by file and line."""
    kinds: dict[str, str] = {}
    """Kind of the values that other versions logged, by name: a probe that logs another kind is misplaced."""


def may_hold(chain: Sequence[str], sites: Iterable[str]) -> bool:
    """Return True if a probe in the loops `chain` may be reached from inside the loops `sites`.

    A loop of the chain may be missing, because short loops are not always watched. Loops of libraries and
    of probes are in no chain. A chain of `DEEPEST` loops may continue with any loop.

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


class ReplayFailure(StrEnum):
    """Why a replay failed, where code acts on it; `ReplayReport.error` says it in words."""

    PROBE_RAISED = "probe-raised"
    """The added statement raised an exception, and that ended the program."""
    WRONG_PLACE = "wrong-place"
    """The added statement found a name or attribute missing, or logged another kind of value."""
    DISK_FULL = "disk-full"
    """A write failed because the disk, or the user's quota on it, is full."""


class ReplayReport(msgspec.Struct, omit_defaults=True):
    """The result of a replay: what it ran and compared, and whether it was exact."""

    states: int = 0
    """How many recorded checkpoints the replayed state was equal to."""
    repeated: int = 0
    """How many recorded values were logged again, equal."""
    restored: int = 0
    skipped: int = 0
    """Loops that were skipped and restored."""
    iterations: int = 0
    """Iterations of outermost loops that were executed."""
    open: int = 0
    """How many executed parts ended with nothing recorded to compare them with."""
    written: int = 0
    """New records."""
    lacking: list[str] = msgspec.field(default_factory=list)
    """Loops that had fewer iterations than in the run, in words: values are missing."""
    retry: bool = False
    """Whether a checkpoint could not be restored, so that only a replay from the start can decide."""
    difference: str | None = None
    """The first variable that differed, and where."""
    differing: list[str] = msgspec.field(default_factory=list)
    """Names of recorded values that differed."""
    surroundings: list[str] = msgspec.field(default_factory=list)
    """Differences of library versions and thread counts, one phrase each."""
    error: str | None = None
    failure: ReplayFailure | None = None
    """The kind of the error; None: no error, or an error of another kind."""
    probe: tuple[str, int] | None = None
    """File and line of the added statement that raised an exception."""
    raised: str = ""
    """The exception that the added statement raised."""
    seconds: float = 0.0
    restoring: float = 0.0
    setup: float = 0.0
    spared: float = 0.0
    """Seconds saved by sharing its start with other segments."""
    finished: bool = False
    """Whether the segment was replayed to its end."""

    @property
    def proved(self) -> bool:
        """Whether everything that could be compared was equal, and something was compared.

        A replay that only restored states, without computing up to an open end, starts from recorded
        states and counts as proved as well.
        """
        compared = self.states + self.repeated > 0
        checked = compared or (self.restored > 0 and not self.open)
        same = self.difference is None and not self.differing and not self.lacking
        return self.finished and checked and same

    @property
    def uncompared(self) -> bool:
        """Whether it ended without an error or difference, and the run recorded nothing to compare with.

        >>> ReplayReport(finished=True).uncompared, ReplayReport(finished=True, difference="w").uncompared
        (True, False)
        """
        unequal = self.difference is not None or self.differing or self.lacking
        wrong = self.error or self.retry or unequal
        return self.finished and not wrong and not self.proved
