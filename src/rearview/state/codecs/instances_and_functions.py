"""Codecs of objects written in Python: instances, closure variables, functions and classes.

An *anchor* is an object that existed when the loop was entered (`object_numbers`). The *walk* is the search that finds all
anchors: it enters each object to which `children` yields a step.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rearview.state.code_lookup import PatchedBuiltin
from rearview.state.codecs.base import (
    Capturing,
    Kind,
    Layout,
    PathStep,
    Restoring,
    WalkRules,
    steps,
    type_name,
)
from rearview.state.codecs.containers import fill_dict

_OURS = str(Path(__file__).resolve().parents[2])
COMPILER = (
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch._guards"),
    *("numba.core.dispatcher", "numba.core.registry", "numba.np.ufunc"),
)
"""Modules of compilers. Compiled code is not captured, but the objects that were compiled are."""


def is_compiled(function: types.FunctionType) -> bool:
    """Return True if a function was returned by a compiler such as `torch.compile`."""
    return str(function.__globals__.get("__name__") or "").startswith(COMPILER)


def is_ours(function: types.FunctionType) -> bool:
    """Return True if `function` is one of Rearview's replacements for functions such as `time.time`.

    The closure of a replacement is not state: a restore would put the replacement in the place of the real function
    there.
    """
    return function.__code__.co_filename.startswith(_OURS)


class AttributedKind(Kind):
    """Codec of instances of subclasses of a builtin container: captures the items and the attributes."""

    def __init__(self, inner: Kind, layout: Layout) -> None:
        self.inner = inner
        self.attrs = ObjectKind(layout)
        self.name = f"{inner.name} with attributes"
        self.restored_last = inner.restored_last
        self.unordered = inner.unordered

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each attribute, then to each item."""
        yield from self.attrs.children(obj, rules)
        yield from self.inner.children(obj, rules)

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (items, attributes) of each instance."""
        inner = self.inner.read(objs, capturing)
        return list(zip(inner or (), self.attrs.read(objs, capturing), strict=True))

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the attributes, then the items."""
        self.attrs.write(obj, content[1], restoring)
        self.inner.write(obj, content[0], restoring)


