"""State of torch training that `state_dict` does not contain: non-persistent buffers, gradients, modes, attributes.

The callbacks in this package save this state together with the random state (`rearview.capture_random_state`).
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def generators_of(loaders: Iterable[Any]) -> list[Any]:
    """Return the random generators of torch data loaders and their samplers, each generator once."""
    generators: list[Any] = []
    visited_ids: set[int] = set()
    todo = list(loaders)
    while todo:
        source = todo.pop(0)
        if source is None or id(source) in visited_ids:
            continue
        visited_ids.add(id(source))
        generator = getattr(source, "generator", None)
        if hasattr(generator, "get_state") and not any(
            generator is listed for listed in generators
        ):
            generators.append(generator)
        todo += [
            getattr(source, name, None) for name in ("batch_sampler", "sampler", "base_dataloader")
        ]
    return generators


_COUNTED = ("_update_count", "_computed", "_forward_cache")
"""Attributes of a torchmetrics metric that belong to its state, but are not in its `metric_state`."""


def read_module(module: Any) -> dict[str, Any]:
    """Return the buffers, gradients, training modes and unfinished metrics of a module and its submodules.

    The module's `state_dict` contains only the persistent buffers of all these.
    """
    return {
        "buffers": dict(module.named_buffers()),
        "gradients": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
        "training": {name: part.training for name, part in module.named_modules()},
        "metrics": {
            name: {key: vars(part)[key] for key in (*part.metric_state, *_COUNTED)}
            for name, part in module.named_modules()
            if hasattr(part, "metric_state")
        },
    }


def write_module(module: Any, state: Mapping[str, Any]) -> None:
    """Set the buffers, gradients, modes and metrics of a module, in place, to a `state` that `read_module` returned."""
    import torch

    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in state["buffers"]:
                buffer.copy_(state["buffers"][name])
    for name, parameter in module.named_parameters():
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for name, part in module.named_modules():
        part.training = state["training"].get(name, part.training)
        vars(part).update(state["metrics"].get(name, {}))


def read_attributes(obj: Any, excluded: Collection[str] = ()) -> dict[str, bytes]:
    """Return name -> pickled value of an object's attributes, except `excluded`.

    An attribute that cannot be pickled is left out, with a warning.
    """
    pickled: dict[str, bytes] = {}
    for name, value in vars(obj).items():
        if name in excluded:
            continue
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as exc:
            warnings.warn(
                f"{type(obj).__name__}.{name} is not saved: it cannot be pickled ({exc}). After an "
                "interruption it has the value that the start of the program gives it.",
                RuntimeWarning,
                stacklevel=2,
            )
    return pickled


def write_attributes(obj: Any, pickled: Mapping[str, bytes]) -> None:
    """Set the attributes of `obj` to the values in `pickled`, which `read_attributes` returned."""
    for name, data in pickled.items():
        vars(obj)[name] = pickle.loads(data)


def save(path: Path, state: Any) -> None:
    """Write the result of `state()` to a file; `state` is called only here, because a save is seldom due."""
    import torch

    torch.save(state(), path)


def load(path: Path) -> Any:
    """Return the state that `save` wrote to the file `path`, with all tensors on the CPU."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=False)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> float for those of `values` that are single numbers; all other values are left out.

    >>> scalars({"loss": 0.5, "name": "x"})
    {'loss': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return numbers
