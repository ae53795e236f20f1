"""Start the captures of a recorded program's values that the settings allow."""

from __future__ import annotations

from types import FrameType

from rearview.runtime.capture.assigned_scalars import AssignedScalars
from rearview.runtime.capture.captured_loggers import (
    LoggerCalls,
    capture_keras,
    capture_lightning,
    capture_logging,
    capture_mlflow,
    capture_tensorboard,
    capture_transformers,
    capture_wandb,
)
from rearview.runtime.capture.captured_value_writer import CapturedRecords
from rearview.runtime.capture.parameters import (
    Parameters,
    capture_command_lines,
    capture_config_files,
    keep_dataclasses,
)
from rearview.runtime.recorder import Recorder
from rearview.runtime.session import PointEncoder
from rearview.store.values_as_json import Put


def start_capture(session: Recorder, put: Put | None, *, attempt: int = 0) -> None:
    """Let `session` capture variables, parameters and the calls of other loggers from now on."""
    folder = session.runs.folder(session.run)
    session.captured = CapturedRecords(folder, session.run, put=put, attempt=attempt)
    _capture_assigned(session)
    parameters = Parameters(session)
    if session.settings.captures("parameters"):
        capture_command_lines(parameters)
        capture_config_files(parameters)

        def keep(frame: FrameType) -> None:
            try:
                keep_dataclasses(frame, parameters)
            except Exception as exc:
                parameters.failed("dataclass", exc)

        session.loops_begin = keep
    calls = LoggerCalls(session)
    loggers = {
        "tensorboard": capture_tensorboard,
        "wandb": capture_wandb,
        "mlflow": capture_mlflow,
        "lightning": capture_lightning,
        "transformers": capture_transformers,
        "keras": capture_keras,
        "logging": capture_logging,
    }
    for source, capture in loggers.items():
        if session.settings.captures(source):
            capture(calls, parameters)


def _capture_assigned(session: Recorder) -> None:
    if not session.settings.captures("assigned") or session.settings.autolog:
        return
    assert session.captured is not None
    prefixes = PointEncoder()

    def has_loops(loop: str) -> bool:
        history = session.histories.get(loop)
        return history is not None and history.nests

    session.assigned = AssignedScalars(session.captured, lambda: prefixes.of(session), has_loops)
