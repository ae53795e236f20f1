"""Append records to files of JSON lines, and read them: one file per process, one line and one write per log call.

A file is named `records-<pid>-<n>.jsonl`. Its first line is a header::

    {"format":2,"run":"…","origin":"recorded","process":"…","attempt":0,"writer":{…},"c":…}

Every other line is one log call: loops (`l`), iterations (`i`), the values of the loop targets (`x`, only if they are
not plain counters), the number of the first record (`s`), the time (`t`), the names (`n`), the values (`v`), and the
checksum of the line (`c`). If the source file and line of the call are known, they are in `f` and `y`::

    {"l":["epoch"],"i":[3],"f":"train.py","y":12,"s":96,"t":1731690000.5,"n":["loss"],"v":[0.25],"c":…}

A process that has finished a file writes a last line, `{"end":true,"s":98,"c":…}`. When a write has returned, its
line survives the death of the process. A last line without a line end was never acknowledged, and is not read.
Numbers (`s`) continue from line to line, so that a damaged or missing line leaves a gap in the numbers. A line that
a full disk cut off leaves no gap, because its numbers are used again. In place of damaged lines that a repair
removed there is a line `{"lost":2,"s":98,"c":…}`. After `PART` bytes a process continues in a new file. Files of
format 1 have no checksums, and end in `{"end":true}`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from rearview.durable_files import add_check, is_intact
from rearview.errors import DamagedError, StoreError
from rearview.model import Origin, Point, Record, Step
from rearview.model.run import captured_origin
from rearview.store.create_files import open_file
from rearview.store.json_files import CHECKED, check_format
from rearview.store.machine_and_process import process_identity
from rearview.store.values_as_json import HIGH, LOW, Put, convert, encodable, restore

FORMAT = 2
PART = 64 << 20
PLAIN_END = b'{"end":true}\n'
"""Last line of a file of format 1."""
STDOUT = "$stdout"
"""Reserved name of printed lines; names that begin with `$` are not columns."""

_encode = msgspec.json.Encoder().encode


class RecordLine(msgspec.Struct):
    """One log call, as a line of a file of records; the docstring of this module explains the fields."""

    s: int
    t: float
    n: list[str]
    v: list[Any]
    l: list[str] = []  # noqa: E741
    i: list[int] = []
    x: list[Any] | None = None
    f: str | None = None
    y: int | None = None


class Header(msgspec.Struct):
    """First line of a file of records: the run, process and origin of the records."""

    format: int
    run: str
    origin: str = Origin.RECORDED.value
    """`recorded`; the id of the replay; or `$` and the logger from which the records were captured."""
    process: str = ""
    """Start time and number of the process: orders the processes of a run."""
    attempt: int = 0
    """How often the run had been resumed when this process wrote the file."""
    writer: dict[str, Any] = {}
    """Identity of the process (`store.machine_and_process.process_identity`)."""
    since: int = 0
    """Records of earlier attempts are ignored from this number on, because this attempt logged them again."""
    first: int = 0
    """Number of the first record in this file."""


class ScannedFile(NamedTuple):
    """The intact content of a file of records, and how much of the file is lost."""

    header: Header
    lines: bytes
    """The intact lines of records, each with its line end."""
    ended: bool
    """Whether the process that wrote the file has finished it."""
    lost: int = 0
    """Number of records that are damaged and cannot be read."""
    repaired: int = 0
    """Number of damaged records that an earlier repair removed from the file."""


class _Numbers(msgspec.Struct):
    """The fields of a line that show whether a line before this line is missing."""

    s: int
    n: list[msgspec.Raw] = []
    end: bool = False
    lost: int = 0


_numbers_of = msgspec.json.Decoder(_Numbers).decode
line_of = msgspec.json.Decoder(RecordLine).decode


def encode_point(point: Point) -> bytes:
    """Return the beginning of a line of records, which holds `point`; all lines at this point begin with it."""
    if not point.steps:
        return b"{"
    # in the text of a point, slashes separate the loops, so slashes in the name of a loop are escaped
    loops = [encodable(loop).replace("/", "%2F") for loop in point.loops]
    facts: dict[str, Any] = {"l": loops, "i": list(point.indices)}
    if any(step.value is not None for step in point.steps):
        facts["x"] = [convert(step.value) for step in point.steps]
    return _encode(facts)[:-1] + b","


def encode_source_line(file: str, line: int) -> bytes:
    """Return the fields of a line of records that hold the source file and line number of a log call.

    >>> encode_source_line("train.py", 12)
    b'"f":"train.py","y":12,'
    """
    return _encode({"f": encodable(file), "y": line})[1:-1] + b","


class RecordFile:
    """The file to which one process appends its records.

    The first append creates the file. A forked child appends to a file of its own.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        origin: str = Origin.RECORDED.value,
        *,
        put: Put | None = None,
        attempt: int = 0,
        since: int = 0,
        part: int = PART,
    ) -> None:
        self._folder = folder
        self._header_facts = (run, origin, attempt, since)
        self._put = put
        self._max_bytes = part
        self._lock = threading.Lock()
        self._fd = -1
        self._pid = self._born = 0
        self._room = 0
        """Bytes that may still be written to this file; then the next file is begun."""
        self._seq = 0
        self._torn = False
        self._warned_types: set[type] = set()

    @property
    def position(self) -> int:
        """Number that the next record of this process gets."""
        return self._seq if os.getpid() == self._pid else self._header_facts[3]

    def append(
        self,
        prefix: bytes,
        items: Sequence[tuple[str, Any]],
        *,
        place: bytes = b"",
        moment: float | None = None,
    ) -> None:
        """Append the records of one log call, whose names and values are `items`.

        When this returns, the records survive the death of the process. `prefix` is the point of the call (from
        `encode_point`), `place` its position in the source (from `encode_source_line`). `moment` is the time of
        the call in seconds since 1970; None means now.
        """
        if os.getpid() != self._pid:
            self._begin()
        names, values = [], []
        for name, value in items:
            kind = type(value)
            if kind is float:
                if value - value != 0.0:  # nan or infinite
                    value = {"$float": repr(value)}  # noqa: PLW2901
            elif kind is int:
                if not LOW <= value < HIGH:
                    value = convert(value)  # noqa: PLW2901
            elif kind is not bool and value is not None and kind is not str:
                value = self._convert(value)  # noqa: PLW2901
            names.append(name)
            values.append(value)
        with self._lock:
            if self._room <= 0:
                self._open()
            now = time.time() if moment is None else moment
            body = {"s": self._seq, "t": now, "n": names, "v": values}
            try:
                text = prefix + place + _encode(body)[1:-1]
            except UnicodeEncodeError:  # the text has lone surrogates
                body |= {"n": [encodable(name) for name in names], "v": [_str(v) for v in values]}
                text = prefix + place + _encode(body)[1:-1]
            self._write(
                b'%b,"c":%d}\n' % (text, crc32(text))
            )  # the line that `add_check` would return; this saves a function call
            self._seq += len(names)

    def close(self) -> None:
        """Close the file; a later append opens another file."""
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                with contextlib.suppress(StoreError):
                    self._end()
                os.close(self._fd)
                self._fd, self._room = -1, 0

    def _end(self) -> None:
        self._write(add_check(b'{"end":true,"s":%d}' % self._seq) + b"\n")

    def _convert(self, value: Any) -> Any:
        out = convert(value, self._put)
        if isinstance(out, dict) and "$repr" in out and type(value) not in self._warned_types:
            self._warned_types.add(type(value))
            name = type(value).__qualname__
            warnings.warn(
                f"A value of type {name} was logged; only its repr is kept. Log a number, text, "
                "an array, or a list or dictionary of these.",
                RuntimeWarning,
                stacklevel=4,
            )
        return out

    def _write(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        self._torn = True
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as exc:
            raise StoreError(
                f"A record of {len(line)} bytes cannot be written to {self._folder}: "
                f"{exc.strerror or exc}. Free some space; records logged before this are safe.",
                slug="records-unwritable",
            ) from exc
        self._torn = False
        self._room -= len(line)

    def _begin(self) -> None:
        """Prepare this object to write a new file: before the first append, and again in a forked child."""
        self._lock = (
            threading.Lock()
        )  # in a forked child, a thread of the parent may have held the old lock
        if self._fd >= 0:
            os.close(self._fd)
        first = self._header_facts[3] if not self._pid else 0
        self._fd, self._room, self._seq, self._torn = -1, 0, first, False
        self._pid, self._born = os.getpid(), time.time_ns()

    def _open(self) -> None:
        if self._fd >= 0:
            self._end()
            os.close(self._fd)
        self._fd, n = -1, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while self._fd < 0:
            file = self._folder / f"records-{self._pid}-{n}.jsonl"
            try:
                if not file.with_suffix(".parquet").exists():
                    self._fd = open_file(file, flags)
            except FileExistsError:
                pass
            except OSError as exc:
                raise StoreError(
                    f"{file} cannot be created: {exc.strerror or exc}. Make the folder writable "
                    "or free some space.",
                    slug="records-unwritable",
                ) from exc
            n += 1
        run, origin, attempt, since = self._header_facts
        process = f"{self._born:020d}-{self._pid}"
        header = Header(FORMAT, run, origin, process, attempt, process_identity(), since, self._seq)
        self._write(add_check(_encode(header)) + b"\n")
        self._room = self._max_bytes


def scan(file: Path) -> ScannedFile:
    """Return the intact content of a file of records; raise if the header is damaged."""
    data = file.read_bytes()
    first, ended, body = data.partition(b"\n")
    if not ended:  # the process died while it wrote the header: there are no records
        return ScannedFile(Header(FORMAT, file.parent.name), b"", ended=False)
    header = _header(first, file)
    if header.format >= CHECKED:
        return _checked(header, body)
    complete_lines = body[: body.rfind(b"\n") + 1]
    return ScannedFile(
        header, complete_lines.removesuffix(PLAIN_END), complete_lines.endswith(PLAIN_END)
    )


def has_end(tail: bytes) -> bool:
    """Return True if a file whose last bytes are `tail` was finished by its process."""
    last = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    return tail.endswith(PLAIN_END) or (last.startswith(b'{"end":true,') and bool(is_intact(last)))


def _header(first: bytes, file: Path) -> Header:
    """Return the header in the first line of a file; raise if the line is damaged."""
    why: object = "its checksum does not match"
    try:
        intact = is_intact(first)
        if intact is not False:
            facts = msgspec.json.decode(first)
            check_format(facts, FORMAT, file)
            header = msgspec.convert(facts, Header)
            if intact or header.format < CHECKED:
                return header
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError) as exc:
        why = exc
    raise DamagedError(
        f"{file} does not begin with a header line ({why}). `rearview verify` lists all damage.",
        slug="records-damaged",
    )


