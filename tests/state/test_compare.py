import math

import numpy as np
import pytest
import torch
from torch import nn

from rearview.state.compare import compare, differences
from rearview.state.object_numbers import Anchors


def base():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))
    return {
        "model": model,
        "items": [1, 2.0, "three"],
        "config": {"a": [1], "b": {"c": None}},
        "array": np.zeros(4),
        "seen": {1, 2},
        "shared": [[0]],
    }


@pytest.fixture
def against(program):
    """Capture, change something, capture again, and return the first difference."""

    def check(change, **options):
        run = program(base, None)
        run.names["new"] = {"w": torch.ones(3), "t": (1, [2])}
        then, buffers = run.capture()
        change(run.names)
        now, _ = run.capture()
        return compare(run.anchors, now, then.skeleton, buffers.__getitem__, **options)

    return check


def test_nothing_changed_is_no_difference(against):
    assert against(lambda names: None) is None


def set_weight(names):
    names["model"][1].weight.data[0, 1] = 5.0


CHANGES = {
    "model[1].weight": set_weight,
    "model[0].weight.requires_grad": lambda n: n["model"][0].weight.requires_grad_(False),
    "model[0].weight.grad": lambda n: setattr(n["model"][0].weight, "grad", torch.ones(40, 40)),
    "model[0].training": lambda n: n["model"][0].eval(),
    "items[1]": lambda n: n["items"].__setitem__(1, 3.0),
    "items": lambda n: n["items"].append(4),
    "config['b']": lambda n: n["config"]["b"].update(d=1),
    "config['b']['c']": lambda n: n["config"]["b"].update(c=False),
    "config": lambda n: n["config"].update(a=n["config"].pop("a")),
    "array": lambda n: n["array"].__setitem__(2, -0.0),
    "seen": lambda n: n["seen"].add(3),
    "new['w']": lambda n: n["new"]["w"].mul_(2),
    "new['t'][1][0]": lambda n: n["new"]["t"][1].__setitem__(0, 3),
    "fresh": lambda n: n.update(fresh=1),
    "shared[0]": lambda n: n["shared"].__setitem__(0, [0]),
}


@pytest.mark.parametrize("path", CHANGES)
def test_the_first_difference_is_named_by_its_path(path, against):
    found = against(CHANGES[path])
    assert found is not None
    assert found.path == path
    assert found.recorded != found.current


def test_floats_differ_by_their_bits(against):
    assert against(lambda n: n["items"].__setitem__(1, math.nextafter(2.0, 3.0))).path == "items[1]"
    assert against(lambda n: n["items"].__setitem__(0, 1.0)).path == "items[0]"
    assert against(lambda n: n["items"].__setitem__(0, True)).path == "items[0]"


def test_the_same_nan_is_equal_and_zero_is_not_minus_zero(program):
    run = program(lambda: {"x": [math.nan, 0.0], "y": math.nan}, None)
    then, buffers = run.capture()
    assert compare(run.anchors, run.capture()[0], then.skeleton, buffers.__getitem__) is None
    run.names["x"][1] = -0.0
    found = compare(run.anchors, run.capture()[0], then.skeleton, buffers.__getitem__)
    assert (found.path, found.recorded, found.current) == ("x[1]", "0.0", "-0.0")


def test_interned_and_separate_strings_are_equal(program):
    def joined(*parts):
        return "".join(parts)

    run = program(lambda: {"n": 0}, None)
    word = joined("ab", "cd")
    run.names["words"] = [word, word, {"k": word}]
    then, buffers = run.capture()
    run.names["words"] = [joined("a", "bcd"), joined("abc", "d"), {joined("k"): joined("abcd")}]
    now, _ = run.capture()
    assert now.skeleton != then.skeleton
    assert compare(run.anchors, now, then.skeleton, buffers.__getitem__) is None


def test_equal_lists_that_are_no_longer_one_object_differ(program):
    run = program(lambda: {"n": 0}, None)
    shared = [1]
    run.names["pair"] = [shared, shared]
    then, buffers = run.capture()
    run.names["pair"] = [[1], [1]]
    found = compare(run.anchors, run.capture()[0], then.skeleton, buffers.__getitem__)
    assert found.path == "pair[1]"
    assert "another object" in found.current


def test_memory_that_is_no_longer_shared_differs(program):
    run = program(lambda: {"n": 0}, None)
    data = torch.zeros(3)
    run.names["pair"] = [data, data.view(3, 1)]
    then, buffers = run.capture()
    run.names["pair"] = [torch.zeros(3), torch.zeros(3).view(3, 1)]
    found = compare(run.anchors, run.capture()[0], then.skeleton, buffers.__getitem__)
    assert found.path == "pair[1]"


def test_random_state_is_part_of_the_state(against):
    assert against(lambda n: torch.rand(1)).path.startswith("the random state of torch")


def test_hashes_may_answer_for_buffers_and_paths_may_be_ignored(against):
    asked = []

    def same(then, now):
        asked.append((then, now))
        return True

    assert against(set_weight, equal_buffers=same) is None or asked
    assert against(lambda n: n["items"].append(1), ignore=lambda path: path == "items") is None


