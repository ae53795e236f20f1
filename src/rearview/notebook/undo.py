"""Restore the variables of a live notebook to their values after an earlier cell.

Before a cell runs, the variables that it can reach are copied, unless there is a copy already. Variables
that share objects are copied and restored together, so that aliases stay aliases. Functions, classes and
modules are kept by reference; the state of functions and classes of the notebook, such as a counter in a class, is
copied.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rearview.errors import UsageError
from rearview.state.codecs.rng import read_random_state, write_random_state
from rearview.state.memory_blocks import GcPaused
from rearview.state.variable_groups import (
    BY_REFERENCE,
    Serialized,
    attributes_of,
    reachable,
    serialize,
    sharing_groups,
)


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
    notes: tuple[str, ...] = ()
    """Parts that the copy lacks, in words."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return len(self.data or b"") + sum(map(len, self.buffers))


_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_DESCRIPTORS = (classmethod, staticmethod, property)


class DefinitionCopy:
    """The state of a function or class of the notebook at one time: attributes and defaults."""

    def __init__(self, value: Any) -> None:
        self._kept: dict[str, Any] = {}
        """Attributes that cannot change or cannot be copied, as they are."""
        self._copied: dict[str, Serialized] = {}
        self._functions: dict[str, DefinitionCopy] = {}
        """What the methods of a class keep."""
        for name, attribute in attributes_of(value).items():
            if isinstance(attribute, types.FunctionType):
                self._functions[name] = DefinitionCopy(attribute)
            copied = None if isinstance(attribute, _NOT_COPIED) else _serialized_or_none(attribute)
            if copied is None:
                self._kept[name] = attribute
            else:
                self._copied[name] = copied

    def restore(self, value: Any) -> bool:
        """Restore the attributes of a function or class; return True if any of them had changed."""
        changed = False
        now = attributes_of(value)
        for name in now.keys() - self._kept.keys() - self._copied.keys():
            delattr(value, name)
            changed = True
        for name, kept in self._kept.items():
            if now.get(name, self) is not kept:
                setattr(value, name, kept)
                changed = True
        for name, copied in self._copied.items():
            current = _serialized_or_none(now[name]) if name in now else None
            if current is None or current.digest != copied.digest:
                buffers = [bytearray(buffer.raw()) for buffer in copied.buffers]
                setattr(value, name, pickle.loads(copied.data, buffers=buffers)[""])
                changed = True
        for name, function in self._functions.items():
            changed |= function.restore(attributes_of(value)[name])
        return changed


_NOT_COPIED = (*_ATOMS, *BY_REFERENCE, *_DESCRIPTORS)


def _serialized_or_none(value: Any) -> Serialized | None:
    try:
        copied = serialize({"": value})
    except Exception:
        return None
    # the memory of arrays will change
    kept = [pickle.PickleBuffer(bytes(buffer.raw())) for buffer in copied.buffers]
    return Serialized(copied.data, kept, copied.digest)


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
    definitions: Mapping[str, DefinitionCopy]
    """The state of those of them that the notebook defines."""
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
        self._started = 0.0
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
        for group in {id(group): group for group in self._groups.values()}.values():
            if reached is None or not reached.isdisjoint(group.names):
                self._touched.append(group)
                if group.data is None and not group.refused:
                    self._copy(group)
        self._started = perf_counter()

    def after(self, cell: int, source: str) -> Moment:
        """Record the variables after a cell."""
        return self._keep(cell, source, perf_counter() - self._started)

    def _keep(self, cell: int, source: str, seconds: float) -> Moment:
        values = self.variables()
        references = {k: v for k, v in values.items() if isinstance(v, BY_REFERENCE)}
        copied_values = {k: v for k, v in values.items() if k not in references}
        touched = {id(group) for group in self._touched}
        groups: dict[str, Group] = {}
        for names in sharing_groups(copied_values):
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
        return serialize({name: self.namespace[name] for name in names})

    def _copy(self, group: Group) -> None:
        try:
            copied = self._serialized(group.names)
        except Exception as exc:
            group.refused = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
            return
        group.data, group.digest, group.notes = copied.data, copied.digest, copied.notes
        group.buffers = [bytearray(buffer.raw()) for buffer in copied.buffers]

    def back_to(self, moment: Moment) -> list[str]:
        """Restore the variables to a moment; return the names that changed, each with the parts that it lacks."""
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
        lacking: dict[str, str] = {}
        for group in todo.values():
            restored |= _load(group, moment)
        for group in todo.values():
            # the copy becomes the variable; the next cell that reaches it makes a new copy
            group.data, group.buffers, group.digest = None, [], ""
            if group.notes:
                lacking |= dict.fromkeys(group.names, f" ({group.notes[0]})")
        kept = moment.groups.keys() | moment.references.keys()
        changed = sorted({*restored, *(before.keys() - kept)})
        for name in before.keys() - kept:
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
        return [name + lacking.get(name, "") for name in changed]

    def undo(self) -> tuple[Moment, list[str]]:
        """Undo the last cell."""
        if len(self.moments) < 2:
            raise UsageError("There is no cell to undo.", slug="no-undo")
        moment = self.moments[-2]
        return moment, self.back_to(moment)

    def checkout(self, cell: int) -> tuple[Moment, list[str]]:
        """Restore the variables to their values after a cell, given by its number."""
        for moment in reversed(self.moments):
            if moment.cell == cell:
                return moment, self.back_to(moment)
        cells = ", ".join(str(moment.cell) for moment in self.moments) or "none"
        raise UsageError(
            f"There is no copy from cell {cell}. There are: {cells} (0 is the start).",
            slug="no-undo",
        )


def _load(group: Group, moment: Moment) -> dict[str, Any]:
    """Return the variables of a copy."""
    assert group.data is not None
    try:
        with GcPaused():
            variables: dict[str, Any] = pickle.loads(group.data, buffers=group.buffers)
    except Exception as exc:
        raise UsageError(
            f"{', '.join(group.names)} cannot be restored to cell {moment.cell}: "
            f"{type(exc).__name__}: {exc}. Nothing was changed; run the cell that made it again.",
            slug="no-undo",
        ) from exc
    return variables


def _random() -> dict[str, Any]:
    """Return the states of the global random generators of loaded libraries."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # otherwise it would seed itself at the first draw
    return read_random_state()


def size_of(moments: Iterable[Moment]) -> int:
    """Return the bytes that the copies of some moments take."""
    groups = {id(group): group for moment in moments for group in moment.groups.values()}
    return sum(group.nbytes for group in groups.values()) + sys.getsizeof(groups)
