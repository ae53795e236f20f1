"""Capture the numbers that loops of the program assign to variables, when an iteration ends.

Nothing is added to the program: at a boundary, where the recorder stops anyway, the variables that the
loop's body assigns are looked up in its frame. Which of them become columns is written in
docs/capture.md. Only plain Python and NumPy numbers and CPU tensors without dimensions are read, from
memory and without calling an operation of their library; no object is kept.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Container, Mapping
from inspect import CO_OPTIMIZED
from time import perf_counter, thread_time, time
from types import CodeType, FrameType
from typing import Any

from rearview.model.run import Origin
from rearview.runtime.loops import LoopEntry
from rearview.runtime.observed_values.captured_records import Allowance, CapturedRecords

COLUMNS = 40
"""Variables of a run that become columns; further ones are left out."""
UNDECIDED = 64
"""Values of a variable that are held back until it is known whether it changes."""
DECIDES = 3
"""Whole numbers that grow evenly over this many iterations are counters."""
_READS_LOCALS = frozenset({"locals", "vars", "dir", "exec", "eval", "breakpoint"})
"""Functions that show a program the dictionary of its local variables."""

Number = bool | int | float
Prefix = Callable[[], bytes]
_Key = tuple[CodeType, str]
"""A variable: the function it belongs to, and its name."""


class AssignedScalars:
    """The values of variables of one run's loops at the end of each iteration."""

    def __init__(
        self, records: CapturedRecords, point: Prefix, has_loops: Callable[[str], bool]
    ) -> None:
        """`point` returns the encoded current point; `has_loops` whether a loop, by id, contains loops."""
        self._records = records
        self._point = point
        self._has_loops = has_loops
        self.allowance = Allowance()
        """Time that capturing variables may take."""
        self._columns: dict[_Key, _Column] = {}
        self._labels: set[str] = set()
        self._seen: dict[int, int] = {}
        """Next iteration to capture, by the `id` of a running loop."""
        self._folded: dict[_Key, Number] = {}
        """Values of inner loops in other functions, in the current iteration."""
        self._began = (time(), perf_counter())

    def iteration_ended(
        self, entry: LoopEntry, index: int, frame: FrameType, *, leaf: bool
    ) -> None:
        """Capture the variables after iteration `index`; `leaf` means an inner loop without loops inside."""
        if leaf or index < self._seen.get(id(entry), 0):
            return
        self._seen[id(entry)] = index + 1
        if not self.allowance.allows():
            self._folded.clear()
            return
        began = thread_time()
        values = self._read(entry, frame)
        if self._folded:
            values = self._folded | values
            self._folded = {}
        if values:
            own = {(frame.f_code, name) for name in entry.site.assigned}
            self._take(values, index, own)
        self.allowance.add(began)

    def inner_loop_ended(self, entry: LoopEntry, frame: FrameType) -> None:
        """Remember the variables of a loop in a called function, for the iteration of the loop around it."""
        if self.allowance.allows():
            began = thread_time()
            self._folded |= self._read(entry, frame)
            self.allowance.add(began)

    def loop_ended(self, entry: LoopEntry) -> None:
        """Forget a loop that has ended."""
        self._seen.pop(id(entry), None)

    def finish(self) -> None:
        """Write the values that were held back because too few iterations ran to judge a variable."""
        for column in self._columns.values():
            if column.accepted is None and column.worth_keeping_at_the_end():
                self._accept(column)

    def _read(self, entry: LoopEntry, frame: FrameType) -> dict[_Key, Number]:
        """Return the numbers that the variables of a loop hold in its frame."""
        site, code = entry.site, frame.f_code
        names = [*site.assigned]
        for loop, more in site.inside:
            if not self._has_loops(loop):
                names += more
        if not names:
            return {}
        numbers: dict[_Key, Number] = {}
        space = frame.f_locals
        for name in names:
            column = self._columns.get((code, name))
            if column is None or column.accepted is not False:
                value = number(space.get(name))
                if value is not None:
                    numbers[code, name] = value
        if is_copy(frame):
            space.clear()  # it is a copy that would keep the values alive
        return numbers

    def _take(self, numbers: Mapping[_Key, Number], index: int, own: Container[_Key]) -> None:
        """Write the values of columns; hold back those of variables that may become columns.

        `own` are the variables that the loop itself assigns; the others belong to loops inside it.
        """
        prefix = self._point()
        items: dict[Origin, list[tuple[str, Number]]] = {}
        for key, value in numbers.items():
            column = self._columns.get(key)
            if column is None:
                origin = Origin.ASSIGNED if key in own else Origin.INNER
                column = self._columns[key] = _Column(self._label(*key), origin)
            if column.accepted:
                items.setdefault(column.origin, []).append((column.label, value))
                continue
            column.hold(prefix, index, value, is_clock=self._is_clock(value))
            if column.verdict():
                self._accept(column)
        for origin, values in items.items():
            self._records.append(origin, prefix, values)

    def _accept(self, column: _Column) -> None:
        if sum(other.accepted is True for other in self._columns.values()) >= COLUMNS:
            column.reject()
            return
        for prefix, _, value in column.held:
            self._records.append(column.origin, prefix, [(column.label, value)])
        column.accept()

    def _label(self, code: CodeType, name: str) -> str:
        """Return the name of a column; with the function's name if two functions use the variable name."""
        label = name
        if label in self._labels:
            label = f"{code.co_name}.{name}"
        if label in self._labels:
            label = f"{code.co_qualname}.{name}"
        self._labels.add(label)
        return label

    def _is_clock(self, value: Number) -> bool:
        """Return True if a number may be a reading of the clock, taken during the run."""
        if type(value) is not float:
            return False
        clocks = zip(self._began, (time(), perf_counter()), strict=True)
        return any(began - 60 <= value <= now for began, now in clocks)


