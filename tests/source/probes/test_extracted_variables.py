"""A recorded statement may name its value, if it computes exactly what it did."""

import ast
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.errors import ProbeError
from rearview.source.isolate_probes import isolate_probes
from rearview.source.probes.align import compare
from rearview.source.probes.find import check, find

TRAIN = """\
import torch
from torch.nn.utils import clip_grad_norm_

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)

def evaluate(net):
    norm = net.fc.weight.norm()
    return norm.item()

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
history, best = [], 9.0
for epoch in range(3):
    for x in data:
        loss = net(x).mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    history.append(loss.item())
    if evaluate(net) < best:
        best = evaluate(net)
    print(epoch, f"{loss.item():.3f}")
"""
CLIP = "clip_grad_norm_(net.parameters(), 1.0)\n"


def edited(*changes, text=TRAIN, head="import rearview\n"):
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    return head + text


def found(*changes):
    return find({"t.py": TRAIN}, {"t.py": edited(*changes)})


def refused(*changes):
    with pytest.raises(ProbeError) as caught:
        found(*changes)
    return caught.value


LOG = "rearview.log('v', v)"
NAMED = {
    "its value": (CLIP, f"v = {CLIP}        {LOG}\n"),
    "its value, typed": (CLIP, f"v: float = {CLIP}        {LOG}\n"),
    "parts of its value": (CLIP, f"v, w = {CLIP}        {LOG}\n"),
    "in place": (CLIP, f"(v := {CLIP.strip()})\n        {LOG}\n"),
    "beside its own": ("loss = net(x).mean()", f"loss = v = net(x).mean()\n        {LOG}"),
    "before its own": ("loss = net(x).mean()", f"v = loss = net(x).mean()\n        {LOG}"),
    "a part": ("loss = net(x).mean()", f"loss = (v := net(x)).mean()\n        {LOG}"),
    "a test": ("if evaluate(net) < best:", f"if (v := evaluate(net)) < best:\n        {LOG}"),
    "returned": ("return self.fc(x)", f"v = self.fc(x)\n        {LOG}\n        return v"),
    "an argument": (
        "history.append(loss.item())",
        f"v = loss.item()\n    {LOG}\n    history.append(v)",
    ),
    "tested": ("if evaluate(net) < best:", f"v = evaluate(net)\n    {LOG}\n    if v < best:"),
    "first evaluated": (
        "loss = net(x).mean()",
        f"v = net(x)\n        {LOG}\n        loss = v.mean()",
    ),
    "one of another": (
        "loss = net(x).mean()",
        f"v = net(x)\n        w = v.mean()\n        {LOG}\n        loss = w",
    ),
    "a name that another function uses": (
        CLIP,
        f"norm = {CLIP}        rearview.log('v', norm)\n",
    ),
}


@pytest.mark.parametrize("change", NAMED.values(), ids=list(NAMED))
def test_a_recorded_statement_may_name(change):
    probes = found(change)
    assert probes.names == ("v",)
    assert len(probes.probes) == 2  # the import and the log call: the statement is no probe
    assert probes.of("v")[0].depth == len(probes.of("v")[0].loops)


def test_a_named_value_is_a_variable_of_probes_and_needs_no_isolation():
    probes = found(NAMED["its value"])
    assert "v" in probes.variables["t.py", "<module>"]
    text = ast.unparse(isolate_probes(ast.parse(probes.source["t.py"]), probes.places("t.py")))
    assert f"\n        v = {CLIP}        with __rearview_probe__" in text


def test_values_named_in_steps_feed_a_probe_after_the_loop():
    (probe,) = found(
        (CLIP, f"v = {CLIP}"), ("    history.append", f"    {LOG}\n    history.append")
    ).of("v")
    assert (probe.depth, probe.feeding_loops) == (0, (("epoch", "x"),))


def test_a_value_named_conditionally_is_carried_over_iterations():
    old = "for epoch in range(3):\n    print(epoch > 1 and f())\n    g()\n"
    new = old.replace("f()", "(v := f())") + f"    {LOG}\n"
    (probe,) = find({"t.py": old}, {"t.py": new}).of("v")
    assert probe.depth == 0


