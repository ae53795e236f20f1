"""Whether compressing an object pays: told by a sample of it, and by the disk as it was of late."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

from rearview.errors import StoreError
from rearview.store.shrunk import compressor

SPACE = 0.5
"""What shrinks to this share of itself is compressed for the space alone."""
NOTICEABLE = 0.7
"""What stays above this share is never compressed: trained weights and moments (0.92 to 0.96, in
bfloat16 0.78) cost processor time that training wants, and give next to nothing back."""
PLACES = 16
"""Places of an object that are sampled: it may be filled from one end."""
PIECE = 1 << 10
"""Bytes from each place."""
TELLING = 8 << 20
"""Writes of fewer bytes tell how long a sync takes, not how fast the disk is."""
FIRST, LONGEST = 16, 1024
"""How often a buffer that does not shrink is passed over before it is sampled again: at first, and
after it was found so time and again."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What compressing some of an object came to."""

    nbytes: int
    shrunk: int
    """Bytes that were left of them."""
    seconds: float
    """Processor seconds that it took."""

    @property
    def share(self) -> float:
        """What is left of each byte."""
        return self.shrunk / self.nbytes


@dataclass(frozen=True, slots=True)
class Disk:
    """How fast the disk of the store took what was written to it.

    >>> Disk().after(100, 1.0).after(300, 1.0).speed
    233.33333333333334
    """

    nbytes: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float | None:
        """Bytes a second; None before anything was written."""
        return self.nbytes / self.seconds if self.seconds else None

    def after(self, nbytes: int, seconds: float) -> Disk:
        """Return what is known after one more write; each earlier one counts half as much."""
        return Disk(self.nbytes / 2 + nbytes, self.seconds / 2 + seconds)


def pays(sample: Sample, disk: Disk) -> bool:
    """Say whether an object like `sample` is to be compressed.

    Zeros are, for their space; dense floats are not, however slow the disk; what lies between is
    where compressing it and writing less is the faster way.

    >>> fast, slow = Disk(2e9, 1.0), Disk(5e7, 1.0)
    >>> zeros, floats, half = Sample(100, 1, 1e-7), Sample(100, 92, 2e-7), Sample(100, 60, 2e-7)
    >>> [pays(zeros, fast), pays(floats, fast), pays(half, fast)]
    [True, False, False]
    >>> [pays(zeros, slow), pays(floats, slow), pays(half, slow)]
    [True, False, True]
    """
    if sample.share <= SPACE:
        return True
    if sample.share > NOTICEABLE or disk.speed is None:
        return False
    return sample.seconds + sample.shrunk / disk.speed < sample.nbytes / disk.speed


@dataclass(slots=True)
class _Pause:
    length: int
    left: int


class Worth:
    """What one process has learnt of its buffers and its disk. Used by one thread at a time."""

    def __init__(self) -> None:
        self.disk = Disk()
        self._compressor: Any = compressor()
        self._pauses: dict[str, _Pause] = {}

    @classmethod
    def of(cls, compress: str) -> Self | None:
        """Return it for the setting of that name; None if nothing is to be compressed.

        So too where the library is not installed: a run is recorded all the same.
        """
        try:
            return None if compress == "never" else cls()
        except StoreError:
            return None

    def share(self, key: str, view: memoryview) -> float | None:
        """Return to what share of it `view` will shrink, if compressing pays; else None.

        `key` is the name of the buffer: one that did not shrink is mostly passed over.
        """
        pause = self._pauses.get(key)
        if pause is not None and pause.left:
            pause.left -= 1
            return None
        sample = self.sample(view)
        if pays(sample, self.disk):
            self._pauses.pop(key, None)
            return sample.share
        self.refuse(key)
        return None

    def refuse(self, key: str) -> None:
        """Take note that the buffer does not shrink."""
        known = self._pauses.get(key)
        length = FIRST if known is None else min(2 * known.length, LONGEST)
        self._pauses[key] = _Pause(length, length)

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Take note of a write, from its first byte until it was on the device."""
        if nbytes >= TELLING:
            self.disk = self.disk.after(nbytes, seconds)

    def sample(self, view: memoryview) -> Sample:
        """Return what compressing a little of `view` comes to."""
        piece = min(PIECE, len(view) // PLACES)
        last = len(view) - piece
        began = time.thread_time()
        some = b"".join(
            view[at : at + piece] for at in (last * k // (PLACES - 1) for k in range(PLACES))
        )
        shrunk = self._compressor.compress(some, self._compressor.FLUSH_FRAME)
        return Sample(len(some), len(shrunk), time.thread_time() - began)
