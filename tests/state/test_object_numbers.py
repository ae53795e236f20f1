import enum
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from rearview.errors import StateError
from rearview.state.object_numbers import Anchors, label_without_names, without_weak_references


def nobody(_module):
    return False


def walk(names, **options):
    roots = {f"local:main:{name}": value for name, value in names.items()}
    return Anchors.walk(roots, project=nobody, **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])


def test_paths_read_as_people_write_them():
    model = Net()
    anchors = walk({"model": model, "config": {"a": [1, {"b": []}]}})
    paths = {anchors.path(i): anchors.signature[i] for i in range(len(anchors))}
    assert paths["model.layers[2].weight"] == "torch.nn.parameter.Parameter"
    assert paths["config['a'][1]['b']"] == "builtins.list"


def test_a_global_of_another_module_is_named_with_its_module():
    anchors = Anchors.walk({"global:__main__:a": [], "global:helpers:b": []}, project=nobody)
    assert [anchors.path(0), anchors.path(1)] == ["a", "helpers.b"]


def test_the_same_set_up_gives_the_same_signature():
    assert walk({"model": Net()}).signature == walk({"model": Net()}).signature


def test_a_different_set_up_is_refused_with_the_first_place_that_differs():
    recorded = walk({"model": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "n": []}).signature
    with pytest.raises(StateError, match=r"model\[1\] was a .*ReLU.* and is a .*Tanh") as caught:
        walk({"model": nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "n": []}).check(recorded)
    assert caught.value.slug == "state-anchors"


def test_one_object_more_or_fewer_is_refused():
    recorded = walk({"items": [[], []]}).signature
    with pytest.raises(StateError, match="is new"):
        walk({"items": [[], [], []]}).check(recorded)
    with pytest.raises(StateError, match="is gone"):
        walk({"items": [[]]}).check(recorded)


def test_values_are_not_anchors():
    atoms = [1, 2.0, "text", None, True, (1, ("a",)), range(3), torch.float32, np.float64(1), print]
    assert len(walk({f"n{i}": atom for i, atom in enumerate(atoms)})) == 0
    assert len(walk({"numbers": list(range(1000))})) == 1


def closure(extra):
    model, seen = [1], [2]
    if extra:

        def hook():
            return extra, model, seen
    else:

        def hook():
            return model, seen

    return hook


def test_closure_variables_that_only_a_probe_uses_do_not_shift_the_numbers():
    recorded = walk({"hook": closure(None), "after": []}).signature
    renamed = [
        label.replace("closure.<locals>.hook", "closure.<locals>.hook") for label in recorded
    ]
    replayed = walk({"hook": closure(["probe"]), "after": []}, signature=renamed)
    replayed.check(recorded)
    assert len(replayed) == len(recorded)


def test_sets_are_walked_last_because_their_order_is_not_fixed():
    class Thing:
        pass

    for _ in range(5):
        things = [Thing() for _ in range(6)]
        anchors = walk({"group": set(things), "things": things})
        assert [anchors.path(anchors.index[id(t)]) for t in things] == [
            f"things[{i}]" for i in range(6)
        ]


def test_holding_anchors_does_not_forbid_resizing_an_array():
    names = {"grown": np.zeros(2)}
    anchors = walk(names)
    names["grown"].resize(5, refcheck=False)
    assert len(anchors) == 1


def test_a_container_that_only_the_anchors_hold_is_released():
    names = {"big": [0] * 10}
    anchors = walk(names)
    assert anchors.alive()[0] is names["big"]
    del names["big"]
    assert anchors.alive() == [None]


def test_an_object_without_weak_references_for_a_while_stays_the_same_anchor():
    tensor, other = torch.zeros(2), torch.ones(2)
    first, second = walk({"tensor": tensor}), walk({"tensor": tensor, "other": other})
    with without_weak_references(tensor, other):
        assert weakref.getweakrefs(tensor) == weakref.getweakrefs(other) == []
        assert second.alive() == [tensor, other]
    assert first.alive()[0] is tensor
    assert weakref.getweakrefs(tensor)
    del tensor
    assert first.alive() == [None]


def test_a_weak_reference_of_the_program_is_left_alone():
    tensor = torch.zeros(2)
    anchors, mine = walk({"tensor": tensor}), weakref.ref(tensor)
    with without_weak_references(tensor):
        assert weakref.getweakrefs(tensor) == [mine]
    assert anchors.alive()[0] is mine() is tensor


def everybody(_module):
    return True


def made(**functions):
    body = {"a": lambda self, seen=[]: seen, **functions}
    return type("Made", (), {"__module__": __name__, **body})


def test_a_function_that_a_probe_adds_to_a_class_is_left_out():
    recorded = Anchors.walk({"global:t:Made": made()}, project=everybody).signature
    seen = []
    probed = made(look=lambda self, mine=seen: mine)
    anchors = Anchors.walk({"global:t:Made": probed}, project=everybody, signature=recorded)
    anchors.check(recorded)
    assert not any(found is seen for found in anchors.alive())


def test_a_class_that_was_recorded_without_its_functions_is_walked_without_them():
    cls = made()
    new = Anchors.walk({"global:t:Made": cls, "global:t:x": []}, project=everybody)
    old = [f"class {__name__}.Made", "builtins.list"]
    again = Anchors.walk({"global:t:Made": cls, "global:t:x": []}, project=everybody, signature=old)
    again.check(old)
    assert len(again) == 2 < len(new)


class Phase(enum.Enum):
    WARM = 1

    def next(self):
        return self


def test_an_enumeration_that_was_recorded_as_a_value_is_walked_as_one():
    roots = {"global:t:Phase": Phase, "global:t:x": []}
    new = Anchors.walk(roots, project=everybody)
    assert label_without_names(new.signature[0]) == f"class {__name__}.Phase"
    Anchors.walk(roots, project=everybody, signature=new.signature).check(new.signature)
    again = Anchors.walk(roots, project=everybody, signature=["builtins.list"])
    again.check(["builtins.list"])
