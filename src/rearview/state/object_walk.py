"""Anchors: the objects that exist when a loop is entered, numbered by a walk in fixed order.

A replay runs the same set-up code, walks the same way and gets the same numbers. `find_path` returns
the path to an object that is not an anchor, for messages.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.model.wording import in_words
from rearview.state.classify import INLINE, THROUGH, VALUE, kind_of
from rearview.state.codecs.arrays import form_of, owns_memory
from rearview.state.codecs.base import Kind, PathStep, WalkRules, steps
from rearview.state.codecs.tensors import plain_access

Project = Callable[[Any], bool]

_LITERAL = (str, int, float, bytes, bool)
_MODULE_STEPS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


class Anchors:
    """Objects that existed when the loop was entered, numbered in the order of a fixed walk.

    They are referred to weakly where possible: recording must not keep objects alive.
    """

    def __init__(self, project: Project, loop_modules: Collection[str] = ()) -> None:
        self.signature: list[str] = []
        """A label of each anchor, in order; a replay must find the same labels."""
        self.kinds: list[Kind] = []
        self.types: list[type] = []
        self.ids: list[int] = []
        """The `id` of each anchor while it lives."""
        self.index: dict[int, int] = {}
        """Number of a live anchor, by its `id`; rebuilt by `alive`."""
        self.block_keys: dict[tuple[int, int], str] = {}
        """Keys of buffers in the last capture, by address."""
        self.rules = WalkRules(project, self._is_value, loop_modules)
        self.reducers: dict[type, Any] = {}
        """By type: the function that pickles objects created after the walk; filled by capture."""
        self.shares_arrays = False
        """Whether small arrays created after the walk were seen to share memory."""
        self._refs: list[Any] = []
        self._weak: list[int] = []
        """Numbers of anchors that are referred to weakly."""
        self._strong: list[int] = []
        """Numbers of anchors that do not allow weak references."""
        self._gone: list[int] = []
        """Numbers of anchors that no longer exist, as of the last `alive`."""
        self._living: dict[int, int] = {}
        """`index` as of the last `alive`."""
        self.by_address: dict[int, tuple[int, Any]] = {}
        """Arrays that own their memory: number and form, by `id`. No reference to them is kept,
        because NumPy refuses to resize an array that has other references, even weak ones. If such
        an array is freed and a similar one gets its address, the new one takes its number; that is
        safe, because nothing refers to the old one."""
        self.recipes: dict[tuple[Any, ...], Any] = {}
        """For an order of elements: a recipe for a set that iterates in that order."""
        self.set_orders: dict[int, list[Any]] = {}
        """Order of the elements of each set at the walk, by the `id` of the set."""
        self.classes: list[int] = []
        """Numbers of anchors that are classes."""
        self._searched: dict[int, tuple[int, Any]] | None = None
        self._collected: list[Any] = []
        self._graphs: dict[int, int] = {}
        self._steps: list[tuple[int, str, object]] = []
        self._path_of: list[int] = []
        self._by_type: dict[type, Kind] = {}
        self._by_kind: dict[int, tuple[Kind, list[int]]] = {}
        _EVERY.add(self)

    @classmethod
    def walk(
        cls,
        roots: Mapping[str, object],
        *,
        project: Project,
        loop_modules: Collection[str] = (),
        signature: Sequence[str] | None = None,
    ) -> Anchors:
        """Return the anchors reachable from `roots`, numbered breadth first.

        `project` returns True for a module, or the name of one, that belongs to the project: only
        its classes and functions have attributes that are state. `loop_modules` are library modules
        whose training loops are watched. On replay, `signature` is the recorded one; the walk then
        leaves out closure variables that only a probe uses.
        """
        anchors = cls(project, loop_modules)
        with plain_access():
            anchors._walk(roots, signature)
            if signature is not None and not anchors.fit(signature):
                earlier = cls(project, loop_modules)
                earlier.rules.owners_of_views = True
                earlier._walk(roots, signature)
                if earlier.fit(signature):
                    return earlier
        return anchors

    def __len__(self) -> int:
        return len(self._refs)

    def _is_value(self, t: type, items: Iterable[object]) -> bool:
        kind = self._by_type.get(t)
        if kind is None:
            kind = self.kind(next(item for item in items if type(item) is t))
        return kind is VALUE

    def kind(self, obj: Any) -> Kind:
        """Return the kind of an object; looked up once per type."""
        t = type(obj)
        kind = self._by_type.get(t)
        if kind is None:
            kind = kind_of(obj, self.rules.project)
            if not isinstance(obj, type):
                self._by_type[t] = kind
        return kind

    def _walk(self, roots: Mapping[str, object], signature: Sequence[str] | None) -> None:
        queue: deque[tuple[object, int, Kind]] = deque()
        postponed: deque[tuple[object, int, Kind]] = deque()
        through: dict[int, object] = {}
        by_type = self._by_type
        index = self.index
        rules = self.rules

        path_steps = self._steps

        def visit(parent: int, step: PathStep) -> None:
            style, key, child = step
            kind = by_type.get(type(child)) or self.kind(child)
            if kind is VALUE or kind is INLINE:
                return
            child_id = id(child)
            if child_id in index or child_id in through:
                return
            if kind.name == "enum" and not self._is_expected(kind.label(child), signature):
                return  # the run was recorded by a version that treated enumerations as values
            place = len(path_steps)
            if key is not None and type(key) not in _LITERAL:
                key = _Unnamed(type(key).__name__)
            path_steps.append((parent, style, key))
            if kind is THROUGH:
                through[child_id] = child
            else:
                self._add(child, kind, place)
            queue.append((child, place, kind))

        for name, value in roots.items():
            visit(-1, PathStep("", name, value))
        while queue or postponed:
            obj, place, kind = queue.popleft() if queue else postponed.popleft()
            if kind is THROUGH:
                children: Iterable[PathStep] = inside(obj, rules)
            elif kind.unordered and queue:
                # a set may iterate in another order on replay: walk everything else first
                postponed.append((obj, place, kind))
                continue
            else:
                rules.recorded = self._recorded_names(obj, signature)
                children = kind.children(obj, rules)
            try:
                for step in children:
                    visit(place, step)
            except Exception:  # noqa: S112
                # an object that fails here fails the same way on replay; capture reports it
                continue

    def _is_expected(self, label: str, signature: Sequence[str] | None) -> bool:
        """Return True if `label` comes next in the recorded signature, or there is none."""
        if signature is None:
            return True
        number = len(self._refs)
        return number < len(signature) and bare(signature[number]) == bare(label)

    def _recorded_names(self, obj: object, signature: Sequence[str] | None) -> Sequence[str] | None:
        """Return the recorded closure variables of a function, functions of a class, or locals.

        The list is empty for a class that was recorded by a version that did not walk functions.
        """
        if signature is None or not isinstance(
            obj, type | types.FunctionType | types.GeneratorType
        ):
            return None
        number = self.index[id(obj)]
        label = signature[number] if number < len(signature) else ""
        if label.startswith(("function ", "class ", "generator ")) and label.endswith(")"):
            return label[label.rindex("(") + 1 : -1].split(",")
        return [] if isinstance(obj, type) else None

    def _add(self, obj: Any, kind: Kind, place: int) -> None:
        number = len(self._refs)
        self.ids.append(id(obj))
        self.index[id(obj)] = number
        self.signature.append(kind.label(obj))
        self.kinds.append(kind)
        self.types.append(type(obj))
        self._path_of.append(place)
        if isinstance(obj, type):
            self.classes.append(number)
        if type(obj) is set and len(obj) > 1 and self.rules.all_values(obj):
            self.set_orders[id(obj)] = list(obj)
        if kind.name == "array" and owns_memory(obj):
            self.by_address[id(obj)] = (number, form_of(obj))
            if self._searched is not None and id(obj) in self._searched:
                self._collected[self._searched[id(obj)][0]] = obj
            self._refs.append(None)
        else:
            self._hold(obj)
        if kind.name == "tensor" and not obj.is_leaf:
            self._graphs[number] = obj._version

    def _hold(self, obj: Any) -> None:
        number = len(self._refs)
        try:
            self._refs.append(weakref.ref(obj))
            self._weak.append(number)
        except TypeError:
            self._refs.append(obj)
            self._strong.append(number)

    def holds(self, obj: object) -> int | None:
        """Return the number of an anchor that is referred to weakly, else None."""
        number = self.index.get(id(obj))
        ref = None if number is None else self._refs[number]
        return number if isinstance(ref, weakref.ref) and ref() is obj else None

    def alive(self, roots: Mapping[str, object] | None = None) -> list[Any]:
        """Return all anchors by number, None for those that no longer exist; update `index`.

        The arrays of `by_address` are included only if `roots` is given and leads to them.
        """
        refs = self._refs
        for number in self._strong:
            if sys.getrefcount(refs[number]) <= _ALONE:
                refs[number] = None
        live = refs.copy()
        for number in self._weak:
            live[number] = refs[number]()
        if roots is not None and self.by_address:
            self._find_by_address(roots, live)
        gone = [number for number, obj in enumerate(live) if obj is None]
        if gone != self._gone or not self._living:
            # `id` calls audit hooks, so it is not called again
            self._living = dict(zip(self.ids, range(len(live)), strict=True))
            for number in gone:
                del self._living[self.ids[number]]
            self._gone = gone
        self.index = self._living.copy()
        return live

    def by_kind(self) -> list[tuple[Kind, list[int]]]:
        """Return the kinds of the anchors, each with its numbers, in order."""
        if not self._by_kind:
            for number, kind in enumerate(self.kinds):
                self._by_kind.setdefault(id(kind), (kind, []))[1].append(number)
        return list(self._by_kind.values())

    def _find_by_address(self, roots: Mapping[str, object], live: list[Any]) -> None:
        second_walk = Anchors(self.rules.project, self.rules.loop_modules)
        second_walk._searched, second_walk._collected = self.by_address, live
        second_walk.rules.owners_of_views = self.rules.owners_of_views
        second_walk._walk(roots, self.signature)

    def same_graph(self, tensor: Any) -> bool:
        """Return True if a tensor has the autograd graph that it had when the loop was entered."""
        number = self.index.get(id(tensor), -1)
        return bool(self._graphs.get(number) == tensor._version)

    def fit(self, signature: Sequence[str]) -> bool:
        """Return True if the recorded walk found the same kinds of objects in this order."""
        return list(map(bare, signature)) == list(map(bare, self.signature))

    def check(self, signature: Sequence[str]) -> None:
        """Raise StateError unless the recorded walk found the same kinds of objects in this order."""
        for number, (recorded, current) in enumerate(zip(signature, self.signature, strict=False)):
            if bare(recorded) != bare(current):
                raise StateError(
                    f"The set-up differs: {self.path(number)} was a {bare(recorded)} when the run was "
                    f"recorded and is a {bare(current)} now. Replay from the start instead, or look at "
                    "what the set-up reads from outside (files, time, environment).",
                    slug="state-anchors",
                )
        if len(signature) != len(self.signature):
            has_more = len(self.signature) > len(signature)
            number = min(len(signature), len(self.signature))
            difference = (
                f"{self.path(number)} is new"
                if has_more
                else f"a {bare(signature[number])} is gone"
            )
            raise StateError(
                f"The set-up differs: {difference}; {len(signature)} objects when recorded, "
                f"{len(self.signature)} now. Replay from the start instead.",
                slug="state-anchors",
            )

    def path(self, number: int) -> str:
        """Return the path to an anchor as people write it, such as `model.layers[2].weight`."""
        return self._render(self._path_of[number])

    def _render(self, place: int) -> str:
        parts: list[str] = []
        while place >= 0:
            parent, style, key = self._steps[place]
            parts.append(spell(style, key))
            place = parent
        return tidy("".join(reversed(parts)))


_EVERY: weakref.WeakSet[Anchors] = weakref.WeakSet()


@contextlib.contextmanager
def without_weak_references(*objects: object) -> Iterator[None]:
    """Drop all weak references to `objects` while the body runs: some operations forbid them.

    Afterwards each object is the same anchor as before, even if the operation changed it.
    """
    weak_anchors = [
        (anchors._refs, number, obj)
        for anchors in list(_EVERY)
        for obj in objects
        if (number := anchors.holds(obj)) is not None
    ]
    for refs, number, obj in weak_anchors:
        refs[number] = lambda obj=obj: obj  # another thread may call it at this moment
    try:
        yield
    finally:
        for refs, number, obj in weak_anchors:
            refs[number] = weakref.ref(obj)


def inside(obj: Any, rules: WalkRules) -> Iterable[PathStep]:
    """Yield the objects inside an immutable object."""
    import functools

    if isinstance(obj, functools.partial):
        yield PathStep(".", "func", obj.func)
        yield from steps("[", enumerate(obj.args))
        yield from steps("[", obj.keywords.items())
    elif isinstance(obj, types.MethodType):
        yield PathStep(".", "__self__", obj.__self__)
        yield PathStep(".", "__func__", obj.__func__)
    elif isinstance(obj, weakref.ref):
        # the target is state only if something else refers to it; the walk reaches it from there
        return
    elif isinstance(obj, slice):
        yield from steps(
            ".", zip(("start", "stop", "step"), (obj.start, obj.stop, obj.step), strict=True)
        )
    elif not rules.all_values(obj, levels=4):
        style = "{" if isinstance(obj, frozenset) else "["
        yield from steps(style, enumerate(obj))
    if rules.is_local(type(obj)):
        yield PathStep("<", "class", type(obj))
    yield from steps(".", list(getattr(obj, "__dict__", {}).items()))


def spell(style: str, key: object) -> str:
    """Return one step of a path as text."""
    if style == "":
        scope, _, rest = str(key).partition(":")
        module, _, name = rest.rpartition(":")
        return f"{module}.{name}" if scope == "global" and module != "__main__" else name or scope
    if style == ".":
        return f".{key}"
    if style == "[":
        return f"[{key!r}]" if not isinstance(key, _Unnamed) else f"[{key}]"
    return f"<{key}>" if key else ""


def tidy(path: str) -> str:
    """Return a path as people write it: without torch's inner dictionaries and Rearview's names.

    >>> tidy("net._modules['layers']._modules['2']._parameters['weight']")
    'net.layers[2].weight'
    """
    path = _MODULE_STEPS.sub(lambda m: f"[{m[1]}]" if m[1].isdigit() else f".{m[1]}", path)
    return in_words(path)


class _Unnamed(str):
    """A key that has no literal, shown by its type."""

    __slots__ = ()


def bare(label: str) -> str:
    """Return the label of an anchor without the names in parentheses.

    >>> bare("function train.step(total,velocity)")
    'function train.step'
    """
    return label.split("(", 1)[0]


def _measure_alone() -> int:
    probe: list[Any] = [object()]
    return max(sys.getrefcount(probe[number]) for number in range(1))


_ALONE = _measure_alone()
"""`sys.getrefcount` of an object that only one list refers to."""


_LIMIT = 100_000
"""Objects that `find_path` visits at most."""


def find_path(anchors: Anchors, roots: Mapping[str, object], target: object) -> str | None:
    """Return the path to `target` as people write it, or None if the search gives up."""
    anchors.rules.recorded = None
    queue: deque[tuple[Any, str]] = deque()
    seen: set[int] = set()
    for name, value in roots.items():
        queue.append((value, spell("", name)))
    while queue and len(seen) < _LIMIT:
        obj, path = queue.popleft()
        if obj is target:
            return tidy(path)
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        for step in _children(anchors, obj):
            queue.append((step.child, path + spell(step.style, _key(anchors, step))))
    return None


def _children(anchors: Anchors, obj: Any) -> Iterable[PathStep]:
    kind = anchors.kind(obj)
    if kind is VALUE:
        return []
    try:
        if kind is THROUGH:
            return list(inside(obj, anchors.rules))
        return list(kind.children(obj, anchors.rules))
    except Exception:
        return []


def _key(anchors: Anchors, step: PathStep) -> object:
    key = step.key
    if key is None or isinstance(key, (str, int, float, bytes)):
        return key
    number = anchors.index.get(id(key))
    return type(key).__name__ if number is None else anchors.path(number)
