"""Read the variables of a checkpoint as plain values, without running any of the program's code.

An *anchor* is an object that existed when the loop was entered (`object_numbers`); a *node* describes a captured object.

`rearview.history()` shows a checkpoint with `Variables`, which builds values from the nodes of `skeleton_reader`:
Python's own values, tensors, arrays, the `state_dict` of torch modules and optimizers, and attributes of other objects.
An object that only the program could build becomes a `NotGiven` with the reason.
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import decimal
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rearview.errors import RearviewError, StateError
from rearview.state.codecs.containers import READ_ONLY, SAME
from rearview.state.codecs.tensors import from_special
from rearview.state.object_numbers import label_without_names
from rearview.state.skeleton_reader import (
    ArrayBody,
    BlockNode,
    LostNode,
    ObjectNode,
    OutsideKey,
    Ref,
    Skeleton,
)

_MODULE = {"_parameters", "_buffers", "_modules"}
"""Attributes by which a torch module is recognised."""
_OPTIMIZER = {"param_groups", "state", "defaults"}
"""Attributes by which a torch optimizer is recognised."""
_SCHEDULER = {"optimizer", "last_epoch", "base_lrs"}
"""Attributes by which a learning rate scheduler of torch is recognised."""
_REASONS = {
    "function": "a function: it is in the source of the run",
    "method": "a method of an object",
    "class": "a class: it is in the source of the run",
    "enum": "a class: it is in the source of the run",
    "module": "a module: import it",
    "weakref": "a weak reference",
    "proxy": "a weak reference",
    "weak": "a container of weak references",
    "address": "the address of an object",
    "file": "an open file",
    "lock": "a lock",
    "generator": "a generator",
    "live_generator": "a generator",
    "walk": "an iterator",
    "loader": "the iterator of a data loader",
}
_LARGE = {"object", "dict", "defaultdict", "list", "build instance"}
"""Kinds of objects whose values can always be built, so that `reason` need not build the value, which may be large."""
_BUILTINS = {"set", "frozenset", "complex", "range", "slice", "bytearray"}
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "collections.Counter": collections.Counter,
    "datetime.datetime": dt.datetime,
    "datetime.date": dt.date,
    "datetime.timedelta": dt.timedelta,
    "decimal.Decimal": decimal.Decimal,
    **{f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS},
    **{
        f"{module}.{name}": pathlib.PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Full name of a class -> constructor. All are Python's own classes, so that no code of the program or of libraries
runs."""


def variable_name(root: str) -> str:
    """Return the name under which a variable is shown, given its name in the checkpoint (`root`).

    >>> variable_name("local:0:main:model"), variable_name("global:__main__:lr")
    ('main.model', 'lr')
    >>> variable_name("global:net:SIZE")
    'net.SIZE'
    """
    scope, _, qualified = root.partition(":")
    owner, _, name = qualified.rpartition(":")
    if scope == "local":
        owner = owner.rpartition(":")[2]
    return name if owner in {"", "__main__", "__mp_main__"} else f"{owner}.{name}"


class NotGiven:
    """Takes the place of a value that cannot be built without running the program; `reason` says why it cannot."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not given: {self.reason}>"


class ObjectState(dict[str, Any]):
    """The attributes of an object of the program, as a dict; `type` is the name of the object's class."""

    def __init__(self, type: str, items: Any = ()) -> None:  # noqa: A002 - what people look for
        super().__init__(items)
        self.type = type

    def __repr__(self) -> str:
        return f"<{self.type}: {', '.join(map(str, self)) or 'no attributes'}>"


