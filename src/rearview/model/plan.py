"""What a process that runs the user's program is told, and what a replay tells back.

What has to run again, in which order, at what cost.

What a process that runs the user's program is told, and what a replay tells back.

These cross a process border as JSON: recording and executing meet here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec


class Operator(StrEnum):
    """How a segment replays, by where its probes stand."""

    SETUP = "setup"
    """Before the main loop: run the set-up, stop at the loop."""
    OUTER = "DP"
    """In the outer loop: skip the inner work, restore each iteration."""
    AFTER = "DP*"
    """After the loop: restore its last checkpoint, run on."""
    INNER = "DPi"
    """In an inner loop: run chosen iterations from the nearest checkpoint."""
    FULL = "full"
    """No checkpoint helps: run from the start."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one run to run again, in one process.

    Iterations `first <= i < last` of the outermost loop `loop` are wanted, or those listed in
    `only`; `start` names the checkpoint to begin from (None: from the start of the program).
    """

    run: str
    version: str
    """Version to execute: the run's own, or one derived from it by probes."""
    operator: Operator
    loop: str | None = None
    first: int = 0
    last: int | None = None
    start: str | None = None
    names: tuple[str, ...] = ()
    seconds: float = 0.0
    """Predicted."""
    low: float = 0.0
    high: float = 0.0
    only: tuple[int, ...] | None = None
    """Wanted iterations when there are gaps between them."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    """(loop, first, last): iterations of inner loops that are wanted; the rest only if they come
    before."""
    restores: tuple[tuple[int, str], ...] = ()
    """(iteration of `loop`, checkpoint to restore there) in order, the start included; between
    them the segment runs on."""
    tail: bool = False
    """What follows the loop is wanted too."""
    priority: float = 0.0
    """Smaller comes first."""
    nbytes: int = 0
    """Bytes of checkpoints to read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered segments with their cost and what is refused, with reasons."""

    segments: tuple[Segment, ...] = ()
    refusals: tuple[tuple[str, str], ...] = field(default=())
    """(run, reason) for every run that cannot be answered."""

    @property
    def seconds(self) -> float:
        """Predicted computing time of all segments on one worker."""
        return sum(segment.seconds for segment in self.segments)


VARIABLE = "REARVIEW_CONTROL"
"""Environment variable that holds a `Control`; the program's own command line stays its own."""
LAUNCHER = f"{__file__.removesuffix('model/plan.py')}runtime/process/start.py"
"""File that a process which reads it is started with."""


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `rearview run` and the executors tell the process they start."""

    root: str
    target: str
    """Path of the script as the user typed it, or the module's name."""
    module: bool = False
    args: tuple[str, ...] = ()
    segment: str | None = None
    """File that says what to replay; None records."""
    resume: str | None = None
    """Run to continue; None starts a new one."""
    source: str | None = None
    """Version to continue it with, where that is not the one it ran; None: the one it ran."""
    depth: int | None = None
    """Loops deep that the checkpoint to continue from may lie; None: any, 0: start over."""
    afresh: bool = False
    """Whether the set-up of a run that continues finds no file that the run has made."""
    run: str | None = None
    """Id that a new run gets, reserved by whoever starts it; None lets it choose."""
    signals: tuple[int, ...] = ()
    """Signals at which to save at the next boundary and leave with exit code 85."""
    exit_every: float | None = None
    """Seconds after which to do so without being asked, for batch systems that take files then."""
    remote: str | None = None
    """Where what was saved is brought then, for another machine to go on from."""
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}
    """Values for `rearview.arg`, by name."""
    lent: dict[str, str] = {}
    """Environment variables for the start of the process alone: the program does not see them."""
    nursery: Nursery | None = None
    """Be a process that segments are forked from; the rest is told to each of them."""


class Nursery(msgspec.Struct, frozen=True):
    """What a process is told that segments are forked from."""

    channel: int
    """Descriptor by which it is asked; when that ends, so does the process."""
    imports: tuple[str, ...]
    """Statements with which the programs of all these segments begin."""
    left_out: str = ""
    """Why there are no more of them, where there were: after those nothing can be forked from it."""
    tried: float = 0.0
    """Seconds that it took to find that out."""


class Ready(msgspec.Struct, frozen=True):
    """What it says when it has imported them."""

    seconds: float
    """How long that took, from its start on."""
    left_out: str = ""
    """Why some were left out; empty: none were."""


class Birth(msgspec.Struct, frozen=True, tag=True):
    """Asks it for one segment; the answer is the number of the new process."""

    environment: dict[str, str]
    folder: str
    log: str
    beside: str
    """Folder in which the program's own modules are looked for."""
    cores: tuple[int, ...] = ()
    """Processors that it may use; empty: all."""
    waited: float = 0.0
    """Seconds that it had to wait for the imports."""


class Death(msgspec.Struct, frozen=True, tag=True):
    """Asks how a segment that has ended did so; the answer is its exit code."""

    pid: int


DEEPEST = 8
"""Loops on a stack beyond which recursion is not followed in the text of a program."""
TEXTS = "recorded"
"""Folder beside a replay's tree: the text of probed files as it was recorded."""


class SegmentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The segment file: what to replay, and where its results go."""

    run: str
    replay: str
    report: str
    """File to publish the report at."""
    tree: str = ""
    """Folder that the replay runs in, laid out like the project."""
    names: tuple[str, ...] = ()
    chains: list[list[str]] = []
    """Stacks of loops (site ids), outermost first, that probes may run in."""
    everywhere: bool = False
    """A probe may be reached from any loop: none is skipped where something is wanted."""
    jump: bool = True
    """Begin from checkpoints; False runs from the start, and only compares with them."""
    levels: int = 99
    """Loops, counted from the outermost, that may be entered in the middle."""
    main: str = ""
    """Outermost loop (site id) that is divided among segments; empty: none is."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    """Iterations wanted of the main loop, and of loops directly inside it, by site id; a loop that
    is not here is wanted whole."""
    spans: dict[str, dict[int, tuple[int, int]]] = {}
    """Of inner loops by site id and iteration of the main one: no more than these."""
    owed: dict[str, int] = {}
    """By loop (site id): iterations in which something wanted is logged, as the run counted them."""
    after: bool = False
    """Something is wanted after the outermost loops too."""
    head: bool = True
    """Values logged before the loop that is divided among segments are this one's to write."""
    tail: bool = True
    """So are those logged after it."""
    until: str | None = None
    """Loop (site id) at whose entry to stop: all that is wanted stands before it."""
    probes: dict[str, list[tuple[int, int, list[str]]]] = {}
    """By file: line and column of each probe, and the live generators it draws from."""
    ids: dict[str, dict[int, str]] = {}
    """Ids that loops had in the recorded version, by file and line."""


def may_hold(chain: Sequence[str], sites: Iterable[str]) -> bool:
    """Return True if a probe in the loops `chain` may be reached from inside the loops `sites`.

    A loop of the chain may be missing: short loops are not always watched. Loops of libraries, and
    those that probes bring along, stand in no chain; beyond a chain as long as recursion is followed
    any loop may stand.

    >>> may_hold(["t.py:f:0:epoch", "t.py:f:1:step"], ["t.py:f:0:epoch"])
    True
    >>> may_hold(["t.py:f:0:epoch", "t.py:f:1:step"], ["t.py:f:0:epoch", "t.py:g:0:step"])
    False
    """
    rest = iter(chain)
    held = all(site in rest for site in sites if not _chainless(site))
    return held or len(chain) >= DEEPEST


def _chainless(site: str) -> bool:
    if site.count(":") < 3:
        return False
    path, _, rest = site.partition(":")
    return not path.endswith(".py") or rest.split(":")[-2].startswith("+")


class ReplayFailure(StrEnum):
    """Why a replay failed, where code acts on it; `ReplayReport.error` says it in words."""

    PROBE_RAISED = "probe-raised"
    """The added statement raised an exception, and that ended the program."""
    DISK_FULL = "disk-full"
    """A write failed because the disk, or the user's quota on it, is full."""


class ReplayReport(msgspec.Struct, omit_defaults=True):
    """What a replay did and whether it was exact."""

    states: int = 0
    """Recorded checkpoints that the replayed state was equal to."""
    repeated: int = 0
    """Recorded values that were logged again, equal."""
    restored: int = 0
    skipped: int = 0
    """Loops that were skipped and restored."""
    iterations: int = 0
    """Iterations of outermost loops that were executed."""
    open: int = 0
    """Stretches that were executed and ended with nothing recorded to compare them with."""
    written: int = 0
    """New records."""
    lacking: list[str] = msgspec.field(default_factory=list)
    """Loops that went round less often than in the run, in words: values are missing."""
    retry: bool = False
    """A checkpoint could not be restored: only a run from the start will tell."""
    difference: str | None = None
    """The first variable that differed, and where."""
    differing: list[str] = msgspec.field(default_factory=list)
    """Names of recorded values that came out differently."""
    surroundings: list[str] = msgspec.field(default_factory=list)
    """What the program stands on and is not as it was: versions of libraries, thread counts."""
    error: str | None = None
    failure: ReplayFailure | None = None
    """What kind of error it is; None: no error, or one of another kind."""
    seconds: float = 0.0
    restoring: float = 0.0
    setup: float = 0.0
    spared: float = 0.0
    """Seconds that it would have taken longer, had its start not been shared."""
    finished: bool = False
    """The segment was replayed to its end."""

    @property
    def proved(self) -> bool:
        """Whether all that could be compared was equal, and something was.

        A replay that only restored states and ran what lies between has compared nothing, and
        starts from what was recorded itself.
        """
        compared = self.states + self.repeated > 0
        checked = compared or (self.restored > 0 and not self.open)
        same = self.difference is None and not self.differing and not self.lacking
        return self.finished and checked and same

    @property
    def uncompared(self) -> bool:
        """Whether all went well and the run left nothing behind to compare it with.

        >>> ReplayReport(finished=True).uncompared, ReplayReport(finished=True, difference="w").uncompared
        (True, False)
        """
        unequal = self.difference is not None or self.differing or self.lacking
        wrong = self.error or self.retry or unequal
        return self.finished and not wrong and not self.proved
