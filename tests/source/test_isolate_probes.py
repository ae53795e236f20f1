"""A program with isolated probes does what the program does, and its lines stay where they were."""

import ast
import contextlib
import random
import traceback

import pytest

from rearview.source.isolate_probes import isolate_probes
from rearview.source.probes.find import find


class Shield:
    """What a runtime would bind: keeps the random state and notes its arguments."""

    def __init__(self):
        self.calls = []

    @contextlib.contextmanager
    def __call__(self, line, *generators):
        self.calls.append((line, generators))
        kept = random.getstate(), [g.getstate() for g in generators]
        yield
        random.setstate(kept[0])
        for generator, state in zip(generators, kept[1], strict=True):
            generator.setstate(state)

    def calm(self, line):
        return contextlib.nullcontext(line)


OLD = """\
import random
random.seed(1)
rng = random.Random(2)
out = []
for i in range(3):
    out.append(random.random())
    out.append(rng.random())
"""
NEW = """\
import random
random.seed(1)
rng = random.Random(2)
out = []

def noise(n):
    "What a probe calls."
    return [random.random() for _ in range(n)]
for i in range(3):
    seen = noise(4); out.append(random.random())
    print(rng.random(), random.random())
    print(seen)
    out.append(rng.random())
"""


def run(text, probes=None, shield=None):
    tree = ast.parse(text)
    if probes is not None:
        isolate_probes(tree, probes.places("t.py"))
    space = {"__rearview_probe__": shield, "print": lambda *a: None}
    exec(compile(tree, "t.py", "exec"), space)
    return space["out"]


def test_random_draws_of_probes_leave_no_trace():
    probes, shield = find({"t.py": OLD}, {"t.py": NEW}), Shield()
    assert run(NEW, probes, shield) == run(OLD)
    assert run(NEW) != run(OLD)
    assert any(generators for _, generators in shield.calls)


def test_neighbours_share_a_with_statement_and_a_line_may_hold_both_kinds():
    probes, shield = find({"t.py": OLD}, {"t.py": NEW}), Shield()
    run(NEW, probes, shield)
    assert [line for line, _ in shield.calls] == [6, *[10, 8, 11] * 3]


def test_every_other_statement_keeps_its_line():
    probes = find({"t.py": OLD}, {"t.py": NEW})
    before = {ast.unparse(n): n.lineno for n in ast.walk(ast.parse(NEW)) if isinstance(n, ast.stmt)}
    shielded = isolate_probes(ast.parse(NEW), probes.places("t.py"))
    after = {ast.unparse(n): n.lineno for n in ast.walk(shielded) if isinstance(n, ast.stmt)}
    same = before.keys() & after.keys()
    assert {k: before[k] for k in same} == {k: after[k] for k in same}


def test_an_error_in_a_probe_shows_the_users_line():
    old, new = "a = 1\n", "a = 1\n\nprint(a / 0)\n"
    probes = find({"t.py": old}, {"t.py": new})
    tree = isolate_probes(ast.parse(new), probes.places("t.py"))
    with pytest.raises(ZeroDivisionError) as caught:
        exec(
            compile(tree, "t.py", "exec"),
            {"__rearview_probe__": Shield()},
        )
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 3


def test_a_generator_function_is_not_wrapped_as_a_whole():
    old, new = "a = 1\n", "a = 1\ndef walk(n):\n    yield n\n"
    tree = isolate_probes(ast.parse(new), find({"t.py": old}, {"t.py": new}).places("t.py"))
    assert "def walk(n):\n        yield n" in ast.unparse(tree)


@pytest.mark.parametrize(
    ("probe", "calm"),
    [
        ("rearview.log('n', float(w.norm()))", True),
        ("rearview.log({'a': x[0] * 2, 'b': len(xs)})", True),
        ("if step % 10 == 0:\n    print(f'{loss.item():.3f}')", True),
        ("rearview.log('n', model(x).item())", False),
        ("rearview.log('n', torch.randn(3).sum())", False),
        ("noise = x.normal_()", False),
        ("import sampler", False),
        ("rearview.log('n', [f(k) for k in xs])", False),
    ],
)
def test_only_probes_that_cannot_draw_run_without_a_copy_of_the_random_state(probe, calm):
    new = ast.unparse(isolate_probes(ast.parse(probe), {(1, 0): ()}))
    assert ("__rearview_probe__.calm(1)" in new) is calm


def test_calls_to_trackers_in_a_probe_are_ours_and_others_stay():
    text = (
        "import wandb\nfrom rearview import log\nimport rearview as rv\n"
        "wandb.log({'a': 1}, step=2)\nwriter.add_scalar(tag(), f(x))\nself.log('b', 3)\n"
        "log('c', 4)\nrv.log('d', 5)\nprint(math.log(6))\nwandb.log({'kept': 1})\n"
    )
    places = {(line, 0): () for line in range(4, 10)}
    shown = ast.unparse(isolate_probes(ast.parse(text), places))
    assert "__rearview_probe__.track('log', {'a': 1}, step=2)" in shown
    assert "__rearview_probe__.track('add_scalar', tag(), f(x))" in shown
    assert "__rearview_probe__.track('log', 'b', 3)" in shown
    for kept in ("log('c', 4)", "rv.log('d', 5)", "print(math.log(6))", "wandb.log({'kept': 1})"):
        assert f"{kept}\n" in shown + "\n"