class ModuleState(collections.OrderedDict[str, Any]):
    """The `state_dict()` of a torch module: tensors by name, ready for `load_state_dict`.

    `type` is the name of the module's class. `training` is True if the module was in training mode, and None if this is
    unknown. `attributes` holds the other attributes of the module.
    """

    def __init__(
        self,
        type: str,  # noqa: A002 - what people look for
        items: Any,
        training: bool | None,
        attributes: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(items)
        self.type = type
        self.training = training
        self._read_attributes = attributes

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the module itself that are neither tensors nor modules."""
        return self._read_attributes()

    def __repr__(self) -> str:
        return f"<state_dict of {self.type}: {len(self)} tensors>"

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())


class Variables:
    """The variables of one checkpoint; each value is built at the first call of `value` for the variable.

    `signature` holds the labels of the anchors (objects that existed when the loop was entered). `buffers` returns the
    bytes of the buffer with a key. Tensors and arrays that shared memory in the run share memory in the values, too.
    """

    def __init__(
        self, skeleton: bytes, signature: Sequence[str], buffers: Callable[[str], Any]
    ) -> None:
        try:
            self._tree = Skeleton(skeleton)
        except RearviewError:
            raise
        except Exception as exc:
            raise StateError(
                f"The state cannot be read ({type(exc).__name__}: {exc}). `rearview verify` shows "
                "whether it is damaged; an earlier checkpoint may be intact.",
                slug="state-read",
            ) from exc
        self._signature = signature
        self._buffers = buffers
        self._memory: dict[int, Any] = {}
        """`id` of a `BlockNode` -> bytes of the memory block."""
        self._built: dict[Any, Any] = {}
        """("anchor", number) or `id` of a node -> value that is already built, or is being built."""
        self._kept_alive: list[Any] = []
        """References to nodes whose `id` is a key of `_built`."""
        self.roots: dict[str, str] = {}
        """Displayed name of a variable -> name of the variable in the checkpoint."""
        for root in self._tree.roots:
            if not root.startswith("declared:"):
                self.roots[self._unused_name(variable_name(root))] = root

    def _unused_name(self, name: str) -> str:
        """Return `name`, or `name#2` and so on if another variable (of a function that called itself) has this name."""
        n, unused_name = 1, name
        while unused_name in self.roots:
            n += 1
            unused_name = f"{name}#{n}"
        return unused_name

    def value(self, name: str) -> Any:
        """Return the value of the variable with the displayed name `name`, or a `NotGiven` if it cannot be built."""
        try:
            return self._value(self._tree.roots[self.roots[name]])
        except RearviewError:
            raise
        except Exception as exc:
            return NotGiven(f"its state cannot be read ({type(exc).__name__}: {exc})")

    def reason(self, name: str) -> str | None:
        """Return why the value of a variable cannot be built, or None if it can be built; large memory is not read."""
        node = self._tree.roots[self.roots[name]]
        kind, content = "", None
        if isinstance(node, Ref):
            kind, content = self._tree.contents.get(node.number, ("", None))
        elif isinstance(node, ObjectNode):
            kind = node.label
            content = self._tree.parts(node)[1:2] if kind == "build tensor" else node.state
        if kind in {"tensor", "build tensor"} and content and isinstance(content[0], ArrayBody):
            return None if _has_torch() else self._reason_from_value(name)
        if kind in _LARGE and (kind != "object" or _attributes(content) is not None):
            return None
        return None if isinstance(node, (dict, list, tuple)) else self._reason_from_value(name)

    def _reason_from_value(self, name: str) -> str | None:
        value = self.value(name)
        return value.reason if isinstance(value, NotGiven) else None

    def _value(self, node: Any) -> Any:
        if isinstance(node, Ref):
            return self._build_once(("anchor", node.number), node, self._anchor_value)
        if isinstance(node, type):
            return self._class_value(node)
        if isinstance(node, OutsideKey):
            return bytearray(self._buffers(node.decode()))
        if isinstance(node, (dict, list, ObjectNode)):
            return self._build_once(id(node), node, self._compound)
        if type(node) is tuple:
            return tuple(map(self._value, node))
        if isinstance(node, (set, frozenset)):
            return type(node)(map(self._key_value, node))
        return node

    def _build_once(self, key: Any, node: Any, make: Callable[[Any, Any], Any]) -> Any:
        """Return the value of a node; `make` builds the value at the first call with this `key`."""
        if key not in self._built:
            self._kept_alive.append(node)  # so that no other node gets its `id`
            self._built[key] = NotGiven("an object that contains itself")
            self._built[key] = make(node, key)
        return self._built[key]

    def _register(self, key: Any, value: Any) -> Any:
        """Store a container under `key` before its items are built, because an item may refer to the container."""
        self._built[key] = value
        return value

    def _compound(self, node: Any, key: Any) -> Any:
        if isinstance(node, dict):
            return self._dict_value(node, key, {})
        if isinstance(node, list):
            return self._list_value(node, key)
        return self._node_value(node, key)

    def _dict_value(self, node: Mapping[Any, Any], key: Any, into: Any) -> Any:
        self._register(key, into)
        for name, item in node.items():
            into[self._key_value(name)] = self._value(item)
        return into

    def _list_value(self, node: Sequence[Any], key: Any) -> Any:
        into = self._register(key, [])
        into.extend(map(self._value, node))
        return into

    def _key_value(self, node: Any) -> Any:
        """Return the value of a dict key or set element, or the value's `repr` if the value cannot be hashed."""
        value = self._value(node)
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return value

    def _class_value(self, node: Any) -> Any:
        """Return the torch constant, such as a dtype, that a class node names, or else a `NotGiven` with the name."""
        if issubclass(node, LostNode):
            return NotGiven(node.reason)
        label = getattr(node, "label", "")
        if label.startswith("class "):
            number = int(label[len("class ") :])
            label = label_without_names(self._signature[number]).removeprefix("class ")
        if label.startswith("torch."):
            constant = _torch_constant(label)
            if constant is not None:
                return constant
        return NotGiven(f"{label}: a class or function, which is in the source or a library")

    def _anchor_value(self, node: Ref, key: Any) -> Any:
        kind, content = self._tree.contents.get(node.number, ("", None))
        name = (
            label_without_names(self._signature[node.number])
            if node.number < len(self._signature)
            else ""
        )
        kind = kind.removesuffix(" with attributes") if isinstance(content, tuple) else kind
        if kind == "object":
            return self._object_value(name, _attributes(content), key)
        if kind == "tensor":
            return (
                self._tensor_value(content[0], content[3]) if content else self._not_given(0, kind)
            )
        if kind == "array":
            return self._array_value(content)
        if kind == "cell":
            return self._value(content[0]) if content else NotGiven("a variable that is not bound")
        container = self._container_value(kind, name, content, key)
        return self._not_given(node.number, kind) if container is None else container

    def _container_value(self, kind: str, name: str, content: Any, key: Any) -> Any:
        """Return the value of an anchor that is a builtin container, or None for an anchor of any other kind."""
        if kind in {"dict", "list", "deque", "set"} and isinstance(content, tuple):
            if not (kind == "set" and content[:1] == (SAME,)):
                content = content[0]  # items and attributes of a subclass
        if kind == "dict":
            ordered = name == "collections.OrderedDict"
            return self._dict_value(content, key, collections.OrderedDict() if ordered else {})
        if kind == "defaultdict":
            return self._dict_value(content[0], key, {})
        if kind == "list":
            return self._list_value(content, key)
        if kind == "deque":
            return collections.deque(map(self._value, content))
        if kind == "set":
            as_set_up = isinstance(content, tuple) and content[:1] == (SAME,)
            return {self._key_value(element) for element in (content[1] if as_set_up else content)}
        if kind == "bytes":
            return bytearray(content)
        if kind == "typed array":
            import array

            return array.array(content[0], content[1])
        return None

    def _not_given(self, number: int, kind: str) -> NotGiven:
        label = (
            label_without_names(self._signature[number]) if number < len(self._signature) else ""
        )
        if kind in _REASONS:
            return NotGiven(_REASONS[kind])
        return NotGiven(f"{label or kind}: only the program can make it")

    def _node_value(self, node: ObjectNode, key: Any) -> Any:
        label = node.label
        if label in {"build tensor", "build special_tensor"}:
            parts = self._tree.parts(node)
            return self._tensor_value(parts[1], parts[-1])
        if label in {"build array", "build small_array", "build anchor"}:
            return self._array_value(("memory", *self._tree.parts(node)))
        if label == "build instance":
            return self._object_value(self._class_name(node.args[0]), _attributes(node.state), key)
        if label == "build cell":
            return self._value(node.state[0]) if node.state else NotGiven("an unbound variable")
        if label == "build view":
            mapping, view = self._value(node.args[0]), node.args[1]
            return mapping if view == READ_ONLY else list(getattr(mapping, view)())
        if label == "build torch_generator":
            return ObjectState("torch.Generator", zip(("device", "state"), node.args, strict=True))
        if label.startswith("build "):
            name = label.removeprefix("build ")
            return NotGiven(_REASONS.get(name, f"{name}: only the program can make it"))
        return self._library_value(node, key)

    def _class_name(self, node: Any) -> str:
        """Return the full name of the class that `node` represents, or "an object" if it has no name."""
        label = str(getattr(node, "label", "an object"))
        if label.startswith("class "):
            return label_without_names(self._signature[int(label[len("class ") :])]).removeprefix(
                "class "
            )
        return label

    def _library_value(self, node: ObjectNode, key: Any) -> Any:
        """Return the value of an object that was pickled by methods of its class, or a `NotGiven`."""
        label = self._class_name(node)
        if label == "collections.OrderedDict":
            return self._dict_value(dict(node.pairs), key, collections.OrderedDict())
        if label == "collections.defaultdict":
            return self._dict_value(dict(node.pairs), key, {})
        if label == "collections.deque":
            bound = node.args[1] if len(node.args) > 1 else None
            return collections.deque(map(self._value, node.items), bound)
        if label in _CONSTRUCTORS:
            return _CONSTRUCTORS[label](*map(self._value, node.args))
        if label in {"torch.Size", "torch.device"}:
            args = tuple(map(self._value, node.args))
            return tuple(args[0]) if label == "torch.Size" else ":".join(map(str, args))
        if label.startswith("numpy."):
            value = self._numpy_value(label, node)
            if value is not None:
                return value
        if isinstance(node.state, (dict, tuple)) or not (node.args or node.items or node.pairs):
            state = _attributes(node.state)
            if state is not None:
                return self._object_value(label, state, key)
        return NotGiven(f"{label}: only its own code can make it")

    def _object_value(self, name: str, attributes: Mapping[str, Any] | None, key: Any) -> Any:
        """Return the `state_dict` of a torch module or optimizer, or the attributes of any other object."""
        if attributes is None:
            return NotGiven(f"{name}: only its own code can make it")
        if attributes.keys() >= _MODULE:
            return self._module_state(name, attributes)
        if attributes.keys() >= _OPTIMIZER:
            return self._optimizer_state(name, attributes)
        if attributes.keys() >= _SCHEDULER:
            values = {k: self._value(v) for k, v in attributes.items() if k != "optimizer"}
            return ObjectState(name, {k: v for k, v in values.items() if _is_given(v)})
        return self._dict_value(attributes, key, ObjectState(name))

    def _module_state(self, name: str, attributes: Mapping[str, Any]) -> ModuleState:
        def other_attributes() -> dict[str, Any]:
            own = {k: v for k, v in attributes.items() if not k.startswith("_") and k != "training"}
            return {k: self._value(v) for k, v in own.items()}

        training = attributes.get("training")
        items = dict(self._module_tensors("", attributes, set()))
        return ModuleState(name, items, training, other_attributes)

    def _module_tensors(
        self, prefix: str, attributes: Mapping[str, Any], above: set[int]
    ) -> Iterator[tuple[str, Any]]:
        not_saved = self._set_items(attributes.get("_non_persistent_buffers_set"))
        for group in ("_parameters", "_buffers"):
            for name, node in (self._parts_of(attributes[group]) or {}).items():
                if node is not None and not (group == "_buffers" and name in not_saved):
                    yield f"{prefix}{name}", self._value(node)
        for name, node in (self._parts_of(attributes["_modules"]) or {}).items():
            inner = self._parts_of(node)
            if isinstance(inner, Mapping) and inner.keys() >= _MODULE and id(inner) not in above:
                yield from self._module_tensors(f"{prefix}{name}.", inner, {*above, id(inner)})

    def _set_items(self, node: Any) -> set[Any]:
        value = self._value(node)
        return value if isinstance(value, set) else set()

    def _parts_of(self, node: Any) -> Any:
        """Return the items of a dict or list node, or the attributes of an object node; the values are nodes."""
        if isinstance(node, Ref):
            kind, content = self._tree.contents.get(node.number, ("", None))
            if kind == "object":
                return _attributes(content)
            return content[0] if isinstance(content, tuple) and content else content
        if isinstance(node, ObjectNode):
            if node.pairs:
                return dict(node.pairs)
            return _attributes(node.state) or {}
        return node

    def _optimizer_state(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Return the `state_dict()` of a torch optimizer, in which a number takes the place of each parameter."""
        numbers: dict[Any, int] = {}
        groups = []
        for group in self._parts_of(attributes["param_groups"]) or []:
            node = self._parts_of(group)
            params = self._parts_of(node["params"])
            for param in params:
                numbers.setdefault(_identity(param), len(numbers))
            settings = {k: self._value(v) for k, v in node.items() if k != "params"}
            groups.append({**settings, "params": [numbers[_identity(param)] for param in params]})
        state = self._parts_of(attributes["state"]) or {}
        return ObjectState(
            name,
            {
                "state": {
                    numbers.get(_identity(param), str(param)): self._value(node)
                    for param, node in state.items()
                },
                "param_groups": groups,
            },
        )

    def _tensor_value(self, body: Any, extra: Any) -> Any:
        if not isinstance(body, ArrayBody):
            return self._special_tensor(body)
        memory_node, dtype, shape, stride, offset = body
        label = str(getattr(dtype, "label", ""))
        try:
            import torch
        except ImportError:
            return NotGiven(f"a tensor {label}{list(shape)}: torch is not installed")
        constant = _torch_constant(label)
        if not isinstance(constant, torch.dtype):
            return NotGiven(f"a tensor of the unknown dtype {label}")
        if memory_node.block.device == "meta":
            return torch.empty_strided(shape, stride, dtype=constant, device="meta")
        reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        room = memory_node.block.nbytes // constant.itemsize
        if min((offset, *shape, *stride), default=0) < 0 or (0 not in shape and reach > room):
            raise StateError(
                f"A tensor {label}{list(shape)} does not fit into its memory of {memory_node.block.nbytes} "
                "bytes: the checkpoint is damaged. `rearview verify` shows which files.",
                slug="state-buffer",
            )
        tensor = torch.empty(0, dtype=constant)
        if 0 in shape:
            return tensor.reshape(shape)
        tensor.set_(self._bytes(memory_node).untyped_storage(), offset, shape, stride)
        conjugate, negative = extra[4] if extra else (False, False)
        tensor = tensor.conj() if conjugate else tensor
        return -tensor if negative else tensor

    def _special_tensor(self, form: Any) -> Any:
        """Return a sparse or quantized tensor; for a wrapper of other tensors, a `NotGiven`."""
        if not form or form[0] == "wrapper":
            return NotGiven("a tensor of a class whose own code makes it from its parts")
        return from_special(tuple(self._value(part) for part in form))

    def _bytes(self, memory_node: BlockNode) -> Any:
        """Return a memory block as a tensor of bytes; every call for one block returns the same tensor."""
        import torch

        if id(memory_node) not in self._memory:
            self._memory[id(memory_node)] = torch.frombuffer(
                self._data(memory_node), dtype=torch.uint8
            )
        return self._memory[id(memory_node)]

    def _data(self, memory_node: BlockNode) -> bytearray:
        block = memory_node.block
        data = block.data if block.key is None else self._buffers(block.key)
        if data is None or len(data) != block.nbytes:
            raise StateError(
                f"Memory {block.key} has {0 if data is None else len(data)} bytes, not "
                f"{block.nbytes}: the checkpoint is damaged. `rearview verify` shows which files.",
                slug="state-buffer",
            )
        return bytearray(data)

    def _array_value(self, content: Any) -> Any:
        try:
            import numpy as np
        except ImportError:
            return NotGiven("an array: numpy is not installed")
        if content[0] == "constant":
            return NotGiven("an array on a file that was mapped for reading")
        if content[0] == "items":
            out: Any = np.empty(len(content[1]), dtype=object)
            out[:] = [self._value(item) for item in content[1]]
            return out.reshape(content[2])
        memory_node, dtype, shape, strides, offset, _ = content[1]
        dtype = self._value(dtype)
        if not isinstance(dtype, np.dtype) or dtype.hasobject:
            return NotGiven(f"an array of {dtype!r}")
        if id(memory_node) not in self._memory:
            self._memory[id(memory_node)] = self._data(memory_node)
        memory = self._memory[id(memory_node)]
        memory = memory if isinstance(memory, bytearray) else memory.numpy()
        return np.ndarray(shape, dtype, memory, offset, strides)

    def _numpy_value(self, label: str, node: ObjectNode) -> Any:
        """Return the value of a dtype, scalar or array that NumPy has pickled, or None for any other object."""
        import numpy as np

        name = label.rpartition(".")[2]
        if name == "dtype" or label.startswith("numpy.dtypes."):
            return _dtype(node, self._value)
        if name == "scalar":
            dtype, data = map(self._value, node.args)
            return np.frombuffer(data, dtype)[0]
        if name == "_frombuffer":
            data, dtype, shape, layout = map(self._value, node.args)
            return np.frombuffer(data, dtype).reshape(shape, order=layout)
        if name == "_reconstruct" and isinstance(node.state, tuple):
            _, shape, dtype, fortran, data = map(self._value, node.state)
            order: Any = "F" if fortran else "C"
            if isinstance(data, list):
                out: Any = np.empty(len(data), dtype=object)
                out[:] = data
                return out.reshape(shape, order=order)
            return np.frombuffer(bytearray(data), dtype).reshape(shape, order=order)
        return None


def _dtype(node: ObjectNode, value: Callable[[Any], Any]) -> Any:
    import numpy as np

    dtype = np.dtype(value(node.args[0]))
    if not isinstance(node.state, tuple) or len(node.state) < 5:
        return dtype
    _, order, _, names, fields, *remaining = map(value, node.state)
    if names:
        formats, offsets = zip(*((fields[name][0], fields[name][1]) for name in names), strict=True)
        spec = {"names": names, "formats": formats, "offsets": offsets, "itemsize": remaining[0]}
        return np.dtype(spec)
    return dtype.newbyteorder(order) if order in {"<", ">"} else dtype


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401 - whether it can be
    except ImportError:
        return False
    return True


def _torch_constant(label: str) -> Any:
    """Return the dtype, layout, memory format or quantization scheme named `label` (`torch.…`), or None."""
    try:
        import torch
    except ImportError:
        return None
    constant = getattr(torch, label.rpartition(".")[2], None) if label.count(".") == 1 else None
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return constant if isinstance(constant, kinds) else None


def _attributes(state: Any) -> Mapping[str, Any] | None:
    """Return the attributes and slots in a pickled state as one dict, or None if the state is not made of dicts."""
    if isinstance(state, tuple) and state and all(isinstance(p, (dict, type(None))) for p in state):
        return {k: v for part in state for k, v in (part or {}).items()}
    if state is None:
        return {}
    return state if isinstance(state, dict) else None


def _identity(node: Any) -> Any:
    return ("anchor", node.number) if isinstance(node, Ref) else id(node)


def _is_given(value: Any) -> bool:
    return not isinstance(value, NotGiven)
