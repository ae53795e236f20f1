"""Trees of recorded runs use what the runs measured and took in, cell by cell."""

import pytest

from notebooks import rearview as run
from notebooks import write
from rearview.model.cell_lineage import CellLineage
from rearview.multiversion.execution_tree import build_tree
from rearview.multiversion.study import Study, StudyVersion, program_cells
from rearview.multiversion.study_sources import open_programs, open_runs
from rearview.store.project import Project
from rearview.store.recorded_inputs import read_cells
from rearview.store.runs import Runs

pytest.importorskip("nbclient")

WORK = "total = sum(i * i for i in range(3_000_000))"


def opened(folder):
    project = Project.open(folder)
    runs = Runs(project)
    return open_runs(project, runs.all())


def test_a_tree_of_notebook_runs_has_their_prices_and_parts_at_the_cell_that_read_a_changed_file(
    tmp_path,
):
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / "unread.txt").write_text("1")
    cells = ("%matplotlib inline", WORK, "x = int(open('data.txt').read())", "print(x + total)")
    write(tmp_path / "study.ipynb", *cells)
    run(tmp_path, "run", "-q", "study.ipynb")
    (tmp_path / "unread.txt").write_text("2")
    (tmp_path / "data.txt").write_text("2")
    run(tmp_path, "run", "-q", "study.ipynb")
    study = opened(tmp_path)
    tree = build_tree(study.study, study.measurements)
    assert tree.tree.parent[:6] == (-1, 0, 1, 2, 1, 4)
    assert all(node.measured for node in tree.nodes)
    seconds = [cell.seconds for cell in tree.tree.cells]
    assert seconds[1] > 10 * seconds[3]
    (reason,) = {text.partition(": ")[2] for text in tree.unshared}
    assert reason == "the input differs: file data.txt"
    # the same notebook as a file on disk has these prices too
    alone = open_programs([str(tmp_path / "study.ipynb")])
    known = build_tree(alone.study, alone.measurements)
    assert [node.measured for node in known.nodes] == [True] * 4
    # and the outputs that each run showed are those that replays are compared with
    shown = [version.cells[3].outputs[0]["text"] for version in study.study.versions]
    assert shown[0] != shown[1]


@pytest.mark.parametrize("words", [("--cells",), ()])
def test_scripts_in_cells_are_measured_like_notebooks(tmp_path, words):
    mark = "" if words else "# %%\n"
    text = f"{mark}import os\n\n{mark}{WORK}\n\n{mark}for i in range(2):\n    total += i\n"
    (tmp_path / "train.py").write_text(text)
    run(tmp_path, "run", "-q", *words, "train.py")
    runs = Runs(Project.open(tmp_path))
    kept = read_cells(runs.folder(runs.all()[0].id))
    assert [cell.cell for cell in kept] == [1, 2, 3]
    assert kept[1].seconds > 10 * kept[0].seconds
    assert kept[1].variables["total"] != kept[2].variables["total"]
    study = opened(tmp_path)
    tree = build_tree(study.study)
    assert [node.measured for node in tree.nodes] == [True] * 3
    assert tree.tree.cells[1].seconds == pytest.approx(kept[1].seconds)


def test_cells_without_statements_do_not_hide_what_the_others_cost(tmp_path):
    parts = ('"""A gallery\'s title."""\n', "import os\n", "# words only\n", "x = 1\n", "x += 1\n")
    (tmp_path / "train.py").write_text("# %%\n".join(parts))
    run(tmp_path, "run", "-q", "train.py")
    assert [node.measured for node in build_tree(opened(tmp_path).study).nodes] == [True] * 5
    alone = open_programs([str(tmp_path / "train.py")])
    known = build_tree(alone.study, alone.measurements)
    assert [node.measured for node in known.nodes] == [True] * 5


def test_states_with_equal_lineage_and_other_values_are_not_shared_and_a_reason_is_given(tmp_path):
    cells = ("import os", "seen = [len(os.urandom(2)) + hash('x')]", "print('done')")
    write(tmp_path / "study.ipynb", *cells)
    for seed in "12":
        run(tmp_path, "run", "-q", "study.ipynb", PYTHONHASHSEED=seed)
    study = opened(tmp_path)
    tree = build_tree(study.study, study.measurements)
    assert tree.tree.parent == (-1, 0, 1, 0, 3)
    (reason,) = tree.unshared
    assert reason.endswith("after cell 2: seen has another value")
    assert "seen has another value" in run(tmp_path, "tree").stderr


def test_a_loop_that_was_recorded_longer_is_still_one_path(tmp_path):
    text = "m = [0]\n\nfor e in range({}):\n    m.append(m[-1] + e)\n\nprint(m)\n"
    for stop in (2, 4):
        (tmp_path / "train.py").write_text(text.format(stop))
        run(tmp_path, "run", "-q", "--cells", "train.py")
    study = opened(tmp_path)
    tree = build_tree(study.study, study.measurements)
    short, long = tree.paths.values()
    assert short[:2] == long[:2]
    assert not tree.unshared


def test_cost_that_is_not_similar_keeps_states_apart():
    def version(name, seconds):
        cells = program_cells(b"x = f()\n", f"{name}.py")
        lineage = CellLineage(1, cells[0].code, (), "g", seconds, 0)
        kept = tuple(type(c)(c.text, c.title, c.code, lineage=lineage) for c in cells)
        return StudyVersion(name, f"{name}.py", kept)

    alike = build_tree(Study((version("a", 2.0), version("b", 3.0))))
    assert len(alike.tree) == 1
    other = build_tree(Study((version("a", 2.0), version("b", 300.0))))
    assert len(other.tree) == 2
    assert "it took 2 s and 300 s" in other.unshared[0]


def test_a_version_whose_file_is_gone_is_named_and_the_others_are_replayed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.bin").write_bytes(name.encode())
        text = f"data = open('{name}.bin', 'rb').read()\n\nprint(len(data))\n"
        (tmp_path / "study.py").write_text(text)
        run(tmp_path, "run", "-q", "--cells", "study.py")
    (tmp_path / "one.bin").unlink()
    study = opened(tmp_path)
    tree = build_tree(study.study, study.measurements)
    ((name, why),) = tree.unavailable.items()
    assert name == study.study.versions[0].name
    assert "one.bin, which is gone" in why
    assert f"{name} cannot be replayed" in run(tmp_path, "tree").stderr
