"""What a cell takes in is seen, whoever reads it: Python, libraries in C, child processes."""

import subprocess
import sys

import pytest

from notebooks import rearview as run
from notebooks import write
from rearview.model.cell_lineage import same_state
from rearview.opened_files import WatchedFolders
from rearview.runtime.cells.cell_inputs import Lineage, ProcessMemory
from rearview.store.project import Project
from rearview.store.recorded_inputs import read_cells
from rearview.store.runs import Runs

pytestmark = pytest.mark.usefixtures("warm_kernel")

pytest.importorskip("nbclient")

MAKE = """
import cv2, duckdb, h5py, numpy as np, os, polars as pl, pyarrow as pa, pyarrow.parquet as pq, subprocess
from pathlib import Path
from safetensors.numpy import save_file, load_file
"""
READERS = {
    "text.txt": "open('text.txt').read()",
    "np.npy": "np.load('np.npy')",
    "map.npy": "np.load('map.npy', mmap_mode='r')[0]",
    "arrow.parquet": "pq.read_table('arrow.parquet').num_rows",
    "mapped.arrow": "pa.memory_map('mapped.arrow').size()",
    "polars.parquet": "pl.read_parquet('polars.parquet').shape",
    "lazy.csv": "pl.scan_csv('lazy.csv').collect().shape",
    "duck.csv": "duckdb.sql(\"select count(*) from 'duck.csv'\").fetchall()",
    "data.h5": "h5py.File('data.h5')['x'][0]",
    "w.safetensors": "load_file('w.safetensors')['x'][0]",
    "picture.png": "cv2.imread('picture.png').shape",
    "film.avi": "cv2.VideoCapture('film.avi').read()[0]",
    "child.txt": "subprocess.run(['cat', 'child.txt'], check=True, capture_output=True).stdout",
    "shell.txt": "!cat shell.txt",
}
FILES = r"""
import cv2, duckdb, h5py, numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq
from safetensors.numpy import save_file
from pathlib import Path
x = np.arange(4.0)
for name in ("text.txt", "child.txt", "shell.txt", "mapped.arrow"): Path(name).write_text("hello" * 9)
for name in ("lazy.csv", "duck.csv"): Path(name).write_text("a,b\n1,2\n")
np.save("np.npy", x), np.save("map.npy", x)
pq.write_table(pa.table({"x": x}), "arrow.parquet")
pl.DataFrame({"x": x}).write_parquet("polars.parquet")
with h5py.File("data.h5", "w") as file: file["x"] = x
save_file({"x": x}, "w.safetensors")
picture = np.zeros((32, 32, 3), np.uint8)
cv2.imwrite("picture.png", picture)
film = cv2.VideoWriter("film.avi", cv2.VideoWriter_fourcc(*"MJPG"), 5, (32, 32))
film.write(picture), film.release()
"""


def lineages(folder):
    runs = Runs(Project.open(folder))
    return [read_cells(runs.folder(run.id)) for run in runs.all()]


def test_files_that_libraries_read_in_c_and_by_child_processes_belong_to_the_cell(tmp_path):
    subprocess.run(
        [sys.executable, "-c", FILES],
        cwd=tmp_path,
        check=True,
    )
    write(tmp_path / "study.ipynb", MAKE, "os.environ.get('STUDY')", *READERS.values())
    run(tmp_path, "run", "-q", "study.ipynb", STUDY="a")
    (found,) = lineages(tmp_path)
    for cell, name in zip(found[2:], READERS, strict=True):
        assert name in {event[1] for event in cell.events if event[0] == "file"}, cell
    assert [event[:2] for event in found[1].events] == [("environment", "STUDY")]
    assert ("process", "cat", "child.txt") in found[-2].events
    assert all(cell.seconds >= 0 and cell.size > 1 << 20 for cell in found)


