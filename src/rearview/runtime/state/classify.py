"""Which kind an object is of: a value, a thing to look through, an anchor, or one to be replaced."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import re
import sys
import types
import uuid
import weakref
from typing import Any

from rearview.runtime.state.containers import (
    CONTAINERS,
    PLAIN_DICT,
    WEAK_CONTAINERS,
    AttributedKind,
)
from rearview.runtime.state.kinds import REF, Kind
from rearview.runtime.state.layout import layout_of
from rearview.runtime.state.objects import CellKind, ClassKind, FunctionKind, ObjectKind
from rearview.runtime.state.programs import importable
from rearview.runtime.state.randomness import random_kind
from rearview.runtime.state.streams import GENERATOR, UNKEPT, stream_kind

VALUE = Kind()
"""Immutable: pickled wherever it stands, never an anchor."""
THROUGH = Kind()
"""Immutable, but may lead to anchors: pickled where it stands, entered by the walk."""
INLINE = Kind()
"""Only its own pickling can read it: pickled where it stands, so restore replaces it."""

_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(...),
    type(NotImplemented),
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
)
_VALUE_BASES: tuple[type, ...] = (
    enum.Enum,
    pathlib.PurePath,
    re.Pattern,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    uuid.UUID,
    BaseException,
    random.SystemRandom,
)
# Immutable values of libraries that may or may not be loaded.
_LIBRARY_VALUES = {
    "torch": ("dtype", "device", "layout", "memory_format", "Size", "finfo", "iinfo"),
    "numpy": ("dtype", "generic", "ufunc"),
}
# Objects that watch or serve the computation and never feed back into it: kept by reference.
_BYSTANDERS = (
    "aim.",
    "asyncio.",
    "comet_ml.",
    "concurrent.futures.",
    "ctypes.",
    "IPython.",
    "logging.",
    "matplotlib.",
    "mlflow.",
    "multiprocessing.",
    "neptune.",
    "rearview.",
    "rich.",
    "tensorboard.",
    "tensorboardX.",
    "torch.utils.tensorboard.",
    "wandb.",
)
_IMMUTABLE_NATIVE = ("jaxlib.", "jax.", "pyarrow.", "tokenizers.")
_LOCKS = ("_thread.lock", "_thread.RLock", "_thread._local", "_contextvars.", "_csv.writer", "mmap.")
_UNUSABLE = ("_socket.", "socket.", "ssl.", "subprocess.", "sqlite3.", "_csv.reader")


def kind_of(obj: Any, project: Any) -> Kind:
    """Return the kind of an object; the answer holds for all of its type but classes."""
    cls = type(obj)
    if cls in _VALUES or isinstance(obj, _VALUE_BASES):
        return VALUE
    if cls is types.FunctionType:
        return FunctionKind()
    if isinstance(obj, type):
        if project(obj.__module__ or "") and not issubclass(obj, enum.Enum):
            return ClassKind()
        return VALUE if importable(obj) else REF
    if isinstance(obj, (tuple, frozenset, functools.partial, types.MethodType, slice)):
        return VALUE if _library_value(obj) else THROUGH
    if _library_value(obj):
        return VALUE
    if cls is types.CellType:
        return CellKind()
    if isinstance(obj, weakref.ref):
        return THROUGH
    found = _tensor_or_array(obj) or random_kind(obj) or stream_kind(obj)
    return found or _by_name(obj) or _by_layout(obj)


def _library_value(obj: Any) -> bool:
    for library, names in _LIBRARY_VALUES.items():
        module = sys.modules.get(library)
        if module is not None:
            for name in names:
                known = getattr(module, name, None)
                if isinstance(known, type) and isinstance(obj, known):
                    return True
    return False


def _tensor_or_array(obj: Any) -> Kind | None:
    from rearview.runtime.state import arrays, tensors

    if tensors.is_tensor(obj):
        return tensors.TensorKind()
    if arrays.is_array(obj):
        return arrays.ArrayKind()
    return None


def _by_name(obj: Any) -> Kind | None:
    cls = type(obj)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name.startswith(_BYSTANDERS) or name.startswith(_LOCKS):
        return REF
    if name.startswith(_UNUSABLE):
        return UNKEPT
    if isinstance(obj, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return GENERATOR
    if name.startswith("threading."):
        return REF
    native = name.startswith(_IMMUTABLE_NATIVE) and not layout_of(cls).plain
    return REF if native else None


def _by_layout(obj: Any) -> Kind:
    cls = type(obj)
    if cls is dict:
        return PLAIN_DICT
    if cls in CONTAINERS:
        return CONTAINERS[cls]
    for base, kind in WEAK_CONTAINERS.items():
        if isinstance(obj, base):
            return kind
    layout = layout_of(cls)
    if layout.plain or cls is types.SimpleNamespace:
        return INLINE if holds_handle(obj) else ObjectKind(layout)
    if layout.base in CONTAINERS and not layout.hidden:
        inner = CONTAINERS[layout.base]
        attributed = layout.has_dict or layout.slots
        return AttributedKind(inner, layout) if attributed else inner
    if isinstance(obj, io.IOBase):
        return UNKEPT
    return INLINE if can_pickle(obj) else REF


def holds_handle(obj: Any) -> bool:
    """Say whether an attribute is a C handle which the class's own pickling knows how to keep.

    A booster of XGBoost or LightGBM is a Python object around a pointer.
    """
    cls = type(obj)
    custom = (
        getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
        or cls.__reduce__ is not object.__reduce__
        or cls.__reduce_ex__ is not object.__reduce_ex__
    )
    if not custom:
        return False
    values = list(getattr(obj, "__dict__", {}).values())
    return any(type(v).__module__ in {"ctypes", "_ctypes"} or _capsule(v) for v in values)


def _capsule(value: object) -> bool:
    return type(value).__name__ == "PyCapsule"


def can_pickle(obj: Any) -> bool:
    """Say whether the object's own pickling works at all."""
    try:
        obj.__reduce_ex__(5)
    except Exception:
        return False
    return True
