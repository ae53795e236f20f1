"""Choose the cores and the accelerators of this machine for a task; tasks that run at once have different *slots*.

A replay must compute with as many threads as the run did, because results depend on the number of threads. Some
libraries start one thread for each core that they may use. A process is therefore pinned to cores only if the run set
its number of threads and loaded none of these libraries.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rearview.execute.executor import Task
from rearview.store.machine_and_process import gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORE_COUNTING_LIBRARIES = frozenset(
    {"jax", "jaxlib", "mxnet", "numba", "onnxruntime", "paddle", "polars", "tensorflow"}
)
"""Libraries that start one thread for each core that they may use, and ignore OMP_NUM_THREADS."""
_CPUS = Path("/sys/devices/system/cpu")


def threads_of(variables: Mapping[str, str], loaded: Collection[str] = ()) -> int | None:
    """Return how many threads a run was set to use, or None if that is not certain.

    `variables` are the run's environment variables that set thread counts. It is not certain if they differ or lack
    OMP_NUM_THREADS, or if one of the libraries that the run `loaded` ignores them.

    >>> threads_of({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, ["torch"])
    2
    >>> threads_of({"MKL_NUM_THREADS": "2"}), threads_of({"OMP_NUM_THREADS": "2,1"})
    (None, None)
    >>> threads_of({"OMP_NUM_THREADS": "1"}, ["jax", "numpy"]) is None
    True
    """
    counts = set(variables.values())
    if (
        "OMP_NUM_THREADS" not in variables
        or len(counts) > 1
        or not CORE_COUNTING_LIBRARIES.isdisjoint(loaded)
    ):
        return None
    text = counts.pop()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def visible_accelerators(hardware: Mapping[str, Any]) -> int:
    """Return how many accelerators a run could use; `hardware` are the facts that the run recorded about its machine.

    >>> visible_accelerators({"gpus": ["A", "A"], "visible": None})
    2
    >>> visible_accelerators({"gpus": ["A"], "visible": ""})
    0
    """
    visible = hardware.get("visible")
    if visible is None:
        return len(hardware.get("gpus") or ())
    return len([device for device in str(visible).split(",") if device.strip()])


def cores_of_slot(slot: int, threads: int, cores: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the processors of the `threads` cores that belong to `slot`; two slots share cores if there are too few.

    Item i of `cores` lists the processors of core i. Return an empty set if there are fewer than `threads` cores.

    >>> cores = [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> sorted(cores_of_slot(1, 2, cores)), sorted(cores_of_slot(2, 2, cores))
    ([2, 3, 6, 7], [0, 1, 4, 5])
    >>> cores_of_slot(0, 8, cores)
    frozenset()
    """
    groups = len(cores) // threads
    if groups == 0:
        return frozenset()
    first = slot % groups * threads
    return frozenset(processor for core in cores[first : first + threads] for processor in core)


def accelerators_of_slot(slot: int, count: int, available: Sequence[str]) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES with the `count` devices of `available` that belong to `slot`.

    `count` is how many accelerators the run could use. Return None if the variable need not be set, because the
    devices are too few for two slots.

    >>> accelerators_of_slot(1, 1, "0123"), accelerators_of_slot(1, 2, "0123")
    ('1', '2,3')
    >>> accelerators_of_slot(1, 2, "01") is None
    True
    """
    groups = len(available) // count if count else 0
    if groups < 2:
        return None
    first = slot % groups * count
    return ",".join(available[first : first + count])


def cores() -> list[list[int]]:
    """Return the cores that this process may use, each as the list of its processors (hyper-threads)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    by_siblings: dict[str, list[int]] = {}
    for processor in sorted(usable):
        try:
            file = _CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list"
            siblings = file.read_text("ascii").strip()
        except OSError:
            siblings = str(processor)
        by_siblings.setdefault(siblings, []).append(processor)
    return list(by_siblings.values())


def accelerators(environment: Mapping[str, str]) -> list[str]:
    """Return the ids of the accelerators that a process with this `environment` sees.

    Return an empty list if the accelerators of this machine are of several models.
    """
    models = gpus()
    if len(set(models)) > 1:
        return []
    visible = environment.get(VISIBLE)
    if visible is None:
        return [str(k) for k in range(len(models))]
    return [device.strip() for device in visible.split(",") if device.strip()]


def environment_of(task: Task, slot: int) -> dict[str, str]:
    """Return the environment of `task`; if the run could use accelerators, it selects the accelerators of `slot`."""
    if not task.accelerators:
        return task.environment
    available = accelerators(task.environment)
    devices = accelerators_of_slot(slot, task.accelerators, available)
    return task.environment if devices is None else {**task.environment, VISIBLE: devices}


def cores_for(task: Task, slot: int) -> frozenset[int]:
    """Return the processors to which `task` is pinned on `slot`, or an empty set if the task is not pinned."""
    if task.threads is None or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    return cores_of_slot(slot, task.threads, cores())


def pin(pid: int, task: Task, slot: int) -> frozenset[int]:
    """Pin the new process `pid` to the cores of its slot, and return their processors.

    Threads that the process starts later inherit the setting. Return an empty set if it is not pinned, for example
    because it has already ended.
    """
    processors = cores_for(task, slot)
    if processors:
        try:
            os.sched_setaffinity(pid, processors)
        except OSError:
            return frozenset()
    return processors
