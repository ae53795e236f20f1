"""Group the variables of a notebook that share objects, and copy a group as bytes (`serialize`).

Variables that share an object must be copied and compared together, because separate copies would not share the object.
Stored copies name functions of this module, such as `_make_tensor`: renaming the module or one of these functions
makes stored copies unreadable.
"""

from __future__ import annotations

import ast
import gc
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rearview.state.code_lookup import importable
from rearview.state.memory_blocks import GcPaused, bytes_of

MOST_OBJECTS = 500_000
"""Most objects in which `sharing_groups` searches for shared objects; if there are more, all variables form one
group."""
EVERYTHING = frozenset(
    {"globals", "locals", "vars", "eval", "exec", "get_ipython", "gc", "setattr"}
)
"""Names of functions with which a cell can reach any variable."""
_ATOMS = (int, float, complex, str, bytes, bool, type(None), range, slice)
BY_REFERENCE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""Types of objects that are never copied."""


@dataclass(frozen=True, slots=True)
class Serialized:
    """Copied variables, as a pickle, the large buffers outside the pickle, and a digest of all bytes."""

    data: bytes
    """The pickle."""
    buffers: list[pickle.PickleBuffer]
    digest: str
    notes: tuple[str, ...] = ()
    """Phrases: what variables loaded from these bytes lack."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the pickle and the buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)


_TEXT, _DTYPE, _SLICE = "=", "#", ":"
"""First characters of the persistent ids that a pickle stores for a text, a NumPy dtype or a slice. No stored name of
an object begins with one of these characters.
"""


class _Never:
    """A class without instances: the second argument of `isinstance` if a library is not loaded."""


def _is_plain(dtype: Any) -> bool:
    """Return True if the short text of a NumPy dtype, such as `<f4`, describes the dtype fully."""
    return dtype.kind in "biufcmMOSU" and dtype.metadata is None and dtype.subdtype is None


def object_of(pid: str, find: Callable[[str], Any]) -> Any:
    """Return the object for a persistent id in a pickle; `find` returns the object with a stored name."""
    if pid.startswith(_TEXT):
        return pid[1:]
    if pid.startswith(_DTYPE):
        import numpy as np

        return np.dtype(pid[1:])
    if pid.startswith(_SLICE):
        return slice(*(int(part) if part else None for part in pid[1:].split(":")))
    return find(pid)


def _slice_id(obj: slice) -> str | None:
    """Return the persistent id that a pickle stores for a slice of ints, or None for any other slice."""
    parts = (obj.start, obj.stop, obj.step)
    if any(part is not None and type(part) is not int for part in parts):
        return None
    return _SLICE + ":".join("" if part is None else str(part) for part in parts)


def serialize(
    content: Mapping[str, Any],
    *,
    by_name: Callable[[Any], str | None] = lambda _: None,
    refuse: Callable[[Any], str] = lambda _: "",
    rebuild: Callable[[Any], Any] = lambda _: None,
    owned: bool = False,
) -> Serialized:
    """Return the variables in `content` (name -> value) as bytes; raise an exception if an object cannot be copied.

    Views of one array stay views of one array. `by_name` returns the name to store in place of an object, or None to
    copy the object. `refuse` returns why an object must not be copied, or an empty text. `rebuild` returns how to
    rebuild an object, as `__reduce_ex__` does, or None for the usual pickling.

    With `owned`, equal content has equal digests, even if the content was itself loaded from a copy: equal texts, dtypes
    and slices become one object. Loaded arrays and tensors own their memory, as the originals do. A tensor with an
    autograd graph is refused. Without `owned`, loaded arrays and tensors use the memory of the copy, and a tensor is
    copied without its graph, with a note.
    """
    import cloudpickle
    import xxhash

    buffers: list[pickle.PickleBuffer] = []
    memory: dict[int, Any] = {}  # address -> array, tensor or storage that uses this memory
    notes: list[str] = []

    texts: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    slices: dict[str, str] = {}
    dtype_type: Any = getattr(sys.modules.get("numpy"), "dtype", _Never)

    class GroupPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> str | None:
            if owned:
                # equal texts, dtypes or slices may be one object or several, depending on how the program made these:
                # store each value once, so that the bytes depend on the content only
                if type(obj) is str:
                    return texts.get(obj) or texts.setdefault(obj, _TEXT + obj)
                if isinstance(obj, dtype_type) and _is_plain(obj):
                    return dtypes.get(obj.str) or dtypes.setdefault(obj.str, _DTYPE + obj.str)
                if type(obj) is slice and (pid := _slice_id(obj)) is not None:
                    return slices.setdefault(pid, pid)
            return by_name(obj)

        def reducer_override(self, obj: Any) -> Any:
            reason = refuse(obj)
            if reason:
                raise TypeError(reason)
            stable_form = rebuild(obj) or (_as_loaded(obj) if owned else None)
            if stable_form is not None:
                return stable_form
            memory_form = _view_of(obj) or _tensor_parts(obj, memory, notes, owned=owned)
            if memory_form is None:
                _check_memory(obj, memory)
                memory_form = _as_owned(obj) if owned else None
            return super().reducer_override(obj) if memory_form is None else memory_form

    out = io.BytesIO()
    with GcPaused():
        GroupPickler(out, protocol=5, buffer_callback=buffers.append).dump(dict(content))
    data = out.getvalue()
    digest = xxhash.xxh3_128(data)
    for buffer in buffers:
        digest.update(buffer.raw())
    return Serialized(data, buffers, digest.hexdigest(), tuple(notes))


