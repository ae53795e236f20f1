"""How to start a process that runs the user's program with a session around it."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rearview.config import Settings
from rearview.errors import UsageError
from rearview.model import Run
from rearview.model.secrets import filled
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
    notes: tuple[str, ...] = ()
    """What is to be known before it starts: variables that differ, which source runs."""


def arguments(run: Run, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command line of a run, with the secrets that were not stored put in from `env`."""
    words, lacking = filled(run.argv, env)
    if lacking:
        raise _secret_needed(run, lacking)
    return words


def given_of(run: Run, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what was given with `--arg`, with the secrets that were not stored put in from `env`."""
    names = list(run.facts.get("given", {}))
    words, lacking = filled([f"{name}={run.facts['given'][name]}" for name in names], env)
    if lacking:
        raise _secret_needed(run, lacking)
    return dict(zip(names, (word.partition("=")[2] for word in words), strict=True))


def _secret_needed(run: Run, lacking: Sequence[str]) -> UsageError:
    return UsageError(
        f"Run {run.id} was started with a secret that is not stored: "
        f"{' '.join((run.script, *run.argv))}. Give it again in the environment, as "
        f"{', '.join(lacking)}.",
        slug="secret-needed",
    )


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
    command = (sys.executable, LAUNCHER)
    lent = _lent(control, env)
    told = msgspec.json.encode(msgspec.structs.replace(control, lent=lent)).decode()
    return Start(command, {**env, **lent, VARIABLE: told, "PYTHONHASHSEED": seed}, folder)


def _lent(control: Control, env: Mapping[str, str]) -> dict[str, str]:
    """Return what the process is started with and the program is not to see."""
    settings = Settings.read(Path(control.root) / FOLDER, env).changed(control.settings)
    # what the user has chosen for the C library stays
    return HUGE_PAGES if settings.huge_pages and not HUGE_PAGES.keys() & env.keys() else {}
