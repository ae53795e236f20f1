"""Run a notebook for the commands `run` and `resume`: check the file, run its cells, print the output of the cells."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rearview.cli.options import span
from rearview.cli.terminal import output
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview._history import LaunchCommand

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_together(*rules: tuple[bool, str]) -> None:
    """Raise a usage error for the first broken rule; each rule is (whether it is broken, text of the error)."""
    for broken, text in rules:
        if broken:
            raise click.UsageError(text, click.get_current_context())


def notebook_options(
    target: str, words: list[str], out: Path | None, timeout: float | None
) -> tuple[Path | None, float | None]:
    """Return the values of --out and --timeout, which may also be among `words`, the words after the notebook.

    Raise if `words` has anything else.
    """
    remaining = list(words)
    while remaining:
        name, _, value = remaining.pop(0).partition("=")
        if name not in {"--out", "--timeout"} or not (value or remaining):
            raise UsageError(
                f"{target} is a notebook and takes no arguments such as {name}. Set values with "
                "`rearview run --arg NAME=VALUE` and read them with rearview.arg, or use papermill.",
                slug="notebook-arguments",
            )
        value = value or remaining.pop(0)
        if name == "--out":
            out = Path(value)
        else:
            timeout = span(value)
    return out, timeout


def check_notebook(data: bytes, target: str, *, quiet: bool) -> None:
    """Raise if the notebook `data` cannot be run; unless `quiet`, warn if its cells were last run in another order."""
    from rearview.notebook.kernel_client import check

    check(data, target)
    counts = [
        count
        for cell in json.loads(data)["cells"]
        if (count := cell.get("execution_count")) is not None
    ]
    if not quiet and counts != sorted(counts):
        output.prefixed_note(
            f"the cells of {target} were last executed in another order than that of the notebook "
            f"({', '.join(map(str, counts[:12]))}); here they run from top to bottom"
        )


def run_notebook(
    command: LaunchCommand, data: bytes, target: str, out: Path | None, timeout: float | None
) -> int:
    """Run the notebook `data`, print the output of its cells, and return the exit code.

    `command` starts the kernel. If `out` is given, the notebook with its outputs is written to this file.
    """
    from rearview.notebook.kernel_client import execute, write

    streams = {"stdout": sys.stdout, "stderr": sys.stderr}

    def show(name: str, text: str) -> None:
        stream = streams.get(name, sys.stdout)
        stream.write(text)
        stream.flush()

    executed = execute(command, data, path=target, show=show, timeout=timeout)
    if out is not None:
        write(executed.content, out)
    if executed.why:
        if executed.trace:
            trace = executed.trace if sys.stderr.isatty() else _COLOURS.sub("", executed.trace)
            sys.stderr.write(f"{trace}\n")
        where = (
            f"cell {executed.cell} of {target} failed" if executed.cell else f"{target} was not run"
        )
        output.prefixed_note(f"{where}: {executed.why}{_hint(executed.raised)}")
    return executed.code


def _hint(raised: str) -> str:
    if raised == "StdinNotImplementedError":
        return " No user can answer input() here; read the value with rearview.arg instead."
    return ""


def resumed_run(command: LaunchCommand) -> str | None:
    """Return the id of the stopped run that the command of a notebook resumes, or None if it starts a new run."""
    from rearview.notebook.kernel_client import control_of

    return control_of(command).resume
