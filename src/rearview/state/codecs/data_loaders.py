"""Iterators of data loaders: on restore, their samplers draw again what they had drawn.

With workers, a part of the iterator is in other processes, where each item may draw from a random
generator of the worker. Such an iterator is started again in the random state in which it started,
and the items that had been taken are produced again and dropped: slow, but exact.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.rng import read_global, write_global
from rearview.state.kinds import Capturing, Kind, PathStep, Restoring, WalkRules, steps

FIRST = "_rearview_first"
"""Attribute of a loader's iterator: random state before its sampler drew first, and the draws."""
BEGUN = "_rearview_begun"
"""Attribute of one with workers: its loader, and the random state before it was made."""
WORKERS = "workers"


def is_loader_iterator(obj: object) -> bool:
    """Return True if it is the iterator of a torch DataLoader."""
    module = sys.modules.get("torch.utils.data.dataloader")
    return module is not None and issubclass(type(obj), module._BaseDataLoaderIter)


class LoaderKind(Kind):
    """The iterator of a DataLoader: its sampler is drawn from again, its workers work again."""

    name = "loader"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield its attributes but the sampler's iterator."""
        return steps(".", attributes(obj).items())

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the attributes of each, and what its sampler had drawn."""
        return [loader_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the attributes; the sampler draws once its own state is restored."""
        if content is not None:
            if not _with_workers(content[1]):
                vars(obj).update(content[0])
            restoring.loaders.append((obj, content[1]))


LOADER = LoaderKind()


def attributes(obj: Any) -> dict[str, Any]:
    """Return what a loader's iterator holds, without the iterator of its sampler."""
    if getattr(obj, "_num_workers", 0):
        return {k: v for k, v in vars(obj).items() if k in {"_dataset", "_index_sampler"}}
    return {k: v for k, v in vars(obj).items() if k not in {"_sampler_iter", FIRST}}


def loader_state(obj: Any, capturing: Capturing) -> tuple[dict[str, Any], Any] | None:
    """Return attributes and (random state before the first draw, draws)."""
    if getattr(obj, "_num_workers", 0):
        begun = vars(obj).get(BEGUN)
        if begun is None:
            capturing.miss(obj, "nobody saw when this iterator of a loader with workers began")
            return None
        if getattr(obj, "_persistent_workers", False):
            capturing.miss(obj, "the workers of this loader live on from epoch to epoch")
            return None
        taken = (obj._num_yielded, obj._base_seed)
        return {}, (WORKERS, *taken, *begun)
    first = vars(obj).get(FIRST)
    if first is None and getattr(obj, "_num_yielded", 0) != 0:
        capturing.miss(obj, "nobody saw when this iterator of a loader began to draw")
        return None
    return attributes(obj), first


def draw(obj: Any, first: Any) -> None:
    """Let the sampler of a loader's iterator draw again what it had drawn."""
    if _with_workers(first):
        _work_again(obj, first)
        return
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
    if _with_workers(first):
        if new is not old:
            from torch.utils.data._utils import signal_handling

            vars(new).update(vars(old))
            old._shutdown = True  # its workers are the other's now
            signal_handling._set_worker_pids(id(new), tuple(one.pid for one in new._workers))
            signal_handling._remove_worker_pids(id(old))
        return
    new._sampler_iter = old._sampler_iter
    if first is not None:
        vars(new)[FIRST] = first


def _with_workers(first: Any) -> bool:
    return isinstance(first, tuple) and first[:1] == (WORKERS,)


def _work_again(obj: Any, then: tuple[Any, ...]) -> None:
    """Bring an iterator with workers, the live one or a bare one, to where it had come."""
    _, count, seed, loader, rng, own = then
    if hasattr(obj, "_num_yielded") and (obj._base_seed != seed or obj._num_yielded > count):
        obj._shutdown_workers()
        vars(obj).clear()
    if not hasattr(obj, "_num_yielded"):
        write_global({**read_global(), **rng})
        for one, state in zip(_of_loader(loader), own, strict=True):
            one.set_state(_tensor(state))
        type(obj).__init__(obj, loader)
    if obj._base_seed != seed:
        raise StateError(
            f"The iterator of a loader with workers began with the seed {seed}, and begins with "
            f"{obj._base_seed} now. Replay from the start of the loop.",
            slug="state-loader",
        )
    while obj._num_yielded < count:
        next(obj)


def _of_loader(loader: Any) -> list[Any]:
    """Return the torch generators that a loader and its sampler draw from."""
    found = generators_of(loader)
    own = getattr(loader, "generator", None)
    return found if own is None or any(own is one for one in found) else [*found, own]


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
    several = module._MultiProcessingDataLoaderIter
    init = several.__init__

    def begin(self: Any, loader: Any) -> None:
        own = [one.get_state().numpy().tobytes() for one in _of_loader(loader)]
        rng = {k: v for k, v in read_global().items() if k != "modes"}
        init(self, loader)
        vars(self)[BEGUN] = (loader, rng, own)

    several.__init__ = begin
