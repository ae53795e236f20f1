"""The class Checkpointer: save a value with the user's functions, at any interval, and resume from the save."""

from __future__ import annotations

import copy
import multiprocessing
import operator
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, SupportsIndex

from rearview.checkpointer import save_folder
from rearview.checkpointer.destination_and_interval import (
    Interval,
    Stopwatch,
    destination,
    interval,
    seconds,
)
from rearview.checkpointer.mirrored_saves import Archive, BackgroundTasks, CheckpointerWarning
from rearview.checkpointer.save_folder import KeepRule, Save, SaveFolder
from rearview.checkpointer.signals import Signals, in_notebook, leave, leave_at_once
from rearview.errors import RemoteError, StoreError, UsageError
from rearview.model.run import EXIT_PAUSED
from rearview.remote.base import Remote, Retry

__all__ = ["Checkpointer", "CheckpointerWarning"]

FAILURES = 3
"""Number of failed saves in a row at which a failure becomes an error instead of a warning."""

TRAPPED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that a Checkpointer handles by default."""

_STEPPING: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""The instances of `Checkpointer` in this process whose `step` was called and which are not closed."""


class Checkpointer:
    """Saves a value with a function of the user, and restores the value after an interruption of the program.

    ::

        checkpointer = Checkpointer(
            local_checkpoint_file=Path("model.pt"),
            checkpoint_function=lambda path, state: torch.save(state, path),
            restore_function=torch.load,
            checkpoint_transfer_target="s3://bucket/run-1",
            checkpoint_every="10min",
        )
        state = checkpointer.restore(default=state)
        while state["epoch"] < 100:
            train(state)
            checkpointer.step(state)

    A signal (SIGTERM, SIGUSR1, SIGINT) is remembered; the next `step` saves, transfers and exits
    with `checkpoint_exit_code`. Every parameter is explained in docs/checkpointer.md.
    """

    def __init__(
        self,
        local_checkpoint_file: str | os.PathLike[str],
        checkpoint_function: Callable[[Path, Any], Any] | None = None,
        restore_function: Callable[[Path], Any] | None = None,
        checkpoint_transfer_mode: str | None = None,
        checkpoint_transfer_target: str | os.PathLike[str] | Remote | None = None,
        xrootd_server_name: str | None = None,
        checkpoint_transfer_callback: Callable[..., Any] | None = None,
        checkpoint_transfer_callback_kwargs: Mapping[str, Any] | None = None,
        checkpoint_every: int | str | timedelta | Interval | None = 10,
        on_SIGTERM_prehook: Callable[..., Any] | None = None,  # noqa: N803  published name
        on_SIGTERM_prehook_kwargs: Mapping[str, Any] | None = None,  # noqa: N803
        checkpoint_exit_code: int = EXIT_PAUSED,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        best: str = "min",
        asynchronous: bool | str = False,
        snapshot_function: Callable[[Any], Any] = copy.deepcopy,
        signals: Iterable[int] | None = None,
        grace: float | str | None = "5min",
        exit_every: float | str | timedelta | None = None,
        pause_when: Callable[[], bool] | None = None,
        agree: Callable[[bool], bool] | None = None,
        remote_options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if asynchronous not in {True, False, "transfer"}:
            raise UsageError(
                f"asynchronous={asynchronous!r} is unknown. Give False, True (save and transfer in "
                "the background) or 'transfer' (only that).",
                slug="checkpointer-asynchronous",
            )
        self.checkpoint_function = checkpoint_function or save_folder.write
        self.restore_function = restore_function or save_folder.read
        self.on_SIGTERM_prehook = on_SIGTERM_prehook
        self.on_SIGTERM_prehook_kwargs = dict(on_SIGTERM_prehook_kwargs or {})
        self.checkpoint_value: Any = None
        self.step_counter = 0

        folder = SaveFolder(Path(local_checkpoint_file))
        self.local_checkpoint_file = folder.file
        transfer = destination(
            folder,
            mode=checkpoint_transfer_mode,
            target=checkpoint_transfer_target,
            server=xrootd_server_name,
            callback=checkpoint_transfer_callback,
            kwargs=checkpoint_transfer_callback_kwargs,
            options={"retry": retry or Retry(), **(remote_options or {})},
        )
        keep_rule = KeepRule(keep_last, keep_best, best)
        self._archive = Archive(folder, transfer.mirror, keep_rule, transfer.foreign_key)
        self._condor = transfer.condor is not None
        self.checkpoint_exit_code = checkpoint_exit_code
        self._exit_every = None if exit_every is None else seconds(exit_every)
        deadline = None if grace is None else seconds(grace)
        if transfer.condor is not None:
            # HTCondor acts on the job description, so its values replace the parameters
            self.checkpoint_exit_code = transfer.condor.exit_code
            deadline = transfer.condor.grace or deadline
            if self._exit_every is None:
                self._exit_every = 3600.0

        self._interval = interval(checkpoint_every)
        self._asynchronous, self._snapshot = asynchronous, snapshot_function
        self._pause_when, self._agree = pause_when, agree
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._failures = 0
        self._index: int | None = None
        """Number of the current step if the program passes one, else None."""
        self._rearm_at = clock()
        self._writer = BackgroundTasks(f"save {self.local_checkpoint_file.name}")
        self._sender = BackgroundTasks(f"transfer {self.local_checkpoint_file.name}")
        """Transfers saves in a second thread, so that a slow transfer does not delay the next save."""
        self.final_save_made = False
        """Whether the last save, made after a stop signal and before the exit, has begun or is done."""
        self.thread = threading.current_thread()
        """The thread that called `step` last; before the first call, the thread that made this Checkpointer."""
        if signals is None:
            # multiprocessing stops its workers by SIGTERM; a worker that handled SIGTERM would hang
            signals = TRAPPED if multiprocessing.parent_process() is None else ()
        self.signals = Signals(
            signals, grace=deadline, on_deadline=self._exit_at_deadline, clock=clock
        )
        self.signals.start()

    def step(self, value: Any, metric: Any = None) -> None:
        """Save `value` if a save is due; save and exit if a signal asked the program to stop.

        Call this when `value` is complete. `metric` ranks the save for `keep_best`. If the first argument is
        an integer and the second is given and not a number, the arguments are those of `step(i, model)` of the
        `checkpointer` package: `model` is saved under step number `i`.
        """
        value, metric, self._index = _published_order(value, metric)
        self.checkpoint_value = value
        self.thread = threading.current_thread()
        _STEPPING.add(self)
        now = self._clock()
        if now >= self._rearm_at:  # at most every 0.05 s, because a step may take only microseconds
            self.signals.rearm()
            self._rearm_at = now + 0.05
        if self._pause_when is not None and self._pause_when():
            self.signals.request(signal.SIGTERM)
        exit_requested = self.signals.requested is not None
        if self._agree is not None:
            # processes that train together exit together, at the same step
            exit_requested = self._agree(exit_requested)
            if exit_requested:
                self.signals.request(signal.SIGTERM)
        if exit_requested:
            self._save_and_exit(metric)
            return
        self._check_tasks()
        if self._interval.due(self._stopwatch.pace(self.step_counter)) and not self._writer.busy:
            with self._stopwatch.saving(), self.signals.saving():
                self._save(value, metric, background=self._asynchronous)
            if self._exit_due():
                self.signals.absorb()
                self._finish_tasks()
                self.close()
                leave(self.checkpoint_exit_code)
        self.step_counter += 1

    def checkpoint(self, value: Any = None, metric: Any = None) -> None:
        """Save `value`, transfer the save, then return. If `value` is None, save the last value passed to `step`.

        `checkpoint(i, model)` saves `model` under step number `i`, like `step(i, model)`.
        """
        value, metric, self._index = _published_order(value, metric)
        if value is None:
            value = self.checkpoint_value
        if value is None:
            raise UsageError(
                "There is no value to save yet. Give one: checkpoint(value).",
                slug="checkpointer-no-value",
            )
        self.checkpoint_value = value
        self.signals.rearm()
        self._finish_tasks()
        if self.signals.requested is not None:
            _STEPPING.add(self)
            self._save_and_exit(metric)
            return
        with self._stopwatch.saving(), self.signals.saving():
            self._save(value, metric, background=False)

    def restore(self, default: Any = None) -> Any:
        """Return the result of `restore_function` for the newest intact save, or `default`.

        Local saves and saves at the remote are compared; the one made last is the newest. For a damaged
        save there is a warning, and the save before it is used. Return `default` if no save exists. Raise if
        saves exist and all are damaged, or if the remote cannot be reached: a long run must not silently
        start from the beginning.
        """
        path = self.get_checkpoint()
        return default if path is None else self.restore_function(path)

    def get_checkpoint(self) -> Path | None:
        """Return a path to the newest intact save, or None if there is no save; raise if all saves are damaged.

        The save is fetched from the remote if needed. `local_checkpoint_file` becomes a link to the save.
        """
        self._finish_tasks()
        return self._archive.newest()

    def transfer_checkpoint(self) -> None:
        """Send the newest save to the remote if it is not there yet; raise if the transfer fails."""
        self._finish_tasks()
        self._archive.push_newest()

    def transfer_checkpoint_files(self) -> None:
        """Call `transfer_checkpoint`; the published package has this method under this name."""
        self.transfer_checkpoint()

    @property
    def checkpoint_exists(self) -> bool:
        """Whether a save exists in the local folder or at the remote; it may be damaged."""
        return self._archive.exists

    def clean_up_local_checkpoint_files(self) -> None:
        """Remove all local saves if this process has sent the newest to the remote or fetched it; else keep all."""
        self._archive.clean_up()

    def wait(self) -> None:
        """Wait until all saves so far are written and transferred.

        If one failed, warn; raise if no earlier save exists or several saves in a row failed.
        """
        self._finish_tasks()
        self._check_tasks()

    def close(self) -> None:
        """Wait for the running saves and transfers, and restore the signal handlers of the program."""
        self._wait_for_tasks()
        self.signals.stop()
        _STEPPING.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self, value: Any, metric: float | None, *, background: bool | str) -> None:
        step = self.step_counter if self._index is None else self._index
        try:
            counter = self._archive.next_counter()
        except RemoteError as exc:
            self._handle_failed_transfer(exc)
            counter = self._archive.counter
        if background is True:
            value = self._snapshot(value)

        def write() -> Save:
            return self._archive.write(
                lambda path: self.checkpoint_function(path, value),
                counter=counter,
                step=step,
                metric=metric,
            )

        def write_and_send() -> None:
            write()
            self._failures = 0
            self._archive.prune()
            if self._archive.mirror is not None:
                self._sender.submit(self._archive.deliver_kept)

        try:
            if background is True:
                self._writer.submit(write_and_send)
            elif background == "transfer":
                write_and_send()
            else:
                save = write()
                self._failures = 0
                self._archive.deliver(save)
        except Exception as exc:
            self._handle_failure(exc)

    def _handle_failed_transfer(self, exc: RemoteError) -> None:
        """Warn and continue if a transfer has succeeded in this process; else raise `exc`.

        A run must not train for days if its saves can never reach their target.
        """
        if not self._archive.delivered:
            raise exc
        warnings.warn(
            f"The save of step {self.step_counter} is here but not at the target: {exc} The next "
            "save tries again.",
            CheckpointerWarning,
            stacklevel=4,
        )

    def _handle_failure(self, exc: Exception) -> None:
        """Warn and continue if an earlier save exists and fewer than `FAILURES` saves in a row failed; else raise.

        A disk that is full for an hour should not end a training of days.
        """
        if isinstance(exc, RemoteError):
            self._handle_failed_transfer(exc)
            return
        self._failures += 1
        if not self._archive.folder.saves() or self._failures >= FAILURES:
            raise exc
        warnings.warn(
            f"The save of step {self.step_counter} failed ({type(exc).__name__}: {exc}). The one "
            "before it stays; the next save tries again.",
            CheckpointerWarning,
            stacklevel=4,
        )

    def _wait_for_tasks(self) -> None:
        self._writer.wait()  # before `_sender`, because tasks of `_writer` submit tasks to `_sender`
        self._sender.wait()

    def _finish_tasks(self) -> None:
        self._wait_for_tasks()
        self._check_tasks()

    def _check_tasks(self) -> None:
        for tasks in (self._writer, self._sender):
            try:
                tasks.check()
            except Exception as exc:
                self._handle_failure(exc)

    def _exit_due(self) -> bool:
        return self._exit_every is not None and self._stopwatch.age >= self._exit_every

    def _save_and_exit(self, metric: float | None) -> None:
        number = self.signals.requested or signal.SIGTERM
        if not self.final_save_made:
            self.signals.settle()
            self.signals.absorb()
            self.final_save_made = True
            self._make_final_save(metric)
            other_checkpointers = [
                checkpointer
                for checkpointer in _STEPPING
                if checkpointer is not self
                and not checkpointer.final_save_made
                and checkpointer.thread.is_alive()
            ]
            # each of these saves in its next call of `step`, with a complete value
            if other_checkpointers:
                for checkpointer in other_checkpointers:
                    checkpointer.signals.request(number)
                return
        checkpointers = list(_STEPPING)
        continues = in_notebook() and number == signal.SIGINT
        for checkpointer in checkpointers:
            if continues:
                checkpointer.final_save_made = False
                checkpointer.signals.clear()
            else:
                checkpointer.close()
        leave(self._code(number), number)

    def _make_final_save(self, metric: float | None) -> None:
        if self.on_SIGTERM_prehook is not None:
            try:
                self.on_SIGTERM_prehook(**self.on_SIGTERM_prehook_kwargs)
            except Exception as exc:
                warnings.warn(
                    f"on_SIGTERM_prehook failed ({type(exc).__name__}: {exc}); the save continues.",
                    CheckpointerWarning,
                    stacklevel=4,
                )
        self._finish_tasks()
        self._save(self.checkpoint_value, metric, background=False)
        if not in_notebook():
            self.clean_up_local_checkpoint_files()

    def _code(self, number: int) -> int:
        # HTCondor puts a job on hold if the job exits with the checkpoint code but has no checkpoint
        if self._condor and not self._archive.folder.saves():
            return 128 + number
        return self.checkpoint_exit_code

    def _exit_at_deadline(self, number: signal.Signals) -> None:
        """Send the newest save to the remote and exit the process; in a notebook, do nothing.

        A thread of `self.signals` calls this at the deadline after stop signal `number`.
        """
        if in_notebook():
            return
        try:
            self._wait_for_tasks()
            self._archive.push_newest()
        except (RemoteError, StoreError, OSError) as exc:
            warnings.warn(f"At the deadline: {exc}", CheckpointerWarning, stacklevel=1)
        finally:
            leave_at_once(self._code(number))


def _published_order(value: Any, metric: Any) -> tuple[Any, float | None, int | None]:
    """Return (value, metric, step number) for the arguments of `step(value, metric)` or `step(i, value)`.

    The metric and the step number are None if the call does not give them.

    >>> _published_order({"w": 1}, 0.5), _published_order(7, {"w": 1}), _published_order(7, None)
    (({'w': 1}, 0.5, None), ({'w': 1}, None, 7), (7, None, None))
    """
    if metric is None:
        return value, None, None
    try:
        return value, _number(metric), None
    except (TypeError, ValueError, RuntimeError):
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return metric, None, operator.index(value)
        raise UsageError(
            f"The metric is {type(metric).__name__}, which is not a number. Call step(value), "
            "step(value, metric=loss), or step(i, value) with the number of the step first.",
            slug="checkpointer-metric",
        ) from None


def _number(metric: Any) -> float:
    if isinstance(metric, str | bytes):
        raise TypeError
    return float(metric)
