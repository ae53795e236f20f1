"""Run a probe without leaving a trace in the program: chance goes on as if it had not run."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rearview.runtime.state import randomness
from rearview.source.shield import SHIELD


def install(session: Any) -> None:
    """Make the context manager that shielded code names known to it."""

    @contextmanager
    def shield() -> Iterator[None]:
        before = randomness.capture()
        session.probing += 1
        try:
            yield
        finally:
            session.probing -= 1
            randomness.restore(before)

    builtins.__dict__[SHIELD] = shield
