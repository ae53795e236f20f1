"""Recipes by which the logger process makes a logger: from a class or function, or like an existing logger.

An existing logger cannot be copied, because most loggers have threads, files or connections. Rearview makes a
second, equal logger if the arguments of the first are known for certain; if not, an error shows the line to write.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rearview.background_logger.call_arguments import is_plain
from rearview.errors import UsageError
from rearview.model.run import SEEN

_FACTORIES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)


@dataclass(frozen=True)
class Recipe:
    """A recipe for making a logger in another process: a class or function, and its arguments."""

    name: str
    """Name of the logger in error messages."""
    factory: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    type: type | None = None
    """Class of the logger; None if it is not known before the logger is made."""
    instance: Any = None
    """The existing logger in this process; None if there is none."""
    module: Any = None
    """The module, such as mlflow, if a module is used as a logger; else None."""
    after_close: Callable[[], Any] | None = None
    """Function that the program calls after the logger is closed."""
    closes: tuple[str, ...] = ()
    """Names of methods, in addition to `close`, that end the logger."""

    def recording_hook(self, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None] | None:
        """Return the function that records calls of the logger's method `name`, or None if they are not recorded."""
        function = getattr(self.type or self.module, name, None)
        hook: Any = getattr(function, SEEN, None)
        return hook if callable(hook) else None

    def make(self) -> Any:
        """Make the logger in this process and return it."""
        return self.factory(*self.args, **self.kwargs)


def recipe_of(
    writer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, forks: bool
) -> Recipe:
    """Return the recipe for the logger that was passed to `background`; raise UsageError if it is not certain.

    `forks` says that the logger is used in this process or a fork of it, so that an existing logger can be used itself.
    """
    if isinstance(writer, _FACTORIES):
        kind = writer if isinstance(writer, type) else None
        name = str(getattr(writer, "__qualname__", type(writer).__name__))
        closes = ("finish",) if kind is None or hasattr(kind, "finish") else ()
        return Recipe(name, writer, args, dict(kwargs), type=kind, closes=closes)
    if args or kwargs:
        raise UsageError(
            f"rearview.background got a {type(writer).__name__} object and arguments for it. Give "
            "the class and its arguments, or the object alone.",
            slug="background-instance",
        )
    recipe = _recipe_from_library(writer)
    if recipe is not None:
        return recipe
    kind = type(writer)
    if forks:
        return Recipe(kind.__qualname__, lambda: writer, type=kind, instance=writer)
    attributes = getattr(writer, "__dict__", None)
    if (
        attributes is not None
        and _has_only_attributes(kind)
        and all(map(is_plain, attributes.values()))
    ):
        return Recipe(
            kind.__qualname__,
            _copy_of_attributes,
            (kind, dict(attributes)),
            type=kind,
            instance=writer,
        )
    raise UsageError(
        f"The logger {kind.__qualname__} exists already, and Rearview does not know for certain how to "
        f"make it again in another process. Let that process make it: rearview.background("
        f"{kind.__qualname__}, ...) with the arguments that you gave it. If it has no threads, "
        'rearview.background(logger, background_start="fork") copies it as it is.',
        slug="background-instance",
    )


def _has_only_attributes(kind: type) -> bool:
    """Return True if an instance of the class `kind` can be copied by copying its attributes."""
    return all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
    ) and not any("__slots__" in vars(base) for base in kind.__mro__)


def _copy_of_attributes(kind: type, attributes: dict[str, Any]) -> Any:
    copy: Any = object.__new__(kind)
    copy.__dict__.update(attributes)
    return copy


def _recipe_from_library(writer: Any) -> Recipe | None:
    """Return the recipe for a logger of W&B, MLflow or TensorBoard, or None for any other object."""
    kind = type(writer)
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    if class_name == "torch.utils.tensorboard.writer.SummaryWriter":
        return _summary_writer_recipe(writer, log_dir=os.fspath(writer.log_dir), queue="max_queue")
    if class_name == "tensorboardX.writer.SummaryWriter":
        return _summary_writer_recipe(writer, log_dir=os.fspath(writer.logdir), queue="_max_queue")
    if class_name == "wandb.sdk.wandb_run.Run":
        return Recipe(
            "wandb.Run",
            _attach,
            (writer,),
            type=kind,
            after_close=writer.finish,
            closes=("finish",),
        )
    if isinstance(writer, types.ModuleType) and writer.__name__ == "mlflow":
        run = writer.active_run() or writer.start_run()
        facts = (writer.get_tracking_uri(), run.info.run_id)
        return Recipe(
            "mlflow",
            _start_mlflow_run,
            facts,
            module=writer,
            after_close=writer.end_run,
            closes=("end_run",),
        )
    return None


def _attach(writer: Any) -> Any:
    """Return the W&B run `writer`, wrapped so that the logger process cannot end it.

    Unpickling has connected it to the service of W&B, which the program uses, too.
    """
    return Attached(writer)


class Attached:
    """Wraps a logger that the program uses, too: passes on all calls except those that would end the logger."""

    is_attached = True

    def __init__(self, writer: Any) -> None:
        self.__dict__["writer"] = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["writer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["writer"], name, value)

    def flush(self) -> None:
        """Wait until the service of W&B has received all logged values; do nothing for other loggers."""
        status = getattr(self.__dict__["writer"], "status", None)
        if callable(status):
            status()

    def close(self) -> None:
        """Flush, and do not end the logger, because the program ends it."""
        self.flush()

    finish = end_run = close


def _start_mlflow_run(uri: str, run: str) -> Any:
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.start_run(run_id=run)
    return Attached(mlflow)


def _summary_writer_recipe(writer: Any, *, log_dir: str, queue: str) -> Recipe:
    """Return a recipe for a second SummaryWriter with the options of `writer`, in its folder `log_dir`.

    TensorBoard shows the files of both as one run. `queue` is the name of the attribute with the queue size.
    """
    prefix = "_" if queue.startswith("_") else ""
    options = {
        "max_queue": getattr(writer, queue),
        "flush_secs": getattr(writer, f"{prefix}flush_secs"),
        "filename_suffix": getattr(writer, f"{prefix}filename_suffix"),
    }
    if prefix:
        options["write_to_disk"] = writer._write_to_disk  # noqa: SLF001 - there is no public name
    with contextlib.suppress(AttributeError):
        writer.close()  # flush its file; a later call would open a second file
    kind = type(writer)
    # an absolute path, because the program may change its current folder before the logger process starts
    return Recipe("SummaryWriter", kind, (os.path.abspath(log_dir),), options, type=kind)  # noqa: PTH100
