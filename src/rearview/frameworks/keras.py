"""A Keras 3 callback: logs to Rearview, and resumes an interrupted training with bitwise equal results.

::

    model.fit(x, y, epochs=20, callbacks=[RearviewCallback("run.ckpt", checkpoint_every=100)])

After a kill, start the same script again: training continues after the batch of the last save. Saving works only on
the torch backend, because the training loops of the other backends cannot be entered in the middle.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras

import rearview
from rearview.frameworks.beyond_state_dict import (
    load,
    read_attributes,
    read_module,
    save,
    scalars,
    write_attributes,
    write_module,
)

__all__ = ["RearviewCallback"]

_EXCLUDED = ("_model", "model", "params", "validation_data", "progbar")
"""Attributes of callbacks that are not saved, because Keras sets them when training starts."""


class RearviewCallback(keras.callbacks.Callback):
    """Logs metrics; saves the state of the whole training after a batch, and restores it after a restart.

    Keyword arguments are passed to `rearview.Checkpointer`. With `checkpoint_file=None` the callback only logs.

    After a restart in the middle of an epoch, the callback draws the batches that were already used for
    training and skips them: no optimizer step is taken and no other callback is called for a skipped batch.
    """

    def __init__(
        self, checkpoint_file: str | os.PathLike[str] | None = None, **checkpointer: Any
    ) -> None:
        super().__init__()
        if checkpoint_file is not None and keras.backend.backend() != "torch":
            raise RuntimeError(
                f"Keras runs on {keras.backend.backend()!r}; this callback can save only on torch. Set "
                "KERAS_BACKEND=torch, use `rearview run --preemptible`, or give no checkpoint_file."
            )
        self._file = checkpoint_file
        self._options = checkpointer
        self._checkpointer: rearview.Checkpointer | None = None
        self._list: Any = None
        self._others: list[Any] = []
        """All other callbacks of the training, in order."""
        self._target: dict[str, Any] | None = None
        """The loaded state of the last save, until it is restored; None if there is none to restore."""
        self._train_function: Any = None
        self._epoch = 0
        self._done = 0
        """Number of batches of the current epoch that were used for training, or skipped after a restart."""
        self._first: dict[str, Any] = {}
        """Random state before the first batch of the current epoch."""
        self._logs: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Load the last save, if there is one, and let training start with the epoch of the save."""
        if self._file is None:
            return
        self._list = _callback_list()
        # move this callback to the end, so that a save includes what the other callbacks did for the same batch
        self._others = [callback for callback in self._list.callbacks if callback is not self]
        self._list.callbacks = [*self._others, self]
        self._checkpointer = rearview.Checkpointer(self._file, save, load, **self._options)
        self._target = self._checkpointer.restore()
        if self._target is not None:
            self.model._initial_epoch = self._target["epoch"]  # noqa: SLF001
            self._list.callbacks = [self]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the random state before the first batch, and save if a save is due.

        In the interrupted epoch, restore the saved state, or start to skip batches until its batch is reached.
        """
        self._epoch, self._done = epoch, 0
        if self._checkpointer is None:
            return
        target = self._target
        if target is not None:
            self.model._initial_epoch = None  # noqa: SLF001
            self._first = target["first"]
            rearview.restore_random_state(self._first)
            if target["done"]:
                self._train_function = self.model.train_function
                self.model.train_function = lambda data: dict(target["logs"])  # noqa: ARG005
            else:
                self._restore(target)
            return
        self._first = rearview.capture_random_state()
        self._checkpointer.step(self._state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log the metrics of the batch, and save if a save is due.

        While batches are skipped, only count them, and restore the saved state after the batch of the save.
        """
        self._done += 1
        if self._target is not None:
            if self._done == self._target["done"]:
                self.model.train_function = self._train_function
                self._restore(self._target)
            return
        self._logs = scalars(logs or {})
        rearview.log({"epoch": self._epoch, "batch": batch, **self._logs})
        if self._checkpointer is not None:
            self._checkpointer.step(self._state)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the metrics that Keras reports for the epoch."""
        rearview.log(scalars(logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        """Close the Checkpointer, which restores the signal handlers."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _state(self) -> dict[str, Any]:
        return {
            "format": 1,
            "variables": [v.value.detach().clone() for v in _variables(self.model)],
            "module": read_module(self.model),
            "callbacks": [read_attributes(callback, _EXCLUDED) for callback in self._others],
            "stop_training": self.model.stop_training,
            "epoch": self._epoch,
            "done": self._done,
            "logs": self._logs,
            "first": self._first,
            "now": rearview.capture_random_state(),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore the state `saved` of the whole training, which `_state` returned."""
        for variable, value in zip(_variables(self.model), saved["variables"], strict=True):
            variable.assign(value)
        write_module(self.model, saved["module"])
        for callback, attributes in zip(self._others, saved["callbacks"], strict=True):
            write_attributes(callback, attributes)
        self.model.stop_training = saved["stop_training"]
        self._logs = saved["logs"]
        self._list.callbacks = [*self._others, self]
        self._target = None
        rearview.restore_random_state(saved["now"])


def _variables(model: Any) -> list[Any]:
    """Return all Keras variables of the training, each once: weights, seeds, optimizer state, metrics."""
    variables = [*model.variables, *model.metrics_variables]
    if model.optimizer is not None:
        variables += model.optimizer.variables
    from keras.src.random.seed_generator import global_seed_generator

    variables.append(global_seed_generator().state)
    return list({id(variable): variable for variable in variables}.values())


def _callback_list() -> Any:
    """Return Keras's CallbackList that calls this callback, from the call stack: it is not passed to callbacks."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("Only Keras's `fit` can call RearviewCallback.")
