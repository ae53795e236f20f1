"""Reducers: how an object created after the walk is pickled into the skeleton, by its type."""

from __future__ import annotations

import copyreg
import gc
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from rearview.state.codecs import arrays, data_loaders, functions, iterators, tensors
from rearview.state.codecs.containers import READ_ONLY, WEAK_CONTAINERS, Address
from rearview.state.codecs.context import CHILD, runs
from rearview.state.codecs.open_files import (
    ROWS,
    THREAD,
    UNKEPT,
    FileKind,
    file_state,
    unkept_reason,
)
from rearview.state.codecs.open_files import stream_kind as stream
from rearview.state.codecs.python_objects import AttributedKind, ObjectKind
from rearview.state.kinds import REF, Capturing, layout_of
from rearview.state.memory import SMALL, is_array, is_tensor, root_of
from rearview.state.rebuild import BUILDERS, LOST_CLASS, Lost, reason_of

Reducer = Callable[[Any, Capturing], Any]

_SMALL_ARRAY = BUILDERS["small_array"]
_TENSOR = BUILDERS["tensor"]
_LOCKS = {"lock", "RLock"}
_REWRAPPED = {"torchmetrics.metric.Metric"}
"""Classes whose instances wrap their own methods; their own unpickling wraps them again."""
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}


def lose(obj: Any, capturing: Capturing, reason: str) -> Any:
    """Put a mark in place of an object that cannot be kept, and say so."""
    capturing.miss(obj, reason)
    return BUILDERS["lost"], (f"{type(obj).__name__}: {reason}",)


def reducer_for(obj: Any, capturing: Capturing) -> Reducer | None:  # noqa: C901, PLR0911, PLR0912 - one dispatch over kinds of object
    """Return how objects of that type are reduced, or None when C pickling is right and safe."""
    cls = type(obj)
    if cls in weakref.ProxyTypes:
        return _proxy
    if is_tensor(obj):
        return _tensor
    if is_array(obj):
        return _array if _plain_array(obj) else _own
    for known, reducer in _BY_TYPE.items():
        if isinstance(obj, known):
            return reducer
    if cls in _VIEWS:
        return _view
    if data_loaders.is_loader_iterator(obj):
        return _loader
    if cls.__module__ in {"_thread", "threading"} and cls.__name__ in _LOCKS:
        return _lock
    if isinstance(obj, tuple(WEAK_CONTAINERS)):
        return _weak
    if cls.__module__ == "torch" and cls.__name__ in {"layout", "memory_format", "qscheme"}:
        return _torch_constant
    if _is_torch_generator(obj):
        return _torch_generator
    if isinstance(stream(obj), FileKind):
        return _file
    kind = capturing.anchors.kind(obj)
    if any(f"{base.__module__}.{base.__qualname__}" in _REWRAPPED for base in cls.__mro__):
        return _own
    if isinstance(kind, ObjectKind):
        shared = _shared(obj) if kind.has_dict else ""
        return _instance(kind.whole(), shared) if shared or _customised(cls) else None
    if isinstance(kind, AttributedKind) and layout_of(cls).base is not deque:
        # Its own methods would run while it is filled; ours go past them.
        return _instance(kind)
    if cls.__module__.startswith(("xgboost", "lightgbm")):
        return _booster
    if kind is UNKEPT or kind is THREAD:
        return _unkept
    if kind is CHILD:
        return _child
    return _by_name if kind in {REF, ROWS} else _own


def _unkept(obj: Any, capturing: Capturing) -> Any:
    return lose(obj, capturing, unkept_reason(obj))


def _lost(obj: Lost, capturing: Capturing) -> Any:
    capturing.miss(obj, reason_of(obj))
    return BUILDERS["lost"], (reason_of(obj),)


def _child(obj: Any, capturing: Capturing) -> Any:
    if runs(obj):
        capturing.miss(obj, unkept_reason(obj))
    # When it ends is a matter of timing, and its number another one each time: neither is compared.
    return BUILDERS["lost"], ("a process that was started in the loop",)


def _plain_array(obj: Any) -> bool:
    import numpy as np

    return type(obj) is np.ndarray


def _customised(cls: type) -> bool:
    return (
        hasattr(cls, "__setstate__")
        or hasattr(cls, "__getattr__")  # which pickle would ask before there are any attributes
        or hasattr(cls, "__getnewargs__")
        or hasattr(cls, "__getnewargs_ex__")
        or getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
        or any(
            getattr(cls, name) is not getattr(object, name)
            for name in ("__reduce__", "__reduce_ex__")
        )
    )


def _own(obj: Any, capturing: Capturing) -> Any:
    try:
        registered = copyreg.dispatch_table.get(type(obj))
        return registered(obj) if registered is not None else obj.__reduce_ex__(5)
    except Exception as exc:
        return lose(obj, capturing, f"its own pickling fails ({exc})")


def _by_name(obj: Any, capturing: Capturing) -> Any:
    module = type(obj).__module__
    name = functions.named(obj, module)
    return _own(obj, capturing) if name is None else (BUILDERS["named"], (module, name))