class _Column:
    """A variable, and the values held back until it is known whether it becomes a column."""

    __slots__ = ("accepted", "clocks", "held", "label", "origin")

    def __init__(self, label: str, origin: Origin) -> None:
        self.label = label
        self.origin = origin
        self.accepted: bool | None = None
        self.held: list[tuple[bytes, int, Number]] = []
        self.clocks = 0
        """How many of the values may be readings of the clock."""

    def hold(self, prefix: bytes, index: int, value: Number, *, is_clock: bool) -> None:
        if len(self.held) >= UNDECIDED:
            del self.held[1]
            self.clocks = min(self.clocks, len(self.held))
        self.held.append((prefix, index, value))
        self.clocks += is_clock

    def verdict(self) -> bool:
        """Return True if the values so far make the variable a column; reject it if they never will."""
        values = [value for _, _, value in self.held]
        if all(_same(value, values[0]) for value in values):
            return False  # it has not changed yet
        if self.clocks == len(values):
            if len(values) >= DECIDES:
                self.reject()
            return False
        if any(type(value) is float for value in values) or len(values) > DECIDES:
            evenly = self._grows_evenly() and all(type(value) is int for value in values)
            if evenly and len(values) > DECIDES:
                self.reject()
                return False
            return not evenly
        return len(values) == DECIDES and not self._grows_evenly()

    def worth_keeping_at_the_end(self) -> bool:
        """Return True if a variable is shown although too few iterations ran to judge it."""
        values = [value for _, _, value in self.held]
        if not values or self.clocks == len(values):
            return False
        if len(values) == 1:
            return type(values[0]) is float
        changed = not all(_same(value, values[0]) for value in values)
        return changed and not self._grows_evenly(by=1 if len(values) < DECIDES else None)

    def accept(self) -> None:
        self.accepted, self.held = True, []

    def reject(self) -> None:
        self.accepted, self.held = False, []

    def _grows_evenly(self, by: int | None = None) -> bool:
        """Return True if whole numbers grow with the iterations, by the same amount for each."""
        (_, first, start), (_, last, end) = self.held[0], self.held[-1]
        if first == last or not all(type(value) is int for _, _, value in self.held):
            return False
        slope = (end - start) / (last - first)
        if by is not None:
            return slope == by
        return slope != 0 and all(
            value - start == slope * (index - first) for _, index, value in self.held
        )


def _same(first: Number, second: Number) -> bool:
    return first == second or (first != first and second != second)  # noqa: PLR0124 - nan


def is_copy(frame: FrameType) -> bool:
    """Return True if `f_locals` of a frame is a copy that only Rearview has requested."""
    code = frame.f_code
    return (
        sys.version_info < (3, 13)
        and bool(code.co_flags & CO_OPTIMIZED)
        and frame.f_trace is None
        and sys.gettrace() is None
        and _READS_LOCALS.isdisjoint(code.co_names)
    )


_PLAIN = {float, int, bool}
_LARGEST = 1 << 63
_NUMPY_KINDS = frozenset("biuf")
_TENSOR_FORMATS = {
    "torch.float64": "d",
    "torch.float32": "f",
    "torch.float16": "e",
    "torch.int64": "q",
    "torch.int32": "i",
    "torch.int16": "h",
    "torch.int8": "b",
    "torch.uint8": "B",
    "torch.bool": "?",
    "torch.bfloat16": "",
}


def number(value: Any) -> Number | None:
    """Return a value as a number without calling code of the program; None if it is no number.

    >>> number(0.5), number("0.5"), number(1 << 80)
    (0.5, None, None)
    """
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or -_LARGEST <= value < _LARGEST else None
    module = kind.__module__
    if module == "numpy":
        return _numpy_number(value)
    if module in {"torch", "torch.nn.parameter"}:
        return _tensor_number(value)
    return None


def _numpy_number(value: Any) -> Number | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    if type(value).__module__ != "numpy" or value.ndim or value.dtype.kind not in _NUMPY_KINDS:
        return None
    item = value.item()
    return item if type(item) in _PLAIN else None


def _tensor_number(value: Any) -> Number | None:
    """Return the number in a CPU tensor without dimensions, read from its memory.

    No operation of torch runs: a profiler, a dispatch mode and autograd see nothing, and nothing
    waits for an accelerator.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if torch._C._len_torch_function_stack() or torch._C._functorch.is_functorch_wrapped_tensor(
        value
    ):
        return None
    if value.device.type != "cpu" or value.dim() or value.layout is not torch.strided:
        return None
    form = _TENSOR_FORMATS.get(str(value.dtype))
    if form is None or value.is_neg() or value.is_conj():
        return None
    address = value.data_ptr()
    if not address:
        return None
    size = value.element_size()
    data = ctypes.string_at(address, size)
    if not form:  # bfloat16 is the upper half of a float32
        data, form = b"\0\0" + data, "f"
    unpacked: Number = struct.unpack(f"={form}", data)[0]
    return unpacked
