"""How the writer process makes the logger: from a class or function, or like an existing logger.

An existing logger cannot be copied, because most have threads, files or connections. Rearview makes it
again if it knows its construction arguments for certain, and otherwise refuses it with the line to write instead.
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
    """How to make a logger in another process."""

    name: str
    """Its name in error messages."""
    factory: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    type: type | None = None
    """Its class, if known before it is made."""
    instance: Any = None
    """The logger in this process, if there is one."""
    module: Any = None
    """The module that is the logger, such as mlflow."""
    after: Callable[[], Any] | None = None
    """Called in this process after the writer is closed."""
    closes: tuple[str, ...] = ()
    """Methods other than `close` that end the logger."""

    def recording_hook(self, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None] | None:
        """Return the function that records calls of a method for the run; None if the recording ignores the method."""
        function = getattr(self.type or self.module, name, None)
        hook: Any = getattr(function, SEEN, None)
        return hook if callable(hook) else None

    def make(self) -> Any:
        """Return the logger, made in this process."""
        return self.factory(*self.args, **self.kwargs)


def recipe_of(
    writer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, forks: bool
) -> Recipe:
    """Return how to make the logger that was passed to `background`; raise if that is not certain.

    With `forks`, the writer process is a copy of this one and has the logger as it is.
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
    recipe = _known(writer)
    if recipe is not None:
        return recipe
    kind = type(writer)
    if forks:
        return Recipe(kind.__qualname__, lambda: writer, type=kind, instance=writer)
    attributes = getattr(writer, "__dict__", None)
    if attributes is not None and _copies_plainly(kind) and all(map(is_plain, attributes.values())):
        return Recipe(
            kind.__qualname__, _copied, (kind, dict(attributes)), type=kind, instance=writer
        )
    raise UsageError(
        f"The logger {kind.__qualname__} exists already, and Rearview does not know for certain how to "
        f"make it again in another process. Let that process make it: rearview.background("
        f"{kind.__qualname__}, ...) with the arguments that you gave it. If it has no threads, "
        'rearview.background(logger, background_start="fork") copies it as it is.',
        slug="background-instance",
    )


def _copies_plainly(kind: type) -> bool:
    """Return True if an object of the class consists only of its attributes."""
    return all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
    ) and not any("__slots__" in vars(base) for base in kind.__mro__)


def _copied(kind: type, attributes: dict[str, Any]) -> Any:
    copy: Any = object.__new__(kind)
    copy.__dict__.update(attributes)
    return copy


def _known(writer: Any) -> Recipe | None:
    """Return the recipe of a logger whose library says how to make it again."""
    kind = type(writer)
    home = f"{kind.__module__}.{kind.__qualname__}"
    if home == "torch.utils.tensorboard.writer.SummaryWriter":
        return _tensorboard(writer, log_dir=os.fspath(writer.log_dir), queue="max_queue")
    if home == "tensorboardX.writer.SummaryWriter":
        return _tensorboard(writer, log_dir=os.fspath(writer.logdir), queue="_max_queue")
    if home == "wandb.sdk.wandb_run.Run":
        return Recipe(
            "wandb.Run", _same, (writer,), type=kind, after=writer.finish, closes=("finish",)
        )
    if isinstance(writer, types.ModuleType) and writer.__name__ == "mlflow":
        run = writer.active_run() or writer.start_run()
        facts = (writer.get_tracking_uri(), run.info.run_id)
        return Recipe(
            "mlflow", _mlflow, facts, module=writer, after=writer.end_run, closes=("end_run",)
        )
    return None


def _same(writer: Any) -> Any:
    """Return a W&B run: unpickling it connects it to the service of W&B."""
    return Attached(writer)


class Attached:
    """A logger that another process owns: all calls reach it except those that would end it."""

    is_attached = True

    def __init__(self, writer: Any) -> None:
        self.__dict__["writer"] = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["writer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["writer"], name, value)

    def flush(self) -> None:
        """Wait until the service of W&B has everything that was logged."""
        status = getattr(self.__dict__["writer"], "status", None)
        if callable(status):
            status()

    def close(self) -> None:
        """Do nothing: the program ends the logger."""
        self.flush()

    finish = end_run = close


def _mlflow(uri: str, run: str) -> Any:
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.start_run(run_id=run)
    return Attached(mlflow)


def _tensorboard(writer: Any, *, log_dir: str, queue: str) -> Recipe:
    """Return a writer for the same folder; TensorBoard reads all event files of a folder as one run."""
    prefix = "_" if queue.startswith("_") else ""
    options = {
        "max_queue": getattr(writer, queue),
        "flush_secs": getattr(writer, f"{prefix}flush_secs"),
        "filename_suffix": getattr(writer, f"{prefix}filename_suffix"),
    }
    if prefix:
        options["write_to_disk"] = writer._write_to_disk  # noqa: SLF001 - it has no other name
    with contextlib.suppress(AttributeError):
        writer.close()  # writes its values to its file; any later call would open a second file
    kind = type(writer)
    # an absolute path: the program may change its working folder before the writer process starts
    return Recipe("SummaryWriter", kind, (os.path.abspath(log_dir),), options, type=kind)  # noqa: PTH100
