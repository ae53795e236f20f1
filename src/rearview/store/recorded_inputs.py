"""Store the inputs of a run: environment variables, times, the inputs of its cells, and hashes of its input files.

`clock.bin` holds the times that the program read from clocks, eight bytes each. `clock.sum` holds a number of bytes
and their CRC. It is written after the times, so that after a kill `clock.bin` may have a few times more than
`clock.sum` covers. `environment.jsonl` holds the environment variables, `cells.jsonl` the inputs of cells.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from rearview.errors import DamagedError
from rearview.model import Run
from rearview.model.cell_lineage import CellLineage
from rearview.model.program_environment_variables import Environment
from rearview.store.create_files import publish
from rearview.store.json_files import append_line, read_lines

ENVIRONMENT_FILE = "environment.jsonl"
CELLS_FILE = "cells.jsonl"
FORMAT = 2
"""Format of the lines in `ENVIRONMENT_FILE` and `CELLS_FILE`; from format 2 on, every line has a checksum."""


def append_environment(folder: Path, part: Environment) -> None:
    """Append `part`, environment variables that a run has read, to the file in `folder`, the folder of the run."""
    line: dict[str, Any] = {"format": FORMAT}
    line |= {"values": dict(part.values)} if part.values else {}
    line |= {"secrets": dict(part.secrets)} if part.secrets else {}
    line |= {"whole": True} if part.whole else {}
    append_line(folder / ENVIRONMENT_FILE, line)


def read_environment(folder: Path) -> Environment | None:
    """Return the environment variables that a run read, or None if an old Rearview did not record them.

    If a variable was recorded several times, its first value is returned: the later values were read after the
    run was resumed.
    """
    values: dict[str, str | None] = {}
    secrets: dict[str, bool] = {}
    was_read_whole = has_lines = False
    for line in read_lines(folder / ENVIRONMENT_FILE, FORMAT):
        has_lines = True
        for name, value in line.get("values", {}).items():
            values.setdefault(name, value)
        for name, was_set in line.get("secrets", {}).items():
            secrets.setdefault(name, bool(was_set))
        was_read_whole = was_read_whole or bool(line.get("whole"))
    return Environment(values, secrets, was_read_whole) if has_lines else None


def environment_of(
    run: Run, folder: Path, current: Mapping[str, str], *, resumes: bool = False
) -> dict[str, str]:
    """Return the environment variables with which to replay `run` or, with `resumes`, to resume it.

    `folder` is the folder of the run, and `current` are the environment variables of this process. If an old run
    did not record its environment, only the variables that set numbers of threads are restored.
    """
    recorded = read_environment(folder)
    if recorded is None:
        return {**current, **run.facts.threads}
    return recorded.restored(current, resumes=resumes)


def environment_differences(
    folder: Path, current: Mapping[str, str], *, resumes: bool = False
) -> list[str]:
    """Return a phrase for each environment variable that `environment_of` does not restore to its value in the run."""
    recorded = read_environment(folder)
    return [] if recorded is None else recorded.differences(current, resumes=resumes)


CLOCK_FILE = "clock.bin"
_SUM = "clock.sum"


def read_clock(file: Path) -> bytes:
    """Return the bytes of `clock.bin`, or b"" if the file does not exist; raise if the bytes are damaged."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return b""
    try:
        size, check = map(int, (file.with_name(_SUM)).read_bytes().split())
    except FileNotFoundError:  # the run was recorded before `clock.sum` was introduced
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


def write_clock_check(file: Path, size: int, check: int) -> None:
    """Write `check`, the CRC of the first `size` bytes of `clock.bin`, into `clock.sum`."""
    publish(file.with_name(_SUM), b"%d %d\n" % (size, check), durable=False)


def remove_clock(file: Path) -> None:
    """Remove `file`, the `clock.bin` of a run, and the `clock.sum` next to it."""
    file.unlink(missing_ok=True)
    file.with_name(_SUM).unlink(missing_ok=True)


def append_cell(folder: Path, cell: CellLineage) -> None:
    """Append the inputs and results of one cell to `cells.jsonl` in `folder`, the folder of the run."""
    line: dict[str, Any] = {"format": FORMAT, "cell": cell.cell, "code": cell.code}
    line |= {"events": [list(event) for event in cell.events], "lineage": cell.lineage}
    line |= {"seconds": cell.seconds, "size": cell.size, "before": cell.before}
    line |= {"variables": dict(cell.variables)}
    append_line(folder / CELLS_FILE, line)


def read_cells(folder: Path) -> list[CellLineage]:
    """Return the inputs and results of the cells of the run in `folder`; an empty list if the run has no cells."""
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


HASHED_WHOLE = 16 << 20
"""Input files of at most this many bytes are hashed completely; of larger files, the size, beginning and end."""


def fingerprint(path: Path) -> tuple[int, int, str]:
    """Return (size, modification time in nanoseconds, hash of the content) of an input file."""
    import xxhash

    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a device or a pipe may have no end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        if status.st_size <= HASHED_WHOLE:
            digest.update(file.read())
        else:
            digest.update(status.st_size.to_bytes(8, "little"))
            digest.update(file.read(HASHED_WHOLE // 2))
            file.seek(-HASHED_WHOLE // 2, 2)
            digest.update(file.read())
    return status.st_size, status.st_mtime_ns, digest.hexdigest()
