"""Number the objects that exist when a loop is entered (the *anchors*), by a walk in a fixed order.

A *walk* follows references from the program's variables (the *roots*). A replay runs the same set-up code and walks in
the same order, so that each object gets the number that it had in the run. `find_path` returns the path to any object,
for messages.
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
from rearview.state.choose_codec import INLINE, THROUGH, VALUE, kind_of
from rearview.state.codecs.arrays import form_of, owns_memory
from rearview.state.codecs.base import Kind, PathStep, WalkRules, steps
from rearview.state.codecs.tensors import plain_access

Project = Callable[[Any], bool]

_LITERAL = (str, int, float, bytes, bool)
"""Types of keys that a path shows by their `repr`."""
_MODULE_STEPS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


class Anchors:
    """The objects that existed when a loop was entered, numbered in the order of the walk.

    The references to anchors are weak where Python allows it: recording must not keep objects alive.
    """

    def __init__(self, project: Project, loop_modules: Collection[str] = ()) -> None:
        self.signature: list[str] = []
        """Label of each anchor, such as the name of its class, in the order of the numbers; a replay must get equal
        labels."""
        self.kinds: list[Kind] = []
        """Codec of each anchor."""
        self.types: list[type] = []
        """Class of each anchor when the loop was entered."""
        self.ids: list[int] = []
        """The `id` of each anchor; if an anchor no longer exists, another object may have this `id`."""
        self.index: dict[int, int] = {}
        """`id` of an anchor that still exists -> number of the anchor; `alive` updates the mapping."""
        self.block_keys: dict[tuple[int, int], str] = {}
        """(address, size in bytes) of a large memory block -> buffer key of the block in the last capture."""
        self.rules = WalkRules(project, self._is_value, loop_modules)
        self.reducers: dict[type, Any] = {}
        """Type -> reducer of objects of this type that the loop creates (see `reducers`); `capture` fills the
        mapping."""
        self.shares_arrays = False
        """Whether a capture has found small arrays, created by the loop, that share memory."""
        self._refs: list[Any] = []
        """For each anchor number: a weak reference to the anchor, the anchor itself, or None."""
        self._weak: list[int] = []
        """Numbers of anchors with a weak reference."""
        self._strong: list[int] = []
        """Numbers of anchors that do not allow weak references, so that `_refs` holds the anchor itself."""
        self._dead_numbers: list[int] = []
        """Numbers of anchors that did not exist at the last call of `alive`."""
        self._live_index: dict[int, int] = {}
        """`index` as the last call of `alive` built it."""
        self.by_address: dict[int, tuple[int, Any]] = {}
        """`id` of an array that owns its memory -> (number, form) of the array.

        An `Anchors` object has no reference to these arrays, because NumPy refuses to resize an array that has another
        reference, even a weak one. If an array is freed and an array of equal form gets its address, the new array gets
        its number, too. This is safe, because nothing refers to the old array."""
        self.recipes: dict[tuple[Any, ...], Any] = {}
        """Elements of a set, in the order of iteration -> how to build such a set (see `containers.recipe_for`)."""
        self.set_orders: dict[int, list[Any]] = {}
        """`id` of a set -> elements of the set, in the order in which the set iterated when the loop was entered."""
        self.classes: list[int] = []
        """Numbers of anchors that are classes."""
        self._arrays_to_find: dict[int, tuple[int, Any]] | None = None
        """In a walk by `_find_by_address`: `by_address` of the first walk, whose arrays are to be found; else None."""
        self._objects_to_fill: list[Any] = []
        """List that a walk by `_find_by_address` fills: at index n, the array with number n."""
        self._graph_versions: dict[int, int] = {}
        """Number of a tensor with an autograd graph -> version counter of the tensor when the loop was entered."""
        self._steps: list[tuple[int, str, object]] = []
        """Every step of the walk: (number of the step before it or -1, style, key)."""
        self._step_of: list[int] = []
        """Number of the step that led to each anchor."""
        self._by_type: dict[type, Kind] = {}
        """Type -> codec that `kind` has looked up for objects of this type."""
        self._by_kind: dict[int, tuple[Kind, list[int]]] = {}
        """`id` of a codec -> (codec, numbers of the anchors of this codec); see `numbers_by_kind`."""
        _ALL_ANCHORS.add(self)

    @classmethod
    def walk(
        cls,
        roots: Mapping[str, object],
        *,
        project: Project,
        loop_modules: Collection[str] = (),
        signature: Sequence[str] | None = None,
    ) -> Anchors:
        """Return the anchors that the variables in `roots` lead to, numbered breadth first.

        `project` returns True for a module, or the name of a module, that belongs to the project: attributes of classes
        and functions are state only in these modules. `loop_modules` are modules of libraries whose training loops are
        watched. In a replay, `signature` is the signature that the run recorded; the walk then leaves out closure
        variables that only a probe uses.
        """
        anchors = cls(project, loop_modules)
        with plain_access():
            anchors._walk(roots, signature)
            if signature is not None and not anchors.matches(signature):
                earlier = cls(project, loop_modules)
                earlier.rules.owners_of_views = True
                earlier._walk(roots, signature)
                if earlier.matches(signature):
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
        """Return the codec of an object; the codec is looked up once for each type."""
        t = type(obj)
        kind = self._by_type.get(t)
        if kind is None:
            kind = kind_of(obj, self.rules.project)
            if not isinstance(obj, type):
                self._by_type[t] = kind
        return kind

    def _walk(self, roots: Mapping[str, object], signature: Sequence[str] | None) -> None:
        """Walk from `roots` breadth first, and number every object; enter objects with unordered children last."""
        queue: deque[tuple[object, int, Kind]] = deque()
        postponed: deque[tuple[object, int, Kind]] = deque()
        entered: dict[int, object] = {}
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
            if child_id in index or child_id in entered:
                return
            if kind.name == "enum" and not self._is_expected(kind.label(child), signature):
                return  # the version of Rearview that recorded the run treated enumerations as values
            step_number = len(path_steps)
            if key is not None and type(key) not in _LITERAL:
                key = _Unnamed(type(key).__name__)
            path_steps.append((parent, style, key))
            if kind is THROUGH:
                entered[child_id] = child
            else:
                self._add(child, kind, step_number)
            queue.append((child, step_number, kind))

        for name, value in roots.items():
            visit(-1, PathStep("", name, value))
        while queue or postponed:
            obj, step_number, kind = queue.popleft() if queue else postponed.popleft()
            if kind is THROUGH:
                children: Iterable[PathStep] = steps_inside(obj, rules)
            elif kind.unordered and queue:
                # a set may iterate in another order in a replay: walk all other objects first
                postponed.append((obj, step_number, kind))
                continue
            else:
                rules.recorded_names = self._recorded_names(obj, signature)
                children = kind.children(obj, rules)
            try:
                for step in children:
                    visit(step_number, step)
            except Exception:  # noqa: S112
                # `children` failed for this object, and will fail in a replay as well; `capture` reports the object
                continue

    def _is_expected(self, label: str, signature: Sequence[str] | None) -> bool:
        """Return True if `label` is the next label in `signature`, or if `signature` is None."""
        if signature is None:
            return True
        number = len(self._refs)
        return number < len(signature) and label_without_names(
            signature[number]
        ) == label_without_names(label)

    def _recorded_names(self, obj: object, signature: Sequence[str] | None) -> Sequence[str] | None:
        """Return the names in the recorded label of `obj`, for `WalkRules.recorded_names`.

        Return None for an object that is no function, class or generator, and if `signature` is None (in a run). The
        list is empty for a class recorded by a version of Rearview that did not walk functions.
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

    def _add(self, obj: Any, kind: Kind, step_number: int) -> None:
        number = len(self._refs)
        self.ids.append(id(obj))
        self.index[id(obj)] = number
        self.signature.append(kind.label(obj))
        self.kinds.append(kind)
        self.types.append(type(obj))
        self._step_of.append(step_number)
        if isinstance(obj, type):
            self.classes.append(number)
        if type(obj) is set and len(obj) > 1 and self.rules.all_values(obj):
            self.set_orders[id(obj)] = list(obj)
        if kind.name == "array" and owns_memory(obj):
            self.by_address[id(obj)] = (number, form_of(obj))
            if self._arrays_to_find is not None and id(obj) in self._arrays_to_find:
                self._objects_to_fill[self._arrays_to_find[id(obj)][0]] = obj
            self._refs.append(None)
        else:
            self._add_reference(obj)
        if kind.name == "tensor" and not obj.is_leaf:
            self._graph_versions[number] = obj._version

    def _add_reference(self, obj: Any) -> None:
        number = len(self._refs)
        try:
            self._refs.append(weakref.ref(obj))
            self._weak.append(number)
        except TypeError:
            self._refs.append(obj)
            self._strong.append(number)

    def number_if_weak(self, obj: object) -> int | None:
        """Return the number of an anchor that has a weak reference, or None for any other object."""
        number = self.index.get(id(obj))
        ref = None if number is None else self._refs[number]
        return number if isinstance(ref, weakref.ref) and ref() is obj else None

    def alive(self, roots: Mapping[str, object] | None = None) -> list[Any]:
        """Return all anchors in the order of their numbers, with None for each anchor that no longer exists.

        Also update `index`. Arrays of `by_address` are included only if `roots` is given and the walk from `roots`
        finds them.
        """
        refs = self._refs
        for number in self._strong:
            if sys.getrefcount(refs[number]) <= _ONE_REFERENCE:
                refs[number] = None
        live = refs.copy()
        for number in self._weak:
            live[number] = refs[number]()
        if roots is not None and self.by_address:
            self._find_by_address(roots, live)
        dead_numbers = [number for number, obj in enumerate(live) if obj is None]
        if dead_numbers != self._dead_numbers or not self._live_index:
            # use the stored `ids`, because each call of `id` calls the audit hooks
            self._live_index = dict(zip(self.ids, range(len(live)), strict=True))
            for number in dead_numbers:
                del self._live_index[self.ids[number]]
            self._dead_numbers = dead_numbers
        self.index = self._live_index.copy()
        return live

    def numbers_by_kind(self) -> list[tuple[Kind, list[int]]]:
        """Return (codec, numbers of its anchors) for each codec, in the order of the first number."""
        if not self._by_kind:
            for number, kind in enumerate(self.kinds):
                self._by_kind.setdefault(id(kind), (kind, []))[1].append(number)
        return list(self._by_kind.values())

    def _find_by_address(self, roots: Mapping[str, object], live: list[Any]) -> None:
        """Find the arrays of `by_address` by a second walk from `roots`, and store each in `live` at its number."""
        second_walk = Anchors(self.rules.project, self.rules.loop_modules)
        second_walk._arrays_to_find, second_walk._objects_to_fill = self.by_address, live
        second_walk.rules.owners_of_views = self.rules.owners_of_views
        second_walk._walk(roots, self.signature)

    def has_same_graph(self, tensor: Any) -> bool:
        """Return True if a tensor has the autograd graph that it had when the loop was entered."""
        number = self.index.get(id(tensor), -1)
        return bool(self._graph_versions.get(number) == tensor._version)

    def matches(self, signature: Sequence[str]) -> bool:
        """Return True if the labels in `signature`, which a run recorded, equal the labels of these anchors."""
        return list(map(label_without_names, signature)) == list(
            map(label_without_names, self.signature)
        )

    def check(self, signature: Sequence[str]) -> None:
        """Raise StateError unless the labels in `signature`, which a run recorded, equal the labels of these anchors."""
        for number, (recorded, current) in enumerate(zip(signature, self.signature, strict=False)):
            if label_without_names(recorded) != label_without_names(current):
                raise StateError(
                    f"The set-up differs: {self.path(number)} was a {label_without_names(recorded)} when the run was "
                    f"recorded and is a {label_without_names(current)} now. Replay from the start instead, or look at "
                    "what the set-up reads from outside (files, time, environment).",
                    slug="state-anchors",
                )
        if len(signature) != len(self.signature):
            has_more = len(self.signature) > len(signature)
            number = min(len(signature), len(self.signature))
            difference = (
                f"{self.path(number)} is new"
                if has_more
                else f"a {label_without_names(signature[number])} is gone"
            )
            raise StateError(
                f"The set-up differs: {difference}; {len(signature)} objects when recorded, "
                f"{len(self.signature)} now. Replay from the start instead.",
                slug="state-anchors",
            )

    def path(self, number: int) -> str:
        """Return the path to the anchor with this number from a variable, such as `model.layers[2].weight`."""
        return self._render(self._step_of[number])

    def _render(self, step_number: int) -> str:
        parts: list[str] = []
        while step_number >= 0:
            parent, style, key = self._steps[step_number]
            parts.append(step_text(style, key))
            step_number = parent
        return readable_path("".join(reversed(parts)))


