"""Append records to JSON lines, one file per process and one write per log call, and read them.

A file is named `records-<pid>-<n>.jsonl`. Its first line is a header::

    {"format":2,"run":"…","origin":"recorded","process":"…","attempt":0,"writer":{…},"c":…}

Every other line is one log call: loops (`l`), iterations (`i`) and, if the loop targets are not plain
counters, their values (`x`); the number of its first record (`s`), the time (`t`), the names (`n`) and
values (`v`), and the checksum (`c`) of all that. Where the source file (`f`) and line (`y`) of the call are
known, they are there too::

    {"l":["epoch"],"i":[3],"f":"train.py","y":12,"s":96,"t":1731690000.5,"n":["loss"],"v":[0.25],"c":…}

A process that has finished a file writes a last line, `{"end":true,"s":98,"c":…}`. A line survives the death
of its process once the write has returned; a last line without a line end was never acknowledged and is not
read. Numbers (`s`) continue from line to line, so a line that is damaged or missing leaves a gap; a line that
a full disk cut off leaves none, because its numbers are used again. `{"lost":2,"s":98,"c":…}` replaces
damaged lines that a repair removed. After `PART` bytes a process continues in a new file. Format 1 has no
checksums, and ends in `{"end":true}`.
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
from rearview.store.machine import process_identity
from rearview.store.values_as_json import HIGH, LOW, Put, convert, encodable, restore

FORMAT = 2
PART = 64 << 20
PLAIN_END = b'{"end":true}\n'
"""Last line of a file of format 1."""
STDOUT = "$stdout"
"""Reserved name of printed lines; names that begin with `$` are not columns."""

_encode = msgspec.json.Encoder().encode


class RecordLine(msgspec.Struct):
    """One log call, as in the file."""

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
    """First line of a file: run, process and origin of its records."""

    format: int
    run: str
    origin: str = Origin.RECORDED.value
    """`recorded`, or the id of the replay."""
    process: str = ""
    """Start time and number of the process: orders the processes of a run."""
    attempt: int = 0
    """How often the run had been resumed before this process."""
    writer: dict[str, Any] = {}
    """Identity of the process (`store.machine.process_identity`)."""
    since: int = 0
    """Records of earlier attempts from this number on were logged again here and do not count."""
    first: int = 0
    """Number of the first record in this file."""


class Scanned(NamedTuple):
    """The intact content of a file of records."""

    header: Header
    lines: bytes
    """Its whole lines of records."""
    ended: bool
    """Whether its process has finished it."""
    lost: int = 0
    """Records that are damaged and cannot be read."""
    repaired: int = 0
    """Records that a repair removed."""


class _Numbers(msgspec.Struct):
    """The fields of a line that show whether a line before it is missing."""

    s: int
    n: list[msgspec.Raw] = []
    end: bool = False
    lost: int = 0


_numbers_of = msgspec.json.Decoder(_Numbers).decode
line_of = msgspec.json.Decoder(RecordLine).decode


def encode_point(point: Point) -> bytes:
    """Return the beginning of every line at `point`; the caller may reuse it."""
    if not point.steps:
        return b"{"
    # a slash separates loops wherever points are written as text
    loops = [encodable(loop).replace("/", "%2F") for loop in point.loops]
    facts: dict[str, Any] = {"l": loops, "i": list(point.indices)}
    if any(step.value is not None for step in point.steps):
        facts["x"] = [convert(step.value) for step in point.steps]
    return _encode(facts)[:-1] + b","


def encode_place(file: str, line: int) -> bytes:
    """Return the part of a line that names the log call in the source; the caller may reuse it.

    >>> encode_place("train.py", 12)
    b'"f":"train.py","y":12,'
    """
    return _encode({"f": encodable(file), "y": line})[1:-1] + b","


class RecordFile:
    """The file to which one process appends its records.

    The first append creates it. A forked child that appends gets another file.
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
        self._about = (run, origin, attempt, since)
        self._put = put
        self._part = part
        self._lock = threading.Lock()
        self._fd = -1
        self._pid = self._born = 0
        self._left = 0
        self._seq = 0
        self._torn = False
        self._odd: set[type] = set()

    @property
    def position(self) -> int:
        """Number that the next record of this process gets."""
        return self._seq if os.getpid() == self._pid else self._about[3]

    def append(
        self,
        prefix: bytes,
        items: Sequence[tuple[str, Any]],
        *,
        place: bytes = b"",
        moment: float | None = None,
    ) -> None:
        """Add the records of one log call at the point that `prefix` encodes.

        When this returns they survive the death of the process. `place` is the call in the source, as
        `encode_place` returns it. `moment` is when they were logged, if that is not now, as in
        imported runs.
        """
        if os.getpid() != self._pid:
            self._begin()
        names, values = [], []
        for name, value in items:
            kind = type(value)
            if kind is float:
                if value - value != 0.0:  # nan, inf
                    value = {"$float": repr(value)}  # noqa: PLW2901
            elif kind is int:
                if not LOW <= value < HIGH:
                    value = convert(value)  # noqa: PLW2901
            elif kind is not bool and value is not None and kind is not str:
                value = self._convert(value)  # noqa: PLW2901
            names.append(name)
            values.append(value)
        with self._lock:
            if self._left <= 0:
                self._open()
            now = time.time() if moment is None else moment
            body = {"s": self._seq, "t": now, "n": names, "v": values}
            try:
                text = prefix + place + _encode(body)[1:-1]
            except UnicodeEncodeError:  # lone surrogates
                body |= {"n": [encodable(name) for name in names], "v": [_str(v) for v in values]}
                text = prefix + place + _encode(body)[1:-1]
            self._write(b'%b,"c":%d}\n' % (text, crc32(text)))  # as `add_check`, without a call
            self._seq += len(names)

    def close(self) -> None:
        """Close the file; a later append opens another one."""
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                with contextlib.suppress(StoreError):
                    self._end()
                os.close(self._fd)
                self._fd, self._left = -1, 0

    def _end(self) -> None:
        self._write(add_check(b'{"end":true,"s":%d}' % self._seq) + b"\n")

    def _convert(self, value: Any) -> Any:
        out = convert(value, self._put)
        if isinstance(out, dict) and "$repr" in out and type(value) not in self._odd:
            self._odd.add(type(value))
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
            done = os.write(self._fd, line)
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as exc:
            raise StoreError(
                f"A record of {len(line)} bytes cannot be written to {self._folder}: "
                f"{exc.strerror or exc}. Free some space; records logged before this are safe.",
                slug="records-unwritable",
            ) from exc
        self._torn = False
        self._left -= len(line)

    def _begin(self) -> None:
        """Start a file for this process: at first, and again in a forked child."""
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        if self._fd >= 0:
            os.close(self._fd)
        first = self._about[3] if not self._pid else 0
        self._fd, self._left, self._seq, self._torn = -1, 0, first, False
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
        run, origin, attempt, since = self._about
        process = f"{self._born:020d}-{self._pid}"
        header = Header(FORMAT, run, origin, process, attempt, process_identity(), since, self._seq)
        self._write(add_check(_encode(header)) + b"\n")
        self._left = self._part


