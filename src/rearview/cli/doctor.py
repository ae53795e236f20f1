"""The command doctor: what on this machine or in this project is not well, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import click

from rearview.cli import show
from rearview.cli.options import here, json_option


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    level: str
    """`"ok"`, `"warn"` or `"fail"`."""
    name: str
    what: str
    remedy: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine and this project, and say what to do.

    Every line is ok, warn (works, but slower or with less certainty) or fail (does not work).
    Exit code 1 if anything fails.
    """
    from rearview.cli.checks import examine

    found = examine(here())
    if as_json:
        show.json_document(found)
    else:
        for check in found:
            show.checked(check.level, check.name, check.what, check.remedy)
    return 1 if any(check.level == "fail" for check in found) else 0