_ALL_ANCHORS: weakref.WeakSet[Anchors] = weakref.WeakSet()
"""Every `Anchors` in this process."""


@contextlib.contextmanager
def without_weak_references(*objects: object) -> Iterator[None]:
    """Context manager that drops all weak references of `Anchors` to `objects`, because some operations forbid these.

    After the body, each object is an anchor with the same number as before, even if the body has changed its content.
    """
    weak_anchors = [
        (anchors._refs, number, obj)
        for anchors in list(_ALL_ANCHORS)
        for obj in objects
        if (number := anchors.number_if_weak(obj)) is not None
    ]
    for refs, number, obj in weak_anchors:
        refs[number] = lambda obj=obj: (
            obj
        )  # a function, because another thread may call the reference now
    try:
        yield
    finally:
        for refs, number, obj in weak_anchors:
            refs[number] = weakref.ref(obj)


def steps_inside(obj: Any, rules: WalkRules) -> Iterable[PathStep]:
    """Yield a step to each object to which an immutable object refers, such as an item of a tuple."""
    import functools

    if isinstance(obj, functools.partial):
        yield PathStep(".", "func", obj.func)
        yield from steps("[", enumerate(obj.args))
        yield from steps("[", obj.keywords.items())
    elif isinstance(obj, types.MethodType):
        yield PathStep(".", "__self__", obj.__self__)
        yield PathStep(".", "__func__", obj.__func__)
    elif isinstance(obj, weakref.ref):
        # the target is state only if another object refers to the target, and the walk then enters it from that object
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


