"""Restore the variables of a live notebook to their values after an earlier cell.

Before a cell runs, the variables that it can reach are copied, unless there is a copy already. Variables
that share objects are copied and restored together, so that aliases stay aliases. Functions, classes and
modules are kept by reference.
"""

from __future__ import annotations

import ast
import gc
import importlib
import io
import pickle
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rearview.errors import UsageError

MOST_OBJECTS = 500_000
"""Objects that are examined to find which variables share some; with more, all count as one group."""
_EVERYTHING = {"globals", "locals", "vars", "eval", "exec", "get_ipython", "gc", "setattr"}
"""Names by which a cell can reach any variable."""
_ATOMS = (int, float, complex, str, bytes, bool, type(None), range, slice)
_BY_REFERENCE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@dataclass
class Group:
    """Variables that share objects, with a copy of their content at one time."""

    names: tuple[str, ...]
    number: int
    """Unique for each content of these variables."""
    data: bytes | None = None
    buffers: list[bytearray] = field(default_factory=list)
    refused: str = ""
    """Why they cannot be copied."""
    digest: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return len(self.data or b"") + sum(map(len, self.buffers))


@dataclass(frozen=True)
class Moment:
    """The variables after one cell."""

    cell: int
    source: str
    seconds: float
    groups: Mapping[str, Group]
    """The group of each variable."""
    references: Mapping[str, Any]
    """Variables that are functions, classes or modules."""
    random: Mapping[str, Any]
    """States of the global random generators, by library."""


class Undo:
    """The moments of one namespace."""

    def __init__(self, namespace: dict[str, Any], hidden: Iterable[str] = ()) -> None:
        self.namespace = namespace
        self.hidden = set(hidden)
        self.moments: list[Moment] = []
        self._count = 0
        self._groups: dict[str, Group] = {}
        self._touched: list[Group] = []
        self._begun = 0.0
        self._keep(0, "", 0.0)

    def variables(self) -> dict[str, Any]:
        """Return the user's variables."""
        return {
            name: value
            for name, value in self.namespace.items()
            if not name.startswith("_") and name not in self.hidden
        }

    def before(self, source: str) -> None:
        """Copy the variables that a cell can reach and that have no copy yet."""
        reached = reachable(source, self.variables())
        self._touched = []
        for group in {id(each): each for each in self._groups.values()}.values():
            if reached is None or not reached.isdisjoint(group.names):
                self._touched.append(group)
                if group.data is None and not group.refused:
                    self._copy(group)
        self._begun = perf_counter()

    def after(self, cell: int, source: str) -> Moment:
        """Record the variables after a cell."""
        return self._keep(cell, source, perf_counter() - self._begun)

    def _keep(self, cell: int, source: str, seconds: float) -> Moment:
        values = self.variables()
        references = {k: v for k, v in values.items() if isinstance(v, _BY_REFERENCE)}
        copied_values = {k: v for k, v in values.items() if k not in references}
        touched = {id(group) for group in self._touched}
        groups: dict[str, Group] = {}
        for names in together(copied_values):
            old_group = self._groups.get(names[0])
            if old_group is not None and old_group.names == names:
                if id(old_group) not in touched or self._is_unchanged(old_group):
                    groups |= dict.fromkeys(names, old_group)
                    continue
            self._count += 1
            groups |= dict.fromkeys(names, Group(names, self._count))
        self._groups, self._touched = groups, []
        self.moments.append(Moment(cell, source, seconds, groups, references, _random()))
        return self.moments[-1]

    def _is_unchanged(self, group: Group) -> bool:
        if group.refused or not group.digest:
            return False
        try:
            return self._serialized(group.names)[2] == group.digest
        except Exception:
            return False

    def _serialized(self, names: tuple[str, ...]) -> tuple[bytes, list[pickle.PickleBuffer], str]:
        import cloudpickle
        import xxhash

        buffers: list[pickle.PickleBuffer] = []
        content = {name: self.namespace[name] for name in names}
        storages: dict[int, Any] = {}

        class GroupPickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                kept = _view_of(obj)
                if kept is not None:
                    return kept
                _check_storage(obj, storages)
                return super().reducer_override(obj)

        out = io.BytesIO()
        GroupPickler(out, protocol=5, buffer_callback=buffers.append).dump(content)
        data = out.getvalue()
        digest = xxhash.xxh3_128(data)
        for buffer in buffers:
            digest.update(buffer.raw())
        return data, buffers, digest.hexdigest()

    def _copy(self, group: Group) -> None:
        try:
            data, buffers, group.digest = self._serialized(group.names)
        except Exception as exc:
            group.refused = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
            return
        group.data, group.buffers = data, [bytearray(buffer.raw()) for buffer in buffers]

    def back_to(self, moment: Moment) -> list[str]:
        """Restore the variables to a moment; return the names that changed."""
        todo: dict[int, Group] = {}
        for name, group in moment.groups.items():
            if self._groups.get(name) is not group:
                todo[id(group)] = group
        for group in todo.values():
            if group.data is None:
                why = group.refused or "no copy was made"
                raise UsageError(
                    f"{', '.join(group.names)} cannot be brought back to cell {moment.cell}: {why}. "
                    "Nothing was changed; run the cell that made it again.",
                    slug="no-undo",
                )
        before = self.variables()
        restored: dict[str, Any] = {}
        for group in todo.values():
            assert group.data is not None
            # the copy becomes the variable; the next cell that reaches it makes a new copy
            restored |= pickle.loads(group.data, buffers=group.buffers)
            group.data, group.buffers, group.digest = None, [], ""
        kept = moment.groups.keys() | moment.references.keys()
        changed = sorted({*restored, *(before.keys() - kept)})
        for name in before.keys() - kept:
            del self.namespace[name]
        for name, value in moment.references.items():
            if self.namespace.get(name) is not value:
                changed.append(name)
                self.namespace[name] = value
        self.namespace.update(restored)
        self._groups = dict(moment.groups)
        _set_random(moment.random)
        del self.moments[self.moments.index(moment) + 1 :]
        return changed

    def undo(self) -> tuple[Moment, list[str]]:
        """Undo the last cell."""
        if len(self.moments) < 2:
            raise UsageError("There is no cell to take back.", slug="no-undo")
        moment = self.moments[-2]
        return moment, self.back_to(moment)

    def checkout(self, cell: int) -> tuple[Moment, list[str]]:
        """Restore the variables to their values after a cell, given by its number."""
        for moment in reversed(self.moments):
            if moment.cell == cell:
                return moment, self.back_to(moment)
        cells = ", ".join(str(moment.cell) for moment in self.moments) or "none"
        raise UsageError(
            f"Nothing is kept of cell {cell}. There are: {cells} (0 is the start).", slug="no-undo"
        )


