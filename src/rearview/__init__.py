"""Rearview: hindsight for model training.

Importing this package does nothing else: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview import media
    from rearview._history import History, history
    from rearview.background_logger.logger_proxy import background
    from rearview.checkpointer.checkpointer import Checkpointer
    from rearview.runtime.api import arg, block, checkpointing, log, loop, params
    from rearview.state.codecs.rng import capture_random_state, restore_random_state

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "History",
    "arg",
    "background",
    "block",
    "capture_random_state",
    "checkpointing",
    "history",
    "log",
    "loop",
    "media",
    "params",
    "restore_random_state",
]

_HOMES = {
    "Checkpointer": "rearview.checkpointer.checkpointer",
    "History": "rearview._history",
    "arg": "rearview.runtime.api",
    "background": "rearview.background_logger.logger_proxy",
    "block": "rearview.runtime.api",
    "capture_random_state": "rearview.state.codecs.rng",
    "checkpointing": "rearview.runtime.api",
    "history": "rearview._history",
    "log": "rearview.runtime.api",
    "loop": "rearview.runtime.api",
    "params": "rearview.runtime.api",
    "restore_random_state": "rearview.state.codecs.rng",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its room on first use."""
    if name == "media":
        return importlib.import_module("rearview.media")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rearview' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names only."""
    return [*__all__, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """Answer `%load_ext rearview` in a notebook or IPython."""
    importlib.import_module("rearview.notebook").load(shell)
