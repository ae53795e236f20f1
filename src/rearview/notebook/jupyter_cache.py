"""Executor `rearview` of jupyter-cache: it records notebooks, and reuses the results of unchanged cells.

jcache project execute --executor rearview

Jupyter Book does not use executors of jupyter-cache: its extension MyST-NB executes notebooks itself and only stores
them in the cache. For Jupyter Book, this module is also an extension of Sphinx (`setup`), which makes MyST-NB execute
notebooks through Rearview.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import perf_counter
from typing import Any

from jupyter_cache.executors.basic import ExecutionWorkerLocalSerial, JupyterExecutorLocalSerial
from jupyter_cache.executors.utils import ExecutionResult

from rearview._history.start_and_resume_commands import start_run
from rearview.errors import RearviewError, UsageError
from rearview.model.run import is_notebook
from rearview.notebook.kernel_client import (
    Executed,
    execute,
    reuse_failure,
    reuse_is_allowed,
    reuse_lines,
    with_reuse,
)
from rearview.store.project import FOLDER


class CellFailedError(RearviewError):
    """Given to jupyter-cache if a cell failed: jupyter-cache shows this error and stores no outputs."""


class RearviewWorker(ExecutionWorkerLocalSerial):  # type: ignore[misc]
    """Executes one notebook of a project of jupyter-cache, in the notebook's folder."""

    def execute(self, project_nb: Any, data: Any) -> ExecutionResult:
        """Execute a notebook in a kernel that records it, and put the outputs into `project_nb`."""
        file = Path(project_nb.uri)
        if not is_notebook(str(file)):
            raise UsageError(
                f"{file} is no .ipynb file, and only those are recorded. Use another executor for it.",
                slug="no-notebook",
            )
        return _result(
            file, project_nb.nb, data.timeout, self.logger, allow_errors=data.allow_errors
        )


def _result(
    file: Path, notebook: Any, timeout: float | None, logger: logging.Logger, *, allow_errors: bool
) -> ExecutionResult:
    """Execute the notebook `file` in a kernel that records it, put the outputs into `notebook`, and return the result.

    If stored results of cells cannot be used, execute all cells.
    """
    begin = perf_counter()
    reuse = reuse_is_allowed(os.environ)
    executed = _executed(file, timeout, logger, reuse=reuse)
    problem = reuse_failure(executed.content) if reuse else ""
    if problem:
        logger.info("Running all cells of %s, because %s.", file, problem)
        executed = _executed(file, timeout, logger, reuse=False)
    notebook.cells = executed.content.cells
    notebook.metadata = executed.content.metadata
    error = None
    if executed.why and not allow_errors:
        error = CellFailedError(f"In [{executed.cell}]: {executed.why}", slug="cell-failed")
    trace = executed.trace or executed.why if error is not None else None
    return ExecutionResult(notebook, str(file.parent), perf_counter() - begin, error, trace)


def _executed(
    file: Path, timeout: float | None, logger: logging.Logger, *, reuse: bool
) -> Executed:
    command = with_reuse(start_run(str(file), ()), reuse=reuse)
    executed = execute(command, file.read_bytes(), path=str(file), timeout=timeout)
    for line in reuse_lines(command.run_folder) if command.run_folder is not None else ():
        logger.info(line)
    return executed


class RearviewExecutor(JupyterExecutorLocalSerial):  # type: ignore[misc]
    """Executes the notebooks of a project of jupyter-cache one after another."""

    _EXECUTION_WORKER = RearviewWorker


_building: list[Path] = []
"""At most one path: the notebook that MyST-NB is about to execute and that Rearview executes in its place."""


def setup(app: Any) -> dict[str, Any]:
    """Set up the Sphinx extension: MyST-NB's execution mode `cache` executes notebooks through Rearview.

    Sphinx calls this function if `rearview.notebook.jupyter_cache` is in `extra_extensions` in the `_config.yml` of
    a Jupyter Book, or in `extensions` in a `conf.py`.
    """
    from myst_nb.core.execute import cache
    from sphinx.util.logging import getLogger

    # executed notebooks in Rearview's folder must not become pages of the book
    app.connect("config-inited", lambda _, config: config.exclude_patterns.append(FOLDER))
    client, execute_plainly = cache.NotebookClientCache, cache.single_nb_execution
    start_plainly = client.start_client

    def start_client(self: Any) -> None:
        _building[:] = [] if self.path is None or self.nb_config.execution_in_temp else [self.path]
        start_plainly(self)

    def execute_one(notebook: Any, **options: Any) -> ExecutionResult:
        if not _building or not is_notebook(str(_building[0])):
            return execute_plainly(notebook, **options)
        file, errors = Path(_building[0]).resolve(), bool(options.get("allow_errors"))
        timeout, logger = options.get("timeout"), getLogger(__name__)
        return _result(file, notebook, timeout, logger.logger, allow_errors=errors)

    if getattr(client, "of_rearview", False):
        return {"parallel_read_safe": True}
    client.of_rearview, client.start_client = True, start_client
    cache.single_nb_execution = execute_one
    return {"parallel_read_safe": True}
