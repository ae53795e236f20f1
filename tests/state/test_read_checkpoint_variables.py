"""The variables of a checkpoint, read as data: exact, and without running anything."""

import collections
import io
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from rearview.errors import RearviewError
from rearview.state.capture import MAGIC
from rearview.state.read_checkpoint_variables import ModuleState, NotGiven, Variables

Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - an old one


class Thing:
    def __init__(self):
        self.count = 3
        self.me = self


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("fleeting", torch.ones(2), persistent=False)
        self.seen = 7


def setup():
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.Adam([{"params": net.a.parameters(), "lr": 0.5}, {"params": [net.tied.bias]}])
    big = np.arange(4000.0)
    return {
        "net": net,
        "opt": opt,
        "sched": torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 0.5),
        "thing": Thing(),
        "numbers": [1, 2.5, "text", None, True, 3j, b"raw", (1, {2})],
        "nested": collections.OrderedDict(a={"b": [np.int16(3)]}),
        "big": big,
        "view": big[::-2],
        "objects": np.array([{"a": 1}, None], dtype=object),
        "bf": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "sparse": torch.eye(3).to_sparse(),
    }


def step(names, i):
    net, opt = names["net"], names["opt"]
    opt.zero_grad()
    (net.a(torch.ones(2, 3)).sum() + net.tied(torch.ones(2, 3)).sum()).backward()
    opt.step()
    names["sched"].step()
    names["numbers"].append(i)
    names["big"] += 1
    names["fresh"] = {"t": torch.full((2,), float(i)), "deque": collections.deque([i], 4)}
    names["pair"] = Pair(i, 2)
    names["work"] = (k for k in range(3))


@pytest.fixture
def state(program):
    """Return the program after some steps, and its variables as data."""
    made = program(setup, step)
    made.run(0, 3)
    captured, buffers = made.capture()
    return made.names, Variables(captured.skeleton, made.anchors.signature, buffers.__getitem__)


def test_a_module_is_its_state_dict_and_can_be_loaded(state):
    names, variables = state
    found = variables.value("main.net")
    then = names["net"].state_dict()
    assert isinstance(found, ModuleState)
    assert list(found) == list(then)
    assert all(torch.equal(found[name], then[name]) for name in then)
    assert found["a.weight"].data_ptr() == found["tied.weight"].data_ptr()
    assert found.attributes == {"seen": 7}
    assert found.training is True
    Net().load_state_dict(found)


def test_an_optimizer_and_a_scheduler_can_be_loaded(state):
    names, variables = state
    found, then = variables.value("main.opt"), names["opt"].state_dict()
    assert [g["params"] for g in found["param_groups"]] == [
        g["params"] for g in then["param_groups"]
    ]
    assert found["param_groups"][0]["lr"] == then["param_groups"][0]["lr"]
    assert found["state"].keys() == then["state"].keys()
    for number, held in then["state"].items():
        assert all(torch.equal(found["state"][number][k], held[k]) for k in held)
    names["opt"].load_state_dict(found)
    assert variables.value("main.sched")["last_epoch"] == 3


def test_plain_values_and_arrays_equal_the_recorded_ones(state):
    names, variables = state
    assert variables.value("main.numbers") == names["numbers"]
    assert variables.value("main.nested") == names["nested"]
    assert variables.value("main.fresh")["deque"].maxlen == 4
    assert variables.value("main.fresh")["t"].tolist() == [2.0, 2.0]
    for name in ("big", "view"):
        assert np.array_equal(variables.value(f"main.{name}"), names[name])
    assert variables.value("main.objects").tolist() == [{"a": 1}, None]
    assert np.shares_memory(variables.value("main.big"), variables.value("main.view"))
    found = variables.value("main.bf")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, names["bf"])
    assert torch.equal(variables.value("main.sparse").to_dense(), torch.eye(3))


def test_an_object_is_its_attributes_and_may_lead_to_itself(state):
    thing = state[1].value("main.thing")
    assert thing["count"] == 3
    assert thing["me"] is thing
    assert thing.type.endswith("Thing")


def test_an_object_that_only_the_program_can_make_is_named_with_the_reason(state):
    variables = state[1]
    assert "generator" in variables.reason("main.work")
    assert isinstance(variables.value("main.work"), NotGiven)
    given = [name for name in variables.roots if variables.reason(name) is None]
    assert {"main.net", "main.big", "main.thing"} <= set(given)
    assert not any(isinstance(variables.value(name), NotGiven) for name in given)


def test_a_class_that_was_not_captured_and_its_objects_are_named_with_the_reason(program):
    def step_with_class(names, i):
        class Local:
            def __init__(self):
                self.i = i

        names["cls"], names["instance"] = Local, Local()
        names["process"] = subprocess.Popen([sys.executable, "-c", ""])
        names["process"].wait()

    made = program(setup, step_with_class)
    made.run(0, 1)
    captured, buffers = made.capture()
    variables = Variables(captured.skeleton, made.anchors.signature, buffers.__getitem__)
    assert "inside a function" in variables.reason("main.cls")
    assert "outside this process" in variables.reason("main.process")
    assert variables.value("main.instance")["i"] == 0
    assert variables.value("main.numbers") == made.names["numbers"]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def skeleton(header, body):
    head = pickle.dumps(header, protocol=5)
    return MAGIC + struct.pack("<Q", len(head)) + head + body


@pytest.mark.parametrize("place", ["header", "stream"])
def test_nothing_in_a_strangers_state_is_run(tmp_path, place):
    there = str(tmp_path / "made")
    header = {"anchors": 0, "classes": [], "blocks": [], "outside": []}
    roots = {"global:__main__:x": Evil(there), "global:__main__:y": 1}
    out = io.BytesIO()
    pickle.Pickler(out, protocol=5).dump((roots, [], [], None))
    body = out.getvalue() + pickle.dumps(None)
    if place == "header":
        with pytest.raises(RearviewError):
            Variables(skeleton({**header, "x": Evil(there)}, body), [], {}.__getitem__)
    else:
        variables = Variables(skeleton(header, body), [], {}.__getitem__)
        assert isinstance(variables.value("x"), NotGiven)
        assert variables.value("y") == 1
    assert not os.path.exists(there)  # noqa: PTH110


def test_a_state_cut_short_is_an_error_of_ours(program):
    made = program(setup, step)
    captured, buffers = made.capture()
    for size in (4, 40, len(captured.skeleton) // 2):
        with pytest.raises(RearviewError):
            Variables(captured.skeleton[:size], made.anchors.signature, buffers.__getitem__)
