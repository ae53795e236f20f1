"""Options and arguments that several commands share: how they are parsed and completed in a shell."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rearview._history import History, LaunchCommand

BYTES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    unit: base**power
    for base, suffix in ((1000, "b"), (1024, "ib"))
    for power, unit in enumerate((f"{letter}{suffix}" for letter in "kmgt"), start=1)
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_RUN_PREFIX = "\0"
"""Prefix that `TakesRuns` puts before -1, -2, …, so that click's parser does not take these runs for options."""


def span(text: str) -> float:
    """Return the seconds of a span of time such as "10m"; raise BadParameter if `text` is none.

    >>> span("90"), span("10m"), span("1.5h")
    (90.0, 600.0, 5400.0)
    """
    from rearview.model.wording import parse_duration

    seconds = parse_duration(text, unit="s")
    if seconds is None:
        raise click.BadParameter(f"{text!r} is not a span of time. Write it like 90s, 10m or 1.5h.")
    return seconds


def nbytes(text: str) -> int:
    """Return the bytes of a size such as "2GiB"; raise BadParameter if `text` is none.

    >>> nbytes("500MB"), nbytes("2GiB"), nbytes("1000")
    (500000000, 2147483648, 1000)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if not match or match[2].lower() not in BYTES:
        raise click.BadParameter(f"{text!r} is not a size. Write it like 500MB, 10GB or 2GiB.")
    return int(float(match[1]) * BYTES[match[2].lower()])


_ITERATIONS = r"""[^=/]+=("[^"]*"|'[^']*'|[^=/"'])+"""


def iterations(text: str) -> str:
    """Return `text` if it has the form of iterations of loops, else raise BadParameter.

    Whether a run has these loops is checked later, by the planner.

    >>> iterations("epoch=3:5"), iterations("epoch=3/step=7"), iterations("file='a/b'")
    ('epoch=3:5', 'epoch=3/step=7', "file='a/b'")
    """
    if not re.fullmatch(f"{_ITERATIONS}(/{_ITERATIONS})*", text):
        raise click.BadParameter(
            f"{text!r} names no iterations. Write epoch=3 for one, epoch=3:5 for 3 and 4, "
            "epoch=3: for 3 and all after it, epoch=3/step=7 for one of an inner loop."
        )
    return text


def pair(text: str) -> tuple[str, str]:
    """Return (name, value) of a text NAME=VALUE; raise BadParameter for any other text.

    >>> pair("lr=0.1")
    ('lr', '0.1')
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE, like lr=0.1.")
    return name, value


def without_prefix(text: str) -> str:
    """Return an argument that names a run, without the prefix that `TakesRuns` may have added."""
    return text.removeprefix(_RUN_PREFIX)


class TakesRuns(click.Command):
    """A click command for which -1, -2, … are runs counted from the newest, not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words `args`, after adding a prefix to -1, -2, …, which are runs and not options."""
        words = [_RUN_PREFIX + word if re.fullmatch(r"-\d+", word) else word for word in args]
        try:
            return super().parse_args(ctx, words)
        except click.MissingParameter:
            raise
        except click.BadParameter as exc:
            plain = exc.message.replace(repr(_RUN_PREFIX)[1:-1], "")
            raise click.BadParameter(plain, exc.ctx, exc.param, exc.param_hint) from exc


def complete_run(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Return completions of `incomplete`: `latest`, and ids and names of runs, newest first."""
    from click.shell_completion import CompletionItem

    candidates: list[tuple[str, str]] = [("latest", "the newest run")]
    with contextlib.suppress(Exception):
        runs = reversed(open_history().runs())
        for run in runs:
            candidates += [(run.name, f"run {run.id}")] if run.name else []
            candidates.append((run.id, f"{run.status.value} {run.script}"))
    return [
        CompletionItem(run, help=text) for run, text in candidates if run.startswith(incomplete)
    ]


def complete_name(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Return the logged names that begin with `incomplete`."""
    from click.shell_completion import CompletionItem

    with contextlib.suppress(Exception):
        return [
            CompletionItem(name) for name in open_history().names() if name.startswith(incomplete)
        ]
    return []


def project_folder() -> Path:
    """Return the folder from which to look for the project: `REARVIEW_ROOT` if set, or the current folder."""
    return Path(os.environ.get("REARVIEW_ROOT") or Path.cwd())


def open_history(*, trusting: bool = False) -> History:
    """Return the history of the project that contains the current folder (or `REARVIEW_ROOT`).

    With `trusting`, the store is opened even if links in it lead out of the store, because `rearview trust` needs this.
    """
    from rearview._history import History, Project, history

    project = Project.find(project_folder()) if trusting else None
    return history() if project is None else History(project)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        command
    )


def quiet_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --quiet."""
    return click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")(
        command
    )


def run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument [RUN], the newest run by default."""
    return click.argument(
        "which", metavar="[RUN]", default="latest", type=without_prefix, shell_complete=complete_run
    )(command)


def runs_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --runs."""
    return click.option(
        "--runs",
        "which",
        metavar="RUN",
        multiple=True,
        type=without_prefix,
        shell_complete=complete_run,
        help="Only this run; may be repeated.",
    )(command)


def sure_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --sure."""
    return click.option(
        "--sure",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        help="Least certainty of a statement's place in a past version; by default the setting `propagation`.",
    )(command)


def at_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --at."""
    return click.option(
        "--at",
        type=iterations,
        metavar="LOOP=FIRST:LAST",
        help="Only these iterations: epoch=3, or epoch=3:5 for 3 and 4.",
    )(command)


def names_argument(*, required: bool) -> Decorator:
    """Give a command the argument NAMES."""
    return click.argument("names", nargs=-1, required=required, shell_complete=complete_name)


def not_started(command: LaunchCommand, exc: OSError) -> UsageError:
    """Return the error to raise if starting the program of `command` failed with `exc`."""
    return UsageError(
        f"{command.command[0]} cannot be started in {command.folder}: {exc.strerror or exc}. "
        "Check that the folder and the interpreter are there.",
        slug="no-start",
    )


def order_option(command: Any) -> Any:
    """Give a command the option --order-by."""
    return click.option(
        "--order-by",
        "order",
        multiple=True,
        metavar="KEYS",
        help="In this order: 'acc desc, epoch'.",
    )(command)
