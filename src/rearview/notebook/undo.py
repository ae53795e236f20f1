"""Restore the variables of a live notebook to their values after an earlier cell, with the magic `%rv`.

Before a cell runs, the variables that the cell can reach are copied, unless there is a copy already. Variables
that share objects form a group, which is copied and restored as a whole, so that aliases remain aliases. Functions,
classes and modules are not copied but referred to; the state of functions and classes of the notebook, such as a
counter in a class, is copied.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from time import perf_counter
from typing import Any

from rearview.errors import RearviewError, UsageError
from rearview.state.code_lookup import importable
from rearview.state.codecs.rng import read_random_state, write_random_state
from rearview.state.memory_blocks import GcPaused
from rearview.state.variable_groups import (
    BY_REFERENCE,
    Serialized,
    attributes_of,
    is_reference,
    reachable,
    serialize,
    sharing_groups,
)

HELP = """\
%rv history          the cells that were run, with their seconds
%rv undo             undo the last cell: variables have their values from before it
%rv checkout CELL    restore the state after In [CELL]; 0 is the state at `%load_ext rearview`"""


@dataclass
class Group:
    """Variables that share objects, with a copy of their content as it was after some cell."""

    names: tuple[str, ...]
    number: int
    """Number of this group in the order in which groups were made."""
    data: bytes | None = None
    buffers: list[bytearray] = field(default_factory=list)
    refused: str = ""
    """Reason why the variables cannot be copied; empty if they can."""
    digest: str = ""
    notes: tuple[str, ...] = ()
    """Sentences about parts of the variables that are not in the copy."""

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes; 0 if there is none."""
        return len(self.data or b"") + sum(map(len, self.buffers))


_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_DESCRIPTORS = (classmethod, staticmethod, property)


class LiveObjects:
    """Functions, classes and namespaces to which copies of variables refer, instead of containing them.

    A copy is loaded in the process that made it, so it can refer to live objects. A function that was copied together
    with its global variables would see only their old values.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def name(self, obj: Any) -> str | None:
        """Return the name by which a copy refers to `obj`, or None if `obj` itself is to be copied."""
        if isinstance(obj, type) or (type(obj) is types.FunctionType and not _has_state(obj)):
            return self._keep(obj)
        if isinstance(obj, _Reference):
            return self._keep(obj.value)
        return None

    def _keep(self, obj: Any) -> str:
        name = str(id(obj))  # unique, because `self._objects` keeps the object in memory
        self._objects[name] = obj
        return name

    @staticmethod
    def rebuild(obj: Any) -> Any:
        """Return pickle's reduce tuple for a function or a closure's variable, or None for any other object."""
        if type(obj) is types.CellType:
            try:
                content: tuple[Any, ...] = (obj.cell_contents,)
            except ValueError:  # the variable has no value yet
                content = ()
            return types.CellType, (), content, None, None, _fill_cell
        if type(obj) is not types.FunctionType:
            return None
        state = (obj.__defaults__, obj.__kwdefaults__, vars(obj).copy())
        names = (obj.__name__, obj.__qualname__, obj.__module__, obj.__doc__)
        arguments = (_Reference(obj.__code__), _Reference(obj.__globals__), obj.__closure__, names)
        return _function, arguments, state, None, None, _fill_function

    def load(self, data: bytes, buffers: Iterable[Any]) -> Any:
        """Return the objects in a copy, given its pickle `data` and its `buffers`."""
        unpickler = _CopyLoader(io.BytesIO(data), buffers=buffers)
        unpickler.objects = self._objects
        return unpickler.load()


class _Reference:
    """Stands in a pickle for an object to which the copy refers."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _CopyLoader(pickle.Unpickler):
    objects: Mapping[str, Any]

    def persistent_load(self, pid: str) -> Any:
        return self.objects[pid]


def _has_state(function: types.FunctionType) -> bool:
    """Return True if a function has attributes, a closure or mutable defaults, and cannot be imported by name."""
    if function.__module__ != "__main__" and importable(function):
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    constant = all(isinstance(value, (*_ATOMS, *BY_REFERENCE)) for value in defaults)
    return bool(function.__closure__) or bool(vars(function)) or not constant


def _function(code: Any, space: dict[str, Any], closure: Any, names: tuple[Any, ...]) -> Any:
    function = types.FunctionType(code, space, names[0], None, closure)
    _, function.__qualname__, function.__module__, function.__doc__ = names
    return function


