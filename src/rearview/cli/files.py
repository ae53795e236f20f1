"""The command files: what a run wrote, listed and fetched."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rearview.cli import show
from rearview.cli.formats import plain, size
from rearview.cli.options import TakesRuns, asked, json_option, one_run
from rearview.errors import UsageError


@click.command(cls=TakesRuns)
@one_run
@click.option("--get", metavar="PATH", help="Fetch this file.")
@click.option("--at", metavar="POINT", help="As it was at a checkpoint: epoch=3.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="Where to put what is fetched; its own name in this folder by default.",
)  # fmt: skip
@json_option
def files(which: str, get: str | None, at: str | None, output: Path | None, as_json: bool) -> None:
    """List the files that a run wrote, and fetch them.

    A file is fetched from the project if it is as the run left it, else from the last checkpoint that
    holds it; --at takes an earlier one. A file that is there is never overwritten.
    """
    past = asked()
    if get is not None:
        _fetch(which, get, at, output)
        return
    if at is not None or output is not None:
        raise click.UsageError("--at and --output go with --get PATH: which file is to be fetched?")
    found = past.files(which)
    if as_json:
        show.json_document(plain(found))
        return
    if not found:
        show.note("The run wrote no files that Rearview saw.")
        return
    rows = [
        [
            file.path,
            "" if file.nbytes is None else size(file.nbytes),
            "as the run left it"
            if file.in_place
            else "gone"
            if file.nbytes is None
            else "changed since",
            file.kept_at or "",
        ]
        for file in found
    ]
    show.table(["file", "size", "now", "kept at"], rows, right=[False, True, False, False])


def _fetch(which: str, path: str, at: str | None, output: Path | None) -> None:
    data, where = asked().fetch_file(which, path, at=at)
    target = output or Path(Path(path).name)
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(fd, "wb") as file:  # noqa: PTH123 - made by us alone
            file.write(data)
    except FileExistsError as exc:
        raise UsageError(
            f"{target} is there already and is not overwritten. Name another file: "
            f"`--output {target.stem}-{which}{target.suffix}`.",
            slug="file-unwritable",
        ) from exc
    except OSError as exc:
        raise UsageError(
            f"{target} cannot be written: {exc.strerror or exc}. Name a file in a folder that is "
            "there and that you may write to.",
            slug="file-unwritable",
        ) from exc
    show.out(f"wrote {size(len(data))} to {target}, {where}")