def _as_loaded(obj: Any) -> Any:
    """Return how to rebuild an object whose loaded copy would pickle to other bytes, or None for any other object."""
    if type(obj).__module__ == "sklearn.utils._bunch" and isinstance(obj, dict):
        return type(obj), (), None, None, iter(obj.items())  # items are the whole state
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(obj) is numpy.ma.MaskedArray and not obj.dtype.hasobject:
        function, args, state = obj.__reduce__()
        default = numpy.ma.default_fill_value(obj.dtype)
        if state[-1] is not None and state[-1] == default:
            state = (*state[:-1], None)
        return function, args, state
    return None


def _view_of(obj: Any) -> Any:
    """Return how to rebuild a NumPy view as a view of the copy of its base array, or None for any other object."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray or obj.base is None or obj.dtype.hasobject:
        return None
    root = obj.base
    while isinstance(root, numpy.ndarray) and isinstance(root.base, numpy.ndarray):
        root = root.base
    if type(root) is not numpy.ndarray:
        return None
    offset = obj.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    if not (root.flags.c_contiguous or root.flags.f_contiguous) or offset < 0:
        raise TypeError("a view of an array that is not contiguous")
    return _make_view, (root, obj.shape, obj.dtype, offset, obj.strides)


def _check_memory(obj: Any, memory: dict[int, Any]) -> None:
    """Raise TypeError if an array shares memory with a tensor in `memory`: the copies would not share memory."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray) and obj.size:
        address = int(obj.__array_interface__["data"][0])
        if isinstance(memory.setdefault(address, obj), _StorageBytes):
            raise TypeError("an array and a tensor share memory")


