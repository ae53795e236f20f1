"""The papermill engine `rearview`: papermill executes a parameterized notebook, and Rearview records it.

    papermill --engine rearview study.ipynb out.ipynb -p rate 0.1

The notebook that papermill writes, which contains the parameters, is the source of the run.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rearview._history.start_and_resume_commands import start_run
from rearview.errors import UsageError
from rearview.execute.program_command import LaunchCommand
from rearview.model.process_messages import VARIABLE
from rearview.notebook.kernel_client import (
    KernelProcess,
    check,
    control_of,
    reuse_failure,
    reuse_is_allowed,
    reuse_lines,
    store_executed,
    with_reuse,
)


class RearviewEngine:
    """An engine of papermill that runs notebooks in a kernel that records them.

    The methods import papermill only when they are called, because papermill loads this class during its own import.
    """

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Execute the notebook `nb` like papermill's own engine, in a kernel that records it."""
        return _engine().execute_notebook(nb, kernel_name, **options)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Return the name of the notebook's kernel, like papermill's own engine."""
        return str(_engine().nb_kernel_name(nb, name))

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Return the language of the notebook, like papermill's own engine."""
        return str(_engine().nb_language(nb, language))


@functools.cache
def _engine() -> Any:
    """Return a subclass of papermill's own engine that executes notebooks in a kernel that records them."""
    from papermill.engines import NBClientEngine

    methods = {"execute_managed_notebook": staticmethod(_execute_or_start_again)}
    return type("RecordingEngine", (NBClientEngine,), methods)


def _execute_or_start_again(nb_man: Any, kernel_name: str, **options: Any) -> Any:
    """Execute the notebook of `nb_man`, reusing stored results; if they cannot be used, execute all cells."""
    from papermill.log import logger

    reuse = reuse_is_allowed(os.environ)
    executed = _execute(nb_man, kernel_name, reuse=reuse, **options)
    problem = reuse_failure(nb_man.nb) if reuse else ""
    if problem:
        logger.info("rearview: running all cells, because %s.", problem)
        nb_man.notebook_start()
        executed = _execute(nb_man, kernel_name, reuse=False, **options)
    return executed


def _execute(nb_man: Any, kernel_name: str, *, reuse: bool, **options: Any) -> Any:
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.log import logger

    command = _start(nb_man, reuse=reuse)
    client_options = {"stdout_file", "stderr_file", "log_output"}
    timeout = options.get("execution_timeout") or options.get("timeout")
    with tempfile.TemporaryDirectory(prefix="rearview-") as folder:
        kernel = KernelProcess.start(command, Path(folder))
        client = PapermillNotebookClient(
            nb_man,
            km=kernel.manager(),
            kernel_name=kernel_name,
            timeout=timeout,
            startup_timeout=options.get("start_timeout", 60),
            **{name: value for name, value in options.items() if name in client_options},
        )
        client.owns_km = True
        try:
            executed = client.execute()
        finally:
            # end the kernel if it has not obeyed the client's request to end
            kernel.forward(signal.SIGTERM)
            kernel.wait()
    if command.run_folder is not None:
        store_executed(command.run_folder, nb_man.nb)
        for line in reuse_lines(command.run_folder):
            logger.info(line)
    return executed


def _start(nb_man: Any, *, reuse: bool) -> LaunchCommand:
    """Save the notebook of `nb_man` to papermill's output file; return the command that starts its kernel.

    Raise UsageError if papermill writes no local file.
    """
    out = nb_man.output_path
    if not out or "://" in str(out) or str(out) == "-":
        raise UsageError(
            f"papermill writes the notebook to {out or 'nowhere'}; the engine `rearview` records the "
            "file that it writes. Give a path inside the project.",
            slug="no-script",
        )
    nb_man.save()
    file = Path(out).absolute()
    check(file.read_bytes(), str(out))
    command = start_run(str(file), ())
    control = msgspec.structs.replace(control_of(command), target=str(file))
    env = {**command.environment, VARIABLE: msgspec.json.encode(control).decode()}
    located_command = replace(command, environment=env, folder=Path(os.getcwd()))  # noqa: PTH109
    return with_reuse(located_command, reuse=reuse)
