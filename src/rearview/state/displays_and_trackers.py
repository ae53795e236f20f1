"""Decide which objects and attributes are excluded from the training state.

Training state is every object that the program can reach and that may change what the program computes or logs later.
Displays and trackers only show, send or measure results of the computation, and are not state. The class of an object
decides, not the variable that refers to the object:

1. A *display* or *tracker* is an instance of a class that one of the libraries in `DISPLAYS` or `TRACKERS` defines,
   or of a class derived from such a class.
2. Values that the library's own code stores in a display or tracker (times, caches, widths, texts) are not state.
3. Values that other code stores in a display or tracker are state: attributes that a derived class assigns,
   attributes that the library does not name, and objects of the program or of other libraries.
4. The position of a progress bar is state (`BAR_ATTRIBUTES`), because programs read `bar.n`.

Some attributes of other library classes are not state either: addresses, times, tasks of threads
(`_EXCLUDED_ATTRIBUTES`). `capture` leaves out these attributes, and stores the displays and trackers in `BY_REFERENCE`
as references; `compare` leaves out everything that is not state.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rearview.state.codecs.base import type_name

TRACKERS = (
    "aim.",
    "clearml.",
    "codecarbon.",
    "comet_ml.",
    "dvclive.",
    "matplotlib.",
    "mlflow.",
    "neptune.",
    "swanlab.",
    "tensorboard.",
    "tensorboardX.",
    "torch.autograd.profiler",
    "torch.profiler.",
    "torch.utils.tensorboard.",
    "wandb.",
)
"""Beginnings of the names of classes of libraries that store or upload results, or measure time."""
_LIVE_DISPLAYS = ("IPython.", "logging.", "loguru.", "rich.")
"""Displays other than progress bars; displays of these libraries are captured by reference, like trackers."""
BARS = (
    "alive_progress.",
    "enlighten.",
    "fastprogress.",
    "ignite.contrib.handlers.tqdm_logger.",
    "ignite.handlers.tqdm_logger.",
    "keras.src.callbacks.progbar_logger.",
    "keras.src.utils.progbar.",
    "lightning.pytorch.callbacks.model_summary.",
    "lightning.pytorch.callbacks.progress.",
    "lightning.pytorch.callbacks.rich_model_summary.",
    "progressbar.",
    "pytorch_lightning.callbacks.model_summary.",
    "pytorch_lightning.callbacks.progress.",
    "pytorch_lightning.callbacks.rich_model_summary.",
    "rich.progress.",
    "tqdm.",
    "transformers.trainer_callback.PrinterCallback",
    "transformers.trainer_callback.ProgressCallback",
    "transformers.utils.notebook.",
)
"""Beginnings of the names of progress bar classes. A replay does not reproduce the times that progress bars read from
the clock.
"""
DISPLAYS = (*_LIVE_DISPLAYS, *BARS)
"""Beginnings of the names of classes of progress bars, live displays, loggers, and handlers and formatters of
loggers."""
BY_REFERENCE = (*TRACKERS, *_LIVE_DISPLAYS)
"""Beginnings of the names of displays and trackers that are captured by reference, and whose content is never
compared."""
BAR_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "keras.src.utils.progbar.": frozenset({"_seen_so_far", "target"}),
    "progressbar.": frozenset({"max_value", "value"}),
    "tqdm.": frozenset({"iterable", "n", "total"}),
}
"""Beginning of a class name -> attributes of such progress bars that programs read: position, total, iterable.

