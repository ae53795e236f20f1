"""An object nested deeper than Python can pickle is lost alone; the rest of the checkpoint is saved."""

from functools import reduce

import pytest

from rearview.state.capture import capture
from rearview.state.object_numbers import Anchors


class Node:
    def __init__(self, inner):
        self.inner = inner


WRAP = {
    "list": lambda inner, _: [inner],
    "dict": lambda inner, _: {"k": inner},
    "tuple": lambda inner, _: (inner,),
    "object": lambda inner, _: Node(inner),
    "set": lambda inner, _: frozenset({inner}),
}


def nested(kind, depth):
    return reduce(WRAP[kind], range(depth), () if kind == "set" else [])


@pytest.mark.parametrize("kind", WRAP)
@pytest.mark.parametrize("when", ["before the loop", "in the loop"])
def test_every_depth_is_captured_or_named_and_the_rest_is_kept(kind, when):
    lost = set()
    # every depth around the limit, where a value may fit by itself and not as part of the whole
    for depth in [*range(60, 1020, 7), 5000]:
        value = nested(kind, depth)
        names = {"value": value} if when == "before the loop" else {}
        anchors = Anchors.walk({**names, "weights": [1.0, 2.0]}, project=lambda name: True)
        found = capture(anchors, {"value": value, "weights": [3.0, 4.0]}, rng=False)
        assert all(part.path.startswith("value") for part in found.missing), found.missing
        assert len(found.missing) <= 2
        if found.missing:
            lost.add(depth)
        del value, names, found, anchors
    if when == "in the loop":
        assert 5000 in lost
        assert 60 not in lost
