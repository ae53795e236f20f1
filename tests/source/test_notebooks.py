"""A notebook as program text, and back."""

import ast
import json

import pytest

from notebooks import cell, write
from rearview.errors import SourceError
from rearview.source.notebooks import (
    divide_into_cells,
    name_cells,
    parse,
    python_of,
    source_of,
    with_text,
    without_outputs,
)


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n",
        "%matplotlib inline\nx = 2",
        "files = !ls -l\nprint(files)",
        "%%bash\necho hi\nfor x in 1 2; do echo $x; done",
        "%%time\nfor x in range(3):\n    pass",
        "%%capture out\n\nprint(1)",
        "print?",
        "  x = 1\n  y = 2",
        "\n\n# only a remark",
        "this is not Python (",
        "await thing()\nasync for x in y:\n    pass",
        "!echo a \\\n  b\nx = 1",
    ],
)
def test_every_cell_becomes_python_that_comes_back_as_a_cell_with_the_same_program(source):
    text = python_of(source)
    ast.parse(text)
    assert python_of(source_of(text)) == text


def test_text_with_statements_added_goes_back_into_the_cells(tmp_path):
    data = write(
        tmp_path / "a.ipynb", "%%time\nx = 1", "%matplotlib inline\ny = x", cell("a\n", tags=["z"])
    ).read_bytes()
    text = parse(data).text
    added = text.replace("x = 1", "x = 1\nlog(x)").replace("y = x", "y = x\nlog(y)")
    found = parse(with_text(data, added))
    assert found.text == added
    assert found.cells[0].source == "%%time\nx = 1\nlog(x)"
    assert found.cells[2].tags == {"z"}


def test_an_added_cell_becomes_part_of_the_one_before_and_lines_stay(tmp_path):
    old = parse(write(tmp_path / "a.ipynb", "x = 1", "for i in x:\n    f(i)", "y = 2").read_bytes())
    new = parse(
        write(
            tmp_path / "b.ipynb",
            *("log(0)", "x = 1", "log(x)", "for i in x:\n    f(i)\n    log(i)", "y = 2", "log(y)"),
        ).read_bytes()
    )
    fitted = divide_into_cells(old.text, new.text)
    assert fitted.count("\n") == new.text.count("\n")
    assert ast.dump(ast.parse(fitted)) == ast.dump(ast.parse(new.text))
    marks = [line for line in fitted.split("\n") if line.startswith("# %% In")]
    assert marks == ["# %% In [1]", "# %% In [2]", "# %% In [3]"]
    with pytest.raises(SourceError, match="cannot be assigned to its cells"):
        divide_into_cells(
            old.text, parse(write(tmp_path / "c.ipynb", "x = 1\ny = 2").read_bytes()).text
        )


def test_executing_a_notebook_does_not_change_its_source(tmp_path):
    file = write(tmp_path / "a.ipynb", "x = 1", "y = 2")
    before = without_outputs(file.read_bytes())
    content = json.loads(file.read_text())
    content["cells"][0]["execution_count"] = 7
    content["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["a"]}]
    content["cells"][0]["metadata"] = {"execution": {"start": "now"}, "collapsed": True}
    content["metadata"]["language_info"] = {"name": "python", "version": "3.13"}
    file.write_text(json.dumps(content))
    assert without_outputs(file.read_bytes()) == before
    assert without_outputs(b"{no JSON") == b"{no JSON"


def test_places_in_the_text_of_a_notebook_are_named_by_cell_and_line():
    text = "# %% In [1]\nx = 1\n# %% In [2]\ny = 2\nz = 3\n"
    said = name_cells("see lab/a.ipynb.py:5 and b.py:5", {"lab/a.ipynb.py": text})
    assert said == "see lab/a.ipynb cell 2, line 2 and b.py:5"
