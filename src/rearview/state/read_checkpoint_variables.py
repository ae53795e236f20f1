"""Read the variables of a checkpoint as plain values, without running any of the program's code.

`rearview.history()` uses it to show a checkpoint. It builds Python's own values, tensors, arrays and
the `state_dict` of torch modules and optimizers from the tree of nodes in `skeleton_reader`. Every other
object becomes a `NotGiven` with the reason.
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
from rearview.state.object_walk import label_without_names
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
_OPTIMIZER = {"param_groups", "state", "defaults"}
_SCHEDULER = {"optimizer", "last_epoch", "base_lrs"}
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
"""Kinds that may be large and can always be given."""
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
"""Constructors of Python's own classes; none of them runs code of the program or of libraries."""


def variable_name(root: str) -> str:
    """Return the name of a variable for people, given the name of its root.

    >>> variable_name("local:0:main:model"), variable_name("global:__main__:lr")
    ('main.model', 'lr')
    >>> variable_name("global:net:SIZE")
    'net.SIZE'
    """
    scope, _, rest = root.partition(":")
    place, _, name = rest.rpartition(":")
    if scope == "local":
        place = place.rpartition(":")[2]
    return name if place in {"", "__main__", "__mp_main__"} else f"{place}.{name}"


class NotGiven:
    """Takes the place of a value that cannot be built without running the program; has the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not given: {self.reason}>"


class ObjectState(dict[str, Any]):
    """The attributes of an object by name; `type` is the name of its class."""

    def __init__(self, type: str, items: Any = ()) -> None:  # noqa: A002 - what people look for
        super().__init__(items)
        self.type = type

    def __repr__(self) -> str:
        return f"<{self.type}: {', '.join(map(str, self)) or 'no attributes'}>"


class ModuleState(collections.OrderedDict[str, Any]):
    """The `state_dict()` of a torch module: tensors by name, ready for `load_state_dict`.

    `type` is the name of its class, `training` its mode, `attributes` its other attributes.
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
        self._more = attributes

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the module itself that are neither tensors nor modules."""
        return self._more()

    def __repr__(self) -> str:
        return f"<state_dict of {self.type}: {len(self)} tensors>"

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())


class Variables:
    """The variables of one checkpoint; each value is built on first access.

    `signature` holds the labels of the anchors; `buffers` returns the bytes of a buffer. Variables
    that shared memory in the run share it here.
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
        self._built: dict[Any, Any] = {}
        self._kept: list[Any] = []
        self.roots: dict[str, str] = {}
        """The name of each variable's root in the checkpoint, by its name for people."""
        for root in self._tree.roots:
            if not root.startswith("declared:"):
                self.roots[self._free(variable_name(root))] = root

    def _free(self, name: str) -> str:
        """Return `name`, with a number if it is taken (a function that called itself)."""
        n, free = 1, name
        while free in self.roots:
            n += 1
            free = f"{name}#{n}"
        return free

    def value(self, name: str) -> Any:
        """Return the value of a variable, or a `NotGiven`."""
        try:
            return self._value(self._tree.roots[self.roots[name]])
        except RearviewError:
            raise
        except Exception as exc:
            return NotGiven(f"its state cannot be read ({type(exc).__name__}: {exc})")

    def reason(self, name: str) -> str | None:
        """Return why a variable cannot be given, or None, without reading large memory."""
        held = self._tree.roots[self.roots[name]]
        kind, content = "", None
        if isinstance(held, Ref):
            kind, content = self._tree.contents.get(held.number, ("", None))
        elif isinstance(held, ObjectNode):
            kind = held.label
            content = self._tree.parts(held)[1:2] if kind == "build tensor" else held.state
        if kind in {"tensor", "build tensor"} and content and isinstance(content[0], ArrayBody):
            return None if _has_torch() else self._reason(name)
        if kind in _LARGE and (kind != "object" or _attributes(content) is not None):
            return None
        return None if isinstance(held, (dict, list, tuple)) else self._reason(name)

    def _reason(self, name: str) -> str | None:
        value = self.value(name)
        return value.reason if isinstance(value, NotGiven) else None

    def _value(self, held: Any) -> Any:
        if isinstance(held, Ref):
            return self._once(("anchor", held.number), held, self._anchor)
        if isinstance(held, type):
            return self._class(held)
        if isinstance(held, OutsideKey):
            return bytearray(self._buffers(held.decode()))
        if isinstance(held, (dict, list, ObjectNode)):
            return self._once(id(held), held, self._compound)
        if type(held) is tuple:
            return tuple(map(self._value, held))
        if isinstance(held, (set, frozenset)):
            return type(held)(map(self._key, held))
        return held

    def _once(self, key: Any, held: Any, make: Callable[[Any, Any], Any]) -> Any:
        """Return the value of an object, built once: the same object is always the same value."""
        if key not in self._built:
            self._kept.append(held)  # so that its id stays its own
            self._built[key] = NotGiven("an object that contains itself")
            self._built[key] = make(held, key)
        return self._built[key]

    def _begin(self, key: Any, value: Any) -> Any:
        """Register a container before its items are built: they may refer back to it."""
        self._built[key] = value
        return value

    def _compound(self, held: Any, key: Any) -> Any:
        if isinstance(held, dict):
            return self._dict(held, key, {})
        if isinstance(held, list):
            return self._list(held, key)
        return self._node(held, key)

    def _dict(self, held: Mapping[Any, Any], key: Any, into: Any) -> Any:
        self._begin(key, into)
        for name, item in held.items():
            into[self._key(name)] = self._value(item)
        return into

    def _list(self, held: Sequence[Any], key: Any) -> Any:
        into = self._begin(key, [])
        into.extend(map(self._value, held))
        return into

    def _key(self, held: Any) -> Any:
        """Return a dict key or set element; its `repr` if the value cannot be hashed."""
        value = self._value(held)
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return value

    def _class(self, held: Any) -> Any:
        """Return a torch constant by name, or a NotGiven with the name of the class or function."""
        if issubclass(held, LostNode):
            return NotGiven(held.reason)
        label = getattr(held, "label", "")
        if label.startswith("class "):
            number = int(label[len("class ") :])
            label = label_without_names(self._signature[number]).removeprefix("class ")
        if label.startswith("torch."):
            constant = _torch_constant(label)
            if constant is not None:
                return constant
        return NotGiven(f"{label}: a class or function, which is in the source or a library")

    def _anchor(self, held: Ref, key: Any) -> Any:
        kind, content = self._tree.contents.get(held.number, ("", None))
        name = (
            label_without_names(self._signature[held.number])
            if held.number < len(self._signature)
            else ""
        )
        kind = kind.removesuffix(" with attributes") if isinstance(content, tuple) else kind
        if kind == "object":
            return self._object(name, _attributes(content), key)
        if kind == "tensor":
            return self._tensor(content[0], content[3]) if content else self._unknown(0, kind)
        if kind == "array":
            return self._array(content)
        if kind == "cell":
            return self._value(content[0]) if content else NotGiven("a variable that is not bound")
        container = self._container(kind, name, content, key)
        return self._unknown(held.number, kind) if container is None else container

    def _container(self, kind: str, name: str, content: Any, key: Any) -> Any:
        """Return a builtin container, or None for any other kind."""
        if kind in {"dict", "list", "deque", "set"} and isinstance(content, tuple):
            if not (kind == "set" and content[:1] == (SAME,)):
                content = content[0]  # items and attributes of a subclass
        if kind == "dict":
            ordered = name == "collections.OrderedDict"
            return self._dict(content, key, collections.OrderedDict() if ordered else {})
        if kind == "defaultdict":
            return self._dict(content[0], key, {})
        if kind == "list":
            return self._list(content, key)
        if kind == "deque":
            return collections.deque(map(self._value, content))
        if kind == "set":
            as_set_up = isinstance(content, tuple) and content[:1] == (SAME,)
            return {self._key(element) for element in (content[1] if as_set_up else content)}
        if kind == "bytes":
            return bytearray(content)
        if kind == "typed array":
            import array

            return array.array(content[0], content[1])
        return None

    def _unknown(self, number: int, kind: str) -> NotGiven:
        label = (
            label_without_names(self._signature[number]) if number < len(self._signature) else ""
        )
        if kind in _REASONS:
            return NotGiven(_REASONS[kind])
        return NotGiven(f"{label or kind}: only the program can make it")

    def _node(self, node: ObjectNode, key: Any) -> Any:
        label = node.label
        if label in {"build tensor", "build special_tensor"}:
            parts = self._tree.parts(node)
            return self._tensor(parts[1], parts[-1])
        if label in {"build array", "build small_array", "build anchor"}:
            return self._array(("memory", *self._tree.parts(node)))
        if label == "build instance":
            return self._object(self._named(node.args[0]), _attributes(node.state), key)
        if label == "build cell":
            return self._value(node.state[0]) if node.state else NotGiven("an unbound variable")
        if label == "build view":
            shown, how = self._value(node.args[0]), node.args[1]
            return shown if how == READ_ONLY else list(getattr(shown, how)())
        if label == "build torch_generator":
            return ObjectState("torch.Generator", zip(("device", "state"), node.args, strict=True))
        if label.startswith("build "):
            name = label.removeprefix("build ")
            return NotGiven(_REASONS.get(name, f"{name}: only the program can make it"))
        return self._library(node, key)

    def _named(self, held: Any) -> str:
        """Return the name of a class."""
        label = str(getattr(held, "label", "an object"))
        if label.startswith("class "):
            return label_without_names(self._signature[int(label[len("class ") :])]).removeprefix(
                "class "
            )
        return label

    def _library(self, node: ObjectNode, key: Any) -> Any:
        """Return an object that its own class has pickled."""
        label = self._named(node)
        if label == "collections.OrderedDict":
            return self._dict(dict(node.pairs), key, collections.OrderedDict())
        if label == "collections.defaultdict":
            return self._dict(dict(node.pairs), key, {})
        if label == "collections.deque":
            bound = node.args[1] if len(node.args) > 1 else None
            return collections.deque(map(self._value, node.items), bound)
        if label in _CONSTRUCTORS:
            return _CONSTRUCTORS[label](*map(self._value, node.args))
        if label in {"torch.Size", "torch.device"}:
            args = tuple(map(self._value, node.args))
            return tuple(args[0]) if label == "torch.Size" else ":".join(map(str, args))
        if label.startswith("numpy."):
            value = self._numpy(label, node)
            if value is not None:
                return value
        if isinstance(node.state, (dict, tuple)) or not (node.args or node.items or node.pairs):
            state = _attributes(node.state)
            if state is not None:
                return self._object(label, state, key)
        return NotGiven(f"{label}: only its own code can make it")

    def _object(self, name: str, attributes: Mapping[str, Any] | None, key: Any) -> Any:
        """Return the attributes of an object; for a torch module or optimizer, its `state_dict`."""
        if attributes is None:
            return NotGiven(f"{name}: only its own code can make it")
        if attributes.keys() >= _MODULE:
            return self._module(name, attributes)
        if attributes.keys() >= _OPTIMIZER:
            return self._optimizer(name, attributes)
        if attributes.keys() >= _SCHEDULER:
            held = {k: self._value(v) for k, v in attributes.items() if k != "optimizer"}
            return ObjectState(name, {k: v for k, v in held.items() if _is_given(v)})
        return self._dict(attributes, key, ObjectState(name))

    def _module(self, name: str, attributes: Mapping[str, Any]) -> ModuleState:
        def others() -> dict[str, Any]:
            own = {k: v for k, v in attributes.items() if not k.startswith("_") and k != "training"}
            return {k: self._value(v) for k, v in own.items()}

        training = attributes.get("training")
        items = dict(self._module_tensors("", attributes, set()))
        return ModuleState(name, items, training, others)

    def _module_tensors(
        self, prefix: str, attributes: Mapping[str, Any], above: set[int]
    ) -> Iterator[tuple[str, Any]]:
        fleeting = self._items(attributes.get("_non_persistent_buffers_set"))
        for group in ("_parameters", "_buffers"):
            for name, held in (self._plain(attributes[group]) or {}).items():
                if held is not None and not (group == "_buffers" and name in fleeting):
                    yield f"{prefix}{name}", self._value(held)
        for name, held in (self._plain(attributes["_modules"]) or {}).items():
            inner = self._plain(held)
            if isinstance(inner, Mapping) and inner.keys() >= _MODULE and id(inner) not in above:
                yield from self._module_tensors(f"{prefix}{name}.", inner, {*above, id(inner)})

    def _items(self, held: Any) -> set[Any]:
        value = self._value(held)
        return value if isinstance(value, set) else set()

    def _plain(self, held: Any) -> Any:
        """Return the items or attributes of a dict, list or object as nodes."""
        if isinstance(held, Ref):
            kind, content = self._tree.contents.get(held.number, ("", None))
            if kind == "object":
                return _attributes(content)
            return content[0] if isinstance(content, tuple) and content else content
        if isinstance(held, ObjectNode):
            if held.pairs:
                return dict(held.pairs)
            return _attributes(held.state) or {}
        return held

    def _optimizer(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Return the `state_dict()` of a torch optimizer, in which parameters are numbers."""
        numbers: dict[Any, int] = {}
        groups = []
        for group in self._plain(attributes["param_groups"]) or []:
            held = self._plain(group)
            params = self._plain(held["params"])
            for param in params:
                numbers.setdefault(_identity(param), len(numbers))
            settings = {k: self._value(v) for k, v in held.items() if k != "params"}
            groups.append({**settings, "params": [numbers[_identity(param)] for param in params]})
        state = self._plain(attributes["state"]) or {}
        return ObjectState(
            name,
            {
                "state": {
                    numbers.get(_identity(param), str(param)): self._value(held)
                    for param, held in state.items()
                },
                "param_groups": groups,
            },
        )

    def _tensor(self, body: Any, extra: Any) -> Any:
        if not isinstance(body, ArrayBody):
            return self._special(body)
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

    def _special(self, form: Any) -> Any:
        """Return a sparse or quantized tensor."""
        if not form or form[0] == "wrapper":
            return NotGiven("a tensor of a class whose own code makes it from its parts")
        return from_special(tuple(self._value(part) for part in form))

    def _bytes(self, memory_node: BlockNode) -> Any:
        """Return a memory block as a tensor of bytes, the same one each time."""
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

    def _array(self, content: Any) -> Any:
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

    def _numpy(self, label: str, node: ObjectNode) -> Any:
        """Return the NumPy value that was pickled by NumPy itself, or None for anything else."""
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
    """Return a dtype, layout or memory format of torch by its name, or None."""
    try:
        import torch
    except ImportError:
        return None
    constant = getattr(torch, label.rpartition(".")[2], None) if label.count(".") == 1 else None
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return constant if isinstance(constant, kinds) else None


def _attributes(state: Any) -> Mapping[str, Any] | None:
    """Return attributes and slots as one mapping, or None if the state has another form."""
    if isinstance(state, tuple) and state and all(isinstance(p, (dict, type(None))) for p in state):
        return {k: v for part in state for k, v in (part or {}).items()}
    if state is None:
        return {}
    return state if isinstance(state, dict) else None


def _identity(held: Any) -> Any:
    return ("anchor", held.number) if isinstance(held, Ref) else id(held)


def _is_given(value: Any) -> bool:
    return not isinstance(value, NotGiven)
