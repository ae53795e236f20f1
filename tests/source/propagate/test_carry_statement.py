import tomllib
from pathlib import Path

import pytest

from rearview.source.propagate.carry_statement import carry
from rearview.source.text import decode, encode

GOLD = Path(__file__).parents[2] / "gold" / "propagation"
CASES = sorted(path.name for path in GOLD.iterdir() if path.is_dir())
NEW = "for x in data:\n    loss = f(x)\n    print(loss)\n    step(loss)\n"


@pytest.mark.parametrize("name", CASES)
def test_gold(name):
    case = tomllib.loads((GOLD / name / "case.toml").read_text())
    new, old = ((GOLD / name / part).read_text() for part in ("after.py", "before.py"))
    found = carry(new, tuple(case["lines"]), old)
    if "reason" in case:
        assert found.line is None
        assert case["reason"] in found.reason
    else:
        assert found.into(old) == (GOLD / name / "expected.py").read_text()


def test_the_answer_names_its_evidence():
    found = carry(NEW, (3, 3), NEW.replace("    print(loss)\n", ""))
    assert (found.line, found.text) == (3, "    print(loss)\n")
    assert found.reasons == ("both neighbours are there",)
    assert found.confidence > 0.7
    assert not found.refused


@pytest.mark.parametrize(
    ("new", "lines", "old", "reason"),
    [
        ("def f(:\n", (1, 1), "x = 1\n", "the new text cannot be read: line 1"),
        (NEW, (3, 3), "def f(:\n", "the old text cannot be read: line 1"),
        (NEW, (9, 9), NEW, "do not hold whole statements"),
        (NEW, (0, 0), NEW, "do not hold whole statements"),
        (NEW, (3, 2), NEW, "do not hold whole statements"),
        ("f(\n  1,\n)\n", (2, 2), NEW, "do not hold whole statements"),
        ("if x:\n    a\nelse:\n    b\n", (3, 4), NEW, "more than whole statements"),
        ("# only a comment\nx = 1\n", (1, 1), NEW, "do not hold whole statements"),
        (NEW, (3, 3), '{"cells": [], "nbformat": 4}', "is a notebook"),
        (NEW, (3, 3), "", "cannot be found there"),
        (NEW, (3, 3), "x = '\0'", "cannot be read"),
    ],
)
def test_an_impossible_insertion_is_refused_with_the_reason(new, lines, old, reason):
    found = carry(new, lines, old)
    assert found.line is None
    assert reason in found.reason
    assert found.into(old) == old


def test_line_ends_are_those_of_the_old_text():
    old = NEW.replace("    print(loss)\n", "").replace("\n", "\r\n")
    found = carry(NEW, (3, 3), old)
    assert found.text == "    print(loss)\r\n"
    assert "\n" not in found.into(old).replace("\r\n", "")


def test_a_text_without_a_last_line_end_keeps_it_so():
    new = "x = f()\nprint(x)\n"
    found = carry(new, (2, 2), "x = f()")
    assert (found.line, found.text) == (2, "\nprint(x)")
    assert found.into("x = f()") == "x = f()\nprint(x)"


def test_a_byte_order_mark_stays_first():
    old = "\ufeffx = f()\ny = g(x)\n"
    assert carry("x = f()\nprint(x)\ny = g(x)\n", (2, 2), old).into(old) == (
        "\ufeffx = f()\nprint(x)\ny = g(x)\n"
    )
    refused = carry("print(1)\nx = f()\ny = g(x)\n", (1, 1), old)
    assert "byte order mark" in refused.reason


def test_source_that_is_not_utf_8_keeps_its_bytes():
    data = b"# coding: latin-1\nname = '\xe9'\nuse(name)\n"
    old = decode(data)
    found = carry("# coding: latin-1\nname = 'e'\nprint(name)\nuse(name)\n", (3, 3), old)
    assert encode(found.into(old), data) == data.replace(b"use", b"print(name)\nuse")


def test_a_one_line_block_is_left_alone():
    found = carry("if x:\n    a = f(x)\n    print(a)\n    g(a)\n", (3, 3), "if x: a = f(x); g(a)\n")
    assert "one-line block" in found.reason


def test_several_statements_go_together():
    new = "a = f()\n# norms\nn = norm(a)\nprint(n)\nb = g(a)\n"
    found = carry(new, (2, 4), "a = f()\nb = g(a)\n")
    assert found.text == "# norms\nn = norm(a)\nprint(n)\n"


def test_a_name_the_old_code_uses_is_not_overwritten():
    new = "def t(a):\n    b = f(a)\n    n = norm(b)\n    c = g(b)\n    return c\n"
    old = "def t(a):\n    n = len(a)\n    b = f(a)\n    c = g(b)\n    return c / n\n"
    assert "overwrite `n`" in carry(new, (3, 3), old).reason


def test_a_decorated_function_is_not_torn_from_its_decorator():
    new = "import a\n\nprint(1)\n\n@deco\ndef f():\n    pass\n"
    old = "import a\n\n@deco\ndef f():\n    pass\n"
    assert carry(new, (3, 3), old).line in {2, 3}


def test_type_aliases_and_new_syntax_are_text_like_any_other():
    new = "from typing import TypeAlias\nV: TypeAlias = list[int]\nx: V = f()\nprint(x)\nuse(x)\n"
    old = "x = f()\nuse(x)\n"
    assert carry(new, (4, 4), old).line == 2


