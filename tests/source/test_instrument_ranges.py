"""A loop over a range is run in parts, and does what it would do in one."""

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rearview.source.instrument import HOOK, ITER, PARTS, instrument

PROGRAMS = {
    "runs through": "for i in range(n): seen.append(i)",
    "has an else": "for i in range(n): seen.append(i)\nelse: seen.append('else')",
    "breaks": "for i in range(n):\n if i == stop: break\n seen.append(i)\nseen.append('after')",
    "breaks with an else": (
        "for i in range(n):\n if i == stop: break\n seen.append(i)\nelse: seen.append('else')"
    ),
    "continues": "for i in range(n):\n if i % 2: continue\n seen.append(i)",
    "returns": "for i in range(n):\n if i == stop: return seen\n seen.append(i)",
    "breaks from within": (
        "for i in range(n):\n for j in range(n):\n  if j == i: break\n  seen.append((i, j))\n"
        " else:\n  seen.append('inner')\n  break\nelse: seen.append('outer')"
    ),
    "breaks in an else of an inner loop": (
        "for i in range(n):\n for j in [1]: pass\n else:\n  seen.append(i)\n  if i == stop: break"
    ),
    "breaks in try and with": (
        "import contextlib\nfor i in range(n):\n try:\n  with contextlib.nullcontext():\n"
        "   if i == stop: break\n finally: seen.append(i)"
    ),
    "is handed something else by that name": (
        "range = lambda n: iter([5, 6, n])\nfor i in range(n): seen.append(i)"
    ),
    "holds many loops": "\n".join(f"{' ' * k}for i{k} in range(2):" for k in range(12))
    + f"\n{' ' * 12}seen.append(i11)",
}


def ran(text, n, stop, size=None):
    body = "def run(n, stop):\n seen = []\n" + textwrap.indent(text, " ") + "\n return seen"
    tree = ast.parse(body)
    space = {HOOK: lambda _, items: items, ITER: iter, PARTS: lambda _, numbers: cut(numbers, size)}
    if size:
        instrument(tree, "t.py")
    exec(compile(tree, "t.py", "exec"), space)
    return space["run"](n, stop)


def cut(numbers, size):
    if not isinstance(numbers, range):
        return (numbers,)
    return (iter(numbers[k : k + size]) for k in range(0, len(numbers), size))


@pytest.mark.parametrize("program", PROGRAMS)
@given(n=st.integers(0, 9), stop=st.integers(0, 9), size=st.integers(1, 4))
def test_the_parts_do_the_same_as_the_whole(program, n, stop, size):
    text = PROGRAMS[program]
    assert ran(text, n, stop, size) == ran(text, n, stop)


def test_a_break_is_seen_where_the_user_wrote_one():
    tree = ast.parse("for i in range(9):\n    if i: break\n")
    (site,) = instrument(tree, "t.py")
    breaks = {(b.lineno, b.col_offset) for b in ast.walk(tree) if isinstance(b, ast.Break)}
    assert breaks == site.breaks == {(2, 10)}
