"""Which loops may run around a function."""

import ast

from rearview.source.chains import chains


def test_nothing_is_known_of_a_function_that_is_also_handed_on():
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
    found = chains({"t.py": ast.parse(text)})
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
    found = chains({"t.py": ast.parse(text)})
    assert found["t.py", "loss"] == (("epoch",),)
    assert found["t.py", "Net.other"] == (("epoch",),)
    assert ("t.py", "Net.size") not in found
    assert ("t.py", "Net.step") not in found