def test_twenty_thousand_lines_are_no_obstacle():
    old = "".join(f"def f{n}(a):\n    b = a + {n}\n    return b\n\n" for n in range(5000))
    new = old.replace("    b = a + 4321\n", "    b = a + 4321\n    print(b)\n")
    at = new.split("\n").index("    print(b)") + 1
    assert carry(new, (at, at), old).line == at


def test_the_same_statement_elsewhere_is_not_mistaken_for_the_place():
    old = "def a(x):\n    y = f(x)\n    print(y)\n    return y\n\ndef b(x):\n    y = g(x)\n    return y\n"
    new = old.replace("y = g(x)\n", "y = g(x)\n    print(y)\n")
    assert carry(new, (8, 8), old).line == 8


LOOP = "for x in data:\n    loss = f(x)\n    step(loss)\n"


def carried(new, old):
    """Carry the line of `new` that ends in `# here`."""
    lines = new.splitlines()
    at = next(k for k, line in enumerate(lines, 1) if line.endswith("# here"))
    return carry(new, (at, at), old)


def test_a_star_import_does_not_let_a_missing_name_through():
    new = LOOP.replace("    step", "    rate = g()\n    log(loss, rate)  # here\n    step")
    found = carried(new, "from tools import *\n" + LOOP)
    assert found.refused
    assert found.reason == "`rate` is not there"


def test_a_name_from_a_star_import_that_the_old_text_reads_is_there():
    new = "from tools import log\n" + LOOP.replace("    step", "    log(loss)  # here\n    step")
    found = carried(new, "from tools import *\nlog(1)\n" + LOOP)
    assert found.text == "    log(loss)  # here\n"


def test_a_renamed_attribute_is_renamed():
    text = "def main(opt):\n    net = build(opt.KIND)\n    size(net, opt.KIND)\n    train(net)\n"
    new = text.replace("KIND", "n_classes").replace(
        "    train", "    log(opt.n_classes)  # here\n    train"
    )
    found = carried(new, text.replace("KIND", "num_classes"))
    assert found.text == "    log(opt.num_classes)  # here\n"


def test_a_statement_goes_after_the_definitions_that_it_reads():
    new = "def update(self, rew, done):\n    log(rew)  # here\n    if done:\n        self.end(rew, 1)\n"
    old = (
        "def step(self, action):\n    check(action)\n    ob, rew, done = self.env.step(action)\n"
        "    if done:\n        self.end(rew, 1)\n"
    )
    assert carried(new, old).line == 4


def test_a_statement_goes_before_a_return():
    new = "def f(self, x):\n    self.a = g(x)\n    log(self.a)  # here\n"
    old = "def f(self, x):\n    self.a = g(x)\n    return self.a\n"
    assert carried(new, old).line == 3


def test_setting_another_attribute_does_not_matter():
    new = "def f(self, up):\n    self.up = up\n    log(up)  # here\n    self.pad(up)\n"
    old = "def f(self, up):\n    self.up = up\n    self.layer = Up(up)\n    self.pad(up)\n"
    assert not carried(new, old).refused


def test_a_statement_stays_in_the_loop_that_sets_its_variables():
    new = (
        "for name in names:\n    words = read(name)\n    keep(words)\n    log(len(words))  # here\n"
        "finish(names)\n"
    )
    old = (
        "for part in parts:\n    for name in part:\n        words = read(name)\n"
        "        keep(words)\nfinish(names)\n"
    )
    assert carried(new, old).text.startswith("        log")


def test_a_statement_goes_into_the_branch_that_sets_its_variables():
    new = "for c in cs:\n    d = join(c, 1)\n    ps = paths(d, c)\n    out.append(ps)  # here\n"
    old = "for c in cs:\n    d = join(c, 1)\n    if isdir(d):\n        ps = paths(d, c)\nend(out)\n"
    assert carried(new, old).text.startswith("        out")


def test_statements_in_another_order_with_other_names_are_found_by_their_computation():
    new = "def f(h, g):\n    a = h.relu().mm(g)\n    b = g.mm(h.t())\n    log(b)  # here\n    use(a, b)\n"
    old = "def f(h, g):\n    q = g.mm(h.t())\n    a = h.relu().mm(g)\n    use(a, q)\n"
    assert carried(new, old).text == "    log(q)  # here\n"


def test_one_empty_list_is_not_another():
    new = "texts = []\nfor x in data:\n    word = read(x)\n    texts.append(word)  # here\n    use(word)\n"
    old = "sizes = []\nother(1)\nfor x in data:\n    word = read(x)\n    use(word)\n    sizes.append(len(word))\n"
    assert carried(new, old).refused


def test_the_least_certainty_of_a_place_can_be_given():
    new = "i = 0\nb = 0\nprint(b)\n"
    old = "i = 0\na = 0\n"
    assert carry(new, (3, 3), old).text == "print(a)\n"
    assert "% sure, less than 90%" in carry(new, (3, 3), old, min_confidence=0.9).reason


def test_a_docstring_stays_first():
    new = "def f(x):\n    log(x)  # here\n    y = g(x, 2)\n    return y\n"
    old = 'def f(x):\n    """Say what."""\n    y = g(x, 2)\n    return y\n'
    assert carried(new, old).line == 3
