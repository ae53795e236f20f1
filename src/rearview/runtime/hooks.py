"""What a replay exchanges in the interpreter: chance, the clock, the functions for files.

Libraries take hold of such functions when they are imported (`from time import time`), so the
exchange comes first, and what is exchanged is pointed to a run when it is known which. In a fresh
process that is at once; in one that segments are forked from, after the fork.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.runtime import clocks, entropy, outside
from rearview.runtime.outputs import for_native_paths
from rearview.runtime.printing import watch_streams
from rearview.runtime.view import View

_NOWHERE = "\0"
"""No path is below it."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What was exchanged."""

    view: View
    chance: entropy.Chance | None
    clock: clocks.Clock | None

    @classmethod
    def install(cls, *, watched: bool = True) -> Hooks:
        """Exchange what a replay exchanges; a program that names its loops itself keeps its clock."""
        chance = clock = None
        if watched:
            chance = entropy.install(b"")
            clock = clocks.Clock(Path(os.devnull), replays=True, rule=1)
            clock.install()
            watch_streams()
        view = View(_NOWHERE, _NOWHERE)
        outside.install(view)
        for_native_paths(lambda path, mode: view.real(path, outside.use_of(mode)))
        return cls(view, chance, clock)

    def point(self, view: View, key: bytes, readings: Path, rule: int) -> dict[str, list[Any]]:
        """Speak of one run from now on: see `view`, draw by `key`, tell the time of its `readings`.

        `rule` says which readings those are.

        Returns how far chance and clock are, by root: that is part of the state.
        """
        found: dict[str, list[Any]] = {}
        if self.chance is not None:
            self.chance.follow(key)
            found[entropy.ROOT] = self.chance.stream.place
        if self.clock is not None:
            self.clock.follow(readings, rule)
            found[clocks.ROOT] = self.clock.place
        self.view.become(view)
        return found


@dataclass(frozen=True, slots=True)
class Shared:
    """What a segment has from the process that it was forked from."""

    hooks: Hooks
    seconds: float
    """How much longer it would have taken to begin without that."""
