"""The papermill engine `rearview`: papermill executes a parameterized notebook, and Rearview records it.

    papermill --engine rearview study.ipynb out.ipynb -p rate 0.1

The notebook that papermill writes, with the parameters in it, is the source of the run.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.log import logger

from rearview._history.run_command import start_run
from rearview.errors import UsageError
from rearview.execute.launch_command import LaunchCommand
from rearview.model.process_messages import VARIABLE
from rearview.notebook.kernel_client import (
    KernelProcess,
    check,
    control_of,
    keep,
    reuse_failure,
    reuse_is_wanted,
    reuse_lines,
    with_reuse,
)


class RearviewEngine(NBClientEngine):  # type: ignore[misc]
    """Runs cells in a kernel that records them."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
        """Execute a notebook as papermill's own engine does, in a recording kernel."""
        reuse = reuse_is_wanted(os.environ)
        executed = cls._execute(nb_man, kernel_name, reuse=reuse, **options)
        problem = reuse_failure(nb_man.nb) if reuse else ""
        if problem:
            logger.info("rearview: running all cells, because %s.", problem)
            nb_man.notebook_start()
            executed = cls._execute(nb_man, kernel_name, reuse=False, **options)
        return executed

    @classmethod
    def _execute(cls, nb_man: Any, kernel_name: str, *, reuse: bool, **options: Any) -> Any:
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
                kernel.forward(
                    signal.SIGTERM
                )  # it still runs if it did not answer the request to end
                kernel.ended()
        if command.run_folder is not None:
            keep(command.run_folder, nb_man.nb)
            for line in reuse_lines(command.run_folder):
                logger.info(line)
        return executed


def _start(nb_man: Any, *, reuse: bool) -> LaunchCommand:
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
    placed = replace(command, environment=env, folder=Path(os.getcwd()))  # noqa: PTH109
    return with_reuse(placed, reuse=reuse)