def _view_of(obj: Any) -> Any:
    """Return how to create a NumPy view again on the copy of its array; None if it is not a view."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray or obj.base is None or obj.dtype.hasobject:
        return None
    root = obj.base
    while isinstance(root, numpy.ndarray) and isinstance(root.base, numpy.ndarray):
        root = root.base
    if type(root) is not numpy.ndarray:
        return None
    offset = obj.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    if not root.flags.c_contiguous or offset < 0:
        raise TypeError("a view of an array that is not contiguous")
    return _make_view, (root, obj.shape, obj.dtype, offset, obj.strides)


def _make_view(root: Any, shape: Any, dtype: Any, offset: int, strides: Any) -> Any:
    import numpy as np

    return np.ndarray(shape, dtype, root, offset, strides)


def _check_storage(obj: Any, owners: dict[int, Any]) -> None:
    """Raise if two tensors share memory, because copies of them would not."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor) or not obj.numel():
        return
    address = obj.untyped_storage().data_ptr()
    if address and owners.setdefault(address, obj) is not obj:
        raise TypeError("two tensors share memory")


def _random() -> dict[str, Any]:
    """Return the states of the global random generators of loaded libraries."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # otherwise it would seed itself at the first draw
        states["numpy"] = sys.modules["numpy.random"].get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def _set_random(states: Mapping[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def reachable(source: str, variables: Mapping[str, Any]) -> set[str] | None:
    """Return the variables that a cell can reach by name; None: any.

    A function that the cell calls reaches the variables that it names, and so on.
    """
    try:
        names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError):
        return None
    remaining, visited = list(names), set(names)
    while remaining:
        value = variables.get(remaining.pop())
        for code in _codes(value):
            fresh = set(code.co_names) - visited
            visited |= fresh
            remaining += fresh
    if visited & _EVERYTHING:
        return None
    return visited & variables.keys()


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of functions and of the methods of classes and their instances."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    functions: list[Any] = [value]
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__ == "__main__":
        functions += [member for base in cls.__mro__[:-1] for member in vars(base).values()]
    while functions:
        member = functions.pop()
        member = getattr(member, "__wrapped__", getattr(member, "__func__", member))
        code = getattr(member, "__code__", None)
        todo = [code] if isinstance(code, types.CodeType) else []
        while todo:
            code = todo.pop()
            yield code
            todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def together(variables: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the variables in groups: variables that share a mutable object are in one group."""
    owner: dict[int, str] = {}
    parent = {name: name for name in variables}

    def top(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    count = 0
    for name, value in variables.items():
        todo = [value]
        own_ids: set[int] = set()
        while todo:
            node = todo.pop()
            if isinstance(node, (*_ATOMS, *_BY_REFERENCE)) or id(node) in own_ids:
                continue
            own_ids.add(id(node))
            count += 1
            if count > MOST_OBJECTS:
                return [tuple(sorted(variables))]
            first = owner.setdefault(id(node), name)
            if top(first) != top(name):
                parent[top(name)] = top(first)
            todo += gc.get_referents(node)
            base = getattr(node, "base", None) if type(node).__module__ == "numpy" else None
            if base is not None:
                todo.append(base)
    groups: dict[str, list[str]] = {}
    for name in variables:
        groups.setdefault(top(name), []).append(name)
    return [tuple(sorted(names)) for names in groups.values()]


def size_of(moments: Iterable[Moment]) -> int:
    """Return the bytes that the copies of some moments take."""
    groups = {id(group): group for moment in moments for group in moment.groups.values()}
    return sum(group.nbytes for group in groups.values()) + sys.getsizeof(groups)
