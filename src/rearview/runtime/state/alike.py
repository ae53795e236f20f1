"""What counts when two states are compared: which identities, which values, which attributes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from rearview.model.environment import SET_IN_REPLAYS, is_restored
from rearview.runtime.state.anchors import Anchors, bare
from rearview.runtime.state.bystanders import class_named
from rearview.runtime.state.containers import SAME
from rearview.runtime.state.tree import Node, Ref

QUICK = {int, str, bytes, bool, type(None)}
"""Types whose values `==` compares exactly."""
# Made anew whenever they are asked for, so being the same object or not means nothing.
_VALUE_LABELS = ("build method", "build weakref", "build module", "build lock", "build view")
_VALUE_MODULES = ("numpy.", "torch.", "datetime.", "pathlib", "decimal.", "fractions.", "uuid.")
_ARRAYS = {"build array", "build small_array", "build anchor"}
_OWN_VARIABLES = ("REARVIEW_RUN", "REARVIEW_REPLAY", b"REARVIEW_RUN", b"REARVIEW_REPLAY")


def elements(recipe: Any) -> frozenset[Any]:
    """Return the elements of a set from what was kept of it."""
    as_set_up = isinstance(recipe, tuple) and recipe[:1] == (SAME,)
    return frozenset(recipe[1] if as_set_up else recipe)


def same_values(a: Any, b: Any) -> bool:
    """Say, without a Python call for each item, whether two sequences hold the same values."""
    kinds = list(map(type, a))
    unique = set(kinds)
    if not unique <= QUICK | {float} or kinds != list(map(type, b)):
        return False
    if float not in unique:
        return bool(a == b)
    # `==` takes -0.0 for 0.0 and no NaN for itself, so floats go by their bits.
    bits = [array("d", [x for x in side if type(x) is float]).tobytes() for side in (a, b)]
    rest = [[x for x in side if type(x) is not float] for side in (a, b)]
    return bits[0] == bits[1] and rest[0] == rest[1]


def is_array(value: Any) -> bool:
    """Say whether a node is an array, in whichever way it was kept."""
    return isinstance(value, Node) and value.label in _ARRAYS


def is_address(value: Any) -> bool:
    """Say whether a node stands for the `id` of an object."""
    return isinstance(value, Node) and value.label == "build address"


def has_identity(value: Any) -> bool:
    """Say whether it matters that it is this very object."""
    if isinstance(value, (tuple, frozenset)):
        return False
    if isinstance(value, Node):
        return not value.label.startswith(_VALUE_LABELS + _VALUE_MODULES)
    return True


def class_of(node: Node, anchors: Anchors) -> str:
    """Return the name of the class that an object is of."""
    label = node.label
    if label == "build instance":
        label = str(getattr(node.args[0], "label", ""))
    if label.startswith("class "):  # one of the program, which is an anchor
        label = bare(anchors.signature[int(label[len("class ") :])]).removeprefix("class ")
    return label


def live_class(node: Node, anchors: Anchors) -> type | None:
    """Return the class that an object is of, as the program has it now; None if it has none."""
    made = node.args[0] if node.label == "build instance" else node
    label = str(getattr(made, "label", ""))
    if not label.startswith("class "):
        return class_named(label)
    found = anchors.alive()[int(label[len("class ") :])]
    return found if isinstance(found, type) else None


def with_closure_of(recorded: Any, content: Any) -> Any:
    """Return the content of a function without the closure variables that only a probe reads.

    Those that it shares with other functions of the program are compared where these hold them.
    """
    closure, own = content
    return {name: cell for name, cell in closure.items() if name in recorded[0]}, own


def as_suspended(recorded: Any, content: Any) -> Any:
    """Return the content of a generator without the local variables that only a probe binds."""
    if not isinstance(content, tuple) or len(content) < 3 or len(recorded or ()) < 3:
        return content
    state, number, held = content
    return state, number, {name: one for name, one in held.items() if name in recorded[2]}


def matched(
    then: Iterable[Any], now: Iterable[Any], partner: Mapping[int, int]
) -> tuple[list[Any], list[Any]]:
    """Return the elements of two sets without the addresses of objects that are a pair."""
    here = {_key(one.args[0]): one for one in now if is_address(one)}
    rest = []
    for one in then:
        known = _key(one.args[0], partner) if is_address(one) else None
        if known is None or here.pop(known, None) is None:
            rest.append(one)
    return rest, [one for one in now if not is_address(one)] + list(here.values())


def _key(target: Any, partner: Mapping[int, int] | None = None) -> Any:
    """Return what the object of an address is known by now; None if nothing met it."""
    if isinstance(target, Ref):
        return "anchor", target.number
    if isinstance(target, type):
        return target
    return id(target) if partner is None else partner.get(id(target))


def is_environment(items: dict[Any, Any]) -> bool:
    """Return True for a copy of the environment, or the table inside `os.environ`.

    Rearview's own variables tell: nothing else has them.
    """
    return any(name in items for name in _OWN_VARIABLES)


def compared_variables(items: dict[Any, Any]) -> dict[Any, Any]:
    """Return the variables of a copy of the environment that are to be as they were, in order.

    Those of today are not, nor are those that a replay sets itself; see docs/environment.md.
    """
    names = {key: key.decode(errors="replace") if type(key) is bytes else str(key) for key in items}
    kept = [key for key, name in names.items() if is_restored(name) and name not in SET_IN_REPLAYS]
    return {key: items[key] for key in sorted(kept, key=names.__getitem__)}
