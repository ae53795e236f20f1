"""A Lightning callback: logs to Rearview, and resumes an interrupted training with bitwise equal results.

::

    trainer = Trainer(callbacks=[RearviewCallback("run.ckpt", checkpoint_every="10min")])
    trainer.fit(model, loader)

After a kill, start the same script again: training continues between the two batches where the last save was made.

Lightning's own checkpoints do not contain the values that `self.log` has collected since the epoch began. After a
restart, the mean loss of the epoch would be the mean of its last batches only, and a scheduler that watches this mean
would act differently. So the callback saves the collected values (`read_results`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

import rearview
from rearview.frameworks.beyond_state_dict import (
    generators_of,
    load,
    read_module,
    save,
    scalars,
    write_module,
)

_VALUES = (
    "value",
    "cumulated_batch_size",
    "_forward_cache",
    "_computed",
    "_update_count",
    "has_reset",
)
"""Attributes of a collected value (Lightning's `_ResultMetric`) that make up its state."""


def read_results(results: Any) -> list[dict[str, Any]]:
    """Return the values that `self.log` has collected in `results`, as data without references to the trainer."""
    results_data = []
    for key, metric in results.items():
        meta, sync = metric.meta, metric.meta.sync
        values = {name: getattr(metric, name) for name in _VALUES if hasattr(metric, name)}
        if not metric.is_tensor:
            values.pop("value")  # a metric of the module, which is saved with the module
        results_data.append(
            {
                "key": key,
                "meta": {f.name: getattr(meta, f.name) for f in fields(meta) if f.name != "_sync"},
                "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
                "is_tensor": metric.is_tensor,
                "held": values,
            }
        )
    return results_data


def write_results(results: Any, saved: list[dict[str, Any]], trainer: Any) -> None:
    """Set Lightning's collected values `results` to the values `saved`, which `read_results` returned."""
    module = trainer.lightning_module
    results.clear()
    for entry in saved:
        meta = _Metadata(**entry["meta"])
        meta.sync = _Sync(fn=trainer.strategy.reduce, **entry["sync"])
        metric = _ResultMetric(meta, entry["is_tensor"])
        for name, value in entry["held"].items():
            setattr(metric, name, value)
        if not entry["is_tensor"]:
            metric.value = attrgetter(meta.metric_attribute)(module)
        results[entry["key"]] = metric.to(module.device)


__all__ = ["RearviewCallback"]

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_POSITION = ("_first_loop_iter", "_current_fx")
"""Attributes of Lightning's logger connector with the position in the epoch. If they are not restored, Lightning
treats the first batch after a restore as the first batch of the epoch, and leaves the values that were collected
earlier in the epoch out of the means of the epoch."""


class RearviewCallback(Callback):
    """Logs metrics; saves the state of the whole training between two batches, and restores it after a restart.

    Keyword arguments are passed to `rearview.Checkpointer`. With `checkpoint_file=None` the callback only logs.

    Lightning calls its own hooks at the wrong time: at `on_train_batch_end` the validation and the
    schedulers of the batch have not run yet, and Lightning counts wrongly if it is restarted there. So
    the callback wraps the method that runs one batch, and saves before the batch.
    """

    def __init__(
        self, checkpoint_file: str | os.PathLike[str] | None = None, **checkpointer: Any
    ) -> None:
        super().__init__()
        self._file = checkpoint_file
        self._options = checkpointer
        self._checkpointer: rearview.Checkpointer | None = None
        self._wrapped: list[tuple[Any, str]] = []
        self._begun: dict[str, Any] = {}
        """Random state just before the current data iterator was created."""
        self._first: dict[str, Any] = {}
        """Random state before the first batch of the current epoch."""
        self._now: dict[str, Any] = {}
        """Random state before the next batch."""
        self._fresh = True
        """Whether no batch has run since `setup`, so that a save may have to be restored before the next batch."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before `fit`, create the Checkpointer, and wrap the methods of Lightning that this callback intercepts."""
        if stage != "fit" or self._file is None:
            return
        self._checkpointer = rearview.Checkpointer(self._file, save, load, **self._options)
        self._fresh = True
        signals = trainer._signal_connector  # noqa: SLF001
        self._wrap(signals, "_sigterm_notifier_fn", lambda real: _unheard(signals, real))
        loop = trainer.fit_loop
        self._wrap(loop, "setup_data", lambda real: self._noting(trainer, real))
        self._wrap(loop.epoch_loop, "on_run_start", lambda real: self._noting(trainer, real))
        self._wrap(loop.epoch_loop, "advance", lambda real: self._between(trainer, real))

    # do not rename `_noting`, `_between`, `_unheard`: recorded runs refer to their wrappers by these names
    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        setattr(owner, name, around(getattr(owner, name)))
        self._wrapped.append((owner, name))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the wrapping of Lightning's methods and close the Checkpointer."""
        self._unwrap()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the wrapping of Lightning's methods and close the Checkpointer."""
        self._unwrap()

    def _unwrap(self) -> None:
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _noting(self, trainer: Any, real: Any) -> Callable[..., Any]:
        """Return `real`, wrapped to remember the random state before the call if the call creates a data iterator."""

        def run(*args: Any) -> Any:
            before = rearview.capture_random_state(_generators(trainer))
            fetcher, iterator = _iterator_id(trainer)
            result = real(*args)
            if _iterator_id(trainer) != (fetcher, iterator):
                before.setdefault("generators", [])
                if len(before["generators"]) != len(_generators(trainer)):
                    # `real` has just created the data loaders, so their generators have not drawn yet
                    before["generators"] = rearview.capture_random_state(_generators(trainer))[
                        "generators"
                    ]
                self._begun = before
            return result

        return run

    def _between(self, trainer: Any, real: Any) -> Callable[..., Any]:
        """Return `real`, which runs one batch, wrapped to save before the batch if a save is due.

        Before the first batch, it restores the last save, if there is one.
        """

        def run(fetcher: Any) -> Any:
            checkpointer = self._checkpointer
            assert checkpointer is not None
            generators = _generators(trainer)
            if self._fresh:
                self._fresh = False
                saved = checkpointer.restore()
                if saved is not None:
                    self._restore(trainer, saved, fetcher)
            self._now = rearview.capture_random_state(generators)
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
                self._first = self._now
            checkpointer.step(lambda: self._state(trainer))
            return real(fetcher)

        return run

    def _state(self, trainer: Any) -> dict[str, Any]:
        loop = trainer.fit_loop
        connector = trainer._logger_connector  # noqa: SLF001
        return {
            "format": 1,
            "trainer": trainer._checkpoint_connector.dump_checkpoint(weights_only=False),  # noqa: SLF001
            "module": read_module(trainer.lightning_module),
            "results": read_results(loop.epoch_loop._results),  # noqa: SLF001
            "metrics": {name: getattr(connector, name) for name in (*_METRICS, *_POSITION)},
            "epoch": loop.epoch_progress.current.processed,
            "batch": loop.epoch_loop.batch_progress.current.ready,
            "should_stop": trainer.should_stop,
            "begun": self._begun,
            "first": self._first,
            "now": self._now,
        }

    def _restore(self, trainer: Any, saved: dict[str, Any], fetcher: Any) -> None:
        loop = trainer.fit_loop
        generators = _generators(trainer)
        for loader in loop._combined_loader.flattened:  # noqa: SLF001
            _set_sampler_epoch(loader, saved["epoch"])
        rearview.restore_random_state(saved["begun"], generators)
        iter(fetcher)
        rearview.restore_random_state(saved["first"], generators)
        for _ in range(saved["batch"]):
            next(fetcher)

        connector = trainer._checkpoint_connector  # noqa: SLF001
        connector._loaded_checkpoint = saved["trainer"]  # noqa: SLF001
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_training_state()
        connector._loaded_checkpoint = {}  # noqa: SLF001
        _mark_running(loop)
        loop._combined_loader_states_to_load = []  # noqa: SLF001
        write_results(loop.epoch_loop._results, saved["results"], trainer)  # noqa: SLF001
        for name, values in saved["metrics"].items():
            setattr(trainer._logger_connector, name, values)  # noqa: SLF001
        write_module(trainer.lightning_module, saved["module"])
        trainer.should_stop = saved["should_stop"]
        self._begun, self._first = saved["begun"], saved["first"]
        rearview.restore_random_state(saved["now"], generators)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss of the batch with the epoch and the global step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            position = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
            rearview.log({**position, **scalars({"loss": loss})})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the training epoch."""
        rearview.log(scalars(trainer.callback_metrics))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the validation, except of the sanity check before training."""
        if not trainer.sanity_checking:
            rearview.log(scalars(trainer.callback_metrics))


def _unheard(signals: Any, real: Any) -> Callable[..., None]:
    """Return `real`, Lightning's handler of SIGTERM, wrapped so that Lightning does not exit without a save.

    `real` still forwards the signal to other processes.
    """

    def run(*args: Any) -> None:
        real(*args)
        signals.received_sigterm = False

    return run


def _generators(trainer: Any) -> list[Any]:
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else generators_of(combined.flattened)


def _iterator_id(trainer: Any) -> tuple[int, int]:
    """Return (id of the combined data loader, id of its iterator), which change with each new iterator."""
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    return id(combined), id(getattr(combined, "_iterator", None))


def _mark_running(loop: Any) -> None:
    """Mark a loop with loaded counts, and its inner loops, as running, so that Lightning does not restart them."""
    from lightning.pytorch.loops.loop import _Loop

    loop._restarting = loop._loaded_from_state_dict = False  # noqa: SLF001
    loop._resuming_from_checkpoint = False  # noqa: SLF001
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _mark_running(inner)
