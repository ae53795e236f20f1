"""Store the inputs of a run: environment variables, times (`clock.bin`), and the inputs of each cell (`cells.jsonl`).

`clock.bin` holds the times that the program read, eight bytes each. `clock.sum` next to it holds a number of
bytes and their CRC; it is written after them, so a run that was killed may have a few more readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from rearview.errors import DamagedError
from rearview.model import Run
from rearview.model.cell_lineage import CellLineage
from rearview.model.environment_variables import Environment
from rearview.store.files import append_line, publish, read_lines

ENVIRONMENT_FILE = "environment.jsonl"
CELLS_FILE = "cells.jsonl"
FORMAT = 2
"""Every line has a checksum, as in all files of facts from format 2 on."""


def append_environment(folder: Path, part: Environment) -> None:
    """Add environment variables that a run has read to its folder."""
    line: dict[str, Any] = {"format": FORMAT}
    line |= {"values": dict(part.values)} if part.values else {}
    line |= {"secrets": dict(part.secrets)} if part.secrets else {}
    line |= {"whole": True} if part.whole else {}
    append_line(folder / ENVIRONMENT_FILE, line)


def read_environment(folder: Path) -> Environment | None:
    """Return the environment that a run read; None if an old run did not record it.

    The first value of a variable counts: later ones were read after a resume.
    """
    values: dict[str, str | None] = {}
    secrets: dict[str, bool] = {}
    whole = has_lines = False
    for line in read_lines(folder / ENVIRONMENT_FILE, FORMAT):
        has_lines = True
        for name, value in line.get("values", {}).items():
            values.setdefault(name, value)
        for name, was_set in line.get("secrets", {}).items():
            secrets.setdefault(name, bool(was_set))
        whole = whole or bool(line.get("whole"))
    return Environment(values, secrets, whole) if has_lines else None


def environment_of(
    run: Run, folder: Path, current: Mapping[str, str], *, resumes: bool = False
) -> dict[str, str]:
    """Return the environment in which to replay or resume a run.

    An old run that did not record its environment has recorded only the thread counts.
    """
    recorded = read_environment(folder)
    if recorded is None:
        return {**current, **run.facts.threads}
    return recorded.restored(current, resumes=resumes)


def environment_differences(
    folder: Path, current: Mapping[str, str], *, resumes: bool = False
) -> list[str]:
    """Return a phrase for each variable that differs from the run's and is not restored."""
    recorded = read_environment(folder)
    return [] if recorded is None else recorded.differences(current, resumes=resumes)


CLOCK_FILE = "clock.bin"
_SUM = "clock.sum"


def read_clock(file: Path) -> bytes:
    """Return the readings in a file, none if it does not exist; raise if they are damaged."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return b""
    try:
        size, check = map(int, (file.with_name(_SUM)).read_bytes().split())
    except FileNotFoundError:  # written before there were checksums
        return data
    except ValueError:
        size, check = -1, 0
    if not 0 <= size <= len(data) or crc32(data[:size]) != check:
        raise DamagedError(
            f"The clock readings in {file} are damaged: the checksum does not match. "
            "The run cannot be replayed exactly; `rearview verify` lists what else is damaged.",
            slug="damaged",
        )
    return data


def write_sum(file: Path, size: int, check: int) -> None:
    """Write the CRC of the first `size` bytes of `file` into its checksum file."""
    publish(file.with_name(_SUM), b"%d %d\n" % (size, check), durable=False)


def remove_clock(file: Path) -> None:
    """Remove the readings and their CRC."""
    file.unlink(missing_ok=True)
    file.with_name(_SUM).unlink(missing_ok=True)


def append_cell(folder: Path, cell: CellLineage) -> None:
    """Add the inputs and results of one cell to the folder of its run."""
    line: dict[str, Any] = {"format": FORMAT, "cell": cell.cell, "code": cell.code}
    line |= {"events": [list(event) for event in cell.events], "lineage": cell.lineage}
    line |= {"seconds": cell.seconds, "size": cell.size, "before": cell.before}
    line |= {"variables": dict(cell.variables)}
    append_line(folder / CELLS_FILE, line)


def read_cells(folder: Path) -> list[CellLineage]:
    """Return the inputs and results of the cells of a run; empty if it has no cells."""
    if not (folder / CELLS_FILE).is_file():
        return []
    return [
        CellLineage(
            *(line["cell"], line["code"], tuple(map(tuple, line["events"]))),
            *(line["lineage"], line["seconds"], line["size"]),
            before=line.get("before", 0),
            variables=line.get("variables", {}),
        )
        for line in read_lines(folder / CELLS_FILE, FORMAT)
    ]