def without_damage(file: Path) -> bytes | None:
    """Return the bytes of a file of records without its damaged lines.

    From format 2 on, a line with the number of lost records takes their place. Return None if the header is
    damaged, because then no record can be saved.
    """
    try:
        scanned = scan(file)
    except DamagedError:
        return None
    first = file.read_bytes().partition(b"\n")[0]
    if scanned.header.format < CHECKED:
        readable_lines = [raw for raw in scanned.lines.split(b"\n") if raw and _is_readable(raw)]
        return b"\n".join([first, *readable_lines, PLAIN_END])
    out, next_number = [first], scanned.header.first
    for raw in scanned.lines.split(b"\n"):
        if raw:
            numbers = _numbers_of(raw)
            out += _loss(numbers.s, numbers.s - next_number)
            out.append(raw)
            next_number = numbers.s + len(numbers.n)
    noted_losses = sum(_numbers_of(raw).lost for raw in out[1:])
    # records lost after the last intact line
    losses_at_end = scanned.lost + scanned.repaired - noted_losses
    out += _loss(next_number + losses_at_end, losses_at_end)
    return b"\n".join(
        [*out, add_check(b'{"end":true,"s":%d}' % (next_number + losses_at_end)), b""]
    )


def _loss(number: int, lost: int) -> list[bytes]:
    """Return a list with the line that says that `lost` records before record `number` are lost; empty if 0 are lost."""
    return [add_check(b'{"lost":%d,"s":%d}' % (lost, number))] if lost > 0 else []


