"""Variables of a namespace in groups: those that share objects, which are copied and compared together."""

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

MOST_OBJECTS = 500_000
"""Objects that are looked at to see which variables share some; beyond that all count as one group."""
EVERYTHING = frozenset(
    {"globals", "locals", "vars", "eval", "exec", "get_ipython", "gc", "setattr"}
)
"""Names by which a cell can reach any variable."""
_ATOMS = (int, float, complex, str, bytes, bool, type(None), range, slice)
BY_REFERENCE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""Kinds of objects that are never copied."""


@dataclass(frozen=True, slots=True)
class Serialized:
    """Variables as bytes: a pickle, the large buffers outside of it, and a digest of all of it."""

    data: bytes
    buffers: list[pickle.PickleBuffer]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle and the buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)


def serialize(
    content: Mapping[str, Any],
    *,
    by_name: Callable[[Any], str | None] = lambda _: None,
    refuse: Callable[[Any], str] = lambda _: "",
    owned: bool = False,
) -> Serialized:
    """Return variables as bytes; raise if something in them cannot be copied.

    Views of one array stay views of one. `by_name` returns the name under which an object is to be
    found again instead of being copied, `refuse` why one cannot be copied. With `owned`, arrays own their
    memory when they are loaded, and tensors keep their gradients, as the originals do.
    """
    import cloudpickle
    import xxhash

    buffers: list[pickle.PickleBuffer] = []
    storages: dict[int, Any] = {}

    class GroupPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> str | None:
            return by_name(obj)

        def reducer_override(self, obj: Any) -> Any:
            reason = refuse(obj)
            if reason:
                raise TypeError(reason)
            kept = _view_of(obj)
            if kept is not None:
                return kept
            _check_storage(obj, storages)
            kept = _as_owned(obj) if owned else None
            if kept is not None:
                return kept
            return super().reducer_override(obj)

    out = io.BytesIO()
    GroupPickler(out, protocol=5, buffer_callback=buffers.append).dump(dict(content))
    data = out.getvalue()
    digest = xxhash.xxh3_128(data)
    for buffer in buffers:
        digest.update(buffer.raw())
    return Serialized(data, buffers, digest.hexdigest())


def _view_of(obj: Any) -> Any:
    """Return how to rebuild a NumPy view on the copy of its base array; None if it is not a view."""
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


def _as_owned(obj: Any) -> Any:
    """Return how to make an array anew that owns its memory, or a tensor with its gradient; else None."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and type(obj) is numpy.ndarray:
        flags = obj.flags
        if obj.dtype.hasobject or not (flags.c_contiguous or flags.f_contiguous) or not obj.size:
            return None
        order = "C" if flags.c_contiguous else "F"
        flat = obj.reshape(-1, order=order).view(numpy.uint8)
        return _owned_array, (
            pickle.PickleBuffer(flat),
            *(obj.dtype, obj.shape, order, bool(flags.writeable)),
        )
    if torch is not None and isinstance(obj, torch.Tensor):
        if obj.grad_fn is not None:
            raise TypeError("a tensor that remembers how it was computed")
        if obj.is_leaf and obj.grad is not None:
            return _tensor_with_gradient, (*obj.__reduce_ex__(5), obj.grad)
    return None


def _owned_array(data: Any, dtype: Any, shape: Any, order: str, writeable: bool) -> Any:
    import numpy as np

    made = np.frombuffer(data, np.uint8).copy().view(dtype)
    owned = np.empty(shape, dtype, order="C" if order == "C" else "F")
    owned.reshape(-1, order=order)[:] = made
    owned.flags.writeable = writeable
    return owned


def _tensor_with_gradient(*parts: Any) -> Any:
    make, args, *state, gradient = parts
    tensor = make(*args)
    if state:
        tensor.__setstate__(state[0])
    tensor.grad = gradient
    return tensor


def _make_view(root: Any, shape: Any, dtype: Any, offset: int, strides: Any) -> Any:
    import numpy as np

    plain = root if root.flags.c_contiguous else root.T  # the same memory, as a buffer has it
    return np.ndarray(shape, dtype, plain, offset, strides)


def _check_storage(obj: Any, seen: dict[int, Any]) -> None:
    """Raise if two tensors share memory: copies of them would not."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor) or not obj.numel():
        return
    address = obj.untyped_storage().data_ptr()
    if address and seen.setdefault(address, obj) is not obj:
        raise TypeError("two tensors share memory")


def reachable(source: str, variables: Mapping[str, Any]) -> set[str] | None:
    """Return the variables that a cell can reach by name; None: any.

    A function that it calls reaches what the function names, and so on.
    """
    try:
        names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError):
        return None
    todo, seen = list(names), set(names)
    while todo:
        value = variables.get(todo.pop())
        for code in codes_of(value):
            fresh = set(code.co_names) - seen
            seen |= fresh
            todo += fresh
    if seen & EVERYTHING:
        return None
    return seen & variables.keys()


def codes_of(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of functions and of the methods of classes and their instances."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    functions: list[Any] = [value]
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__ == "__main__":
        functions += [one for base in cls.__mro__[:-1] for one in vars(base).values()]
    while functions:
        one = functions.pop()
        one = getattr(one, "__wrapped__", getattr(one, "__func__", one))
        code = getattr(one, "__code__", None)
        todo = [code] if isinstance(code, types.CodeType) else []
        while todo:
            code = todo.pop()
            yield code
            todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def together(variables: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the variables in groups: those that share an object that can change are in one."""
    owner: dict[int, str] = {}
    parent = {name: name for name in variables}

    def top(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    count = 0
    for name, value in variables.items():
        todo = [value]
        mine: set[int] = set()
        while todo:
            one = todo.pop()
            if isinstance(one, (*_ATOMS, *BY_REFERENCE)) or id(one) in mine:
                continue
            mine.add(id(one))
            count += 1
            if count > MOST_OBJECTS:
                return [tuple(sorted(variables))]
            first = owner.setdefault(id(one), name)
            if top(first) != top(name):
                parent[top(name)] = top(first)
            todo += gc.get_referents(one)
            base = getattr(one, "base", None) if type(one).__module__ == "numpy" else None
            if base is not None:
                todo.append(base)
    groups: dict[str, list[str]] = {}
    for name in variables:
        groups.setdefault(top(name), []).append(name)
    return [tuple(sorted(names)) for names in groups.values()]
