"""The state of a notebook as the cell cache sees it: digests of its variables, definitions and settings.

Variables of skipped cells are "absent": their digest is known, but their value is not loaded yet. Variables that share
objects form a group, which is stored and loaded as a whole.

A function or class ("definition") is restored by running its source again. Changes that cells have made to it since
are then lost: a counter in a class, a list that is a default, an attribute of a function. `definition_state` returns
a digest of this state, by which such changes are found.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rearview.runtime.cells.cell_analysis import CellAnalysis, Definition
from rearview.runtime.cells.library_state import digest_of, library_settings
from rearview.runtime.cells.result_store import GroupRef, ResultStore
from rearview.state.variable_groups import (
    BY_REFERENCE,
    EVERYTHING,
    MOST_OBJECTS,
    Serialized,
    attributes_of,
    codes_of,
    serialize,
    sharing_groups,
)

BYTES_A_SECOND = 200e6
"""Assumed speed of storing and loading, in bytes per second; variables that a cell computes faster are not stored."""
SMALL = 32 << 20
"""Size in bytes up to which variables are always stored."""
_OWN_CLASS = ("cls.", "type.", "self.__class__.")
"""Prefixes of assignment targets in methods that change the class, not the instance."""
_FIGURES = ("Figure", "FigureBase", "Axes", "_AxesBase", "Artist")


class NotebookState:
    """The variables and settings that all cells so far have left, whether they were run or skipped."""

    def __init__(
        self, store: ResultStore, namespace: dict[str, Any], hides: Callable[[str], bool]
    ) -> None:
        self.store = store
        self.namespace = namespace
        self._hides = hides
        self.groups: dict[str, GroupRef] = {}
        """Variable -> its group after the cells so far, also for variables that are not loaded."""
        self.definitions: dict[str, tuple[Definition, str]] = {}
        """Name of a function or class that a cell has defined -> (its definition, digest of its content)."""
        self.absent: set[str] = set()
        """Names bound by skipped cells whose values are not loaded."""
        self.loaded: dict[tuple[str, ...], str] = {}
        """Names of a group loaded from disk -> digest of its content in memory; empty until a cell can reach it."""
        self.settings = library_settings()
        self.settings_values: dict[str, str] = {}
        """Library whose settings cells have changed -> digest under which the settings are stored."""
        self.setup_digest = ""
        """Hash of all changes that cells have made to state outside variables, in order; empty if there are none."""
        self.ids: dict[str, int] = {}
        """Variable -> `id()` of its value before the current cell."""
        self._walked: dict[str, dict[int, Any]] = {}
        """Variable -> (`id()` -> object) of all objects that it refers to; only if no cell could change it since."""
        self.reached: set[str] | None = set()
        """Names of the variables that the current cell can reach, or None if it can reach all variables."""

    def begin(self) -> None:
        """Remember the identities of the variables' values before a cell runs."""
        for names in self.loaded:
            if not self.loaded[names] and self.touches(names):
                try:
                    self.loaded[names] = self.serialized(names, self.references()).digest
                except Exception:
                    self.loaded[names] = "?"
        # keep no references to objects that the cell may delete
        self._walked = {k: v for k, v in self._walked.items() if not self.touches((k,))}
        self.ids = {name: id(value) for name, value in self.variables().items()}

    def reach(
        self, names: Iterable[str], definitions: Iterable[Definition] = ()
    ) -> set[str] | None:
        """Return the variables that a cell can reach from the names in its code, or None if it can reach all variables.

        `definitions` are the functions and classes that the cell itself defines: functions of earlier cells may call them.
        """
        todo, reached = list(names), set(names)
        names_in_bodies: dict[str, set[str]] = {}
        for each in definitions:
            names_in_bodies.setdefault(each.name, set()).update(each.names)
        while todo:
            name = todo.pop()
            next_names = set(names_in_bodies.get(name, ()))
            if name in self.definitions:
                next_names |= self.definitions[name][0].names
            if name in self.groups:
                next_names |= {*self.groups[name].uses, *self.groups[name].names}
            todo += next_names - reached
            reached |= next_names
        if reached & (EVERYTHING - {"gc", "setattr"}) or "*" in reached:
            return None
        return reached & (self.groups.keys() | self.definitions.keys())

    def inputs(self, reached: set[str] | None) -> dict[str, str]:
        """Return name -> digest of the variables in `reached`, or of all variables if `reached` is None."""
        names = {*self.groups, *self.definitions} if reached is None else reached
        return {name: self.content_of(name) for name in names}

    def content_of(self, name: str) -> str:
        """Return the digest of the variable, function or class `name`; empty if the name is not bound."""
        if name in self.definitions:
            return self.definitions[name][1]
        return self.groups[name].content if name in self.groups else ""

    def settings_digest(self) -> str:
        """Return a hash of the settings of libraries, and of all changes to other state outside variables."""
        return digest_of(sorted(self.settings.items()), self.setup_digest)

    def add_setup(self, setup: str) -> None:
        """Add the hash of a change to state outside variables to `setup_digest`; do nothing if `setup` is empty."""
        if setup:
            self.setup_digest = digest_of(self.setup_digest, setup)

    def define(self, definition: Definition, digest: str = "") -> None:
        """Record that a cell has defined a function or class whose content has the digest `digest`."""
        self.groups.pop(definition.name, None)
        self.definitions[definition.name] = (definition, digest)

    def digest_definitions(
        self, definitions: Iterable[Definition], bound: set[str], key: str, outside: str
    ) -> dict[str, str]:
        """Remember and return name -> digest, for the functions and classes that a cell has defined.

        `bound` are the variables that the cell has set, without imports; `key` is a hash of all inputs of the cell, and
        `outside` a hash of those inputs that are not variables.
        """
        definitions = list(definitions)
        names = [each.name for each in definitions]
        bound = bound | {name for name in names if names.count(name) > 1}
        digests: dict[str, str] = {}
        references = self.references()
        for each in definitions:
            parts = [self.content_of(name) for name in sorted(each.at_once)]
            if not each.at_once.isdisjoint(bound):
                parts.append(key)  # the definition uses values that the cell computes
            elif each.calls_at_once:
                parts.append(outside)
            if each.name in self.namespace:
                parts.append(definition_state(self.namespace[each.name], references))
            digests[each.name] = digest_of(each.digest, parts)
            self.define(each, digests[each.name])
        return digests

    def forget(self, name: str) -> None:
        """Remove a variable, function or class that a cell has deleted from this state."""
        self.groups.pop(name, None)
        self.definitions.pop(name, None)
        self.absent.discard(name)

    def touches(self, names: Iterable[str]) -> bool:
        """Return True if the current cell can reach one of the variables `names`."""
        return self.reached is None or not self.reached.isdisjoint(names)

    def variables(self) -> dict[str, Any]:
        """Return name -> value of the loaded variables, without variables of the kernel."""
        return {
            name: value
            for name, value in self.namespace.items()
            if not (self._hides(name) or (name.startswith("__") and name.endswith("__")))
            and not (name.strip("_").isdigit() and name.startswith("_"))
            and name not in {"_", "__", "___", "In", "Out", "exit", "quit", "open"}
        }

    def references(self) -> dict[int, str]:
        """Return `id()` -> name of the functions and classes that cells of the notebook have defined."""
        return {
            id(self.namespace[name]): name for name in self.definitions if name in self.namespace
        }

    def serialized(
        self, names: tuple[str, ...], references: Mapping[int, str], used: set[str] | None = None
    ) -> Serialized:
        """Return the variables `names` in serialized form, with references by name to functions and classes.

        `references` maps `id()` to name, as `references()` returns it. The names to which the serialized variables refer
        are added to `used`.
        """
        used_names = set[str]() if used is None else used

        def by_name(obj: Any) -> str | None:
            name = references.get(id(obj)) if isinstance(obj, types.FunctionType | type) else None
            if name is not None:
                used_names.add(name)
            return name

        variables = {name: self.namespace[name] for name in names}
        return serialize(variables, by_name=by_name, refuse=_refused, owned=True)

    def take_changes(
        self, key: str, seconds: float, analysis: CellAnalysis
    ) -> tuple[list[GroupRef], list[str]]:
        """Store and return the groups of variables that a cell changed; also return the names that it deleted.

        `key` is a hash of the inputs of the cell, which ran for `seconds`.
        """
        live = self.variables()
        self.absent -= live.keys()  # the cell has bound these names to new values
        defined = {each.name for each in analysis.definitions}
        for name in [*self.definitions]:
            # the cell may have bound the name of a function to another value
            value = live.get(name)
            if name in live and name not in defined and id(value) != self.ids.get(name, id(value)):
                del self.definitions[name]
        changed: list[GroupRef] = []
        data: dict[str, Any] = {}
        for name, value in live.items():
            if name in self.definitions:
                continue
            if isinstance(value, BY_REFERENCE):
                is_known = name in self.groups and self.ids.get(name) == id(value)
                if is_known and not self.touches((name,)):
                    continue
                reference = self._reference(name, value, key)
                if self.groups.get(name) != reference:
                    changed.append(reference)
                    self.groups[name] = reference
            else:
                data[name] = value
        references = self.references()
        self._walked = {
            name: objects
            for name, objects in self._walked.items()
            if name in data and self.ids.get(name) == id(data[name])
        }
        for names in sharing_groups(data, self._walked):
            group = self.groups.get(names[0])
            same_names = group is not None and group.names == names
            rebound = any(self.ids.get(name) != id(live[name]) for name in names)
            if same_names and not rebound and not self.touches(names):
                continue
            new_group = self._grouped(names, key, seconds, references)
            if same_names and group is not None:
                unchanged = new_group.content == group.content and group.stored == new_group.stored
                if unchanged or (not rebound and self.loaded.get(names) == new_group.content):
                    continue
            self.loaded.pop(names, None)
            self.groups.update(dict.fromkeys(names, new_group))
            changed.append(new_group)
        existing = {*self.groups, *self.definitions} - self.absent
        deleted = sorted(existing - live.keys())
        for name in deleted:
            self.forget(name)
        return changed, deleted

    def _reference(self, name: str, value: Any, key: str) -> GroupRef:
        """Return the group of the variable `name` alone, whose value is a module, function or class."""
        if isinstance(value, types.ModuleType):
            return GroupRef((name,), f"module {value.__name__}")
        module = getattr(value, "__module__", None) or ""
        if module != "__main__":
            return GroupRef((name,), f"{module} {getattr(value, '__qualname__', name)}")
        uses = {each for code in codes_of(value) for each in code.co_names}
        return GroupRef((name,), digest_of(key, name), uses=tuple(sorted(uses)), why="a function")

    def is_import(self, group: GroupRef) -> bool:
        """Return True if the variable of `group` is a module, or a function or class that a module defines."""
        value = self.namespace.get(group.names[0])
        if not isinstance(value, BY_REFERENCE):
            return False
        return isinstance(value, types.ModuleType) or value.__module__ != "__main__"

    def is_reference(self, name: str, group: GroupRef) -> bool:
        """Return True if the variable `name` has the imported module, function or class that `group` describes."""
        value = self.namespace[name]
        return (
            not group.stored
            and isinstance(value, BY_REFERENCE)
            and self._reference(name, value, "").content == group.content
        )

    def _grouped(
        self, names: tuple[str, ...], key: str, seconds: float, references: Mapping[int, str]
    ) -> GroupRef:
        """Return the group of the variables `names`; store their values unless computing them again is faster."""
        used: set[str] = set()
        try:
            content = self.serialized(names, references, used)
        except Exception as exc:
            why = str(exc).partition("\n")[0][:200] or type(exc).__name__
            return GroupRef(names, digest_of(key, names), uses=self._uses(names), why=why)
        uses = tuple(sorted(used))
        if content.nbytes > max(SMALL, seconds * BYTES_A_SECOND):
            return GroupRef(names, content.digest, uses=uses, why="computing it again is faster")
        self.store.put(content)
        return GroupRef(names, content.digest, stored=True, uses=uses)

    def _uses(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names used in the notebook's functions and methods to which the variables `names` refer.

        Return `*` alone if the variables refer to too many objects.
        """
        used: set[str] = set()
        todo, visited_ids = [self.namespace[name] for name in names], set[int]()
        while todo:
            value = todo.pop()
            if id(value) in visited_ids or isinstance(value, types.ModuleType):
                continue
            visited_ids.add(id(value))
            if len(visited_ids) > MOST_OBJECTS:
                return ("*",)
            kind = value if isinstance(value, types.FunctionType | type) else type(value)
            if kind.__module__ == "__main__":
                used |= {each for code in codes_of(value) for each in code.co_names}
                used.add(kind.__name__)
            if not isinstance(value, types.FunctionType | type):
                todo += gc.get_referents(value)
        return tuple(sorted(used))


def _refused(obj: Any) -> str:
    """Return the reason why an object must not be stored with a variable; empty if it can be stored."""
    kind = type(obj)
    if kind.__module__.startswith("matplotlib.") and any(
        base.__name__ in _FIGURES for base in kind.__mro__
    ):
        return "a matplotlib figure, which is shown once"
    if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
        return f"{obj.__qualname__}, which is not defined at the top level of a cell"
    if kind.__module__ == "numpy" and kind.__name__ == "memmap":
        return "an array that is mapped from a file"
    return ""


def definition_state(value: Any, references: Mapping[int, str]) -> str:
    """Return a digest of the state of a function or class: attributes, defaults, variables of closures.

    `references` maps `id()` to name for the notebook's functions and classes; only their names enter the digest.
    """
    try:
        return digest_of([(label, _digest(part, references)) for label, part in _parts(value)])
    except Exception:  # objects that a decorator returns may raise on any access
        return f"{type(value).__qualname__} at {id(value)}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) of each part of the state of a function or class."""
    if isinstance(value, type):
        for name, attribute in attributes_of(value).items():
            functions = list(_functions_of(attribute))
            if not functions:
                yield name, attribute
            for function in functions:
                yield from ((f"{name}.{label}", part) for label, part in _parts(function))
        return
    for function in _functions_of(value):
        code = function.__code__
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        yield "<code>", (function.__qualname__, code.co_code, code.co_names, repr(constants))
        yield (
            "<attributes>",
            {
                name: attribute
                for name, attribute in attributes_of(function).items()
                # without the widgets that ipywidgets' `interact` stores in the function
                if name != "__wrapped__"
                and not type(attribute).__module__.startswith("ipywidgets.")
            },
        )
        for cell in function.__closure__ or ():
            yield "<closure>", _content(cell)


def _content(cell: types.CellType) -> Any:
    """Return the value of a closure's variable; None if it has no value yet, or is a function or class."""
    try:
        content = cell.cell_contents
    except ValueError:
        return None  # the variable has no value yet
    return None if isinstance(content, types.FunctionType | type) else content


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that a function, method, property or wrapper consists of; nothing for other values."""
    accessors = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    for accessor in accessors:
        function = getattr(accessor, "__func__", accessor)
        for _ in range(10):  # a wrapper may wrap another wrapper
            if isinstance(function, types.FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)
            if function is None:
                break


def _digest(value: Any, references: Mapping[int, str]) -> str:
    def by_name(obj: Any) -> str | None:
        return references.get(id(obj)) if isinstance(obj, types.FunctionType | type) else None

    try:
        return serialize({"": value}, by_name=by_name, owned=True).digest
    except Exception:
        return f"{type(value).__qualname__} at {id(value)}"


def changes_definitions(
    definitions: Iterable[Definition],
    effects: Iterable[str],
    used: Iterable[str],
    loaded: Mapping[str, Any],
) -> bool:
    """Return True if a cell may change the state of one of the functions and classes `definitions` that it defines.

    `effects` are the dotted names of its calls whose result is not used, and of the attributes that it assigns (with
    `=`). `used` are the definitions that its other statements use, `loaded` the variables after the cell.
    """
    own = {each.name: each for each in definitions}
    for effect in effects:
        root, _, attribute = effect.partition(".")
        if root.rstrip("=") in own and (attribute or root.endswith("=")):
            return True
    for name in own.keys() & set(used):
        methods_assign = any(
            call.endswith("=") and (call.startswith(_OWN_CLASS) or call.partition(".")[0] in own)
            for call in own[name].calls
        )
        if methods_assign or any(map(_is_mutable, _plain_parts(loaded.get(name)))):
            return True
    return False


def _plain_parts(value: Any) -> Iterator[Any]:
    """Yield the values of the attributes, defaults and closure variables of a function or class."""
    for label, part in _parts(value):
        if label.endswith("<attributes>"):
            yield from part.values()
            yield from part["__defaults__"] or ()
            yield from (part["__kwdefaults__"] or {}).values()
        elif not label.endswith("<code>"):
            yield part


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray)
