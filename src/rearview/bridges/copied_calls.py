"""A call as bytes: its arguments are copied at the time of the call, so that training may change them.

Numbers, texts and containers of them are marshalled. Everything else is pickled; the memory of arrays and
tensors is sent next to the pickle. Tensors arrive on the CPU and without gradients.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

PLAIN = frozenset({str, float, int, bool, type(None), bytes})
"""Types that are marshalled; each is restored exactly."""
_CONTAINERS = (dict, list, tuple)


def is_plain(value: Any) -> bool:
    """Return True if a value is made of numbers, texts and containers of exactly these types.

    >>> is_plain({"loss": 0.5, "tags": ["a", None]}), is_plain({"x": object()})
    (True, False)
    """
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is dict:
        return PLAIN.issuperset(map(type, value)) and all(map(is_plain, value.values()))
    return kind in _CONTAINERS and all(map(is_plain, value))


def encode(number: int, args: Any, given: Any) -> tuple[bytes, list[Any]]:
    """Return the payload of a call and its buffers."""
    if is_plain(args) and is_plain(given):
        return marshal.dumps((number, args, given)), []
    buffers: list[Any] = []
    out = io.BytesIO()
    _Pickler(out, buffers).dump((args, given))
    raw = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in raw]
    return marshal.dumps((-1 - number, out.getvalue(), sizes)), raw


def decode(payload: Any, buffers: Callable[[Sequence[int]], list[Any]]) -> tuple[int, Any, Any]:
    """Return number, arguments and named arguments of a call; `buffers` copies memory out."""
    number, first, second = marshal.loads(payload)  # noqa: S302 - our own other side wrote it
    if number >= 0:
        return number, first, second
    args, given = pickle.loads(first, buffers=buffers(second))
    return -1 - number, args, given


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
    """Return how to rebuild a dense tensor from its bytes; None uses its own pickling."""
    import torch

    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.device.type == "meta":
        return None
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    data = plain.reshape(-1).view(torch.uint8) if plain.numel() else None
    shape, dtype = tuple(plain.shape), str(plain.dtype).removeprefix("torch.")
    buffer = None if data is None else pickle.PickleBuffer(data.numpy())
    return rebuild_tensor, (buffer, dtype, shape)


def rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return the tensor whose bytes are in a writable buffer."""
    import torch

    kind = getattr(torch, dtype)
    if buffer is None:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(shape)
