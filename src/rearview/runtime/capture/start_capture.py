"""Start what captures values from a recorded program, as far as the settings ask for it."""

from __future__ import annotations

from rearview.runtime.capture.assigned_scalars import AssignedScalars
from rearview.runtime.capture.captured_records import CapturedRecords
from rearview.runtime.recorder import Prefixes, Recorder
from rearview.store.values import Put


def start_capture(session: Recorder, put: Put | None, *, attempt: int = 0) -> None:
    """Let `session` capture variables, parameters and the calls of other loggers from now on."""
    folder = session.runs.folder(session.run)
    session.captured = CapturedRecords(folder, session.run, put=put, attempt=attempt)
    settings = session.settings
    if settings.captures("assigned") and not settings.autolog:
        prefixes = Prefixes()

        def has_loops(loop: str) -> bool:
            habit = session.habits.get(loop)
            return habit is not None and habit.nests

        session.assigned = AssignedScalars(
            session.captured, lambda: prefixes.of(session), has_loops
        )
