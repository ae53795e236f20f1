"""Read a skeleton as a tree of nodes, without running any of the program's code, and describe nodes in words.

`compare` and `read_checkpoint_variables` use it. The functions at the end are rules of comparison: which identities
count, which values are equal, which parts are left out.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from rearview.model.environment_variables import SET_IN_REPLAYS, is_restored
from rearview.state.capture import split
from rearview.state.codecs.base import NAMES, prelude
from rearview.state.codecs.containers import SAME
from rearview.state.exclusions import class_named
from rearview.state.memory_blocks import Block
from rearview.state.object_walk import Anchors, bare
from rearview.state.python_object_ids import set_content


class Ref:
    """A reference to an anchor."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: Any) -> ObjectNode:
        """Return a node for an object that is created by calling an older function."""
        return node_class("call")(self, *args)


class BlockNode:
    """A memory block in a skeleton; its identity shows which tensors share it."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block


class ArrayBody(tuple[Any, ...]):
    """A tensor or array as its memory block, dtype, shape and position in the block."""

    __slots__ = ()
    FIELDS = ("", ".dtype", ".shape", ".stride", ".offset", ".writeable")


EXTRAS = "<hooks and attributes>"
_TENSOR_FIELDS = (".requires_grad", ".grad", EXTRAS)
CONTENT_FIELDS = {
    "tensor": ("", *_TENSOR_FIELDS),
    "array": ("", "", ".shape", "<attributes>"),
    "cell": ("",),
    "defaultdict": ("", ".default_factory"),
}
NODE_FIELDS = {
    "build tensor": ("<type>", "", *_TENSOR_FIELDS),
    "build array": ("",),
    "build small_array": ("",),
    "build anchor": ("",),
    "build special_tensor": ("<type>", "", *_TENSOR_FIELDS),
}


def without_operation(extras: Any) -> Any:
    """Return a tensor's extras with True for the name of an operation, which old stores lack."""
    if not isinstance(extras, tuple) or not isinstance(extras[3], str):
        return extras
    return (*extras[:3], True, *extras[4:])


class OutsideKey(bytes):
    """The key of a buffer from an object's own pickling."""