def _fill_function(function: Any, state: tuple[Any, ...]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state
    vars(function).update(attributes)


def _fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value


class DefinitionCopy:
    """A copy of the state of a function or class of the notebook: attributes and defaults, also of methods."""

    def __init__(self, value: Any) -> None:
        self._live = LiveObjects()
        self._uncopied: dict[str, Any] = {}
        """Name -> value of attributes that cannot change, or cannot be copied."""
        self._copied: dict[str, Serialized] = {}
        self._functions: dict[str, DefinitionCopy] = {}
        """Name of a method of a class -> copy of the method's state."""
        for name, attribute in attributes_of(value).items():
            if isinstance(attribute, types.FunctionType):
                self._functions[name] = DefinitionCopy(attribute)
            copied = (
                None
                if isinstance(attribute, _NOT_COPIED)
                else _serialized_or_none(attribute, self._live)
            )
            if copied is None:
                self._uncopied[name] = attribute
            else:
                self._copied[name] = copied

    def restore(self, value: Any) -> bool:
        """Restore the copied state of the function or class `value`; return True if it had changed."""
        changed = False
        now = attributes_of(value)
        for name in now.keys() - self._uncopied.keys() - self._copied.keys():
            delattr(value, name)
            changed = True
        for name, attribute in self._uncopied.items():
            if now.get(name, self) is not attribute:
                setattr(value, name, attribute)
                changed = True
        for name, copied in self._copied.items():
            current = _serialized_or_none(now[name], self._live) if name in now else None
            if current is None or current.digest != copied.digest:
                buffers = [bytearray(buffer.raw()) for buffer in copied.buffers]
                setattr(value, name, self._live.load(copied.data, buffers)[""])
                changed = True
        for name, function in self._functions.items():
            changed |= function.restore(attributes_of(value)[name])
        return changed


_NOT_COPIED = (*_ATOMS, *BY_REFERENCE, *_DESCRIPTORS)


def _serialized_or_none(value: Any, live: LiveObjects) -> Serialized | None:
    try:
        copied = serialize({"": value}, by_name=live.name, rebuild=live.rebuild)
    except Exception:
        return None
    # copy the memory of arrays, because the program may change them
    buffers = [pickle.PickleBuffer(bytes(buffer.raw())) for buffer in copied.buffers]
    return Serialized(copied.data, buffers, copied.digest)


@dataclass(frozen=True)
class Moment:
    """The variables as they were after one cell."""

    cell: int
    source: str
    seconds: float
    groups: Mapping[str, Group]
    """Variable -> its group."""
    references: Mapping[str, Any]
    """Variable -> value, for variables that are functions, classes or modules."""
    definitions: Mapping[str, DefinitionCopy]
    """Function or class that the notebook defines -> copy of its state."""
    random: Mapping[str, Any]
    """Library -> state of its global random generator."""


class Undo:
    """Remembers the variables in a namespace after each cell, and restores them."""

    def __init__(self, namespace: dict[str, Any], hidden: Iterable[str] = ()) -> None:
        self.namespace = namespace
        self.hidden = set(hidden)
        self.moments: list[Moment] = []
        self._count = 0
        self._groups: dict[str, Group] = {}
        self._touched: list[Group] = []
        self._started = 0.0
        self._live = LiveObjects()
        self._keep(0, "", 0.0)

    def variables(self) -> dict[str, Any]:
        """Return name -> value of the user's variables, without names that are hidden or begin with an underscore."""
        return {
            name: value
            for name, value in self.namespace.items()
            if not name.startswith("_") and name not in self.hidden
        }

    def before(self, source: str) -> None:
        """Before the cell `source` runs, copy the groups of variables that it can reach and that have no copy yet."""
        reached = reachable(source, self.variables())
        self._touched = []
        for group in {id(group): group for group in self._groups.values()}.values():
            if reached is None or not reached.isdisjoint(group.names):
                self._touched.append(group)
                if group.data is None and not group.refused:
                    self._copy(group)
        self._started = perf_counter()

    def after(self, cell: int, source: str) -> Moment:
        """Record the variables after the cell with the number `cell`; return the moment."""
        return self._keep(cell, source, perf_counter() - self._started)

    def _keep(self, cell: int, source: str, seconds: float) -> Moment:
        values = self.variables()
        references = {k: v for k, v in values.items() if is_reference(v)}
        copied_values = {k: v for k, v in values.items() if k not in references}
        touched = {id(group) for group in self._touched}
        groups: dict[str, Group] = {}
        for names in sharing_groups(copied_values, closures=True):
            old_group = self._groups.get(names[0])
            if old_group is not None and old_group.names == names:
                if id(old_group) not in touched or self._is_unchanged(old_group):
                    groups |= dict.fromkeys(names, old_group)
                    continue
            self._count += 1
            groups |= dict.fromkeys(names, Group(names, self._count))
        self._groups, self._touched = groups, []
        definitions = {
            name: DefinitionCopy(value)
            for name, value in references.items()
            if isinstance(value, types.FunctionType | type) and value.__module__ == "__main__"
        }
        self.moments.append(
            Moment(cell, source, seconds, groups, references, definitions, _random())
        )
        return self.moments[-1]

    def _is_unchanged(self, group: Group) -> bool:
        if group.refused or not group.digest:
            return False
        try:
            return self._serialized(group.names).digest == group.digest
        except Exception:
            return False

    def _serialized(self, names: tuple[str, ...]) -> Serialized:
        content = {name: self.namespace[name] for name in names}
        return serialize(content, by_name=self._live.name, rebuild=self._live.rebuild)

    def _copy(self, group: Group) -> None:
        try:
            copied = self._serialized(group.names)
        except Exception as exc:
            group.refused = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
            return
        group.data, group.digest, group.notes = copied.data, copied.digest, copied.notes
        group.buffers = [bytearray(buffer.raw()) for buffer in copied.buffers]

    def back_to(self, moment: Moment) -> list[str]:
        """Restore the variables to their values at `moment`; return the names of the variables that this changed.

        If a part of a variable could not be copied, its name is followed by a note in parentheses. Raise UsageError, and
        change nothing, if a variable cannot be restored.
        """
        todo: dict[int, Group] = {}
        for name, group in moment.groups.items():
            if self._groups.get(name) is not group:
                todo[id(group)] = group
        for group in todo.values():
            if group.data is None:
                why = group.refused or "no copy was made"
                raise UsageError(
                    f"{', '.join(group.names)} cannot be restored to cell {moment.cell}: {why}. "
                    "Nothing was changed; run the cell that made it again.",
                    slug="no-undo",
                )
        before = self.variables()
        restored: dict[str, Any] = {}
        notes: dict[str, str] = {}
        for group in todo.values():
            restored |= _load(group, moment, self._live)
        for group in todo.values():
            # the restored variables use the memory of the copy: before a cell can reach them, a new copy is made
            group.data, group.buffers, group.digest = None, [], ""
            if group.notes:
                notes |= dict.fromkeys(group.names, f" ({group.notes[0]})")
        names_then = moment.groups.keys() | moment.references.keys()
        changed = sorted({*restored, *(before.keys() - names_then)})
        for name in before.keys() - names_then:
            del self.namespace[name]
        for name, value in moment.references.items():
            if self.namespace.get(name) is not value:
                changed.append(name)
                self.namespace[name] = value
        self.namespace.update(restored)
        for name, copied in moment.definitions.items():
            if copied.restore(self.namespace[name]) and name not in changed:
                changed.append(name)
        self._groups = dict(moment.groups)
        write_random_state(dict(moment.random))
        del self.moments[self.moments.index(moment) + 1 :]
        return [name + notes.get(name, "") for name in changed]

    def undo(self) -> tuple[Moment, list[str]]:
        """Restore the variables to their values before the last cell; return (restored moment, changed names)."""
        if len(self.moments) < 2:
            raise UsageError("There is no cell to undo.", slug="no-undo")
        moment = self.moments[-2]
        return moment, self.back_to(moment)

    def checkout(self, cell: int) -> tuple[Moment, list[str]]:
        """Restore the variables to their values after In [`cell`]; return (restored moment, changed names)."""
        for moment in reversed(self.moments):
            if moment.cell == cell:
                return moment, self.back_to(moment)
        cells = ", ".join(str(moment.cell) for moment in self.moments) or "none"
        raise UsageError(
            f"There is no copy from cell {cell}. There are: {cells} (0 is the start).",
            slug="no-undo",
        )


def _load(group: Group, moment: Moment, live: LiveObjects) -> dict[str, Any]:
    """Return name -> value of the variables in the copy of a group; raise UsageError if it cannot be loaded."""
    assert group.data is not None
    try:
        with GcPaused():
            variables: dict[str, Any] = live.load(group.data, group.buffers)
    except Exception as exc:
        raise UsageError(
            f"{', '.join(group.names)} cannot be restored to cell {moment.cell}: "
            f"{type(exc).__name__}: {exc}. Nothing was changed; run the cell that made it again.",
            slug="no-undo",
        ) from exc
    return variables


def _random() -> dict[str, Any]:
    """Return library -> state of its global random generator, for the loaded libraries."""
    if "numpy" in sys.modules:
        # NumPy seeds its global generator during this import: it must have a state that can be read
        importlib.import_module("numpy.random")
    return read_random_state()


def size_of(moments: Iterable[Moment]) -> int:
    """Return the total size in bytes of the copies of all `moments`; a shared copy counts once."""
    groups = {id(group): group for moment in moments for group in moment.groups.values()}
    return sum(group.nbytes for group in groups.values()) + sys.getsizeof(groups)


class NotebookTable:
    """A table of strings with a heading and a note, shown as HTML in a notebook and as text in a console."""

    def __init__(self, rows: list[tuple[str, ...]], head: tuple[str, ...], note: str = "") -> None:
        self._rows, self._head, self._note = rows, head, note

    def __repr__(self) -> str:
        rows = [self._head, *self._rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self._head))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *([self._note] if self._note else [])])

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(item)}</{tag}>" for item in cells) + "</tr>"

        body = "".join(row(item, "td") for item in self._rows)
        return f"<table>{row(self._head, 'th')}{body}</table><p>{escape(self._note)}</p>"


