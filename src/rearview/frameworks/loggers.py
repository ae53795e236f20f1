"""Loggers for Lightning, Keras and Hugging Face: each metric that the framework logs becomes a record.

These loggers work under `rearview run` and without it. They save no checkpoints. The callbacks in the modules `keras`,
`lightning` and `transformers` of this package log and also save and resume.

::

    from rearview.frameworks.loggers import lightning_logger, keras_logger, report_to_rearview

    Trainer(logger=lightning_logger())                    # Lightning
    model.fit(x, y, callbacks=[keras_logger()])           # Keras
    report_to_rearview()                                  # Hugging Face, once, before this:
    TrainingArguments("out", report_to="rearview")
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import rearview

__all__ = ["keras_logger", "lightning_logger", "report_to_rearview"]


def lightning_logger(name: str = "rearview") -> Any:
    """Return a Lightning Logger named `name` that logs to Rearview; hyper-parameters become arguments of the run.

    Its attribute `experiment` is the module `rearview`: `self.logger.experiment.log("image", picture)`.
    """
    base, only_on_rank_zero = _lightning()

    class LightningLogger(base):  # type: ignore[misc, valid-type]  # of a library that may be absent
        """Lightning Logger that logs metrics and hyper-parameters to Rearview."""

        @property
        def name(self) -> str:
            return name

        @property
        def version(self) -> str:
            return rearview.__version__

        @property
        def experiment(self) -> Any:
            return rearview

        @only_on_rank_zero  # type: ignore[untyped-decorator]
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            plain = plain_metrics(metrics)
            if step is not None:
                plain.setdefault("global_step", step)
            rearview.log(plain)

        @only_on_rank_zero  # type: ignore[untyped-decorator]
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            plain = vars(params) if isinstance(params, argparse.Namespace) else dict(params)
            rearview.params(flat_parameters(plain))

        def log_image(self, key: str, images: list[Any], step: int | None = None, **_: Any) -> None:
            """Log images under `key`, with the interface of Lightning's W&B logger."""
            _log_each(key, images)

        def log_text(self, key: str, columns: Any = None, data: Any = None, **_: Any) -> None:
            """Log a table under `key`, with the interface of Lightning's W&B logger."""
            rearview.log(key, rearview.media.DataTable(list(columns or []), data or []))

    return LightningLogger()


def _lightning() -> tuple[Any, Any]:
    """Return (class `Logger`, decorator `rank_zero_only`) of the Lightning package that the program uses."""
    uses_old_package = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    package = "pytorch_lightning" if uses_old_package else "lightning.pytorch"
    base = importlib.import_module(f"{package}.loggers.logger")
    rank_zero = importlib.import_module(f"{package}.utilities.rank_zero")
    return base.Logger, rank_zero.rank_zero_only


def _log_each(key: str, images: list[Any]) -> None:
    for number, image in enumerate(images):
        name = key if len(images) == 1 else f"{key}/{number}"
        is_array = not (hasattr(image, "getbands") or hasattr(image, "savefig"))
        rearview.log(name, rearview.media.Image(image) if is_array else image)


def keras_logger(every_batch: bool = False) -> Any:
    """Return a Keras callback that logs metrics after each epoch and, if `every_batch`, also after each batch."""
    import keras

    class KerasLogger(keras.callbacks.Callback):
        """Keras callback that logs metrics and hyper-parameters to Rearview."""

        def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
            counts = {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
            optimizer: Any = getattr(self.model, "optimizer", None)
            config = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
            rearview.params(flat_parameters({**counts, "optimizer": config}))

        def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
            if every_batch and logs:
                rearview.log(
                    {f"batch/{name}": value for name, value in plain_metrics(logs).items()}
                )

        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            if logs:
                rearview.log(plain_metrics(logs))

    return KerasLogger()


def report_to_rearview() -> None:
    """Register Rearview with Hugging Face, so that `TrainingArguments(report_to="rearview")` logs to Rearview.

    Call this function once before TrainingArguments are created; `report_to="all"` then includes Rearview.
    """
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    class RearviewCallback(TrainerCallback):
        """Logs the values that the Trainer logs, under names that begin with `train/` or `eval/`."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                rearview.params(flat_parameters(args.to_sanitized_dict()))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and state.is_world_process_zero:
                plain = plain_metrics(integration_utils.rewrite_logs(logs))
                rearview.log({**plain, "global_step": state.global_step})

    integration_utils.INTEGRATION_TO_CALLBACK["rearview"] = RearviewCallback
    real = integration_utils.get_available_reporting_integrations
    if "rearview" not in real():
        integration_utils.get_available_reporting_integrations = lambda: [*real(), "rearview"]


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> metric; a tensor or array without dimensions becomes a number.

    >>> plain_metrics({"loss": 0.5, 3: 1})
    {'loss': 0.5, '3': 1}
    """
    return {str(name): _number(value) for name, value in metrics.items()}


def _number(value: Any) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return item()
    return value


def flat_parameters(parameters: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested parameters as one dictionary, with names joined by slashes; values that are not plain become text.

    >>> flat_parameters({"lr": 0.1, "net": {"depth": 3}, "none": None})
    {'lr': 0.1, 'net/depth': 3, 'none': None}
    """
    out: dict[str, Any] = {}
    for key, value in parameters.items():
        name = f"{prefix}{key}"
        number = _number(value)
        if isinstance(value, Mapping):
            out |= flat_parameters(value, f"{name}/")
        elif number is None or isinstance(number, (bool, int, float, str)):
            out[name] = number
        else:
            out[name] = str(number)
    return out
