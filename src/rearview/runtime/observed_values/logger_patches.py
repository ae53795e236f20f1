"""Patch other loggers to record the values that a program gives them: TensorBoard, W&B, MLflow, frameworks, `logging`.

`LoggerCalls` wraps functions of a library and turns calls of them into captured records. The library's own function
runs first, and its result is returned. If recording raises an exception, nothing more is recorded from this library,
and the error is stored with the run. Only the outermost of nested calls is recorded, so a value that a framework
passes to a logger is recorded once. Each `observe_…` function patches one library, after the program imports it.

Numbers in messages that code of the project passes to Python's `logging` are recorded if the settings ask for it.
Messages on standard output or standard error are already recorded as printed lines, so this is useful only for
messages that go to a file. A message is formatted only if its arguments are plain values, so that no code of the
program runs.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from time import thread_time
from types import ModuleType
from typing import Any

from rearview.model import Point, Step
from rearview.model.run import SEEN, Origin
from rearview.model.wording import parameter_in_text
from rearview.runtime.base_session import PointEncoder
from rearview.runtime.observed_values.assigned_scalars import number
from rearview.runtime.observed_values.captured_records import Allowance
from rearview.runtime.observed_values.parameters import Parameters
from rearview.runtime.recorder import Recorder
from rearview.runtime.sandbox.entropy import after_import
from rearview.store.records import encode_point

STEP = "step"
"""Name of the column for the step that the program passes to a logger, if it differs from the loop's iteration."""
LONGEST = 1000
"""Length in characters up to which names are recorded, and to which texts are cut."""
NAMES = 500
"""Largest number of different names of values recorded from the loggers of one run."""
_SUMMARY_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_MEDIA = ("add_histogram", "add_histogram_raw", "add_image", "add_images", "add_figure")
"""Methods of SummaryWriter whose values are read from the summary that TensorBoard encodes for its file."""
_CONNECTORS = (
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector",
)
_ADDED = frozenset({"epoch", "step"})
"""Names that frameworks add to logged values; not recorded, because points of records contain these numbers."""

After = Callable[[tuple[Any, ...], dict[str, Any]], None]


class LoggerCalls:
    """Records the values that a program passes to loggers."""

    def __init__(self, session: Recorder) -> None:
        self._session = session
        self._prefixes = PointEncoder()
        self._nested = threading.local()
        self._steps: dict[Origin, tuple[bytes, int]] = {}
        self._names: set[str] = set()
        self.media = Allowance()
        """Limits the CPU time for encoding histograms and images."""

    def watch(self, owner: Any, name: str, origin: Origin, after: After) -> None:
        """Patch the method `name` of `owner` to call `after(args, kwargs)` after each successful outermost call."""
        original = vars(owner).get(name)
        if original is None or not callable(original):
            return  # this version of the library has no such method
        nested, record_call = self._nested, self._recording_hook(origin, after)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(nested, "depth", 0)
            nested.depth = depth + 1
            try:
                answer = original(*args, **kwargs)
            finally:
                nested.depth = depth
            record_call(args, kwargs)
            return answer

        vars(call)[SEEN] = record_call
        setattr(owner, name, call)

    def watch_background_calls(self, function: Any, origin: Origin, after: After) -> None:
        """Call `after(args, kwargs)` for each call of `function` that goes through `rearview.background`."""
        if callable(function):
            setattr(function, SEEN, self._recording_hook(origin, after))

    def _recording_hook(self, origin: Origin, after: After) -> After:
        """Return a function that calls `after` while the run is recorded, except inside another wrapped call.

        After the first exception of `after`, the function does nothing any more.
        """
        nested, off = self._nested, False

        def record_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal off
            if not off and not getattr(nested, "depth", 0) and self._is_recording():
                try:
                    after(args, kwargs)
                except Exception as exc:
                    off = True
                    self._failed(origin, exc)

        return record_call

    def _failed(self, origin: Origin, exc: Exception) -> None:
        if self._session.captured is not None:
            self._session.captured.problems[origin.value] = f"{type(exc).__name__}: {exc}"

    def _is_recording(self) -> bool:
        session = self._session
        return (
            session.captured is not None
            and not session.finished
            and not session.pending
            and session.pid == os.getpid()
        )

    def record(self, origin: Origin, values: Mapping[str, Any], step: Any = None) -> None:
        """Record `values` at the current point. Outside all loops, use `step` as the point."""
        items = [(name, value) for name, value in _flat(values) if self._is_name(name)]
        step_number = number(step)
        whole_step = step_number if type(step_number) is int else None
        session = self._session
        inside = bool(session.stack) and threading.get_ident() == session.thread
        if inside:
            prefix = self._prefixes.of(session)
            last = session.stack[-1].step()
            step_differs = whole_step is not None and whole_step not in (last.index, last.value)
            if step_differs and items and self._steps.get(origin) != (prefix, whole_step):
                self._steps[origin] = (prefix, whole_step or 0)
                items.append((STEP, whole_step))
        else:
            prefix = encode_point(
                Point((Step(STEP, whole_step),)) if whole_step is not None else Point()
            )
        if items and session.captured is not None:
            session.captured.append(origin, prefix, items)

    def _is_name(self, name: str) -> bool:
        if name in self._names:
            return True
        good = name.strip() and not name.startswith("$") and "\0" not in name
        if not good or len(name) > LONGEST or len(self._names) >= NAMES:
            return False
        self._names.add(name)
        return True


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each value that can be recorded; a value in a nested mapping is named `outer.inner`."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif (recorded_value := _recorded_form(value)) is not None:
            yield name, recorded_value


