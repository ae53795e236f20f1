"""Names of the builders: the functions that a skeleton names and `restore` calls to build objects again.

A skeleton never names a function of Rearview directly, so functions can be renamed. `Lost` takes
the place of an object that could not be captured: a restored program that uses it fails by `refuse`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from rearview.errors import StateError

NAMES = (
    "anchor",
    "tensor",
    "special_tensor",
    "array",
    "small_array",
    "function",
    "method",
    "cell",
    "weakref",
    "proxy",
    "address",
    "weak",
    "fill_weak",
    "instance",
    "fill",
    "file",
    "lock",
    "module",
    "named",
    "view",
    "torch_generator",
    "generator",
    "live_generator",
    "fill_generator",
    "walk",
    "fill_walk",
    "loader",
    "fill_loader",
    "lost",
)


LOST_CLASS = "the class was made inside a function after the loop began"
"""Reason of a lost class; the reader of a skeleton recognises such a class by this ending."""


class Builder:
    """Represents a builder in a pickle stream: pickle requires a callable there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_args: object) -> object:
        """Raise TypeError: a builder is only named in a stream, never called."""
        raise TypeError(f"the builder {self.name} is named in a stream, never called")


BUILDERS = {name: Builder(name) for name in NAMES}


@lru_cache(maxsize=4)
def prelude(count: int) -> bytes:
    """Return pickle opcodes that load `count` persistent objects into the memo, in order.

    Capture fills the memo of its pickler in the same order, so the numbers agree.
    """
    loads = (b"J" + number.to_bytes(4, "little") + b"Q\x940" for number in range(count))
    return b"\x80\x05" + b"".join(loads)


REFUSAL_HANDLERS: list[Callable[[StateError], None]] = []
"""Called by `refuse` with the error; a handler may start the program again instead of returning."""


def refuse(error: StateError) -> NoReturn:
    """Call the handlers, then raise the error."""
    for handler in REFUSAL_HANDLERS:
        handler(error)
    raise error


class Lost:
    """Takes the place of an object that was not captured; every use of it raises StateError."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __getattribute__(self, name: str) -> Any:
        if name in {"__class__", "__reduce_ex__", "__reduce__"}:
            return object.__getattribute__(self, name)
        return refuse(
            StateError(
                "This object was not part of the checkpoint "
                f"({object.__getattribute__(self, '_reason')}). Replay from the start of the loop.",
                slug="state-lost",
            )
        )

    def _refuse(self, *_args: object) -> Any:
        return Lost.__getattribute__(self, "use")

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __neg__ = __abs__ = __float__ = __int__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse


def reason_of(lost: Lost) -> str:
    """Return why an object was not captured."""
    return str(object.__getattribute__(lost, "_reason"))
