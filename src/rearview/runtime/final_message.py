"""The lines that `rearview run` prints at its end: what was recorded, what it cost, and which command to type next.

By default these lines are printed only if standard error is a terminal: output that is compared, stored or piped
holds only the program's own lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rearview.model import RunEnd
from rearview.model.wording import plural, printable, size
from rearview.store.printed_lines import read_printed_lines

MOST_NAMED = 6
"""Maximum number of columns that are named; further columns are only counted."""
_MOST_LINES = 300
"""Number of lines, the first that the program printed, in which names of columns are searched."""
_USAGE_ERROR = 2
"""Exit code of a program that refuses its arguments: argparse, click and others use it."""
_ARGUMENTS = (
    "the script refused its arguments; they come after its name: `rearview run SCRIPT ARGUMENTS`"
)


def print_closing_lines(setting: str, lines: Iterator[str]) -> None:
    """Write `lines` to standard error unless `setting` is `never`, or is `auto` and standard error is no terminal."""
    if setting == "never" or (setting == "auto" and not _is_terminal()):
        return
    with suppress(OSError, ValueError):  # the program may have closed the stream
        sys.stderr.flush()
        os.write(2, "".join(f"rearview: {line}\n" for line in lines).encode())


def _is_terminal() -> bool:
    try:
        return os.isatty(2)
    except OSError:
        return False


def closing_lines(
    run: str,
    summary: RunEnd,
    logged: set[str],
    args: int,
    folder: Path,
    *,
    code: int = 0,
    hint: str = "",
) -> Iterator[str]:
    """Yield the lines about `run`, which has ended.

    `summary` holds the measurements of the run, `logged` the names that it logged; `args` is the number of its
    hyper-parameters, `folder` the folder of the run in the store, `code` the exit code of the program; `hint` is
    advice about a failure, empty if there is none.
    """
    captured = [name for name in summary.captured.get("names", {}) if name != "step"]
    names = list(dict.fromkeys([*sorted(logged), *captured, *_printed_names(folder)]))
    loops = summary.main
    iterations = sum(count for count, _ in loops.iterations)
    if code and not iterations:
        yield f"next: {hint or (_ARGUMENTS if code == _USAGE_ERROR else _after_failure(0))}"
        return
    parts = [f"{iterations} x {printable(loops.name, line=True)}"] if iterations else []
    parts += [_columns(names), plural(args, "parameter")]
    saved = summary.costs.get("saved", 0)
    parts.append(plural(saved, "checkpoint"))
    yield f"recorded run {run}: {', '.join(parts)}"
    costs = summary.costs
    yield (
        f"it cost {costs.get('overhead', 0.0):.1%} of {costs.get('computed', 0.0):.1f} s computing "
        f"and {size(costs.get('stored', 0))} of disk"
    )
    if code:
        yield f"next: {hint or _after_failure(saved)}"
        return
    probe = "grad_norm" if "grad_norm" not in names else "my_value"
    yield (
        f"next: `rearview table` shows the columns; to get another one, add "
        f'`rearview.log("{probe}", ...)` to the script and type `rearview backfill {probe}`'
    )


def _after_failure(saved: int) -> str:
    """Return advice about what to type after a program failed that has saved `saved` checkpoints."""
    if not saved:
        return "no checkpoint was saved, so the same command starts it again from the beginning"
    return (
        "`rearview resume` continues this run from its last checkpoint; if you corrected the script, "
        "`rearview resume --source worktree`"
    )


def _columns(names: list[str]) -> str:
    if not names:
        return "no columns"
    shown = ", ".join(printable(name, line=True) for name in names[:MOST_NAMED])
    unnamed = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"columns {shown}{unnamed}"


def _printed_names(folder: Path) -> list[str]:
    """Return the column names in the first lines that the program printed, read from the run's `folder`."""
    from rearview.source.numbers_in_output import numbers_in  # needed only if lines are printed

    names: dict[str, None] = {}
    with suppress(OSError):
        for line in islice(read_printed_lines(folder), _MOST_LINES):
            names |= dict.fromkeys(numbers_in(line.text))
    return list(names)
