"""Which objects and attributes are not training state: the one place that decides it.

Training state is everything that the program can reach and that may change what it computes or
logs later. Not training state is what only shows the computation, sends it away or measures it.
The class of an object decides, not the name that leads to it:

1. A *bystander* is an instance of a class that one of the libraries in `DISPLAYS` or `TRACKERS`
   defines, or of a class derived from one.
2. What the library's own code keeps in a bystander (times, caches, widths, texts) is not state.
3. What somebody else keeps there is state: attributes that the code of a derived class assigns,
   attributes that nothing in the library names, and objects of the program or of other libraries
   that the bystander holds.
4. How far a progress bar has come is state (`COUNTED`): programs read `bar.n`.

Attributes that hold addresses, the time of day or tasks of threads in other classes of libraries
are not state either (`_NO_STATE`).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
"""Libraries that keep or send away what is computed, or measure how long it took."""
_LIVE = ("IPython.", "logging.", "loguru.", "rich.")
"""Displays that are never entered, as trackers: their own objects go by reference."""
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
"""Progress bars: how often they look at the clock, and what they see, is not the program's either."""
DISPLAYS = (*_LIVE, *BARS)
"""Progress bars, live displays, loggers and their handlers and formatters."""
BY_REFERENCE = (*TRACKERS, *_LIVE)
"""Of these libraries, the inside of an object is neither kept nor compared."""
COUNTED: Mapping[str, frozenset[str]] = {
    "keras.src.utils.progbar.": frozenset({"_seen_so_far", "target"}),
    "progressbar.": frozenset({"max_value", "value"}),
    "tqdm.": frozenset({"iterable", "n", "total"}),
}
"""What programs read from a progress bar: how far it has come, and what it goes through.

The iterator inside progressbar2's bar is not among them: its generator draws from an iterator of its
own, which a restore does not exchange.
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


def unkept(cls: type) -> frozenset[str]:
    """Return the attributes of instances of a class that are neither kept nor compared."""
    names = map(_full_name, cls.__mro__)
    return frozenset().union(*(_NO_STATE.get(name, ()) for name in names))


def only_watches(name: str) -> bool:
    """Return True if nothing inside an instance of the class so named is compared.

    >>> only_watches("rich.progress.Task"), only_watches("tqdm.std.tqdm")
    (True, False)
    """
    return name.startswith(BY_REFERENCE)


@functools.lru_cache(maxsize=1000)
def uncompared(cls: type | None) -> Uncompared:
    """Return which attributes of instances of a class are not compared."""
    if cls is None:
        return Uncompared(frozenset(), None)
    libraries = _libraries(cls)
    if not libraries:
        return Uncompared(unkept(cls), None)
    own: set[str] = set()
    for base in cls.__mro__[:-1]:
        if _full_name(base).startswith(_ALL):
            for prefix, counted in COUNTED.items():
                own |= counted if _full_name(base).startswith(prefix) else set()
        else:
            own |= set(_assigned(_codes(vars(base).values(), base.__module__)))
    modules = {base.__module__: sys.modules.get(base.__module__) for base in libraries}
    known: set[str] = set()
    for module_name, module in modules.items():
        for code in _codes(vars(module).values() if module else (), module_name):
            known.update(code.co_names, code.co_varnames)
            known.update(text for text in code.co_consts if isinstance(text, str))
    for base in libraries:
        known |= vars(base).keys() | getattr(base, "__annotations__", {}).keys()
    return Uncompared(unkept(cls), frozenset(known - own))


class Uncompared:
    """The attributes of a class that comparing two states leaves out."""

    def __init__(self, always: frozenset[str], shown: frozenset[str] | None) -> None:
        self.always = always
        """Addresses, times and tasks, whatever they hold."""
        self.shown = shown
        """What a display keeps for itself; None if the class is no bystander."""

    def split(self, attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the attributes that are compared, and those that a display keeps for itself."""
        if not self.always and self.shown is None:
            return attributes, {}
        shown = self.shown or frozenset()
        rest = {k: v for k, v in attributes.items() if k not in self.always}
        return (
            {k: v for k, v in rest.items() if k not in shown},
            {k: v for k, v in rest.items() if k in shown},
        )


def holds_for_others(cls: type) -> bool:
    """Return True if an instance in the hands of a display is somebody else's, by its class.

    >>> import collections, logging
    >>> holds_for_others(collections.OrderedDict), holds_for_others(logging.Formatter)
    (False, False)
    """
    if _libraries(cls):
        return False
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names


_ALL = (*TRACKERS, *DISPLAYS)


def _libraries(cls: type) -> list[type]:
    """Return the classes that a class is made from and that a display or tracker defines."""
    return [base for base in cls.__mro__ if _full_name(base).startswith(_ALL)]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.lru_cache(maxsize=1000)
def class_named(name: str) -> type | None:
    """Return the class of that full name, if its module is loaded."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:n]))
        for part in parts[n:]:
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type):
            return found
    return None


def _codes(values: Iterable[Any], module: str) -> Iterator[types.CodeType]:
    """Yield the code of functions and of classes of a module, with the code inside."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, types.CodeType):
            yield one
            waiting += [part for part in one.co_consts if isinstance(part, types.CodeType)]
        elif isinstance(one, type):
            waiting += vars(one).values() if one.__module__ == module else ()
        elif isinstance(one, property):
            waiting += [one.fget, one.fset, one.fdel]
        else:
            function = getattr(one, "__wrapped__", None) or getattr(one, "__func__", one)
            if isinstance(function, types.FunctionType):
                waiting.append(function.__code__)


def _assigned(codes: Iterable[types.CodeType]) -> Iterator[str]:
    """Yield the names of the attributes that code assigns."""
    import dis

    for code in codes:
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR":
                yield instruction.argval
