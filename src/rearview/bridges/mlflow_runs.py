"""Import runs from MLflow and export runs to MLflow, through MLflow's own client."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rearview.bridges.import_export import (
    Exported,
    ExportedRun,
    TrackedRun,
    TrackedValue,
    missing_library,
    nothing_found,
)
from rearview.errors import RearviewError, UsageError
from rearview.model.wording import parameter_in_text

TAG = "rearview.run"
"""Name of a tag of MLflow runs that were exported from Rearview; its value is the id of the run in Rearview."""
_BATCH_SIZE = 1000
"""Largest number of metrics that MLflow accepts in one request."""
_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 137}


def tracking_uri(place: str) -> str:
    """Return the URI of the MLflow store that a user names by `place`: a URI, a database file or a folder.

    >>> tracking_uri("http://localhost:5000"), tracking_uri("/x/mlflow.db")
    ('http://localhost:5000', 'sqlite:////x/mlflow.db')
    """
    if "://" in place:
        return place
    path = Path(place).absolute()
    if path.suffix in {".db", ".sqlite"} or path.is_file():
        return f"sqlite:///{path}"
    if (path / "mlflow.db").exists() or not any(path.glob("*/meta.yaml")):
        return f"sqlite:///{path}/mlflow.db"
    return path.as_uri()


@contextmanager
def _client(uri: str, doing: str) -> Iterator[Any]:
    """Yield an MLflow client for the store `uri`; turn MLflow's exceptions into UsageErrors, suppress its warnings.

    `doing` names the purpose in the error if mlflow is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient
    except ImportError as exc:
        raise missing_library("mlflow", "mlflow", doing) from exc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield MlflowClient(uri)
        except RearviewError:
            raise
        except Exception as exc:
            raise UsageError(
                f"MLflow cannot use {uri}: {exc}. Name its database, its mlruns folder, or the "
                "address of its server.",
                slug="mlflow-store",
            ) from exc


def read_mlflow(place: str) -> Iterator[TrackedRun]:
    """Yield the runs in the MLflow store `place`, except deleted runs and runs that Rearview has exported."""
    uri = tracking_uri(place)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise nothing_found("MLflow", place, "mlflow.db and no mlruns folder")
    with _client(uri, "Reading MLflow's store") as client:
        tracked_runs = [
            run
            for experiment in _pages(client.search_experiments)
            for run in _pages(client.search_runs, [experiment.experiment_id])
            if TAG not in run.data.tags  # not exported from Rearview
        ]
        for run in sorted(tracked_runs, key=lambda each: each.info.start_time or 0):
            yield _tracked_run(client, run, place)


def _pages(search: Any, *args: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*args, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _tracked_run(client: Any, run: Any, place: str) -> TrackedRun:
    values = [
        TrackedValue(metric.key, float(metric.value), int(metric.step), metric.timestamp / 1000)
        for key in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, key)
    ]
    ended = run.info.end_time
    return TrackedRun(
        "mlflow",
        run.info.run_id,
        (run.info.start_time or 0) / 1000,
        values,
        ended=ended / 1000 if ended else None,
        exit_code=_EXIT_CODES.get(run.info.status),
        name=run.info.run_name or "",
        arguments={name: parameter_in_text(text) for name, text in run.data.params.items()},
        source=place,
    )


def write_mlflow(exported: ExportedRun, place: str, experiment: str) -> Exported:
    """Write a run to the experiment `experiment` of the MLflow store `place`; return the result.

    Numbers and parameters that the store has already are not written again; values that are no numbers are left out.
    """
    uri = tracking_uri(place)
    run = exported.run
    with _client(uri, "Writing to MLflow's store") as client:
        from mlflow.entities import Metric, Param, RunTag

        existing_experiment = client.get_experiment_by_name(experiment)
        experiment_id = (
            existing_experiment.experiment_id
            if existing_experiment
            else client.create_experiment(experiment)
        )
        existing_runs = client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.id}'")
        if existing_runs:
            target = existing_runs[0]
        else:
            tags = {TAG: run.id, "rearview.version": run.version}
            target = client.create_run(
                experiment_id, int(run.started * 1000), tags, run_name=run.name or run.id
            )
        key = target.info.run_id
        numbers = [value for value in exported.values if isinstance(value.value, (int, float))]
        stored_metrics = {
            (metric.key, metric.step, metric.value)
            for name in {value.name for value in numbers} & set(target.data.metrics)
            for metric in client.get_metric_history(key, name)
        }
        metrics = [
            Metric(value.name, float(value.value), int(value.time * 1000), value.step)
            for value in numbers
            if (value.name, value.step, float(value.value)) not in stored_metrics
        ]
        params = [
            Param(name, str(value)[:6000])
            for name, value in sorted(run.args.items())
            if name not in target.data.params
        ]
        for start in range(0, len(metrics), _BATCH_SIZE):
            client.log_batch(key, metrics[start : start + _BATCH_SIZE])
        for start in range(0, len(params), 100):
            client.log_batch(key, params=params[start : start + 100])
        if run.note and target.data.tags.get("mlflow.note.content") != run.note:
            client.log_batch(key, tags=[RunTag("mlflow.note.content", run.note)])
        status = {"finished": "FINISHED", "running": "RUNNING"}.get(run.status, "FAILED")
        if target.info.status != status:
            ended = None if run.ended is None else int(run.ended * 1000)
            client.set_terminated(key, status, ended)
    return Exported(run.id, key, len(metrics), len(exported.values) - len(numbers))
