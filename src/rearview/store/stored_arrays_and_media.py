"""Describe logged arrays, tensors, images, histograms and other media, and load them from the store.

Each value is stored as an object. No pickle is involved: an array is its raw bytes with a dtype and a shape, an image is
a PNG file.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import wave
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import ObjectRef
from rearview.store.values_as_json import fields_of, load

Get = Callable[[ObjectRef], Any]

KINDS = ("array", "tensor", "image", "histogram", "audio", "text", "table", "confusion")
TEXT = '{"$object":"'
"""First characters of the text that describes a stored value in an SQL column."""
_OID = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"(?!\.)[\w.\-]+/(?!\.)[\w.\-]+")
_NUMPY = {
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
    "int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "bool": "|b1",
    "uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
}  # fmt: skip
"""Torch's name of a dtype -> NumPy's name of it, for the dtypes that both libraries have."""
_NAMES = {text[1:]: name for name, text in _NUMPY.items()}
_LONG_HEAD = 60_000
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, repr=False)
class StoredValue:
    """A logged array, tensor, image or histogram whose bytes are in the store.

    `load()` returns the value that was logged; `raw()` returns its bytes and needs no library.
    """

    kind: str
    """Kind of the value: one of `KINDS`, such as `tensor`."""
    dtype: str
    """Name of the dtype in torch or NumPy: `bfloat16` for a tensor, `<f4` for an array; empty for an image."""
    shape: tuple[int, ...]
    """Shape of the array; for an image, height and width, if known; for a histogram, the number of bins."""
    oid: str
    nbytes: int
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The description of the value, as `values_as_json.convert` returned it for the record."""
    _get: Get | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.describe()}, {self.nbytes} bytes>"

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return a short description of the value.

        >>> StoredValue("tensor", "bfloat16", (64, 10), "", 1280).describe()
        'bfloat16[64, 10]'
        >>> StoredValue("histogram", "float64", (8,), "", 136).describe()
        'histogram of 8 bins'
        """
        if self.kind == "image":
            size = f" {self.shape[1]}\u00d7{self.shape[0]}" if len(self.shape) == 2 else ""
            return f"image{size}"
        if self.kind in _SHOWN:
            return _SHOWN[self.kind](self)
        if self.kind == "histogram":
            return f"histogram of {self.shape[0]} bins" if self.shape else "histogram"
        name = _NAMES.get(self.dtype.lstrip("<|>="), self.dtype)
        return f"{name}{list(self.shape)}"

    def raw(self) -> bytes:
        """Return the stored bytes of the value, checked against their hash; for an image, these are a PNG file."""
        if self._get is None or not _OID.fullmatch(self.oid):
            raise self._damaged("its record names no object")
        pack = self.facts.get("pack")
        if pack is not None and not _PACK.fullmatch(str(pack)):
            raise self._damaged("its record names no pack")
        offset = int(self.facts.get("offset") or 0)
        return bytes(self._get(ObjectRef(self.oid, self.nbytes, pack, offset)))

    def load(self) -> Any:
        """Return the logged value, or this `StoredValue` if the library of the value is not installed.

        A tensor is returned as a torch tensor on the CPU, an array as a NumPy array, a histogram as the pair
        (counts, edges of the bins). An image is returned as a PIL image or, if Pillow is not installed, as the bytes
        of its PNG file.
        """
        if self.kind == "image":
            return self._image()
        data = self.raw()
        try:
            return load(self.facts, data)
        except ImportError:
            return self
        except (
            *(ValueError, TypeError, AttributeError, RuntimeError, LookupError, EOFError),
            *(wave.Error, zlib.error, struct.error),
        ) as exc:
            raise self._damaged(f"{len(data)} bytes are no {self.describe()}: {exc}") from exc

    def numpy(self) -> Any:
        """Return an array or tensor as a NumPy array; values of bfloat16 or float8 as float32."""
        if self.kind not in {"array", "tensor"}:
            raise UsageError(
                f"A value of the kind {self.kind} is not a single array. `load()` returns the logged "
                "value, `raw()` its bytes.",
                slug="not-an-array",
            )
        try:
            import numpy as np
        except ImportError as exc:
            raise UsageError(
                "numpy is not installed, so there is no array. Install it with `pip install numpy`, or "
                "take `raw()`, `dtype` and `shape`.",
                slug="missing-library",
            ) from exc
        return np.load(io.BytesIO(self.npy()), allow_pickle=False)

    def npy(self) -> Any:
        """Return an array or tensor as the bytes of an `.npy` file, without using NumPy.

        NumPy has no bfloat16 and no float8. Their values are converted to float32, which holds each of them
        exactly. Converting float8 needs torch.
        """
        data, dtype = self.raw(), self.dtype
        if self.kind == "tensor":
            if dtype == "bfloat16":
                data, dtype = _widened(data), "float32"
            if dtype not in _NUMPY:
                loaded = self.load()
                if loaded is self:
                    raise UsageError(
                        f"NumPy has no {dtype}, and torch, which has, is not installed. Install torch, "
                        "or take `raw()`.",
                        slug="missing-library",
                    )
                data, dtype = loaded.float().numpy().tobytes(), "float32"
            descr: Any = _NUMPY[dtype]
        else:
            descr = fields_of(self.facts.get("descr")) or dtype
            if descr not in _NUMPY.values() and isinstance(descr, str):
                descr, data = self._extension_array(descr, data)
        head = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {self.shape!r}, }}"
        # version 1 of the .npy format, unless the header is very long or has a character beyond Latin-1
        old = len(head) < _LONG_HEAD and max(head) <= "\xff"
        text = head.encode("latin1" if old else "utf-8")
        text += b" " * (-(len(text) + (11 if old else 13)) % 64) + b"\n"
        version = b"\x01\x00" if old else b"\x03\x00"
        return b"\x93NUMPY" + version + struct.pack("<H" if old else "<I", len(text)) + text + data

    def _extension_array(self, descr: str, data: bytes) -> tuple[str, bytes]:
        """Return (`descr`, `data`): the dtype and the bytes of an array, which are converted if NumPy lacks the dtype.

        Values of a dtype that NumPy does not have, such as bfloat16, are converted to float32.
        """
        if re.fullmatch(r"[<>|=][A-Za-z]\d*(\[\w+\])?", descr):
            return descr, data
        if descr == "bfloat16":
            return "<f4", _widened(data)
        loaded = self.load()
        if loaded is self:
            raise UsageError(
                f"NumPy itself has no {descr}. Install ml_dtypes, or take `raw()`.",
                slug="missing-library",
            )
        return "<f4", loaded.astype("<f4").tobytes()

    def histogram(self) -> tuple[list[float], list[float]]:
        """Return (counts, edges of the bins) of a histogram as lists, without using a library."""
        data = self.raw()
        bins = self.shape[0] if self.shape else 0
        if self.kind != "histogram" or len(data) != 8 * (2 * bins + 1):
            raise self._damaged(f"{len(data)} bytes are no {self.describe()}")
        numbers = struct.unpack(f"<{2 * bins + 1}d", data)
        return list(numbers[bins + 1 :]), list(numbers[: bins + 1])

    def _image(self) -> Any:
        data = self.raw()
        try:
            from PIL import Image
        except ImportError:
            return data
        try:
            image = Image.open(io.BytesIO(data), formats=["PNG"])
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return data
        return image

    def _damaged(self, why: str) -> StoreError:
        return DamagedError(
            f"The {self.kind} {self.oid[:12]} cannot be read: {why}. `rearview verify` lists what is "
            "damaged.",
            slug="value-damaged",
        )


def _sound(value: StoredValue) -> str:
    """Return a description of a recorded sound with its length, such as `audio of 1.5 s`."""
    rate = value.facts.get("rate")
    frames = value.shape[0] if value.shape else 0
    if not isinstance(rate, int) or rate <= 0:
        return "audio"
    return f"audio of {frames / rate:.3g} s"


_SHOWN: dict[str, Callable[[StoredValue], str]] = {
    "audio": _sound,
    "text": lambda value: f"text of {value.shape[0]} characters" if value.shape else "text",
    "table": lambda value: (
        "table of {} rows and {} columns".format(*value.shape) if len(value.shape) == 2 else "table"
    ),
    "confusion": lambda value: (
        f"confusion matrix of {value.shape[0]} classes" if value.shape else "confusion matrix"
    ),
}
"""Kind of a value -> function that describes a value of this kind in a few words."""


def stored_value(facts: Any, get: Get | None = None) -> StoredValue | None:
    """Return the stored value that `facts` describes, or None if `facts` is not a valid description.

    Every field is checked, because the store may come from a stranger. `get` returns the bytes of an object; without
    `get`, the value cannot be loaded.
    """
    if not isinstance(facts, dict) or not isinstance(facts.get("$object"), str):
        return None
    kind, dtype, shape = facts.get("kind"), facts.get("dtype", ""), facts.get("shape", [])
    nbytes: Any = facts.get("nbytes")
    if kind not in KINDS or not isinstance(dtype, str) or not _counts(shape):
        return None
    if not _counts([nbytes]) or not _counts([facts.get("offset") or 0]):
        return None
    return StoredValue(kind, dtype, tuple(shape), facts["$object"], nbytes, dict(facts), get)


def value_in_text(cell: Any, get: Get | None = None) -> StoredValue | None:
    """Return the stored value that `cell`, a text from an SQL table, describes; return None for any other cell."""
    if not (isinstance(cell, str) and cell.startswith(TEXT)):
        return None
    try:
        value = stored_value(json.loads(cell), get)
    except ValueError:
        return None
    return value if value is not None and _OID.fullmatch(value.oid) else None


def is_png(data: Any) -> bool:
    """Return True if `data` begins with the signature of PNG files."""
    return bytes(data[: len(_PNG)]) == _PNG


def histogram_svg(counts: list[float], width: int = 96, height: int = 32) -> str:
    """Return an SVG image, of `width` by `height` pixels, with one bar for each of the `counts` of a histogram.

    >>> histogram_svg([1.0, 2.0]).count("<rect")
    2
    """
    most = max((count for count in counts if math.isfinite(count)), default=0.0)
    step = width / max(1, len(counts))
    bars = "".join(
        f'<rect x="{k * step:.2f}" y="{height - tall:.2f}" width="{step:.2f}" height="{tall:.2f}"/>'
        for k, count in enumerate(counts)
        for tall in [height * count / most if most > 0 and math.isfinite(count) else 0.0]
    )
    return f'<svg width="{width}" height="{height}" fill="currentColor">{bars}</svg>'


def _counts(values: Any) -> bool:
    """Return True if `values` is a list of integers that are not negative."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**62 for value in values
    )


def _widened(data: bytes) -> bytes:
    """Return bfloat16 numbers as float32: the same bits, followed by zeros."""
    out = bytearray(2 * len(data))
    out[2::4], out[3::4] = data[0::2], data[1::2]
    return bytes(out)
