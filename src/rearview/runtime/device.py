"""Accelerator memory on its way to the host, beside the computation.

The copy runs on a stream of its own into pinned memory that is allocated once. It starts when the
work queued so far is done, and later work on the training's stream waits for it on the device, so
the training thread itself pays only for queueing. The background thread waits for the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Fetch:
    """Copies under way; `wait` returns their bytes, valid until `Device.release`."""

    host: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are being copied."""
        return sum(int(each.nbytes) for each in self.host.values())

    def wait(self) -> dict[str, memoryview]:
        """Return the bytes of every tensor once all copies are done. Holds no lock meanwhile."""
        for event in self.events:
            event.synchronize()
        return {key: memoryview(each.numpy()).cast("B") for key, each in self.host.items()}


class Device:
    """Pinned memory and one side stream per device; one fetch at a time.

    `cuda` is `torch.cuda`, or anything that has its streams and events.
    """

    def __init__(self, cuda: Any = None, *, pin: bool = True) -> None:
        self._cuda = cuda
        self._pin = pin
        self._pinned: dict[str, Any] = {}
        self._streams: dict[Any, Any] = {}
        self.busy = False

    def fetch(self, tensors: Mapping[str, Any]) -> Fetch:
        """Queue a copy of each tensor (contiguous, on any device) to the host."""
        import torch

        cuda = self._cuda or torch.cuda
        fetch = Fetch()
        devices = {tensor.device for tensor in tensors.values()}
        for device in sorted(devices, key=str):
            current = cuda.current_stream(device)
            side = self._streams.get(device) or cuda.Stream(device)
            self._streams[device] = side
            side.wait_stream(current)  # everything computed so far is in the copy
            with cuda.stream(side):
                for key, tensor in tensors.items():
                    if tensor.device == device:
                        flat = tensor.detach().reshape(-1).view(torch.uint8)
                        host = self._host(key, flat)
                        host.copy_(flat, non_blocking=True)
                        fetch.host[key] = host
                event = cuda.Event()
                event.record(side)
            current.wait_event(event)  # nothing computed later is
            fetch.events.append(event)
        self.busy = True
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Allow the pinned memory of `fetch` to be written again."""
        fetch.host.clear()
        self.busy = False

    def close(self) -> None:
        """Give the pinned memory back."""
        self._pinned.clear()
        self._streams.clear()

    def _host(self, key: str, flat: Any) -> Any:
        import torch

        host = self._pinned.get(key)
        if host is None or host.nbytes != flat.nbytes:
            host = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=self._pin)
            self._pinned[key] = host
        return host
