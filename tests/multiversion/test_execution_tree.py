"""Versions share a node as long as code and inputs are the same, and no longer."""

import json

import pytest
from studies import notebook, scripts

from rearview.errors import SourceError, UsageError
from rearview.multiversion.execution_tree import CellFacts, Measurements, build_tree, tree_to_json
from rearview.multiversion.render import tree_lines, tree_svg
from rearview.multiversion.study import (
    FileRef,
    Study,
    StudyVersion,
    program_cells,
    split_loops,
    study_from_files,
)
from rearview.plan.versions.tree import START


def version(name, text, **more):
    return StudyVersion(name, f"{name}.py", program_cells(text.encode(), f"{name}.py"), **more)


def parents(*versions):
    return build_tree(Study(versions)).tree.parent


def test_versions_share_the_cells_they_begin_with():
    a = version("a", "import x\n\ny = f(1)\n\nz = y\n")
    b = version("b", "import x  # same\n\ny = f( 1 )\n\nz = 2\n")
    assert parents(a, b) == (START, 0, 1, 1)


def test_training_ten_more_epochs_is_a_longer_path():
    loop = "m = f()\nfor e in range({}):\n    m.step(e)\n\nprint(m)\n"
    tree = build_tree(Study((version("ten", loop.format(10)), version("twenty", loop.format(20)))))
    ten, twenty = tree.paths["ten"], tree.paths["twenty"]
    assert ten[:2] == twenty[:2]
    assert "range(0, 10)" in tree.nodes[ten[1]].cell.text
    assert "range(10, 20)" in tree.nodes[twenty[2]].cell.text
    assert tree.tree.parent[twenty[2]] == ten[1]


def test_cut_loops_do_the_same_as_the_whole_loop():
    loop = "for i in range(2, {}):  # go\n    seen.append(i)\n"
    study = Study((version("a", loop.format(5)), version("b", loop.format(9))))
    cells = split_loops(study).versions[1].cells
    space = {"seen": []}
    for cell in cells:
        exec(cell.text, space)
    assert space["seen"] == list(range(2, 9))
    assert space["i"] == 8
    assert len(cells) == cells[-1].parts == 2


@pytest.mark.parametrize(
    "body",
    ["    if i: break\n", "    f(i)\nelse:\n    g()\n", "    return_ = i\n    break\n"],
)
def test_loops_that_may_end_early_are_not_cut(body):
    texts = [f"for i in range({n}):\n{body}" for n in (2, 3)]
    cells = split_loops(Study(tuple(version(f"v{n}", t) for n, t in enumerate(texts)))).versions
    assert [len(v.cells) for v in cells] == [1, 1]


def test_a_changed_file_parts_versions_where_it_may_be_read_first():
    text = "import os\n\nx = 1\n\ny = load('data.csv')\n"
    files = [{"data.csv": FileRef(d, 1)} for d in ("one", "two")]
    a, b = (version(n, text, files=f) for n, f in zip("ab", files, strict=True))
    # imports and constants read nothing
    assert parents(a, b) == (START, 0, 1, 1)


def test_a_measured_read_parts_versions_at_the_cell_that_reads():
    text = "a = f()\n\nb = g()\n\nc = load()\n"
    versions = [version(n, text, files={"data.csv": FileRef(n, 1)}) for n in "ab"]
    known, tree = Measurements(), build_tree(Study(tuple(versions)))
    assert tree.tree.parent == (START, 0, 1, START, 3, 4)
    chains = [tree.nodes[node].chain for node in tree.paths["a"]]
    for chain, reads in zip(chains, [(), (), ("data.csv",)], strict=True):
        known.add(chain, CellFacts(1.0, 1, reads))
    assert build_tree(Study(tuple(versions)), known).tree.parent == (START, 0, 1, 1)


def test_a_file_that_no_cell_was_seen_to_read_may_have_been_read_by_a_library():
    text = "a = f()\n\nb = g()\n"
    versions = tuple(version(n, text, files={"x.parquet": FileRef(n, 1)}) for n in "ab")
    known = Measurements()
    for node in build_tree(Study(versions)).nodes:
        known.add(node.chain, CellFacts(1.0, 1, ()))
    assert build_tree(Study(versions), known).tree.parent == (START, 0, START, 2)


