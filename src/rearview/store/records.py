"""Records on the hot path: one file of JSON lines per process, one write per log call.

A file is named `records-<pid>-<n>.jsonl`. Its first line says whose it is::

    {"format":1,"run":"…","origin":"recorded","process":"…","attempt":0,"writer":{…}}

Every further line is one log call: loops (`l`), iterations (`i`) and, where they have other names
than their numbers, their values (`x`); the number of its first record (`s`), the time (`t`), and
the names (`n`) and values (`v`) it logged::

    {"l":["epoch","step"],"i":[3,20],"s":96,"t":1731690000.5,"n":["loss","acc"],"v":[0.25,0.9]}

A process that is done with a file says so in its last line, `{"end":true}`. A line is there once the write has returned, whatever becomes of the process; a last line without
its end was never acknowledged and is not read. After `PART` bytes a process goes on in a new file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import DamagedError, StoreError
from rearview.model import Origin, Point, Record, Step
from rearview.store.alive import identity
from rearview.store.lines import check_format
from rearview.store.values import HIGH, LOW, Put, convert, restore

FORMAT = 1
PART = 64 << 20
END = b'{"end":true}\n'
STDOUT = "$stdout"
"""Reserved name under which printed lines are kept; names that begin with `$` are no columns."""

_encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct):
    """One log call as it stands in the file."""

    s: int
    t: float
    n: list[str]
    v: list[Any]
    l: list[str] = []  # noqa: E741
    i: list[int] = []
    x: list[Any] | None = None


class Header(msgspec.Struct):
    """Whose records a file holds."""

    format: int
    run: str
    origin: str = Origin.RECORDED.value
    """`recorded`, or the id of the replay."""
    process: str = ""
    """Start time and number of the process: orders the processes of a run."""
    attempt: int = 0
    """How often the run had been resumed before this process."""
    writer: dict[str, Any] = {}
    """Identity of the process, as `store.alive` tells whether it still lives."""
    since: int = 0
    """Records of earlier attempts from this number on are repeated here, and do not count there."""


line_of = msgspec.json.Decoder(Line).decode


def encode_point(point: Point) -> bytes:
    """Return the beginning of every line at `point`; worth keeping while the point lasts."""
    if not point.steps:
        return b"{"
    # a slash separates loops wherever points are written as text
    loops = [_name(loop).replace("/", "%2F") for loop in point.loops]
    facts: dict[str, Any] = {"l": loops, "i": list(point.indices)}
    if any(step.value is not None for step in point.steps):
        facts["x"] = [convert(step.value) for step in point.steps]
    return _encode(facts)[:-1] + b","


class RecordFile:
    """Where one process appends its records.

    The file is made by the first append. A forked child that appends gets a file of its own.
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

    def append(self, prefix: bytes, items: Sequence[tuple[str, Any]]) -> None:
        """Add the records of one log call at the point that `prefix` encodes.

        When this returns they survive the death of the process.
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
            body = {"s": self._seq, "t": time.time(), "n": names, "v": values}
            try:
                line = prefix + _encode(body)[1:] + b"\n"
            except UnicodeEncodeError:  # lone surrogates
                body |= {"n": [_name(name) for name in names], "v": [_str(v) for v in values]}
                line = prefix + _encode(body)[1:] + b"\n"
            self._write(line)
            self._seq += len(names)

    def close(self) -> None:
        """Close the file; a later append opens another one."""
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                with contextlib.suppress(StoreError):
                    self._write(END)
                os.close(self._fd)
                self._fd, self._left = -1, 0

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
        """Become the file of this process: at first, and again in a forked child."""
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        if self._fd >= 0:
            os.close(self._fd)
        first = self._about[3] if not self._pid else 0
        self._fd, self._left, self._seq, self._torn = -1, 0, first, False
        self._pid, self._born = os.getpid(), time.time_ns()

    def _open(self) -> None:
        if self._fd >= 0:
            self._write(END)
            os.close(self._fd)
        self._fd, n = -1, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while self._fd < 0:
            file = self._folder / f"records-{self._pid}-{n}.jsonl"
            try:
                if not file.with_suffix(".parquet").exists():
                    self._fd = os.open(file, flags, 0o644)
            except FileExistsError:
                pass
            except OSError as exc:
                raise StoreError(
                    f"{file} cannot be made: {exc.strerror or exc}. Make the folder writable "
                    "or free some space.",
                    slug="records-unwritable",
                ) from exc
            n += 1
        run, origin, attempt, since = self._about
        process = f"{self._born:020d}-{self._pid}"
        header = Header(FORMAT, run, origin, process, attempt, identity(), since)
        self._write(_encode(header) + b"\n")
        self._left = self._part


def scan(file: Path) -> tuple[Header, bytes, bool]:
    """Return whose records a file holds, all its whole lines of records, and whether it is ended."""
    first, ended, rest = file.read_bytes().partition(b"\n")
    if not ended:  # its process died before the first line was out: nothing was acknowledged
        return Header(FORMAT, file.parent.name), b"", False
    try:
        facts = msgspec.json.decode(first)
        check_format(facts, FORMAT, file)
        header = msgspec.convert(facts, Header)
    except (msgspec.MsgspecError, AttributeError) as exc:
        raise DamagedError(
            f"{file} does not begin with a header line ({exc}). `rearview verify` says more.",
            slug="records-damaged",
        ) from exc
    whole = rest[: rest.rfind(b"\n") + 1]
    return header, whole.removesuffix(END), whole.endswith(END)


def read(file: Path) -> Iterator[Record]:
    """Yield the records of one file in the order they were logged; a torn end is left out.

    Records of a replay say `unproved`: whether it was proved is known to the run's replays.
    """
    header, data, _ = scan(file)
    origin = Origin.RECORDED if header.origin == Origin.RECORDED else Origin.UNPROVED
    for raw in data.splitlines():
        if not raw:
            continue
        try:
            line = line_of(raw)
        except msgspec.MsgspecError:
            continue  # torn by a full disk, and closed by the line after it
        shown = line.x or [None] * len(line.l)
        steps = zip(line.l, line.i, shown, strict=True)
        point = Point(tuple(Step(loop, index, restore(value)) for loop, index, value in steps))
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield Record(header.run, line.s + k, point, name, restore(value), origin, line.t)


def _name(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _str(value: Any) -> Any:
    return convert(value) if isinstance(value, str) else value
