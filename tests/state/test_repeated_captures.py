"""Repeated captures of the same program: nothing is cached that may have changed."""

import gc
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.state.capture import capture
from rearview.state.object_numbers import Anchors

from .conftest import is_project, rooted


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.notes = {"seen": 0, "items": [1, [2]], "names": {"a"}}


class Other(Net):
    pass


def make():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    names = {"net": net, "optimizer": optimizer, "spare": [torch.zeros(3), {"deep": [0]}]}
    train(names)
    return names


def train(names):
    names["optimizer"].zero_grad()
    names["net"].tied(names["net"].norm(names["net"].first(torch.ones(2, 4)))).sum().backward()
    names["optimizer"].step()


def weight(names):
    return names["net"].first.weight


def resize(names):
    with torch.no_grad():
        names["net"].norm.running_mean.untyped_storage().resize_(64)


def reborn(names):
    # what takes the place of the old ones often takes their addresses, too
    names["spare"] = None
    gc.collect()
    names["spare"] = [torch.ones(3), {"deep": [1]}]


def hook(names):
    weight(names).register_hook(abs)


def late_hook(names):
    weight(names).register_post_accumulate_grad_hook(print)


CHANGES = {
    "train": train,
    "other memory": lambda n: setattr(weight(n), "data", torch.full((4, 4), 3.0)),
    "other shape": lambda n: setattr(n["net"].norm.weight, "data", torch.ones(2, 3)),
    "other strides": lambda n: setattr(weight(n), "data", weight(n).data.t()),
    "other type": lambda n: setattr(weight(n), "data", weight(n).data.double()),
    "part of it": lambda n: setattr(weight(n), "data", weight(n).data[1:]),
    "transposed in place": lambda n: n["net"].norm.running_var.unsqueeze_(0),
    "another device": lambda n: setattr(n["net"].norm, "running_var", torch.ones(4, device="meta")),
    "resized": resize,
    "gradient gone": lambda n: setattr(weight(n), "grad", None),
    "gradient replaced": lambda n: setattr(n["net"].norm.weight, "grad", torch.ones_like(n["net"].norm.weight)),
    "frozen": lambda n: weight(n).requires_grad_(False),
    "in place": lambda n: weight(n).data.add_(1),
    "number in place": lambda n: n["net"].norm.num_batches_tracked.add_(1),
    "untied": lambda n: setattr(n["net"].tied, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "onto another's memory": lambda n: n["net"].norm.running_mean.set_(n["net"].norm.running_var),
    "attribute": lambda n: setattr(weight(n), "note", "x"),
    "hook": hook,
    "late hook": late_hook,
    "class": lambda n: setattr(n["net"], "__class__", Other),
    "dict": lambda n: n["net"].notes.update(seen=n["net"].notes["seen"] + 1, more={}),
    "list": lambda n: n["net"].notes["items"].append([]),
    "set": lambda n: n["net"].notes["names"].symmetric_difference_update({"a", "b"}),
    "cleared": lambda n: n["net"].notes.clear(),
    "buffer gone": lambda n: n["net"].norm.register_buffer("running_mean", None),
    "order": lambda n: n["net"]._modules.move_to_end("first")
    if isinstance(n["net"]._modules, OrderedDict)
    else n["net"]._modules.update(first=n["net"]._modules.pop("first")),
    "reborn": reborn,
}  # fmt: skip


def content(anchors, names):
    found = capture(anchors, rooted(names))
    return found.skeleton, {key: bytes(data) for key, data in found.buffers.items()}, found.missing


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4), min_size=1, max_size=3))
def test_a_later_capture_equals_a_first_capture_of_the_same_state(rounds):
    names = make()
    often = Anchors.walk(rooted(names), project=is_project)
    fresh = [Anchors.walk(rooted(names), project=is_project) for _ in rounds]
    content(often, names)
    for anchors, changes in zip(fresh, rounds, strict=True):
        for change in changes:
            try:
                CHANGES[change](names)
            except (RuntimeError, ValueError, AttributeError, KeyError, TypeError):
                continue  # after the changes before, it is none
        assert content(often, names) == content(anchors, names)


@pytest.mark.parametrize("change", sorted(set(CHANGES)))
def test_every_change_is_seen(change):
    names = make()
    anchors = Anchors.walk(rooted(names), project=is_project)
    before = content(anchors, names)
    if change == "reborn":
        names["spare"][0].add_(1)  # so that the old ones are told from the new
        before = content(anchors, names)
    CHANGES[change](names)
    assert content(anchors, names) != before


def test_a_buffer_lives_as_long_as_the_capture_that_took_it():
    names = {"big": torch.arange(4096.0)}
    anchors = Anchors.walk(rooted(names), project=is_project)
    found = capture(anchors, rooted(names))
    [(_, data)] = found.buffers.items()
    wanted = bytes(data)
    names["big"].data = torch.zeros(4096)
    junk = [torch.full((4096,), 7.0) for _ in range(8)]
    assert bytes(data) == wanted
    del junk


def test_a_capture_starts_no_garbage_collection():
    names = make()
    anchors = Anchors.walk(rooted(names), project=is_project)
    started = []

    def note(phase, _info):
        started.append(phase)

    thresholds = gc.get_threshold()
    roots = rooted(names)
    gc.collect()
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        found = capture(anchors, roots)
        during = len(started)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert found.skeleton
    assert not during


@pytest.mark.parametrize("collecting", [True, False])
def test_a_capture_does_not_change_the_garbage_collector_even_if_it_fails(collecting):
    anchors = Anchors.walk({}, project=is_project)
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt):
            capture(anchors, Broken())
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if was else gc.disable)()


class Broken:
    """A mapping that somebody interrupts."""

    def keys(self):
        raise KeyboardInterrupt

    def __getitem__(self, name):
        raise KeyError(name)
