"""Executor `rearview` of jupyter-cache: notebooks are recorded, and cells that are as before are not run.

jcache project execute --executor rearview
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import perf_counter
from typing import Any

from jupyter_cache.executors.basic import ExecutionWorkerLocalSerial, JupyterExecutorLocalSerial
from jupyter_cache.executors.utils import ExecutionResult

from rearview._history.begin_run import start_run
from rearview.errors import RearviewError, UsageError
from rearview.model.run import is_notebook
from rearview.notebook.front import (
    Executed,
    execute,
    given_up,
    reuse_is_wanted,
    reuse_lines,
    reusing,
)


class CellFailedError(RearviewError):
    """A cell of a notebook failed: jupyter-cache shows it and keeps nothing."""


class RearviewWorker(ExecutionWorkerLocalSerial):  # type: ignore[misc]
    """Executes one notebook of a project of jupyter-cache, in its own folder."""

    def execute(self, project_nb: Any, data: Any) -> ExecutionResult:
        """Execute a notebook in a recording kernel; its outputs are put into `project_nb`."""
        file = Path(project_nb.uri)
        if not is_notebook(str(file)):
            raise UsageError(
                f"{file} is no .ipynb file, and only those are recorded. Use another executor for it.",
                slug="no-notebook",
            )
        begin = perf_counter()
        reuse = reuse_is_wanted(os.environ)
        done = _executed(file, data.timeout, self.logger, reuse=reuse)
        problem = given_up(done.content) if reuse else ""
        if problem:
            self.log_info(f"Running all cells of {file}, because {problem}.")
            done = _executed(file, data.timeout, self.logger, reuse=False)
        project_nb.nb.cells = done.content.cells
        project_nb.nb.metadata = done.content.metadata
        error = None
        if done.why and not data.allow_errors:
            error = CellFailedError(f"In [{done.cell}]: {done.why}", slug="cell-failed")
        return ExecutionResult(
            project_nb.nb,
            str(file.parent),
            perf_counter() - begin,
            error,
            done.trace or done.why if error is not None else None,
        )


def _executed(
    file: Path, timeout: float | None, logger: logging.Logger, *, reuse: bool
) -> Executed:
    begun = reusing(start_run(str(file), ()), reuse=reuse)
    done = execute(begun, file.read_bytes(), path=str(file), timeout=timeout)
    for line in reuse_lines(begun.run_folder) if begun.run_folder is not None else ():
        logger.info(line)
    return done


class RearviewExecutor(JupyterExecutorLocalSerial):  # type: ignore[misc]
    """Executes the notebooks of a project one after another."""

    _EXECUTION_WORKER = RearviewWorker
