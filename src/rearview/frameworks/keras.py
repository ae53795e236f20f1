"""A Keras 3 callback: logs to Rearview, and resumes after any interruption bit for bit.

::

    model.fit(x, y, epochs=20, callbacks=[RearviewCallback("run.ckpt", checkpoint_every=100)])

After a kill, start the same script again: it continues after the batch of the last save. Only for the torch
backend; the loops of the other backends cannot be entered in the middle.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras

import rearview
from rearview.frameworks.torch_state import (
    load,
    read_attributes,
    read_module,
    read_random_state,
    save,
    scalars,
    write_attributes,
    write_module,
    write_random_state,
)

__all__ = ["RearviewCallback"]

_LEAVE = ("_model", "model", "params", "validation_data", "progbar")


class RearviewCallback(keras.callbacks.Callback):
    """Logs metrics; saves and restores all of the training, after any batch.

    Keyword arguments go to `rearview.Checkpointer`. With `checkpoint_file=None` it only logs.

    In an epoch that was interrupted the batches already trained on are drawn and dropped: no step
    is taken and no other callback is called for them.
    """

    def __init__(
        self, checkpoint_file: str | os.PathLike[str] | None = None, **checkpointer: Any
    ) -> None:
        super().__init__()
        if checkpoint_file is not None and keras.backend.backend() != "torch":
            raise RuntimeError(
                f"Keras runs on {keras.backend.backend()!r}; saves are only taken on torch. Set "
                "KERAS_BACKEND=torch, use `rearview run --preemptible`, or give no checkpoint_file."
            )
        self._file = checkpoint_file
        self._options = checkpointer
        self._checkpointer: rearview.Checkpointer | None = None
        self._list: Any = None
        self._others: list[Any] = []
        self._target: dict[str, Any] | None = None
        self._train_function: Any = None
        self._epoch = 0
        self._done = 0
        self._first: dict[str, Any] = {}
        self._logs: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Look for a save; its epoch will be the first one."""
        if self._file is None:
            return
        self._list = _callback_list()
        # last, so that a save includes what the other callbacks did with the same batch
        self._others = [one for one in self._list.callbacks if one is not self]
        self._list.callbacks = [*self._others, self]
        self._checkpointer = rearview.Checkpointer(self._file, save, load, **self._options)
        self._target = self._checkpointer.restore()
        if self._target is not None:
            self.model._initial_epoch = self._target["epoch"]  # noqa: SLF001
            self._list.callbacks = [self]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the data begins; in the interrupted epoch, start to skip batches."""
        self._epoch, self._done = epoch, 0
        if self._checkpointer is None:
            return
        target = self._target
        if target is not None:
            self.model._initial_epoch = None  # noqa: SLF001
            self._first = target["first"]
            write_random_state(self._first)
            if target["done"]:
                self._train_function = self.model.train_function
                self.model.train_function = lambda data: dict(target["logs"])  # noqa: ARG005
            else:
                self._arrive(target)
            return
        self._first = read_random_state()
        self._checkpointer.step(self._state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log, and save if due; or check whether the interrupted batch is reached."""
        self._done += 1
        if self._target is not None:
            if self._done == self._target["done"]:
                self.model.train_function = self._train_function
                self._arrive(self._target)
            return
        self._logs = scalars(logs or {})
        rearview.log({"epoch": self._epoch, "batch": batch, **self._logs})
        if self._checkpointer is not None:
            self._checkpointer.step(self._state)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the metrics of the epoch."""
        rearview.log(scalars(logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the signal handlers."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _state(self) -> dict[str, Any]:
        return {
            "format": 1,
            "variables": [v.value.detach().clone() for v in _variables(self.model)],
            "module": read_module(self.model),
            "callbacks": [read_attributes(one, _LEAVE) for one in self._others],
            "stop_training": self.model.stop_training,
            "epoch": self._epoch,
            "done": self._done,
            "logs": self._logs,
            "first": self._first,
            "now": read_random_state(),
        }

    def _arrive(self, saved: dict[str, Any]) -> None:
        """Restore the state of the save."""
        for variable, value in zip(_variables(self.model), saved["variables"], strict=True):
            variable.assign(value)
        write_module(self.model, saved["module"])
        for one, kept in zip(self._others, saved["callbacks"], strict=True):
            write_attributes(one, kept)
        self.model.stop_training = saved["stop_training"]
        self._logs = saved["logs"]
        self._list.callbacks = [*self._others, self]
        self._target = None
        write_random_state(saved["now"])


def _variables(model: Any) -> list[Any]:
    """Return every variable of the training, each once: weights, seeds, optimizer, metrics."""
    found = [*model.variables, *model.metrics_variables]
    if model.optimizer is not None:
        found += model.optimizer.variables
    from keras.src.random.seed_generator import global_seed_generator

    found.append(global_seed_generator().state)
    return list({id(one): one for one in found}.values())


def _callback_list() -> Any:
    """Return the callback list that calls us: Keras does not pass it to callbacks."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("RearviewCallback was called by something else than Keras's `fit`.")