def test_a_changed_module_parts_versions_where_it_is_imported():
    text = "import os\n\nx = 1\n\nfrom tools import f\n\ny = f()\n"
    a, b = (version(n, text, files={"tools.py": FileRef(n, 1)}) for n in "ab")
    assert parents(a, b) == (START, 0, 1, 2, 1, 4)


def test_arguments_part_versions_at_the_first_cell_that_does_something():
    text = "import argparse\n\ndef f(): pass\n\nargs = parse()\n"
    a, b = version("a", text, argv=("--lr", "1")), version("b", text, argv=("--lr", "2"))
    assert parents(a, b) == (START, 0, 1, 1)


def test_variables_count_only_if_both_read_them_and_they_differ():
    text = "import x\n\ny = 1\n"
    a = version("a", text, environment={"LR": "1", "ONLY_A": "1"})
    b = version("b", text, environment={"LR": "1"})
    c = version("c", text, environment={"LR": None})
    assert parents(a, b) == (START, 0)
    assert parents(a, c) == (START, 0, START, 2)


def test_measurements_survive_a_line_cut_short(tmp_path):
    file = tmp_path / "cells.jsonl"
    Measurements(file).add("one", CellFacts(1.5, 7, ("a.csv",)))
    with file.open("a") as stream:
        stream.write('{"chain": "tw')
    assert Measurements(file).get("one") == CellFacts(1.5, 7, ("a.csv",))


def test_the_tree_takes_less_than_a_kilobyte_per_ten_nodes():
    texts = [
        "\n\n".join(f"a_long_name_{i} = compute_something({i}, {n * (i > 50)})" for i in range(100))
        for n in range(4)
    ]
    tree = build_tree(Study(tuple(version(f"v{n}", t) for n, t in enumerate(texts))))
    assert len(tree.tree) > 200
    assert len(json.dumps(tree_to_json(tree), separators=(",", ":"))) < 100 * len(tree.tree)


def test_a_tree_is_shown_as_text_and_as_a_picture(tmp_path):
    a = version("a", "import x\n\ny = '<b>'\n")
    b = version("b", "import x\n\ny = 2\n")
    tree = build_tree(Study((a, b)))
    assert tree_lines(tree)[0].startswith("[1] import x  (not measured)  x2")
    picture = tree_svg(tree)
    assert "<b>" not in picture.replace("&lt;b&gt;", "")
    import xml.etree.ElementTree as ET

    assert ET.fromstring(picture).tag.endswith("svg")


def test_notebooks_give_their_code_cells(tmp_path):
    file = notebook(tmp_path / "a.ipynb", ["x = 1", "", "# only\nx"])
    assert [cell.title for cell in study_from_files([file]).versions[0].cells] == ["x = 1", "x"]


def test_a_notebook_in_another_language_is_refused(tmp_path):
    file = notebook(tmp_path / "a.ipynb", ["x <- 1"], language="R")
    with pytest.raises(SourceError, match="notebook in R"):
        study_from_files([file])


@pytest.mark.parametrize("text", ["", "{}", '{"cells": 3}', "\ud800".encode("utf-8", "replace")])
def test_a_file_that_is_not_a_notebook_is_refused(tmp_path, text):
    file = tmp_path / "a.ipynb"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError) as caught:
        study_from_files([file])
    assert caught.value.slug == "notebook-unreadable"


def test_an_empty_notebook_has_no_cells_and_a_missing_file_is_refused(tmp_path):
    empty = notebook(tmp_path / "a.ipynb", [])
    assert build_tree(study_from_files([empty])).tree.parent == ()
    with pytest.raises(UsageError, match="There is no file"):
        study_from_files([tmp_path / "b.py"])


def test_scripts_and_notebooks_share_nothing(tmp_path):
    book = notebook(tmp_path / "a.ipynb", ["x = 1"])
    (script,) = scripts(tmp_path, b="x = 1")
    assert build_tree(study_from_files([book, script])).tree.parent == (START, START)
