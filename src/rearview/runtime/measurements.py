"""Measurements of a run for planning: loop timings, library versions, thread counts.

With other versions of libraries or other thread counts, a program may compute slightly different numbers: the report
about a replay that differs from the recording names changed versions and thread counts first.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rearview.model.run import DeepLoop, MainLoop
from rearview.store.recorded_inputs import fingerprint

_HERE = __name__.partition(".")[0]


def surroundings() -> dict[str, str]:
    """Return name -> version of each library that this process has loaded, with thread counts as further items."""
    versions = {"Python": platform.python_version(), "machine": platform.machine()}
    for name, module in sorted(sys.modules.items()):
        version = None if "." in name else vars(module).get("__version__") if module else None
        if isinstance(version, str) and name not in sys.stdlib_module_names and name != _HERE:
            versions[name] = version
    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            versions["threads of torch"] = str(torch.get_num_threads())
        except Exception:
            versions["threads of torch"] = "unknown"
    for name in sorted(os.environ):
        if name.endswith("_NUM_THREADS"):
            versions[name] = os.environ[name]
    return versions


def changed_versions(recorded: Mapping[str, str], current: Mapping[str, str]) -> Iterator[str]:
    """Yield a phrase for each version or thread count that differs between `recorded` and `current`.

    >>> list(changed_versions({"torch": "2.12.0", "numpy": "2.0"}, {"torch": "2.13.0", "numpy": "2.0"}))
    ['torch was 2.12.0, is 2.13.0']
    >>> list(changed_versions({"OMP_NUM_THREADS": "1"}, {}))
    ['OMP_NUM_THREADS was 1, is not set']
    """
    for name, before in recorded.items():
        after = current.get(name)
        if after is None and not name.endswith("_NUM_THREADS"):
            continue  # not a change: a replay that ends early has not loaded every library
        if after != before:
            yield f"{name} was {before}, is {after or 'not set'}"
    for name, after in current.items():
        if name.endswith("_NUM_THREADS") and name not in recorded:
            yield f"{name} was not set, is {after}"


def changed_inputs(recorded: Mapping[str, list[Any]], real: Callable[[str], str]) -> Iterator[str]:
    """Yield a phrase for each recorded input file that has changed or is gone.

    `recorded` maps the path of a file to its fingerprint; `real` returns where this process finds the file.
    """
    for path, recorded_fingerprint in recorded.items():
        try:
            same = fingerprint(Path(real(path)))[2] == recorded_fingerprint[2]
        except OSError:
            yield f"{path} is gone"
            continue
        if not same:
            yield f"{path} has changed since the run read it"


def age() -> float:
    """Return the age of this process in seconds; 0 if it is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


_MOST = 4096
"""Maximum number of pairs in `Durations`; if there are more, neighbouring pairs are merged to save memory."""

_COUNTED = 1 << 16
"""Number of first iterations of the outermost loop in which iterations of inner loops are counted."""


@dataclass(slots=True)
class Durations:
    """Durations of successive iterations as pairs (number of iterations, seconds per iteration).

    >>> durations = Durations()
    >>> durations.add(1, 2.0); durations.add(3, 3.0)
    >>> durations.pairs
    [(1, 2.0), (3, 1.0)]
    """

    pairs: list[tuple[int, float]] = field(default_factory=list)

    def add(self, count: int, seconds: float) -> None:
        """Add `count` iterations that took `seconds` together."""
        self.pairs.append((count, seconds / max(1, count)))
        if len(self.pairs) > _MOST:
            self.pairs = [_merged(*self.pairs[at : at + 2]) for at in range(0, len(self.pairs), 2)]


def _merged(*pairs: tuple[int, float]) -> tuple[int, float]:
    count = sum(n for n, _ in pairs)
    return count, sum(n * seconds for n, seconds in pairs) / max(1, count)


@dataclass(slots=True)
class DeepLoopCounts:
    """Iteration counts of a loop inside two or more other loops."""

    path: list[str]
    """Ids of the loops from the second outermost loop down to this loop."""
    entries: int = 0
    counts: list[int] = field(default_factory=list)
    """Number of iterations of this loop in each iteration of the outermost loop."""