REFUSED = {
    "a name in use": (
        [(CLIP, f"best = {CLIP}")],
        "gives the value the name `best`, which the recorded code uses",
        "best = clip",
    ),
    "another value": (
        [(CLIP, "v = clip_grad_norm_(net.parameters(), 2.0)\n")],
        "replaces the recorded",
        "2.0",
    ),
    "inside a log call": (
        [(CLIP, f"rearview.log('v', {CLIP.strip()})\n")],
        "Write `value = clip_grad_norm_(net.parameters(), 1.0)` in its place",
        "rearview.log",
    ),
    "with more done to it": ([(CLIP, f"v = {CLIP.strip()}.item()\n")], "part of it", ".item()"),
    "twice computed": (
        [
            ("if evaluate(net) < best:", "v = evaluate(net)\n    if v < best:"),
            ("best = evaluate(net)", "best = v"),
        ],
        "`v` where `evaluate(net)` was",
        "best = v",
    ),
    "rebound before it is used": (
        [("history.append(loss.item())", "v = loss.item()\n    v = 2\n    history.append(v)")],
        "`v` where `loss.item()` was",
        "history.append(v)",
    ),
    "rebound after it is used": (
        [
            (
                "history.append(loss.item())",
                "v = loss.item()\n    if v:\n        v = 0\n    history.append(v)",
            )
        ],
        "rebinds `v`",
        "v = 0",
    ),
    "computed before recorded code": (
        [
            (
                "        loss.backward()\n",
                "        v = net.parameters()\n        loss.backward()\n",
            ),
            (CLIP, "clip_grad_norm_(v, 1.0)\n"),
        ],
        "`loss.backward()` (line 25) ran before it",
        "clip_grad_norm_(v",
    ),
    "changed in place": (
        [("return self.fc(x)", "v = self.fc(x)\n        v.mul_(2)\n        return v")],
        "in place",
        "mul_",
    ),
}


@pytest.mark.parametrize(("changes", "why", "line"), REFUSED.values(), ids=list(REFUSED))
def test_refused_is(changes, why, line):
    error = refused(*changes)
    assert why in str(error)
    shown = edited(*changes).splitlines()[error.line - 1]
    assert line in shown
    assert "`import rearview`" not in str(error)


def test_a_name_for_a_value_in_a_class_body_is_refused():
    old = "class A:\n    f()\nA()\n"
    with pytest.raises(ProbeError, match="attribute `v`"):
        find({"t.py": old}, {"t.py": old.replace("f()", "v = f()")})


def test_a_name_that_recorded_code_would_list_is_refused():
    old = "f()\nprint(globals())\n"
    with pytest.raises(ProbeError, match="lists all variables"):
        find({"t.py": old}, {"t.py": "v = f()\nprint(globals())\n"})


def test_the_recorded_statement_itself_is_preferred_to_a_new_one_that_names_it():
    old = "f(x)\ng()\n"
    result = compare(ast.parse(old), ast.parse("v = f(x)\nf(x)\ng()\n"))
    assert [item.node.lineno for item in result.added_statements] == [1]
    assert not result.extracted_variables


OBSTACLES = [
    # recorded, value computed first, what was evaluated before it
    ("h(a[0], f())", "f()", "a[0]"),
    ("h(g(), f())", "f()", "g()"),
    ("h(a + b, f())", "f()", "a + b"),
    ("total.n += f()", "f()", "total.n"),
    ("h(o.n, f())", "f()", "o.n"),
    ("h(seen, f())", "f()", "seen"),
    ("h(*a, f())", "f()", "*a"),
]


@pytest.mark.parametrize(("recorded", "value", "first"), OBSTACLES)
def test_code_evaluated_before_a_named_value_is_reported(recorded, value, first):
    head = "def k():\n    global seen\n    seen = 1\n    o.n = 2\n"
    new = f"{head}v = {value}\n{recorded.replace(value, 'v')}\n"
    _, refusals = check({"t.py": f"{head}{recorded}\n"}, {"t.py": new})
    assert refusals[0].line == 6
    assert f"`{first}` was evaluated before it" in refusals[0].why
    assert "(value := ...)" in refusals[0].remedy


@pytest.mark.parametrize(
    "recorded",
    ["a and f()", "h(1 if a else f())", "[f() for _ in a]", "assert a, f()", "a < b < f()"],
)
def test_a_value_that_is_not_always_computed_may_not_be_computed_first(recorded):
    _, refusals = check({"t.py": recorded}, {"t.py": f"v = f()\n{recorded.replace('f()', 'v')}"})
    assert refusals


