import array
import pickle
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rearview.state.codecs.containers import recipe_for
from rearview.state.compare import compare

Pair = namedtuple("Pair", "left right")  # noqa: PYI024


class Bag(dict):
    """A dict with an attribute and a method that would spoil a naive restore."""

    def __init__(self):
        super().__init__()
        self.touched = 0

    def __setitem__(self, key, value):
        self.touched += 1
        super().__setitem__(key, value)


class Row(list):
    __slots__ = ("name",)


def test_containers_of_every_kind_resume(resumes):
    def setup():
        return {
            "list": [1, [2]],
            "dict": {"a": 1},
            "set": {1, 2},
            "deque": deque([1, 2], maxlen=3),
            "ordered": OrderedDict(a=1, b=2),
            "default": defaultdict(list),
            "counter": Counter("ab"),
            "bytes": bytearray(b"ab"),
            "array": array.array("d", [1.0]),
            "chain": ChainMap({}, {"x": 1}),
            "user": UserDict(a=1),
            "pair": Pair([1], {"a": 2}),
            "frozen": frozenset({("a", 1)}),
            "text": "start",
        }

    def step(names, i):
        names["list"][1].append(i)
        names["dict"][f"k{i}"] = [i]
        names["set"].add(i * 10)
        names["set"].discard(1)
        names["deque"].append({i})
        names["ordered"].move_to_end("a", last=bool(i % 2))
        names["default"][i].append(i)
        names["counter"].update("b" * i)
        names["bytes"].append(i)
        names["array"].append(i / 3)
        names["chain"]["y"] = i
        names["user"][i] = i
        names["pair"].left.append(i)
        names["text"] += str(i)
        return repr(names)

    resumes(setup, step)


def test_subclasses_of_containers_keep_items_attributes_and_slots(resumes):
    def setup():
        row = Row([1])
        row.name = "r"
        return {"bag": Bag(), "row": row}

    def step(names, i):
        names["bag"][i] = i
        names["row"].append(i)
        names["row"].name += str(i)
        names.setdefault("new", Bag())[i] = i
        return dict(names["bag"]), names["bag"].touched, names["row"].name, names["new"].touched

    resumes(setup, step)


def test_aliases_and_cycles_are_preserved(resumes):
    def setup():
        shared = [0]
        loop = {"self": None, "shared": shared}
        loop["self"] = loop
        return {"a": shared, "b": (shared, {"again": shared}), "loop": loop, "made": None}

    def step(names, i):
        names["a"].append(i)
        if names["made"] is None:
            ring = [names["a"]]
            ring.append(ring)
            names["made"] = names["twin"] = ring
        names["made"].append(i)
        return (
            list(names["b"][1]["again"]),
            len(names["twin"]),
            names["loop"]["self"] is names["loop"],
        )

    _, resumed = resumes(setup, step)
    names = resumed.names
    assert names["a"] is names["b"][0] is names["b"][1]["again"] is names["loop"]["shared"]
    assert names["made"] is names["twin"] is names["made"][1]
    assert names["made"][0] is names["a"]


class Layer:
    """Holds the same names as keys, in lists and as an attribute, as torch's RNN modules do."""

    def __init__(self):
        names = [f"weight_{number}" for number in range(3)]
        self.parameters = dict.fromkeys(names, 0.0)
        self.names = names
        self.first = names[0]
        self.groups = [names[:2], names[2:]]
        self.renamed = {"old": 0.0}


def test_a_text_held_in_several_places_is_one_text_after_a_restore(program):
    """What the program pickles then has the bytes that it would have had."""

    def step(names, i):
        layer = names["layer"]
        layer.parameters["weight_1"] += i
        layer.names.append(f"weight_{i + 3}")
        layer.renamed = {layer.names[-1]: i, layer.first: i}
        return pickle.dumps(layer, 2)

    def setup():
        return {"layer": Layer()}

    whole, first, second = (program(setup, step) for _ in range(3))
    expected = whole.run(0, 4)
    first.run(0, 2)
    captured, buffers = first.capture()
    second.restore(captured.skeleton, buffers)
    assert second.run(2, 4) == expected[2:]


def test_a_dict_that_an_outer_loop_iterates_over_is_not_disturbed(program):
    def setup():
        return {"configs": {"a": 1, "b": 2, "c": 3}, "done": []}

    truth = program(setup, None)
    truth.names["configs"]["a"] = 10
    captured, buffers = truth.capture()
    run = program(setup, None)
    order = []
    for key in run.names["configs"]:
        order.append(key)
        if key == "b":
            run.restore(captured.skeleton, buffers)
    assert order == ["a", "b", "c"]
    assert run.names["configs"] == {"a": 10, "b": 2, "c": 3}


def test_a_key_whose_hash_depends_on_restored_content_is_found_again(program):
    class Key:
        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return hash(self.name)

        def __eq__(self, other):
            return self.name == other.name

    def setup():
        key = Key("first")
        return {"key": key, "table": {key: 1}, "members": {key}}

    truth = program(setup, None)
    key = truth.names["key"]
    del truth.names["table"][key]
    truth.names["members"].discard(key)
    key.name = "second"
    truth.names["table"][key] = 2
    truth.names["members"].add(key)
    captured, buffers = truth.capture()
    run = program(setup, None)
    run.restore(captured.skeleton, buffers)
    assert run.names["table"][Key("second")] == 2
    assert Key("second") in run.names["members"]


