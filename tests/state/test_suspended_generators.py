"""Generators and iterators of loaders are kept in the middle and go on exactly."""

import ast
import builtins
import random
import sys
import types

import pytest
import torch

from rearview.source.instrument import HOOK, ITER, WALK, instrument
from rearview.state.codecs import data_loaders
from rearview.state.codecs.suspended_generators import LoopIterator, sources_of


@pytest.fixture
def made(monkeypatch):
    """Return a function that compiles a module as the runtime does and returns its names."""
    monkeypatch.setitem(builtins.__dict__, WALK, LoopIterator)
    monkeypatch.setitem(builtins.__dict__, ITER, iter)
    monkeypatch.setitem(builtins.__dict__, HOOK, lambda site, it: it)

    def make(text):
        tree = ast.parse(text)
        instrument(tree, "t.py")
        module = types.ModuleType("test_theirs")
        vars(module).update(random=random, torch=torch)
        monkeypatch.setitem(sys.modules, "test_theirs", module)
        exec(compile(tree, "t.py", "exec"), vars(module))
        return module

    return make


CYCLE = """
def cycle(items):
    while True:
        order = list(items)
        random.shuffle(order)
        for item in order:
            yield item
"""


def test_a_generator_that_shuffles_continues_in_its_own_order(made, resumes):
    module = made(CYCLE)

    def step(names, i):
        random.random()
        return [next(names["it"]) for _ in range(3)]

    resumes(lambda: {"it": module.cycle(range(7))}, step, at=4, stop=9)


def test_a_generator_held_by_enumerate_continues(made, resumes):
    module = made(CYCLE)
    resumes(
        lambda: {"it": enumerate(module.cycle(range(4)))},
        lambda names, i: next(names["it"]),
        at=3,
        stop=9,
    )


def test_a_generator_in_a_generator_continues(made, resumes):
    module = made(
        CYCLE
        + """
def pairs(source):
    before = None
    for item in source:
        if before is not None:
            yield before, item
        before = item

def chained(a, b):
    yield from a
    yield from b
"""
    )

    def setup():
        return {
            "it": module.pairs(module.cycle(range(5))),
            "both": module.chained(iter(range(3)), module.cycle("ab")),
        }

    resumes(setup, lambda names, i: (next(names["it"]), next(names["both"])), at=4, stop=9)


def test_two_yields_of_one_generator_are_distinguished(made, resumes):
    module = made(
        """
def steps():
    n = 0
    while True:
        n += 1
        yield "up", n
        if n % 3 == 0:
            for k in range(2):
                yield "rest", k
"""
    )
    for at in range(1, 8):
        resumes(
            lambda: {"it": module.steps()}, lambda names, i: next(names["it"]), at=at, stop=at + 7
        )


def test_a_generator_made_in_the_loop_is_made_again(made, resumes):
    module = made(CYCLE)

    def step(names, i):
        if i % 4 == 0:
            names["it"] = module.cycle(range(i, i + 6))
        return next(names["it"])

    resumes(lambda: {"cycle": module.cycle, "it": None}, step, at=6, stop=12, stale_differs=False)


def test_a_loader_with_its_own_generator_continues(resumes):
    data_loaders.watch_loaders(torch.utils.data.dataloader)

    def setup():
        own = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(
            list(range(9)), batch_size=2, shuffle=True, generator=own
        )
        return {"loader": loader, "it": iter(loader), "own": own}

    def step(names, i):
        try:
            return next(names["it"]).tolist()
        except StopIteration:
            names["it"] = iter(names["loader"])
            return next(names["it"]).tolist()

    for at in (2, 5, 7):
        resumes(setup, step, at=at, stop=at + 6)


def test_the_generators_that_feed_a_loop_are_found_behind_their_wrappers(made):
    module = made(CYCLE)
    source = module.cycle(range(3))
    wrapped = enumerate(zip(source, range(10), strict=False))
    next(wrapped)
    assert sources_of(wrapped, lambda name: name == "test_theirs") == [source]


def test_a_loop_iterator_forwards_send_and_close_only_through_yield_from(made):
    module = made(
        """
def echo():
    got = yield 0
    while True:
        got = yield got

def outer():
    yield from echo()
"""
    )
    it = module.outer()
    assert next(it) == 0
    assert it.send(5) == 5
    inner = module.echo()
    next(inner)

    def early():
        for _ in LoopIterator(inner):
            break

    early()
    assert inner.send(7) == 7


class Noisy:
    """Draws in the worker, so that items must be made in order to be right."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return i + torch.rand(()).item()


def test_an_iterator_of_a_loader_with_workers_continues(resumes):
    data_loaders.watch_loaders(torch.utils.data.dataloader)

    def setup():
        # forked, because other workers would import this module by a name that only pytest knows
        loader = torch.utils.data.DataLoader(
            Noisy(), batch_size=2, shuffle=True, num_workers=2, multiprocessing_context="fork"
        )
        return {"loader": loader, "it": iter(loader)}

    def step(names, i):
        try:
            return next(names["it"]).tolist()
        except StopIteration:
            names["it"] = iter(names["loader"])
            return next(names["it"]).tolist()

    for at in (2, 7):  # in the iterator that the loop began with, and in one made inside it
        resumes(setup, step, at=at, stop=at + 4)


def counting():
    yield 1


def test_a_generator_that_ended_in_the_loop_has_ended_after_restoring(resumes):
    def setup():
        return {"held": None, "total": 0}

    def step(names, i):
        if i == 0:
            names["held"] = counting()
        names["total"] += sum(names["held"])
        return names["total"], i

    resumes(setup, step, stale_differs=False)