def scan(file: Path) -> Scanned:
    """Return the intact content of a file of records; raise if its first line is damaged."""
    data = file.read_bytes()
    first, ended, body = data.partition(b"\n")
    if not ended:  # its process died before the first line was written: nothing was acknowledged
        return Scanned(Header(FORMAT, file.parent.name), b"", ended=False)
    header = _header(first, file)
    if header.format >= CHECKED:
        return _checked(header, body)
    whole = body[: body.rfind(b"\n") + 1]
    return Scanned(header, whole.removesuffix(PLAIN_END), whole.endswith(PLAIN_END))


def has_end(tail: bytes) -> bool:
    """Return True if a file that ends in `tail` was finished by its process."""
    last = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    return tail.endswith(PLAIN_END) or (last.startswith(b'{"end":true,') and bool(is_intact(last)))


def _header(first: bytes, file: Path) -> Header:
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


def repaired(file: Path) -> bytes | None:
    """Return a file of records with its damaged lines replaced by their number.

    None if its first line is damaged: then no record can be saved.
    """
    try:
        scanned = scan(file)
    except DamagedError:
        return None
    first = file.read_bytes().partition(b"\n")[0]
    if scanned.header.format < CHECKED:
        good = [raw for raw in scanned.lines.split(b"\n") if raw and _reads(raw)]
        return b"\n".join([first, *good, PLAIN_END])
    out, expected = [first], scanned.header.first
    for raw in scanned.lines.split(b"\n"):
        if raw:
            numbers = _numbers_of(raw)
            out += _loss(numbers.s, numbers.s - expected)
            out.append(raw)
            expected = numbers.s + len(numbers.n)
    counted = sum(_numbers_of(raw).lost for raw in out[1:])
    unknown = scanned.lost + scanned.repaired - counted  # after the last line that is intact
    out += _loss(expected + unknown, unknown)
    return b"\n".join([*out, add_check(b'{"end":true,"s":%d}' % (expected + unknown)), b""])