def _is_readable(raw: bytes) -> bool:
    """Return True if `raw`, a line of records without a checksum, can be parsed and has one value per name."""
    try:
        line = line_of(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return len(line.n) == len(line.v)


def _checked(header: Header, data: bytes) -> ScannedFile:
    """Return the lines of `data` with correct checksums, and the number of records lost in the gaps between the lines.

    `data` is the content of a file of records after its header line.
    """
    *raws, tail = data.split(b"\n")
    if is_intact(tail[:-1]):
        raws.append(tail[:-1])  # only the byte of its line end is damaged
        tail = b""
    intact_lines: list[bytes] = []
    next_number, lost, repaired, damaged_lines, ended = header.first, 0, 0, 0, False
    for raw in raws:
        if not raw:
            continue
        if not is_intact(raw):
            damaged_lines += 1
            continue
        try:
            numbers = _numbers_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged_lines += 1
            continue
        repaired += numbers.lost
        if numbers.s < next_number and intact_lines:
            # a full disk cut off the line end of the last line: `append` failed, and its records were written again
            intact_lines.pop()
        lost += max(0, numbers.s - numbers.lost - next_number)
        next_number, damaged_lines = numbers.s + len(numbers.n), 0
        ended = numbers.end
        if numbers.n:
            intact_lines.append(raw)
    # each damaged line at the end held at least one record; but if the file ends in an incomplete line,
    # the disk was full, and `append` failed for these lines
    lost += damaged_lines if not tail and not ended else 0
    lines = b"\n".join(intact_lines) + b"\n" if intact_lines else b""
    return ScannedFile(header, lines, ended, lost, repaired)


def read(file: Path) -> Iterator[Record]:
    """Yield the records of one file in the order they were logged; an incomplete last line is ignored.

    Records of a replay get the origin `unproved`: only `Runs.replays` says whether the replay was proved.
    """
    header, data, *_ = scan(file)
    origin = Origin.RECORDED if header.origin == Origin.RECORDED else Origin.UNPROVED
    origin = captured_origin(header.origin) or origin
    for raw in data.splitlines():
        if not raw:
            continue
        try:
            line = line_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # a full disk cut off this line
        shown = line.x or [None] * len(line.l)
        steps = zip(line.l, line.i, shown, strict=True)
        point = Point(tuple(Step(loop, index, restore(value)) for loop, index, value in steps))
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield Record(header.run, line.s + k, point, name, restore(value), origin, line.t)


class _Names(msgspec.Struct):
    n: list[str] = []


def count_records(folder: Path, replay: str) -> Counter[str]:
    """Return the number of records by name that the replay with the id `replay` wrote to `folder`, a run's folder.

    Parquet files are not read: the replay has just ended, so its records are still JSON lines.
    """
    counts: Counter[str] = Counter()
    for file in folder.glob("records-*.jsonl"):
        try:
            with file.open("rb") as lines:
                if msgspec.json.decode(lines.readline(), type=Header).origin != replay:
                    continue
                for line in lines:
                    with contextlib.suppress(msgspec.MsgspecError):  # a line that a kill cut off
                        counts.update(msgspec.json.decode(line, type=_Names).n)
        except (OSError, msgspec.MsgspecError):
            continue  # another process has just converted the file to Parquet, or it is damaged, which `verify` reports
    return counts


def _str(value: Any) -> Any:
    return convert(value) if isinstance(value, str) else value
