"""Flor's rules: what fires, in which order, and what the filter and the library add."""

import ast

import pytest

from rearview.source.inspection.changed_variables import (
    LibraryUpdates,
    add_library_changes,
    changed_variables,
    explain_changes,
    variables_changed_by,
)


def of(body, **known):
    text = "for batch in data:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return variables_changed_by(ast.parse(text).body[0], **known)


@pytest.mark.parametrize(
    ("line", "rule", "names"),
    [
        ("a, b = obj.method(x)", 1, ("obj", "a", "b")),
        ("self.h = self.rnn.run(x)", 1, ("self.rnn", "self.h")),
        ("a = func(x)", 2, ("a",)),
        ("a = torch.ones(3)", 2, ("a",)),
        ("a, b = x, y", 3, ("a", "b")),
        ("a[0] = x", 3, ("a",)),
        ("total += loss", 3, ("total",)),
        ("obj.method(x)", 4, ("obj",)),
        ("model(x).sum().backward()", 4, ("model",)),
        ("func(x)", 5, ()),
        ("data = next(loader).to(device)", 2, ("data",)),
        ("_, a = func(x)", 2, ("a",)),
    ],
)
def test_each_rule_fires_on_its_pattern(line, rule, names):
    (change,) = of(line, code={"torch"}, before={n.split(".")[0] for n in names}).matches
    assert (change.rule, change.names) == (rule, names)


def test_a_second_assignment_to_a_changed_variable_gives_no_estimate():
    found = of("a = f(x)\na = g(x)", before={"a"})
    assert [c.rule for c in found.unsure] == [0]
    assert not found.estimated


def test_a_function_called_for_its_effect_gives_no_estimate_but_printing_does():
    assert not of("train_one(net)").estimated
    assert of("print(net)\nlen(net)\nrearview.log('a', 1)").estimated


def test_variables_born_in_the_loop_are_left_out_unless_read_after_it():
    assert of("x = f(batch)\nx.go()").names == ()
    assert of("x = f(batch)\nx.go()", after={"x"}).names == ("x",)
    assert of("x = f(batch)\nx.go()", before={"x"}).names == ("x",)
    assert of("batch.go()").inside_only == ("batch",)


def test_the_scheduler_brings_in_the_optimizer_and_that_the_model():
    facts = LibraryUpdates({"opt": ("net", "head")}, {"sched": ("opt",)})
    found = add_library_changes(of("sched.step()"), facts)
    assert found.names == ("sched", "opt", "net", "head")
    assert found.inferred["opt"] == "`sched` sets its rates"


def test_a_whole_program_is_read_loop_by_loop():
    text = """
import torch
def fit(net, data, opt, sched):
    best = 0.0
    for epoch in range(3):
        for x in data:
            loss = net(x).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        score = torch.mean(net.weight)
        if score > best:
            best = score
    return best
"""
    found = {i.name: c for i, c in changed_variables(ast.parse(text), "t.py").items()}
    assert found["epoch"].names == ("net", "opt", "sched", "best")
    assert found["x"].names == ("net", "opt")
    assert "loss" in found["x"].inside_only
    said = explain_changes(found["epoch"])
    assert said[2] == "Changes `sched`: a method is called on it (line 11)."


def test_nested_statements_and_class_bodies_are_read():
    text = "class T:\n    def f(self):\n        while self.go:\n            if self.n:\n                self.n = 0\n"
    found = changed_variables(ast.parse(text))
    assert [(i.name, c.names) for i, c in found.items()] == [("f", ("self.n",))]


def names(text):
    return {i.name: c.names for i, c in changed_variables(ast.parse(text), "t.py").items()}


def test_a_variable_of_a_function_is_not_the_loops_variable_of_the_same_name():
    helper = "def f(x):\n    out = x\n    return out\n"
    assert names(f"{helper}for i in r:\n    out = f(i)\n    print(out)") == {"i": ()}
    assert names(f"for i in r:\n    out = f(i)\n{helper}") == {"i": ()}


def test_a_variable_that_a_function_reads_from_the_module_is_seen_outside_the_loop():
    assert names("def f():\n    return best\nfor i in r:\n    best = i") == {"i": ("best",)}


def test_a_global_is_seen_outside_the_loop_of_its_function():
    assert names("def f():\n    global n\n    for i in r:\n        n = g(i)") == {"i": ("n",)}


def test_names_that_were_imported_are_modules_and_functions_and_not_objects():
    text = "from torch import nn\nfor i in r:\n    nn.utils.clip(p)\n    opt.step()"
    assert names(text) == {"i": ("opt",)}


def test_lines_that_no_rule_estimates_are_given_together():
    found = changed_variables(ast.parse("for i in r:\n    f(i)\n    g(i)"), "t.py")
    (changes,) = found.values()
    assert explain_changes(changes)[-1].startswith("Lines 2, 3 may change more")
