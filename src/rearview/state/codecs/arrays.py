"""Codec of NumPy arrays: captures the memory block of an array, which all views of the array share.

An *anchor* is an object that existed when the loop was entered (`object_numbers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, steps
from rearview.state.memory_blocks import Blocks, RestoredMemory, bytes_at, extent, is_array


def owns_memory(array: Any) -> bool:
    """Return True if an array owns its memory, so that the program could resize the array in place."""
    import numpy as np

    return type(array) is np.ndarray and array.base is None and not array.dtype.hasobject


def form_of(array: Any) -> Any:
    """Return (dtype, shape, strides) of an array; values can be copied between arrays for which these are equal."""
    return array.dtype.str, array.shape, array.strides


def describe(array: Any, blocks: Blocks, anchor_number: int) -> tuple[Any, ...]:
    """Return (number of its memory block, dtype, shape, strides, offset in the block, writeable) of an array.

    The array must not hold Python objects. `anchor_number` is the number of the anchor that owns the memory, or -1. The
    memory block is added to `blocks` if it is new.
    """
    address, nbytes, root = extent(array)
    block = blocks.index.get((address, nbytes)) if nbytes else None
    if block is None:
        view = partial(bytes_at, address, nbytes, root)
        block = blocks.add(
            address, nbytes, view, anchor_number=anchor_number, likely_unchanged=anchor_number >= 0
        )
    start = address if array is root else array.__array_interface__["data"][0]
    offset = start - address
    return block, array.dtype, array.shape, array.strides, offset, array.flags.writeable


def array_on(memory: RestoredMemory, body: Sequence[Any]) -> Any:
    """Return a new array, given its description `body` from `describe`; the array uses the block in `memory`."""
    import numpy as np

    block, dtype, shape, strides, offset, writeable = body
    array = memory.owning_array(block, dtype, shape, strides) if not offset else None
    if array is None:
        array = np.ndarray(shape, dtype, memory.array(block), offset, strides)
    array.flags.writeable = writeable
    return array


def small_array(data: bytes, dtype: Any, shape: Any, strides: Any, writeable: bool) -> Any:
    """Return a new array that owns its memory and contains a copy of the bytes in `data`."""
    import numpy as np

    array = np.ndarray(shape, dtype, data, 0, strides).copy("K")
    array.flags.writeable = writeable
    return array


class ArrayKind(Kind):
    """Codec of NumPy arrays that existed when the loop was entered."""

    name = "array"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield steps to the objects in the array, to its attributes, and to its class if it is local (`WalkRules`).

        The object whose memory the array views is left out: a restored array may own its memory even if the
        captured array viewed the memory of another object, such as a tensor.
        """
        if rules.owners_of_views and obj.base is not None:
            yield PathStep(".", "base", obj.base)
        if obj.dtype.hasobject:
            items = obj.ravel().tolist()
            if not rules.all_values(items):
                yield from steps("[", enumerate(items))
        yield from steps(".", list(getattr(obj, "__dict__", {}).items()))
        if rules.is_local(type(obj)):
            yield PathStep("<", "class", type(obj))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (form, memory or items, shape, attributes) of each array; ("constant",) if `is_constant` is true."""
        return [self._read(obj, capturing) for obj in objs]

    @staticmethod
    def _read(obj: Any, capturing: Capturing) -> tuple[Any, ...]:
        attrs = dict(getattr(obj, "__dict__", {}))
        if obj.dtype.hasobject:
            return "items", obj.ravel().tolist(), obj.shape, attrs
        if is_constant(obj):
            return ("constant",)
        anchor_number = capturing.anchors.index[id(obj)]
        return "memory", describe(obj, capturing.blocks, anchor_number), obj.shape, attrs

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Restore the shape, items and attributes; `RestoredMemory` has filled the memory block."""
        if content[0] == "constant":
            return
        form, body, shape, attrs = content
        if obj.shape != shape:
            _reshape(obj, shape, restoring)
        if form == "items":
            flat = obj.reshape(-1)
            for position, item in enumerate(body):
                flat[position] = item
            if flat.base is not obj and not (obj.base is not None and flat.base is obj.base):
                obj[...] = flat.reshape(obj.shape)
        else:
            self._memory(obj, body, restoring)
        if getattr(obj, "__dict__", None) or attrs:
            vars(obj).clear()
            vars(obj).update(attrs)

    @staticmethod
    def _memory(obj: Any, body: Sequence[Any], restoring: Restoring) -> None:
        live = array_on(restoring.memory, body)
        has_same_address = obj.__array_interface__["data"][0] == live.__array_interface__["data"][0]
        if not has_same_address or obj.strides != live.strides or obj.dtype != live.dtype:
            # another array uses the block, or this array uses other memory than in the run: copy only the values
            restoring.afterwards.append(lambda: _copy_values(obj, live))
        if obj.flags.writeable != body[5]:
            restoring.afterwards.append(lambda: obj.setflags(write=body[5]))


def is_constant(array: Any) -> bool:
    """Return True if the memory of an array cannot be written to, such as a file mapped for reading."""
    while True:
        if array.flags.writeable:
            return False
        if array.base is None:
            # the array owns its memory, so the program can make the array writeable again
            return False
        base = array.base
        if not is_array(base):
            return type(base).__module__ == "mmap" or isinstance(base, bytes)
        array = base


def _copy_values(array: Any, values: Any) -> None:
    writeable = array.flags.writeable
    if not writeable:
        array.setflags(write=True)
    array[...] = values
    array.setflags(write=writeable)


def _reshape(array: Any, shape: tuple[int, ...], restoring: Restoring) -> None:
    try:
        if array.size == _count(shape):
            _set_shape(array, shape)
        else:
            array.resize(shape, refcheck=False)
    except (ValueError, AttributeError) as exc:
        raise StateError(
            f"The array at {restoring.path(array)} had the shape {shape} and has {array.shape} now; "
            f"it cannot be changed in place ({exc}). Replay from the start of the loop.",
            slug="state-shape",
        ) from exc


def _set_shape(array: Any, shape: tuple[int, ...]) -> None:
    """Set the shape of the array itself; since NumPy 2.5, assigning to `shape` warns."""
    if hasattr(array, "_set_shape"):
        array._set_shape(shape)
    else:
        array.shape = shape


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
