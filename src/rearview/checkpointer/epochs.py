"""An interval that counts epochs, as the published callbacks do."""

from __future__ import annotations

from typing import Any


class Epochs:
    """Due at the first step of every `every`-th epoch.

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
        self._waiting = False

    @classmethod
    def of(cls, every: Any) -> Any:
        """Return the interval for `every`; a number counts epochs."""
        return cls(every) if type(every) is int and every > 0 else every

    def begin(self, epoch: int) -> None:
        """Note that an epoch begins."""
        self._waiting = epoch % self.every == 0

    def due(self, pace: Any) -> bool:
        """Return True if a save is due now."""
        due, self._waiting = self._waiting, False
        return due
