"""Make chance repeatable: everything random in a run follows from one recorded number.

Without this an unseeded script would differ at its first draw. In a forked child the operating
system's own entropy is put back, so that siblings never draw the same "random" identifiers.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

_real_urandom = os.urandom
_real_seed = random.Random.seed


@dataclass
class Stream:
    """Bytes that follow from `key` alone.

    >>> Stream(b"k").read(4) == Stream(b"k").read(4)
    True
    """

    key: bytes
    count: int = 0
    left: bytes = field(default=b"", repr=False)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        while len(self.left) < size:
            block = hashlib.sha256(self.key + self.count.to_bytes(8, "big")).digest()
            self.count += 1
            self.left += block
        out, self.left = self.left[:size], self.left[size:]
        return out


def install(key: bytes) -> Stream:
    """Let `os.urandom` and what rests on it (secrets, uuid4, unseeded generators) follow `key`."""
    stream = Stream(key)
    _use(stream.read)
    random.seed(int.from_bytes(stream.read(32), "big"))
    os.register_at_fork(after_in_child=remove)
    return stream


def remove() -> None:
    """Give the process the operating system's entropy back."""
    _use(_real_urandom)


def _use(urandom: Callable[[int], bytes]) -> None:
    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined]  # SystemRandom, hence secrets
    for name in ("uuid", "secrets", "tempfile"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_urandom"):
            module._urandom = urandom

    def seed(self: random.Random, a: object = None, version: int = 2) -> None:
        if a is None and urandom is not _real_urandom and type(self) is not random.SystemRandom:
            a = int.from_bytes(urandom(2500), "big")
        _real_seed(self, a, version)  # type: ignore[arg-type]  # whatever the caller gave

    random.Random.seed = seed if urandom is not _real_urandom else _real_seed  # type: ignore[method-assign,assignment]
