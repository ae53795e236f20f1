"""Memory blocks of arrays and tensors: a state stores a block once, even if several arrays and tensors share it.

An *anchor* is an object that existed when the loop was entered (`object_numbers`). `Blocks` collects the blocks of one
capture. `RestoredMemory` gives the blocks of a recorded state to the arrays and tensors of one restore. `GcPaused`
suspends garbage collection while objects are captured.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from rearview.errors import StateError

SMALL = 4096
"""Blocks of at most this many bytes are stored inside the skeleton."""


PROCESS_MEMORY: Any = (ctypes.c_char * sys.maxsize).from_address(0)
"""All memory of this process, as an array of bytes from address 0. A slice is a copy of this part of the memory.
Slicing is four times as fast as `ctypes.string_at`, and raises no audit event.
"""


@functools.cache
def _memory_as_array() -> Any:
    import numpy as np

    # the array begins at address 1, because NumPy treats address 0 as a missing buffer
    return np.frombuffer((ctypes.c_ubyte * (sys.maxsize - 1)).from_address(1), np.uint8)


def view_of(address: int, nbytes: int) -> Any:
    """Return a view of live memory as an array of bytes; the caller must keep the memory alive."""
    return _memory_as_array()[address - 1 : address - 1 + nbytes]


class GcPaused:
    """Context manager that disables garbage collection: its body creates millions of objects, but no garbage.

    A context manager written as a generator would create objects after enabling the collector, which could start a
    collection.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if self._was_enabled:
            gc.enable()


def is_tensor(obj: object) -> bool:
    """Return True if `obj` is a torch tensor; do not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def is_array(obj: object) -> bool:
    """Return True if `obj` is a NumPy array; do not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray)