def step_text(style: str, key: object) -> str:
    """Return the text of one step of a path (see `PathStep`), such as `.weight`; a variable has the empty style."""
    if style == "":
        scope, _, qualified = str(key).partition(":")
        module, _, name = qualified.rpartition(":")
        return f"{module}.{name}" if scope == "global" and module != "__main__" else name or scope
    if style == ".":
        return f".{key}"
    if style == "[":
        return f"[{key!r}]" if not isinstance(key, _Unnamed) else f"[{key}]"
    return f"<{key}>" if key else ""


def readable_path(path: str) -> str:
    """Return a path without the inner dicts of torch modules, and with words in place of Rearview's internal names.

    >>> readable_path("net._modules['layers']._modules['2']._parameters['weight']")
    'net.layers[2].weight'
    """
    path = _MODULE_STEPS.sub(lambda m: f"[{m[1]}]" if m[1].isdigit() else f".{m[1]}", path)
    return in_words(path)


class _Unnamed(str):
    """The name of a key's type, which a path shows in place of a key that cannot be written as a literal."""

    __slots__ = ()


def label_without_names(label: str) -> str:
    """Return the label of an anchor without the names of variables or functions in parentheses.

    >>> label_without_names("function train.step(total,velocity)")
    'function train.step'
    """
    return label.split("(", 1)[0]


