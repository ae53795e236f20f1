"""Names for what restore knows how to build; a skeleton refers to them, never to our functions."""

from __future__ import annotations

from functools import lru_cache

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
"""Why a class is lost; ends what stands for it."""


class Builder:
    """Stands for a builder in the stream: pickle insists on something callable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_args: object) -> object:
        """Refuse: it is never called, only named."""
        raise TypeError(f"the builder {self.name} is named in a stream, never called")


BUILDERS = {name: Builder(name) for name in NAMES}


@lru_cache(maxsize=4)
def prelude(count: int) -> bytes:
    """Return pickle opcodes that load `count` persistent objects into the memo, in order.

    Capture fills the memo of its pickler in the same order, so the numbers agree.
    """
    loads = (b"J" + number.to_bytes(4, "little") + b"Q\x940" for number in range(count))
    return b"\x80\x05" + b"".join(loads)
