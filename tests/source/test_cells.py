"""A script falls into cells that never split a function or a loop; formatting does not count."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rearview.errors import SourceError
from rearview.source.cells import code_hash, imported_modules, only_defines, split_into_cells

SCRIPT = '''"""A study."""
import os

import numpy as np  # numbers
from pathlib import Path

SEED = 1
np.random.seed(SEED)

# reads the data
data = np.loadtxt("x")
data = data * 2

def mean(x):
    total = 0

    for value in x:
        total += value
    return total


@decorated
class Model:
    pass

model = Model()
for epoch in range(3):

    model.step()
print(model)
if SEED:
    a = 1

else:
    a = 2
'''


def test_a_script_is_cut_at_paragraphs_and_never_inside_a_block():
    assert [cell.title for cell in split_into_cells(SCRIPT)] == [
        '"""A study."""',
        "SEED = 1",
        'data = np.loadtxt("x")',
        "def mean(x):",
        "model = Model()",
        "for epoch in range(3):",
        "print(model)",
        "if SEED:",
    ]


def test_the_cells_joined_are_the_script_and_know_their_lines():
    cells = split_into_cells(SCRIPT)
    assert "".join(cell.text for cell in cells) == SCRIPT
    lines = SCRIPT.splitlines(keepends=True)
    for cell in cells:
        assert "".join(lines[cell.line - 1 :]).startswith(cell.text)
        ast.parse(cell.text)


def test_markers_are_respected_but_not_inside_a_string_or_a_block():
    script = "import a\n# %% load\nx = 1\n\ny = '''\n# %% text\n'''\n# %% [markdown]\nz = 3\n"
    assert [cell.title for cell in split_into_cells(script)] == ["import a", "x = 1", "z = 3"]


def test_a_percent_script_with_magics_is_cut_at_its_markers():
    cells = split_into_cells("# %%\n%matplotlib inline\n# %%\n!ls\n")
    assert [cell.title for cell in cells] == ["%matplotlib inline", "!ls"]


def test_a_script_that_is_not_python_is_refused():
    with pytest.raises(SourceError, match="cannot be cut") as caught:
        split_into_cells("x = = 1\n")
    assert caught.value.slug == "cells"


def test_an_empty_text_has_no_cells():
    assert split_into_cells("") == split_into_cells("\n\n") == []


@given(st.lists(st.sampled_from(["x = 1", "", "import a", "def f():\n    return 1", "# c", "f()"])))
def test_cutting_loses_nothing_but_blank_beginnings(parts):
    script = "\n".join(parts)
    joined = "".join(cell.text for cell in split_into_cells(script))
    assert [line for line in joined.split("\n") if line.strip()] == [
        line for line in script.split("\n") if line.strip()
    ]


def test_formatting_and_comments_do_not_change_the_hash():
    assert code_hash("f( 1,\n  2 )  # note") == code_hash("f(1, 2)")
    assert code_hash("%time  f()\n\n# x") == code_hash("%time  f()")
    assert code_hash("f(1, 2)") != code_hash("f(2, 1)")
    assert code_hash("'a'") != code_hash("'b'")


def test_definitions_and_imports_are_distinguished_from_work():
    assert only_defines("import a\nX = {'lr': [1, 2]}\ndef f(): run()")
    assert not only_defines("X = f()")
    assert not only_defines("@register\ndef f(): pass")
    assert imported_modules("def f():\n    import torch.nn\nfrom . import x") == {"torch"}
