"""Convert logged values to JSON and back, exactly.

Numbers, text, true, false and null are stored as they are. A value that JSON does not have becomes a JSON object
whose first key is a marker: one of the keys with `$` below. A dictionary that the user logged becomes such an
object as well, so that its own keys are never taken for markers:

=============================  ========================================================
`{"$float": "nan"}`            nan, inf, -inf
`{"$int": "…"}`                a whole number beyond 64 bits, in decimal digits
`{"$str": "…"}`                text with lone surrogates: base64 of its UTF-8
`{"$bytes": "…"}`              bytes, in base64
`{"$json": …}`                 a list or dictionary; the same rules inside
`{"$repr": "…"}`               anything else, by its `repr`
`{"$object": oid, "kind": …}`  array, tensor, image, histogram, audio, text, table, confusion
                               matrix: bytes in the object store
=============================  ========================================================
"""

from __future__ import annotations

import base64
import enum
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from rearview.model import ObjectRef

Put = Callable[[Any], ObjectRef]

LOW, HIGH = -(2**63), 2**63
_LONGEST = 10_000
"""Most characters that are stored of the `repr` of a value."""


def convert(value: Any, put: Put | None = None) -> Any:
    """Return `value` as JSON, by the rules in the docstring of this module.

    `put` stores the bytes of arrays and media and returns their reference. If `put` is None, arrays and media are
    converted to their `repr`.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, enum.Enum) and not isinstance(value, (int, float, str)):
        return convert(value.value, put)
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, int):
        value = int(value)
        return value if LOW <= value < HIGH else {"$int": _digits(value)}
    if isinstance(value, str):
        return _text(str.__str__(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(bytes(value)).decode("ascii")}
    scalar = _scalar(value)
    if scalar is not value:
        return convert(scalar, put)
    stored = _stored(value, put) if put is not None else None
    if stored is not None:
        return stored
    return _nested(value, put)


FAMILIES = {
    **dict.fromkeys(("float", "int", "long", "bigint", "bool"), "a number"),
    **dict.fromkeys(("str", "repr"), "text"),
    "json": "a list or dictionary",
    "object": "an array or image",
    "bytes": "bytes",
}
"""Kind of a value, as in the SQL column `records.kind` -> name of its family. Values of one family may share a column."""
_MARKERS = {"$float": "float", "$int": "int", "$str": "str", "$repr": "repr"}


def family(converted: Any) -> str:
    """Return the family (a value of `FAMILIES`) of a value that `convert` returned, or "" for null.

    >>> family(convert(0.5)), family(convert("a")), family(convert([1])), family(convert(None))
    ('a number', 'text', 'a list or dictionary', '')
    """
    if converted is None:
        return ""
    if isinstance(converted, dict):
        marker = next(iter(converted))
        return FAMILIES[_MARKERS.get(marker, marker.removeprefix("$"))]
    return FAMILIES["str" if isinstance(converted, str) else "float"]


def _nested(value: Any, put: Put | None) -> Any:
    try:
        if isinstance(value, Mapping):
            return {"$json": {_key(key): _inner(item, put) for key, item in value.items()}}
        if isinstance(value, (list, tuple, set, frozenset, range)):
            return {"$json": [_inner(item, put) for item in value]}
    except RecursionError:
        return _repr(value)
    if isinstance(value, complex):
        return {"$json": {"real": _inner(value.real, put), "imag": _inner(value.imag, put)}}
    if isinstance(value, os.PathLike):
        return convert(os.fspath(value), put)
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return _repr(value)


def _inner(value: Any, put: Put | None) -> Any:
    """Return `value`, an item of a list or dictionary, as JSON; `put` is as for `convert`.

    Unlike `convert`, this returns a list without the key `$json` around it. A dictionary gets this key only if one
    of its own keys begins with `$`.
    """
    out = convert(value, put)
    if isinstance(out, dict) and "$json" in out:
        plain = out["$json"]
        if not (isinstance(plain, dict) and any(key.startswith("$") for key in plain)):
            return plain
    return out


def _key(key: Any) -> str:
    return encodable(key) if isinstance(key, str) else encodable(str(key))


def encodable(text: str) -> str:
    """Return text in which each lone surrogate is replaced by its escape, so that the text can be encoded in UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        data = value.encode("utf-8", "surrogatepass")
        return {"$str": base64.b64encode(data).decode("ascii")}
    return value


