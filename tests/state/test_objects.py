import dataclasses
import enum
import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rearview.state.capture import capture as state_of
from rearview.state.codecs.base import layout_of


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    rate: float
    steps: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Compact:
    value: int
    other: object = None


@dataclasses.dataclass(frozen=True)
class Fixed:
    name: str
    size: int = 3


class Stubborn:
    """Drops state when pickled its own way, as optimizers and loaders do."""

    def __init__(self):
        self.kept = 1
        self.dropped = [0]

    def __getstate__(self):
        return {"kept": self.kept}

    def __setstate__(self, state):
        self.__dict__.update(state)


class Guarded:
    """Refuses ordinary assignment."""

    def __init__(self):
        self.__dict__["value"] = 0

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Counting:
    total = 0
    registry: ClassVar[dict] = {}

    def __init__(self):
        type(self).total += 1
        self.registry[type(self).total] = self


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    def peek():
        return n

    return count, peek


def remembering(x):
    remembering.calls = getattr(remembering, "calls", 0) + x
    return remembering.calls


def collecting(x, into=[]):  # noqa: B006
    into.append(x)
    return list(into)


def test_dataclasses_slots_and_enums_resume(resumes):
    def setup():
        return {
            "config": Config(0.1),
            "compact": Compact(1),
            "fixed": Fixed("a"),
            "colour": Colour.RED,
        }

    def step(names, i):
        names["config"].rate /= 2
        names["config"].steps.append(Compact(i))
        names["compact"].value += i
        names["compact"].other = names["config"]
        names["fixed"] = dataclasses.replace(names["fixed"], size=i)
        names["colour"] = Colour.BLUE if names["colour"] is Colour.RED else Colour.RED
        return repr(names)

    _, resumed = resumes(setup, step)
    assert resumed.names["compact"].other is resumed.names["config"]


def test_a_deleted_or_unset_attribute_stays_deleted_or_unset(resumes):
    class Slotted:
        __slots__ = ("a", "b")

    def setup():
        obj = Slotted()
        obj.a = 1
        return {"obj": obj, "config": Config(1.0)}

    def step(names, i):
        if i == 1:
            del names["obj"].a
            del names["config"].rate
            names["obj"].b = "set"
        return (
            hasattr(names["obj"], "a"),
            hasattr(names["obj"], "b"),
            "rate" in vars(names["config"]),
        )

    resumes(setup, step)


def test_attributes_that_a_class_drops_from_its_pickles_are_kept(resumes):
    def setup():
        return {"old": Stubborn(), "new": None}

    def step(names, i):
        names["new"] = names["new"] or Stubborn()
        names["old"].dropped.append(i)
        names["new"].dropped.append(i)
        return list(names["old"].dropped), list(names["new"].dropped)

    resumes(setup, step)


def test_a_class_that_forbids_assignment_is_restored(resumes):
    def step(names, i):
        vars(names["guarded"])["value"] += 1
        return names["guarded"].value

    resumes(lambda: {"guarded": Guarded()}, step)


def test_closures_and_nonlocal_variables_resume(resumes):
    def setup():
        count, peek = counter()
        return {"count": count, "peek": peek, "new": None}

    def step(names, i):
        if names["new"] is None:
            names["new"] = counter()
        names["new"][0]()
        return names["count"](), names["peek"](), names["new"][1]()

    _, resumed = resumes(setup, step)
    assert resumed.names["count"].__closure__[0] is resumed.names["peek"].__closure__[0]


def test_functions_made_in_the_loop_run_the_live_code_with_the_live_globals(resumes):
    def setup():
        return {"made": []}

    def step(names, i):
        made = names["made"]

        def scaled(x, by=i, *, plus=1):
            return x * by + plus + len(made)

        def down(n):
            return 0 if n == 0 else 1 + down(n - 1)

        names["made"] += [
            scaled,
            down,
            lambda x: x + i,
            lambda x: x - i,
            functools.partial(scaled, by=2),
        ]
        return [f(3) for f in names["made"]]

    _, resumed = resumes(setup, step)
    assert resumed.names["made"][0].__globals__ is globals()


