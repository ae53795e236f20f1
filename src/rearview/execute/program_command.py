"""The command line and the environment of a process that runs the user's program, recorded or replayed.

`rearview run`, `rearview resume` and every replay start their process this way: the launcher script of
`runtime`, with one environment variable (`model.process_messages.Control`) that describes the program.
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
"""Variable that makes the C library ask for huge pages, which make training and watching memory faster."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A command line with its environment and working folder, ready to be started."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    run_folder: Path | None = None
    """Folder of the run, or None if it is not known before the start."""
    notes: tuple[str, ...] = ()
    """Sentences for the user to read before the start, such as on changed environment variables."""


def program_command(
    control: Control, env: Mapping[str, str], folder: Path, *, hash_seed: str | None = None
) -> LaunchCommand:
    """Return the command that runs the program that `control` describes, in the environment `env`.

    The command sets the seed of Python's hashes, because they must not change from run to replay. All runs of a
    project get one seed, so that their replays can be forked from one process.
    """
    seed = hash_seed or env.get("PYTHONHASHSEED")
    if not seed or seed == "random":
        seed = str(zlib.crc32(os.fsencode(control.root)))
    lent = _lent_variables(control, env)
    message = msgspec.json.encode(msgspec.structs.replace(control, lent=lent)).decode()
    environment = {**env, **lent, VARIABLE: message, "PYTHONHASHSEED": seed}
    return LaunchCommand((sys.executable, LAUNCHER), environment, folder)


def _lent_variables(control: Control, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that the process needs at its start and that are removed before the program sees them."""
    settings = Settings.read(Path(control.root) / FOLDER, env).changed(control.settings)
    # the user's own setting of the C library counts
    return HUGE_PAGES if settings.huge_pages and not HUGE_PAGES.keys() & env.keys() else {}


def arguments_of(run: Run, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command-line arguments of a run; secrets that were not stored come from `env`."""
    words, missing_variables = fill_secrets(run.argv, env)
    if missing_variables:
        raise _secret_needed(run, missing_variables)
    return words


def arg_values_of(run: Run, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values of `--arg NAME=VALUE`; secrets that were not stored come from `env`."""
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