def _digits(value: int) -> str:
    sign, value = ("-", -value) if value < 0 else ("", value)
    try:
        return sign + str(value)
    except ValueError:  # longer than the interpreter's limit for decimal digits
        return sign + hex(value)


def _repr(value: Any) -> dict[str, str]:
    try:
        text = repr(value)
    except Exception as exc:  # the user's own __repr__
        text = f"<{type(value).__name__}, whose repr failed: {type(exc).__name__}>"
    return {"$repr": encodable(text[:_LONGEST])}


def _scalar(value: Any) -> Any:
    """Return the Python number in a zero-dimensional array, tensor or NumPy scalar; any other value unchanged."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) in ((), None):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            return value
    return value


def _stored(value: Any, put: Put) -> dict[str, Any] | None:
    """Store the bytes of an array, tensor, image or other media by `put`, and return their description for JSON.

    Return None, and store nothing, for any other value.
    """
    media = _media(value)
    if media is not None:
        return _described(put(media[0]), **media[1])
    pair = _histogram(value)
    if pair is not None:
        counts, edges = pair
        data = edges.tobytes() + counts.tobytes()
        return _described(put(data), kind="histogram", dtype="float64", shape=[len(counts)])
    if hasattr(value, "detach") and hasattr(value, "untyped_storage"):
        data, dtype, shape = _tensor(value)
        return _described(put(data), kind="tensor", dtype=dtype, shape=shape)
    if hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
        import numpy as np

        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            return None
        data = memoryview(array).cast("B") if array.size and array.dtype.kind in "biufc" else None
        content = array.tobytes() if data is None else data
        return _described(
            put(content), kind="array", **_dtype(array.dtype), shape=list(array.shape)
        )
    return _image(value, put)


def _media(value: Any) -> tuple[bytes, dict[str, Any]] | None:
    """Return the bytes and the description of audio, text, a table or a confusion matrix.

    Return None if `value` is none of these, or if it cannot be encoded, with a warning.
    """
    from rearview.media import as_media

    try:
        media = as_media(value)
        if media is None:
            return None
        data, facts = media.encoded()
    except Exception as exc:  # a library may raise any error, and logging must not break training
        text = f"{exc} Its repr is kept. (docs/errors.md#media)"
        warnings.warn(text, RuntimeWarning, stacklevel=6)
        return None
    return data, facts


def _dtype(dtype: Any) -> dict[str, Any]:
    """Return the description of a NumPy dtype for JSON: its name as `dtype`, and its fields as `descr` if it has any."""
    if dtype.names is not None:
        return {"dtype": dtype.str, "descr": dtype.descr}
    # for types that other libraries add, such as bfloat16, `dtype.str` names raw bytes
    added = dtype.kind == "V" and not dtype.name.startswith("void")
    return {"dtype": dtype.name if added else dtype.str}


def _tensor(value: Any) -> tuple[Any, str, list[int]]:
    import torch

    plain = value.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    return plain.reshape(-1).view(torch.uint8).numpy().data, dtype, list(value.shape)


def _histogram(value: Any) -> tuple[Any, Any] | None:
    """Return (counts, edges of the bins) if `value` looks like a result of `numpy.histogram` or `torch.histogram`, else None."""
    if not (isinstance(value, tuple) and len(value) == 2 and "numpy" in sys.modules):
        return None
    if not all(hasattr(part, "shape") and len(part.shape) == 1 for part in value):
        return None
    if len(value[1]) != len(value[0]) + 1:
        return None
    import numpy as np

    parts = [part.detach().cpu() if hasattr(part, "detach") else part for part in value]
    return np.asarray(parts[0], dtype="<f8"), np.asarray(parts[1], dtype="<f8")


def _image(value: Any, put: Put) -> dict[str, Any] | None:
    """Store a PIL image or Matplotlib figure as PNG by `put` and return its description; return None for other values."""
    out = io.BytesIO()
    if hasattr(value, "savefig"):
        value.savefig(out, format="png")
        return _described(put(out.getvalue()), kind="image", format="png")
    if hasattr(value, "getbands") and hasattr(value, "save"):
        plain = (
            value
            if value.mode in {"1", "L", "LA", "I", "P", "RGB", "RGBA"}
            else value.convert("RGB")
        )
        plain.save(out, format="png")
        shape = [value.height, value.width]
        return _described(put(out.getvalue()), kind="image", format="png", shape=shape)
    return None


def _described(ref: ObjectRef, **facts: Any) -> dict[str, Any]:
    """Return the JSON description of a value whose bytes are the object `ref`: its oid as `$object`, its size, `facts`."""
    out = {"$object": ref.oid, "nbytes": ref.nbytes, **facts}
    if ref.pack is not None:
        out |= {"pack": ref.pack, "offset": ref.offset}
    return out


def restore(value: Any, stored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value that `convert` converted to `value`; for a value stored as its `repr`, return the `repr`.

    `stored` is called with the description of each value whose bytes are an object, such as an array, and returns
    the value to put in its place. If `stored` is None, the descriptions are returned.

    >>> restore(convert([1, float("inf"), {"$odd": b"x"}]))
    [1, inf, {'$odd': b'x'}]
    """
    if isinstance(value, list):
        return [restore(item, stored) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and "$json" in value:
        return restore_json(value["$json"], stored)
    for marker, decode in _DECODE.items():
        if marker in value and len(value) == 1:
            return decode(value[marker])
    if "$object" in value:
        return value if stored is None else stored(value)
    return {key: restore(item, stored) for key, item in value.items()}


def restore_json(value: Any, stored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the list or dictionary for `value`, the JSON that `convert` stored under the key `$json`.

    The keys of a dictionary are those that the user logged, even if they look like markers such as `$float`.
    """
    if isinstance(value, dict):
        return {key: restore(item, stored) for key, item in value.items()}
    return restore(value, stored)


def _int(text: str) -> int:
    body = text.removeprefix("-")
    number = int(body, 16) if body.startswith("0x") else int(body)
    return -number if text.startswith("-") else number


_DECODE: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": _int,
    "$str": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "$bytes": base64.b64decode,
    "$repr": str,
}


def load(value: Mapping[str, Any], data: bytes) -> Any:
    """Return the array, tensor, histogram or other media whose description is `value` and whose bytes are `data`.

    An image is returned as its PNG bytes, a histogram as the pair (counts, edges).
    """
    from rearview.media import MEDIA

    kind = value.get("kind")
    if kind == "image":
        return data
    if kind in MEDIA:
        return MEDIA[kind].decoded(data, value)
    if kind == "tensor":
        import torch

        dtype = getattr(torch, value["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"torch has no dtype {value['dtype']!r}")
        if not data:
            return torch.empty(value["shape"], dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"])
    import numpy as np

    if kind == "histogram":
        edges, counts = np.split(np.frombuffer(data, "<f8"), [value["shape"][0] + 1])
        return counts, edges
    return np.frombuffer(data, _numpy_dtype(value)).reshape(value["shape"]).copy()


def _numpy_dtype(value: Mapping[str, Any]) -> Any:
    import numpy as np

    if value.get("descr") is not None:
        return np.lib.format.descr_to_dtype(fields_of(value["descr"]))
    try:
        return np.dtype(value["dtype"])
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, value["dtype"]))


def fields_of(descr: Any) -> Any:
    """Return `descr`, the fields of a structured dtype as read from JSON, with tuples where NumPy expects tuples.

    Any other value is returned unchanged.
    """
    if not isinstance(descr, list):
        return descr
    return [
        (_field_name(name), fields_of(kind), *(tuple(shape) for shape in shape_fields))
        for name, kind, *shape_fields in descr
    ]


def _field_name(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name
