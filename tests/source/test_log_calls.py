"""The names in log calls are found, whatever the logger."""

import ast

import pytest

from rearview.source.log_calls import Aliases, calls_in, names_logged


def logged(text):
    tree = ast.parse(text)
    return [name for call in calls_in(tree, Aliases(tree)) for name in call.names]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('rearview.log("loss", x)', ["loss"]),
        ('rearview.log({"a": 1, "b": 2, **{"c": 3}})', ["a", "b", "c"]),
        ('import rearview as rv\nrv.log("a", 1)', ["a"]),
        ('from rearview import log as note\nnote("a", 1)', ["a"]),
        ("import rearview\nrearview.log(loss=1, step=3)", ["loss"]),
        ('import flor\nx = flor.log("a", 1)', ["a"]),
        ('rearview.log("train/" + k, 1)', ["train/*"]),
        ('rearview.log(f"{a}/loss", 1)', ["*/loss"]),
        ('rearview.log("a" if t else "b", 1)', ["a", "b"]),
        ('writer.add_scalar("a", 1, 2)', ["a"]),
        ('writer.add_scalars("a", {"x": 1, "y": 2}, 3)', ["a/x", "a/y"]),
        ('self.writer.add_histogram(tag="h", values=v)', ["h"]),
        ('wandb.log({"a": 1, f"b/{i}": 2}, step=3)', ["a", "b/*"]),
        ("run.log(dict(a=1), commit=False)", ["a"]),
        ('mlflow.log_metric("a", 1)', ["a"]),
        ('mlflow.log_metrics({"a": 1}, step=2)', ["a"]),
        ('self.log("val", x, prog_bar=True)', ["val"]),
        ('self.log_dict({"a": 1})', ["a"]),
        ('tf.summary.scalar("a", 1)', ["a"]),
        ('run.track(1, name="a")', ["a"]),
        ('logger.report_scalar("t", "s", 1, 2)', ["t/s"]),
        ("wandb.log({k: v for k, v in d.items()})", []),
        ("math.log(x); torch.log(y); logging.log(10, 'x'); print('x')", []),
    ],
)
def test_names_are_read_from_the_call(text, names):
    assert logged(text) == names


def test_places_are_given_with_their_loops():
    source = {
        "a.py": "for e in x:\n    for s in y:\n        rearview.log('l', s)\n    rearview.log('l', e)\n",
        "b.py": "def f():\n    while 1:\n        rearview.log('l', 0)\n",
        "c.txt": "rearview.log('no', 1)",
    }
    found = names_logged(source)
    assert {(w.path, w.line, w.loops, w.function) for w in found["l"]} == {
        ("a.py", 3, ("e", "s"), "<module>"),
        ("a.py", 4, ("e",), "<module>"),
        ("b.py", 3, ("f",), "f"),
    }
    assert list(found) == ["l"]
