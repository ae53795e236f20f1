"""Capture numbers in messages that code of the project passes to Python's `logging`, on request.

Messages that reach standard output or error are captured as printed lines already; this is for messages
that go to a file only. A message is formatted only if its arguments are plain values, so that no code of
the program runs.
"""

from __future__ import annotations

import logging
from typing import Any

from rearview.model.run import Origin
from rearview.runtime.capture.assigned_scalars import number
from rearview.runtime.capture.logger_calls import LoggerCalls
from rearview.runtime.capture.parameters import Parameters
from rearview.source.printed_numbers import numbers_in


def capture_logging(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record the named numbers of messages from now on."""

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = args[1] if len(args) > 1 else kwargs["record"]
        if parameters.is_project_file(record.pathname):
            calls.keep(Origin.LOGGING, numbers_in(_message(record)))

    calls.watch(logging.Logger, "handle", Origin.LOGGING, handled)


def _message(record: logging.LogRecord) -> str:
    """Return the text of a message; empty if formatting it would run code of the program."""
    values = record.args if isinstance(record.args, tuple) else (record.args,)
    if type(record.msg) is not str:
        return ""
    if record.args and not all(
        type(argument) is str or number(argument) is not None for argument in values
    ):
        return ""
    return record.getMessage()
