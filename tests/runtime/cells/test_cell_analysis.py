"""What the text of a cell shows."""

from rearview.runtime.cells.cell_analysis import analyse


def test_a_lambda_with_two_names_replaces_a_function_of_its_first_name():
    cell = analyse("def rate(): return 1\nrate = speed = lambda: slope\nprint(rate())")
    assert "slope" in cell.reads
