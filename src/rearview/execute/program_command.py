"""The command line and the environment of a process that runs the user's program, recorded or replayed.

`rearview run`, `rearview resume` and every replay start the launcher script of `runtime`. One environment variable
contains a message (`model.process_messages.Control`) that says which program the launcher runs, and how.
"""

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
from rearview.model.process_messages import LAUNCHER, VARIABLE, Control
from rearview.model.secrets import fill_secrets
from rearview.store.project import FOLDER

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variable that makes the C library request huge pages: training and finding changed memory are faster."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A command line with its environment and working folder, ready to be started."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    run_folder: Path | None = None
    """Folder in which the run is stored, or None if it is not known before the start."""
    notes: tuple[str, ...] = ()
    """Sentences for the user to read before the start, such as on changed environment variables."""


def program_command(
    control: Control, env: Mapping[str, str], folder: Path, *, hash_seed: str | None = None
) -> LaunchCommand:
    """Return the command that runs the program that `control` describes, in the environment `env`.

    `folder` is its working folder. The seed of Python's hashes is set, because hashes must be equal in run and replay:
    it is `hash_seed`, or PYTHONHASHSEED in `env`, or by default one seed for all runs of the project, so that their
    replays can be forked from one process.
    """
    seed = hash_seed or env.get("PYTHONHASHSEED")
    if not seed or seed == "random":
        seed = str(zlib.crc32(os.fsencode(control.root)))
    lent = _lent_variables(control, env)
    message = msgspec.json.encode(msgspec.structs.replace(control, lent=lent)).decode()
    environment = {**env, **lent, VARIABLE: message, "PYTHONHASHSEED": seed}
    return LaunchCommand((sys.executable, LAUNCHER), environment, folder)


def _lent_variables(control: Control, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that only Rearview needs in the process; the program does not see them."""
    settings = Settings.read(Path(control.root) / FOLDER, env).changed(control.settings)
    # do not overwrite the variable if the user has set it
    return HUGE_PAGES if settings.huge_pages and not HUGE_PAGES.keys() & env.keys() else {}


def arguments_of(run: Run, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command-line arguments of `run`. Secrets are not stored: they are read from the variables `env`.

    Raise if a variable with a secret is missing.
    """
    words, missing_variables = fill_secrets(run.argv, env)
    if missing_variables:
        raise _secret_needed(run, missing_variables)
    return words


def arg_values_of(run: Run, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return name -> value of each `--arg NAME=VALUE` of `run`. Secrets are read from the variables `env`.

    Raise if a variable with a secret is missing.
    """
    names = list(run.facts.given)
    words, missing_variables = fill_secrets(
        [f"{name}={run.facts.given[name]}" for name in names], env
    )
    if missing_variables:
        raise _secret_needed(run, missing_variables)
    return dict(zip(names, (word.partition("=")[2] for word in words), strict=True))


def _secret_needed(run: Run, variables: Sequence[str]) -> UsageError:
    return UsageError(
        f"Run {run.id} was started with a secret that is not stored: "
        f"{' '.join((run.script, *run.argv))}. Give it again in the environment, as "
        f"{', '.join(variables)}.",
        slug="secret-needed",
    )
