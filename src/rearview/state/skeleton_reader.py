"""Read the skeleton of a captured state as a tree of nodes, without running any of the program's code.

A *node* describes a captured object: a `Ref` is an anchor (an object that existed when the loop was entered), a
`BlockNode` the memory of arrays and tensors, an `ObjectNode` any other object. Numbers, texts and containers are read
as plain Python values. `compare` and `read_checkpoint_variables` use the nodes. The functions after `Skeleton` tell
`compare` whether the identity of an object matters, which values are equal, and which parts are left out; `short`
returns a short text for a node.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from rearview.model.program_environment_variables import SET_IN_REPLAYS, is_restored
from rearview.state.capture import split
from rearview.state.codecs.base import NAMES, prelude
from rearview.state.codecs.containers import SAME
from rearview.state.displays_and_trackers import class_named
from rearview.state.memory_blocks import Block
from rearview.state.object_numbers import Anchors, label_without_names
from rearview.state.stored_id_numbers import set_content


class Ref:
    """A node that represents the anchor with the number `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: Any) -> ObjectNode:
        """Return a node for the object that a call of this anchor creates; the anchor is a function or class."""
        return node_class("call")(self, *args)


class BlockNode:
    """A memory block in a skeleton. Tensors and arrays that share memory refer to one and the same `BlockNode`."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block


class ArrayBody(tuple[Any, ...]):
    """The description of a tensor or array: (`BlockNode`, dtype, shape, stride, offset in the block).

    An array has a sixth item: whether the array is writeable.
    """

    __slots__ = ()
    FIELDS = ("", ".dtype", ".shape", ".stride", ".offset", ".writeable")
    """For each item: the last step of its path in messages."""


EXTRAS = "<hooks and attributes>"
"""Last step of the path to the hooks, attributes and flags of a tensor (`codecs.tensors.extras`), for messages."""
_TENSOR_FIELDS = (".requires_grad", ".grad", EXTRAS)
CONTENT_FIELDS = {
    "tensor": ("", *_TENSOR_FIELDS),
    "array": ("", "", ".shape", "<attributes>"),
    "cell": ("",),
    "defaultdict": ("", ".default_factory"),
}
"""Codec name of an anchor -> last step of the path to each item of the anchor's content, for messages."""
NODE_FIELDS = {
    "build tensor": ("<type>", "", *_TENSOR_FIELDS),
    "build array": ("",),
    "build small_array": ("",),
    "build anchor": ("",),
    "build special_tensor": ("<type>", "", *_TENSOR_FIELDS),
}
"""Label of a node -> last step of the path to each of the node's parts (`Skeleton.parts`), for messages."""


def without_operation(extras: Any) -> Any:
    """Return a tensor's extras, with True in place of the name of the operation that computed the tensor.

    Old checkpoints have True in place of the name, so the name is not compared. Extras without a name are returned
    unchanged.
    """
    if not isinstance(extras, tuple) or not isinstance(extras[3], str):
        return extras
    return (*extras[:3], True, *extras[4:])


class OutsideKey(bytes):
    """Key of a buffer outside the skeleton, in place of the bytes that a class's pickling method stored there."""


Span = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The bytes of a block that a tensor uses: offset of the first byte, sizes of the dimensions, strides in bytes."""


def span_of(body: ArrayBody) -> Span | None:
    """Return which bytes of its block a tensor uses; None (all bytes) for an array or an unknown dtype."""
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
    """An object that is no anchor: the function that creates the object, the arguments, and the object's content.

    There is a subclass for each function (see `node_class`).
    """

    label: ClassVar[str] = ""
    """Name of the function: the full name of a class or function, `build` with the name of a builder, or `class` with
    the number of an anchor that is a class.
    """
    items: list[Any]
    """Nodes of the items that pickle appends to the object."""
    pairs: list[tuple[Any, Any]]
    """Nodes of the keys and values that pickle sets in the object."""
    args: tuple[Any, ...]
    """Nodes of the arguments of the function."""
    state: Any
    """Attributes and other content of the object, as nodes; None if there is none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a node with the arguments of the function that creates the object."""
        node = object.__new__(cls)
        node.args = (*args, kwargs) if kwargs else args
        node.state = None
        node.items = []
        node.pairs = []
        return node

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any) -> ObjectNode:
        """Return a node for the object that a call of this object, such as a bound method, creates."""
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
    """Node of a builder that fills an object; creating a `FillNode` sets the `state` of the object's node."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Self:
        """Set the `state` of the first argument, a node, to the second argument."""
        target, state = args
        target.state = state
        return object.__new__(cls)


class NamedNode(ObjectNode):
    """Node of the builder `named`, whose arguments name a module and an attribute of the module."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        """Return the node class for the named attribute, and no instance."""
        module, name = args
        return node_class(f"{module}.{name}")


class LostNode(ObjectNode):
    """An object that was not captured.

    A node is a subclass of `LostNode` and not an instance, because the object may have been a class whose instances are
    in the skeleton.
    """

    reason: ClassVar[str] = ""
    """Why the object was not captured."""


class LostMarkerNode(ObjectNode):
    """Node of the builder `lost`: returns the `LostNode` subclass of an object that was not captured."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        """Return the `LostNode` subclass for a reason; there is one subclass for each reason."""
        reason = str(args[0]) if args else "it was not kept"
        label = f"lost {reason}"
        if label not in _CLASSES:
            _CLASSES[label] = type("Node", (LostNode,), {"label": label, "reason": reason})
        return _CLASSES[label]


_BUILDER_NODES: dict[str, type[ObjectNode]] = {
    "build lost": LostMarkerNode,
    **{f"build {name}": FillNode for name in NAMES if name.startswith("fill")},
    "build named": NamedNode,
}
_CLASSES: dict[str, type[ObjectNode]] = {}
"""Label -> subclass of `ObjectNode`."""


def node_class(label: str) -> type[ObjectNode]:
    """Return the subclass of `ObjectNode` for `label`; there is one subclass for each label."""
    if label not in _CLASSES:
        _CLASSES[label] = type("Node", (_BUILDER_NODES.get(label, ObjectNode),), {"label": label})
    return _CLASSES[label]


class TreeUnpickler(pickle.Unpickler):
    """Unpickles the stream of a skeleton; every name in the stream becomes a node class."""

    def __init__(self, stream: io.BytesIO, buffers: Iterator[Any], classes: Sequence[int]) -> None:
        super().__init__(stream, buffers=buffers)
        self._classes = frozenset(classes)

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the node class for a name, and never the function or class that has this name."""
        return node_class(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the node class of the builder, or the node of the anchor, with the number `pid`."""
        if pid < len(NAMES):
            return node_class(f"build {NAMES[pid]}")
        number = pid - len(NAMES)
        # pickle creates instances of classes only, so an anchor that is a class needs a class as its node
        return node_class(f"class {number}") if number in self._classes else Ref(number)


class Skeleton:
    """A captured state as nodes: variables (`roots`), contents of anchors by number, random state (`rng`)."""

    def __init__(self, skeleton: bytes) -> None:
        header, stream = split(skeleton)
        self.blocks = [BlockNode(Block(*row)) for row in header["blocks"]]
        outside = iter([OutsideKey(key.encode()) for key in header["outside"]])
        data = prelude(len(NAMES) + header["anchors"]) + bytes(stream)
        unpickler = TreeUnpickler(io.BytesIO(data), outside, header["classes"])
        self.roots, contents, self.classes, self.rng = unpickler.load()
        self.contents: dict[int, tuple[str, Any]] = {}
        self.by_address: set[int] = set()
        """Anchor numbers of the arrays that `capture` recognised by their `id` (`Anchors.by_address`)."""
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
            return (self.array_body(content[0]), *content[1:])
        if kind == "array" and content[0] == "memory":
            return (content[0], self.array_body(content[1]), *content[2:])
        return content

    def array_body(self, body: Sequence[Any]) -> ArrayBody:
        """Return a description that `describe` returned, with the memory block in place of its number."""
        return ArrayBody((self.blocks[body[0]], *body[1:]))

    def parts(self, node: ObjectNode) -> tuple[Any, ...]:
        """Return the arguments of `node`, with memory blocks in place of their numbers."""
        if node.label == "build tensor":
            return (node.args[0], self.array_body(node.args[1:6]), *node.args[6:])
        if node.label == "build array":
            return (self.array_body(node.args),)
        if node.label == "build anchor":
            # `capture` recognised the array by its `id`, so it may be a new array of equal form: return the content
            return (self.contents[node.args[0]][1][1],)
        if node.label == "build small_array":
            data, dtype, shape, strides, writeable = node.args
            block = BlockNode(Block(None, len(data), data, -1, "cpu"))
            return (ArrayBody((block, dtype, shape, strides, 0, writeable)),)
        return node.args


def function_as_recorded(parts: Any, recorded: Any) -> tuple[Any, ...]:
    """Return the parts of a function without its code, and without closure variables that are not in `recorded`.

    A probe changes the code and may add closure variables. The code need not be compared, because the source was
    checked before the replay: only probes were added.
    """
    location, names, cells, *own_values = parts
    recorded_names = set(recorded[1])
    closure = {
        name: cell for name, cell in zip(names, cells, strict=True) if name in recorded_names
    }
    return (location[:3], closure, *own_values)


QUICK = {int, str, bytes, bool, type(None)}
"""Types whose values `==` compares exactly."""
_VALUE_LABELS = ("build method", "build weakref", "build module", "build lock", "build view")
"""Labels of objects whose identity means nothing, because Python may create a new object at every access."""
_VALUE_MODULES = ("numpy.", "torch.", "datetime.", "pathlib", "decimal.", "fractions.", "uuid.")
_ARRAYS = {"build array", "build small_array", "build anchor"}
_OWN_VARIABLES = ("REARVIEW_RUN", "REARVIEW_REPLAY", b"REARVIEW_RUN", b"REARVIEW_REPLAY")


def elements(content: Any) -> frozenset[Any]:
    """Return the elements of a set, given its captured content (`codecs.containers.SetKind`)."""
    as_set_up = isinstance(content, tuple) and content[:1] == (SAME,)
    return frozenset(content[1] if as_set_up else content)


def same_values(a: Any, b: Any) -> bool:
    """Return True if two sequences hold equal plain values; False also if an item is no plain value."""
    kinds = list(map(type, a))
    unique = set(kinds)
    if not unique <= QUICK | {float} or kinds != list(map(type, b)):
        return False
    if float not in unique:
        return bool(a == b)
    # compare floats by their bits, because -0.0 == 0.0 and NaN != NaN
    bits = [array("d", [x for x in side if type(x) is float]).tobytes() for side in (a, b)]
    without_floats = [[x for x in side if type(x) is not float] for side in (a, b)]
    return bits[0] == bits[1] and without_floats[0] == without_floats[1]


def is_array(value: Any) -> bool:
    """Return True if a node describes an array, in one of the three forms that `capture` uses."""
    return isinstance(value, ObjectNode) and value.label in _ARRAYS


def is_object_id(value: Any) -> bool:
    """Return True if a node represents the `id` of an object."""
    return isinstance(value, ObjectNode) and value.label == "build address"


def has_identity(value: Any) -> bool:
    """Return True if the identity of the object of a node matters to the program, and not only its value."""
    if isinstance(value, (tuple, frozenset)):
        return False
    if isinstance(value, ObjectNode):
        return not value.label.startswith(_VALUE_LABELS + _VALUE_MODULES)
    return True


def class_of(node: ObjectNode, anchors: Anchors) -> str:
    """Return the full name of the class of the object that `node` describes."""
    label = node.label
    if label == "build instance":
        label = str(getattr(node.args[0], "label", ""))
    if label.startswith("class "):  # a class of the program, which is an anchor
        label = label_without_names(anchors.signature[int(label[len("class ") :])]).removeprefix(
            "class "
        )
    return label


def live_class(node: ObjectNode, anchors: Anchors) -> type | None:
    """Return the class of the object that `node` describes, or None if this process has no class of this name."""
    source = node.args[0] if node.label == "build instance" else node
    label = str(getattr(source, "label", ""))
    if not label.startswith("class "):
        return class_named(label)
    cls = anchors.alive()[int(label[len("class ") :])]
    return cls if isinstance(cls, type) else None


def content_as_recorded(recorded: Any, content: Any) -> Any:
    """Return the `content` of a function, without closure variables that the `recorded` content lacks.

    Only probes in this function read the variables that are left out. If another function uses such a variable, its
    value is compared when the other function is compared.
    """
    closure, own_values = content
    return {name: cell for name, cell in closure.items() if name in recorded[0]}, own_values


def generator_as_recorded(recorded: Any, content: Any) -> Any:
    """Return the `content` of a generator without local variables that the `recorded` content lacks.

    Only a probe binds these local variables.
    """
    if not isinstance(content, tuple) or len(content) < 3 or len(recorded or ()) < 3:
        return content
    state, number, variables = content
    return state, number, {name: value for name, value in variables.items() if name in recorded[2]}


def without_matched_ids(
    recorded: Iterable[Any], current: Iterable[Any], partner: Mapping[int, int]
) -> tuple[list[Any], list[Any]]:
    """Return the elements of the `recorded` and of the `current` set, without object ids that both sets contain.

    `partner`: `id` of a recorded object -> `id` of the corresponding current object.
    """
    current_ids = {_key(element.args[0]): element for element in current if is_object_id(element)}
    unmatched = []
    for element in recorded:
        key = _key(element.args[0], partner) if is_object_id(element) else None
        if key is None or current_ids.pop(key, None) is None:
            unmatched.append(element)
    return unmatched, [element for element in current if not is_object_id(element)] + list(
        current_ids.values()
    )


def _key(target: Any, partner: Mapping[int, int] | None = None) -> Any:
    """Return a value that identifies `target`, an object whose `id` is in a set, in the current state.

    With `partner`, `target` is a recorded object, and the result identifies its partner; None if there is no partner
    yet.
    """
    if isinstance(target, Ref):
        return "anchor", target.number
    if isinstance(target, type):
        return target
    return id(target) if partner is None else partner.get(id(target))


def is_environment(items: dict[Any, Any]) -> bool:
    """Return True if a dict holds the environment variables: the dict inside `os.environ`, or a copy of it.

    A dict is recognised by the variables `REARVIEW_RUN` and `REARVIEW_REPLAY`, one of which every run or replay sets.
    """
    return any(name in items for name in _OWN_VARIABLES)


def compared_variables(items: dict[Any, Any]) -> dict[Any, Any]:
    """Return those environment variables that must have equal values in a replay, sorted by name.

    Variables that are not restored, or that a replay sets, are left out; see docs/environment.md.
    """
    names = {key: key.decode(errors="replace") if type(key) is bytes else str(key) for key in items}
    restored_keys = [
        key for key, name in names.items() if is_restored(name) and name not in SET_IN_REPLAYS
    ]
    return {key: items[key] for key in sorted(restored_keys, key=names.__getitem__)}


_WIDTH = 80
"""Most characters of a short text."""


def short(value: Any, anchors: Anchors | None = None) -> str:
    """Return a text of at most 80 characters for a node or plain value, for messages.

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
    """Return a text that is the same in every process, by which to sort the elements of a set."""
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
