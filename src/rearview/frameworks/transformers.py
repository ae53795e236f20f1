"""A callback for the Hugging Face Trainer: logs, and resumes an interrupted training with bitwise equal results.

::

    trainer = Trainer(model, arguments, train_dataset=rows,
                      callbacks=[RearviewCallback("run.ckpt", checkpoint_every="10min")])
    trainer.train()

After a kill, start the same script again, without `resume_from_checkpoint`: training continues between the two
optimizer steps where the last save was made.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import transformers
import transformers.trainer as loops

import rearview
from rearview.frameworks.beyond_state_dict import (
    generators_of,
    load,
    read_attributes,
    read_module,
    save,
    scalars,
    write_attributes,
    write_module,
)

__all__ = ["RearviewCallback"]

_COUNTS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Attributes of the Trainer with running totals, which a save includes."""
_DRAW_BATCHES = "get_batch_samples"
"""Name of the Trainer's method that draws the batches of one optimizer step."""


class RearviewCallback(transformers.TrainerCallback):
    """Logs metrics; saves the state of the training between two optimizer steps, and restores it after a restart.

    Keyword arguments are passed to `rearview.Checkpointer`. With `checkpoint_file=None` the callback only logs.

    The Trainer has no hook between two complete steps, so the callback wraps the method that draws
    the batches of a step while the training runs.
    """

    def __init__(
        self, checkpoint_file: str | os.PathLike[str] | None = None, **checkpointer: Any
    ) -> None:
        self._file = checkpoint_file
        self._options = checkpointer
        self._checkpointer: rearview.Checkpointer | None = None
        self._trainer: Any = None
        self._others: list[Any] = []
        """All other callbacks of the Trainer, in order."""
        self._target: dict[str, Any] | None = None
        """The loaded state of the last save, until it is restored; None if there is none to restore."""
        self._generators: list[Any] = []
        self._epoch = 0
        self._step = 0
        self._begun: dict[str, Any] = {}
        """Random state before the current epoch."""
        self._first: dict[str, Any] = {}
        """Random state before the first step of the current epoch."""
        self._before: dict[str, Any] = {}
        """Random state before the most recent step that ran."""
        self._now: dict[str, Any] = {}
        """Random state before the next step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the last save, if there is one; wrap the Trainer's methods that run an epoch and draw batches."""
        if self._file is None:
            return
        trainer = self._trainer = _trainer()
        if not hasattr(trainer, "_run_epoch"):
            raise RuntimeError(
                f"transformers {transformers.__version__} runs all epochs in one function, which "
                "cannot be entered in the middle. Use transformers 5, or `rearview run "
                "--preemptible`, or give no checkpoint_file."
            )
        self._generators = generators_of([kwargs.get("train_dataloader")])
        handler = trainer.callback_handler
        self._others = [callback for callback in handler.callbacks if callback is not self]
        self._checkpointer = rearview.Checkpointer(self._file, save, load, **self._options)
        self._target = self._checkpointer.restore()
        if self._target is not None:
            handler.callbacks = [self]
        run_epoch, get_batches = trainer._run_epoch, trainer.get_batch_samples  # noqa: SLF001
        trainer._run_epoch = lambda **arguments: self._run_epoch(run_epoch, arguments)  # noqa: SLF001
        trainer.get_batch_samples = lambda *arguments: self._before_step(get_batches, *arguments)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the wrapping of the Trainer's methods and close the Checkpointer."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
            for name in ("_run_epoch", _DRAW_BATCHES):
                vars(self._trainer).pop(name, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the numbers that the Trainer logs, with the global step."""
        rearview.log({"global_step": state.global_step, **scalars(logs or {})})

    def _run_epoch(self, real: Any, arguments: dict[str, Any]) -> None:
        self._epoch, self._step = arguments["epoch"], 0
        target = self._target
        if target is None:
            self._begun = rearview.capture_random_state(self._generators)
            real(**arguments)
            return
        if arguments["epoch"] < target["epoch"]:
            return
        self._begun = target["begun"]
        rearview.restore_random_state(self._begun, self._generators)
        done = target["step"] * self._trainer.args.gradient_accumulation_steps
        if not done:
            real(**arguments)
            return
        # let the Trainer start its loop at this step, as if it resumed from its own checkpoint; but this callback
        # skips the earlier batches, in `_restore`, because they must be drawn in the saved random states
        arguments.update(
            resume_from_checkpoint="rearview",
            epochs_trained=arguments["epoch"],
            steps_trained_in_current_epoch=done,
        )
        skip = loops.skip_first_batches
        loops.skip_first_batches = lambda loader, count: loader  # noqa: ARG005
        self._trainer._load_rng_state = lambda checkpoint: None  # noqa: ARG005, SLF001
        try:
            real(**arguments)
        finally:
            loops.skip_first_batches = skip
            vars(self._trainer).pop("_load_rng_state", None)

    def _before_step(self, real: Any, batches: Any, count: int, device: Any) -> Any:
        checkpointer = self._checkpointer
        if checkpointer is None:
            return real(batches, count, device)
        if self._target is not None:
            self._restore(self._target, real, batches, device)
        self._now = rearview.capture_random_state(self._generators)
        if not self._step:
            self._first = self._now
        checkpointer.step(self._state)
        self._step += 1
        self._before = self._now
        return real(batches, count, device)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "format": 1,
            "model": trainer.model.state_dict(),
            "module": read_module(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "state": read_attributes(trainer.state),
            "control": read_attributes(trainer.control),
            "callbacks": [read_attributes(callback) for callback in self._others],
            "counts": {name: getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)},
            "epoch": self._epoch,
            "step": self._step,
            "begun": self._begun,
            "first": self._first,
            "before": self._before,
            "now": self._now,
        }

    def _restore(self, saved: dict[str, Any], real: Any, batches: Any, device: Any) -> None:
        """Skip the batches of earlier steps, and restore the state `saved` of the training, which `_state` returned."""
        trainer = self._trainer
        batches_per_step = trainer.args.gradient_accumulation_steps
        self._step = saved["step"]
        rearview.restore_random_state(saved["first"], self._generators)
        for step in range(self._step):
            if step == self._step - 1:
                # the loader draws one batch ahead: this call draws the first batch of the next step in this state
                rearview.restore_random_state(saved["before"], self._generators)
            real(batches, batches_per_step, device)
        trainer.model.load_state_dict(saved["model"])
        write_module(trainer.model, saved["module"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        trainer.lr_scheduler.load_state_dict(saved["scheduler"])
        if saved["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(saved["scaler"])
        write_attributes(trainer.state, saved["state"])
        write_attributes(trainer.control, saved["control"])
        for callback, attributes in zip(self._others, saved["callbacks"], strict=True):
            write_attributes(callback, attributes)
        for name, value in saved["counts"].items():
            setattr(trainer, name, value)
        trainer.callback_handler.callbacks = [*self._others, self]
        self._first, self._before = saved["first"], saved["before"]
        self._target = None
        rearview.restore_random_state(saved["now"], self._generators)


def _trainer() -> Any:
    """Return the Trainer that calls this callback, from the call stack: the Trainer is not passed to callbacks."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("Only a Trainer of Hugging Face can call RearviewCallback.")
