"""Capture numbers in messages that the project's own code gives to Python's `logging`, on request.

Messages that reach standard output or error are printed lines already; this is for those that go to a
file only. A message is put together only if its arguments are plain values, so no code of the program
runs for it.
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

    def handled(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        record = args[1] if len(args) > 1 else given["record"]
        if parameters.is_project_file(record.pathname):
            calls.keep(Origin.LOGGING, numbers_in(_message(record)))

    calls.watch(logging.Logger, "handle", Origin.LOGGING, handled)


def _message(record: logging.LogRecord) -> str:
    """Return the text of a message; empty if only the program's own code could write it."""
    values = record.args if isinstance(record.args, tuple) else (record.args,)
    if type(record.msg) is not str:
        return ""
    if record.args and not all(type(one) is str or number(one) is not None for one in values):
        return ""
    return record.getMessage()
