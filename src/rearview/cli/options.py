"""What options mean: spans of time, sizes, iterations, names that complete themselves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rearview.history import History

SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
BYTES = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9, "T": 10**12, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MARK = "\0"
_AT = re.compile(r"[^=/:\s]+=(-?\d+(:-?\d*)?|:\d+|:)")


class Span(click.ParamType):
    """A span of time, in seconds: 90, 90s, 10m, 1.5h.

    >>> Span().convert("10m", None, None)
    600.0
    """

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        found = _AMOUNT.fullmatch(str(value).strip())
        if not found or found[2].lower() not in SECONDS:
            self.fail(f"{value!r} is not a span of time. Write it like 90s, 10m or 1.5h.", param, ctx)
        return float(found[1]) * SECONDS[found[2].lower()]


class Size(click.ParamType):
    """A number of bytes: 500MB, 10GB, 2GiB.

    >>> Size().convert("10GB", None, None)
    10000000000
    """

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return bytes."""
        if isinstance(value, int):
            return value
        found = _AMOUNT.fullmatch(str(value).strip())
        if not found or found[2].upper() not in BYTES:
            self.fail(f"{value!r} is not a size. Write it like 500MB, 10GB or 2GiB.", param, ctx)
        return int(float(found[1]) * BYTES[found[2].upper()])


class At(click.ParamType):
    """Iterations of a loop: epoch=3, or epoch=3:5 for 3 and 4."""

    name = "loop=first:last"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Return the text if it can be read as iterations."""
        if not _AT.fullmatch(str(value)):
            self.fail(
                f"{value!r} names no iterations. Write epoch=3 for one, epoch=3:5 for 3 and 4, "
                "epoch=3: for 3 and all after it.",
                param,
                ctx,
            )
        return str(value)


class Pair(click.ParamType):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        """Return both sides."""
        if isinstance(value, tuple):
            return value
        left, equals, right = str(value).partition("=")
        if not equals or not left:
            self.fail(f"{value!r} is not of the form NAME=VALUE, like lr=0.1.", param, ctx)
        return left, right


class RunId(click.ParamType):
    """A run: its id or a part of it, `latest`, or -1, -2, … from the end."""

    name = "run"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:  # noqa: ARG002 - click's signature
        """Return the text that means a run."""
        return str(value).removeprefix(_MARK)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:  # noqa: ARG002
        """Return the runs that go on from what is typed."""
        from click.shell_completion import CompletionItem

        found: list[tuple[str, str]] = [("latest", "the newest run")]
        with contextlib.suppress(Exception):
            found += [(run.id, f"{run.status.value} {run.script}") for run in asked().runs()]
        return [
            CompletionItem(run, help=text) for run, text in found if run.startswith(incomplete)
        ]


class Name(click.ParamType):
    """The name of a logged value."""

    name = "name"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:  # noqa: ARG002
        """Return the known names that go on from what is typed."""
        from click.shell_completion import CompletionItem

        with contextlib.suppress(Exception):
            return [CompletionItem(name) for name in asked().names() if name.startswith(incomplete)]
        return []


class TakesRuns(click.Command):
    """A command for which -1, -2, … are runs counted from the end, not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, with such runs marked so that the parser lets them pass."""
        words = [_MARK + word if re.fullmatch(r"-\d+", word) else word for word in args]
        return super().parse_args(ctx, words)


def asked() -> History:
    """Return the history of the project that the current folder lies in."""
    from rearview.history import history

    return history()


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)