class Traced:
    """Notes everything that is done to it."""

    def __init__(self, trace, name):
        object.__setattr__(self, "trace", trace)
        object.__setattr__(self, "name", name)

    def __repr__(self):
        return self.name

    def note(self, what):
        self.trace.append(f"{self.name}{what}")
        return Traced(self.trace, f"{self.name}{what}")

    def __call__(self, *args, **named):
        inside = [a.name if isinstance(a, Traced) else str(a) for a in (*args, *named.values())]
        return self.note(f"({','.join(inside)})")

    def __getitem__(self, key):
        return self.note(f"[{getattr(key, 'name', key)}]")

    def __add__(self, other):
        return self.note(f"+{getattr(other, 'name', other)}")

    def __lt__(self, other):
        return self.note(f"<{getattr(other, 'name', other)}")

    def __bool__(self):
        self.trace.append(f"{self.name}?")
        return len(self.trace) % 2 == 0

    def __iter__(self):
        self.trace.append(f"iter {self.name}")
        return iter([1, 2])

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other


def expressions():
    leaves = st.sampled_from(["a", "b", "1", "f()", "g(a)", "a[0]"])

    def grow(inner):
        two = st.tuples(inner, inner)
        return st.one_of(
            two.map(lambda p: f"h({p[0]}, {p[1]})"),
            two.map(lambda p: f"h({p[0]}, k={p[1]})"),
            two.map(lambda p: f"({p[0]} + {p[1]})"),
            two.map(lambda p: f"({p[0]} < {p[1]})"),
            two.map(lambda p: f"({p[0]} and {p[1]})"),
            two.map(lambda p: f"({p[0]}, {p[1]})"),
            two.map(lambda p: f"{{{p[0]}: {p[1]}, 2: {p[1]}}}"),
            two.map(lambda p: f"a[{p[0]}]({p[1]})"),
            st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
            inner.map(lambda e: f"[{e} for i in a]"),
        )

    return st.recursive(leaves, grow, max_leaves=6)


STATEMENTS = st.sampled_from(["{}", "x = {}", "y[b] = {}", "assert 1, {}", "if {}:\n    x = 1"])


def run(text):
    trace = []
    space = {name: Traced(trace, name) for name in "abfgh"}
    space["y"] = {}
    try:
        exec(compile(text, "t.py", "exec"), space)
    except Exception as exc:
        trace.append(type(exc).__name__)
    return trace


@settings(max_examples=400, deadline=None)
@given(STATEMENTS, expressions(), st.data())
def test_every_accepted_edit_does_the_same_things_in_the_same_order(form, expression, data):
    old = form.format(expression) + "\n"
    tree = ast.parse(old)
    values = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.BinOp)]
    if not values:
        return
    chosen = data.draw(st.sampled_from(values))
    given_name = ast.Name("v", ast.Load())
    text = ast.unparse(chosen)

    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return given_name if node is chosen else self.generic_visit(node)

    new = f"v = {text}\nprint_(v)\n{ast.unparse(Replace().visit(tree))}\n"
    result = compare(ast.parse(old), ast.parse(new))
    if not result.missing_statements:
        assert run(new.replace("print_(v)\n", "")) == run(old)


def test_most_natural_edits_of_that_kind_are_accepted():
    for old, value in (
        ("h(f())", "f()"),
        ("x = h(a, f(), g(b))", "f()"),
        ("return_(1, k=f())", "f()"),
        ("y[b] = f() + g(a)", "f()"),
        ("a.b.append((1, f()))", "f()"),
        ("if f() < b:\n    h()", "f()"),
        ("x += f()", "f()"),
    ):
        new = f"v = {value}\nlook(v)\n{old.replace(value, 'v', 1)}\n"
        assert not compare(ast.parse(old), ast.parse(new)).missing_statements, old


def test_several_values_are_computed_in_the_order_of_the_recorded_statement():
    old = "h(f(), g())\n"
    for order, lost in (("a = f()\nb = g()\n", 0), ("b = g()\na = f()\n", 1)):
        result = compare(ast.parse(old), ast.parse(f"{order}h(a, b)\n"))
        assert len(result.missing_statements) == lost


def test_a_statement_on_several_lines_may_be_named():
    old = textwrap.dedent("""\
        for x in xs:
            f(
                x,
                2,
            )
        """)
    new = old.replace("f(", "v = f(") + "    look(v)\n"
    assert find({"t.py": old}, {"t.py": new})
