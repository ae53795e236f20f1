"""`%rv` in a live notebook: variables go back to what they were after a cell."""

import gc
from time import perf_counter

import pytest

IPython = pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell  # noqa: E402

from rearview.notebook.magics import register  # noqa: E402


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(history_length=0)
    made.history_manager.enabled = False
    register(made)
    yield made
    InteractiveShell.clear_instance()
    gc.collect()


def run(shell, source):
    result = shell.run_cell(source, store_history=True)
    result.raise_error()
    return result


def test_undo_takes_back_rebinding_changes_in_place_and_new_names(shell):
    run(shell, "a = [1]\nb = {'a': a}\nc = 'text'")
    run(shell, "a.append(2)\nc = 'other'\nd = 1")
    run(shell, "def change():\n    b['a'].append(3)")
    run(shell, "change()")
    space = shell.user_ns
    assert space["b"]["a"] == [1, 2, 3]
    run(shell, "%rv undo")
    assert space["a"] == [1, 2]
    assert space["b"]["a"] is space["a"]  # aliases stay aliases
    run(shell, "a.append('again')")
    run(shell, "%rv undo")
    assert space["a"] == [1, 2]
    run(shell, "%rv checkout 1")
    assert (space["a"], space["c"], "d" in space, "change" in space) == ([1], "text", False, False)


def test_what_a_cell_cannot_reach_stays_the_object_it_is(shell):
    run(shell, "import numpy as np\nbig = np.zeros(1000)\nview = big[:10]\nsmall = [1]")
    big = shell.user_ns["big"]
    run(shell, "small.append(2)")
    run(shell, "%rv undo")
    assert shell.user_ns["big"] is big
    run(shell, "big += 1")
    run(shell, "%rv undo")
    assert not shell.user_ns["big"].any()
    run(shell, "big[0] = 5")
    assert shell.user_ns["view"][0] == 5  # it still shows the memory of the other
    run(shell, "x = np.random.rand()")
    first = shell.user_ns["x"]
    run(shell, "%rv undo")
    run(shell, "x = np.random.rand()")
    assert shell.user_ns["x"] == first


def test_what_cannot_be_copied_is_named_and_nothing_is_changed(shell, capsys):
    run(shell, "numbers = iter_ = (x for x in range(9))\ny = 1")
    run(shell, "next(numbers)\ny = 2")
    shell.run_cell("%rv undo")
    assert "iter_, numbers cannot be brought back" in capsys.readouterr().err
    assert shell.user_ns["y"] == 2
    shell.run_cell("%rv checkout 99")
    assert "Nothing is kept of cell 99" in capsys.readouterr().err


def test_history_is_shown_as_a_table(shell):
    run(shell, "a = 1\nb = 2")
    shown = run(shell, "%rv history").result
    assert "a = 1" in repr(shown)
    assert "<td>a = 1</td>" in shown._repr_html_()


def test_undo_of_a_large_namespace_takes_no_copy(shell):
    run(shell, "import numpy as np\nbig = np.ones(1 << 24)\nother = [0] * 10")
    run(shell, "big *= 2")
    begun = perf_counter()
    run(shell, "%rv undo")
    assert shell.user_ns["big"][0] == 1
    assert perf_counter() - begun < 5  # the measured number is in docs/notebooks.md
