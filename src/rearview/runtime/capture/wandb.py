"""Capture the values that a program logs to Weights & Biases: `log`, the summary and the config."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rearview.model.run import Origin
from rearview.runtime.capture.logger_calls import LoggerCalls
from rearview.runtime.capture.parameters import Parameters
from rearview.runtime.sandbox.entropy import after_import


def capture_wandb(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record what runs of W&B are given from now on."""
    logged: set[str] = set()

    def log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("data")
        if isinstance(data, Mapping):
            logged.update(map(str, data))
            step = args[2] if len(args) > 2 else kwargs.get("step")
            calls.keep(Origin.WANDB, _plain(data), step)

    def summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("d")
        if isinstance(data, Mapping):
            named = {(f"summary/{k}" if str(k) in logged else str(k)): v for k, v in data.items()}
            calls.keep(Origin.WANDB, _plain(named))

    def config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data = args[1] if len(args) > 1 else kwargs.get("d")
        if isinstance(data, Mapping):
            keep(data)

    def item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del kwargs
        keep({args[1]: args[2]})

    def keep(data: Mapping[Any, Any]) -> None:
        own = {name: value for name, value in data.items() if not str(name).startswith("_")}
        parameters.keep(own, Origin.WANDB.value)

    def watch_config(module: ModuleType) -> None:
        calls.watch(module.Config, "update", Origin.WANDB, config)
        calls.watch(module.Config, "_update", Origin.WANDB, config)
        calls.watch(module.Config, "setdefaults", Origin.WANDB, config)
        calls.watch(module.Config, "__setitem__", Origin.WANDB, item)
        module.Config.__setattr__ = module.Config.__setitem__

    def watch_init(module: ModuleType) -> None:
        real = module.init

        def init(*args: Any, **kwargs: Any) -> Any:
            run = real(*args, **kwargs)
            try:
                keep(run.config.as_dict())
            except Exception as exc:
                parameters.failed(Origin.WANDB.value, exc)
            return run

        init.__doc__, init.__wrapped__ = real.__doc__, real  # type: ignore[attr-defined]
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


def _plain(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what was logged, histograms of W&B as counts and edges."""
    return {str(name): _histogram(value) for name, value in data.items()}


def _histogram(value: Any) -> Any:
    if type(value).__name__ != "Histogram" or not type(value).__module__.startswith("wandb."):
        return value
    import numpy as np

    return np.asarray(value.histogram, dtype="f8"), np.asarray(value.bins, dtype="f8")