class ObjectKind(Kind):
    """Codec of instances of Python classes: reads `__dict__` and slots without the pickling methods of the class.

    The `__getstate__` of a class may drop values that the class can build again later, but a replay that continues in
    the middle of a loop needs all attributes.
    """

    name = "object"

    def __init__(self, layout: Layout, excluded: frozenset[str] = frozenset()) -> None:
        self.has_dict = layout.has_dict
        self.slots = layout.slots
        self.excluded = excluded
        """Names of attributes that are not state, such as addresses and times (see `displays_and_trackers`)."""

    def whole(self) -> ObjectKind:
        """Return a codec that excludes no attributes, for an instance that a restore must create."""
        if not self.excluded:
            return self
        kind = copy.copy(self)
        kind.excluded = frozenset()
        return kind

    def attributes(self, obj: Any) -> dict[str, Any]:
        """Return a copy of the attributes of `obj`, without the excluded ones."""
        if not self.excluded:
            copied: dict[str, Any] = obj.__dict__.copy()
            return copied
        return {k: v for k, v in obj.__dict__.items() if k not in self.excluded}

    def slot_values(self, obj: Any) -> dict[str, Any]:
        """Return slot name -> value, for the slots that are set."""
        values = {}
        for slot in self.slots:
            try:
                values[slot.__name__] = slot.__get__(obj)
            except AttributeError:
                continue
        return values

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield steps to the attributes and slots, and to the class if it is local (`WalkRules.is_local`)."""
        if self.has_dict:
            attrs = self.attributes(obj) if self.excluded else obj.__dict__
            if not rules.all_values(attrs.values()):
                yield from steps(".", attrs.copy().items())
        if self.slots:
            yield from steps(".", self.slot_values(obj).items())
        if rules.is_local(type(obj)):
            yield PathStep("<", "class", type(obj))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the attributes of each instance: a dict, or (dict, slot values) if the class has slots."""
        if not self.slots:
            return [self.attributes(o) for o in objs] if self.has_dict else [{} for _ in objs]
        if not self.has_dict:
            return [({}, self.slot_values(o)) for o in objs]
        return [(self.attributes(o), self.slot_values(o)) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the attributes and slots without calling `__setattr__`."""
        attrs, slots = content if self.slots else (content, {})
        if self.has_dict:
            excluded_values = (
                {k: v for k, v in obj.__dict__.items() if k in self.excluded}
                if self.excluded
                else {}
            )
            fill_dict(obj.__dict__, {**attrs, **excluded_values})
        for slot in self.slots:
            if slot.__name__ in slots:
                slot.__set__(obj, slots[slot.__name__])
            else:
                try:
                    slot.__delete__(obj)
                except AttributeError:
                    continue


class CompiledKind(Kind):
    """Codec of modules that `torch.compile` returned: captured as references; the walk enters the original module."""

    name = "compiled"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the original module, from which the compiled module was made."""
        return [PathStep(".", "_orig_mod", vars(obj)["_modules"]["_orig_mod"])]


COMPILED = CompiledKind()


class CellKind(Kind):
    """Codec of closure variables (cells), which several functions may share."""

    name = "cell"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the value, if the variable is bound."""
        return [PathStep("<", "", value) for value in self.values(obj)]

    @staticmethod
    def values(cell: types.CellType) -> tuple[Any, ...]:
        """Return (value,) of a closure variable, or () if the variable is unbound."""
        try:
            return (cell.cell_contents,)
        except ValueError:
            return ()

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (value,) for each closure variable, or () if the variable is unbound."""
        return [self.values(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Bind or unbind the variable."""
        if content:
            obj.cell_contents = content[0]
        elif self.values(obj):
            del obj.cell_contents


class FunctionKind(Kind):
    """Codec of Python functions: captures the closure, defaults and attributes, and not the code.

    A probe inside a nested function may add closure variables. Therefore closure variables are captured by name, and
    the walk of a replay enters only recorded closure variables.
    """

    name = "function"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield steps to the closure variables, and to defaults and attributes if the function is the project's."""
        if is_compiled(obj):
            inner = getattr(obj, "_torchdynamo_orig_callable", None)
            if inner is not None:
                yield PathStep("<", "compiled", inner)
            return
        if is_ours(obj):
            return
        names = obj.__code__.co_freevars
        walked = set(names if rules.recorded_names is None else rules.recorded_names)
        for name, cell in zip(names, obj.__closure__ or (), strict=True):
            if name in walked:
                yield PathStep("<", name, cell)
        if rules.project(obj.__module__ or ""):
            yield from steps("<", (("defaults", d) for d in obj.__defaults__ or ()))
            yield from steps("<", (obj.__kwdefaults__ or {}).items())
            yield from steps(".", list(vars(obj).items()))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (closure variables by name, own values) of each function.

        The own values are (defaults, keyword defaults, attributes), or None for a function outside the project.
        """
        project = capturing.anchors.rules.project
        return [
            ({}, None)
            if is_compiled(o) or is_ours(o)
            else (
                dict(zip(o.__code__.co_freevars, o.__closure__ or (), strict=True)),
                (o.__defaults__, o.__kwdefaults__, vars(o).copy())
                if project(o.__module__ or "")
                else None,
            )
            for o in objs
        ]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the defaults and attributes; the closure variables are anchors, which are restored separately."""
        own_values = content[1]
        if own_values is None:
            return
        defaults, kwdefaults, attrs = own_values
        if obj.__defaults__ is not defaults:
            obj.__defaults__ = defaults
        if obj.__kwdefaults__ != kwdefaults:
            obj.__kwdefaults__ = kwdefaults
        if vars(obj) or attrs:
            fill_dict(vars(obj), attrs)

    def label(self, obj: Any) -> str:
        """Return the full name of the function, with the names of its closure variables in parentheses."""
        free = ",".join(obj.__code__.co_freevars)
        return f"function {obj.__module__}.{obj.__qualname__}({free})"


class ClassKind(Kind):
    """Codec of classes of the project: captures data attributes; the walk also enters the functions.

    A probe may add a function to a class. Therefore the label of a class names its functions, and the walk of a replay
    enters only recorded functions.
    """

    name = "class"
    _COMPILER = frozenset({"__annotate__", "__annotate_func__"})
    """Names of the functions that the interpreter creates for annotations."""
    _PROGRAM = (
        types.FunctionType,
        types.BuiltinFunctionType,
        PatchedBuiltin,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
        staticmethod,
        classmethod,
        property,
        types.ModuleType,
    )

    def data(self, cls: type) -> dict[str, Any]:
        """Return the attributes of a class that are neither functions nor made by the interpreter."""
        return {
            name: value
            for name, value in vars(cls).items()
            if not isinstance(value, self._PROGRAM)
            and not (name.startswith("__") and name.endswith("__"))
            and not name.startswith("_abc_")
        }

    def functions(self, cls: type) -> dict[str, list[Any]]:
        """Return name -> functions of this name in the body of a class: one function, or up to three for a property."""
        by_name: dict[str, list[Any]] = {}
        for name, value in vars(cls).items():
            if isinstance(value, property):
                by_name[name] = [
                    function for function in (value.fget, value.fset, value.fdel) if function
                ]
            elif isinstance(value, staticmethod | classmethod):
                by_name[name] = [value.__func__]
            elif isinstance(value, types.FunctionType) and name not in self._COMPILER:
                by_name[name] = [value]
        return by_name

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each data attribute, then what `functions_and_bases` yields."""
        yield from steps(".", self.data(obj).items())
        yield from self.functions_and_bases(obj, rules)

    def functions_and_bases(self, obj: type, rules: WalkRules) -> Iterable[PathStep]:
        """Yield steps to the functions, and to base classes and the metaclass if these are local (`WalkRules`)."""
        recorded = rules.recorded_names
        for name, functions in self.functions(obj).items():
            if recorded is None or name in recorded:
                yield from (PathStep(".", name, function) for function in functions)
        if recorded is None or recorded:
            classes = (base for base in (*obj.__bases__, type(obj)) if rules.is_local(base))
            yield from (PathStep("<", "class", base) for base in classes)

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the data attributes of each class."""
        return [self.data(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the data attributes that differ, and remove the data attributes that `content` lacks."""
        live = self.data(obj)
        for name in live.keys() - content.keys():
            type.__delattr__(obj, name)
        for name, value in content.items():
            if name not in live or live[name] is not value:
                type.__setattr__(obj, name, value)

    def label(self, obj: Any) -> str:
        """Return the name of the class, with the names of its functions in parentheses."""
        return f"class {type_name(obj)}({','.join(self.functions(obj))})"


class EnumKind(ClassKind):
    """Codec of enumerations of the project that have methods: captures attributes that the program sets in members.

    The members themselves are immutable values.
    """

    name = "enum"

    def data(self, cls: type[enum.Enum]) -> dict[str, Any]:
        """Return member name -> attributes that the program has set in this member of an enumeration."""
        by_member = {}
        for name, member in cls.__members__.items():
            attributes = {k: v for k, v in vars(member).items() if not _is_of_enum(k)}
            if attributes:
                by_member[name] = attributes
        return by_member

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each attribute of a member, then what `functions_and_bases` yields."""
        for name, attributes in self.data(obj).items():
            yield from steps(".", ((f"{name}.{key}", value) for key, value in attributes.items()))
        yield from self.functions_and_bases(obj, rules)

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the attributes that the program has set in the members."""
        for name, member in obj.__members__.items():
            enum_attributes = {k: v for k, v in vars(member).items() if _is_of_enum(k)}
            fill_dict(vars(member), {**enum_attributes, **content.get(name, {})})


def has_functions(cls: type[enum.Enum]) -> bool:
    """Return True if the body of an enumeration defines a function.

    >>> has_functions(enum.Enum("Plain", "A B"))
    False
    """
    written = (
        function for functions in ClassKind().functions(cls).values() for function in functions
    )
    return any(getattr(function, "__module__", None) == cls.__module__ for function in written)


def _is_of_enum(name: str) -> bool:
    """Return True if `enum` gives every member of an enumeration an attribute with this name."""
    return name.startswith("_") and name.endswith("_")