Span = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The bytes of a block that a tensor uses: first offset, size and stride of each dimension."""


def span_of(body: ArrayBody) -> Span | None:
    """Return the bytes of its block that a tensor uses, or None if unknown (then all count)."""
    import sys

    label = getattr(body[1], "label", "")
    library, _, name = label.rpartition(".")
    torch = sys.modules.get("torch")
    dtype = getattr(torch, name, None) if library == "torch" else None
    if len(body) != len(ArrayBody.FIELDS) - 1 or dtype is None:
        return None
    _, _, shape, strides, offset = body
    item = dtype.itemsize
    return offset * item, (*shape, item), (*(s * item for s in strides), 1)


class ObjectNode:
    """Any other object: the function that creates it, its arguments, and its content."""

    label: ClassVar[str] = ""
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments of the creating function."""
        node = object.__new__(cls)
        node.args = (*args, kwargs) if kwargs else args
        node.state = None
        node.items = []
        node.pairs = []
        return node

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any) -> ObjectNode:
        """Return a node for an object that is created by calling this one, such as a bound method."""
        return node_class("call")(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Add an item, as pickle does."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Add items, as pickle does."""
        self.items.extend(items)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


class FillNode(ObjectNode):
    """Sets its second argument as the state of its first."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Self:
        """Set the state."""
        target, state = args
        target.state = state
        return object.__new__(cls)


class NamedNode(ObjectNode):
    """An attribute of a module, by name."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        """Return the node class for the name."""
        module, name = args
        return node_class(f"{module}.{name}")


class LostNode(ObjectNode):
    """An object that was not captured, as a class: it may have been one, with instances in the stream."""

    reason: ClassVar[str] = ""


class LostMarkerNode(ObjectNode):
    """Creates the `LostNode` class of an object that was not captured."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        """Return the class for the reason, always the same one."""
        reason = str(args[0]) if args else "it was not kept"
        label = f"lost {reason}"
        if label not in _CLASSES:
            _CLASSES[label] = type("Node", (LostNode,), {"label": label, "reason": reason})
        return _CLASSES[label]


_SPECIAL: dict[str, type[ObjectNode]] = {
    "build lost": LostMarkerNode,
    **{f"build {name}": FillNode for name in NAMES if name.startswith("fill")},
    "build named": NamedNode,
}
_CLASSES: dict[str, type[ObjectNode]] = {}


def node_class(label: str) -> type[ObjectNode]:
    """Return the node class for a name in the program, always the same one."""
    if label not in _CLASSES:
        _CLASSES[label] = type("Node", (_SPECIAL.get(label, ObjectNode),), {"label": label})
    return _CLASSES[label]


class TreeUnpickler(pickle.Unpickler):
    """Unpickles a stream with every name in it replaced by a node class."""

    def __init__(self, stream: io.BytesIO, buffers: Iterator[Any], classes: Sequence[int]) -> None:
        super().__init__(stream, buffers=buffers)
        self._classes = frozenset(classes)

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a node class, never the object itself."""
        return node_class(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return a builder's node class or an anchor's reference."""
        if pid < len(NAMES):
            return node_class(f"build {NAMES[pid]}")
        number = pid - len(NAMES)
        # pickle creates instances of classes only, so an anchor that is a class has to be one
        return node_class(f"class {number}") if number in self._classes else Ref(number)


class Skeleton:
    """A skeleton as nodes: roots, contents by anchor, random state."""

    def __init__(self, skeleton: bytes) -> None:
        header, stream = split(skeleton)
        self.blocks = [BlockNode(Block(*row)) for row in header["blocks"]]
        outside = iter([OutsideKey(key.encode()) for key in header["outside"]])
        data = prelude(len(NAMES) + header["anchors"]) + bytes(stream)
        unpickler = TreeUnpickler(io.BytesIO(data), outside, header["classes"])
        self.roots, contents, self.classes, self.rng = unpickler.load()
        self.contents: dict[int, tuple[str, Any]] = {}
        self.by_address: set[int] = set()
        """Numbers of the anchors that capture knew by their `id` only."""
        while (batch := unpickler.load()) is not None:
            name, groups = batch
            if name == "contents":
                contents.extend(groups)
                self.by_address.update(n for _, numbers, _ in groups for n in numbers)
            elif name == "cells":
                for cell, values in groups:
                    cell.state = values
            elif name == "addresses":
                for obj, content in groups:
                    if not set_content(obj, content):
                        obj.state = content
        for kind, numbers, group in contents:
            for number, content in zip(numbers, group, strict=True):
                self.contents[number] = (kind, self._content(kind, content))

    def _content(self, kind: str, content: Any) -> Any:
        if kind == "tensor" and content is not None and not isinstance(content[0][0], str):
            return (self.body(content[0]), *content[1:])
        if kind == "array" and content[0] == "memory":
            return (content[0], self.body(content[1]), *content[2:])
        return content

    def body(self, body: Sequence[Any]) -> ArrayBody:
        """Return the description of a tensor or array with its block of memory."""
        return ArrayBody((self.blocks[body[0]], *body[1:]))

    def parts(self, node: ObjectNode) -> tuple[Any, ...]:
        """Return the arguments of a node, with memory blocks in place of their numbers."""
        if node.label == "build tensor":
            return (node.args[0], self.body(node.args[1:6]), *node.args[6:])
        if node.label == "build array":
            return (self.body(node.args),)
        if node.label == "build anchor":
            # capture knew it by its `id` only, so it may be a similar new array: the content counts
            return (self.contents[node.args[0]][1][1],)
        if node.label == "build small_array":
            data, dtype, shape, strides, writeable = node.args
            block = BlockNode(Block(None, len(data), data, -1, "cpu"))
            return (ArrayBody((block, dtype, shape, strides, 0, writeable)),)
        return node.args


def function_as_recorded(parts: Any, recorded: Any) -> tuple[Any, ...]:
    """Return the parts of a function with the recorded closure variables, without its code.

    A probe changes the code and may add closure variables. The source was checked before the
    replay: nothing but probes was added.
    """
    place, names, cells, *own = parts
    recorded_names = set(recorded[1])
    closure = {
        name: cell for name, cell in zip(names, cells, strict=True) if name in recorded_names
    }
    return (place[:3], closure, *own)


QUICK = {int, str, bytes, bool, type(None)}
"""Types whose values `==` compares exactly."""
# objects that Python creates at every access, so that their identity means nothing
_VALUE_LABELS = ("build method", "build weakref", "build module", "build lock", "build view")
_VALUE_MODULES = ("numpy.", "torch.", "datetime.", "pathlib", "decimal.", "fractions.", "uuid.")
_ARRAYS = {"build array", "build small_array", "build anchor"}
_OWN_VARIABLES = ("REARVIEW_RUN", "REARVIEW_REPLAY", b"REARVIEW_RUN", b"REARVIEW_REPLAY")


def elements(recipe: Any) -> frozenset[Any]:
    """Return the elements of a set from its recipe."""
    as_set_up = isinstance(recipe, tuple) and recipe[:1] == (SAME,)
    return frozenset(recipe[1] if as_set_up else recipe)


def same_values(a: Any, b: Any) -> bool:
    """Return True if two sequences hold equal plain values; fast: no Python call per item."""
    kinds = list(map(type, a))
    unique = set(kinds)
    if not unique <= QUICK | {float} or kinds != list(map(type, b)):
        return False
    if float not in unique:
        return bool(a == b)
    # floats are compared by their bits: -0.0 == 0.0, and NaN != NaN
    bits = [array("d", [x for x in side if type(x) is float]).tobytes() for side in (a, b)]
    others = [[x for x in side if type(x) is not float] for side in (a, b)]
    return bits[0] == bits[1] and others[0] == others[1]


def is_array(value: Any) -> bool:
    """Return True if a node is an array, however it was captured."""
    return isinstance(value, ObjectNode) and value.label in _ARRAYS


def is_object_id(value: Any) -> bool:
    """Return True if a node represents the `id` of an object."""
    return isinstance(value, ObjectNode) and value.label == "build address"


def has_identity(value: Any) -> bool:
    """Return True if the identity of an object matters, not only its value."""
    if isinstance(value, (tuple, frozenset)):
        return False
    if isinstance(value, ObjectNode):
        return not value.label.startswith(_VALUE_LABELS + _VALUE_MODULES)
    return True


def class_of(node: ObjectNode, anchors: Anchors) -> str:
    """Return the name of the class of an object."""
    label = node.label
    if label == "build instance":
        label = str(getattr(node.args[0], "label", ""))
    if label.startswith("class "):  # one of the program, which is an anchor
        label = bare(anchors.signature[int(label[len("class ") :])]).removeprefix("class ")
    return label


def live_class(node: ObjectNode, anchors: Anchors) -> type | None:
    """Return the class of an object in the live program, None if it does not exist there."""
    source = node.args[0] if node.label == "build instance" else node
    label = str(getattr(source, "label", ""))
    if not label.startswith("class "):
        return class_named(label)
    cls = anchors.alive()[int(label[len("class ") :])]
    return cls if isinstance(cls, type) else None


def content_as_recorded(recorded: Any, content: Any) -> Any:
    """Return the content of a function without the closure variables that only a probe reads.

    Variables that it shares with other functions are compared with those.
    """
    closure, own = content
    return {name: cell for name, cell in closure.items() if name in recorded[0]}, own


def generator_as_recorded(recorded: Any, content: Any) -> Any:
    """Return the content of a generator without the local variables that only a probe binds."""
    if not isinstance(content, tuple) or len(content) < 3 or len(recorded or ()) < 3:
        return content
    state, number, held = content
    return state, number, {name: value for name, value in held.items() if name in recorded[2]}


def without_matched_ids(
    then: Iterable[Any], now: Iterable[Any], partner: Mapping[int, int]
) -> tuple[list[Any], list[Any]]:
    """Return the elements of two sets without each `id` whose object has a partner in both."""
    current = {_key(element.args[0]): element for element in now if is_object_id(element)}
    unmatched = []
    for element in then:
        key = _key(element.args[0], partner) if is_object_id(element) else None
        if key is None or current.pop(key, None) is None:
            unmatched.append(element)
    return unmatched, [element for element in now if not is_object_id(element)] + list(
        current.values()
    )


def _key(target: Any, partner: Mapping[int, int] | None = None) -> Any:
    """Return a key for the object of an `id`, None if the comparison has not seen it."""
    if isinstance(target, Ref):
        return "anchor", target.number
    if isinstance(target, type):
        return target
    return id(target) if partner is None else partner.get(id(target))


def is_environment(items: dict[Any, Any]) -> bool:
    """Return True for a copy of the environment, or the table inside `os.environ`.

    It is recognised by Rearview's own variables.
    """
    return any(name in items for name in _OWN_VARIABLES)


def compared_variables(items: dict[Any, Any]) -> dict[Any, Any]:
    """Return the environment variables that must equal the recorded ones, in order.

    Variables that are not restored, or that a replay sets, are left out; see docs/environment.md.
    """
    names = {key: key.decode(errors="replace") if type(key) is bytes else str(key) for key in items}
    kept = [key for key, name in names.items() if is_restored(name) and name not in SET_IN_REPLAYS]
    return {key: items[key] for key in sorted(kept, key=names.__getitem__)}


_WIDTH = 80
"""Characters of a short text at most."""


def short(value: Any, anchors: Anchors | None = None) -> str:
    """Return a short text for a value, at most one line.

    >>> short([1, 2.5, "three"])
    "[1, 2.5, 'three']"
    """
    text = _text(value, anchors, 0)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _text(value: Any, anchors: Anchors | None, depth: int) -> str:
    if isinstance(value, Ref):
        return f"the object at {anchors.path(value.number)}" if anchors else "an older object"
    if isinstance(value, BlockNode):
        return f"{value.block.nbytes} bytes"
    if isinstance(value, type):
        return str(getattr(value, "label", "") or value.__qualname__)
    if isinstance(value, ObjectNode):
        label = value.label.removeprefix("build ")
        if label == "address":
            return f"the address of {_text(value.args[0], anchors, depth + 1)}"
        parts = [] if depth > 2 else [_text(part, anchors, depth + 1) for part in value.args[:4]]
        return f"{label}({', '.join(parts)})"
    if isinstance(value, (list, tuple, set, frozenset)) and depth <= 2:
        inner = ", ".join(_text(item, anchors, depth + 1) for item in list(value)[:8])
        around = {list: "[]", tuple: "()"}.get(type(value), "{}")
        return f"{around[0]}{inner}{', …' if len(value) > 8 else ''}{around[1]}"
    if isinstance(value, dict):
        return f"a dict of {len(value)}"
    return repr(value)


def canonical(value: Any, depth: int = 4) -> str:
    """Return a sort key for elements of a set, which have no order."""
    if isinstance(value, Ref):
        return f"anchor {value.number:09}"
    if isinstance(value, ObjectNode):
        if not depth:
            return value.label
        parts = (value.args, value.state, value.items, value.pairs)
        return f"{value.label}({canonical(parts, depth - 1)})"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(canonical(item, depth - 1) for item in value)}]" if depth else "[]"
    if isinstance(value, dict):
        return canonical(list(value.items()), depth)
    if isinstance(value, type):
        return str(getattr(value, "label", ""))
    return f"{type(value).__name__} {value!r}"