@dataclass(slots=True)
class LoopTimings:
    """Timings of one outermost loop and the loops inside it."""

    site: str
    name: str
    entered: float
    """Seconds from the start of the program to the entry of the loop."""
    left: float = 0.0
    """Seconds from the start of the program to the end of the loop."""
    iterations: Durations = field(default_factory=Durations)
    inner: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Id of an inner loop -> its (seconds, number of iterations) in each iteration of the outermost loop."""
    deep: dict[str, DeepLoopCounts] = field(default_factory=dict)
    """Ids of the loops in `DeepLoopCounts.path`, joined by ` > ` -> counts of the loop at the end of this path."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Id of an inner loop at any depth -> number of its iterations in each iteration of the outermost loop."""
    first_index: int = 0
    """Index of the first iteration that was measured: earlier ones ran in an earlier process of the run."""
    index: int = 0
    """Index of the current iteration."""
    iteration_began: float = 0.0
    """`perf_counter()` when the current iteration began."""
    span: tuple[int, int] | None = None
    """(start, step) of the values of the loop target (variable of the `for`) if they are evenly spaced, else None."""
    spans: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Id of an inner loop -> (start, step) of its target, or None if its values are not evenly spaced numbers."""
    target_values: list[Any] | None = None
    """Values of the loop target in each iteration; None if they are evenly spaced numbers, or unknown."""
    inner_target_values: dict[str, list[Any] | None] = field(default_factory=dict)
    """Id of an inner loop -> values of its target, or None if they are evenly spaced numbers, or unknown."""
    varied: set[str] = field(default_factory=set)
    """Ids of inner loops whose target took different values in different executions of the loop."""


class Timeline:
    """Timings of the outermost loops of a run, in order."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.start = age()
        self.nests: list[LoopTimings] = []

    def enter(self, site: str, name: str) -> None:
        """Record that an outermost loop begins, with the id `site` and the name `name`."""
        now = perf_counter()
        self.nests.append(LoopTimings(site, name, now - self.began, iteration_began=now))

    def begin_iteration(self, index: int, waited: float) -> None:
        """Record that iteration `index` of the outermost loop begins.

        `waited` is how many seconds the program has waited for Rearview since the previous iteration began; they are
        subtracted from the duration of that iteration.
        """
        nest = self.nests[-1]
        now = perf_counter()
        if index > nest.index:
            nest.iterations.add(index - nest.index, max(0.0, now - nest.iteration_began - waited))
        nest.index, nest.iteration_began = index, now

    def skipped(self, index: int) -> None:
        """Record that the iterations before `index` of the outermost loop ran in an earlier process of the run."""
        if self.nests:
            self.nests[-1].first_index = index

    def add_inner_loop(
        self,
        site: str,
        index: int,
        seconds: float,
        count: int,
        span: tuple[int, int] | None = None,
        target_values: list[Any] | None = None,
    ) -> None:
        """Add an inner loop that has ended in iteration `index` of the outermost loop.

        The loop has run `count` iterations in `seconds`. `span` is (start, step) of the values of its target if they
        are evenly spaced numbers; otherwise `target_values` are the values, or None if they are unknown.
        """
        if not self.nests:
            return
        nest = self.nests[-1]
        if count:
            first_values = nest.inner_target_values.setdefault(site, target_values)
            common = _longer(first_values, target_values)
            values_vary = common is None and target_values is not None
            if values_vary or nest.spans.setdefault(site, span) != span:
                nest.varied.add(site)
            nest.inner_target_values[site] = common
        if 0 <= index < _COUNTED:
            spent = nest.inner.setdefault(site, [])
            spent += [(0.0, 0)] * (index + 1 - len(spent))
            before, already = spent[index]
            spent[index] = (before + seconds, already + count)

    def add_iterations(self, site: str, index: int, count: int) -> None:
        """Add `count` iterations of the inner loop `site`, in iteration `index` of the outermost loop."""
        if self.nests and 0 <= index < _COUNTED:
            counts = self.nests[-1].counts.setdefault(site, [])
            counts += [0] * (index + 1 - len(counts))
            counts[index] += count

    def add_deep_loop(self, path: list[str], index: int, count: int) -> None:
        """Add a loop that is inside two or more loops and has ended after `count` iterations.

        `path` holds the ids of the loops from the second outermost down to this loop; `index` is the iteration of the
        outermost loop.
        """
        if self.nests and 0 <= index < _COUNTED:
            deep = self.nests[-1].deep.setdefault(" > ".join(path), DeepLoopCounts(path))
            deep.entries += 1
            deep.counts += [0] * (index + 1 - len(deep.counts))
            deep.counts[index] += count

    def leave(self, span: tuple[int, int] | None, target_values: list[Any] | None = None) -> None:
        """Record that the outermost loop has ended.

        `span` is (start, step) of the values of its target if they are evenly spaced numbers; otherwise
        `target_values` are the values, or None if they are unknown.
        """
        if self.nests:
            self.nests[-1].left = perf_counter() - self.began
            self.nests[-1].span = span
            self.nests[-1].target_values = target_values

    def facts(self) -> MainLoop:
        """Return the timings of the main loop: the outermost loop that took the most time.

        A loop of one iteration is it only if no loop ran more iterations. If no loop ran, only `start` is set.
        """
        long = [nest for nest in self.nests if nest.iterations.pairs]
        if not long:
            return MainLoop(start=self.start)
        # a loop of one iteration cannot be divided into segments: prefer any loop with more iterations
        main = max(
            long,
            key=lambda nest: (
                sum(n for n, _ in nest.iterations.pairs) > 1,
                sum(n * each for n, each in nest.iterations.pairs),
            ),
        )
        return MainLoop(
            start=self.start,
            site=main.site,
            name=main.name,
            entered=main.entered,
            left=main.left,
            iterations=main.iterations.pairs,
            inner=main.inner,
            deep={
                names: DeepLoop(
                    site=deep.path[-1], path=deep.path, entries=deep.entries, counts=deep.counts
                )
                for names, deep in main.deep.items()
            },
            counts=main.counts,
            counted=(main.first_index, _COUNTED),
            alone=sum(nest.site == main.site for nest in long) == 1,
            span=main.span,
            held=main.target_values,
            helds=_unvaried(main.inner_target_values, main.varied),
            spans=_unvaried(main.spans, main.varied),
            varied=sorted(main.varied),
        )


def _longer(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    """Return the longer of two lists if it begins with the shorter one; return None if not, or if a list is None.

    >>> _longer(["a", "b"], ["a"]), _longer(["a"], ["b"]), _longer(["a"], None)
    (['a', 'b'], None, None)
    """
    if first is None or second is None:
        return None
    short, long = sorted((first, second), key=len)
    return long if long[: len(short)] == short else None


def _unvaried(values: dict[str, Any], varied: set[str]) -> dict[str, Any]:
    return {
        site: value for site, value in values.items() if value is not None and site not in varied
    }
