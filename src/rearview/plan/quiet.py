"""Planning over a long history without Python's search for garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Let Python not look for cycles meanwhile.

    A plan over a thousand runs makes a million tuples and no cycle. Looking for some in all that
    there is takes a third of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
