"""Leaving the process so that whoever started it knows that there is more to do."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any, NoReturn


def in_notebook() -> bool:
    """Say whether this is a notebook's kernel, which must outlive a cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def leave(code: int, number: int = signal.SIGTERM) -> None:
    """End the program with `code`, or the cell of a notebook as its signal would have.

    From another thread than the main one, an exception would only end that thread: then buffers
    are flushed and the process ends at once.
    """
    if threading.current_thread() is not threading.main_thread():
        leave_at_once(code)
    if in_notebook():
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    """End the process with `code` without unwinding: its main thread may never come back."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    logging.shutdown()
    end_children()
    os._exit(code)


def end_children() -> None:
    """End the workers of this process, as Python does when it leaves by itself.

    Those of a fork server, the default from Python 3.14 on, are not its children: they would not
    see that it is gone, and would keep its output open for ever.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for one in multiprocessing.active_children():
        if one._parent_pid == os.getpid():  # not one that was there before a fork
            one.terminate()
