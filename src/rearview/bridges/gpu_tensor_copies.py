"""Copy tensors from an accelerator to the background writer while the computation continues.

A copy goes into pinned memory without waiting for the device; an event after it says when it is done.
Until then this call and all later calls wait. Pinned memory is reused. If the device or this version of
torch has no pinned memory, `tensor.cpu()` is used, which blocks the program.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any


class GpuTensorCopies:
    """Calls whose tensors are being copied from an accelerator, in order."""

    def __init__(self, torch: Any, cuda: Any = None, *, pin: bool = True) -> None:
        self._torch = torch
        self._cuda = cuda or torch.cuda
        self._pin = pin
        self._free: dict[int, list[Any]] = {}
        self._events: list[Any] = []
        self._pinned: list[Any] = []
        self._held: deque[tuple[bytes, list[Any], list[Any], list[Any]]] = deque()
        self.nbytes = 0
        """Bytes of pinned memory in use."""

    @classmethod
    def when_present(cls) -> GpuTensorCopies | None:
        """Return an instance if this program uses torch with a CUDA device; else None."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        try:
            return cls(torch) if cuda is not None and cuda.is_initialized() else None
        except Exception:
            return None

    def stage(self, value: Any) -> Any:
        """Return `value` with device tensors replaced by pinned ones that are being filled."""
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
        kept = self._free.get(nbytes)
        flat = kept.pop() if kept else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        host = flat.view(tensor.dtype).reshape(tensor.shape)
        host.copy_(
            tensor, non_blocking=True
        )  # queued on the current stream: in order with its work
        event = cuda.Event()
        event.record(cuda.current_stream(tensor.device))
        self._events.append(event)
        self._pinned.append(flat)
        return host

    def is_under_way(self) -> bool:
        """Return True while copies are running or calls are held back."""
        return bool(self._events or self._held)

    def hold(self, payload: bytes, buffers: list[Any]) -> None:
        """Hold a call back until the copies for it are done."""
        self._held.append((payload, buffers, self._events, self._pinned))
        self.nbytes += sum(int(flat.nbytes) for flat in self._pinned)
        self._events, self._pinned = [], []

    def finished(self, *, wait: bool) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield the calls whose copies are done, in order; `wait` for all of them."""
        while self._held:
            payload, buffers, events, pinned = self._held[0]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                return
            yield payload, buffers
            self._held.popleft()
            self.nbytes -= sum(int(flat.nbytes) for flat in pinned)
            for flat in pinned:
                self._free.setdefault(int(flat.nbytes), []).append(flat)
