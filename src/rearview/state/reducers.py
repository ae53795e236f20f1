"""Reducers: functions that tell pickle how to store, in the skeleton, the objects that the loop created.

An *anchor* is an object that existed when the loop was entered (`object_numbers`); all other objects are created by the
loop. `capture` calls `reducer_for` once for each type of object. Like `__reduce_ex__`, a reducer returns how to rebuild
an object: a builder (see `codecs.base`), the arguments of the builder, and the content of the object.
"""

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

from rearview.state import code_lookup
from rearview.state.codecs import arrays, data_loaders, suspended_generators, tensors
from rearview.state.codecs.base import (
    BUILDERS,
    REF,
    Capturing,
    Lost,
    layout_of,
    reason_of,
)
from rearview.state.codecs.containers import READ_ONLY, WEAK_CONTAINERS, ObjectId
from rearview.state.codecs.context_and_thread_variables import CHILD, is_running
from rearview.state.codecs.external_resources import (
    CSV_WRITER,
    OUTSIDE,
    THREAD,
    FileKind,
    file_state,
    outside_reason,
)
from rearview.state.codecs.external_resources import stream_kind as stream
from rearview.state.codecs.instances_and_functions import AttributedKind, ObjectKind
from rearview.state.memory_blocks import SMALL, is_array, is_tensor, root_of

Reducer = Callable[[Any, Capturing], Any]
"""A function that returns how to rebuild an object, as `__reduce_ex__` does, or NotImplemented for plain pickling."""

_SMALL_ARRAY = BUILDERS["small_array"]
_TENSOR = BUILDERS["tensor"]
_LOCKS = {"lock", "RLock"}
_REWRAPPED = {"torchmetrics.metric.Metric"}
"""Classes whose instances replace their own methods by wrappers: only the pickling methods of the class restore the
wrappers.
"""
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}


def mark_lost(obj: Any, capturing: Capturing, reason: str) -> Any:
    """Report that an object cannot be captured; return how to build the `Lost` that takes its place."""
    capturing.report_missing(obj, reason)
    return BUILDERS["lost"], (f"{type(obj).__name__}: {reason}",)


def reducer_for(obj: Any, capturing: Capturing) -> Reducer | None:  # noqa: C901, PLR0911, PLR0912 - one dispatch over kinds of object
    """Return the reducer for objects of the type of `obj`, or None if plain pickling is correct for the type."""
    cls = type(obj)
    if cls in weakref.ProxyTypes:
        return _proxy
    if is_tensor(obj):
        return _tensor
    if is_array(obj):
        return _array if _plain_array(obj) else _own_pickling
    for base, reducer in _BY_TYPE.items():
        if isinstance(obj, base):
            return reducer
    if cls in _VIEWS:
        return _dict_view
    if data_loaders.is_loader_iterator(obj):
        return _loader
    if cls.__module__ in {"_thread", "threading"} and cls.__name__ in _LOCKS:
        return _lock
    if isinstance(obj, tuple(WEAK_CONTAINERS)):
        return _weak_container
    if cls.__module__ == "torch" and cls.__name__ in {"layout", "memory_format", "qscheme"}:
        return _torch_constant
    if _is_torch_generator(obj):
        return _torch_generator
    if isinstance(stream(obj), FileKind):
        return _file
    kind = capturing.anchors.kind(obj)
    if any(f"{base.__module__}.{base.__qualname__}" in _REWRAPPED for base in cls.__mro__):
        return _own_pickling
    if isinstance(kind, ObjectKind):
        shared = _shared_dict_name(obj) if kind.has_dict else ""
        return _instance(kind.whole(), shared) if shared or _has_own_pickling(cls) else None
    if isinstance(kind, AttributedKind) and layout_of(cls).base is not deque:
        # plain pickling would call methods of the class while it fills the container
        return _instance(kind)
    if cls.__module__.startswith(("xgboost", "lightgbm")):
        return _booster
    if kind is OUTSIDE or kind is THREAD:
        return _outside_process
    if kind is CHILD:
        return _child_process
    return _by_name if kind in {REF, CSV_WRITER} else _own_pickling