def test_function_attributes_and_mutable_defaults_are_state(resumes):
    def setup():
        vars(remembering).clear()
        collecting.__defaults__[0].clear()
        return {"remembering": remembering, "collecting": collecting}

    resumes(setup, lambda names, i: (remembering(i), collecting(i)))


def test_class_attributes_of_the_project_are_state(resumes):
    def setup():
        Counting.total = 0
        Counting.registry.clear()
        vars(Counting).get("extra") and delattr(Counting, "extra")
        return {"Counting": Counting}

    def step(names, i):
        Counting()
        Counting.extra = (*getattr(Counting, "extra", ()), i)
        return Counting.total, sorted(Counting.registry), Counting.extra

    resumes(setup, step)


def counting_class(base=object):
    """Return an instance whose class alone leads to what its methods count."""
    state = {"n": 0}

    def count():
        state["n"] += 1
        return state["n"]

    class Above(base):
        def inherited(self):
            return count()

    class Local(Above):
        def method(self):
            return count()

        @staticmethod
        def static():
            return count()

        @classmethod
        def of_class(cls):
            return count()

        @property
        def value(self):
            return count()

        def __call__(self):
            return count()

    return Local(2) if base in (torch.Tensor, np.ndarray) else Local()


@pytest.mark.parametrize("way", ["inherited", "method", "static", "of_class", "__call__"])
@pytest.mark.parametrize("base", [object, dict, tuple, nn.Module, torch.Tensor, np.ndarray])
def test_variables_that_methods_close_over_are_state(resumes, way, base):
    resumes(lambda: {"one": counting_class(base)}, lambda names, i: getattr(names["one"], way)())


def test_variables_that_a_property_closes_over_are_state(resumes):
    resumes(lambda: {"one": counting_class()}, lambda names, i: names["one"].value)


def test_variables_that_a_metaclass_closes_over_are_state(resumes):
    def setup():
        seen = []

        class Meta(type):
            def see(cls, i):
                seen.append(i)
                return sum(seen)

        return {"cls": Meta("Made", (), {})}

    resumes(setup, lambda names, i: names["cls"].see(i))


def counted(function):
    """Count calls where only the wrapper knows."""
    calls = []

    @functools.wraps(function)
    def wrapper(*args):
        calls.append(len(calls))
        wrapper.last = sum(calls)
        return function(*args) + sum(calls)

    wrapper.calls = calls
    return wrapper


class Decorated:
    @counted
    @counted
    def step(self):
        return 1

    def noted(self, seen=[]):  # noqa: B006
        seen.append(len(seen))
        Decorated.noted.most = max(seen)
        return Decorated.noted.most


def test_decorators_defaults_and_attributes_of_methods_are_state(resumes):
    def setup():
        Decorated.step.calls.clear()
        Decorated.step.__wrapped__.calls.clear()
        Decorated.noted.__defaults__[0].clear()
        vars(Decorated.noted).clear()
        return {"one": Decorated()}

    resumes(setup, lambda names, i: (names["one"].step(), names["one"].noted()))


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2

    def count(self, seen=[]):  # noqa: B006
        seen.append(self)
        self.times = getattr(self, "times", 0) + 1
        return self.times, len(seen)


def test_methods_and_members_of_enumerations_hold_state(resumes):
    def setup():
        Phase.count.__defaults__[0].clear()
        for phase in Phase:
            vars(phase).pop("times", None)
        return {"Phase": Phase}

    resumes(setup, lambda names, i: (Phase.WARM.count(), Phase(1 + i % 2).count(), list(Phase)))


def test_the_walk_enters_the_mapping_behind_a_read_only_view(resumes):
    def setup():
        return {"shown": types.MappingProxyType({"one": counting_class()})}

    resumes(setup, lambda names, i: names["shown"]["one"].method())


