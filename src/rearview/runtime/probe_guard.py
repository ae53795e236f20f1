"""Run a probe so that it changes nothing in the program, and silence trackers during a replay.

The guard restores random state, and everything else that a probe might change, after it has run.
During a replay nothing reaches TensorBoard, W&B or MLflow: the values that a probe logs there become
records, and the program's own values were sent when it was recorded.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from rearview.runtime.capture.event_files import REAL
from rearview.runtime.importer import offer, offer_value
from rearview.runtime.sandbox.entropy import after_import
from rearview.source.log_calls import MANY, OPTIONS
from rearview.source.wrap_probes import CALM, OURS, SHIELD, TRACK
from rearview.state.codecs.rng import read_global, write_global

if TYPE_CHECKING:
    from rearview.runtime.replayer import Replayer


_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


def logged_values(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by name that a call of a tracker's method logs.

    >>> logged_values("add_scalar", ("loss", 0.5, 3), {}), logged_values("log", ({"a": 1},), {"step": 2})
    ({'loss': 0.5}, {'a': 1})
    >>> logged_values("add_scalars", ("loss", {"train": 1, "val": 2}), {})
    {'loss/train': 1, 'loss/val': 2}
    >>> logged_values("track", (0.5,), {"name": "loss"}), logged_values("report_scalar", ("a", "b", 7, 1), {})
    ({'loss': 0.5}, {'a/b': 7})
    >>> logged_values("log_figure", ("not a name and a value",), {})
    {}
    """
    first = args[0] if args else next((kwargs[k] for k in _NAMES if k in kwargs), None)
    if method == "track":
        return {str(kwargs["name"]): args[0] if args else kwargs.get("value")}
    if method == "report_scalar" and len(args) >= 3:
        return {f"{args[0]}/{args[1]}": args[2]}
    if method == "add_scalars" and len(args) > 1:
        return {f"{first}/{key}": value for key, value in args[1].items()}
    if method in MANY or isinstance(first, Mapping):
        return {str(key): value for key, value in dict(first or {}).items()}
    rest = [v for k, v in kwargs.items() if k not in {*_NAMES, *OPTIONS}]
    if method in _REVERSED and len(args) > 1:
        return {str(args[1]): args[0]}
    values = [*args[1:2], *rest]
    return {str(first): values[0]} if first is not None and values else {}


_NAMES = ("tag", "key", "name", "main_tag", "metrics", "params", "dictionary", "data")
_REVERSED = {"log_text", "log_image", "log_figure"}
"""Methods of MLflow that take the value first and its name second."""


def plain(value: Any) -> Any:
    """Return a tensor or array of one element as the number it holds; other values as they are."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def silence(folder: Path) -> None:
    """Silence trackers in a replay: they write nothing and contact no server.

    `folder` receives the files of trackers that cannot work without files.
    """
    point_trackers(folder)
    for name in _WRITERS:
        after_import(name, _silence_writer)
    after_import("mlflow", _silence_mlflow)
    after_import("wandb", lambda module: _silence_wandb(module, folder))


def point_trackers(folder: Path) -> None:
    """Set the environment variables that keep trackers in `folder`."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"] = "false"


class SilentWriter:
    """Replaces the file writer of TensorBoard or tensorboardX, and writes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = (kwargs[name] for name in ("log_dir", "logdir", "file_prefix") if name in kwargs)
        self._log_dir = str(args[0] if args else next(named, ""))

    def get_logdir(self) -> str:
        """Return the folder that would be written to."""
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
    module.SummaryWriter.add_embedding = _nothing  # the only method that writes other files


def _silence_mlflow(module: ModuleType) -> None:
    for name in ("set_tracking_uri", "set_registry_uri"):
        vars(module)[name] = _nothing


def _silence_wandb(module: ModuleType, folder: Path) -> None:
    """Keep a run of W&B offline, in `folder`; a disabled one stays disabled."""
    real = module.init

    def init(*args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode") or os.environ.get("WANDB_MODE")
        if mode != "disabled":
            kwargs |= {"mode": "offline", "dir": str(folder)}
        return real(*args, **kwargs)

    vars(module)["init"] = init
    vars(module)["login"] = _nothing


def install(session: Replayer) -> None:
    """Offer the names that probes use: the guard around them, and `rearview` itself."""

    @contextmanager
    def shield(line: int, *generators: Any) -> Iterator[None]:
        del line  # the traceback has it
        before = read_global()
        kept = copy.deepcopy({k: v for k, v in session.declared.items() if k.startswith("$")})
        own = [(generator, _state(generator)) for generator in generators]
        session.probing += 1
        try:
            yield
        except Exception as exc:
            trace = exc.__traceback__  # the first entry is this generator; the probe comes next
            session.note_probe_error(exc, trace and trace.tb_next)
            raise
        finally:
            session.probing -= 1
            write_global(before)
            for name, value in kept.items():
                _take_back(session.declared[name], value)
            for generator, state in own:
                _put_back(generator, state)

    light_guard = _LightGuard(session)

    def track(method: str, *args: Any, **kwargs: Any) -> None:
        values = {name: plain(value) for name, value in logged_values(method, args, kwargs).items()}
        session.log(values, session.place(sys._getframe(1)))
        if session.events is not None and session.writes_at(session.point()):
            session.events.add(method, args, kwargs)

    def calmly(line: int) -> _LightGuard:
        del line
        return light_guard

    offer(SHIELD, shield, **{CALM: calmly, TRACK: track})
    offer_value(OURS, importlib.import_module(OURS))  # a probe may use it without importing it


class _LightGuard:
    """The guard of a probe that draws no random numbers: only marks that a probe runs."""

    __slots__ = ("session",)

    def __init__(self, session: Replayer) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.session.probing += 1

    def __exit__(
        self, kind: object, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception):
            self.session.note_probe_error(exc, trace)
        self.session.probing -= 1


def _take_back(live: Any, before: Any) -> None:
    if isinstance(live, list):
        live[:] = before
    else:
        vars(live).update(vars(before))


def _state(generator: Any) -> Any:
    """Return the state of a generator that the program holds: Python's, NumPy's or torch's."""
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    for getter in ("getstate", "get_state"):
        if hasattr(generator, getter):
            return copy.deepcopy(getattr(generator, getter)())
    return None


def _put_back(generator: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
