"""Capture what frameworks log by themselves: Lightning, the Hugging Face Trainer, Keras."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rearview.model.run import Origin
from rearview.runtime.capture.logger_calls import LoggerCalls
from rearview.runtime.capture.parameters import Parameters
from rearview.runtime.sandbox.entropy import after_import

_CONNECTORS = (
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector",
)
_ADDED = frozenset({"epoch", "step"})
"""Names that frameworks add to logged values; the points hold them already."""


def capture_lightning(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record what `self.log` hands to loggers, also in a trainer that has none."""

    def watch(module: ModuleType) -> None:
        def log_metrics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            metrics = args[1] if len(args) > 1 else kwargs.get("metrics")
            if isinstance(metrics, Mapping):
                trainer = args[0].trainer
                step = args[2] if len(args) > 2 else kwargs.get("step")
                if step is None:
                    step = getattr(trainer, "global_step", None)
                calls.keep(Origin.LIGHTNING, _named(metrics), step)

        calls.watch(module._LoggerConnector, "log_metrics", Origin.LIGHTNING, log_metrics)

    for name in _CONNECTORS:
        after_import(name, watch)


def capture_transformers(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record what the Trainer logs: losses, learning rate, evaluations."""

    def log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logs = args[1] if len(args) > 1 else kwargs.get("logs")
        if isinstance(logs, Mapping):
            step = getattr(getattr(args[0], "state", None), "global_step", None)
            calls.keep(Origin.TRANSFORMERS, _named(logs), step)

    after_import(
        "transformers.trainer",
        lambda module: calls.watch(module.Trainer, "log", Origin.TRANSFORMERS, log),
    )


def capture_keras(calls: LoggerCalls, parameters: Parameters) -> None:  # noqa: ARG001
    """Record the logs of each epoch of `fit`, as its `History` gets them."""

    def ended(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        epoch = args[1] if len(args) > 1 else kwargs.get("epoch")
        logs = args[2] if len(args) > 2 else kwargs.get("logs")
        if isinstance(logs, Mapping):
            calls.keep(Origin.KERAS, _named(logs), epoch)

    after_import(
        "keras.src.callbacks.history",
        lambda module: calls.watch(module.History, "on_epoch_end", Origin.KERAS, ended),
    )


def _named(logs: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in logs.items() if name not in _ADDED}