def _booster(obj: Any, capturing: Capturing) -> Any:
    """Reduce a booster its own way, and say what that way leaves out."""
    if getattr(obj, "train_set", None) is not None:
        capturing.miss(obj, "LightGBM leaves the training set out of what it saves")
    config = obj.save_config() if hasattr(obj, "save_config") else ""
    drawn = re.findall(r'"(subsample|colsample_by\w+)"\s*:\s*"([^"]*)"', config)
    if any(float(share) != 1.0 for _, share in drawn):
        capturing.miss(obj, "XGBoost leaves the random state of sampling out of what it saves")
    return _own(obj, capturing)


def _proxy(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    # A proxy passes everything on; a method got through it is bound to what stands behind.
    return BUILDERS["proxy"], (obj.__reduce_ex__.__self__,)


class Unpicklable:
    """Stands for an object that made pickling fail as a whole."""

    def __init__(self, obj: object) -> None:
        self.text = type(obj).__name__


def _gone(obj: Unpicklable, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["lost"], (f"{obj.text}: it cannot be pickled",)


def _address(obj: Address, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["address"], (obj.target,)


def _instance(kind: ObjectKind | AttributedKind, shared: str = "") -> Reducer:
    def reduce(obj: Any, capturing: Capturing) -> Any:
        content = kind.read([obj], capturing)[0]
        about = (type(obj), shared) if shared else (type(obj),)
        return BUILDERS["instance"], about, content, None, None, BUILDERS["fill"]

    return reduce


def _shared(obj: Any) -> str:
    """Return the name of the dictionary in its class that an object has as `__dict__`, if any.

    Libraries make all instances of a class one and the same that way, such as the states of
    Accelerate.
    """
    own = obj.__dict__
    for base in type(obj).__mro__[:-1]:
        for name, value in list(vars(base).items()):
            if value is own:
                return name
    return ""


def _tensor(obj: Any, capturing: Capturing) -> Any:
    try:
        plain = capturing.plain_tensor(obj, -1)
        if plain is not None:
            return _TENSOR, (type(obj), *plain, None)
        carried = "" if obj.is_leaf else tensors.operation_of(obj)
        grad = None if carried else obj.grad
        extra = tensors.extras(obj, carried=carried)
        cls = type(obj)
        if tensors.needs_form(obj):
            form = tensors.special(obj)
            return BUILDERS["special_tensor"], (cls, form, obj.requires_grad, grad, extra)
        body = tensors.describe(obj, capturing.blocks, -1)
    except Exception as exc:
        return lose(obj, capturing, f"the tensor cannot be read ({exc})")
    return _TENSOR, (cls, *body, obj.requires_grad, grad, extra)


def _array(obj: Any, capturing: Capturing) -> Any:
    number = _unheld_anchor(obj, capturing)
    if number >= 0:
        return BUILDERS["anchor"], (number,)
    if obj.dtype.hasobject:
        return _own(obj, capturing)
    home = -1
    if obj.base is not None:
        root = root_of(obj)
        capturing.viewed.add(id(root))
        # the view may be met before the array it shares its memory with
        home = _unheld_anchor(root, capturing)
    elif obj.nbytes <= SMALL and not capturing.careful:
        # Asking NumPy for an address takes longer than all the rest; see `Reading.shared`.
        capturing.loose[id(obj)] = obj
        form = (obj.dtype, obj.shape, obj.strides, obj.flags.writeable)
        return _SMALL_ARRAY, (obj.tobytes("A"), *form)
    return BUILDERS["array"], arrays.describe(obj, capturing.blocks, home)


def _unheld_anchor(array: Any, capturing: Capturing) -> int:
    """Return the number of an array that is an anchor by its address alone, and note it; else -1."""
    number, form = capturing.anchors.unheld.get(id(array), (-1, None))
    if number >= 0 and form == arrays.form_of(array) and arrays.owns_memory(array):
        capturing.found[number] = array
        return int(number)
    return -1


def _function(obj: Any, capturing: Capturing) -> Any:
    known = functions.importable(obj)
    if known and not capturing.anchors.rules.project(obj.__module__ or ""):
        return NotImplemented
    # One of the project under its own name was made in a loop of the module itself, else it would be
    # an anchor: after set-up there is no such name yet.
    place = functions.locate(obj)
    if place is None:
        return (
            NotImplemented if known else lose(obj, capturing, "its code is not found in its module")
        )
    closure = obj.__closure__ or ()
    for name, cell in zip(obj.__code__.co_freevars, closure, strict=True):
        if capturing.is_running(obj.__qualname__, name, cell):
            capturing.running.add(id(cell))
    own = (obj.__defaults__, obj.__kwdefaults__, vars(obj).copy())
    return BUILDERS["function"], (place, obj.__code__.co_freevars, closure, *own)


def _class(obj: Any, capturing: Capturing) -> Any:
    if functions.importable(obj):
        return NotImplemented
    for module in ("types", "_collections_abc"):
        for label, known in vars(sys.modules[module]).items():
            if known is obj:  # the type of functions and the like, which builtins does not name
                return BUILDERS["named"], (module, label)
    if obj.__module__ == "builtins":
        return NotImplemented
    name = functions.named(obj, obj.__module__)
    if name is not None:
        return BUILDERS["named"], (obj.__module__, name)
    return lose(obj, capturing, LOST_CLASS)


def _builtin(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    owner = obj.__self__
    if isinstance(owner, types.ModuleType) and not functions.importable(obj):
        # A library took it before its module got another in its place.
        return BUILDERS["named"], (owner.__name__, obj.__name__)
    return NotImplemented


def _standin(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return obj.__reduce__()


def _cell(obj: Any, capturing: Capturing) -> Any:
    if id(obj) in capturing.running:
        return BUILDERS["cell"], (True,)
    # Filled at the end: a function may stand in its own closure.
    capturing.cells.append(obj)
    return BUILDERS["cell"], ()


def _method(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["method"], (obj.__func__, obj.__self__)


def _module(obj: types.ModuleType, capturing: Capturing) -> Any:
    known = sys.modules.get(obj.__name__)
    # A library may put another object in its own place while it is being loaded.
    if known is not obj and getattr(known, "__file__", known) != getattr(obj, "__file__", obj):
        return lose(obj, capturing, "the module is not in sys.modules")
    return BUILDERS["module"], (obj.__name__,)


def _weakref(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["weakref"], (obj(),)


def _weak(obj: Any, capturing: Capturing) -> Any:
    kind = next(kind for base, kind in WEAK_CONTAINERS.items() if isinstance(obj, base))
    content = (kind.read([obj], capturing) or [None])[0]
    return BUILDERS["weak"], (type(obj),), content, None, None, BUILDERS["fill_weak"]


def _view(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    # A view shows its dict through a proxy; the dict itself is not to be had.
    return BUILDERS["view"], (dict(obj.mapping), _VIEWS[type(obj)])


def _read_only(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    shown = gc.get_referents(obj)  # Python has no other way to the mapping itself
    return BUILDERS["view"], (shown[0] if shown else dict(obj), READ_ONLY)


def _lock(obj: Any, capturing: Capturing) -> Any:
    if getattr(obj, "locked", lambda: False)():
        return lose(obj, capturing, "a lock is held")
    return BUILDERS["lock"], (type(obj).__name__,)


def _torch_constant(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["named"], ("torch", str(obj).rpartition(".")[2])


def _is_torch_generator(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Generator", ()))


def _torch_generator(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["torch_generator"], (str(obj.device), obj.get_state().numpy().tobytes())


def _file(obj: Any, capturing: Capturing) -> Any:
    for name in ("stdin", "stdout", "stderr"):
        if obj is getattr(sys, name):
            return BUILDERS["named"], ("sys", name)
    return BUILDERS["file"], (file_state(obj, capturing),)


def _generator(obj: Any, capturing: Capturing) -> Any:
    found = iterators.recipe(obj, capturing)
    if found is None:
        return BUILDERS["lost"], (f"{type(obj).__name__} in the middle",)
    function, arguments, count, state = found
    if function is None:
        return BUILDERS["generator"], ()
    made = BUILDERS["live_generator"], (function, arguments, count, state[:2])
    return (*made, state[2] if state[2:] else {}, None, None, BUILDERS["fill_generator"])


def _walk(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    content = (obj.source, obj.count)
    return BUILDERS["walk"], (), content, None, None, BUILDERS["fill_walk"]


def _loader(obj: Any, capturing: Capturing) -> Any:
    content = data_loaders.loader_state(obj, capturing)
    if content is None:
        return BUILDERS["lost"], ("the iterator of a loader with workers",)
    return BUILDERS["loader"], (type(obj),), content, None, None, BUILDERS["fill_loader"]


def _list_iterator(obj: Any, capturing: Capturing) -> Any:
    reduced = obj.__reduce__()
    items = reduced[1][0]
    if len(reduced) < 3 or id(items) in capturing.anchors.index:
        return reduced
    if sys.getrefcount(items) > _EXCLUSIVE:
        return reduced
    # Nobody else holds the list, so what has been taken from it is of no use.
    return reduced[0], (items[reduced[2] :],)


def _measure_exclusive() -> int:
    reduced = iter([0]).__reduce__()
    items = reduced[1][0]
    return sys.getrefcount(items) + 1


_EXCLUSIVE = _measure_exclusive()
"""What `getrefcount` says of a list that only an iterator holds."""

_BY_TYPE: dict[type, Reducer] = {
    type(iter([])): _list_iterator,
    Address: _address,
    Unpicklable: _gone,
    Lost: _lost,
    types.FunctionType: _function,
    types.BuiltinFunctionType: _builtin,
    functions.Standin: _standin,
    type: _class,
    types.CellType: _cell,
    types.MethodType: _method,
    types.ModuleType: _module,
    types.MappingProxyType: _read_only,
    weakref.ref: _weakref,
    iterators.Walk: _walk,
    types.GeneratorType: _generator,
    types.CoroutineType: _generator,
    types.AsyncGeneratorType: _generator,
}
