"""How to start a process that runs the user's program with a session around it."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rearview.config import Settings
from rearview.model.segment import LAUNCHER, VARIABLE, Control
from rearview.store.project import FOLDER

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for huge pages: training is faster with them, and so is watching memory."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command line, its environment and its folder; whoever has it may start it."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    kept: Path | None = None
    """Folder of the run, where it is known before the start."""


def start(
    control: Control, env: Mapping[str, str], folder: Path, *, hash_seed: str | None = None
) -> Start:
    """Return how to start what `control` says, in a given environment.

    Python's hashes must be the same when the run is replayed, so their seed is chosen here: one
    for each project, so that replays of its runs can share a start.
    """
    seed = hash_seed or env.get("PYTHONHASHSEED")
    if not seed or seed == "random":
        seed = str(zlib.crc32(os.fsencode(control.root)))
    # -P: our own imports must not be shadowed by files in the user's folder
    command = (sys.executable, "-P", "-m", LAUNCHER)
    lent = _lent(control, env)
    told = msgspec.json.encode(msgspec.structs.replace(control, lent=lent)).decode()
    return Start(command, {**env, **lent, VARIABLE: told, "PYTHONHASHSEED": seed}, folder)


def _lent(control: Control, env: Mapping[str, str]) -> dict[str, str]:
    """Return what the process is started with and the program is not to see."""
    settings = Settings.read(Path(control.root) / FOLDER, env).changed(control.settings)
    # what the user has chosen for the C library stays
    return HUGE_PAGES if settings.huge_pages and not HUGE_PAGES.keys() & env.keys() else {}
