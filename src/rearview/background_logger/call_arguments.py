"""Encode the arguments of a logger's call as bytes, and decode them in the process that owns the logger.

Arguments are copied at the time of the call, so that training may change them afterwards. Numbers, texts and
containers of them are marshalled. Everything else is pickled; the memory of arrays and tensors is sent next
to the pickle. Tensors arrive on the CPU and without gradients.

`GpuTensorCopies` copies tensors from a GPU into pinned memory without waiting for the device. The call that
has such an argument, and all later calls, are sent when a CUDA event says that the copy is done. If the
device or this version of torch has no pinned memory, `tensor.cpu()` is used, which blocks the program.
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
"""Types of values that are marshalled: marshal restores them exactly."""
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
    """Return (payload, buffers) of a call: its method number and arguments as bytes, and the memory of arrays."""
    if is_plain(args) and is_plain(kwargs):
        return marshal.dumps((number, args, kwargs)), []
    buffers: list[Any] = []
    out = io.BytesIO()
    _Pickler(out, buffers).dump((args, kwargs))
    raw = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in raw]
    return marshal.dumps((-1 - number, out.getvalue(), sizes)), raw


def decode(payload: Any, buffers: Callable[[Sequence[int]], list[Any]]) -> tuple[int, Any, Any]:
    """Return (method number, arguments, named arguments); `buffers` returns the buffers of the given sizes."""
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
    """Return (function, arguments) that rebuild a dense tensor from its bytes, or None to pickle it as torch does."""
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
    """Return a tensor on the memory of a writable buffer."""
    import torch

    kind = getattr(torch, dtype)
    if buffer is None:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(shape)


class GpuTensorCopies:
    """Copies tensors from a GPU to pinned memory, and holds calls back, in order, until their copies are done."""

    def __init__(self, torch: Any, cuda: Any = None, *, pin: bool = True) -> None:
        self._torch = torch
        self._cuda = cuda or torch.cuda
        self._pin = pin
        self._free_memory: dict[int, list[Any]] = {}
        """Size in bytes -> pinned memory that can be used again."""
        self._events: list[Any] = []
        self._pinned: list[Any] = []
        self._waiting_calls: deque[tuple[bytes, list[Any], list[Any], list[Any]]] = deque()
        self.nbytes = 0
        """Bytes of pinned memory in use."""

    @classmethod
    def when_present(cls) -> GpuTensorCopies | None:
        """Return an instance, or None if the program does not use torch with a CUDA device."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        try:
            return cls(torch) if cuda is not None and cuda.is_initialized() else None
        except Exception:
            return None

    def stage(self, value: Any) -> Any:
        """Return `value` with GPU tensors replaced by tensors in pinned memory, to which copies have started."""
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
        # queued on the current stream, so after the work that computes the tensor
        host.copy_(tensor, non_blocking=True)
        event = cuda.Event()
        event.record(cuda.current_stream(tensor.device))
        self._events.append(event)
        self._pinned.append(flat)
        return host

    def is_under_way(self) -> bool:
        """Return True while copies are running or calls are waiting."""
        return bool(self._events or self._waiting_calls)

    def hold(self, payload: bytes, buffers: list[Any]) -> None:
        """Hold a call back until the copies that were started since the last call are done."""
        self._waiting_calls.append((payload, buffers, self._events, self._pinned))
        self.nbytes += sum(int(flat.nbytes) for flat in self._pinned)
        self._events, self._pinned = [], []

    def finished(self, *, wait: bool) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield the calls whose copies are done, in order; with `wait`, wait for the copies of all calls."""
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
