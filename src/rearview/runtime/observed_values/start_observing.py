"""Start to record values that a program does not log with Rearview, as far as the settings allow."""

from __future__ import annotations

from types import FrameType

from rearview.runtime.base_session import PointEncoder
from rearview.runtime.observed_values.assigned_scalars import AssignedScalars
from rearview.runtime.observed_values.captured_records import CapturedRecords
from rearview.runtime.observed_values.logger_patches import (
    LoggerCalls,
    observe_keras,
    observe_lightning,
    observe_logging,
    observe_mlflow,
    observe_tensorboard,
    observe_transformers,
    observe_wandb,
)
from rearview.runtime.observed_values.parameters import (
    Parameters,
    observe_command_lines,
    observe_config_files,
    record_dataclasses,
)
from rearview.runtime.recorder import Recorder
from rearview.store.values_as_json import Put


def start_observing(session: Recorder, put: Put | None, *, attempt: int = 0) -> None:
    """Let `session` record variables, parameters and values given to other loggers, as the settings say."""
    folder = session.runs.folder(session.run)
    session.captured = CapturedRecords(folder, session.run, put=put, attempt=attempt)
    _observe_assigned(session)
    parameters = Parameters(session)
    if session.settings.captures("parameters"):
        observe_command_lines(parameters)
        observe_config_files(parameters)

        def record(frame: FrameType) -> None:
            try:
                record_dataclasses(frame, parameters)
            except Exception as exc:
                parameters.failed("dataclass", exc)

        session.loops_begin = record
    calls = LoggerCalls(session)
    loggers = {
        "tensorboard": observe_tensorboard,
        "wandb": observe_wandb,
        "mlflow": observe_mlflow,
        "lightning": observe_lightning,
        "transformers": observe_transformers,
        "keras": observe_keras,
        "logging": observe_logging,
    }
    for source, observe in loggers.items():
        if session.settings.captures(source):
            observe(calls, parameters)


def _observe_assigned(session: Recorder) -> None:
    if not session.settings.captures("assigned") or session.settings.autolog:
        return
    assert session.captured is not None
    prefixes = PointEncoder()

    def has_loops(loop: str) -> bool:
        history = session.histories.get(loop)
        return history is not None and history.nests

    session.assigned = AssignedScalars(session.captured, lambda: prefixes.of(session), has_loops)