def _recorded_form(value: Any) -> Any:
    """Return the number, text, histogram or image that is recorded for `value`, or None if it is not recorded."""
    plain_number = number(value)
    if plain_number is not None:
        return plain_number
    if type(value) is str:
        return value[:LONGEST]
    if type(value) is tuple and len(value) == 2:
        return value  # a histogram as (counts, edges)
    if hasattr(value, "getbands") and hasattr(value, "save"):
        return value  # an image of Pillow
    if type(value).__module__ in {"torch", "torch.nn.parameter"} and not value.dim():
        return value.item()  # the logger has already waited for an accelerator
    return None


def observe_tensorboard(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record scalars, texts, histograms, images and parameters that the program passes to TensorBoard's writers."""
    for name in _SUMMARY_WRITERS:
        after_import(name, lambda module: _watch_writer(module, calls, parameters))


def _watch_writer(module: ModuleType, calls: LoggerCalls, parameters: Parameters) -> None:
    writer, origin = module.SummaryWriter, Origin.TENSORBOARD

    def scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, value, step = _arguments(args[1:], kwargs, "tag", "scalar_value", "global_step")
        calls.record(origin, {str(tag): value}, step)

    def scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, values, step = _arguments(
            args[1:], kwargs, "main_tag", "tag_scalar_dict", "global_step"
        )
        calls.record(origin, {f"{tag}/{key}": value for key, value in dict(values).items()}, step)

    def text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, value, step = _arguments(args[1:], kwargs, "tag", "text_string", "global_step")
        calls.record(origin, {str(tag): value}, step)

    def hparams(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        settings, metrics, _ = _arguments(args[1:], kwargs, "hparam_dict", "metric_dict", "")
        parameters.record(dict(settings or {}), origin.value)
        calls.record(origin, dict(metrics or {}))

    calls.watch(writer, "add_scalar", origin, scalar)
    calls.watch(writer, "add_scalars", origin, scalars)
    calls.watch(writer, "add_text", origin, text)
    calls.watch(writer, "add_hparams", origin, hparams)
    _watch_media(module, calls)


def _watch_media(module: ModuleType, calls: LoggerCalls) -> None:
    """Record histograms and images as TensorBoard's writer encodes them in summaries for its file."""
    summaries: list[Any] = []
    file_writer: Any = module.FileWriter
    original = file_writer.add_summary

    def add_summary(self: Any, summary: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_is_media(value) for value in summary.value) and calls.media.allows():
            summaries.append(summary)
            del summaries[:-10]
        return original(self, summary, *args, **kwargs)

    file_writer.add_summary = add_summary

    def media(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = thread_time()
        _, _, step = _arguments(args[1:], kwargs, "tag", "", "global_step")
        if step is None and len(args) > 3:
            step = args[3]
        for summary in summaries:
            calls.record(Origin.TENSORBOARD, _encoded(summary), step)
        summaries.clear()
        calls.media.add(began)

    for name in _MEDIA:
        calls.watch(module.SummaryWriter, name, Origin.TENSORBOARD, media)


def _is_media(value: Any) -> bool:
    return bool(value.HasField("histo") or value.HasField("image"))


def _encoded(summary: Any) -> Mapping[str, Any]:
    """Return tag -> value of the histograms (counts, edges) and images in a summary."""
    out: dict[str, Any] = {}
    for value in summary.value:
        if value.HasField("histo"):
            out[value.tag] = _summary_histogram(value.histo)
        elif value.HasField("image") and (image := _image(value.image.encoded_image_string)):
            out[value.tag] = image
    return out


def _summary_histogram(histo: Any) -> tuple[Any, Any]:
    """Return (counts, edges) of a histogram in a summary, without the empty bins at both ends."""
    import numpy as np

    limits, counts = list(histo.bucket_limit), list(histo.bucket)
    first = next((k for k, count in enumerate(counts) if count), 0)
    last = next((k for k in range(len(counts) - 1, -1, -1) if counts[k]), len(counts) - 1)
    low = limits[first - 1] if first else min(histo.min, limits[0])
    edges = [low, *limits[first : last + 1]]
    return np.asarray(counts[first : last + 1], dtype="f8"), np.asarray(edges, dtype="f8")


def _image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image.open(io.BytesIO(data))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, Any, Any]:
    """Return the values of the three parameters `names`, passed by position or name; None for one not passed."""
    values = [*args[:3], *(kwargs.get(name) for name in names[len(args) :])]
    return values[0], values[1], values[2]


def observe_wandb(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record values and parameters that the program passes to runs of W&B."""
    logged: set[str] = set()

    def log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("data")
        if isinstance(data, Mapping):
            logged.update(map(str, data))
            step = args[2] if len(args) > 2 else kwargs.get("step")
            calls.record(Origin.WANDB, _with_histograms(data), step)

    def summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("d")
        if isinstance(data, Mapping):
            named = {(f"summary/{k}" if str(k) in logged else str(k)): v for k, v in data.items()}
            calls.record(Origin.WANDB, _with_histograms(named))

    def config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("d")
        if isinstance(data, Mapping):
            record_config(data)

    def item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del kwargs
        record_config({args[1]: args[2]})

    def record_config(data: Mapping[Any, Any]) -> None:
        public = {name: value for name, value in data.items() if not str(name).startswith("_")}
        parameters.record(public, Origin.WANDB.value)

    def watch_config(module: ModuleType) -> None:
        calls.watch(module.Config, "update", Origin.WANDB, config)
        calls.watch(module.Config, "_update", Origin.WANDB, config)
        calls.watch(module.Config, "setdefaults", Origin.WANDB, config)
        calls.watch(module.Config, "__setitem__", Origin.WANDB, item)
        module.Config.__setattr__ = module.Config.__setitem__

    def watch_init(module: ModuleType) -> None:
        real = module.init

        @functools.wraps(real)
        def init(*args: Any, **kwargs: Any) -> Any:
            run = real(*args, **kwargs)
            try:
                record_config(run.config.as_dict())
            except Exception as exc:
                parameters.failed(Origin.WANDB.value, exc)
            return run

        vars(module)["init"] = init

    after_import(
        "wandb.sdk.wandb_run", lambda module: calls.watch(module.Run, "log", Origin.WANDB, log)
    )
    after_import(
        "wandb.sdk.wandb_summary",
        lambda module: calls.watch(module.SummaryDict, "update", Origin.WANDB, summary),
    )
    after_import("wandb.sdk.wandb_config", watch_config)
    after_import("wandb", watch_init)


def _with_histograms(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Return name -> logged value; a histogram of W&B becomes (counts, edges)."""
    return {str(name): _wandb_histogram(value) for name, value in data.items()}


def _wandb_histogram(value: Any) -> Any:
    if type(value).__name__ != "Histogram" or not type(value).__module__.startswith("wandb."):
        return value
    import numpy as np

    return np.asarray(value.histogram, dtype="f8"), np.asarray(value.bins, dtype="f8")


def observe_mlflow(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record metrics and parameters that the program passes to MLflow.

    `mlflow.log_*` and autologging call methods of `MlflowClient`, which are wrapped.
    """
    logged_keys: set[str] = set()

    def metric(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs.get("key")
        value = args[3] if len(args) > 3 else kwargs.get("value")
        step = args[5] if len(args) > 5 else kwargs.get("step")
        logged_keys.add(str(key))
        # MLflow passes step 0 if the program passes no step
        calls.record(Origin.MLFLOW, {str(key): value}, step or None)

    def param(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs.get("key")
        parameters.record({key: args[3] if len(args) > 3 else kwargs.get("value")}, "mlflow")

    def batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metrics = args[2] if len(args) > 2 else kwargs.get("metrics", ())
        params = args[3] if len(args) > 3 else kwargs.get("params", ())
        if params:
            parameters.record(
                {entry.key: parameter_in_text(entry.value) for entry in params}, "mlflow"
            )
        steps: dict[Any, dict[str, Any]] = {}
        for entry in metrics or ():
            if getattr(entry, "model_id", None) and entry.key in logged_keys:
                continue  # MLflow logs a value a second time for a model that the run created
            logged_keys.add(entry.key)
            steps.setdefault(entry.step, {})[entry.key] = entry.value
        for step, values in steps.items():
            calls.record(Origin.MLFLOW, values, step or None)

    def watch(module: ModuleType) -> None:
        calls.watch(module.MlflowClient, "log_metric", Origin.MLFLOW, metric)
        calls.watch(module.MlflowClient, "log_param", Origin.MLFLOW, param)
        calls.watch(module.MlflowClient, "log_batch", Origin.MLFLOW, batch)

    def fluent_metric(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key, value, step = _fluent_arguments(args, kwargs, "key", "value", "step")
        calls.record(Origin.MLFLOW, {str(key): value}, step or None)

    def fluent_metrics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values, step, _ = _fluent_arguments(args, kwargs, "metrics", "step", "")
        calls.record(Origin.MLFLOW, dict(values), step or None)

    def fluent_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters.record(dict(_fluent_arguments(args, kwargs, "params", "", "")[0]), "mlflow")

    def fluent_param(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key, value, _ = _fluent_arguments(args, kwargs, "key", "value", "")
        parameters.record({key: value}, "mlflow")

    def watch_module(module: ModuleType) -> None:
        for name, after in (
            ("log_metric", fluent_metric), ("log_metrics", fluent_metrics),
            ("log_param", fluent_param), ("log_params", fluent_params),
        ):  # fmt: skip
            calls.watch_background_calls(getattr(module, name, None), Origin.MLFLOW, after)

    after_import("mlflow.tracking.client", watch)
    after_import("mlflow.tracking.fluent", watch_module)


def _fluent_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Return the values of the parameters `names` of `mlflow.log_…`; `args[0]` stands for a missing `self`."""
    positional = list(args[1 : 1 + len(names)])
    return positional + [kwargs.get(name) for name in names[len(positional) :]]


def observe_lightning(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record the values that Lightning's `self.log` passes to loggers, also if the trainer has no logger."""

    def watch(module: ModuleType) -> None:
        def log_metrics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            metrics = args[1] if len(args) > 1 else kwargs.get("metrics")
            if isinstance(metrics, Mapping):
                trainer = args[0].trainer
                step = args[2] if len(args) > 2 else kwargs.get("step")
                if step is None:
                    step = getattr(trainer, "global_step", None)
                calls.record(Origin.LIGHTNING, _without_added(metrics), step)

        calls.watch(module._LoggerConnector, "log_metrics", Origin.LIGHTNING, log_metrics)

    for name in _CONNECTORS:
        after_import(name, watch)


def observe_transformers(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record the values that the Hugging Face Trainer logs: losses, learning rate, evaluations."""

    def log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logs = args[1] if len(args) > 1 else kwargs.get("logs")
        if isinstance(logs, Mapping):
            step = getattr(getattr(args[0], "state", None), "global_step", None)
            calls.record(Origin.TRANSFORMERS, _without_added(logs), step)

    after_import(
        "transformers.trainer",
        lambda module: calls.watch(module.Trainer, "log", Origin.TRANSFORMERS, log),
    )


def observe_keras(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record the logs that Keras passes to its `History` after each epoch of `fit`."""

    def epoch_ended(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        epoch = args[1] if len(args) > 1 else kwargs.get("epoch")
        logs = args[2] if len(args) > 2 else kwargs.get("logs")
        if isinstance(logs, Mapping):
            calls.record(Origin.KERAS, _without_added(logs), epoch)

    after_import(
        "keras.src.callbacks.history",
        lambda module: calls.watch(module.History, "on_epoch_end", Origin.KERAS, epoch_ended),
    )


def _without_added(logs: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in logs.items() if name not in _ADDED}


def observe_logging(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record the named numbers in messages that code of the project passes to Python's `logging`."""

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = args[1] if len(args) > 1 else kwargs["record"]
        if parameters.is_project_file(record.pathname):
            from rearview.source.numbers_in_output import numbers_in  # rarely needed

            calls.record(Origin.LOGGING, numbers_in(_message(record)))

    calls.watch(logging.Logger, "handle", Origin.LOGGING, handled)


def _message(record: logging.LogRecord) -> str:
    """Return the text of a log message; empty if formatting it would run code of the program."""
    values = record.args if isinstance(record.args, tuple) else (record.args,)
    if type(record.msg) is not str:
        return ""
    if record.args and not all(
        type(argument) is str or number(argument) is not None for argument in values
    ):
        return ""
    return record.getMessage()
