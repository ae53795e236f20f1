"""A state is shared only where each version alone would have come to the same state."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace as changed

import pytest
from nbformat.v4 import new_output
from studies import notebook, printed, replay, scripts, texts

from rearview.multiversion.execution_tree import CellFacts, Measurements, build_tree
from rearview.multiversion.replay_study import versions_sharing_wrongly
from rearview.multiversion.study import FileRef, Study, study_from_files


def costly(study, known=None, **facts):
    """Let the planner believe that every cell is slow, so that it keeps states."""
    known = known or Measurements()
    for node in build_tree(study).nodes:
        known.add(node.chain, CellFacts(10.0, 1 << 20, **facts))
    return known


def alone(folder, name, scratch):
    """What a version prints in a fresh process, in a copy of its folder."""
    copy = shutil.copytree(folder, scratch / name.replace("/", "-"), symlinks=True)
    done = subprocess.run(
        [sys.executable, name], cwd=copy, capture_output=True, text=True, check=True
    )
    return done.stdout


def shown(folder, names, scratch, **options):
    files = [folder / name for name in names]
    expected = [alone(folder, name, scratch) for name in names]
    report = replay(files, measurements=costly(study_from_files(files)), **options)
    assert [texts(report, version.name) for version in report.versions] == expected
    return report


def two(folder, head, tail):
    folder.mkdir()
    files = scripts(folder, **{f"v{n}": f"{head}\n{tail.format(n=n)}\n" for n in (1, 2)})
    return [file.name for file in files]


OWN_NAME = "import os\nimport sys\nimport __main__\n\nname = {}\n"


@pytest.mark.parametrize(
    "name",
    ["os.path.basename(__file__)", "os.path.basename(sys.argv[0])", "__main__.__file__[-5:]"],
)
def test_a_cell_that_uses_the_name_of_its_program_is_not_shared(tmp_path, name):
    names = two(tmp_path / "study", OWN_NAME.format(name), "print(name, {n})")
    shown(tmp_path / "study", names, tmp_path)


def test_programs_in_folders_of_their_own_import_their_own_modules(tmp_path):
    study = tmp_path / "study"
    for part in ("a", "b"):
        (study / part).mkdir(parents=True)
        (study / part / "tools.py").write_text(f"NAME = {part!r}\n")
        (study / part / "v.py").write_text(f"import tools\n\nprint(tools.NAME, {part!r})\n")
    shown(study, ["a/v.py", "b/v.py"], tmp_path)


def test_a_version_may_import_another_version(tmp_path):
    study = tmp_path / "study"
    study.mkdir()
    scripts(study, v1="x = 5\n\nprint(x)\n", v2="import v1\n\nprint(v1.x)\n")
    shown(study, ["v1.py", "v2.py"], tmp_path)


PROCESS_STATE = """import inspect
import json
import os
import tempfile

def f(x, seen=[]):
    seen.append(x)
    return seen

temporary = tempfile.mkdtemp()
open(temporary + "/a", "w").write("1")
os.makedirs("below")
os.chdir("below")
os.environ["SET_BY_CELL"] = "1"
json.dumps = lambda value: "patched"
f(0)
"""


def test_what_a_process_holds_besides_variables_belongs_to_the_state(tmp_path):
    end = """open(temporary + "/a", "a").write("{n}")
