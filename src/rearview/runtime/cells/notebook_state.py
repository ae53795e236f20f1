"""The state of a notebook as the cell cache sees it: variables, definitions and settings, by digest, loaded or not.

Running the text of a function or class makes it again, but without the changes that cells have made to it since: a
counter in a class, a list that is a default, an attribute of a function. `definition_state` returns a digest of them.
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
"""Assumed bytes per second of storing and loading: variables that are computed faster are computed again."""
SMALL = 32 << 20
"""Contents of at most this many bytes are always stored."""
_OWN_CLASS = ("cls.", "type.", "self.__class__.")
"""Beginnings of assignment targets in methods that change their class."""
_FIGURES = ("Figure", "FigureBase", "Axes", "_AxesBase", "Artist")


class NotebookState:
    """The variables and settings that the cells so far have left, after they were run or skipped."""

    def __init__(
        self, store: ResultStore, namespace: dict[str, Any], hides: Callable[[str], bool]
    ) -> None:
        self.store = store
        self.namespace = namespace
        self._hides = hides
        self.groups: dict[str, GroupRef] = {}
        """By variable, as they are after the cells so far, loaded or not."""
        self.definitions: dict[str, tuple[Definition, str]] = {}
        self.absent: set[str] = set()
        """Variables that are not loaded."""
        self.loaded: dict[tuple[str, ...], str] = {}
        """Groups that were loaded and not touched since, with the digest that they then have."""
        self.settings = library_settings()
        self.settings_values: dict[str, str] = {}
        """By library: under which digest its settings are stored, if cells changed them."""
        self.hidden_setup = ""
        """Which cells have set up libraries, in order, as a hash."""
        self.ids: dict[str, int] = {}
        """Address of each variable's object before the current cell."""
        self._walked: dict[str, dict[int, Any]] = {}
        """Objects of each variable by address, if no cell could reach it since they were looked for."""
        self.reached: set[str] | None = set()
        """Variables that the current cell can reach; None: all."""

    def begin(self) -> None:
        """Note the variables before a cell runs."""
        for names in self.loaded:
            if not self.loaded[names] and self.touches(names):
                try:
                    self.loaded[names] = self.serialized(names, self.references()).digest
                except Exception:
                    self.loaded[names] = "?"
        # objects that the cell may drop are not kept alive
        self._walked = {k: v for k, v in self._walked.items() if not self.touches((k,))}
        self.ids = {name: id(value) for name, value in self.variables().items()}

    def reach(
        self, names: Iterable[str], definitions: Iterable[Definition] = ()
    ) -> set[str] | None:
        """Return the variables that a cell with these names can reach; None: all.

        `definitions` are the cell's own: functions of earlier cells may call them.
        """
        todo, seen = list(names), set(names)
        own: dict[str, set[str]] = {}
        for each in definitions:
            own.setdefault(each.name, set()).update(each.names)
        while todo:
            name = todo.pop()
            more = set(own.get(name, ()))
            if name in self.definitions:
                more |= self.definitions[name][0].names
            if name in self.groups:
                more |= {*self.groups[name].uses, *self.groups[name].names}
            todo += more - seen
            seen |= more
        if seen & (EVERYTHING - {"gc", "setattr"}) or "*" in seen:
            return None
        return seen & (self.groups.keys() | self.definitions.keys())

    def inputs(self, reached: set[str] | None) -> dict[str, str]:
        """Return the content of each of these variables; None: of all."""
        names = {*self.groups, *self.definitions} if reached is None else reached
        return {name: self.content_of(name) for name in names}

    def content_of(self, name: str) -> str:
        """Return the digest of a variable or definition; empty if there is none."""
        if name in self.definitions:
            return self.definitions[name][1]
        return self.groups[name].content if name in self.groups else ""

    def settings_digest(self) -> str:
        """Return a hash of the settings of libraries and of the set-up by cells."""
        return digest_of(sorted(self.settings.items()), self.hidden_setup)

    def hide_setup(self, setup: str) -> None:
        """Note that a cell set up something outside the variables: later cells depend on it."""
        if setup:
            self.hidden_setup = digest_of(self.hidden_setup, setup)

    def define(self, definition: Definition, digest: str = "") -> None:
        """Note that a name is now bound to a function or class; `digest` is that of its content."""
        self.groups.pop(definition.name, None)
        self.definitions[definition.name] = (definition, digest)

    def digest_definitions(
        self, definitions: Iterable[Definition], bound: set[str], key: str, outside: str
    ) -> dict[str, str]:
        """Return the digests of the functions and classes that a cell has defined, and remember them.

        `bound` are the variables that the cell has set, imports not included; `key` identifies all its inputs,
        `outside` those that are not variables.
        """
        definitions = list(definitions)
        names = [each.name for each in definitions]
        bound = bound | {name for name in names if names.count(name) > 1}
        digests: dict[str, str] = {}
        references = self.references()
        for each in definitions:
            parts = [self.content_of(name) for name in sorted(each.at_once)]
            if not each.at_once.isdisjoint(bound):
                parts.append(key)  # their values when it was defined
            elif each.calls_at_once:
                parts.append(outside)
            if each.name in self.namespace:
                parts.append(definition_state(self.namespace[each.name], references))
            digests[each.name] = digest_of(each.digest, parts)
            self.define(each, digests[each.name])
        return digests

    def forget(self, name: str) -> None:
        """Note that a name was deleted."""
        self.groups.pop(name, None)
        self.definitions.pop(name, None)
        self.absent.discard(name)

    def touches(self, names: Iterable[str]) -> bool:
        """Return True if the current cell can reach one of these variables."""
        return self.reached is None or not self.reached.isdisjoint(names)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the program that are loaded."""
        return {
            name: value
            for name, value in self.namespace.items()
            if not (self._hides(name) or (name.startswith("__") and name.endswith("__")))
            and not (name.strip("_").isdigit() and name.startswith("_"))
            and name not in {"_", "__", "___", "In", "Out", "exit", "quit", "open"}
        }

    def references(self) -> dict[int, str]:
        """Return the functions and classes that the notebook defines, by their address."""
        return {
            id(self.namespace[name]): name for name in self.definitions if name in self.namespace
        }

    def serialized(
        self, names: tuple[str, ...], references: Mapping[int, str], used: set[str] | None = None
    ) -> Serialized:
        """Return the content of variables; definitions of the notebook are referred to by name.

        The names of those are added to `used`.
        """
        seen = set[str]() if used is None else used

        def by_name(obj: Any) -> str | None:
            name = references.get(id(obj)) if isinstance(obj, types.FunctionType | type) else None
            if name is not None:
                seen.add(name)
            return name

        variables = {name: self.namespace[name] for name in names}
        return serialize(variables, by_name=by_name, refuse=_refused, owned=True)

    def take_changes(
        self, key: str, seconds: float, analysis: CellAnalysis
    ) -> tuple[list[GroupRef], list[str]]:
        """Return the variables that a cell changed, in groups, and those that it deleted."""
        live = self.variables()
        self.absent -= live.keys()  # it bound them without using their earlier values
        defined = {each.name for each in analysis.definitions}
        for name in [*self.definitions]:
            # a name that was bound to a function and now has another value
            value = live.get(name)
            if name in live and name not in defined and id(value) != self.ids.get(name, id(value)):
                del self.definitions[name]
        changed: list[GroupRef] = []
        rest: dict[str, Any] = {}
        for name, value in live.items():
            if name in self.definitions:
                continue
            if isinstance(value, BY_REFERENCE):
                known = name in self.groups and self.ids.get(name) == id(value)
                if known and not self.touches((name,)):
                    continue
                reference = self._reference(name, value, key)
                if self.groups.get(name) != reference:
                    changed.append(reference)
                    self.groups[name] = reference
            else:
                rest[name] = value
        references = self.references()
        self._walked = {
            name: objects
            for name, objects in self._walked.items()
            if name in rest and self.ids.get(name) == id(rest[name])
        }
        for names in sharing_groups(rest, self._walked):
            group = self.groups.get(names[0])
            same = group is not None and group.names == names
            moved = any(self.ids.get(name) != id(live[name]) for name in names)
            if same and not moved and not self.touches(names):
                continue
            fresh = self._grouped(names, key, seconds, references)
            if same and group is not None:
                unchanged = fresh.content == group.content and group.stored == fresh.stored
                if unchanged or (not moved and self.loaded.get(names) == fresh.content):
                    continue
            self.loaded.pop(names, None)
            self.groups.update(dict.fromkeys(names, fresh))
            changed.append(fresh)
        existing = {*self.groups, *self.definitions} - self.absent
        deleted = sorted(existing - live.keys())
        for name in deleted:
            self.forget(name)
        return changed, deleted

    def _reference(self, name: str, value: Any, key: str) -> GroupRef:
        if isinstance(value, types.ModuleType):
            return GroupRef((name,), f"module {value.__name__}")
        module = getattr(value, "__module__", None) or ""
        if module != "__main__":
            return GroupRef((name,), f"{module} {getattr(value, '__qualname__', name)}")
        uses = {each for code in codes_of(value) for each in code.co_names}
        return GroupRef((name,), digest_of(key, name), uses=tuple(sorted(uses)), why="a function")

    def is_import(self, group: GroupRef) -> bool:
        """Return True for a module, or a function or class of one."""
        value = self.namespace.get(group.names[0])
        if not isinstance(value, BY_REFERENCE):
            return False
        return isinstance(value, types.ModuleType) or value.__module__ != "__main__"

    def is_reference(self, name: str, group: GroupRef) -> bool:
        """Return True if a name is bound to the module, function or class named in a group."""
        value = self.namespace[name]
        return (
            not group.stored
            and isinstance(value, BY_REFERENCE)
            and self._reference(name, value, "").content == group.content
        )

    def _grouped(
        self, names: tuple[str, ...], key: str, seconds: float, references: Mapping[int, str]
    ) -> GroupRef:
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
        """Return the names that functions and methods of the notebook inside some variables use."""
        used: set[str] = set()
        todo, seen = [self.namespace[name] for name in names], set[int]()
        while todo:
            value = todo.pop()
            if id(value) in seen or isinstance(value, types.ModuleType):
                continue
            seen.add(id(value))
            if len(seen) > MOST_OBJECTS:
                return ("*",)
            kind = value if isinstance(value, types.FunctionType | type) else type(value)
            if kind.__module__ == "__main__":
                used |= {each for code in codes_of(value) for each in code.co_names}
                used.add(kind.__name__)
            if not isinstance(value, types.FunctionType | type):
                todo += gc.get_referents(value)
        return tuple(sorted(used))


def _refused(obj: Any) -> str:
    """Return why an object cannot be stored with the others; empty if it can."""
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
    """Return a digest of the state that a function or class keeps.

    `references` are the definitions of the notebook by address: they are referred to by name.
    """
    try:
        return digest_of([(place, _digest(part, references)) for place, part in _parts(value)])
    except Exception:  # an object that a decorator returns may raise on any access
        return f"{type(value).__qualname__} at {id(value)}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each part of the state of a function or class, with its place."""
    if isinstance(value, type):
        for name, attribute in attributes_of(value).items():
            functions = list(_functions_of(attribute))
            if not functions:
                yield name, attribute
            for function in functions:
                yield from ((f"{name}.{place}", part) for place, part in _parts(function))
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
                # ipywidgets' `interact` stores its widgets in the function
                if name != "__wrapped__"
                and not type(attribute).__module__.startswith("ipywidgets.")
            },
        )
        for cell in function.__closure__ or ():
            yield "<closure>", _content(cell)


def _content(cell: types.CellType) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:
        return None  # the variable has no value yet
    return None if isinstance(content, types.FunctionType | type) else content


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a function, method, property or wrapper; nothing for other values."""
    accessors = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    for accessor in accessors:
        function = getattr(accessor, "__func__", accessor)
        for _ in range(10):  # wrappers of wrappers
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
    """Return True if a cell may change the state of functions and classes that it has defined itself.

    `effects` are its calls for their effect and its assignments to attributes, dotted; `used` the names that its other
    statements use; `loaded` the variables after it.
    """
    own = {each.name: each for each in definitions}
    for effect in effects:
        root, _, rest = effect.partition(".")
        if root.rstrip("=") in own and (rest or root.endswith("=")):
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
    for place, part in _parts(value):
        if place.endswith("<attributes>"):
            yield from part.values()
            yield from part["__defaults__"] or ()
            yield from (part["__kwdefaults__"] or {}).values()
        elif not place.endswith("<code>"):
            yield part


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray)
