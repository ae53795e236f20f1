"""Which loops may run around a function."""

import ast

import pytest

from rearview.source.loops import find_loop_names


def test_a_function_that_is_also_passed_as_a_value_has_unknown_callers():
    text = """
def helper(): pass
def closure():
    helper()
def other(): pass
def train():
    for epoch in range(3):
        closure()
        other()
        later.append(closure)
train()
for one in later:
    one()
"""
    found = find_loop_names({"t.py": ast.parse(text)})
    assert ("t.py", "closure") not in found
    assert ("t.py", "helper") not in found
    assert found["t.py", "other"] == (("epoch",),)


def test_a_property_and_a_method_handed_on_are_unknown_but_not_a_function_of_an_attributes_name():
    text = """
def loss(): pass
class Net:
    @property
    def size(self): pass
    def step(self): pass
    def other(self): pass
for epoch in range(3):
    loss(); out.loss; net.size; net.step(); net.other(); run(net.step)
"""
    found = find_loop_names({"t.py": ast.parse(text)})
    assert found["t.py", "loss"] == (("epoch",),)
    assert found["t.py", "Net.other"] == (("epoch",),)
    assert ("t.py", "Net.size") not in found
    assert ("t.py", "Net.step") not in found


@pytest.mark.parametrize(
    "text",
    [
        "def rows():\n  for i in x:\n    yield i\nfor epoch in rows(): pass",
        "def rows():\n  yield from x\nfor epoch in rows(): pass",
        "class A:\n  def rows(self):\n    yield 1\nfor epoch in A().rows(): pass",
        "async def rows():\n  pass\nfor epoch in rows(): pass",
    ],
)
def test_a_generator_runs_in_whichever_loop_draws_from_it_so_nothing_is_known(text):
    assert not any("rows" in function for _, function in find_loop_names({"t.py": ast.parse(text)}))


def test_a_function_called_by_a_generator_has_unknown_loops():
    text = "def note(): pass\ndef rows():\n  note()\n  yield 1\nfor epoch in rows(): pass"
    assert list(find_loop_names({"t.py": ast.parse(text)})) == [("t.py", "<module>")]


def test_a_function_that_only_defines_a_generator_is_known():
    text = "def fit():\n  def rows():\n    yield 1\n  return rows()\nfor epoch in x: fit()"
    assert find_loop_names({"t.py": ast.parse(text)})["t.py", "fit"] == (("epoch",),)
