"""Go on with a mended source: refuse as soon as a changed line is about to run too early.

Until the checkpoint is reached, the program only sets up what the run had set up. A line that was changed
and runs before that is part of what the run did before the checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from rearview.errors import RearviewError
from rearview.source.mend import Mend


@dataclass
class Mending:
    """Watches the way to the checkpoint that a run goes on from with a mended source."""

    mend: Mend
    root: str
    point: str
    """Where the checkpoint lies."""
    leave: Callable[[str], NoReturn]
    """Ends the process, saying why."""
    _files: dict[str, str] = field(default_factory=dict)
    _stopped: bool = False

    def start(self) -> None:
        """Watch the lines that the program runs, until `stop`."""
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop watching: the checkpoint is reached, and all that runs from now on is after it."""
        self._stopped = True  # a boundary puts the tracer back that it found when it began
        sys.settrace(None)

    def skipped(self, loop: str) -> None:
        """Refuse if a loop that ended before the checkpoint would have run a changed line."""
        for path, line in self.mend.run_in(loop):
            self._refuse(path, line)

    def failed(self, exc: RearviewError) -> NoReturn:
        """Refuse: the state does not fit the program as it is now."""
        self.leave(f"the state saved at {self.point} does not fit the mended source: {exc}")

    def _call(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            sys.settrace(None)
            return None
        name = frame.f_code.co_filename
        path = self._files.get(name)
        if path is None:
            path = self._files[name] = os.path.relpath(os.path.realpath(name), self.root)
        return self._line if event == "call" and self.mend.lines.get(path) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self._stopped:
            return None
        path = self._files[frame.f_code.co_filename]
        if event == "line" and frame.f_lineno in self.mend.lines[path]:
            self._refuse(path, frame.f_lineno)
        return self._line

    def _refuse(self, path: str, line: int) -> NoReturn:
        done = self.mend.lines[path][line]
        self.leave(
            f"line {line} of {path} {done} and runs before the checkpoint at {self.point}, so the "
            "state saved there was computed without it"
        )
