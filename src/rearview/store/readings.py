"""The times that a run was told: `clock.bin` in its folder, eight bytes each.

`clock.sum` beside it says of how many bytes of it the CRC is known, and what it is. It is written after
them, so a run that was killed may have some readings more.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from rearview.errors import DamagedError
from rearview.store.project import publish

FILE = "clock.bin"
_SUM = "clock.sum"


def read_clock(file: Path) -> bytes:
    """Return the readings in a file, none if there is none; an error if they are damaged."""
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
            f"{file} does not hold the times that the run was told: its checksum does not match. "
            "The run cannot be replayed exactly; `rearview verify` says what else is damaged.",
            slug="damaged",
        )
    return data


def write_sum(file: Path, size: int, check: int) -> None:
    """Keep the CRC of the first `size` bytes of `file`."""
    publish(file.with_name(_SUM), b"%d %d\n" % (size, check), durable=False)


def remove_clock(file: Path) -> None:
    """Remove the readings and their CRC."""
    file.unlink(missing_ok=True)
    file.with_name(_SUM).unlink(missing_ok=True)
