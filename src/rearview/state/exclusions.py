"""Decide which objects and attributes are not training state.

Training state is every object that the program can reach and that may change what it computes or
logs later. Objects that only display the computation, send it away or measure it are not.
The class of an object decides, not the name that leads to it:

1. A *bystander* is an instance of a class that one of the libraries in `DISPLAYS` or `TRACKERS`
   defines, or of a class derived from one.
2. Values that the library's own code keeps in a bystander (times, caches, widths, texts) are not state.
3. Values that other code keeps in a bystander are state: attributes that a derived class assigns, attributes
   that nothing in the library names, and objects of the program or of other libraries.
4. The position of a progress bar is state (`COUNTED`): programs read `bar.n`.

Some attributes of other library classes are not state either: addresses, times, tasks of threads
(`_NO_STATE`). `capture` skips these; `compare` skips all of the above.
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
"""Libraries that store or upload results, or measure time."""
_LIVE = ("IPython.", "logging.", "loguru.", "rich.")
"""Displays that are captured by reference, like trackers."""
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
"""Progress bars. Replays do not reproduce the times that they read from the clock, either."""
DISPLAYS = (*_LIVE, *BARS)
"""Progress bars, live displays, loggers and their handlers and formatters."""
BY_REFERENCE = (*TRACKERS, *_LIVE)
"""Objects of these libraries are captured by reference; their content is never compared."""
COUNTED: Mapping[str, frozenset[str]] = {
    "keras.src.utils.progbar.": frozenset({"_seen_so_far", "target"}),
    "progressbar.": frozenset({"max_value", "value"}),
    "tqdm.": frozenset({"iterable", "n", "total"}),
}
"""Attributes of progress bars that programs read: the position, the total, the iterable.

The iterator inside progressbar2's bar is not listed: its generator draws from an iterator that a
restore cannot replace.
"""
_NO_STATE = {
    "absl.flags._flagvalues.FlagValues": frozenset({"__flags_by_module_id"}),
    "fsspec.spec.AbstractFileSystem": frozenset({"_fs_token_"}),
    "keras.src.callbacks.callback_list.CallbackList": frozenset({"_futures"}),
    "keras.src.ops.function.Function": frozenset({"_nodes"}),
    "keras.src.utils.tracking.Tracker": frozenset({"stored_ids"}),
    "lightning.pytorch.trainer.trainer.Trainer": frozenset({"_last_val_time"}),
    "pytorch_lightning.trainer.trainer.Trainer": frozenset({"_last_val_time"}),
}


def excluded_attributes(cls: type) -> frozenset[str]:
    """Return the attributes of a class's instances that are neither captured nor compared."""
    names = map(type_name, cls.__mro__)
    return frozenset().union(*(_NO_STATE.get(name, ()) for name in names))


def is_never_compared(name: str) -> bool:
    """Return True if the content of instances of the named class is never compared.

    >>> is_never_compared("rich.progress.Task"), is_never_compared("tqdm.std.tqdm")
    (True, False)
    """
    return name.startswith(BY_REFERENCE)


@functools.lru_cache(maxsize=1000)
def uncompared_attributes(cls: type | None) -> UncomparedAttributes:
    """Return the attributes of a class's instances that are not compared."""
    if cls is None:
        return UncomparedAttributes(frozenset(), None)
    libraries = _display_bases(cls)
    if not libraries:
        return UncomparedAttributes(excluded_attributes(cls), None)
    kept_for_program: set[str] = set()
    for base in cls.__mro__[:-1]:
        if type_name(base).startswith(_ALL):
            for prefix, counted in COUNTED.items():
                kept_for_program |= counted if type_name(base).startswith(prefix) else set()
        else:
            kept_for_program |= set(_assigned(_codes(vars(base).values(), base.__module__)))
    modules = {base.__module__: sys.modules.get(base.__module__) for base in libraries}
    names_in_library: set[str] = set()
    for module_name, module in modules.items():
        for code in _codes(vars(module).values() if module else (), module_name):
            names_in_library.update(code.co_names, code.co_varnames)
            names_in_library.update(text for text in code.co_consts if isinstance(text, str))
    for base in libraries:
        names_in_library |= vars(base).keys() | getattr(base, "__annotations__", {}).keys()
    return UncomparedAttributes(
        excluded_attributes(cls), frozenset(names_in_library - kept_for_program)
    )


class UncomparedAttributes:
    """The attributes of a class that a comparison of two states leaves out."""

    def __init__(self, always: frozenset[str], shown: frozenset[str] | None) -> None:
        self.always = always
        """Addresses, times and tasks: never compared."""
        self.shown = shown
        """Attributes that the display's own code uses; None if the class is no bystander."""

    def split(self, attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the attributes that are compared, and those that only the display's code uses."""
        if not self.always and self.shown is None:
            return attributes, {}
        shown = self.shown or frozenset()
        candidates = {k: v for k, v in attributes.items() if k not in self.always}
        return (
            {k: v for k, v in candidates.items() if k not in shown},
            {k: v for k, v in candidates.items() if k in shown},
        )


def belongs_to_program(cls: type) -> bool:
    """Return True if a display that holds an instance of this class holds an object of the program.

    >>> import collections, logging
    >>> belongs_to_program(collections.OrderedDict), belongs_to_program(logging.Formatter)
    (False, False)
    """
    if _display_bases(cls):
        return False
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names


_ALL = (*TRACKERS, *DISPLAYS)


def _display_bases(cls: type) -> list[type]:
    """Return the base classes that a display or tracker library defines."""
    return [base for base in cls.__mro__ if type_name(base).startswith(_ALL)]


@functools.lru_cache(maxsize=1000)
def class_named(name: str) -> type | None:
    """Return the class with that full name, or None if its module is not loaded."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:n]))
        for part in parts[n:]:
            value = vars(value).get(part) if hasattr(value, "__dict__") else None
        if isinstance(value, type):
            return value
    return None


def _codes(values: Iterable[Any], module: str) -> Iterator[types.CodeType]:
    """Yield the code objects of functions and of a module's classes, nested ones included."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.CodeType):
            yield value
            waiting += [part for part in value.co_consts if isinstance(part, types.CodeType)]
        elif isinstance(value, type):
            waiting += vars(value).values() if value.__module__ == module else ()
        elif isinstance(value, property):
            waiting += [value.fget, value.fset, value.fdel]
        else:
            function = getattr(value, "__wrapped__", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                waiting.append(function.__code__)


def _assigned(codes: Iterable[types.CodeType]) -> Iterator[str]:
    """Yield the names of the attributes that code assigns."""
    import dis

    for code in codes:
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR":
                yield instruction.argval
