"""What saving has cost."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving has cost so far, or one save of it. Seconds and bytes."""

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    blocking: float = 0.0
    """Seconds that training waited, also for checkpoints that were skipped or failed."""
    background: float = 0.0
    """Seconds from the hand-over of a checkpoint to its being durable."""
    cpu: float = 0.0
    """Processor seconds that background threads used."""
    logical: int = 0
    """Bytes of state in the checkpoints."""
    copied: int = 0
    """Bytes copied, most of them while training waited."""
    stored: int = 0
    """Bytes written to disk."""

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )
