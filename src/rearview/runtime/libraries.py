"""Training loops that live in installed libraries: which are watched, and under what names.

A user of Lightning, Keras or the Hugging Face Trainer writes no loop. The ones named here are
rewritten like the project's own, so their iterations are points. What stays apart: the globals of
such a module are not state (they are the library's program), and all other loops of the library
are left alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

from rearview.source.loops import walk_loops

Names = Mapping[str, tuple[str, ...]]
"""By function: the name of each of its loops in the order of the text; an empty one is left alone."""

_STEPS = {"_TrainingEpochLoop.run": ("step",)}
_EVALUATED = {"_EvaluationLoop.run": ("eval_step",)}
_EPOCHS = {"_FitLoop.run": ("epoch",)}
_KERAS = {
    "{}.fit": ("epoch", "step"),
    "{}.evaluate": ("eval_step",),
    "{}.predict": ("predict_step",),
}


def _keras(trainer: str) -> Names:
    return {function.format(trainer): names for function, names in _KERAS.items()}


LOOPS: Mapping[str, Names] = {
    "lightning.pytorch.loops.fit_loop": _EPOCHS,
    "lightning.pytorch.loops.training_epoch_loop": _STEPS,
    "lightning.pytorch.loops.evaluation_loop": _EVALUATED,
    "pytorch_lightning.loops.fit_loop": _EPOCHS,
    "pytorch_lightning.loops.training_epoch_loop": _STEPS,
    "pytorch_lightning.loops.evaluation_loop": _EVALUATED,
    "transformers.trainer": {
        "Trainer._inner_training_loop": ("epoch",),
        "Trainer._run_epoch": ("step", "micro_step"),
        "Trainer.evaluation_loop": ("eval_step",),
    },
    "keras.src.backend.torch.trainer": _keras("TorchTrainer"),
    "keras.src.backend.jax.trainer": _keras("JAXTrainer"),
    "keras.src.backend.tensorflow.trainer": _keras("TensorFlowTrainer"),
    "ignite.engine.engine": {
        "Engine._internal_run_legacy": ("epoch",),
        "Engine._run_once_on_dataset_legacy": ("step",),
        "Engine._internal_run_as_gen": ("epoch",),
        "Engine._run_once_on_dataset_as_gen": ("step",),
    },
    "optuna.study._optimize": {"_optimize_sequential": ("trial",)},
    "xgboost.training": {"train": ("", "round"), "cv": ("round",)},
    "sklearn.neural_network._multilayer_perceptron": {
        "BaseMultilayerPerceptron._fit_stochastic": ("epoch", "step"),
    },
}

CLOCKS = frozenset({"start_time", "time_start"})
"""Local variables of libraries that hold the time of day: they measure, and are not state."""


def loops_of(module: str, tree: ast.Module) -> dict[int, str]:
    r"""Return the ids of the loops of a library's module that are watched, by line.

    >>> text = "class Engine:\n  def _internal_run_legacy(self):\n    while True: pass"
    >>> loops_of("ignite.engine.engine", ast.parse(text))
    {3: 'ignite.engine.engine:Engine._internal_run_legacy:0:epoch'}
    """
    wanted = LOOPS.get(module, {})
    counts: dict[str, int] = {}
    found: dict[int, str] = {}
    for node, function, _ in walk_loops(tree):
        ordinal = counts[function] = counts.get(function, -1) + 1
        names = wanted.get(function, ())
        if ordinal < len(names) and names[ordinal]:
            found[node.lineno] = f"{module}:{function}:{ordinal}:{names[ordinal]}"
    return found


def _keras_state() -> Any:
    """Return what Keras keeps for the whole process: its seed generator, names given so far."""
    module = sys.modules.get("keras.src.backend.common.global_state")
    return vars(module.GLOBAL_STATE_TRACKER) if module is not None else None


def settle(frames: Iterable[FrameType], files: Collection[str]) -> None:
    """Let watched loops drop what nobody will read again, so that nobody has to save it."""
    for frame in frames:
        if frame.f_code.co_filename in files and "epoch_iterator" in frame.f_code.co_varnames:
            _settle_keras(frame.f_locals.get("epoch_iterator"))


def _settle_keras(iterator: Any) -> None:
    """Between two epochs Keras holds a loader's iterator that it replaces before using it."""
    running = getattr(iterator, "_epoch_iterator", None)
    over = isinstance(running, GeneratorType) and running.gi_frame is None
    if over and getattr(iterator, "steps_per_epoch", 0) is None:
        vars(iterator)["_current_iterator"] = None


_KEPT_BY: Mapping[str, Callable[[], Any]] = {"keras": _keras_state}


def library_roots() -> Iterator[tuple[str, Any]]:
    """Yield the state that libraries keep outside everything that the program holds, by name."""
    for name, state in _KEPT_BY.items():
        held = state()
        if held is not None:
            yield f"library::{name}", held
