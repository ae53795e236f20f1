"""Fingerprints of variables: hashes of their content, equal for equal content in every process.

Numbers, texts, arrays, CPU tensors, data frames, and containers of such values have a fingerprint. A value of any other
class has no fingerprint, and is not compared.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from rearview.state.memory_blocks import is_array, is_tensor

BYTES_A_SECOND = 1e9
"""Assumed bytes hashed per second: a value whose hash would take too long is left out before its bytes are read."""
ITEM_SECONDS = 2e-6
"""Assumed seconds for hashing one item of a list or dict."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), dt.date, dt.time, dt.timedelta, range)


class _NoFingerprint(Exception):  # noqa: N818 - it says what happened
    """The value has no fingerprint: its class is not covered, or the value is too large."""


def fingerprints(variables: Mapping[str, object], seconds: float) -> dict[str, str]:
    """Return name -> fingerprint of variables; stop after `seconds`, and leave out values without a fingerprint.

    >>> a, b = fingerprints({"x": [1, 2.5]}, 1), fingerprints({"x": [1, 2.5]}, 1)
    >>> a == b, a == fingerprints({"x": [1, 3.5]}, 1), fingerprints({"x": object()}, 1)
    (True, False, {})
    """
    end = perf_counter() + seconds
    by_name: dict[str, str] = {}
    for name, value in variables.items():
        remaining_seconds = end - perf_counter()
        if remaining_seconds <= 0:
            break
        try:
            by_name[name] = _fingerprint(value, remaining_seconds)
        except _NoFingerprint:
            continue
        except Exception:  # noqa: S112 - a method of a user's class fails
            continue
    return by_name


def _fingerprint(value: object, seconds: float) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    _add(value, digest, [seconds], 0)
    return str(digest.hexdigest())


def _add(value: Any, digest: Any, budget: list[float], depth: int) -> None:
    """Add a value to a digest; raise `_NoFingerprint` if that is not possible in the seconds in `budget`."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, dt.date):
        text = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        _spend(budget, ITEM_SECONDS + len(text) / BYTES_A_SECOND)
        digest.update(f"{kind.__name__} {len(text)} ".encode() + text)
    elif kind in {list, tuple, dict}:
        _spend(budget, ITEM_SECONDS * len(value))
        if depth > 20:
            raise _NoFingerprint
        digest.update(f"{kind.__name__} {len(value)} ".encode())
        for item in (part for pair in value.items() for part in pair) if kind is dict else value:
            _add(item, digest, budget, depth + 1)
    elif kind in {set, frozenset}:
        _spend(budget, ITEM_SECONDS * len(value))
        if not all(type(item) in _PLAIN for item in value):
            raise _NoFingerprint
        digest.update(f"set {sorted(map(repr, value))}".encode("utf-8", "surrogatepass"))
    elif is_array(value) and not value.dtype.hasobject:
        _spend(budget, value.nbytes / BYTES_A_SECOND)
        _add_array(value, digest)
    elif is_array(value) and value.dtype == object:
        _add(value.tolist(), digest, budget, depth + 1)
    elif is_tensor(value):
        if value.device.type != "cpu" or value.layout.__repr__() != "torch.strided":
            raise _NoFingerprint
        _spend(budget, value.nbytes / BYTES_A_SECOND)
        import torch

        digest.update(f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad}".encode())
        plain = value.detach().contiguous()
        if plain.numel():
            _add_array(plain.reshape(-1).view(torch.uint8).numpy(), digest)
    elif kind.__module__.startswith("pandas.") and kind.__name__ in {"DataFrame", "Series"}:
        _add_frame(value, digest, budget, depth)
    elif kind.__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "tobytes"):
        digest.update(f"{value.dtype} ".encode() + value.tobytes())
    else:
        raise _NoFingerprint


def _spend(budget: list[float], seconds: float) -> None:
    budget[0] -= seconds
    if budget[0] < 0:
        raise _NoFingerprint


def _add_array(value: Any, digest: Any) -> None:
    import numpy as np

    digest.update(f"array {value.dtype.str} {value.shape} ".encode())
    if value.size:
        digest.update(memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))


def _add_frame(value: Any, digest: Any, budget: list[float], depth: int) -> None:
    """Add a data frame or series to a digest: its class, its index, and its columns or values."""
    digest.update(type(value).__name__.encode())
    columns = [value[name] for name in value.columns] if value.ndim == 2 else [value]
    if value.ndim == 2 and not value.columns.is_unique:
        raise _NoFingerprint
    for part in (value.index, *columns):
        _add((str(part.dtype), str(part.name)), digest, budget, depth + 1)
        _add(part.to_numpy(), digest, budget, depth + 1)