def _as_owned(obj: Any) -> Any:
    """Return how to rebuild a contiguous array so that it owns its memory, or None for any other object."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray:
        return None
    flags = obj.flags
    if obj.dtype.hasobject or not (flags.c_contiguous or flags.f_contiguous):
        return None
    if not obj.size:
        return _no_elements, (obj.shape, obj.dtype, bool(flags.writeable))
    writeable = bool(flags.writeable)
    fields = obj.dtype.fields or {}
    if fields and sum(each[0].itemsize for each in fields.values()) < obj.dtype.itemsize:
        # bytes between the fields have arbitrary values, which must not be stored
        clean = numpy.zeros(obj.shape, obj.dtype, order="C" if flags.c_contiguous else "F")
        for name in fields:
            clean[name] = obj[name]
        obj = clean
    order = "C" if flags.c_contiguous else "F"
    flat = obj.reshape(-1, order=order).view(numpy.uint8)
    return _owned_array, (
        pickle.PickleBuffer(flat),
        *(obj.dtype, obj.shape, order, writeable),
    )


def _no_elements(shape: Any, dtype: Any, writeable: bool) -> Any:
    import numpy as np

    array = np.empty(shape, dtype)
    array.flags.writeable = writeable
    return array


def _owned_array(data: Any, dtype: Any, shape: Any, order: str, writeable: bool) -> Any:
    import numpy as np

    values = np.frombuffer(data, np.uint8).copy().view(dtype)
    owned = np.empty(shape, dtype, order="C" if order == "C" else "F")
    owned.reshape(-1, order=order)[:] = values
    owned.flags.writeable = writeable
    return owned


def _make_view(root: Any, shape: Any, dtype: Any, offset: int, strides: Any) -> Any:
    import numpy as np

    plain = (
        root if root.flags.c_contiguous else root.T
    )  # `np.ndarray` takes only C-contiguous memory
    return np.ndarray(shape, dtype, plain, offset, strides)


class _StorageBytes:
    """The memory that tensors share, in a form for pickle; loading it returns the common storage of these tensors."""

    def __init__(self, storage: Any, *, owned: bool) -> None:
        self._storage = storage
        self._owned = owned

    def __reduce_ex__(self, _protocol: Any) -> Any:
        if not self._storage.nbytes():
            return _make_storage, (b"", True)
        return _make_storage, (pickle.PickleBuffer(bytes_of(self._storage)), self._owned)


def _make_storage(data: Any, owned: bool) -> Any:
    import torch

    if not len(data):
        return torch.UntypedStorage()
    shared = torch.frombuffer(data, dtype=torch.uint8)
    return (shared.clone() if owned else shared).untyped_storage()


def _tensor_parts(obj: Any, memory: dict[int, Any], notes: list[str], *, owned: bool) -> Any:
    """Return how to rebuild a plain tensor so that it uses the copy of its storage, or None for any other object.

    Raise TypeError for a tensor that is not plain and shares memory with another tensor, because the copies would not
    share memory. With `owned`, also raise TypeError for a tensor with an autograd graph.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    if obj.grad_fn is not None:
        if owned:
            raise TypeError("a tensor that remembers how it was computed")
        notes.append("a tensor without the graph that computed it")
    strided = obj.layout is torch.strided and not obj.is_quantized and not obj.is_nested
    plain = type(obj) in {torch.Tensor, torch.nn.Parameter} and strided and obj.is_cpu
    if not plain or obj._backward_hooks or obj.is_conj() or obj.is_neg():
        address = obj.untyped_storage().data_ptr() if strided and obj.numel() else 0
        if address and memory.setdefault(address, obj) is not obj:
            raise TypeError("two tensors share memory")
        if obj.is_leaf and obj.grad is not None:
            raise TypeError(f"a {type(obj).__name__} with a gradient")
        return None
    storage = obj.untyped_storage()
    address = storage.data_ptr() or id(obj)
    shared = memory.setdefault(address, _StorageBytes(storage, owned=owned))
    if not isinstance(shared, _StorageBytes):
        raise TypeError("two tensors share memory")
    place = (obj.storage_offset(), tuple(obj.shape), obj.stride())
    traits = (obj.requires_grad, isinstance(obj, torch.nn.Parameter))
    state = {"grad": obj.grad if obj.is_leaf else None, **vars(obj)}
    return _make_tensor, (shared, obj.dtype, place, traits), state, None, None, _set_attributes


def _make_tensor(
    storage: Any, dtype: Any, place: tuple[Any, ...], traits: tuple[bool, bool]
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, *place)
    if traits[1]:
        return torch.nn.Parameter(tensor, requires_grad=traits[0])
    return tensor.requires_grad_(traits[0])


def _set_attributes(obj: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(obj, name, value)


def reachable(source: str, variables: Mapping[str, Any]) -> set[str] | None:
    """Return the names in `variables` that the code of a cell can reach, or None if the code may reach any variable.

    If the code names a function, the code also reaches the variables that the function names, and so on.
    """
    try:
        names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError):
        return None
    todo, reached_names = list(names), set(names)
    while todo:
        value = variables.get(todo.pop())
        for code in codes_of(value):
            new_names = set(code.co_names) - reached_names
            reached_names |= new_names
            todo += new_names
    if reached_names & EVERYTHING:
        return None
    return reached_names & variables.keys()


