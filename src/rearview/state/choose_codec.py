"""Choose the codec (`Kind`) of an object: `kind_of`, which the walk and `capture` call.

An *anchor* is an object that existed when the loop was entered. Four codecs capture no content: those of an immutable
value (`VALUE`), an immutable object that may lead to anchors (`THROUGH`), an object that only the pickling methods of
its class can read (`INLINE`), and an object that is captured as a reference (`REF`).
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import re
import sys
import threading
import types
import uuid
import weakref
from typing import Any

from rearview.state.code_lookup import PatchedBuiltin, importable
from rearview.state.codecs.arrays import ArrayKind
from rearview.state.codecs.base import REF, Kind, layout_of
from rearview.state.codecs.containers import (
    CONTAINERS,
    PLAIN_DICT,
    PROXY,
    WEAK_CONTAINERS,
)
from rearview.state.codecs.context_and_thread_variables import hidden_kind
from rearview.state.codecs.data_loaders import LOADER, is_loader_iterator
from rearview.state.codecs.external_resources import CSV_WRITER, HDF5, OUTSIDE, THREAD, stream_kind
from rearview.state.codecs.instances_and_functions import (
    COMPILED,
    COMPILER,
    AttributedKind,
    CellKind,
    ClassKind,
    EnumKind,
    FunctionKind,
    ObjectKind,
    has_functions,
)
from rearview.state.codecs.rng import random_kind
from rearview.state.codecs.suspended_generators import GENERATOR, LOOP_ITERATOR, LoopIterator
from rearview.state.codecs.tensors import TensorKind
from rearview.state.displays_and_trackers import BY_REFERENCE, excluded_attributes
from rearview.state.memory_blocks import is_array, is_tensor

VALUE = Kind()
"""Codec of immutable values, which are pickled wherever they occur and are never anchors."""
THROUGH = Kind()
"""Codec of immutable objects that may refer to anchors: they are pickled wherever they occur, and the walk enters
them."""
INLINE = Kind()
"""Codec of objects that only the pickling methods of their class can read: a restore creates new objects."""

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
    PatchedBuiltin,
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
    dt.date,
    dt.time,
    dt.timedelta,
    dt.tzinfo,
    uuid.UUID,
    BaseException,
    random.SystemRandom,
)
_LIBRARY_VALUES = {
    "torch": ("dtype", "device", "layout", "memory_format", "Size", "finfo", "iinfo"),
    "numpy": ("dtype", "generic", "ufunc"),
}
"""Library -> names of its immutable classes, which are looked up only if the library is loaded."""
_NOT_STATE = (
    *BY_REFERENCE,
    "asyncio.",
    "concurrent.futures.",
    "comm.",
    "ctypes.",
    "ipykernel.",
    "ipywidgets.",
    "jax._src.",
    "jupyter_client.",
    "multiprocessing.",
    "rearview.",
    "tornado.",
    "traitlets.",
    "zmq.",
)
"""Beginnings of the names of classes whose instances are not training state, and are captured as references."""
_PICKLE_THEMSELVES = ("pandas.", "polars.")
"""Libraries whose classes have pickling methods that leave out caches and engines."""
_PYTHON_MADE = (types.FunctionType, types.MethodType, weakref.ref, tuple, io.IOBase)
_IMMUTABLE_NATIVE = ("jaxlib.", "jax.", "pyarrow.", "tokenizers.")
_LOCKS = (
    "_thread.lock",
    "_thread.RLock",
    "_contextvars.",
    "mmap.",
)
_UNUSABLE = (
    *("_socket.", "socket.", "ssl.", "subprocess.", "sqlite3.", "_csv.reader"),
    *("_hashlib.", "_sha", "_md5.", "_blake2.", "hmac.", "zlib.", "_bz2.", "_lzma.", "_queue."),
    "multiprocessing.managers.",
)


def kind_of(obj: Any, project: Any) -> Kind:
    """Return the codec of an object; except for classes, all objects of one type have one codec.

    `project` returns True for the name of a module that belongs to the project.
    """
    cls = type(obj)
    if cls in weakref.ProxyTypes:
        return REF
    if cls in _VALUES or isinstance(obj, _VALUE_BASES):
        return VALUE
    if cls is types.FunctionType:
        return FunctionKind()
    if isinstance(obj, type):
        if project(obj.__module__ or ""):
            if not issubclass(obj, enum.Enum):
                return ClassKind()
            if has_functions(obj):
                return EnumKind()
        return VALUE if importable(obj) else REF
    if isinstance(obj, (tuple, frozenset, functools.partial, types.MethodType, slice)):
        return VALUE if _library_value(obj) else THROUGH
    if _library_value(obj):
        return VALUE
    if cls is types.CellType:
        return CellKind()
    if isinstance(obj, weakref.ref):
        return THROUGH
    kind = _tensor_or_array(obj) or random_kind(obj) or stream_kind(obj) or hidden_kind(obj)
    return kind or _by_name(obj) or _by_layout(obj)


def _library_value(obj: Any) -> bool:
    for library, names in _LIBRARY_VALUES.items():
        module = sys.modules.get(library)
        if module is not None:
            for name in names:
                cls = getattr(module, name, None)
                if isinstance(cls, type) and isinstance(obj, cls):
                    return True
    return False


def _tensor_or_array(obj: Any) -> Kind | None:
    if is_tensor(obj):
        return TensorKind()
    if is_array(obj):
        return ArrayKind()
    return None


def _by_name(obj: Any) -> Kind | None:
    """Return the codec of an object that is recognised by the name of its class, or None for any other object."""
    cls = type(obj)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is LoopIterator:
        return LOOP_ITERATOR
    if is_loader_iterator(obj):
        return LOADER
    if name.startswith(COMPILER):
        return COMPILED if cls.__name__ == "OptimizedModule" else REF
    if name.startswith(_UNUSABLE) or cls.__name__ == "_MultiProcessingDataLoaderIter":
        return OUTSIDE
    if name.startswith(_NOT_STATE) or name.startswith(_LOCKS):
        return REF
    if name == "_csv.writer":
        return CSV_WRITER
    if name.startswith("h5py._hl."):
        return HDF5 if hasattr(obj, "file") else REF
    if isinstance(obj, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return GENERATOR
    if isinstance(obj, threading.Thread):
        return THREAD
    if name.startswith("threading."):
        return REF
    native = name.startswith(_IMMUTABLE_NATIVE) and not layout_of(cls).plain
    return REF if native else None


def _by_layout(obj: Any) -> Kind:
    """Return the codec of an object by where its class keeps the state of instances (`layout_of`)."""
    cls = type(obj)
    if cls is dict:
        return PLAIN_DICT
    if cls is types.MappingProxyType:
        return PROXY
    if cls in CONTAINERS:
        return CONTAINERS[cls]
    for base, kind in WEAK_CONTAINERS.items():
        if isinstance(obj, base):
            return kind
    layout = layout_of(cls)
    if layout.plain or cls is types.SimpleNamespace:
        return INLINE if needs_own_pickling(obj) else ObjectKind(layout, excluded_attributes(cls))
    if layout.base in CONTAINERS and not layout.hidden:
        inner = CONTAINERS[layout.base]
        has_attributes = layout.has_dict or layout.slots
        return AttributedKind(inner, layout) if has_attributes else inner
    if isinstance(obj, io.IOBase):
        return OUTSIDE
    return INLINE if can_pickle(obj) else REF


def needs_own_pickling(obj: Any) -> bool:
    """Return True if only the pickling methods of its class can capture an object.

    Example: an XGBoost booster wraps a pointer, and a polars data frame wraps a Rust object. Rearview cannot
    capture the attributes of such objects, but the methods of their classes can pickle them.
    """
    cls = type(obj)
    reduce, reduce_ex = (getattr(cls, name) for name in ("__reduce__", "__reduce_ex__"))
    custom = (
        getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
        or reduce is not getattr(object, "__reduce__")  # noqa: B009
        or reduce_ex is not getattr(object, "__reduce_ex__")  # noqa: B009
    )
    if not custom:
        return False
    if f"{cls.__module__}.".startswith(_PICKLE_THEMSELVES):
        return True
    return any(map(_is_handle, list(getattr(obj, "__dict__", {}).values())))


def _is_handle(value: Any) -> bool:
    """Return True if a value refers to memory of a C library and cannot be pickled."""
    cls = type(value)
    if cls.__module__ in {"ctypes", "_ctypes"} or cls.__name__ == "PyCapsule":
        return True
    if cls in _VALUES or cls in CONTAINERS or isinstance(value, (type, *_PYTHON_MADE)):
        return False
    layout = layout_of(cls)
    native = not layout.plain and (layout.hidden or layout.base not in CONTAINERS)
    return native and _by_name(value) is None and not can_pickle(value)


def can_pickle(obj: Any) -> bool:
    """Return True if the pickling methods of an object raise no exception."""
    try:
        obj.__reduce_ex__(5)
    except Exception:
        return False
    return True
