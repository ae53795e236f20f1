"""Training loops of libraries that are watched like the project's own.

A user of Lightning, Keras or the Hugging Face Trainer writes no training loop. The loops in `LOOPS` are
instrumented, so that their iterations are points. The globals of such a module are not state, and all other
loops of the library are left alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

from rearview.source.loops import walk_loops

Names = Mapping[str, tuple[str, ...] | Mapping[str, str]]
"""By function: the names of its loops in the order of the text; a loop with an empty name is not watched.
Or a mapping from a word in the head of a loop to its name, if releases of the library differ in loops."""

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
    "lightgbm.engine": {
        "train": {"num_boost_round": "round"},
        "cv": {"num_boost_round": "round"},
    },
    "optuna.study._optimize": {"_optimize_sequential": ("trial",)},
    "xgboost.training": {"train": ("", "round"), "cv": ("round",)},
    "sklearn.neural_network._multilayer_perceptron": {
        "BaseMultilayerPerceptron._fit_stochastic": ("epoch", "step"),
    },
}

CLOCKS = frozenset({"start_time", "time_start"})
"""Local variables of libraries that hold the time of day: measurements, not state."""


def loops_of(module: str, tree: ast.Module) -> dict[int, str]:
    r"""Return the ids of the loops of a library's module that are watched, by line.

    >>> text = "class Engine:\n  def _internal_run_legacy(self):\n    while True: pass"
    >>> loops_of("ignite.engine.engine", ast.parse(text))
    {3: 'ignite.engine.engine:Engine._internal_run_legacy:0:epoch'}
    """
    names_by_function = LOOPS.get(module, {})
    counts: dict[str, int] = {}
    loop_ids_by_line: dict[int, str] = {}
    for node, function, _ in walk_loops(tree):
        ordinal = counts[function] = counts.get(function, -1) + 1
        name = _name_of(node, ordinal, names_by_function.get(function, ()))
        if name:
            loop_ids_by_line[node.lineno] = f"{module}:{function}:{ordinal}:{name}"
    return loop_ids_by_line


def _name_of(node: ast.AST, ordinal: int, names: tuple[str, ...] | Mapping[str, str]) -> str:
    """Return the name of a loop of a function; empty if it is not watched."""
    if isinstance(names, tuple):
        return names[ordinal] if ordinal < len(names) else ""
    head = getattr(node, "iter", None) or getattr(node, "test", None)
    words = {node.id for node in ast.walk(head) if isinstance(node, ast.Name)} if head else set()
    return next((name for word, name in names.items() if word in words), "")


def _keras_state() -> Any:
    """Return the global state of Keras: its seed generator and the names given so far."""
    module = sys.modules.get("keras.src.backend.common.global_state")
    return vars(module.GLOBAL_STATE_TRACKER) if module is not None else None


def clear_library_references(frames: Iterable[FrameType], files: Collection[str]) -> None:
    """Clear references that library loops no longer need, and wait for their callbacks."""
    for frame in frames:
        if frame.f_code.co_filename in files and "epoch_iterator" in frame.f_code.co_varnames:
            variables = frame.f_locals
            _settle_keras(variables.get("epoch_iterator"))
            _settle_keras(getattr(variables.get("self"), "_eval_epoch_iterator", None))
            _await_keras(variables.get("callbacks"))


def _settle_keras(iterator: Any) -> None:
    """Drop the iterator that Keras keeps between two epochs and replaces before its next use."""
    running = getattr(iterator, "_epoch_iterator", None)
    over = isinstance(running, GeneratorType) and running.gi_frame is None
    if over and getattr(iterator, "steps_per_epoch", 0) is None:
        vars(iterator)["_current_iterator"] = None


def _await_keras(callbacks: Any) -> None:
    """Wait until the callbacks that Keras runs in threads have handled all batches so far.

    Keras itself waits for them only at the end of an epoch. Callbacks change state, so without this
    the state at a boundary would depend on timing.
    """
    futures = getattr(callbacks, "_futures", None)
    if futures:
        import concurrent.futures

        concurrent.futures.wait(list(futures))


def _pyro_state() -> Any:
    """Return the global parameter store of Pyro, which no model refers to."""
    return getattr(sys.modules.get("pyro.poutine.runtime"), "_PYRO_PARAM_STORE", None)


_KEPT_BY: Mapping[str, Callable[[], Any]] = {"pyro": _pyro_state}
_KEPT_IN_LOOPS_BY: Mapping[str, Callable[[], Any]] = {"keras": _keras_state}
"""Global state of libraries by name, used only if loops of the library are watched."""


def library_roots(*, loops: bool) -> Iterator[tuple[str, Any]]:
    """Yield the global state of libraries that no object of the program refers to, by name.

    `loops` is True if a loop of a library is watched.
    """
    for name, state in {**_KEPT_BY, **(_KEPT_IN_LOOPS_BY if loops else {})}.items():
        library_state = state()
        if library_state is not None:
            yield f"library::{name}", library_state