def _outside_process(obj: Any, capturing: Capturing) -> Any:
    return mark_lost(obj, capturing, outside_reason(obj))


def _lost(obj: Lost, capturing: Capturing) -> Any:
    capturing.report_missing(obj, reason_of(obj))
    return BUILDERS["lost"], (reason_of(obj),)


def _child_process(obj: Any, capturing: Capturing) -> Any:
    if is_running(obj):
        capturing.report_missing(obj, outside_reason(obj))
    # give the same reason for every child process: a name or status in it would differ in a replay
    return BUILDERS["lost"], ("a process that was started in the loop",)


def _plain_array(obj: Any) -> bool:
    import numpy as np

    return type(obj) is np.ndarray


def _has_own_pickling(cls: type) -> bool:
    return (
        hasattr(cls, "__setstate__")
        or hasattr(
            cls, "__getattr__"
        )  # pickle would call `__getattr__` before the attributes are set
        or hasattr(cls, "__getnewargs__")
        or hasattr(cls, "__getnewargs_ex__")
        or getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
        or any(
            getattr(cls, name) is not getattr(object, name)
            for name in ("__reduce__", "__reduce_ex__")
        )
    )


def _own_pickling(obj: Any, capturing: Capturing) -> Any:
    try:
        registered = copyreg.dispatch_table.get(type(obj))
        return registered(obj) if registered is not None else obj.__reduce_ex__(5)
    except Exception as exc:
        return mark_lost(obj, capturing, f"its own pickling fails ({exc})")


def _by_name(obj: Any, capturing: Capturing) -> Any:
    module = type(obj).__module__
    name = code_lookup.name_in_module(obj, module)
    return _own_pickling(obj, capturing) if name is None else (BUILDERS["named"], (module, name))


def _booster(obj: Any, capturing: Capturing) -> Any:
    """Return how to rebuild an XGBoost or LightGBM model by its own pickling; report state that pickling omits."""
    if getattr(obj, "train_set", None) is not None:
        capturing.report_missing(obj, "LightGBM does not save the training set")
    config = obj.save_config() if hasattr(obj, "save_config") else ""
    sampling = re.findall(r'"(subsample|colsample_by\w+)"\s*:\s*"([^"]*)"', config)
    if any(float(share) != 1.0 for _, share in sampling):
        capturing.report_missing(obj, "XGBoost does not save the random state of sampling")
    return _own_pickling(obj, capturing)


