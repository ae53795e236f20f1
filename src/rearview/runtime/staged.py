"""What was copied of one checkpoint, on its way to disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rearview.model import ObjectRef
from rearview.runtime.late import Late


@dataclass(slots=True)
class Staged:
    """Changed buffers, copied: tiny ones end to end, the others one by one."""

    views: dict[str, memoryview] = field(default_factory=dict)
    tiny: dict[str, int] = field(default_factory=dict)
    gathered: memoryview = field(default_factory=lambda: memoryview(b""))
    nbytes: int = 0
    lean: dict[str, Staged] = field(default_factory=dict)
    """Buffers that hold what an earlier checkpoint, still in flight, has copied."""
    refs: Mapping[str, ObjectRef] | None = None
    """Where the copies are stored; None until they are, or if they could not be."""
    late: Late | None = None
    """Copies that are made after training has gone on."""
    curious: dict[str, int] = field(default_factory=dict)
    """Where buffers are of which nobody knows whether they could be copied late."""
    pause: float = 0.0
    """Seconds after which to look at those again."""

    def spread(self) -> None:
        """Give every tiny buffer its view; not done while training waits."""
        at = 0
        for key, size in self.tiny.items():
            self.views[key] = self.gathered[at : at + size]
            at += size
        self.tiny = {}

    def release(self) -> None:
        """Let go of the staging memory."""
        for view in (*self.views.values(), self.gathered):
            view.release()
        self.views = {}
