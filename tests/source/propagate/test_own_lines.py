"""Statements that share a line get lines of their own, and nothing else changes."""

import ast

import pytest

from rearview.source.propagate.splice import separate_lines

CASES = {
    "two that were added": ("x = 1\nimport r; r.log(x)\ny = 2\n", [(2, 0), (2, 10)]),
    "one beside recorded ones": ("a(); log(1); b()\nc()\n", [(1, 5)]),
    "in a block": ("for i in d:\n\tf(i); log(i)\n\tg(i)\n", [(2, 7)]),
    "on the line of a head": ("if x:\n    for i in d: f(i); log(i)\n    g()\n", [(2, 22)]),
    "on the line of a long head": ("if (x and\n        y): f(); log(i)\nh()\n", [(2, 17)]),
    "on the line of an else": (
        "if x:\n    a()\nelse: f(); log(i)\ntry:\n    f()\nfinally: g(); log(1)\n",
        [(3, 11), (6, 14)],
    ),
    "on the lines of a match": (
        "match x:\n    case 1: f(); log(1)\n    case _: g(); log(2)\n",
        [(2, 17), (3, 17)],
    ),
    "behind a long string": ('x = """\n a; b\n"""; log("é; ü"); y = 3  # a; b\n', [(3, 5)]),
    "behind letters of two bytes": ("é = 'ü'; log(é); f()\r\ng()\r\n", [(1, 11)]),
    "with a byte order mark": ("\ufeffa(); log(1)\n", [(1, 5)]),
    "at the end without a line end": ("a()\nb(); log(1)", [(2, 5)]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_statement_has_its_line_and_the_program_is_the_same(case):
    text, spots = CASES[case]
    found = separate_lines(text, spots)
    before, after = (ast.parse(each.removeprefix("\ufeff")) for each in (text, found.text))
    assert ast.dump(before) == ast.dump(after)
    starts = [node.lineno for node in ast.walk(after) if isinstance(node, ast.stmt)]
    assert len(starts) == len(set(starts))
    logged = {
        ast.unparse(one): found.line(one.lineno, one.col_offset)
        for one in ast.walk(before)
        if isinstance(one, ast.stmt)
    }
    now = {ast.unparse(one): one.lineno for one in ast.walk(after) if isinstance(one, ast.stmt)}
    assert logged == now


def test_lines_without_a_chosen_statement_stay_as_they_are():
    text = "a(); b()\nlog(1)\nc(); d()\n"
    assert separate_lines(text, [(2, 0)]).text == text
    assert separate_lines(text, []).text == text
    assert separate_lines("def f(:\n", [(1, 0)]).text == "def f(:\n"