def _loss(number: int, lost: int) -> list[bytes]:
    return [add_check(b'{"lost":%d,"s":%d}' % (lost, number))] if lost > 0 else []


def _reads(raw: bytes) -> bool:
    try:
        line = line_of(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return len(line.n) == len(line.v)


def _checked(header: Header, data: bytes) -> Scanned:
    """Return the lines with correct checksums, and how many records the gaps between them held."""
    *raws, tail = data.split(b"\n")
    if is_intact(tail[:-1]):
        raws.append(tail[:-1])  # whole, but for its line end
        tail = b""
    good: list[bytes] = []
    expected, lost, repaired, bad, ended = header.first, 0, 0, 0, False
    for raw in raws:
        if not raw:
            continue
        if not is_intact(raw):
            bad += 1
            continue
        try:
            numbers = _numbers_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            bad += 1
            continue
        repaired += numbers.lost
        if numbers.s < expected and good:
            good.pop()  # the full disk cut off only its line end: not acknowledged
        lost += max(0, numbers.s - numbers.lost - expected)
        expected, bad = numbers.s + len(numbers.n), 0
        ended = numbers.end
        if numbers.n:
            good.append(raw)
    # lines after the last intact one held an unknown number of records; if the file ends in half a
    # line, they were cut off by a full disk as well
    lost += bad if not tail and not ended else 0
    lines = b"\n".join(good) + b"\n" if good else b""
    return Scanned(header, lines, ended, lost, repaired)


def read(file: Path) -> Iterator[Record]:
    """Yield the records of one file in the order they were logged, without a torn last line.

    Records of a replay get the origin `unproved`; the run's replays say whether it was proved.
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
            continue  # torn by a full disk, and closed by the line after it
        shown = line.x or [None] * len(line.l)
        steps = zip(line.l, line.i, shown, strict=True)
        point = Point(tuple(Step(loop, index, restore(value)) for loop, index, value in steps))
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield Record(header.run, line.s + k, point, name, restore(value), origin, line.t)


class _Names(msgspec.Struct):
    n: list[str] = []


def count_records(folder: Path, replay: str) -> Counter[str]:
    """Return how many records of a replay a run's folder holds, by name.

    Only files that are not sealed yet are read: the replay has just ended.
    """
    counts: Counter[str] = Counter()
    for file in folder.glob("records-*.jsonl"):
        try:
            with file.open("rb") as lines:
                if msgspec.json.decode(lines.readline(), type=Header).origin != replay:
                    continue
                for line in lines:
                    with contextlib.suppress(msgspec.MsgspecError):  # a line that a kill has torn
                        counts.update(msgspec.json.decode(line, type=_Names).n)
        except (OSError, msgspec.MsgspecError):
            continue  # a reader has just sealed it, or it is damaged: `verify` reports that
    return counts


def _str(value: Any) -> Any:
    return convert(value) if isinstance(value, str) else value
