"""Write TensorBoard event files for the values that probes log to a writer in a replay.

The program's own writers are silent in a replay. The values that a probe logs with `add_scalar`,
`add_histogram` and so on are written by a second writer of the same library, to the store's folder
`tensorboard/<run>/<replay>`. The folder gets that name when the replay ends without a difference.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rearview.store.project import EVENT_FILES

METHODS = frozenset(
    {
        *("add_scalar", "add_scalars", "add_histogram", "add_histogram_raw", "add_image"),
        *("add_images", "add_figure", "add_text", "add_audio", "add_video", "add_pr_curve"),
    }
)
"""Methods of a writer whose calls are written again."""
REAL = "_rearview_file_writer"
"""Attribute of a writer's module that holds the real file writer class while it is silenced."""
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class EventFiles:
    """The event files of one replay."""

    def __init__(self, store: Path, run: str, replay: str) -> None:
        self._folder = store / EVENT_FILES / run / replay
        self._draft = self._folder.with_name(f".{replay}")
        self._writer: Any = None
        self._failed = False

    def add(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write a probe's call of a writer method; a failure ends the files, not the replay."""
        module = next((sys.modules[name] for name in _WRITERS if name in sys.modules), None)
        if method not in METHODS or self._failed or module is None or not hasattr(module, REAL):
            return
        silent = vars(module)["FileWriter"]
        vars(module)["FileWriter"] = vars(module)[REAL]
        try:
            getattr(self._opened(module), method)(*args, **kwargs)
        except Exception:
            self._failed = True  # the values are still in the table
        finally:
            vars(module)["FileWriter"] = silent

    def _opened(self, module: ModuleType) -> Any:
        if self._writer is None:
            self._writer = module.SummaryWriter(str(self._draft))
        return self._writer

    def close(self, *, good: bool) -> None:
        """End the files; those of a replay that was not good are removed."""
        if self._writer is None:
            return
        try:
            self._writer.close()
            if good and not self._failed:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._draft.rename(self._folder)
        except Exception:
            self._failed = True
        shutil.rmtree(self._draft, ignore_errors=True)