def test_a_set_iterates_in_the_recorded_order(program):
    def setup():
        return {"seen": {3}}

    def step(names, i):
        names["seen"].update([16, 8, 0])

    truth = program(setup, step)
    truth.run(0, 1)
    order = list(truth.names["seen"])
    captured, buffers = truth.capture()
    assert captured.missing == []
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    assert list(resumed.names["seen"]) == order


def test_a_set_whose_order_cannot_be_restored_is_reported(program):
    # A table that has grown for elements since removed is larger than any recipe makes it.
    def setup():
        seen = set(range(1000, 2000))
        for i in range(1000, 2000):
            seen.discard(i)
        seen.update([3, 10])
        return {"seen": seen}

    run = program(setup, None)
    assert recipe_for(list(run.names["seen"])) is None
    captured, buffers = run.capture()
    assert captured.missing == [], "the set-up makes it again"
    again = program(setup, None)
    again.restore(captured.skeleton, buffers)
    assert list(again.names["seen"]) == [3, 10]
    run.names["seen"].add(20)
    captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == [
        "seen: the order of this set comes from deleted elements"
    ]


def test_weak_containers_hold_the_objects_that_are_alive(resumes):
    class Thing:
        def __init__(self, n):
            self.n = n

    def setup():
        things = [Thing(0), Thing(1)]
        return {
            "things": things,
            "by_thing": weakref.WeakKeyDictionary({things[0]: "zero"}),
            "by_name": weakref.WeakValueDictionary(one=things[1]),
            "group": weakref.WeakSet(things),
            "ref": weakref.ref(things[0]),
        }

    def step(names, i):
        things = names["things"]
        things.append(Thing(i + 2))
        names["by_thing"][things[-1]] = i
        names["by_name"][f"t{i}"] = things[-1]
        names["group"].add(things[-1])
        names["last"] = weakref.ref(things[-1])
        names["cache"] = names.get("cache") or weakref.WeakValueDictionary(first=things[-1])
        return (
            sorted(str(v) for v in names["by_thing"].values()),
            sorted(names["by_name"]),
            sorted(t.n for t in names["group"]),
            names["last"]().n,
            names["ref"]().n,
            names["cache"]["first"].n,
        )

    resumes(setup, step)


def test_a_set_or_dict_of_ids_names_the_objects_not_the_addresses(program):
    def setup():
        things = [[0], [1]]
        return {"things": things, "ids": {id(t) for t in things}, "names": {id(things[0]): "zero"}}

    def step(names, i):
        names["names"][id(names["things"][1])] = "one"

    truth = program(setup, step)
    truth.run(0, 1)
    captured, buffers = truth.capture()
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    things = resumed.names["things"]
    assert resumed.names["ids"] == {id(t) for t in things}
    assert resumed.names["names"] == {id(things[0]): "zero", id(things[1]): "one"}
    now, _ = resumed.capture()
    assert compare(resumed.anchors, now, captured.skeleton, buffers.__getitem__) is None


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
graphs = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(set, st.lists(st.integers() | st.text()))
        | st.builds(deque, st.lists(inner))
        | st.builds(OrderedDict, st.dictionaries(st.text(), inner))
    ),
    max_leaves=20,
)


def double(graph):
    """The same value with every part standing twice, so that sharing is exercised."""
    return {"once": graph, "twice": graph, "list": [graph, graph]}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(before=graphs, after=graphs)
def test_any_graph_of_containers_comes_back_equal(program, before, after):
    truth = program(lambda: {"old": double(before)}, None)
    truth.names["old"]["later"] = after
    truth.names["new"] = double(after)
    captured, buffers = truth.capture()
    # of a set in which one order of insertion in thousands fits, that is not always found, and said
    assert all("the order of this set" in part.why for part in captured.missing)
    assume(not captured.missing)

    resumed = program(lambda: {"old": double(before)}, None)
    resumed.restore(captured.skeleton, buffers)
    now, _ = resumed.capture()
    assert compare(resumed.anchors, now, captured.skeleton, buffers.__getitem__) is None
    assert resumed.names["new"]["once"] is resumed.names["new"]["twice"] or not isinstance(
        after, (list, dict, set, deque)
    )
    assert repr(resumed.names) == repr(truth.names)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(one=graphs, other=graphs)
def test_two_graphs_compare_equal_only_if_they_print_equal(program, one, other):
    run = program(lambda: {"x": None}, None)
    run.names["x"] = one
    then, buffers = run.capture()
    run.names["x"] = other
    now, _ = run.capture()
    difference = compare(run.anchors, now, then.skeleton, buffers.__getitem__)
    if difference is None:
        assert repr(one) == repr(other) or sorted(repr(one)) == sorted(repr(other))
    else:
        assert difference.path.startswith("x")
