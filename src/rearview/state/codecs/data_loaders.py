"""Codec of the iterators of torch data loaders: on restore, the sampler repeats its recorded draws.

A *draw* is one call by which an iterator takes the next index, or batch of indices, from its sampler. A restore creates
the sampler's iterator in its first random state, and repeats the recorded number of draws.

An iterator with worker processes has a part of its state in these processes. A restore starts such an iterator
again, in the random state in which it was started first. Then the restore takes and drops as many items as the
program had taken, which is slow, but exact.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, steps
from rearview.state.codecs.rng import read_random_state, write_random_state

FIRST = "_rearview_first"
"""Attribute of a loader's iterator: (random state before the first draw, states of torch generators, number of
draws)."""
BEGUN = "_rearview_begun"
"""Attribute of an iterator with workers: (loader, random state before its creation, states of torch generators)."""
WORKERS = "workers"
"""First item of the recorded state of an iterator with workers."""


def is_loader_iterator(obj: object) -> bool:
    """Return True if `obj` is the iterator of a torch DataLoader."""
    module = sys.modules.get("torch.utils.data.dataloader")
    return module is not None and issubclass(type(obj), module._BaseDataLoaderIter)


class LoaderKind(Kind):
    """Codec of iterators of torch DataLoaders. After restoring the samplers, `restore` calls `draw`."""

    name = "loader"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each attribute that `attributes` returns."""
        return steps(".", attributes(obj).items())

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each iterator (see `loader_state`)."""
        return [loader_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the attributes, and append the iterator to `restoring.loaders`: `restore` calls `draw` for it later."""
        if content is not None:
            if not _with_workers(content[1]):
                vars(obj).update(content[0])
            restoring.loaders.append((obj, content[1]))


LOADER = LoaderKind()


def attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of a loader's iterator that are captured: all but the sampler's iterator and `FIRST`.

    For an iterator with workers, only the data set and the sampler are returned.
    """
    if getattr(obj, "_num_workers", 0):
        return {k: v for k, v in vars(obj).items() if k in {"_dataset", "_index_sampler"}}
    return {k: v for k, v in vars(obj).items() if k not in {"_sampler_iter", FIRST}}


def loader_state(obj: Any, capturing: Capturing) -> tuple[dict[str, Any], Any] | None:
    """Return (attributes, draws) of a loader's iterator; report an iterator that cannot be restored, and return None.

    The draws are (random state before the first draw, states of torch generators, number of draws), or None if there
    was no draw yet. For an iterator with workers, they are (WORKERS, items taken, seed, loader, random state, states of
    torch generators).
    """
    if getattr(obj, "_num_workers", 0):
        beginning = vars(obj).get(BEGUN)
        if beginning is None:
            capturing.report_missing(
                obj, "this iterator of a loader with workers was started unobserved"
            )
            return None
        if getattr(obj, "_persistent_workers", False):
            capturing.report_missing(obj, "this loader keeps its workers from epoch to epoch")
            return None
        progress = (obj._num_yielded, obj._base_seed)
        return {}, (WORKERS, *progress, *beginning)
    draws = vars(obj).get(FIRST)
    if draws is None and getattr(obj, "_num_yielded", 0) != 0:
        capturing.report_missing(obj, "the first draw of this loader's iterator was not observed")
        return None
    return attributes(obj), draws


def draw(obj: Any, draws: Any) -> None:
    """Repeat the recorded draws of a loader's iterator (see `loader_state`), so that it continues as in the run."""
    if _with_workers(draws):
        _start_again(obj, draws)
        return
    obj._sampler_iter = iter(obj._index_sampler)
    vars(obj).pop(FIRST, None)
    if draws is None:
        return
    rng, generator_states, count = draws
    write_random_state(rng)
    for generator, state in zip(generators_of(obj), generator_states, strict=True):
        generator.set_state(_tensor(state))
    for _ in range(count):
        if next(obj._sampler_iter, FIRST) is FIRST:
            break
    vars(obj)[FIRST] = draws


def hand_over(old: Any, new: Any, draws: Any) -> None:
    """Move the sampler's iterator, or the workers, from `old` to `new`, the same iterator restored a second time."""
    if _with_workers(draws):
        if new is not old:
            from torch.utils.data._utils import signal_handling

            vars(new).update(vars(old))
            old._shutdown = True  # the workers now belong to `new`
            signal_handling._set_worker_pids(id(new), tuple(worker.pid for worker in new._workers))
            signal_handling._remove_worker_pids(id(old))
        return
    new._sampler_iter = old._sampler_iter
    if draws is not None:
        vars(new)[FIRST] = draws


def _with_workers(draws: Any) -> bool:
    return isinstance(draws, tuple) and draws[:1] == (WORKERS,)


def _start_again(obj: Any, recorded: tuple[Any, ...]) -> None:
    """Start an iterator with workers in its recorded random state, and take as many items as the program had taken."""
    _, count, seed, loader, rng, generator_states = recorded
    if hasattr(obj, "_num_yielded") and (obj._base_seed != seed or obj._num_yielded > count):
        obj._shutdown_workers()
        vars(obj).clear()
    if not hasattr(obj, "_num_yielded"):
        write_random_state(rng)
        for generator, state in zip(_generators_of_loader(loader), generator_states, strict=True):
            generator.set_state(_tensor(state))
        type(obj).__init__(obj, loader)
    if obj._base_seed != seed:
        raise StateError(
            f"The iterator of a data loader with workers had the seed {seed} when recorded and has "
            f"{obj._base_seed} now. Replay from the start of the loop.",
            slug="state-loader",
        )
    while obj._num_yielded < count:
        next(obj)


def _generators_of_loader(loader: Any) -> list[Any]:
    """Return the torch generators from which a loader and its sampler take random numbers."""
    generators = generators_of(loader)
    loader_generator = getattr(loader, "generator", None)
    return (
        generators
        if loader_generator is None
        or any(loader_generator is generator for generator in generators)
        else [*generators, loader_generator]
    )


def _tensor(state: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def generators_of(obj: Any) -> list[Any]:
    """Return the torch generators from which the sampler of a loader or iterator takes random numbers."""
    generators: list[Any] = []
    todo = [obj._index_sampler]
    while todo:
        sampler = todo.pop()
        generator = getattr(sampler, "generator", None)
        if generator is not None and hasattr(generator, "get_state"):
            generators.append(generator)
        inner = getattr(sampler, "sampler", None)
        if inner is not None and inner is not sampler:
            todo.append(inner)
    return generators


def watch_loaders(module: types.ModuleType) -> None:
    """Patch torch so that each loader's iterator stores the random state before its first draw, and counts draws."""
    base = module._BaseDataLoaderIter
    real = base._next_index
    if hasattr(real, "watches"):
        return

    def next_index(self: Any) -> Any:
        draws = vars(self).get(FIRST)
        if draws is None:
            generator_states = [
                generator.get_state().numpy().tobytes() for generator in generators_of(self)
            ]
            rng = read_random_state()
            draws = (rng, generator_states, 0)
        index = real(self)
        vars(self)[FIRST] = (draws[0], draws[1], draws[2] + 1)
        return index

    vars(next_index)["watches"] = True
    base._next_index = next_index
    worker_iterator = module._MultiProcessingDataLoaderIter
    init = worker_iterator.__init__

    def begin(self: Any, loader: Any) -> None:
        generator_states = [
            generator.get_state().numpy().tobytes() for generator in _generators_of_loader(loader)
        ]
        rng = read_random_state()
        init(self, loader)
        vars(self)[BEGUN] = (loader, rng, generator_states)

    worker_iterator.__init__ = begin
