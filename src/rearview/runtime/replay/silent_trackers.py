"""Experiment trackers in a replay: silent, with event files for the values that probes log.

During a replay nothing reaches TensorBoard, W&B or MLflow: the program's own values were sent when it was
recorded, and the values that a probe logs with a tracker become records (`logged_values`). If a probe logs with a
TensorBoard writer, `EventFiles` also writes these values, with a second writer of the same library, into a temporary
folder of the store. If the replay ends without a difference, this folder is renamed to `tensorboard/<run>/<replay>`.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rearview.runtime.sandbox.entropy import after_import
from rearview.source.log_calls import DICT_METHODS, OPTIONS
from rearview.store.project import EVENT_FILES

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
"""Modules that define TensorBoard's `SummaryWriter`."""
METHODS = frozenset(
    {
        *("add_scalar", "add_scalars", "add_histogram", "add_histogram_raw", "add_image"),
        *("add_images", "add_figure", "add_text", "add_audio", "add_video", "add_pr_curve"),
    }
)
"""Methods of a TensorBoard writer; if a probe calls one, the values are also written into event files."""
REAL = "_rearview_file_writer"
"""Attribute added to the modules in `_WRITERS`: the real class `FileWriter`, which `SilentWriter` replaces there."""


def logged_values(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value for the values that a call of a tracker's method `method` logs.

    >>> logged_values("add_scalar", ("loss", 0.5, 3), {}), logged_values("log", ({"a": 1},), {"step": 2})
    ({'loss': 0.5}, {'a': 1})
    >>> logged_values("add_scalars", ("loss", {"train": 1, "val": 2}), {})
    {'loss/train': 1, 'loss/val': 2}
    >>> logged_values("track", (0.5,), {"name": "loss"}), logged_values("report_scalar", ("a", "b", 7, 1), {})
    ({'loss': 0.5}, {'a/b': 7})
    >>> logged_values("log_figure", ("not a name and a value",), {})
    {}
    """
    first_argument = args[0] if args else next((kwargs[k] for k in _NAMES if k in kwargs), None)
    if method == "track":
        return {str(kwargs["name"]): args[0] if args else kwargs.get("value")}
    if method == "report_scalar" and len(args) >= 3:
        return {f"{args[0]}/{args[1]}": args[2]}
    if method == "add_scalars" and len(args) > 1:
        return {f"{first_argument}/{key}": value for key, value in args[1].items()}
    if method in DICT_METHODS or isinstance(first_argument, Mapping):
        return {str(key): value for key, value in dict(first_argument or {}).items()}
    other_values = [v for k, v in kwargs.items() if k not in {*_NAMES, *OPTIONS}]
    if method in _REVERSED and len(args) > 1:
        return {str(args[1]): args[0]}
    values = [*args[1:2], *other_values]
    return {str(first_argument): values[0]} if first_argument is not None and values else {}


_NAMES = ("tag", "key", "name", "main_tag", "metrics", "params", "dictionary", "data")
_REVERSED = {"log_text", "log_image", "log_figure"}
"""Methods of MLflow that take the value first and its name second."""


def scalar_of(value: Any) -> Any:
    """Return the number in a tensor or array without dimensions; return any other value unchanged."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def silence_trackers(folder: Path) -> None:
    """Patch experiment trackers so that they write nothing and contact no server during a replay.

    Trackers that cannot work without files write these files to `folder`.
    """
    set_tracker_variables(folder)
    for name in _WRITERS:
        after_import(name, _silence_writer)
    after_import("mlflow", _silence_mlflow)
    after_import("wandb", lambda module: _silence_wandb(module, folder))


def set_tracker_variables(folder: Path) -> None:
    """Set environment variables that make W&B print nothing and MLflow write its database to `folder`."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"] = "false"


class SilentWriter:
    """Replacement for the class `FileWriter` of TensorBoard or tensorboardX that writes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = (kwargs[name] for name in ("log_dir", "logdir", "file_prefix") if name in kwargs)
        self._log_dir = str(args[0] if args else next(named, ""))

    def get_logdir(self) -> str:
        """Return the folder to which the real writer would write."""
        return self._log_dir

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _silence_writer(module: ModuleType) -> None:
    vars(module)[REAL] = vars(module)["FileWriter"]
    vars(module)["FileWriter"] = SilentWriter
    module.SummaryWriter.add_embedding = _nothing  # it writes files without `FileWriter`


def _silence_mlflow(module: ModuleType) -> None:
    for name in ("set_tracking_uri", "set_registry_uri"):
        vars(module)[name] = _doing_nothing(vars(module)[name])


def _doing_nothing(real: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that does nothing and has the name of `real`.

    A variable of the program may hold the function (`from mlflow import set_tracking_uri`). It belongs to the state,
    which is compared with the recorded state, where the function has this name.
    """

    @functools.wraps(real)
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    return nothing


def _silence_wandb(module: ModuleType, folder: Path) -> None:
    """Patch `wandb.init` so that runs of W&B are offline and write to `folder`; disabled runs stay disabled."""
    real = module.init

    @functools.wraps(real)
    def init(*args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode") or os.environ.get("WANDB_MODE")
        if mode != "disabled":
            kwargs |= {"mode": "offline", "dir": str(folder)}
        return real(*args, **kwargs)

    vars(module)["init"] = init
    vars(module)["login"] = _doing_nothing(module.login)


class EventFiles:
    """Writes the TensorBoard event files of one replay."""

    def __init__(self, store: Path, run: str, replay: str) -> None:
        self._folder = store / EVENT_FILES / run / replay
        self._draft = self._folder.with_name(f".{replay}")
        self._writer: Any = None
        self._failed = False

    def add(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Repeat a probe's call of the writer's method `method` on a real writer; after a failure, write no more."""
        module = next((sys.modules[name] for name in _WRITERS if name in sys.modules), None)
        if method not in METHODS or self._failed or module is None or not hasattr(module, REAL):
            return
        silent = vars(module)["FileWriter"]
        vars(module)["FileWriter"] = vars(module)[REAL]
        try:
            getattr(self._open_writer(module), method)(*args, **kwargs)
        except Exception:
            self._failed = True  # no values are lost: they are also records
        finally:
            vars(module)["FileWriter"] = silent

    def _open_writer(self, module: ModuleType) -> Any:
        if self._writer is None:
            self._writer = module.SummaryWriter(str(self._draft))
        return self._writer

    def close(self, *, good: bool) -> None:
        """Close the event files; keep them if `good` (the replay ended without a difference), else remove them."""
        if self._writer is None:
            return
        try:
            self._writer.close()
            if good and not self._failed:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._draft.rename(self._folder)
        except Exception:
            self._failed = True
        shutil.rmtree(self._draft, ignore_errors=True)
