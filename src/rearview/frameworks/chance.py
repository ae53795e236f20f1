"""Random state of a whole process, and of the generators that data loaders draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any


def generators_of(loaders: Iterable[Any]) -> list[Any]:
    """Return the torch generators that loaders and their samplers hold, each once."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = list(loaders)
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        generator = getattr(one, "generator", None)
        if hasattr(generator, "get_state") and not any(generator is other for other in found):
            found.append(generator)
        todo += [
            getattr(one, name, None) for name in ("batch_sampler", "sampler", "base_dataloader")
        ]
    return found


def read_chance(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch, its accelerators and `generators`."""
    import torch

    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "generators": [one.get_state() for one in generators],
    }
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if hasattr(torch, "mps") and torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def write_chance(state: dict[str, Any], generators: Iterable[Any] = ()) -> None:
    """Put back what `read_chance` returned."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for one, own in zip(generators, state["generators"], strict=True):
        one.set_state(own)
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])  # noqa: NPY002 - the global state is what is meant
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])
