"""Parse the options of a Checkpointer: where saves go, and how often to save.

`destination` opens the mirror that the parameters of the published package name. `interval` parses how often to
save: every so many steps or seconds, or as often as a share of the computing time allows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rearview.checkpointer.mirrored_saves import Mirror
from rearview.checkpointer.save_folder import SaveFolder
from rearview.errors import UsageError
from rearview.model.wording import parse_duration
from rearview.remote.base import Remote, scheme_of
from rearview.remote.htcondor_folder import JobAd
from rearview.remote.open import open_remote

MODES = (None, "None", "shared", "xrootd", "htcondor", "manual")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the saves of a Checkpointer go in addition to the local folder.

    If `mirror` is set, saves are sent to the mirror. If `condor` is set, HTCondor transfers the saves of this job.
    If both are None, saves stay in the local folder.
    """

    mirror: Mirror | None = None
    foreign_key: str | None = None
    """Key at the remote under which the published package stores its checkpoint file, or None if there is none."""
    condor: JobAd | None = None


def destination(
    folder: SaveFolder,
    *,
    mode: str | None,
    target: str | os.PathLike[str] | Remote | None,
    server: str | None,
    callback: Callable[..., Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Destination:
    """Return where the saves in `folder` are sent, by the parameters `checkpoint_transfer_…` of a Checkpointer.

    If `target` is the path or URL of a file `t`, saves go to `t.saves/…`. If it is a folder (an existing folder,
    or a text that ends in a slash), saves go to `FILE.saves/…` in that folder; `FILE` is the name of the
    checkpoint file.
    """
    if mode not in MODES:
        raise UsageError(
            f"checkpoint_transfer_mode={mode!r} is unknown. Choose one of: "
            f"{', '.join(str(mode) for mode in MODES)}; a URL as checkpoint_transfer_target needs "
            "none.",
            slug="checkpointer-mode",
        )
    if mode == "None" or (mode is None and target is None):
        return Destination()
    if mode == "htcondor":
        return Destination(condor=_job(folder))
    if mode == "manual":
        at = target if isinstance(target, str | os.PathLike) else folder.file.name
        remote = open_remote(None, "manual", copy=callback, at=at, kwargs=kwargs, **options)
        return Destination(Mirror(remote, "saves"))
    if target is None:
        raise UsageError(
            f"checkpoint_transfer_mode={mode!r} needs checkpoint_transfer_target, the place to send to.",
            slug="checkpointer-target",
        )
    if not isinstance(target, str | os.PathLike):
        return Destination(Mirror(open_remote(target, **options), f"{folder.file.name}.saves"))
    text = os.fspath(target)
    if mode == "xrootd" and not scheme_of(text):
        text = f"{_server(server)}//{text.lstrip('/')}"
    base, name = _split(text, folder.file.name)
    remote = open_remote(base, mode if mode == "shared" else None, **options)
    return Destination(Mirror(remote, f"{name}.saves"), foreign_key=name)


def _split(text: str, file: str) -> tuple[str, str]:
    """Split the target `text` into (folder or URL to open, file name); if `text` is a folder, the name is `file`.

    >>> _split("s3://bucket/runs/", "model.pt"), _split("/data/run.pt", "model.pt")
    (('s3://bucket/runs', 'model.pt'), ('/data', 'run.pt'))
    """
    plain = not scheme_of(text)
    if text.endswith("/") or (plain and Path(text).is_dir()):
        return text.rstrip("/") or "/", file
    if plain:
        text = os.path.abspath(text)  # noqa: PTH100  resolve() would follow a link
    base, _, name = text.rpartition("/")
    if base.endswith(":/") or (not plain and base.count("/") < 3 and base.endswith("/")):
        return text, file  # a URL without a path, such as s3://bucket
    return base or "/", name


def _server(server: str | None) -> str:
    if not server:
        raise UsageError(
            "xrootd mode needs xrootd_server_name, for instance root://eos.example.org:1094.",
            slug="checkpointer-server",
        )
    name = server if scheme_of(server) else f"root://{server}"
    return name.rstrip("/")


def _job(folder: SaveFolder) -> JobAd:
    ad = JobAd.read()
    if ad is None:
        raise UsageError(
            "checkpoint_transfer_mode='htcondor' outside HTCondor: _CONDOR_SCRATCH_DIR and "
            "_CONDOR_JOB_AD are not set. Leave the mode out, or submit the job.",
            slug="condor-none",
        )
    if not ad.covers(folder.folder) and not ad.covers(folder.file):
        names = ", ".join((*ad.files, folder.folder.name))
        raise UsageError(
            f"HTCondor would not transfer {folder.file}: transfer_checkpoint_files is "
            f"{', '.join(ad.files) or 'not set'}. Write into the submit file: "
            f"transfer_checkpoint_files = {names} and checkpoint_exit_code = 85, and let "
            "local_checkpoint_file be in the job's folder.",
            slug="condor-files",
        )
    return ad


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps and seconds of a Checkpointer so far, from which an `Interval` decides whether a save is due."""

    steps: int
    """Number of steps before the current step."""
    since: float
    """Seconds since the last save, or since the Checkpointer was made if there was no save."""
    computing: float
    """Seconds since the Checkpointer was made, without the time spent on saving."""
    saving: float = 0.0
    """Seconds spent on saving since the Checkpointer was made."""
    cost: float = 0.0
    """Seconds that the next save is expected to take: those of the last save, or 0 if there was no save."""


class Stopwatch:
    """Measures how long a Checkpointer has computed and saved; `pace` returns the results."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = self._last_saved = clock()
        self._saving = self._cost = 0.0

    @property
    def age(self) -> float:
        """Seconds since this stopwatch was made."""
        return self._clock() - self._started

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time inside this block as saving."""
        begun = self._clock()
        try:
            yield
        finally:
            self._last_saved = self._clock()
            self._cost = self._last_saved - begun
            self._saving += self._cost

    def pace(self, steps: int) -> Pace:
        """Return the `Pace` at this moment: the measured seconds, and `steps` as the number of steps."""
        now = self._clock()
        computing = now - self._started - self._saving
        return Pace(steps, now - self._last_saved, computing, self._saving, self._cost)


class Interval(Protocol):
    """Decides at each step whether a save is due."""

    def due(self, pace: Pace) -> bool:
        """Return True if a save is due at the current step, according to the counts and times in `pace`."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Interval that saves at step 0 and then at each step whose number is a multiple of `every`; never if 0.

    >>> [Steps(3).due(Pace(steps, 0.0, 0.0)) for steps in range(5)]
    [True, False, False, True, False]
    """

    every: int

    def due(self, pace: Pace) -> bool:
        """Return True if `pace.steps` is a multiple of `every`."""
        return self.every > 0 and pace.steps % self.every == 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Interval that saves once `every` seconds have passed since the last save."""

    every: float

    def due(self, pace: Pace) -> bool:
        """Return True if `every` seconds have passed since the last save."""
        return pace.since >= self.every


@dataclass(frozen=True, slots=True)
class Share:
    """Interval that saves if all saves and the next one take at most the fraction `share` of the computing time.

    >>> Share(0.05).due(Pace(9, 50.0, computing=100.0, saving=4.0, cost=4.0))
    False
    """

    share: float

    def due(self, pace: Pace) -> bool:
        """Return True if all saves and the next one take at most `share` of the computing time so far."""
        return pace.saving + pace.cost <= self.share * pace.computing


def interval(every: int | str | timedelta | Interval | None) -> Interval:
    """Return the interval for `every`: a number of steps, a time or share such as "10min" or "2%", or None (never).

    >>> interval("10min"), interval("2%"), interval(7)
    (Seconds(every=600.0), Share(share=0.02), Steps(every=7))
    """
    if every is None:
        return Steps(0)
    if isinstance(every, int) and not isinstance(every, bool) and every >= 0:
        return Steps(every)
    if isinstance(every, timedelta):
        return Seconds(every.total_seconds())
    if isinstance(every, str):
        if match := re.fullmatch(r"\s*([0-9.]+)\s*%\s*", every):
            return Share(float(match[1]) / 100)
        return Seconds(seconds(every))
    if not isinstance(every, int | float) and hasattr(every, "due"):
        return every
    raise _unknown(every)


def seconds(text: str | float | timedelta) -> float:
    """Return the number of seconds that `text` means: "90s", "10 min", "1h", a number of seconds or a timedelta."""
    if isinstance(text, timedelta):
        return text.total_seconds()
    if isinstance(text, int | float):
        return float(text)
    duration = parse_duration(text)
    if duration is None:
        raise _unknown(text)
    return duration


def _unknown(every: object) -> UsageError:
    return UsageError(
        f"{every!r} is not an interval. Give a number of steps (10), a time ('10min', '90s', a "
        "timedelta), a share of the computing time ('2%'), or None to save on signals only.",
        slug="checkpointer-interval",
    )


class Epochs:
    """Interval that saves at the first step of every epoch whose number is a multiple of `every`.

    >>> epochs = Epochs(2)
    >>> for epoch in range(3):
    ...     epochs.begin(epoch)
    ...     epochs.due(None), epochs.due(None)
    (True, False)
    (False, False)
    (True, False)
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._due = False

    @classmethod
    def of(cls, every: Any) -> Any:
        """Return `Epochs(every)` if `every` is a positive integer, else `every` unchanged."""
        return cls(every) if type(every) is int and every > 0 else every

    def begin(self, epoch: int) -> None:
        """Remember that epoch number `epoch` begins, and whether it gets a save."""
        self._due = epoch % self.every == 0

    def due(self, pace: Any) -> bool:
        """Return True in the first call after `begin` if that epoch gets a save, else False."""
        due, self._due = self._due, False
        return due
