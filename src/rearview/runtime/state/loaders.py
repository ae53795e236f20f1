"""Iterators of data loaders: their samplers draw again what they had drawn."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rearview.runtime.state.kinds import Kind, Look, Step, steps
from rearview.runtime.state.randomness import read_global, write_global

if TYPE_CHECKING:
    from rearview.runtime.state.reading import Reading
    from rearview.runtime.state.writing import Writing

FIRST = "_rearview_first"
"""Attribute of a loader's iterator: random state before its sampler drew first, and the draws."""


def is_loader_iterator(obj: object) -> bool:
    """Say whether it is the iterator of a torch DataLoader."""
    module = sys.modules.get("torch.utils.data.dataloader")
    return module is not None and isinstance(obj, module._BaseDataLoaderIter)


class LoaderKind(Kind):
    """The iterator of a DataLoader without workers: its sampler is drawn from again."""

    name = "loader"

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield its attributes but the sampler's iterator."""
        return steps(".", attributes(obj).items())

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the attributes of each, and what its sampler had drawn."""
        return [loader_state(o, reading) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Set the attributes; the sampler draws once its own state is restored."""
        if content is not None:
            vars(obj).update(content[0])
            writing.loaders.append((obj, content[1]))


LOADER = LoaderKind()


def attributes(obj: Any) -> dict[str, Any]:
    """Return what a loader's iterator holds, without the iterator of its sampler."""
    return {k: v for k, v in vars(obj).items() if k not in {"_sampler_iter", FIRST}}


def loader_state(obj: Any, reading: Reading) -> tuple[dict[str, Any], Any] | None:
    """Return attributes and (random state before the first draw, draws)."""
    if getattr(obj, "_num_workers", 0):
        reading.miss(obj, "a loader's iterator with workers lies partly in other processes")
        return None
    first = vars(obj).get(FIRST)
    if first is None and getattr(obj, "_num_yielded", 0) != 0:
        reading.miss(obj, "nobody saw when this iterator of a loader began to draw")
        return None
    return attributes(obj), first


def draw(obj: Any, first: tuple[Any, Any, int] | None) -> None:
    """Let the sampler of a loader's iterator draw again what it had drawn."""
    obj._sampler_iter = iter(obj._index_sampler)
    vars(obj).pop(FIRST, None)
    if first is None:
        return
    rng, own, count = first
    write_global({**read_global(), **rng})
    for one, state in zip(generators_of(obj), own, strict=True):
        one.set_state(_tensor(state))
    for _ in range(count):
        if next(obj._sampler_iter, FIRST) is FIRST:
            break
    vars(obj)[FIRST] = first


def carry_over(old: Any, new: Any, first: Any) -> None:
    """Let `new`, which stands for the same iterator as `old`, draw where `old` has come to."""
    new._sampler_iter = old._sampler_iter
    if first is not None:
        vars(new)[FIRST] = first


def _tensor(state: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def generators_of(obj: Any) -> list[Any]:
    """Return the torch generators that a loader's sampler draws from."""
    found: list[Any] = []
    todo = [obj._index_sampler]
    while todo:
        one = todo.pop()
        generator = getattr(one, "generator", None)
        if generator is not None and hasattr(generator, "get_state"):
            found.append(generator)
        inner = getattr(one, "sampler", None)
        if inner is not None and inner is not one:
            todo.append(inner)
    return found


def watch_loaders(module: types.ModuleType) -> None:
    """Note, for every loader's iterator, the random state before its sampler draws first."""
    base = module._BaseDataLoaderIter
    real = base._next_index
    if hasattr(real, "watches"):
        return

    def next_index(self: Any) -> Any:
        first = vars(self).get(FIRST)
        if first is None:
            own = [one.get_state().numpy().tobytes() for one in generators_of(self)]
            rng = {k: v for k, v in read_global().items() if k != "modes"}
            first = (rng, own, 0)
        index = real(self)
        vars(self)[FIRST] = (first[0], first[1], first[2] + 1)
        return index

    vars(next_index)["watches"] = True
    base._next_index = next_index
