"""Capture the metrics and parameters that a program, or `autolog`, logs to MLflow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rearview.model.run import Origin
from rearview.model.wording import number_or_text
from rearview.runtime.capture.logger_calls import LoggerCalls
from rearview.runtime.capture.parameters import Parameters
from rearview.runtime.sandbox.entropy import after_import


def capture_mlflow(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record what clients of MLflow are given from now on; `mlflow.log_*` and autologging use one."""
    known_keys: set[str] = set()

    def metric(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs.get("key")
        value = args[3] if len(args) > 3 else kwargs.get("value")
        step = args[5] if len(args) > 5 else kwargs.get("step")
        known_keys.add(str(key))
        calls.keep(Origin.MLFLOW, {str(key): value}, step or None)  # 0: none was given

    def param(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs.get("key")
        parameters.keep({key: args[3] if len(args) > 3 else kwargs.get("value")}, "mlflow")

    def batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metrics = args[2] if len(args) > 2 else kwargs.get("metrics", ())
        params = args[3] if len(args) > 3 else kwargs.get("params", ())
        if params:
            parameters.keep({entry.key: typed(entry.value) for entry in params}, "mlflow")
        steps: dict[Any, dict[str, Any]] = {}
        for entry in metrics or ():
            if getattr(entry, "model_id", None) and entry.key in known_keys:
                continue  # MLflow logs it again for a model created by the run
            known_keys.add(entry.key)
            steps.setdefault(entry.step, {})[entry.key] = entry.value
        for step, values in steps.items():
            calls.keep(Origin.MLFLOW, values, step or None)

    def watch(module: ModuleType) -> None:
        calls.watch(module.MlflowClient, "log_metric", Origin.MLFLOW, metric)
        calls.watch(module.MlflowClient, "log_param", Origin.MLFLOW, param)
        calls.watch(module.MlflowClient, "log_batch", Origin.MLFLOW, batch)

    def one(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        key, value, step = _given(args, given, "key", "value", "step")
        calls.keep(Origin.MLFLOW, {str(key): value}, step or None)

    def many(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        values, step, _ = _given(args, given, "metrics", "step", "")
        calls.keep(Origin.MLFLOW, dict(values), step or None)

    def params(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        parameters.keep(dict(_given(args, given, "params", "", "")[0]), "mlflow")

    def one_param(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        key, value, _ = _given(args, given, "key", "value", "")
        parameters.keep({key: value}, "mlflow")

    def watch_module(module: ModuleType) -> None:
        for name, after in (
            ("log_metric", one), ("log_metrics", many), ("log_param", one_param), ("log_params", params),
        ):  # fmt: skip
            calls.watch_elsewhere(getattr(module, name, None), Origin.MLFLOW, after)

    after_import("mlflow.tracking.client", watch)
    after_import("mlflow.tracking.fluent", watch_module)


def _given(args: tuple[Any, ...], given: dict[str, Any], *names: str) -> list[Any]:
    """Return the arguments of a call of a function of MLflow, whose first is no object."""
    positional = list(args[1 : 1 + len(names)])
    return positional + [given.get(name) for name in names[len(positional) :]]


def typed(text: Any) -> Any:
    """Return the number or truth value in a parameter's text; MLflow stores only texts.

    >>> typed("0.9"), typed("12"), typed("True"), typed("adam")
    (0.9, 12, True, 'adam')
    """
    if type(text) is not str or len(text) > 40:
        return text
    if text in {"True", "False"}:
        return text == "True"
    return number_or_text(text)