def test_lineage_differs_from_the_cell_on_whose_code_or_input_differs(tmp_path):
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / "helper.py").write_text("VALUE = 1")
    cells = ("import helper", "x = open('data.txt').read()", "y = x * helper.VALUE")
    write(tmp_path / "study.ipynb", *cells)
    run(tmp_path, "run", "-q", "study.ipynb")
    write(tmp_path / "study.ipynb", "# formatted\nimport  helper\n", *cells[1:])
    (tmp_path / "data.txt").write_text("2")
    run(tmp_path, "run", "-q", "study.ipynb")
    one, other = lineages(tmp_path)
    assert one[0].events[-1][:2] == ("module", "helper")
    assert [*map(same_state, one, other)] == [True, False, False]
    assert [a.code == b.code for a, b in zip(one, other, strict=True)] == [True, True, True]


def test_a_file_that_is_written_is_no_input(tmp_path):
    (tmp_path / "read").write_text("a")
    opened = WatchedFolders()
    opened.watch(str(tmp_path))
    subprocess.run(["sh", "-c", "cat read > written"], cwd=tmp_path, check=True)
    assert opened.drain() == [str(tmp_path / "read")]
    assert opened.drain() == []


MADE_LATER = {
    "named before": "mkdir -p {0}",
    "made again": "mkdir -p {0}; echo 0 > {0}/data; rm -r {0}; mkdir {0}",
    "moved there": "mkdir -p elsewhere; mv elsewhere {0}",
    "below a new folder": "mkdir -p {0}/deep; mv {0} other; mkdir {0}; mv other/deep {0}",
}


@pytest.mark.parametrize("way", MADE_LATER)
@pytest.mark.parametrize("named", [True, False])
def test_files_are_seen_in_folders_that_cells_make(tmp_path, monkeypatch, way, named):
    project, folder = tmp_path / "project", "made" if named else "of no variable"
    (project / ".rearview").mkdir(parents=True)
    monkeypatch.chdir(project)
    lineage = Lineage(project / ".rearview", f"{project}/")
    names = {"out": folder if named else "x"}
    for number, command in enumerate(MADE_LATER[way].replace("{0}", f"'{folder}'").split("; ")):
        lineage.begin("make()", names)
        subprocess.run(["sh", "-c", command], check=True)
        lineage.end(number, "make()", lambda _: False, names, counts={})
    deep = f"{folder}/deep" if "deep" in MADE_LATER[way] else folder
    subprocess.run(["sh", "-c", f"echo 1 > '{deep}/data'"], check=True)
    lineage.begin("read()", names)
    subprocess.run(["cat", f"{deep}/data"], check=True, capture_output=True)
    done = lineage.end(9, "read()", lambda _: False, names, counts={})
    assert ("file", f"{deep}/data") in {event[:2] for event in done.events}


def test_a_folder_outside_the_project_that_is_made_again_is_watched(tmp_path, monkeypatch):
    project, data = tmp_path / "project", tmp_path / "data"
    (project / ".rearview").mkdir(parents=True)
    monkeypatch.chdir(project)
    lineage = Lineage(project / ".rearview", f"{project}/")
    names = {"data": data}
    for number, command in enumerate(("mkdir", "rmdir", "mkdir")):
        lineage.begin("change(data)", names)
        subprocess.run([command, data], check=True)
        lineage.end(number, "change(data)", lambda _: False, names, counts={})
    (data / "x").write_text("1")
    lineage.begin("read(data)", names)
    subprocess.run(["cat", data / "x"], check=True, capture_output=True)
    done = lineage.end(4, "read(data)", lambda _: False, names, counts={})
    assert ("file", str(data / "x")) in {event[:2] for event in done.events}


def test_the_memory_of_a_process_is_followed_without_adding_it_up_each_time():
    memory = ProcessMemory()
    before = memory.size()
    block = b"x" * (64 << 20)
    assert 48 << 20 < memory.size() - before < 80 << 20
    del block
