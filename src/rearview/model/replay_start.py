"""What a replay was started to compute: stored with it, so that later backfills see what it covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

LoopLimit = tuple[str, float | str | None, float | str | None, bool]
"""Requested iterations of one loop: its name, first and last value, and whether it is a single iteration."""


class ReplayStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one replay computes, as it was announced when it started."""

    version: str = ""
    """The source that it runs, with the probes in it."""
    names: tuple[str, ...] = ()
    """Names that its probes log; empty if it only proves the run."""
    operator: str = ""
    """How it replays the main loop (`model.plan.Operator`)."""
    covered: tuple[int, int] | None = None
    """First and last iteration of the main loop that it runs, the last not included; None if unknown."""
    only: tuple[int, ...] | None = None
    """The iterations of the main loop that it runs, if they are not all that it covers."""
    predicted: float = 0.0
    """Seconds that it was expected to take."""
    head: bool | None = None
    """Whether it logs what is before the main loop; None in old stores."""
    tail: bool | None = None
    """Whether it logs what is after the main loop; None in old stores."""
    limits: tuple[LoopLimit, ...] = ()
    """Requested iterations of other loops than the main one."""
    same: dict[str, str] = {}
    """By name: a digest of how it is logged; equal digests log the same values."""
    inner: dict[str, dict[int, tuple[int, int]]] = {}
    """By loop and by iteration of the main loop: the iterations of an inner loop that it covers."""
    crew: str = ""
    """Id of the backfill that started it."""
    redoes: str | None = None
    """Id of the first try that it replaces; None if there was none, and in old stores."""
    because: str = ""
    """Why the first try was not enough."""


def read_replay_start(values: Mapping[str, Any]) -> ReplayStart:
    """Return what a replay was started to compute, from its stored fields; unknown fields are left out.

    A replay with a field that cannot be read fills no names: its values then are computed again, because
    they may be fewer than its other fields say.

    >>> read_replay_start({"names": ["w"], "covered": [0, 3], "color": "red"}).names
    ('w',)
    >>> read_replay_start({"names": ["w"], "limits": "all"}).names
    ()
    """
    try:
        return msgspec.convert(values, ReplayStart, str_keys=True)
    except msgspec.ValidationError:
        version, redoes = values.get("version"), values.get("redoes")
        return ReplayStart(
            version=version if isinstance(version, str) else "",
            redoes=redoes if isinstance(redoes, str) else None,
        )