def test_all_differences_are_listed(program):
    run = program(base, None)
    then, buffers = run.capture()
    set_weight(run.names)
    run.names["items"][0] = 9
    run.names["array"][1] = 3
    now, _ = run.capture()
    found = list(differences(run.anchors, now, then.skeleton, buffers.__getitem__))
    assert {d.path for d in found} == {"model[1].weight", "items[0]", "array"}
    assert str(found[0])


def training(probed):
    w, lr = [1.0], [0.1]
    if probed:

        def step():
            w[0] *= 0.9
            return w, lr

    else:

        def step():
            w[0] *= 0.9
            return w

    return {"w": w, "lr": lr, "step": step}


def test_a_variable_that_only_a_probe_reads_in_a_nested_function_is_no_difference(program):
    then = program(lambda: training(probed=False), None)
    now = program(lambda: training(probed=True), None)
    now.anchors = Anchors.walk(
        {f"local:main:{name}": value for name, value in now.names.items()},
        project=now.anchors.rules.project,
        signature=then.anchors.signature,
    )
    now.anchors.check(then.anchors.signature)
    captured, buffers = then.capture()

    def found():
        return compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)

    assert found() is None, str(found())
    now.names["step"]()
    assert found().path == "w[0]"
    then.names["step"]()
    captured, buffers = then.capture()
    now.names["lr"][0] = 0.2
    assert found().path == "lr[0]"
    backwards = compare(
        then.anchors, then.capture()[0], now.capture()[0].skeleton, buffers.__getitem__
    )
    assert backwards is not None


COUNTING = """
def counting():
    n = 0
    while n < 9:
        n += {step}
        {probe}
        yield n
"""


@pytest.mark.parametrize("born", [False, True], ids=["set up", "made in the loop"])
def test_a_variable_that_only_a_probe_binds_in_a_generator_is_no_difference(program, born):
    def run(step, probe):
        space = {"__name__": __name__}
        exec(COUNTING.format(step=step, probe=probe), space)
        made = space["counting"]

        def setup():
            return {"made": made, "held": None if born else suspended(made)}

        one = program(setup, None)
        if born:
            one.names["held"] = suspended(made)
        return one

    def suspended(made):
        held = made()
        next(held)
        return held

    then = run(1, "pass")
    captured, buffers = then.capture()
    same, other = run(1, "seen = [n]"), run(2, "seen = [n]")
    same.anchors = Anchors.walk(
        {f"local:main:{k}": v for k, v in same.names.items()}
        if not born
        else {"local:main:made": same.names["made"], "local:main:held": None},
        project=lambda module: True,
        signature=then.anchors.signature,
    )
    same.anchors.check(then.anchors.signature)
    found = compare(same.anchors, same.capture()[0], captured.skeleton, buffers.__getitem__)
    assert found is None, str(found)
    if born:
        now = other.capture()[0]
        assert compare(other.anchors, now, captured.skeleton, buffers.__getitem__) is not None


def test_an_instance_of_a_class_made_in_the_loop_is_compared(program):
    def born(value):
        class Local:
            def __init__(self):
                self.value = value

        return Local()

    one = program(lambda: {"held": None}, None)
    one.names["held"] = born(1)
    then, buffers = one.capture()
    assert then.missing
    assert compare(one.anchors, one.capture()[0], then.skeleton, buffers.__getitem__) is None
    one.names["held"].value = 2
    found = compare(one.anchors, one.capture()[0], then.skeleton, buffers.__getitem__)
    assert found.path == "held.value"


def test_checkpoints_without_the_name_of_an_operation_compare_equal(program, monkeypatch):
    run = program(lambda: {"weight": nn.Parameter(torch.ones(2))}, None)
    run.names["loss"] = run.names["weight"].tanh()
    with monkeypatch.context() as older:
        older.setattr("rearview.state.codecs.tensors.operation_of", lambda tensor: True)
        then, buffers = run.capture()
    now, _ = run.capture()
    assert now.skeleton != then.skeleton
    assert compare(run.anchors, now, then.skeleton, buffers.__getitem__) is None
    run.names["loss"] = run.names["loss"].detach()
    now, _ = run.capture()
    assert compare(run.anchors, now, then.skeleton, buffers.__getitem__) is not None


def reorder(mapping, order):
    items = [list(mapping.items())[i] for i in order]
    mapping.clear()
    mapping.update(items)


@pytest.mark.parametrize("born_in_the_loop", [False, True])
def test_keys_hashed_by_address_may_come_in_another_order_and_their_values_must_be_the_same(
    program, born_in_the_loop
):
    """A dict that is filled from a set of tensors has another order in every process."""
    run = program(base, None)
    keys = (
        [torch.zeros(2) for _ in range(3)]
        if born_in_the_loop
        else [*run.names["model"].parameters()][:3]
    )
    run.names["owners"] = list(keys)
    run.names["slots"] = {key: [number] for number, key in enumerate(keys)}
    then, buffers = run.capture()

    def difference():
        return compare(run.anchors, run.capture()[0], then.skeleton, buffers.__getitem__)

    reorder(run.names["slots"], [2, 0, 1])
    assert difference() is None
    run.names["slots"][keys[0]], run.names["slots"][keys[1]] = [1], [0]
    assert "slots" in difference().path
    run.names["slots"][keys[0]], run.names["slots"][keys[1]] = [0], [1]
    assert difference() is None
    run.names["slots"][torch.zeros(2)] = run.names["slots"].pop(keys[2])
    assert "slots" in difference().path
