"""Recorded statements are found again in an edited text, whatever was put between them."""

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.source.loops import loop_ids, recorded_loop_ids
from rearview.source.probes.align import align, compare

SIMPLE = st.sampled_from(["a = f(a)", "b = a", "g()", "a.append(b)", "x, y = y, x"])
HEADS = st.sampled_from(
    ["for i in a:", "for e in range(3):", "while a:", "if b:", "with c:", "def f(z):", "class K:"]
)


def block(children):
    return st.tuples(HEADS, st.lists(children, min_size=1, max_size=4))


TREES = st.lists(st.recursive(SIMPLE, block, max_leaves=12), min_size=1, max_size=6)
PROBE = "__probe__({})"


def lines(items, depth=0):
    for item in items:
        if isinstance(item, str):
            yield "    " * depth + item
        else:
            yield "    " * depth + item[0]
            yield from lines(item[1], depth + 1)


def compared(old, new):
    return compare(ast.parse(old), ast.parse(new))


@settings(max_examples=150, deadline=None)
@given(TREES, st.data())
def test_exactly_the_inserted_statements_are_found(items, data):
    recorded = list(lines(items))
    edited, expected, count = [], {}, 0
    for number, line in enumerate(recorded, 1):
        indent = line[: len(line) - len(line.lstrip())]
        if data.draw(st.booleans()):
            kind = data.draw(st.sampled_from(["plain", "loop"]))
            text = PROBE.format(count)
            count += 1
            if kind == "loop":
                edited += [f"{indent}for i in a:", f"{indent}    {text}"]
            else:
                edited.append(f"{indent}{text}")
        edited.append(line)
        expected[len(edited)] = number
    old, new = "\n".join(recorded), "\n".join(edited)
    found = compared(old, new)
    assert not found.missing_statements
    assert (
        "".join(ast.unparse(item.node) for item in found.added_statements).count("__probe__")
        == count
    )
    # a statement may be matched to an equal one elsewhere, never to a different one
    for a, b in found.matched:
        assert old.splitlines()[a.lineno - 1].strip() == new.splitlines()[b.lineno - 1].strip()
    assert len(found.matched) == len(recorded)
    before = list(loop_ids(found.old, "t.py").values())
    assert sorted(recorded_loop_ids(found.old, found.matched, "t.py").values(), key=str) == sorted(
        before, key=str
    )


def test_lines_of_recorded_statements_are_mapped_through_the_edit():
    old = "a = 1\nfor e in a:\n    b = 1\n    c = 2\n"
    new = "import x\na = 1\nfor e in a:\n    x.look(a)\n    b = 1\n    # note\n    c = 2\n"
    assert align(old, new) == {2: 1, 3: 2, 5: 3, 7: 4}


def test_a_probe_loop_with_the_head_of_a_recorded_loop_is_distinguished():
    old = "for p in ps:\n    p.update()\n"
    new = "for p in ps:\n    look(p)\nfor p in ps:\n    p.update()\n"
    found = compared(old, new)
    assert [item.node.lineno for item in found.added_statements] == [1]
    assert list(recorded_loop_ids(found.old, found.matched)) == [3]


def test_a_changed_statement_deep_inside_is_the_only_one_lost():
    old = "def f():\n    for a in b:\n        if a:\n            g(1)\n        h()\n"
    found = compared(old, old.replace("g(1)", "g(2)"))
    assert [(missing.node.lineno, missing.line) for missing in found.missing_statements] == [(4, 4)]
    assert not found.added_statements


def test_an_except_clause_or_case_may_gain_statements_but_not_company():
    old = "try:\n    a()\nexcept E as e:\n    b()\n"
    assert not compared(old, old.replace("b()", "b()\n    look(e)")).missing_statements
    assert compared(old, old + "except F:\n    pass\n").missing_statements


def test_thousands_of_lines_are_compared_quickly_enough_to_finish():
    body = "\n".join(
        f"def f{i}(x):\n    for a in x:\n        g{i}(a)\n    return x" for i in range(800)
    )
    found = compared(body, body.replace("g400(a)", "g400(a)\n        print(a)"))
    assert len(found.added_statements) == 1
