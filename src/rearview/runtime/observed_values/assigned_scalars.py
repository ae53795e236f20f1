"""Record the numbers that loops of the program assign to variables, at the end of each iteration.

Nothing is added to the program: at a boundary, where the recorder is called anyway, the variables that the body of
the loop assigns are looked up in the loop's frame. docs/capture.md says which variables become columns. Only plain
Python and NumPy numbers and CPU tensors without dimensions are read, from memory and without calling an operation of
their library; no reference to an object is kept.
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
"""Largest number of variables of a run that become columns."""
UNDECIDED = 64
"""Largest number of values of a variable kept in memory until it is decided whether it becomes a column."""
DECIDES = 3
"""Number of values after which a variable that only grows evenly, or only has clock readings, is rejected."""
_READS_LOCALS = frozenset({"locals", "vars", "dir", "exec", "eval", "breakpoint"})
"""Functions through which a program can access the dictionary of its local variables."""

Number = bool | int | float
Prefix = Callable[[], bytes]
_Key = tuple[CodeType, str]
"""Identifies a variable: (code of the function that contains it, name)."""


class AssignedScalars:
    """Records the numbers in the variables that the loops of one run assign."""

    def __init__(
        self, records: CapturedRecords, point: Prefix, has_loops: Callable[[str], bool]
    ) -> None:
        """`point()` returns the encoded current point; `has_loops(id)` returns True if a loop contains loops."""
        self._records = records
        self._point = point
        self._has_loops = has_loops
        self.allowance = Allowance()
        """Limits the CPU time that reading variables takes."""
        self._columns: dict[_Key, _Column] = {}
        self._labels: set[str] = set()
        self._next_indices: dict[int, int] = {}
        """`id()` of the entry of a running loop -> index of the next iteration whose variables are read."""
        self._values_of_calls: dict[_Key, Number] = {}
        """Variable -> value, for loops that ran in called functions during the current iteration."""
        self._began = (time(), perf_counter())

    def iteration_ended(
        self, entry: LoopEntry, index: int, frame: FrameType, *, leaf: bool
    ) -> None:
        """Record the variables at the end of iteration `index` of a loop, whose local variables are in `frame`.

        Do nothing for a `leaf`, an inner loop without loops in it: its variables are recorded by the loop around it.
        """
        if leaf or index < self._next_indices.get(id(entry), 0):
            return
        self._next_indices[id(entry)] = index + 1
        if not self.allowance.allows():
            self._values_of_calls.clear()
            return
        began = thread_time()
        values = self._read(entry, frame)
        if self._values_of_calls:
            values = self._values_of_calls | values
            self._values_of_calls = {}
        if values:
            own_variables = {(frame.f_code, name) for name in entry.site.assigned}
            self._take(values, index, own_variables)
        self.allowance.add(began)

    def inner_loop_ended(self, entry: LoopEntry, frame: FrameType) -> None:
        """Remember the variables of a loop in a called function; the iteration that called it records them."""
        if self.allowance.allows():
            began = thread_time()
            self._values_of_calls |= self._read(entry, frame)
            self.allowance.add(began)

    def loop_ended(self, entry: LoopEntry) -> None:
        """Drop the position in a loop that has ended."""
        self._next_indices.pop(id(entry), None)

    def finish(self) -> None:
        """At the end of the run, write the values of undecided variables that become columns after all."""
        for column in self._columns.values():
            if column.accepted is None and column.is_shown_at_the_end():
                self._accept(column)

    def _read(self, entry: LoopEntry, frame: FrameType) -> dict[_Key, Number]:
        """Return variable -> number, for the variables of a loop that have a number in `frame`."""
        site, code = entry.site, frame.f_code
        names = [*site.assigned]
        for loop, inner_names in site.inside:
            if not self._has_loops(loop):
                names += inner_names
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
            space.clear()  # this copy of the local variables would keep their values alive
        return numbers

    def _take(
        self, numbers: Mapping[_Key, Number], index: int, own_variables: Container[_Key]
    ) -> None:
        """Record the values of variables that have a column; keep the values of undecided variables in memory.

        A variable is undecided until enough values show whether it gets a column.

        `numbers` are the values after iteration `index`. `own_variables` are the variables that the loop itself assigns;
        all other variables belong to loops inside it.
        """
        prefix = self._point()
        items: dict[Origin, list[tuple[str, Number]]] = {}
        for key, value in numbers.items():
            column = self._columns.get(key)
            if column is None:
                origin = Origin.ASSIGNED if key in own_variables else Origin.INNER
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
        """Make a variable a column and write its earlier values; reject it if there are COLUMNS columns already."""
        if sum(each.accepted is True for each in self._columns.values()) >= COLUMNS:
            column.reject()
            return
        for prefix, _, value in column.held_values:
            self._records.append(column.origin, prefix, [(column.label, value)])
        column.accept()

    def _label(self, code: CodeType, name: str) -> str:
        """Return a new column name for a variable: `name`, preceded by its function if another column has this name."""
        label = name
        if label in self._labels:
            label = f"{code.co_name}.{name}"
        if label in self._labels:
            label = f"{code.co_qualname}.{name}"
        self._labels.add(label)
        return label

    def _is_clock(self, value: Number) -> bool:
        """Return True if `value` may be a reading of the clock that the program made during the run."""
        if type(value) is not float:
            return False
        clocks = zip(self._began, (time(), perf_counter()), strict=True)
        return any(began - 60 <= value <= now for began, now in clocks)


class _Column:
    """A variable, with its values until it is decided whether it becomes a column."""

    __slots__ = ("accepted", "clocks", "held_values", "label", "origin")

    def __init__(self, label: str, origin: Origin) -> None:
        self.label = label
        self.origin = origin
        self.accepted: bool | None = None
        """Whether the variable is a column; None until that is decided."""
        self.held_values: list[tuple[bytes, int, Number]] = []
        self.clocks = 0
        """Number of `held_values` that may be readings of the clock."""

    def hold(self, prefix: bytes, index: int, value: Number, *, is_clock: bool) -> None:
        if len(self.held_values) >= UNDECIDED:
            del self.held_values[1]
            self.clocks = min(self.clocks, len(self.held_values))
        self.held_values.append((prefix, index, value))
        self.clocks += is_clock

    def verdict(self) -> bool:
        """Return True if the values so far show that the variable is a column; reject a counter or a clock reading."""
        values = [value for _, _, value in self.held_values]
        if all(_same(value, values[0]) for value in values):
            return False  # undecided: the value has not changed so far
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

    def is_shown_at_the_end(self) -> bool:
        """Return True if this variable gets a column when the run ends before that was decided."""
        values = [value for _, _, value in self.held_values]
        if not values or self.clocks == len(values):
            return False
        if len(values) == 1:
            return type(values[0]) is float
        changed = not all(_same(value, values[0]) for value in values)
        return changed and not self._grows_evenly(by=1 if len(values) < DECIDES else None)

    def accept(self) -> None:
        self.accepted, self.held_values = True, []

    def reject(self) -> None:
        self.accepted, self.held_values = False, []

    def _grows_evenly(self, by: int | None = None) -> bool:
        """Return True if the values are whole numbers that change by an equal amount per iteration (`by`, if given)."""
        (_, first, start), (_, last, end) = self.held_values[0], self.held_values[-1]
        if first == last or not all(type(value) is int for _, _, value in self.held_values):
            return False
        slope = (end - start) / (last - first)
        if by is not None:
            return slope == by
        return slope != 0 and all(
            value - start == slope * (index - first) for _, index, value in self.held_values
        )


def _same(first: Number, second: Number) -> bool:
    return first == second or (first != first and second != second)  # noqa: PLR0124 - nan


def is_copy(frame: FrameType) -> bool:
    """Return True if `frame.f_locals` is a copy of the local variables that only Rearview uses."""
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
    """Return `value` as a plain number, without calling code of the program, or None if it is not a number.

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
    """Return the number in a CPU tensor without dimensions, read from its memory; None for any other value.

    No operation of torch runs, so profilers, dispatch modes and autograd see nothing, and the program does not
    wait for an accelerator.
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
    format_char = _TENSOR_FORMATS.get(str(value.dtype))
    if format_char is None or value.is_neg() or value.is_conj():
        return None
    address = value.data_ptr()
    if not address:
        return None
    size = value.element_size()
    data = ctypes.string_at(address, size)
    if not format_char:  # bfloat16 is the upper half of a float32
        data, format_char = b"\0\0" + data, "f"
    unpacked: Number = struct.unpack(f"={format_char}", data)[0]
    return unpacked
