"""A watched loop asks of its iterable what plain Python asks, in the same order, and nothing else."""

import ast
import builtins
import contextlib
import linecache
import tempfile
import textwrap
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plainly import plain, recorded, write
from rearview._history import history
from rearview.config import Settings
from rearview.runtime import importer
from rearview.runtime.base_session import Session
from rearview.runtime.loops import LoopHistory
from rearview.source.instrument import HOOK, ITER, PARTS, WALK, instrument
from rearview.state.codecs.suspended_generators import LoopIterator, sources_of
from rearview.store.project import Project


class Watching(Session):
    """Sees every boundary, and looks at what feeds the loop as a checkpoint would."""

    def boundary(self, entry, index, frame):
        sources_of(entry.source, lambda _: True)
        return index

    def on_exhausted(self, entry, index, frame):
        sources_of(entry.source, lambda _: True)
        return True


# What may stand behind `in`: each writes down every call that reaches it.


class Traced:
    """Writes down what is called on it, attributes that are looked up included."""

    def __init__(self, trace, count):
        object.__setattr__(self, "own", (trace, count))
        object.__setattr__(self, "at", 0)

    def note(self, what):
        object.__getattribute__(self, "own")[0].append((type(self).__name__, what))

    def __getattribute__(self, name):
        if name not in {"own", "at", "note", "item"}:
            object.__getattribute__(self, "note")(f"look up {name}")
        return object.__getattribute__(self, name)

    def __getattr__(self, name):
        self.note(f"catch {name}")
        raise AttributeError(name)

    @property
    def __class__(self):
        self.note("class")
        return list

    def __len__(self):
        self.note("len")
        return self.own[1]

    def __length_hint__(self):
        self.note("hint")
        return self.own[1]

    def __bool__(self):
        self.note("bool")
        raise ValueError("neither")

    def __eq__(self, other):
        self.note("eq")
        raise ValueError("an array has no truth")

    def __hash__(self):
        self.note("hash")
        return 1

    def item(self):
        if self.at >= self.own[1]:
            raise StopIteration
        object.__setattr__(self, "at", self.at + 1)
        return self.at


class Resets(Traced):
    def __iter__(self):
        self.note("iter")
        object.__setattr__(self, "at", 0)
        return self

    def __next__(self):
        self.note("next")
        return self.item()


class GoesOn(Traced):
    def __iter__(self):
        self.note("iter")
        return self

    def __next__(self):
        self.note("next")
        return self.item()


class Fresh(Traced):
    def __iter__(self):
        self.note("iter")
        return Resets(*self.own)


class WakesUp(Resets):
    """Has items again after its end."""

    def item(self):
        object.__setattr__(self, "at", self.at + 1)
        if self.at % (self.own[1] + 1) == 0:
            raise StopIteration
        return self.at


class Breaks(Resets):
    """Raises where others end."""

    def item(self):
        if self.at >= self.own[1]:
            raise LookupError(self.at)
        object.__setattr__(self, "at", self.at + 1)
        return self.at


class NoIterator(Traced):
    def __iter__(self):
        self.note("iter")
        return 5


class Refuses(Traced):
    def __iter__(self):
        self.note("iter")
        raise LookupError("not today")


class ByNumber(Traced):
    def __getitem__(self, index):
        self.note(f"item {index}")
        if index >= self.own[1]:
            raise IndexError
        return index


class Objects(Resets):
    """Its items must not be looked at either."""

    def item(self):
        super().item()
        return Traced(*self.own)


class Tuples(Resets):
    def item(self):
        return super().item(), Traced(*self.own)


def contents(base, count):
    if base is dict:
        return {k: k for k in range(count)}
    return base("abcdefghijklmnop"[:count] if base is str else range(count))


def subclass(base, *, iterates):
    """Return a subclass of a container, with a way of its own to iterate or without."""

    class Mine(base):
        def __new__(cls, trace, count):
            return base.__new__(cls, contents(base, count))

        def __init__(self, trace, count):
            if base in (list, dict):
                base.__init__(self, contents(base, count))
            self.trace = trace

        def __len__(self):
            self.trace.append((base.__name__, "len"))
            return base.__len__(self)

        def __bool__(self):
            self.trace.append((base.__name__, "bool"))
            return True

    class Iterating(Mine):
        def __iter__(self):
            self.trace.append((base.__name__, "iter"))
            return base.__iter__(self)

    return Iterating if iterates else Mine


class MyEnumerate(enumerate):
    def __iter__(self):
        return enumerate(["other"])


def generator(trace, count):
    trace.append(("generator", "begins"))
    try:
        for k in [*range(count)]:
            trace.append(("generator", k))
            yield k
    finally:
        trace.append(("generator", "ends"))


def fails(trace, count):
    yield from range(count)
    raise LookupError("a generator")