def bytes_of(storage: Any) -> Any:
    """Return a view of the bytes of a torch storage on the CPU, as a NumPy array."""
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def root_of(array: Any) -> Any:
    """Return the array whose memory `array` views, also through other views; `array` itself if it is no view."""
    import numpy as np

    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def extent(array: Any) -> tuple[int, int, Any]:
    """Return (address, size in bytes, array) of the memory of the array that `root_of` returns for `array`."""
    root = root_of(array)
    address = root.__array_interface__["data"][0]
    flags = root.flags
    if flags.c_contiguous or flags.f_contiguous:
        return address, root.nbytes, root
    low = high = 0
    for size, stride in zip(root.shape, root.strides, strict=True):
        reach = (size - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return address + low, high - low + root.itemsize, root


def bytes_at(address: int, nbytes: int, owner: object) -> Any:
    """Return a view of live memory as an array of bytes; the view keeps `owner` alive."""
    import numpy as np

    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    raw.owner = owner  # type: ignore[attr-defined]
    return np.frombuffer(raw, np.uint8)


class Block(NamedTuple):
    """A block of memory in a skeleton."""

    key: str | None
    """Key of the buffer with the bytes, or None if `data` holds the bytes."""
    nbytes: int
    data: bytes | None
    anchor_number: int
    """Number of the anchor whose memory this is, or -1 if an object that the loop created has the memory."""
    device: str


Row = tuple[str | None, int, bytes | None, int, str]
"""The fields of a `Block`."""


class Blocks:
    """The memory blocks of one capture.

    The parameter `keys` has the form of the attribute `keys`, from the previous capture: memory with unchanged address
    and size keeps its key, so that the writer can find out whether the bytes have changed.
    """

    def __init__(self, keys: dict[tuple[int, int], str]) -> None:
        self.table: list[Row] = []
        """The fields of each block, as a plain tuple for speed."""
        self.buffers: dict[str, Any] = {}
        """Key of a large block -> view of the block's memory."""
        self.likely_unchanged: set[str] = set()
        """Keys of blocks that will probably not change, such as frozen weights and data."""
        self.owners: list[Any] = []
        """Objects that own the memory of the buffers: this list keeps the objects alive."""
        self.keys: dict[tuple[int, int], str] = {}
        """(address, size in bytes) of a large block -> key of the block."""
        self.index: dict[tuple[int, int], int] = {}
        """(address, size in bytes) of a block -> number of the block in `table`."""
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Shape or stride -> tuple that represents all equal shapes or strides, so that pickle writes the tuple
        once."""
        self._earlier_keys = keys
        self._used_keys = set(keys.values())

    def add(
        self,
        address: int,
        nbytes: int,
        view: Callable[[], Any],
        *,
        anchor_number: int,
        device: str = "cpu",
        likely_unchanged: bool = False,
    ) -> int:
        """Add a block and return its number in `table`; `view` returns a view of the bytes of a large block."""
        number = len(self.table)
        if nbytes == 0 or device == "meta":
            self.table.append((None, nbytes, b"", anchor_number, device))
            return number
        location = (address, nbytes)
        self.index[location] = number
        if nbytes <= SMALL and device == "cpu":
            self.table.append(
                (None, nbytes, PROCESS_MEMORY[address : address + nbytes], anchor_number, device)
            )
            return number
        self._add_with_key(location, number, view(), anchor_number, device)
        if likely_unchanged:
            self.likely_unchanged.add(self.keys[location])
        return number

    def add_host(
        self,
        location: tuple[int, int],
        owner: object,
        anchor_number: int,
        *,
        likely_unchanged: bool,
    ) -> int:
        """Add a large block of CPU memory, which exists as long as `owner` exists; return its number in `table`."""
        number = self.index[location] = len(self.table)
        self._add_with_key(location, number, view_of(*location), anchor_number, "cpu")
        self.owners.append(owner)
        if likely_unchanged:
            self.likely_unchanged.add(self.keys[location])
        return number

    def _add_with_key(
        self, location: tuple[int, int], number: int, view: object, anchor_number: int, device: str
    ) -> None:
        key = self._earlier_keys.get(location) if anchor_number < 0 else f"a{anchor_number}"
        if key is None or key in self.buffers:
            key = self._new_key(number)
        self.keys[location] = key
        self.buffers[key] = view
        self.table.append((key, location[1], None, anchor_number, device))

    def add_bytes(self, buffer: Any) -> str:
        """Add a large buffer that a pickling method of a class passed to pickle, and return the key of the buffer."""
        key = self._new_key(len(self.table))
        self.buffers[key] = buffer
        return key

    def _new_key(self, number: int) -> str:
        key = f"i{number}"
        while key in self._used_keys or key in self.buffers:
            number += 1
            key = f"i{number}"
        self._used_keys.add(key)
        return key


class RestoredMemory:
    """The memory blocks of one restore: memory of live anchors if its size is equal, or else new memory."""

    def __init__(
        self,
        table: list[Block],
        buffers: Callable[[str], Any],
        live: Callable[[int], Any],
        path: Callable[[int], str],
        into: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Use the blocks in `table`, and the live anchor that `live` returns for a number (None: it no longer exists).

        `buffers` returns the bytes of the buffer with a key. `into(key, memory)`, if given, reads the bytes of a buffer
        directly into `memory`. `path` returns the path to the anchor with a number, for messages.
        """
        self.table = table
        self._buffers = buffers
        self._into = into
        self._anchor = live
        self._anchor_path = path
        self._storages: dict[int, Any] = {}
        self._arrays: dict[int, Any] = {}
        self._used_addresses: set[int] = set()

    def fill_live_memory(self) -> None:
        """Fill the live memory of each anchor with the recorded bytes of its block.

        Memory that several anchors share is filled once. Call this before any object is built: the unpickling of
        some classes reads an array at once.
        """
        for number, block in enumerate(self.table):
            if block.anchor_number >= 0:
                self._use_live_memory(number, block)
                if number in self._arrays or number in self._storages:
                    self._fill(number, block)

    def _use_live_memory(self, number: int, block: Block) -> None:
        anchor = self._anchor(block.anchor_number)
        if anchor is None:
            return
        if is_tensor(anchor):
            storage = anchor.untyped_storage()
            fits = storage.nbytes() == block.nbytes and str(storage.device) == block.device
            if fits and storage.data_ptr() not in self._used_addresses:
                self._used_addresses.add(storage.data_ptr())
                self._storages[number] = storage
        else:
            address, nbytes, _ = extent(anchor)
            if nbytes == block.nbytes and address not in self._used_addresses:
                self._used_addresses.add(address)
                self._arrays[number] = bytes_at(address, nbytes, anchor)

    def storage(self, number: int) -> Any:
        """Return the block with this number as a torch storage."""
        import torch

        if number not in self._storages:
            block = self.table[number]
            if number in self._arrays:
                self._storages[number] = torch.from_numpy(self._arrays[number]).untyped_storage()
            else:
                self._storages[number] = torch.UntypedStorage(block.nbytes, device=block.device)
                self._fill(number, block)
        return self._storages[number]

    def array(self, number: int) -> Any:
        """Return the block with this number as a NumPy array of bytes."""
        import numpy as np

        if number not in self._arrays:
            block = self.table[number]
            if number in self._storages:
                self._arrays[number] = bytes_of(self._storages[number])
            else:
                self._arrays[number] = np.empty(block.nbytes, np.uint8)
                self._fill(number, block)
        return self._arrays[number]

    def owning_array(self, number: int, dtype: Any, shape: Any, strides: Any) -> Any:
        """Return a new array that owns the memory of a whole block.

        Return None if an array or tensor uses the block already, or if no new array has these strides. The array must
        own its memory, because only such an array can be resized and is the `base` of its views.
        """
        import numpy as np

        block = self.table[number]
        if number in self._arrays or number in self._storages or block.device != "cpu":
            return None
        for order in ("C", "F"):
            array = np.empty(shape, dtype, order)
            if array.nbytes and (array.nbytes, array.strides) == (block.nbytes, strides):
                self._arrays[number] = array.reshape(-1, order=order).view(np.uint8)
                self._fill(number, block)
                return array
        return None

    def _fill(self, number: int, block: Block) -> None:
        """Write the recorded bytes of a block into its storage or array."""
        import numpy as np

        if block.device == "meta" or not block.nbytes:
            return
        if block.key is not None and block.device == "cpu" and self._into is not None:
            self._into(block.key, self.array(number))
            return
        if block.data is not None and block.device == "cpu" and number in self._storages:
            # this is faster for the many small blocks that only tensors use
            if len(block.data) == block.nbytes:
                ctypes.memmove(self._storages[number].data_ptr(), block.data, block.nbytes)
                return
        data = block.data if block.key is None else self._buffers(block.key)
        source = np.frombuffer(data, np.uint8)
        if source.nbytes != block.nbytes:
            raise StateError(
                f"Memory block {block.key} of {self._anchor_path(block.anchor_number)} has {source.nbytes} bytes "
                f"instead of {block.nbytes}: the checkpoint is damaged. Replay from an earlier one.",
                slug="state-buffer",
            )
        if block.device == "cpu":
            self.array(number)[:] = source
        else:
            import torch

            flat = torch.empty(0, dtype=torch.uint8, device=block.device)
            flat.set_(self._storages[number])
            flat.copy_(torch.from_numpy(source.copy()))
