"""What a machine is made of, as far as its speed goes; read in well under a millisecond."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_FIRST = 4096
"""Bytes of /proc/cpuinfo that hold the first core: the kernel asks each core for the rest."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the models of the accelerators of this machine, as the driver lists them."""
    try:
        folders = sorted(_GPUS.iterdir())
    except OSError:
        return []
    return [_field(folder / "information", "Model") or "unknown" for folder in folders]


def hardware() -> dict[str, Any]:
    """Return what decides how fast this machine computes, as runs keep it.

    `visible` is what CUDA_VISIBLE_DEVICES lets the program see, None without a bound.
    """
    return {
        "cpu": _field(_CPUINFO, "model name") or platform.machine(),
        "cores": cores(),
        "gpus": gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def make_of(facts: Mapping[str, Any]) -> str:
    """Return a name for all machines that are made of the same.

    The host's name is no part of it: a container has a new one each time, and the nodes of a
    cluster that are alike need to be measured once.

    >>> a = {"cpu": "x", "cores": 2, "gpus": [], "visible": None}
    >>> make_of(a) == make_of({**a, "visible": "0"}), make_of(a) == make_of({**a, "cores": 4})
    (True, False)
    """
    made = f"{facts.get('cpu')}|{facts.get('cores')}|{sorted(facts.get('gpus') or [])}"
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def _field(file: Path, name: str) -> str:
    try:
        with file.open("rb", buffering=0) as source:
            text = source.read(_FIRST).decode("utf-8", "replace")
    except OSError:
        return ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