def called(trace, count):
    source = Resets(trace, count)

    def call():
        trace.append(("call", source.at))
        return next(source, None)

    return iter(call, None)


KINDS = {
    **{
        cls.__name__: cls
        for cls in (
            *(Resets, GoesOn, Fresh, WakesUp, Breaks, NoIterator, Refuses, ByNumber, Objects),
            Tuples,
        )
    },
    **{
        f"{base.__name__} {iterates}": subclass(base, iterates=iterates)
        for base in (list, tuple, str, dict)
        for iterates in (True, False)
    },
    "generator": generator,
    "fails": fails,
    "called": called,
    "list": lambda _, count: list(range(count)),
    "tuples": lambda _, count: tuple((k, k) for k in range(count)),
    "range": lambda _, count: range(3, 3 + count),
    "range iterator": lambda _, count: iter(range(count)),
    "begun": lambda _, count: _begun(iter(list(range(count)))),
    "enumerate": lambda trace, count: enumerate(Resets(trace, count), 5),
    "my enumerate": lambda trace, count: MyEnumerate(Resets(trace, count)),
    "zip": lambda trace, count: zip(Resets(trace, count), range(count + 1), strict=False),
    "map": lambda trace, count: map(str, GoesOn(trace, count)),
    "set": lambda _, count: set(range(count)),
    "file": lambda _, count: Path(__file__).read_text().splitlines()[:count],
    "number": lambda _, count: count,
    "none": lambda _, count: None,
}


def _begun(items):
    next(items, None)
    return items


# The loops: all do the same with what they are given, each in its own kind of function.

BODY = """
    again = 0
    try:
        {loop}
            trace.append(("body", shown(x)))
            act = acts.pop(0) if acts else "go on"
            if act == "break":
                break
            if act == "continue":
                continue
            if act == "raise":
                raise KeyError("of the body")
            if act == "draw":
                trace.append(("drawn", shown(next(items, "nothing")) if iterates(items) else 0))
            if act == "grow" and type(items) is list and len(items) < 60:
                items.append(len(items))
            if act == "shrink" and type(items) is list and items:
                items.pop()
            if act == "nest" and again < 3:
                again += 1
                for y in items:
                    trace.append(("inner", shown(y)))
                    if len(trace) % 5 == 0:
                        break
            {rest}
        else:
            trace.append("else")
    except Exception as exc:
        told(trace, exc)
"""
LOOPS = {
    "function": "def loop(items, acts, trace):"
    + BODY.format(loop="for x in items:", rest="pass")
    + "    yield_nothing = []\n    return yield_nothing\n",
    "yields": "def loop(items, acts, trace):" + BODY.format(loop="for x in items:", rest="yield x"),
    "in a generator": "def loop(items, acts, trace):"
    + BODY.format(loop="for x in items:", rest="pass")
    + "    yield 1\n",
    "another range": "def loop(items, acts, trace):\n    range = lambda _: items"
    + BODY.format(loop="for x in range(0):", rest="pass")
    + "    return []\n",
    "parts": "def loop(items, acts, trace):\n    globals()['range'] = lambda _: items"
    + BODY.format(loop="for x in range(0):", rest="pass")
    + "    return []\n",
    "yield from": """
def loop(items, acts, trace):
    try:
        yield from items
    except Exception as exc:
        told(trace, exc)
    trace.append("after")
""",
}


def shown(x):
    if type(x) is tuple:
        return tuple(map(shown, x))
    return type(x).__name__ if isinstance(type(x), type) and issubclass(type(x), Traced) else x


def told(trace, exc):
    found = traceback.extract_tb(exc.__traceback__)
    frames = [(one.name, one.lineno, one.colno, one.end_colno) for one in found]
    if "['range']" in "".join(linecache.getlines(found[0].filename)):
        frames = []  # a name that came from nowhere: our frames are seen while it is looked at
    trace.append((type(exc).__name__, str(exc), frames))


@contextlib.contextmanager
def watching(stride):
    with tempfile.TemporaryDirectory() as folder:
        session = Watching(Project.create(Path(folder)), "run", Settings(), stride=stride)
        before = {one: builtins.__dict__.get(one) for one in (HOOK, PARTS, WALK, ITER)}
        importer._offer_hooks(session, importer._is_never_compiling)
        importer.offer(WALK, LoopIterator)
        importer.offer_value(ITER, iter)
        try:
            yield session
        finally:
            for one, value in before.items():
                if value is None:
                    builtins.__dict__.pop(one, None)
                else:
                    builtins.__dict__[one] = value


