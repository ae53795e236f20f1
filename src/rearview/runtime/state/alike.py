"""What counts when two states are compared: which identities, which values, which attributes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from rearview.runtime.state.anchors import Anchors, bare
from rearview.runtime.state.classify import WATCHERS, left_out_named
from rearview.runtime.state.containers import SAME
from rearview.runtime.state.tree import Node, Ref

QUICK = {int, str, bytes, bool, type(None)}
"""Types whose values `==` compares exactly."""
# Made anew whenever they are asked for, so being the same object or not means nothing.
_VALUE_LABELS = ("build method", "build weakref", "build module", "build lock", "build view")
_VALUE_MODULES = ("numpy.", "torch.", "datetime.", "pathlib", "decimal.", "fractions.", "uuid.")
_ARRAYS = {"build array", "build small_array", "build anchor"}
# A progress bar shows the time; it never feeds back.
_CLOCKS = frozenset(
    {"start_t", "last_print_t", "last_print_n", "_ema_dn", "_ema_dt", "_ema_miniters"}
)


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


def only_watches(name: str) -> bool:
    """Say whether objects of a class show or send away what is computed, and are not state."""
    return name.startswith(WATCHERS)


def state_of(name: str, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes without those that are the time or addresses in another form."""
    leave = _CLOCKS if name.startswith("tqdm.") else left_out_named(name)
    return {k: v for k, v in attributes.items() if k not in leave} if leave else attributes


def with_closure_of(recorded: Any, content: Any) -> Any:
    """Return the content of a function without the closure variables that only a probe reads.

    Those that it shares with other functions of the program are compared where these hold them.
    """
    closure, own = content
    return {name: cell for name, cell in closure.items() if name in recorded[0]}, own


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