open("file-{n}", "w").close()
print(open(temporary + "/a").read(), os.listdir(), os.path.basename(os.getcwd()), f({n}))
print(os.environ["SET_BY_CELL"], json.dumps(1), inspect.getsource(f))
"""
    names = two(tmp_path / "study", PROCESS_STATE, end)
    # more lines before the same code: the source of `f` is still its own
    other = tmp_path / "study" / "v2.py"
    other.write_text(f"# one\n# two\n\n{other.read_text()}")
    report = shown(tmp_path / "study", names, tmp_path)
    assert report.result.restores == 1


SHARED_BY_A_FORK = {
    "removed": "import tempfile\n\nd = tempfile.TemporaryFile('w+')\nd.write('1')\n|d.write('{n}')\nd.seek(0)\nprint(d.read())",
    "database": (
        "import sqlite3\n\nc = sqlite3.connect('x.db')\nc.execute('create table t(a)')\nc.commit()\n|"
        "c.execute('insert into t values ({n})')\nc.commit()\nprint(c.execute('select * from t').fetchall())"
    ),
    "mapped": (
        "import numpy as np\n\nm = np.memmap('m.bin', dtype='u1', mode='w+', shape=(4,))\nm[0] = 7\n|"
        "m[1] += {n}\nm.flush()\nprint(list(map(int, m)), open('m.bin', 'rb').read())"
    ),
    "shared": "import mmap\n\nm = mmap.mmap(-1, 4096)\nm[0] = 7\n|m[1] += {n}\nprint(m[0], m[1])",
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED_BY_A_FORK)
def test_what_a_fork_would_share_is_not_parked(tmp_path, what):
    names = two(tmp_path / "study", *SHARED_BY_A_FORK[what].split("|"))
    report = shown(tmp_path / "study", names, tmp_path)
    assert any("cannot be parked" in note for note in report.result.notes)


def test_worker_pools_that_start_again_do_not_prevent_parking(tmp_path):
    head = (
        "from joblib import Parallel, delayed\n\n"
        "r = Parallel(n_jobs=2)(delayed(abs)(i) for i in (-1, -2))\n"
    )
    tail = "print(r, Parallel(n_jobs=2)(delayed(abs)(i) for i in (-1, -{n})))"
    names = two(tmp_path / "study", head, tail)
    report = shown(tmp_path / "study", names, tmp_path)
    assert not report.result.notes


SETTINGS = """import os
import sys
import warnings
import tools

os.makedirs("lib")
open("lib/made.py", "w").write("Z = 3\\n")
sys.path.insert(0, os.path.abspath("lib"))
import made
os.umask(0o077)
sys.setrecursionlimit(5000)
warnings.filterwarnings("ignore", "just this")
tools.register("a")
os.chdir("lib")
"""


def test_a_stored_namespace_holds_the_settings_of_the_process(tmp_path, monkeypatch):
    end = """tools.register("b{n}")