def ran(text, session, make, acts, times, count):
    """Return all that happened when the loop ran `times` times over the same iterable."""
    file = "<loop under test>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    tree = ast.parse(text)
    if session is not None:
        for site in instrument(tree, "t.py"):
            session.histories.setdefault(site.id, LoopHistory(site))
    space = {
        "shown": shown,
        "told": told,
        "iterates": lambda it: hasattr(type(it), "__next__"),
    }
    exec(compile(tree, file, "exec", dont_inherit=True), space)
    trace = []
    items = make(trace, count)
    for _ in range(times):
        found = space["loop"](items, list(acts), trace)
        for n, one in enumerate(found):
            trace.append(("given", shown(one)))
            if n > 40:
                found.close()
        trace.append("over")
    return list(trace)  # what is collected later is no part of it


ACTS = st.lists(
    st.sampled_from(
        ["go on"] * 6 + ["break", "continue", "raise", "draw", "grow", "shrink", "nest"]
    ),
    max_size=30,
)


@pytest.mark.parametrize("how", LOOPS)
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    acts=ACTS,
    stride=st.sampled_from([0.0, 60.0]),
    times=st.integers(1, 3),
    count=st.integers(0, 16),
)
def test_any_iterable_gets_the_same_calls_as_under_plain_python(
    how, kind, acts, stride, times, count
):
    plain = ran(LOOPS[how], None, KINDS[kind], acts, times, count)
    with watching(stride) as session:
        seen = ran(LOOPS[how], session, KINDS[kind], acts, times, count)
        assert session.stack == []
        assert session.loose == []
    assert seen == plain


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("stride", [0.0, 60.0], ids=["each", "together"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_iterable_gets_the_same_calls_as_under_plain_python(how, kind, stride):
    acts = ["go on"] * 9 + ["nest", "draw", "go on", "break"]
    plain = ran(LOOPS[how], None, KINDS[kind], acts, 3, 12)
    with watching(stride) as session:
        assert ran(LOOPS[how], session, KINDS[kind], acts, 3, 12) == plain


SCRIPTS = {
    "its own iterator": """
        class Loader:
            def __init__(self):
                self.resets = 0
            def __iter__(self):
                self.resets += 1
                self.at = 0
                return self
            def __next__(self):
                if self.at == 20:
                    raise StopIteration
                self.at += 1
                return self.at
        loader, steps = Loader(), 0
        for epoch in range(10):
            for batch in loader:
                steps += 1
        print(steps, loader.resets)
    """,
    "shuffles when asked": """
        import random, torch
        torch.manual_seed(0)
        random.seed(0)
        class Loader:
            def __init__(self, count):
                self.order = list(range(count))
            def __len__(self):
                return len(self.order)
            def __iter__(self):
                random.shuffle(self.order)
                self.at = 0
                return self
            def __next__(self):
                if self.at == len(self.order):
                    raise StopIteration
                self.at += 1
                return torch.randn(4), self.order[self.at - 1]
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(32)
        for epoch in range(4):
            total = 0.0
            for x, y in loader:
                loss = ((model(x) - y / 32) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            print(epoch, total, loader.order[:4])
    """,
    "fails on its way": """
        import traceback
        class Loader:
            def __iter__(self):
                self.at = 0
                return self
            def __next__(self):
                self.at += 1
                return 1 / (3 - self.at)
        def lines(items):
            for x in items:
                yield x
        for epoch in range(2):
            for watched in (Loader(), lines(Loader())):
                try:
                    for x in watched:
                        print(x)
                except ZeroDivisionError:
                    print(traceback.format_exc())
            try:
                for x in epoch:
                    pass
            except TypeError:
                print(traceback.format_exc())
    """,
    "closes what it yields from": """
        class Source:
            def __iter__(self):
                print("iter")
                return self
            def __next__(self):
                print("next")
                return 1
            def close(self):
                print("closed")
        def through():
            yield from Source()
        for k in range(3):
            items = through()
            print(next(items))
            items.close()
    """,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recorded_script_prints_the_same_as_under_plain_python(script, tmp_path):
    write(tmp_path, train=textwrap.dedent(SCRIPTS[script]))
    expected = plain(tmp_path, "train.py")
    assert expected.code == 0
    assert recorded(tmp_path, "train.py") == expected
    assert recorded(tmp_path, "train.py", every=False) == expected


def test_a_run_over_its_own_iterator_is_replayed_and_filled(tmp_path):
    write(tmp_path, train=textwrap.dedent(SCRIPTS["shuffles when asked"]))
    recorded(tmp_path, "train.py")
    text = (tmp_path / "train.py").read_text()
    probed = text.replace(
        "        total += loss.item()\n",
        "        total += loss.item()\n        import rearview; rearview.log('y', y)\n",
    )
    (tmp_path / "train.py").write_text(probed)
    past = history(tmp_path)
    report = past.backfill(["y"])
    assert report.proved, report.proof
    assert report.written == 4 * 32