def _measure_one_reference() -> int:
    probe: list[Any] = [object()]
    return max(sys.getrefcount(probe[number]) for number in range(1))


_ONE_REFERENCE = _measure_one_reference()
"""Result of `sys.getrefcount` for an object to which only one list refers."""


_MOST_SEARCHED = 100_000
"""Most objects that `find_path` visits."""


def find_path(anchors: Anchors, roots: Mapping[str, object], target: object) -> str | None:
    """Return the path to `target`, such as `model.layers[2].weight`, or None if the search does not find `target`."""
    anchors.rules.recorded_names = None
    queue: deque[tuple[Any, str]] = deque()
    visited_ids: set[int] = set()
    for name, value in roots.items():
        queue.append((value, step_text("", name)))
    while queue and len(visited_ids) < _MOST_SEARCHED:
        obj, path = queue.popleft()
        if obj is target:
            return readable_path(path)
        if id(obj) in visited_ids:
            continue
        visited_ids.add(id(obj))
        for step in _children(anchors, obj):
            queue.append((step.child, path + step_text(step.style, _key(anchors, step))))
    return None


def _children(anchors: Anchors, obj: Any) -> Iterable[PathStep]:
    kind = anchors.kind(obj)
    if kind is VALUE:
        return []
    try:
        if kind is THROUGH:
            return list(steps_inside(obj, anchors.rules))
        return list(kind.children(obj, anchors.rules))
    except Exception:
        return []


def _key(anchors: Anchors, step: PathStep) -> object:
    key = step.key
    if key is None or isinstance(key, (str, int, float, bytes)):
        return key
    number = anchors.index.get(id(key))
    return type(key).__name__ if number is None else anchors.path(number)
