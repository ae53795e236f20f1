"""A number that is the `id` of an object in the state goes with the object, not with the process."""

import io
import os

import pytest

from rearview.state.compare import compare
from rearview.state.skeleton_reader import Skeleton


class Thing:
    def __init__(self, value=0):
        self.value = value


class Tracker:
    """What Keras and many others do: remember what was seen by its `id`."""

    def __init__(self):
        self.held, self.ids = [], set()

    def track(self, thing):
        if id(thing) not in self.ids:
            self.held.append(thing)
            self.ids.add(id(thing))


class Slotted:
    __slots__ = ("of", "thing")

    def __init__(self, thing):
        self.thing, self.of = thing, id(thing)


class Ids(set):
    """A set with attributes."""


class Strict:
    """One that pickling would ask for attributes which are not there yet."""

    def __init__(self, thing):
        self.thing, self.of = thing, id(thing)

    def __getattr__(self, name):
        raise AttributeError(name)


def with_ids(*things):
    ids = Ids(map(id, things))
    ids.note = "seen"
    return ids


FORMS = {
    "a set": (lambda *things: set(map(id, things)), lambda s, one: id(one) in s),
    "a set with attributes": (with_ids, lambda s, one: id(one) in s),
    "keys": (
        lambda *things: {id(one): k for k, one in enumerate(things)},
        lambda d, one: d.get(id(one)),
    ),
    "values": (
        lambda *things: {k: id(one) for k, one in enumerate(things)},
        lambda d, one: id(one) in d.values(),
    ),
    "a list": (lambda *things: list(map(id, things)), lambda v, one: id(one) in v),
    "tuples": (
        lambda *things: {(id(one), "w"): 1 for one in things},
        lambda d, one: (id(one), "w") in d,
    ),
    "an attribute": (lambda one, _: Strict(one), lambda s, one: s.of == id(one)),
    "a slot": (lambda one, _: Slotted(one), lambda s, one: s.of == id(one)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("older", [False, True])
def test_objects_that_are_known_by_their_id_are_known_after_restoring(resumes, form, older):
    def setup():
        return {"things": [Thing(), Thing(), Thing()], "born": [], "at": 0}

    make, knows = FORMS[form]

    def step(names, i):
        if i == 0:
            things = names["things"] if older else [Thing(), Thing(), Thing()]
            names["seen"] = make(*things[:2])
            names["born"].extend(things)
        return [knows(names["seen"], one) for one in names["born"]]

    resumes(setup, step)


def test_an_older_set_may_hold_ids_of_newer_objects(resumes):
    def setup():
        return {"tracker": Tracker()}

    def step(names, i):
        for one in list(names["tracker"].held):
            names["tracker"].track(one)
        names["tracker"].track(Thing(i))
        return len(names["tracker"].held)

    resumes(setup, step)


def test_a_number_in_a_variable_may_be_an_id(resumes):
    def setup():
        return {"things": [], "last": None}

    def step(names, i):
        known = [id(one) == names["last"] for one in names["things"]]
        names["things"].append(Thing(i))
        names["last"] = id(names["things"][-1])
        return known

    resumes(setup, step)


def setup_two():
    return {"trackers": []}


def two_alike(names):
    """Two trackers of objects that nothing but their place tells apart."""
    for _ in range(2):
        tracker = Tracker()
        for _ in range(5):
            tracker.track(Thing())
        names["trackers"].append(tracker)


def difference(program, change):
    then, now = program(setup_two, None), program(setup_two, None)
    for one in (then, now):
        two_alike(one.names)
    captured, buffers = then.capture()
    change(now.names["trackers"])
    return compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)


def test_a_run_that_made_the_same_objects_elsewhere_is_equal(program):
    assert difference(program, lambda trackers: None) is None


def exchange(trackers):
    one, other = trackers
    a, b = id(one.held[0]), id(other.held[0])
    one.ids.symmetric_difference_update({a, b})
    other.ids.symmetric_difference_update({a, b})


CHANGES = {
    "an id of another object": exchange,
    "an id less": lambda t: t[0].ids.remove(id(t[0].held[2])),
    "an id of nothing": lambda t: (t[0].ids.remove(id(t[0].held[2])), t[0].ids.add(1 << 46)),
    "the ids of one in the other": lambda t: setattr(t[0], "ids", set(t[1].ids)),
    "another order": lambda t: t[0].held.reverse() or setattr(t[0], "by", list(t[0].ids)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_ids_are_still_a_difference(program, change):
    assert difference(program, CHANGES[change]) is not None


def test_the_order_of_ids_in_a_list_is_compared(program):
    def run(flip):
        one = program(setup_two, None)
        two_alike(one.names)
        held = one.names["trackers"][0].held
        one.names["order"] = [id(thing) for thing in (held[::-1] if flip else held)]
        return one

    then, now = run(flip=False), run(flip=True)
    captured, buffers = then.capture()
    found = compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)
    assert found is not None
    same = compare(then.anchors, then.capture()[0], captured.skeleton, buffers.__getitem__)
    assert same is None


def test_the_id_of_a_value_that_has_equals_says_nothing_and_is_no_proof(program):
    def setup():
        return {"pairs": []}

    def run(which):
        one = program(setup, None)
        one.names["pairs"] += [tuple([1, 2]), tuple([1, 2])]  # noqa: C409
        one.names["of"] = {id(one.names["pairs"][which])}
        return one

    then, now = run(0), run(1)
    captured, buffers = then.capture()
    found = compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)
    assert "of" in str(found)


class Saved(io.BytesIO):
    """Kept in its own way, by a method of another object or by a function of the program."""

    maker = None

    def __reduce__(self):
        return self.maker, (self.getvalue(),)

    __getstate__ = None


class Press:
    def __init__(self, mark):
        self.mark = mark

    def make(self, data):
        made = Saved(data)
        made.maker = self.make
        return made


def make(data):
    made = Saved(data)
    made.maker = make
    return made


@pytest.mark.parametrize("how", ["method", "function"])
def test_an_object_made_by_a_method_or_an_older_function_is_compared(program, how):
    def setup():
        return {"press": Press(1), "make": make}

    def run(data, mark=1):
        one = program(setup, None)
        press = Press(mark)
        one.names["press_2"] = press
        one.names["saved"] = [(press.make if how == "method" else make)(data)]
        return one

    then, now = run(b"one"), run(b"one")
    captured, buffers = then.capture()
    assert captured.missing == []

    def found(other):
        return compare(other.anchors, other.capture()[0], captured.skeleton, buffers.__getitem__)

    assert found(now) is None
    assert "saved" in str(found(run(b"two")))


def test_keras_layers_that_are_added_in_a_loop_are_compared(program, monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    import keras

    def setup():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = keras.Sequential()
        model.add(keras.layers.Input((4,)))
        return {"model": model}

    def run():
        one = program(setup, None)
        for _ in range(2):
            one.names["model"].add(keras.layers.Dense(3))
        return one

    then, now = run(), run()
    captured, buffers = then.capture()

    def found():
        return compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)

    assert found() is None, str(found())
    now.names["model"].layers[1].kernel.value.data[0, 0] = 7
    assert "_value: byte 0" in str(found())


def test_lines_drawn_in_the_loop_are_shown_and_not_compared(resumes):
    from matplotlib import figure

    def setup():
        return {"lines": [], "total": 0}

    def step(names, i):
        names["total"] += i
        names["lines"] = [figure.Figure().subplots().plot([0, 1], [i, names["total"]])[0]]
        return names["total"]

    resumes(setup, step)


class Vectorizer:
    """What scikit-learn's vectorizers do: remember by its `id` what was checked."""

    def __init__(self, stop_words):
        self.stop_words, self.checked, self.times = stop_words, None, 0

    def check(self):
        if self.checked != id(self.stop_words):
            self.times += 1
            self.checked = id(self.stop_words)
        return self.times


def text(word):
    return "".join([word, "-words"])  # noqa: FLY002 - a new one each time


STOPPED = {
    "None": lambda: None,
    "a constant": lambda: "english",
    "a text of its own": lambda: text("stop"),
    "a list": lambda: ["the"],
    "a class": lambda: dict,
}


@pytest.mark.parametrize("born", [False, True], ids=["set up", "made in the loop"])
@pytest.mark.parametrize("stop_words", STOPPED)
def test_an_id_in_an_attribute_may_identify_a_value_too(program, resumes, stop_words, born):
    def setup():
        return {"of": None if born else Vectorizer(STOPPED[stop_words]()), "n": 0}

    def step(names, i):
        names["of"] = names["of"] or Vectorizer(STOPPED[stop_words]())
        names["n"] += names["of"].check()
        return names["n"]

    resumes(setup, step)
    # in another process the address is another: the number itself must not be in what is kept
    run = program(setup, step)
    run.run(0, 2)
    captured, _ = run.capture()
    tree = Skeleton(captured.skeleton)
    kept = tree.roots["local:main:of"]
    attributes = kept.state if born else tree.contents[kept.number][1]
    assert not isinstance(attributes["checked"], int)


def test_the_id_of_a_text_that_has_equals_says_nothing_and_is_no_proof(program):
    def setup():
        return {"texts": []}

    def run(which):
        one = program(setup, None)
        one.names["texts"] += [text("a"), text("a")]
        one.names["of"] = {id(one.names["texts"][which])}
        return one

    then, now = run(0), run(1)
    captured, buffers = then.capture()
    found = compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)
    assert "of" in str(found)
