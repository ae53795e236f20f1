"""Loops in generators keep their iterators in sight; functions for compilers stay as written."""

import ast

import pytest

from rearview.source.instrument import HOOK, ITER, WALK, instrument


def rewritten(text):
    tree = ast.parse(text)
    instrument(tree, "t.py")
    return ast.unparse(tree)


def test_a_loop_around_a_yield_names_its_iterator():
    text = rewritten("def g(xs):\n    for x in xs:\n        yield x\n")
    assert f"({WALK}0 := {WALK}({ITER}(xs)))" in text


def test_a_loop_without_a_yield_does_not():
    text = rewritten("def g(xs):\n    for x in xs:\n        pass\n    yield 1\n")
    assert WALK not in text


def test_the_name_is_that_of_the_recorded_loop_when_a_probe_adds_one():
    tree = ast.parse("def g(xs):\n    for p in probe: pass\n    for x in xs:\n        yield x\n")
    instrument(tree, "t.py", ids={3: "t.py:g:0:x"})
    assert f"({WALK}0 := {WALK}({ITER}(xs)))" in ast.unparse(tree)


def test_while_and_yield_from_are_walks_too():
    text = rewritten("def g(xs):\n    while True:\n        yield from xs\n")
    assert f"{WALK}(None)" in text
    assert f"{WALK}({ITER}(xs))" in text


def test_the_value_of_yield_from_is_left_alone():
    assert WALK not in rewritten("def g(xs):\n    a = yield from xs\n    return a\n")


@pytest.mark.parametrize(
    "decorator",
    [
        "torch.compile",
        "torch.compile(backend='eager')",
        "njit",
        "numba.njit(cache=True)",
        "jax.jit",
        "functools.partial(jax.jit, static_argnums=0)",
        "torch.jit.script",
        "triton.jit",
    ],
)
def test_functions_for_compilers_stay_as_written(decorator):
    text = f"@{decorator}\ndef f(xs):\n    for x in xs:\n        pass\n"
    assert HOOK not in rewritten(text)


def test_other_decorators_do_not_hide_a_loop():
    assert HOOK in rewritten("@functools.cache\ndef f(xs):\n    for x in xs:\n        pass\n")
