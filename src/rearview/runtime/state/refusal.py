"""Refuse what a restored program must not do; who knows a better way than an error is asked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from rearview.errors import StateError

REFUSING: list[Callable[[StateError], None]] = []
"""Called before something is refused."""


def refuse(error: StateError) -> NoReturn:
    """Raise the error, unless somebody begins the program anew instead."""
    for act in REFUSING:
        act(error)
    raise error


class Lost:
    """Stands where an object could not be kept; any use of it is an error, never a guess."""

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
    """Return why an object was not kept."""
    return str(object.__getattribute__(lost, "_reason"))