mask = os.umask(0)
found = [f[0] for f in warnings.filters if f[1] is not None and f[1].pattern == "just this"]
print(made.Z, oct(mask), sys.getrecursionlimit(), found, tools.R, tools.register.calls, tools.C.kept)
print(os.listdir())
"""
    names = two(tmp_path / "study", SETTINGS, end)
    (tmp_path / "study" / "tools.py").write_text(
        "R = []\nclass C:\n    kept = []\ndef register(x):\n    R.append(x)\n    C.kept.append(x)\n"
        "    register.calls += 1\nregister.calls = 0\n"
    )
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the test lists a folder
    report = shown(tmp_path / "study", names, tmp_path, backend="stored", cache=1e9)
    assert report.result.restores == 1


@pytest.mark.parametrize(
    "setting",
    [
        "import logging\nlogging.basicConfig(filename='x.log')",
        "import signal\ndef f(*_): print('alarm')\nsignal.signal(signal.SIGALRM, f)",
        "import json\ndef f(_): return 'patched'\njson.dumps = f",
    ],
)
def test_a_process_whose_settings_cannot_be_stored_is_not_stored(tmp_path, setting):
    end = (
        "import json, logging, signal\nprint(json.dumps(1), len(logging.getLogger().handlers), {n})"
    )
    names = two(tmp_path / "study", f"x = [1]\n\n{setting}\nx.append(2)\n", end)
    report = shown(tmp_path / "study", names, tmp_path, backend="stored", cache=1e9)
    assert report.result.checkpoints == 0


# What cells read.


def one(tmp_path, text, **files):
    study = tmp_path / "study"
    study.mkdir()
    (file,) = scripts(study, v=text)
    for name, content in files.items():
        (study / name.replace("_", ".")).write_bytes(content)
    known = Measurements()
    report = replay([file], measurements=known)
    assert not report.versions[0].problem, report.versions[0].problem
    return [known.get(node.chain) for node in report.tree.nodes]


def test_reads_in_c_and_of_child_processes_and_of_large_inputs_are_seen(tmp_path):
    text = (
        "import subprocess\nimport pyarrow.csv\n\n"
        "a = pyarrow.csv.read_csv('small.csv')\n\n"
        "b = pyarrow.csv.read_csv('large.csv')\n\n"
        "subprocess.run(['cat', 'child.txt'], check=True, capture_output=True)\nx = 1\n\n"
        "y = 2\n"
    )
    facts = one(
        tmp_path,
        text,
        small_csv=b"a\n1\n",
        large_csv=b"a\n" + b"1234567\n" * 200_000,
        child_txt=b"x",
    )
    assert [f.reads for f in facts[1:]] == [("small.csv",), ("large.csv",), ("child.txt",), ()]
    assert all(f.complete for f in facts)


def test_a_changed_file_that_no_cell_reads_does_not_part_versions():
    text = "a = f()\n\nb = g()\n"
    known = Measurements()
    versions = tuple(versions_of(text, "x.parquet"))
    for node in build_tree(Study(versions)).nodes:
        known.add(node.chain, CellFacts(1.0, 1, (), complete=True))
    assert build_tree(Study(versions), known).tree.parent == (-1, 0)


def versions_of(text, name):
    from rearview.multiversion.study import StudyVersion, program_cells

    for letter in "ab":
        cells = program_cells(text.encode(), "v.py")
        yield StudyVersion(letter, "v.py", cells, files={name: FileRef(letter, 1)})


@pytest.mark.parametrize(
    "text", ["def f(x=load()): return x\n\ny = 1\n", "import tools\n\ny = 1\n"]
)
def test_a_cell_that_may_read_while_it_only_defines_or_imports_is_not_shared(text):
    first, second = versions_of(text, "data.csv")
    if "tools" in text:
        tools = {"tools.py": FileRef("same", 1)}
        first = changed(first, files={**first.files, **tools})
        second = changed(second, files={**second.files, **tools})
    assert build_tree(Study((first, second))).tree.parent == (-1, 0, -1, 2)


def test_arguments_part_versions_where_a_module_of_the_project_may_read_them():
    first, second = versions_of("import os\n\nimport config\n\ny = 1\n", "config.py")
    same = {"config.py": FileRef("same", 1)}
    pair = [changed(v, files=same, argv=(v.name,)) for v in (first, second)]
    assert build_tree(Study(tuple(pair))).tree.parent == (-1, 0, -1, 2)


def test_a_program_that_another_version_imports_is_an_input():
    text = "x = 1\n\nimport b\n"
    a1, a2 = versions_of(text, "b.py")
    own = changed(a1, name="own", program="b.py", files={})
    assert (
        build_tree(Study((a1, a2, own))).paths["a"] != build_tree(Study((a1, a2, own))).paths["b"]
    )


def test_versions_that_turn_out_to_have_shared_wrongly_are_computed_again(tmp_path):
    """Reads that were measured for another configuration do not hold for this one."""
    text = "x = open('data.txt').read()\n\nprint(x, 1)\n"
    files = scripts(tmp_path, a=text, b=text)
    versions = []
    for version in study_from_files(files).versions:
        place = tmp_path.parent / f"data-{version.name}.txt"
        place.write_text(version.name)
        versions.append(changed(version, files={"data.txt": FileRef(version.name, 1, place)}))
    study = Study(tuple(versions))
    known = costly(study, complete=True)
    report = replay(files, study=study, measurements=known)
    assert [texts(report, name) for name in "ab"] == ["a 1\n", "b 1\n"]
    assert any("computed again" in note for note in report.result.notes)
    again = replay(files, study=study, measurements=known)
    assert not any("computed again" in note for note in again.result.notes)
    assert not versions_sharing_wrongly(again.tree, again.result)


# States of an earlier replay, and the author's own files.


def test_a_stored_state_is_used_only_if_all_that_it_depends_on_is_unchanged(tmp_path, monkeypatch):
    outside = tmp_path / "outside.txt"
    outside.write_text("1")
    study = tmp_path / "study"
    study.mkdir()
    data = study / "data.txt"
    data.write_text("1")
    text = (
        "import os\n\nhere = os.getcwd()\n"
        f"x = open('data.txt').read() + open({str(outside)!r}).read() + os.environ['LEVEL']\n\n"
    )
    files = scripts(
        study, **{f"v{n}": f"{text}print(x, 'data.txt' in os.listdir(here), {n})\n" for n in (1, 2)}
    )
    options = {"backend": "stored", "cache": 1e9, "keep_states": True, "store": tmp_path / "states"}
    monkeypatch.setenv("LEVEL", "1")
    short = tmp_path / "t"
    short.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(short))

    def value():
        report = replay(files, measurements=costly(study_from_files(files)), **options)
        first, found, _ = texts(report, "v1").split()
        assert found == "True"
        return first, report.result.computed

    assert value() == ("111", 4)
    assert value() == ("111", 2)  # the state is used, and its paths still lead to the work folder
    monkeypatch.setenv("LEVEL", "2")
    assert value() == ("112", 4)
    outside.write_text("2")
    assert value() == ("122", 4)
    before = data.stat()
    data.write_text("2")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    assert value() == ("222", 4)
    assert not list(short.iterdir())


def test_the_authors_files_are_not_changed_through_their_absolute_path(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("mine")
    doors = [
        f"open({str(data)!r}, 'w')",
        f"__import__('os').remove({str(data)!r})",
        f"__import__('os').rename({str(data)!r}, 'x')",
        f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).mkdir()",
    ]
    files = scripts(tmp_path, **{f"v{n}": f"x = {n}\n\n{door}\n" for n, door in enumerate(doors)})
    report = replay(files, author_folder=tmp_path)
    for version in report.versions:
        assert "a replay works in a copy of the folder" in version.problem
    assert data.read_text() == "mine"
    assert not (tmp_path / "made").exists()


def test_files_that_programs_name_outside_their_folder_are_taken_along(tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "x.csv").write_text("1")
    (tmp_path / "data").symlink_to(tmp_path / "far")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "tools.py").write_text("K = 2\n")
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "unrelated" / "y").touch()
    cell = "import sys\nsys.path.append('../lib')\nimport tools\nprint(open('../data/x.csv').read(), tools.K)"
    book = notebook(tmp_path / "books" / "v.ipynb", [cell], [printed("1 2\n")])
    study = study_from_files([book])
    assert set(study.versions[0].files) == {"books/v.ipynb", "data/x.csv", "lib/tools.py"}
    assert [v.worst_match for v in replay([book]).versions] == ["same"]
    (script,) = scripts(tmp_path / "books", s="print(open('data/x.csv').read())\n")
    monkeypatch.chdir(tmp_path)  # as in `python books/s.py`
    assert texts(replay([script]), "s") == "1\n"


def test_a_notebook_goes_on_after_a_cell_that_failed_for_its_author_too(tmp_path):
    error = new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
    cells = ["x = 1", "x / 0", "print(x)", "x / 'a'", "print(2)"]
    shown_outputs = [[], [error], printed("1\n"), [], printed("2\n")]
    (version,) = replay([notebook(tmp_path / "a.ipynb", cells, shown_outputs)]).versions
    assert [cell.verdict.match for cell in version.cells[:4]] == ["same"] * 3 + ["different"]
    assert "TypeError" in version.problem
    assert version.cells[4].ended == "not run"


def test_programs_that_log_are_replayed_as_under_plain_python(tmp_path):
    text = (
        "import rearview\n\nfor epoch in range(2):\n    rearview.log('loss', epoch)\n"
        "    print(epoch, rearview.arg('lr', 0.5))\n"
    )
    files = scripts(tmp_path, a=text, b=f"{text}\nprint('b')\n")
    report = replay(files)
    assert [texts(report, name) for name in "ab"] == ["0 0.5\n1 0.5\n", "0 0.5\n1 0.5\nb\n"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py"]
