"""Loops have names that people know and ids that probes do not shift."""

import ast

import pytest

from rearview.source.loops import find_loop_names, loop_ids, loop_name, recorded_loop_ids
from rearview.source.probes.align import compare


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("for epoch in range(3): pass", "epoch"),
        ("for i, (x, y) in enumerate(d): pass", "i"),
        ("for (_, batch) in d: pass", "batch"),
        ("for _ in range(3): pass", "main"),
        ("for self.epoch in r: pass", "epoch"),
        ("for a[0] in r: pass", "main"),
        ("for *rest, last in r: pass", "rest"),
        ('for e in rearview.loop("epoch", range(3)): pass', "epoch"),
        ("while True: pass", "main"),
    ],
)
def test_a_loop_is_named_by_its_target_or_given_name(text, name):
    assert loop_name(ast.parse(text).body[0], "<module>") == name


def test_loops_are_numbered_by_function_in_the_order_of_the_text():
    text = """
for a in x:
    for a in y:
        pass
class K:
    def fit(self):
        while True:
            while True:
                pass
        def inner():
            for b in z: pass
async def go():
    async for c in d: pass
"""
    assert [str(i) for i in loop_ids(ast.parse(text), "t").values()] == [
        "t:<module>:0:a",
        "t:<module>:1:a_2",
        "t:K.fit:0:fit",
        "t:K.fit:1:fit_2",
        "t:K.fit.<locals>.inner:0:b",
        "t:go:0:c",
    ]


def test_the_loops_of_probes_have_no_id_and_shift_no_other():
    old = "for a in x:\n    f(a)\nfor b in y:\n    g(b)\n"
    new = "for q in w:\n    look(q)\nfor a in x:\n    for r in a:\n        look(r)\n    f(a)\nfor b in y:\n    g(b)\n"
    found = compare(ast.parse(old), ast.parse(new))
    assert {
        line: str(i) for line, i in recorded_loop_ids(found.old, found.matched, "t").items()
    } == {
        3: "t:<module>:0:a",
        7: "t:<module>:1:b",
    }


def test_callers_over_files_and_classes_are_followed_and_recursion_ends():
    trees = {
        "main.py": ast.parse("from lib import Fit\nfor fold in k:\n    Fit().run()\n"),
        "lib.py": ast.parse(
            "class Fit:\n    def __init__(self): pass\n    def run(self):\n        while True:\n            self.one()\n"
            "    def one(self):\n        for s in x: self.one()\n    def forward(self): pass\n"
        ),
    }
    found = find_loop_names(trees)
    assert found["lib.py", "Fit.run"] == (("fold",),)
    assert ("fold", "run") in found["lib.py", "Fit.one"]
    assert found["lib.py", "Fit.__init__"] == (("fold",),)
    assert ("lib.py", "Fit.forward") not in found
