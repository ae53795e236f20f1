"""Where on this machine a segment runs: cores and accelerators of its own, by slot.

A replay must compute with as many threads as the run did, since other counts give other bits, and
libraries count the cores that they may use. So a process is pinned only if the run was told how
many threads to use, and loaded no library that counts cores all the same: then the count does not
depend on where it is pinned to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rearview.execute.executor import Task
from rearview.store.hardware import gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNTERS = frozenset(
    {"jax", "jaxlib", "mxnet", "numba", "onnxruntime", "paddle", "polars", "tensorflow"}
)
"""Libraries whose pools have as many threads as the process may use cores, whatever OMP is told."""
_CPUS = Path("/sys/devices/system/cpu")


def threads_of(told: Mapping[str, str], loaded: Collection[str] = ()) -> int | None:
    """Return how many threads a run was told to use; None if not all libraries follow that.

    `loaded` names the libraries that the run had loaded.

    >>> threads_of({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, ["torch"])
    2
    >>> threads_of({"MKL_NUM_THREADS": "2"}), threads_of({"OMP_NUM_THREADS": "2,1"})
    (None, None)
    >>> threads_of({"OMP_NUM_THREADS": "1"}, ["jax", "numpy"]) is None
    True
    """
    counts = set(told.values())
    if "OMP_NUM_THREADS" not in told or len(counts) > 1 or not COUNTERS.isdisjoint(loaded):
        return None
    text = counts.pop()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def seen_of(hardware: Mapping[str, Any]) -> int:
    """Return how many accelerators a run saw.

    >>> seen_of({"gpus": ["A", "A"], "visible": None}), seen_of({"gpus": ["A"], "visible": ""})
    (2, 0)
    """
    visible = hardware.get("visible")
    if visible is None:
        return len(hardware.get("gpus") or ())
    return len([one for one in str(visible).split(",") if one.strip()])


def share_of_cores(slot: int, threads: int, cores: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the processors for a slot: `threads` whole cores, the slot's own as long as they last.

    `cores` lists the processors of each core. Empty: there are too few of them to pin anything.

    >>> cores = [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> sorted(share_of_cores(1, 2, cores)), sorted(share_of_cores(2, 2, cores))
    ([2, 3, 6, 7], [0, 1, 4, 5])
    >>> share_of_cores(0, 8, cores)
    frozenset()
    """
    groups = len(cores) // threads
    if groups == 0:
        return frozenset()
    first = slot % groups * threads
    return frozenset(one for core in cores[first : first + threads] for one in core)


def share_of_accelerators(slot: int, seen: int, there: Sequence[str]) -> str | None:
    """Return what CUDA_VISIBLE_DEVICES is for a slot: as many as the run saw; None: as it is.

    >>> share_of_accelerators(1, 1, "0123"), share_of_accelerators(1, 2, "0123")
    ('1', '2,3')
    >>> share_of_accelerators(1, 2, "01") is None
    True
    """
    groups = len(there) // seen if seen else 0
    if groups < 2:
        return None
    first = slot % groups * seen
    return ",".join(there[first : first + seen])


def cores() -> list[list[int]]:
    """Return the cores that we may use, each as the processors it shows itself as."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found: dict[str, list[int]] = {}
    for one in sorted(mine):
        try:
            file = _CPUS / f"cpu{one}" / "topology" / "thread_siblings_list"
            key = file.read_text("ascii").strip()
        except OSError:
            key = str(one)
        found.setdefault(key, []).append(one)
    return list(found.values())


def accelerators(environment: Mapping[str, str]) -> list[str]:
    """Return the accelerators that can be shared out: those that are visible, if all are alike."""
    models = gpus()
    if len(set(models)) > 1:
        return []
    visible = environment.get(VISIBLE)
    if visible is None:
        return [str(k) for k in range(len(models))]
    return [one.strip() for one in visible.split(",") if one.strip()]


def environment_of(task: Task, slot: int) -> dict[str, str]:
    """Return the environment of a task on a slot: with the slot's accelerators, if it has any."""
    if not task.accelerators:
        return task.environment
    there = accelerators(task.environment)
    mine = share_of_accelerators(slot, task.accelerators, there)
    return task.environment if mine is None else {**task.environment, VISIBLE: mine}


def cores_for(task: Task, slot: int) -> frozenset[int]:
    """Return the processors that a task on a slot is pinned to; empty: it is not."""
    if task.threads is None or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    return share_of_cores(slot, task.threads, cores())


def pin(pid: int, task: Task, slot: int) -> frozenset[int]:
    """Pin a process that has just been started to the cores of its slot; returns them.

    Its threads do not exist yet, and inherit it. One that is gone already is left alone.
    """
    mine = cores_for(task, slot)
    if mine:
        try:
            os.sched_setaffinity(pid, mine)
        except OSError:
            return frozenset()
    return mine
