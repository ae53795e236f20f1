"""Saves that fail: said once for each kind, and tried less and less often while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rearview.errors import RearviewError

_LONGEST = 64
"""Boundaries that are let pass at most."""


class Setbacks:
    """What went wrong with saving, of late."""

    def __init__(self, warn: Callable[[str], None] | None) -> None:
        self.count = 0
        """Saves that failed since the last that did not."""
        self.pause = 0
        """Boundaries that are still to be let pass."""
        self._warn = warn or logging.getLogger("rearview").warning
        self._warned: set[str] = set()

    def note(self, exc: Exception, name: str) -> None:
        """Take note of a save that failed."""
        self.count += 1
        self.pause = min(_LONGEST, 2 ** (self.count - 1)) - 1
        kind = exc.slug if isinstance(exc, RearviewError) else type(exc).__name__
        self.say(kind, f"Checkpoint {name} was not saved; training goes on. {exc}")

    def over(self) -> None:
        """Take note of a save that went well."""
        self.count = 0
        self._warned.clear()

    def say(self, kind: str, message: str) -> None:
        """Warn of something, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            try:
                self._warn(message)
            except Exception:
                logging.getLogger("rearview").exception("the warning itself failed: %s", message)