class Magics:
    """The magic `%rv` of one IPython shell; it also observes which cells the shell runs."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.undo = Undo(shell.user_ns, shell.user_ns_hidden)
        self._watched = False
        """Whether the running cell is recorded: it started after `%rv` was loaded, and does not begin with `%rv`."""
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)

    def _before(self, info: Any) -> None:
        source = info.raw_cell or ""
        self._watched = not source.lstrip().startswith("%rv")
        if self._watched:
            self.undo.before(self.shell.transform_cell(source))

    def _after(self, result: Any) -> None:
        watched, self._watched = self._watched, False
        if not watched or result is None or not result.info.store_history:
            return
        self.undo.after(int(result.execution_count or 0), result.info.raw_cell or "")

    def __call__(self, line: str) -> Any:
        """Execute a line `%rv …` and return the table to show; `line` is the text after `%rv`."""
        verb, _, arguments = line.strip().partition(" ")
        try:
            if verb == "undo":
                return self._restored(*self.undo.undo())
            if verb == "checkout":
                if not arguments.strip().isdigit():
                    raise UsageError(
                        f"%rv checkout takes the number of a cell, not {arguments!r}.",
                        slug="no-undo",
                    )
                return self._restored(*self.undo.checkout(int(arguments)))
            if verb == "history":
                return self._history()
            return NotebookTable([(line,) for line in HELP.splitlines()], ("rv",))
        except RearviewError as exc:
            from IPython.core.error import UsageError as IPythonUsageError

            raise IPythonUsageError(f"{exc} (docs/errors.md#{exc.slug})") from None

    def _restored(self, moment: Moment, changed: list[str]) -> NotebookTable:
        note = f"now as after cell {moment.cell}" if moment.cell else "now as at the start"
        return NotebookTable([(name,) for name in changed], ("brought back",), note)

    def _history(self) -> NotebookTable:
        rows: list[tuple[str, ...]] = [
            (
                str(moment.cell),
                f"{moment.seconds:.2f} s",
                moment.source.strip().partition("\n")[0][:60],
            )
            for moment in self.undo.moments
            if moment.cell
        ]
        note = f"copies take {size_of(self.undo.moments) / 1e6:.1f} MB"
        return NotebookTable(rows, ("cell", "took", "source"), note)


def register(shell: Any) -> None:
    """Add the magic `%rv` to an IPython shell that does not have it yet."""
    if "rv" not in shell.magics_manager.magics["line"]:
        shell.register_magic_function(Magics(shell), "line", "rv")
