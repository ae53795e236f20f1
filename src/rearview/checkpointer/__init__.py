"""Long jobs on batch systems: the class `Checkpointer`, its saves, the stop signals, and submit files.

The package also provides the names and import paths of the published `checkpointer` package, for programs
that use it. The class is imported on first use: it imports `multiprocessing`, which recorded programs must
not find in `sys.modules` unless they import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    """Import and return the class `Checkpointer` on first use; raise AttributeError for any other name."""
    if name == "Checkpointer":
        from rearview.checkpointer.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
