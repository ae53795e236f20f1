"""Encode the arguments of a logger's call as bytes, and decode them in the logger process.

Arguments are copied at the time of the call, so that training may change them afterwards. Numbers, texts and
containers of them are encoded with marshal. All other arguments are pickled; the memory of arrays and tensors is sent
separately from the pickle. Tensors arrive on the CPU and without gradients.

`GpuTensorCopies` copies tensors from a GPU into pinned memory without waiting for the device. A call with a GPU
tensor, and all later calls, are sent when a CUDA event shows that the copy is done. If the device or this version of
torch has no pinned memory, `tensor.cpu()` is used, which blocks the program.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle

PLAIN = frozenset({str, float, int, bool, type(None), bytes})
"""Types of values that marshal restores exactly, so that they need not be pickled."""
_CONTAINERS = (dict, list, tuple)


def is_plain(value: Any) -> bool:
    """Return True if a value consists of numbers, texts, bytes, None, and dicts, lists and tuples of these.

    >>> is_plain({"loss": 0.5, "tags": ["a", None]}), is_plain({"x": object()})
    (True, False)
    """
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is dict:
        return PLAIN.issuperset(map(type, value)) and all(map(is_plain, value.values()))
    return kind in _CONTAINERS and all(map(is_plain, value))


def encode(number: int, args: Any, kwargs: Any) -> tuple[bytes, list[Any]]:
    """Return (payload, buffers) of a message: its number and the arguments as bytes, and the memory of arrays."""
    if is_plain(args) and is_plain(kwargs):
        return marshal.dumps((number, args, kwargs)), []
    buffers: list[Any] = []
    out = io.BytesIO()
    _Pickler(out, buffers).dump((args, kwargs))
    raw = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in raw]
    return marshal.dumps((-1 - number, out.getvalue(), sizes)), raw


def decode(payload: Any, buffers: Callable[[Sequence[int]], list[Any]]) -> tuple[int, Any, Any]:
    """Return (number, arguments, named arguments) of a message; `buffers(sizes)` returns its buffers."""
    number, first, second = marshal.loads(payload)  # noqa: S302 - written by the other process of this writer
    if number >= 0:
        return number, first, second
    args, kwargs = pickle.loads(first, buffers=buffers(second))
    return -1 - number, args, kwargs


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    def __init__(self, out: io.BytesIO, buffers: list[Any]) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffers.append)
        torch = sys.modules.get("torch")
        self._tensor: Any = getattr(torch, "Tensor", None)

    def reducer_override(self, obj: Any) -> Any:
        if self._tensor is not None and isinstance(obj, self._tensor):
            reduced = _reduce_tensor(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def _reduce_tensor(tensor: Any) -> Any:
    """Return (function, arguments) by which pickle rebuilds a dense tensor on the CPU, without its gradient.

    Return None for any other tensor, which torch pickles itself.
    """
    import torch

    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else None
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    buffer = None if data is None else pickle.PickleBuffer(data.numpy())
    return rebuild_tensor, (buffer, dtype, shape)


def rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor that uses the memory of `buffer`; an empty tensor if `buffer` is None."""
    import torch

    kind = getattr(torch, dtype)
    if buffer is None:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(shape)


class GpuTensorCopies:
    """Copies tensors from a GPU to pinned memory, and keeps encoded calls, in order, until their copies are done."""

    def __init__(self, torch: Any, cuda: Any = None, *, pin: bool = True) -> None:
        self._torch = torch
        self._cuda = cuda or torch.cuda
        self._pin = pin
        self._free_memory: dict[int, list[Any]] = {}
        """Size in bytes -> blocks of pinned memory of this size that can be used again."""
        self._events: list[Any] = []
        self._pinned: list[Any] = []
        self._waiting_calls: deque[tuple[bytes, list[Any], list[Any], list[Any]]] = deque()
        self.nbytes = 0
        """Size in bytes of the pinned memory that waiting calls use."""

    @classmethod
    def when_present(cls) -> GpuTensorCopies | None:
        """Return an instance, or None if the program has not initialized a CUDA device with torch."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        try:
            return cls(torch) if cuda is not None and cuda.is_initialized() else None
        except Exception:
            return None

    def stage(self, value: Any) -> Any:
        """Start to copy the GPU tensors in `value` to pinned memory; return `value` with the copies in their place."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(self.stage, value))
        if kind is dict:
            return {key: self.stage(item) for key, item in value.items()}
        torch = self._torch
        if isinstance(value, torch.Tensor) and self._is_on_device(value):
            try:
                return self._copy(value.detach())
            except Exception:
                return value.detach().cpu()
        return value

    def _is_on_device(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda) and tensor.layout is self._torch.strided

    def _copy(self, tensor: Any) -> Any:
        torch, cuda = self._torch, self._cuda
        nbytes = tensor.numel() * tensor.element_size()
        free_buffers = self._free_memory.get(nbytes)
        flat = (
            free_buffers.pop()
            if free_buffers
            else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        )
        host = flat.view(tensor.dtype).reshape(tensor.shape)
        # the copy is queued on the current stream, so it begins after the tensor is computed
        host.copy_(tensor, non_blocking=True)
        event = cuda.Event()
        event.record(cuda.current_stream(tensor.device))
        self._events.append(event)
        self._pinned.append(flat)
        return host

    def is_under_way(self) -> bool:
        """Return True if copies were started for the next call, or calls are waiting for copies."""
        return bool(self._events or self._waiting_calls)

    def hold(self, payload: bytes, buffers: list[Any]) -> None:
        """Keep a call until the copies that were started since the previous call of this method are done."""
        self._waiting_calls.append((payload, buffers, self._events, self._pinned))
        self.nbytes += sum(int(flat.nbytes) for flat in self._pinned)
        self._events, self._pinned = [], []

    def finished(self, *, wait: bool) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield (payload, buffers) of the waiting calls whose copies are done, in order.

        With `wait`, wait for the copies, and yield all calls.
        """
        while self._waiting_calls:
            payload, buffers, events, pinned = self._waiting_calls[0]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                return
            yield payload, buffers
            self._waiting_calls.popleft()
            self.nbytes -= sum(int(flat.nbytes) for flat in pinned)
            for flat in pinned:
                self._free_memory.setdefault(int(flat.nbytes), []).append(flat)