def test_a_weak_reference_to_a_method_stays_one(resumes):
    def setup():
        adder = Adder()
        return {"adder": adder, "weak": weakref.WeakMethod(adder.add)}

    resumes(setup, lambda names, i: names["weak"]()(i))


class Adder:
    def __init__(self):
        self.total = 0

    def add(self, i):
        self.total += i
        return self.total


def test_bound_methods_partials_and_modules_go_by_reference(resumes):
    def setup():
        config = Config(1.0)
        return {
            "config": config,
            "append": config.steps.append,
            "log": logging.getLogger("x"),
            "np": itertools,
        }

    def step(names, i):
        names["append"](i)
        names["later"] = functools.partial(Config.__init__, names["config"])
        names["method"] = names["config"].__repr__
        names["module"] = sys
        names["logger"] = logging.getLogger("y")
        names["type"] = Config
        names["generic"] = list[int]
        return names["method"](), names["module"] is sys, names["type"].__name__

    _, resumed = resumes(setup, step)
    assert resumed.names["append"].__self__ is resumed.names["config"].steps
    assert resumed.names["method"].__self__ is resumed.names["config"]
    assert resumed.names["logger"] is logging.getLogger("y")


def test_locks_are_kept_or_made_again(resumes):
    def setup():
        return {"lock": threading.Lock(), "n": 0}

    def step(names, i):
        names.setdefault("new", threading.RLock())
        with names["lock"], names["new"]:
            names["n"] += 1
        return names["n"]

    resumes(setup, step)


