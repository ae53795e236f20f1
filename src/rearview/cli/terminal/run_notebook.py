"""Execute a notebook for `run` and `resume`: check it, send its cells to a kernel, print their output."""

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
    """Raise a usage error with the text of the first rule that the options of a command break."""
    for broken, text in rules:
        if broken:
            raise click.UsageError(text, click.get_current_context())


def notebook_options(
    target: str, words: list[str], out: Path | None, timeout: float | None
) -> tuple[Path | None, float | None]:
    """Return --out and --timeout, which may come after the notebook's name; other words are refused."""
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
    """Raise if a notebook cannot be run; print warnings about it."""
    from rearview.notebook.kernel_client import check

    check(data, target)
    counts = [
        count
        for cell in json.loads(data)["cells"]
        if (count := cell.get("execution_count")) is not None
    ]
    if not quiet and counts != sorted(counts):
        output.said(
            f"the cells of {target} were last executed in another order than that of the notebook "
            f"({', '.join(map(str, counts[:12]))}); here they run from top to bottom"
        )


def run_notebook(
    command: LaunchCommand, data: bytes, target: str, out: Path | None, timeout: float | None
) -> int:
    """Run a notebook, print the output of its cells, and return the exit code."""
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
        output.said(f"{where}: {executed.why}{_hint(executed.raised)}")
    return executed.code


def _hint(raised: str) -> str:
    if raised == "StdinNotImplementedError":
        return " No user can answer input() here; read the value with rearview.arg instead."
    return ""


def resumed_run(command: LaunchCommand) -> str | None:
    """Return the stopped run that a preemptible notebook resumes, or None."""
    from rearview.notebook.kernel_client import control_of

    return control_of(command).resume
