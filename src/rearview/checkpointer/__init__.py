"""Long jobs on batch systems: the class `Checkpointer`, its saves, signals and job files.

The package also provides the names and import paths of the published `checkpointer` package, for programs
that use it. The class is loaded on first use: a recorded program must not find `multiprocessing` imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    """Load the class on first use."""
    if name == "Checkpointer":
        from rearview.checkpointer.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