The iterator inside a bar of progressbar2 is left out. This iterator is a generator, whose source a restore cannot
replace.
"""
_EXCLUDED_ATTRIBUTES = {
    "absl.flags._flagvalues.FlagValues": frozenset({"__flags_by_module_id"}),
    "fsspec.spec.AbstractFileSystem": frozenset({"_fs_token_"}),
    "keras.src.callbacks.callback_list.CallbackList": frozenset({"_futures"}),
    "keras.src.ops.function.Function": frozenset({"_nodes"}),
    "keras.src.utils.tracking.Tracker": frozenset({"stored_ids"}),
    "lightning.pytorch.trainer.trainer.Trainer": frozenset({"_last_val_time"}),
    "pytorch_lightning.trainer.trainer.Trainer": frozenset({"_last_val_time"}),
}


def excluded_attributes(cls: type) -> frozenset[str]:
    """Return the names of those attributes of instances of `cls` that are neither captured nor compared."""
    names = map(type_name, cls.__mro__)
    return frozenset().union(*(_EXCLUDED_ATTRIBUTES.get(name, ()) for name in names))


def is_never_compared(name: str) -> bool:
    """Return True if the content of instances of the named class is never compared.

    >>> is_never_compared("rich.progress.Task"), is_never_compared("tqdm.std.tqdm")
    (True, False)
    """
    return name.startswith(BY_REFERENCE)


@functools.lru_cache(maxsize=1000)
def uncompared_attributes(cls: type | None) -> UncomparedAttributes:
    """Return which attributes of instances of `cls` are not compared; None means an unknown class: compare all."""
    if cls is None:
        return UncomparedAttributes(frozenset(), None)
    libraries = _display_bases(cls)
    if not libraries:
        return UncomparedAttributes(excluded_attributes(cls), None)
    program_names: set[str] = set()
    for base in cls.__mro__[:-1]:
        if type_name(base).startswith(_DISPLAYS_AND_TRACKERS):
            for prefix, names in BAR_ATTRIBUTES.items():
                program_names |= names if type_name(base).startswith(prefix) else set()
        else:
            program_names |= set(
                _assigned_attributes(_code_objects(vars(base).values(), base.__module__))
            )
    modules = {base.__module__: sys.modules.get(base.__module__) for base in libraries}
    names_in_library: set[str] = set()
    for module_name, module in modules.items():
        for code in _code_objects(vars(module).values() if module else (), module_name):
            names_in_library.update(code.co_names, code.co_varnames)
            names_in_library.update(text for text in code.co_consts if isinstance(text, str))
    for base in libraries:
        names_in_library |= vars(base).keys() | getattr(base, "__annotations__", {}).keys()
    return UncomparedAttributes(
        excluded_attributes(cls), frozenset(names_in_library - program_names)
    )


class UncomparedAttributes:
    """The attributes of the instances of one class that a comparison of two states leaves out."""

    def __init__(self, always: frozenset[str], display_only: frozenset[str] | None) -> None:
        self.always = always
        """Names of attributes that are never compared: addresses, times and tasks."""
        self.display_only = display_only
        """Names of attributes that only the library's code uses; None if the class is no display or tracker."""

    def split(self, attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return two dicts: the attributes to compare, and the attributes that only the library's code uses.

        Attributes in `always` are in neither dict.
        """
        if not self.always and self.display_only is None:
            return attributes, {}
        library_names = self.display_only or frozenset()
        candidates = {k: v for k, v in attributes.items() if k not in self.always}
        return (
            {k: v for k, v in candidates.items() if k not in library_names},
            {k: v for k, v in candidates.items() if k in library_names},
        )


def belongs_to_program(cls: type) -> bool:
    """Return True if an instance of `cls` that is stored in a display or tracker counts as an object of the program.

    >>> import collections, logging
    >>> belongs_to_program(collections.OrderedDict), belongs_to_program(logging.Formatter)
    (False, False)
    """
    if _display_bases(cls):
        return False
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names


_DISPLAYS_AND_TRACKERS = (*TRACKERS, *DISPLAYS)


def _display_bases(cls: type) -> list[type]:
    """Return those classes among `cls` and its base classes that libraries for displays and trackers define."""
    return [base for base in cls.__mro__ if type_name(base).startswith(_DISPLAYS_AND_TRACKERS)]


@functools.lru_cache(maxsize=1000)
def class_named(name: str) -> type | None:
    """Return the class with this full name, or None if no loaded module has such a class."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:n]))
        for part in parts[n:]:
            value = vars(value).get(part) if hasattr(value, "__dict__") else None
        if isinstance(value, type):
            return value
    return None


def _code_objects(values: Iterable[Any], module: str) -> Iterator[types.CodeType]:
    """Yield the code of functions among `values`, in classes of `module` among `values`, and of nested functions."""
    remaining_values = list(values)
    visited_ids: set[int] = set()
    while remaining_values:
        value = remaining_values.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if isinstance(value, types.CodeType):
            yield value
            remaining_values += [
                part for part in value.co_consts if isinstance(part, types.CodeType)
            ]
        elif isinstance(value, type):
            remaining_values += vars(value).values() if value.__module__ == module else ()
        elif isinstance(value, property):
            remaining_values += [value.fget, value.fset, value.fdel]
        else:
            function = getattr(value, "__wrapped__", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                remaining_values.append(function.__code__)


def _assigned_attributes(codes: Iterable[types.CodeType]) -> Iterator[str]:
    """Yield the name of each attribute to which one of the code objects assigns."""
    import dis

    for code in codes:
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR":
                yield instruction.argval
