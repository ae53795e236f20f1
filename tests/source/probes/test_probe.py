"""Two edits have the same fingerprint for a name if they log it in the same way, whatever else they add."""

import pytest

from rearview.source.probes.find import find
from rearview.source.probes.probe import logging_fingerprint

OLD = """\
def train(x):
    for step in range(3):
        x = x * 2
    return x


train(1)
"""
PLAIN = OLD.replace("x * 2\n", 'x * 2\n        rearview.log("a", x)\n')


def key(text, name="a"):
    return logging_fingerprint(find({"t.py": OLD}, {"t.py": "import rearview\n" + text}), name)


@pytest.mark.parametrize(
    "edit",
    [
        ('log("a", x)', 'log("a",   x)  # that is all'),
        ('        rearview.log("a", x)\n', '        rearview.log("a", x)\n        print(x)\n'),
        ("train(1)", 'import math\nrearview.log("b", math.pi)\ntrain(1)'),
        ("    return x", '    half = x / 2\n    rearview.log("b", half)\n    return x'),
    ],
    ids=["layout", "print", "import", "variable"],
)
def test_other_added_statements_do_not_change_how_a_name_is_logged(edit):
    assert key(PLAIN.replace(*edit)) == key(PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace('"a", x', '"a", x + 1'),
        OLD.replace("        x = x * 2", '        rearview.log("a", x)\n        x = x * 2'),
        PLAIN.replace("    return x", '    rearview.log("a", x)\n    return x'),
    ],
    ids=["value", "place", "twice"],
)
def test_another_value_or_place_counts(text):
    assert key(text) != key(PLAIN)


def test_statements_that_a_logged_value_depends_on_change_its_logging_fingerprint():
    text = OLD.replace("x * 2\n", 'x * 2\n        y = f(x)\n        rearview.log("a", y)\n')
    one, other = (f"def f(x):\n    return x + {n}\n\n\n{text}" for n in (1, 2))
    assert key(one) != key(other)


def test_a_statement_that_may_change_a_logged_value_counts():
    text = OLD.replace("    for", "    seen = []\n    for").replace(
        "x * 2\n",
        'x * 2\n        rearview.log("b", seen.append(x))\n        rearview.log("a", len(seen))\n',
    )
    assert key(text) != key(text.replace("append(x)", "extend([x, x])"))
