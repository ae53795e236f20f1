"""What the interpreter tells of files, handed on to those who listen.

Python calls an audit hook at every `id()` and every look at a frame, which libraries make by the
thousand. So there is one hook, and it looks up who listens before it does anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Listener = Callable[[str, tuple[Any, ...]], None]
_listeners: dict[str, list[Listener]] = {}


def listen(listener: Listener, *events: str) -> None:
    """Call `listener` with the name and the arguments of these events, for as long as we live."""
    if not _listeners:
        sys.addaudithook(_hear)
    for event in events:
        _listeners.setdefault(event, []).append(listener)


def _hear(
    event: str,
    args: tuple[Any, ...],
    listening: Callable[[str], list[Listener] | None] = _listeners.get,
) -> None:
    found = listening(event)
    if found is not None:
        for listener in found:
            listener(event, args)