def codes_of(value: Any) -> Iterator[types.CodeType]:
    """Yield the code objects of a function, or of the methods if `value` is a class of the notebook or its instance."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    functions: list[Any] = [value]
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__ == "__main__":
        functions += [function for base in cls.__mro__[:-1] for function in vars(base).values()]
    while functions:
        function = functions.pop()
        function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        todo = [code] if isinstance(code, types.CodeType) else []
        while todo:
            code = todo.pop()
            yield code
            todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def is_reference(value: Any) -> bool:
    """Return True if a value is a module, a class, or a function without closure variables."""
    return isinstance(value, BY_REFERENCE) and not _has_closure(value)


def _has_closure(value: Any) -> bool:
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return False
    return value.__module__ == "__main__" or not importable(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return name -> attribute of a function or class; for a function, its defaults, too.

    >>> attributes_of(type("A", (), {"n": 1}))
    {'n': 1}
    """
    if isinstance(value, type):
        return {
            name: attribute
            for name, attribute in vars(value).items()
            if not name.startswith("_abc_") and not (name.startswith("__") and name.endswith("__"))
        }
    defaults = {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}
    return {**vars(value), **defaults}


def sharing_groups(
    variables: Mapping[str, Any],
    walked: dict[str, dict[int, Any]] | None = None,
    *,
    closures: bool = False,
) -> list[tuple[str, ...]]:
    """Return groups of the names in `variables`: variables that share a mutable object are in one group.

    `walked` is a cache: name -> objects of a variable that has not changed since an earlier call. The objects of all
    other variables are added to the cache. With `closures`, objects in closures of functions are searched, too.
    """
    owner: dict[int, str] = {}
    parent = {name: name for name in variables}

    def top(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    count = 0
    for name, value in variables.items():
        objects = walked.get(name) if walked is not None else None
        if objects is None:
            objects = _objects_of(value, MOST_OBJECTS - count, closures=closures)
        count += len(objects)
        if count > MOST_OBJECTS:
            return [tuple(sorted(variables))]
        if walked is not None:
            walked[name] = objects
        shared = {owner[address] for address in owner.keys() & objects.keys()}
        for first in shared:
            if top(first) != top(name):
                parent[top(name)] = top(first)
        owner.update(dict.fromkeys(objects, name))
    groups: dict[str, list[str]] = {}
    for name in variables:
        groups.setdefault(top(name), []).append(name)
    return [tuple(sorted(names)) for names in groups.values()]


def _objects_of(value: Any, most: int, *, closures: bool) -> dict[int, Any]:
    """Return address -> object, for each object to which a value leads, without immutable objects.

    The memory of an array or tensor is included as negative address -> None. Stop after about `most` objects.
    """
    objects: dict[int, Any] = {}
    todo = [value]
    never = (*_ATOMS, *BY_REFERENCE)
    dtype_type: Any = getattr(sys.modules.get("numpy"), "dtype", _Never)
    while todo and len(objects) <= most:
        obj = todo.pop()
        if id(obj) in objects or (isinstance(obj, never) and not (closures and _has_closure(obj))):
            continue
        if isinstance(obj, types.FunctionType):
            objects[id(obj)] = obj
            todo += [*(obj.__closure__ or ()), obj.__defaults__, obj.__kwdefaults__, vars(obj)]
            continue
        if isinstance(obj, dtype_type) and obj.names is None:
            continue
        objects[id(obj)] = obj
        todo += gc.get_referents(obj)
        todo += _hidden_referents(obj)
        address = _memory_address(obj)
        if address:
            objects[-address] = None
    return objects


def _hidden_referents(obj: Any) -> list[Any]:
    """Return the base of an array or the gradient of a tensor, which `gc.get_referents` does not return."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return [obj.base] if obj.base is not None else []
    if torch is not None and isinstance(obj, torch.Tensor) and obj.is_leaf:
        return [obj.grad] if obj.grad is not None else []
    return []


def _memory_address(obj: Any) -> int:
    """Return the address of the memory of a tensor, or of an array that owns its memory; 0 for any other object."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return int(obj.__array_interface__["data"][0]) if obj.base is None and obj.size else 0
    if torch is not None and isinstance(obj, torch.Tensor):
        try:
            return int(obj.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):
            return 0  # a sparse tensor, or a tensor on a device that has no addresses
    return 0
