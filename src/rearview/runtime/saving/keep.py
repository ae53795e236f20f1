"""Which saves to keep: the last ones and the best ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rearview.errors import UsageError
from rearview.runtime.saving.saves import Save


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the `last` newest saves and the `best` ones by metric; the newest always stays."""

    last: int = 2
    best: int = 0
    mode: str = "min"
    """`"min"` or `"max"`: which metric is the better."""

    def __post_init__(self) -> None:
        """Refuse what would keep nothing or means nothing."""
        if self.last < 1 or self.best < 0 or self.mode not in {"min", "max"}:
            raise UsageError(
                f"keep_last={self.last}, keep_best={self.best}, best={self.mode!r} cannot be. "
                "keep_last is at least 1, keep_best at least 0, best is 'min' or 'max'.",
                slug="checkpointer-keep",
            )

    def choose(self, saves: Iterable[Save]) -> frozenset[str]:
        """Return the ids to keep.

        >>> saves = [Save(str(n), n, 0.0, n, m, ()) for n, m in enumerate([0.1, 0.5, 0.3, 0.4])]
        >>> sorted(Keep(last=1, best=1).choose(saves))
        ['0', '3']
        """
        newest = sorted(saves, key=lambda save: save.order, reverse=True)
        return self.choose_best(newest) | {save.id for save in newest[: self.last]}

    def choose_best(self, saves: Iterable[Save]) -> frozenset[str]:
        """Return the ids of the best saves by metric."""
        newest = sorted(saves, key=lambda save: save.order, reverse=True)
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (save for save in newest if save.metric is not None and save.metric == save.metric),
            key=lambda save: sign * (save.metric or 0.0),
        )
        return frozenset(save.id for save in ranked[: self.best])