def test_a_lock_held_at_the_boundary_is_reported(program):
    held = threading.Lock()
    run = program(dict, lambda names, i: names.update(lock=held))
    run.run(0, 1)
    with held:
        captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == ["lock: a lock is held"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: iter([1, 2, 3, 4, 5, 6]), id="list"),
        pytest.param(lambda: iter(range(10, 20)), id="range"),
        pytest.param(lambda: iter("abcdefg"), id="str"),
        pytest.param(lambda: iter((1, 2, 3, 4, 5, 6)), id="tuple"),
        pytest.param(lambda: iter({i: i for i in range(6)}), id="dict"),
        pytest.param(lambda: enumerate("abcdefg", 5), id="enumerate"),
        pytest.param(lambda: zip("abcdefg", range(7), strict=True), id="zip"),
        pytest.param(lambda: map(str, range(7)), id="map"),
        pytest.param(lambda: filter(bool, range(1, 9)), id="filter"),
        pytest.param(lambda: reversed([1, 2, 3, 4, 5, 6]), id="reversed"),
        pytest.param(lambda: itertools.count(3, 2), id="count"),
        pytest.param(lambda: itertools.cycle([1, 2, 3]), id="cycle"),
        pytest.param(lambda: itertools.chain([1, 2], [3, 4, 5, 6]), id="chain"),
        pytest.param(lambda: itertools.islice(range(20), 3, None), id="islice"),
        pytest.param(lambda: itertools.repeat(4, 6), id="repeat"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*itertools:DeprecationWarning")
def test_iterators_continue_at_their_position(make, resumes):
    if sys.version_info >= (3, 14) and type(make()).__module__ == "itertools":
        pytest.skip("itertools lost its pickling in Python 3.14; see the test of what is reported")

    def step(names, i):
        names["new"] = names.get("new") or make()
        return next(names["it"]), next(names["new"])

    stale_differs = type(make()) is not itertools.repeat
    resumes(lambda: {"it": make()}, step, stale_differs=stale_differs)


def test_an_iterator_over_a_live_list_sees_items_appended_later(resumes):
    def setup():
        todo = [1, 2, 3]
        return {"todo": todo, "it": iter(todo)}

    def step(names, i):
        names["todo"].append(i * 10)
        return next(names["it"])

    resumes(setup, step)


def test_layouts_tell_python_classes_from_c_ones():
    class Plain: ...

    class Slotted:
        __slots__ = ("x",)

    class Both(Slotted): ...

    class Number(int): ...

    for cls in (Plain, Slotted, Both, Config, types.SimpleNamespace):
        assert not layout_of(cls).hidden
    assert layout_of(Both).has_dict
    assert [s.__name__ for s in layout_of(Both).slots] == ["x"]
    assert layout_of(Number).base is int
    assert not layout_of(Number).plain
    torch = pytest.importorskip("torch")
    assert layout_of(torch.nn.Linear).plain
    assert not layout_of(torch.Generator).plain


def test_a_namespace_resumes(resumes):
    def step(names, i):
        names["args"].lr /= 2
        names["args"].made = [i]
        return repr(names["args"])

    resumes(lambda: {"args": types.SimpleNamespace(lr=1.0)}, step)


def test_a_function_that_the_loop_of_a_module_makes_comes_back_before_it_has_a_name(resumes):
    """As in `for epoch in …: def closure(): …` at the top level of a script."""

    def setup():
        globals().pop("made_in_the_loop", None)
        return {}

    def step(names, i):
        def made_in_the_loop(by=i):
            return by

        previous = names.get("made", lambda: None)()
        made_in_the_loop.__qualname__ = "made_in_the_loop"
        globals()["made_in_the_loop"] = names["made"] = made_in_the_loop
        return previous

    try:
        resumes(setup, step)
    finally:
        globals().pop("made_in_the_loop", None)


def test_a_function_made_in_the_loop_raises_instead_of_using_old_values(program):
    """It sees a variable of a running function, which its restored copy would not see change."""
    from rearview.errors import StateError

    def train(names):
        rate = 1.5
        names["made"] = [lambda: rate]
        return {f"local:0:{train.__qualname__}:rate": rate}

    def capture(run, running):
        captured = state_of(run.anchors, {**running, "local:main:made": run.names["made"]})
        return captured, {key: bytes(data) for key, data in captured.buffers.items()}

    run = program(lambda: {"made": []}, None)
    captured, buffers = capture(run, train(run.names))
    assert captured.missing == []
    run.restore(captured.skeleton, buffers)
    with pytest.raises(StateError, match="a variable of a running function"):
        run.names["made"][0]() + 1.0
    again, _ = run.capture()
    assert [m.why for m in again.missing] == [
        "a variable of a running function, seen by one made in its loop"
    ]


class Passing:
    """Passes everything on to what it wraps, as the streams of a progress bar do."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_an_object_that_forwards_every_attribute_is_restored(resumes):
    def step(names, i):
        names["made"] = Passing([*names.get("made", Passing([]))._inner, i])
        return names["made"].count(i), len(names["made"]._inner)

    resumes(dict, step)


class OneForAll:
    """All its instances are one and the same."""

    together: ClassVar[dict] = {}

    def __init__(self):
        self.__dict__ = self.together
        self.together.setdefault("seen", [])


def test_instances_that_share_their_attributes_still_share_them(resumes):
    def setup():
        OneForAll.together.clear()
        return {"old": OneForAll(), "new": None}

    def step(names, i):
        if i == 1:
            names["new"] = OneForAll()
        (names["new"] or names["old"]).seen.append(i)
        (names["new"] or names["old"]).last = i
        return list(names["old"].seen), names["old"].last

    _, resumed = resumes(setup, step)
    assert vars(resumed.names["new"]) is vars(resumed.names["old"])


def test_a_read_only_view_made_in_the_loop_shows_the_same_mapping_again(resumes):
    def setup():
        return {"held": {"n": 0}, "shown": None, "other": None}

    def step(names, i):
        names["held"]["n"] += 1
        if i == 0:
            names["shown"] = types.MappingProxyType(names["held"])
            names["other"] = types.MappingProxyType({"at": i})
        return names["shown"]["n"], names["other"]["at"]

    resumes(setup, step, stale_differs=False)