def _proxy(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    # a proxy forwards attribute access, so this bound method is a method of the target, and `__self__` the target
    return BUILDERS["proxy"], (obj.__reduce_ex__.__self__,)


class Unpicklable:
    """Takes the place of the value of a variable, if pickle cannot store the value."""

    def __init__(self, obj: object) -> None:
        self.text = type(obj).__name__


def _unpicklable(obj: Unpicklable, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["lost"], (f"{obj.text}: it cannot be pickled",)


def _object_id(obj: ObjectId, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["address"], (obj.target,)


def _instance(kind: ObjectKind | AttributedKind, shared: str = "") -> Reducer:
    def reduce(obj: Any, capturing: Capturing) -> Any:
        content = kind.read([obj], capturing)[0]
        arguments = (type(obj), shared) if shared else (type(obj),)
        return BUILDERS["instance"], arguments, content, None, None, BUILDERS["fill"]

    return reduce


def _shared_dict_name(obj: Any) -> str:
    """Return the name of the class attribute that is the `__dict__` of all instances, or "" if no attribute is.

    Accelerate has such classes, whose instances share their attributes.
    """
    instance_dict = obj.__dict__
    for base in type(obj).__mro__[:-1]:
        for name, value in list(vars(base).items()):
            if value is instance_dict:
                return name
    return ""


def _tensor(obj: Any, capturing: Capturing) -> Any:
    try:
        plain = capturing.plain_tensor(obj, -1)
        if plain is not None:
            return _TENSOR, (type(obj), *plain, None)
        lost_graph = "" if obj.is_leaf else tensors.operation_of(obj)
        grad = None if lost_graph else obj.grad
        extra = tensors.extras(obj, lost_graph=lost_graph)
        cls = type(obj)
        if tensors.is_special(obj):
            form = tensors.special_form(obj)
            return BUILDERS["special_tensor"], (cls, form, obj.requires_grad, grad, extra)
        body = tensors.describe(obj, capturing.blocks, -1)
    except Exception as exc:
        return mark_lost(obj, capturing, f"the tensor cannot be read ({exc})")
    return _TENSOR, (cls, *body, obj.requires_grad, grad, extra)


def _array(obj: Any, capturing: Capturing) -> Any:
    number = _anchor_by_address(obj, capturing)
    if number >= 0:
        return BUILDERS["anchor"], (number,)
    if obj.dtype.hasobject:
        return _own_pickling(obj, capturing)
    anchor_number = -1
    if obj.base is not None:
        root = root_of(obj)
        capturing.ids_with_views.add(id(root))
        # the view may be pickled before its base array, so look up the base array now
        anchor_number = _anchor_by_address(root, capturing)
    elif obj.nbytes <= SMALL and not capturing.check_sharing:
        # do not ask NumPy for the address here, which is slow: `Capture.has_shared_small_arrays` asks later, if needed
        capturing.presumed_unshared[id(obj)] = obj
        form = (obj.dtype, obj.shape, obj.strides, obj.flags.writeable)
        return _SMALL_ARRAY, (obj.tobytes("A"), *form)
    return BUILDERS["array"], arrays.describe(obj, capturing.blocks, anchor_number)


def _anchor_by_address(array: Any, capturing: Capturing) -> int:
    """Return the anchor number of an array in `Anchors.by_address`, or -1 for any other array.

    An array that is an anchor is added to `capturing.captured_by_address`.
    """
    number, form = capturing.anchors.by_address.get(id(array), (-1, None))
    if number >= 0 and form == arrays.form_of(array) and arrays.owns_memory(array):
        capturing.captured_by_address[number] = array
        return int(number)
    return -1


def _function(obj: Any, capturing: Capturing) -> Any:
    is_importable = code_lookup.importable(obj)
    if is_importable and not capturing.anchors.rules.project(obj.__module__ or ""):
        return NotImplemented
    # a project function that is no anchor was created by a loop of its module: after the set-up of a replay, its
    # name does not exist yet, so the skeleton stores the location of the function's code
    location = code_lookup.locate(obj)
    if location is None:
        return (
            NotImplemented
            if is_importable
            else mark_lost(obj, capturing, "its code is not found in its module")
        )
    closure = obj.__closure__ or ()
    for name, cell in zip(obj.__code__.co_freevars, closure, strict=True):
        if capturing.belongs_to_running_function(obj.__qualname__, name, cell):
            capturing.running_cells.add(id(cell))
    own_values = (obj.__defaults__, obj.__kwdefaults__, vars(obj).copy())
    return BUILDERS["function"], (location, obj.__code__.co_freevars, closure, *own_values)


def _class(obj: Any, capturing: Capturing) -> Any:
    if code_lookup.importable(obj):
        return NotImplemented
    for module in ("types", "_collections_abc"):
        for label, value in vars(sys.modules[module]).items():
            if value is obj:  # such as `types.FunctionType`, which has no name in `builtins`
                return BUILDERS["named"], (module, label)
    if obj.__module__ == "builtins":
        return NotImplemented
    name = code_lookup.name_in_module(obj, obj.__module__)
    if name is not None:
        return BUILDERS["named"], (obj.__module__, name)
    return mark_lost(obj, capturing, "the class was made inside a function after the loop began")


def _builtin(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    owner = obj.__self__
    if isinstance(owner, types.ModuleType) and not code_lookup.importable(obj):
        # Rearview or a library has replaced this builtin in its module, after another library had imported the builtin
        return BUILDERS["named"], (owner.__name__, obj.__name__)
    return NotImplemented


def _patched_builtin(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return obj.__reduce__()


def _cell(obj: Any, capturing: Capturing) -> Any:
    if id(obj) in capturing.running_cells:
        return BUILDERS["cell"], (True,)
    # the value is pickled at the end, because a function may be the value of its own closure variable
    capturing.cells.append(obj)
    return BUILDERS["cell"], ()


def _method(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["method"], (obj.__func__, obj.__self__)


def _module(obj: types.ModuleType, capturing: Capturing) -> Any:
    loaded = sys.modules.get(obj.__name__)
    # a library may replace its own module object in `sys.modules` while it is being imported
    if loaded is not obj and getattr(loaded, "__file__", loaded) != getattr(obj, "__file__", obj):
        return mark_lost(obj, capturing, "the module is not in sys.modules")
    return BUILDERS["module"], (obj.__name__,)


def _weakref(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    return BUILDERS["weakref"], (obj(),)


def _weak_container(obj: Any, capturing: Capturing) -> Any:
    kind = next(kind for base, kind in WEAK_CONTAINERS.items() if isinstance(obj, base))
    content = (kind.read([obj], capturing) or [None])[0]
    return BUILDERS["weak"], (type(obj),), content, None, None, BUILDERS["fill_weak"]


def _dict_view(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    # copy the items: `obj.mapping` is a proxy, and Python gives no access to the dict itself
    return BUILDERS["view"], (dict(obj.mapping), _VIEWS[type(obj)])


def _read_only(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
    mappings = gc.get_referents(obj)  # Python gives no other access to the mapping
    return BUILDERS["view"], (mappings[0] if mappings else dict(obj), READ_ONLY)


def _lock(obj: Any, capturing: Capturing) -> Any:
    if getattr(obj, "locked", lambda: False)():
        return mark_lost(obj, capturing, "a lock is held")
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
    recipe = suspended_generators.generator_recipe(obj, capturing)
    if recipe is None:
        return BUILDERS["lost"], (f"{type(obj).__name__} in the middle",)
    function, arguments, count, state = recipe
    if function is None:
        return BUILDERS["generator"], ()
    builder = BUILDERS["live_generator"], (function, arguments, count, state[:2])
    return (*builder, state[2] if state[2:] else {}, None, None, BUILDERS["fill_generator"])


def _loop_iterator(obj: Any, capturing: Capturing) -> Any:  # noqa: ARG001
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
    # only this iterator refers to the list, so the items that the loop has already taken are not needed
    return reduced[0], (items[reduced[2] :],)


def _measure_exclusive() -> int:
    reduced = iter([0]).__reduce__()
    items = reduced[1][0]
    return sys.getrefcount(items) + 1


_EXCLUSIVE = _measure_exclusive()
"""Result of `sys.getrefcount` for a list to which only an iterator refers."""

_BY_TYPE: dict[type, Reducer] = {
    type(iter([])): _list_iterator,
    ObjectId: _object_id,
    Unpicklable: _unpicklable,
    Lost: _lost,
    types.FunctionType: _function,
    types.BuiltinFunctionType: _builtin,
    code_lookup.PatchedBuiltin: _patched_builtin,
    type: _class,
    types.CellType: _cell,
    types.MethodType: _method,
    types.ModuleType: _module,
    types.MappingProxyType: _read_only,
    weakref.ref: _weakref,
    suspended_generators.LoopIterator: _loop_iterator,
    types.GeneratorType: _generator,
    types.CoroutineType: _generator,
    types.AsyncGeneratorType: _generator,
}
