"""Cells whose inputs have not changed are reused, byte for byte; all others run, and the log says why."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings

import pytest

from limits import HUNG
from notebooks import cell, environment, outputs, write
from rearview.notebook.kernel_client import reuse_lines
from rearview.runtime.cells.cell_analysis import analyse
from rearview.runtime.cells.result_store import ResultStore
from rearview.state.variable_groups import serialize
from rearview.store.project import Project
from rearview.store.runs import Runs

papermill = pytest.importorskip("papermill")
pytestmark = pytest.mark.usefixtures("warm_kernel")

from papermill.engines import papermill_engines  # noqa: E402
from papermill.exceptions import PapermillExecutionError  # noqa: E402

from rearview.notebook.papermill_engine import RearviewEngine  # noqa: E402


def execute(folder, *cells, fails=False, draws_seeds=True, whole=False, out="out.ipynb", **env):
    """Run a notebook by papermill; return its outputs, and why each cell that ran was run.

    `draws_seeds` lets random generators begin with new states each time; with `whole`, results cannot be reused, and
    the notebook is run again as a whole.
    """
    variables = environment(**env)
    if draws_seeds:
        variables["REARVIEW_ENTROPY"] = os.urandom(32).hex()
    else:
        del variables["REARVIEW_ENTROPY"]
    write(folder / "study.ipynb", *cells)
    papermill_engines.register("rearview", RearviewEngine)
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            patched.delenv(name)
        for name, value in variables.items():
            patched.setenv(name, value)
        failed = contextlib.nullcontext() if not fails else pytest.raises(PapermillExecutionError)
        with failed:
            papermill.execute_notebook(
                "study.ipynb", out, engine_name="rearview", progress_bar=False
            )
    runs = Runs(Project.open(folder))
    folder_of_run = runs.folder(runs.all()[-1].id)
    if whole:
        assert not (folder_of_run / "reused.json").exists()
        return outputs(folder / out), {}
    facts = json.loads((folder_of_run / "reused.json").read_text())
    assert reuse_lines(folder_of_run)
    return outputs(folder / out), {number: why for number, why in facts["cells"] if why}


def test_an_edited_cell_and_those_that_depend_on_it_run_and_the_others_are_reused(tmp_path):
    cells = [
        "import random, json",
        "random.seed(1)\ndata = [random.random() for _ in range(1000)]\nshared = [data]\nprint(sum(data))",
        "scale = 2",
        "def scaled():\n    return [x * scale for x in data]",
        "class Box:\n    def __init__(self, items):\n        self.items = items\n\nbox = Box(scaled())",
        "other = len(data)\nother",
        "print(round(sum(box.items), 6), isinstance(box, Box), shared[0] is data)",
        "print(random.random())",
    ]
    first, ran = execute(tmp_path, *cells)
    assert set(ran) == set(range(1, 9))
    again, ran = execute(tmp_path, *cells)
    assert again == first
    assert not ran
    cells[2] = "scale = 3"
    edited, ran = execute(tmp_path, *cells)
    assert set(ran) == {3, 5, 7}
    assert ran[5] == ran[7].replace("box", "scale") or "has changed" in ran[5]
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert edited == execute(fresh, *cells)[0]
    # a cell at the end finds everything that the skipped cells left, aliases and random state included
    cells.append("data.append(random.random())\nprint(len(shared[0]), type(box) is Box, data[-1])")
    late, ran = execute(tmp_path, *cells)
    assert set(ran) == {9}
    assert late == execute(fresh, *cells)[0]


def test_cells_whose_inputs_cannot_be_shown_equal_run_again_and_say_why(tmp_path):
    (tmp_path / "data.txt").write_text("one")
    (tmp_path / "tool.py").write_text("def value():\n    return 1\n")
    cells = [
        "import os, random, time, subprocess, tool",
        "print(open('data.txt').read())",
        "print(os.environ.get('STUDY'))",
        "print(tool.value())",
        "now = time.time()",
        "lucky = random.random()",
        "token = os.urandom(4)",
        "subprocess.run(['true'], check=True)",
        "there = os.path.exists('data.txt')",
        "open('log.txt', 'a').write('x')",
        "open('result.txt', 'w').write('fixed')",
        "names = sorted(os.listdir('.'))\nprint('extra.txt' in names)",
        "print('steady')",
        "!echo shell",
        "%env LATER=1",
    ]
    execute(tmp_path, *cells, STUDY="a")
    _, ran = execute(tmp_path, *cells, STUDY="a")
    reasons = {
        5: "reads the clock (the cell)",
        6: "draws random numbers of random",
        7: "draws randomness of the system",
        8: "starts a process (true)",
        9: "asks the file system (exists)",
        10: "log.txt without replacing it",
        14: "starts a process (a shell line)",
        15: "uses the magic %env",
    }
    assert {
        number: text for number, text in reasons.items() if text in ran.get(number, "")
    } == reasons
    assert set(ran) <= {*reasons, 12}
    (tmp_path / "data.txt").write_text("two")
    (tmp_path / "tool.py").write_text("def value():\n    return 2\n")
    (tmp_path / "result.txt").write_text("tampered")
    (tmp_path / "extra.txt").touch()
    shown, ran = execute(tmp_path, *cells, STUDY="b")
    assert {2, 3, 4, 11, 12} <= set(ran)
    assert [out[0]["text"] for out in shown if out and "text" in out[0]] == [
        *(["two"], ["b"], ["2"], ["True"], ["steady"], ["shell"])
    ] or [("".join(out[0]["text"])).strip() for out in shown if out and "text" in out[0]] == [
        *("two", "b", "2", "True", "steady", "shell", "env: LATER=1")
    ]
    assert (tmp_path / "result.txt").read_text() == "fixed"


def test_a_variable_that_cannot_be_stored_is_computed_again_if_needed_or_all_cells_run(tmp_path):
    cells = [
        "import threading, warnings\nwarnings.simplefilter('ignore')",
        "numbers = [1, 2, 3]",
        "lock = threading.Lock()\npair = (lock, numbers)",
        "total = sum(numbers)\nprint(total)",
    ]
    execute(tmp_path, *cells)
    cells.append("print(lock.locked(), pair[1] is numbers, total)")
    shown, ran = execute(tmp_path, *cells)
    assert set(ran) == {5}
    assert "".join(shown[-1][0]["text"]) == "False True 6\n"
    # the cell that made it cannot run again once its input has changed: everything runs
    changed = [*cells[:3], "numbers.append(4)\nprint(len(numbers))"]
    execute(tmp_path, *changed)
    changed.append("print(lock.locked(), pair[1])")
    shown, _ = execute(tmp_path, *changed)
    assert "".join(shown[-1][0]["text"]) == "False [1, 2, 3, 4]\n"


def test_a_failing_cell_is_not_kept_and_results_of_others_are(tmp_path):
    cells = ["x = 1\nprint(x)", "y = x / 0", cell("z = 1 / 0", tags=["raises-exception"])]
    execute(tmp_path, *cells, fails=True)
    shown, ran = execute(tmp_path, *cells, fails=True)
    assert set(ran) == {2}
    assert shown[-2 if len(shown) > 3 else 1] is not None
    assert "it failed" in ran[2]


def test_the_executor_of_jupyter_cache_reuses_cells(tmp_path, caplog):
    jupyter_cache = pytest.importorskip("jupyter_cache")
    from rearview.notebook.jupyter_cache import RearviewExecutor

    book = write(tmp_path / "study.ipynb", "x = 20", "y = x + 1\nprint(y)", "print('end')")
    cache = jupyter_cache.get_cache(tmp_path / ".jupyter_cache")
    cache.add_nb_to_project(str(book))
    executor = RearviewExecutor(cache)
    with caplog.at_level(logging.INFO):
        assert executor.run_and_cache(timeout=HUNG).succeeded == [str(book)]
        write(book, "x = 20", "y = x + 2\nprint(y)", "print('end')")
        assert executor.run_and_cache(timeout=HUNG).succeeded == [str(book)]
    assert "2 of 3 cells have not changed" in caplog.text
    newest = max(cache.list_cache_records(), key=lambda record: record.pk)
    shown = cache.get_cache_bundle(newest.pk).nb
    assert [o.text for c in shown.cells for o in c.outputs] == ["22\n", "end\n"]
    write(book, "x = 20", "y = undefined")
    assert executor.run_and_cache(timeout=HUNG).excepted == [str(book)]


def test_a_book_runs_only_the_cells_of_a_page_whose_inputs_changed(tmp_path):
    pytest.importorskip("myst_nb")
    (tmp_path / "conf.py").write_text(
        "extensions = ['myst_nb', 'rearview.notebook.jupyter_cache']\n"
        "nb_execution_mode = 'cache'\nroot_doc = 'study'\nexclude_patterns = ['_build', 'jupyter_execute']\n"
    )

    def build(*cells):
        write(tmp_path / "study.ipynb", "# %% [markdown]", *cells)
        words = (sys.executable, "-W", "ignore", "-m", "sphinx", "-b", "text", ".", "_build")
        done = subprocess.run(
            words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HUNG, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ".rearview" not in done.stderr  # executed notebooks of runs are no pages
        return done.stdout, (tmp_path / "_build" / "study.txt").read_text()

    build("x = 20", "y = x + 1\nprint('sum', y)", "print('end')")
    said, page = build("x = 20", "y = x + 2\nprint('sum', y)", "print('end')")
    assert "cells have not changed" in said
    assert "cell 3 ran" in said
    assert "sum 22" in page
    assert "end" in page


def test_damaged_results_are_noticed(tmp_path):
    store = ResultStore(tmp_path / "cells")
    content = serialize({"x": bytes(100)})
    store.put(content)
    assert store.get(content.digest, str)["x"] == bytes(100)
    file = tmp_path / "cells" / "contents" / content.digest
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(ValueError, match="damaged"):
        store.get(content.digest, str)


@pytest.mark.parametrize(
    ("source", "names", "calls"),
    [
        ("def f():\n    return g", set(), set()),
        ("def f():\n    return g\nx = f()", {"f", "g", "x"}, set()),
        (
            "import sklearn\nsklearn.set_config(a=1)\nx = 1",
            {"sklearn", "x"},
            {"sklearn.set_config"},
        ),
        ("plt.rcParams['x'] = 2", {"plt"}, {"plt.rcParams="}),
        ("class A(B):\n    c = d\n    def m(self):\n        return e", {"B", "c", "d"}, set()),
    ],
)
def test_names_and_effects_of_a_cell(source, names, calls):
    found = analyse(source)
    assert found.names == names
    assert found.calls == calls


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("x = 1\nprint(x)", {"print"}),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("x[0] = 1", {"x"}),
        ("del x", {"x"}),
        ("for i in y:\n    z = i\nprint(z, i)", {"y", "z", "i", "print"}),
        ("if a:\n    b = 1\nelse:\n    b = 2\nc = b", {"a"}),
        ("if a:\n    b = 1\nc = b", {"a", "b"}),
        ("y = [f(i) for i in x]\ni = 1", {"f", "x"}),
        ("fig, ax = plt.subplots()\nax.plot(x)", {"plt", "x"}),
        ("with open(p) as f:\n    text = f.read()\nprint(text)", {"open", "p", "print", "text"}),
        ("try:\n    a = b\nexcept E:\n    a = c\nd = a", {"a", "b", "c", "E"}),
        ("def f(x):\n    y = x\n    return y + z\nw = f(1)", {"z"}),
        ("z = 2\ndef f():\n    return z\nw = f()", set()),
        ("while n:\n    n -= 1", {"n"}),
        ("def f():\n    return a\nif b:\n    def f():\n        return c\nf()", {"a", "b", "c"}),
        ("big = frame.query('a > @limit')", {"frame", "a", "limit"}),
        ("%timeit -n 3 -r 2 f(x)", {"f", "x"}),
        ("%%timeit y = 1\nf(y)", {"f"}),
        ("r = %timeit -o f(x)", {"f", "x"}),
        ("g = lambda a, n=n: a + m", {"n"}),
        ("!ls {folder} $name", {"ls", "folder", "name"}),
    ],
)
def test_a_cell_reads_the_names_whose_value_it_may_use_before_it_sets_them(source, reads):
    assert analyse(source).reads == reads


def test_equal_content_has_one_digest_also_after_it_was_loaded(tmp_path):
    numpy = pytest.importorskip("numpy")
    datasets, tree = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.tree")
    iris = datasets.load_iris()
    texts = ["abc", "abcd"[:3]]
    padded = numpy.empty(3, {"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8]})
    padded["a"], padded["b"] = 1, 2.0
    masked = numpy.ma.array([1, 2], mask=[0, 1])
    frame = datasets.load_wine(as_frame=True).frame
    halves = pytest.importorskip("sklearn.model_selection").train_test_split(frame, random_state=0)
    pairs = numpy.zeros(2, numpy.dtype([("a", "f4", (3,))]))
    model = tree.DecisionTreeClassifier(random_state=0).fit(iris.data, iris.target)
    store = ResultStore(tmp_path / "cells")
    for value in (
        iris,
        texts,
        padded,
        masked,
        pairs,
        model,
        halves,
        (frame, frame["alcohol"], frame.head(2)),
        numpy.empty((0, 3)),
        {"k": [texts[0]]},
    ):
        content = serialize({"x": value}, owned=True)
        store.put(content)
        loaded = store.get(content.digest, str)
        assert serialize(loaded, owned=True).digest == content.digest, type(value)


def test_a_seeded_generator_and_clock_readings_of_an_import_do_not_keep_a_cell_from_being_reused(
    tmp_path,
):
    pytest.importorskip("sklearn")
    cells = [
        "import numpy as np",
        "rng = np.random.RandomState(13)\nX = rng.rand(40, 2)\nprint(X.sum())",
        (
            "from sklearn.cluster import KMeans\nimport numpy.f2py.rules\n"
            "labels = KMeans(2, n_init=1, random_state=0).fit(X).labels_\nprint(labels)"
        ),
        "seed = None\nfree = np.random.RandomState(seed)",
        "also = np.random.RandomState()",
        "many = [np.random.RandomState(s) for s in (None, 1)]",
    ]
    first, ran = execute(tmp_path, *cells)
    assert "the clock" not in ran[3]
    again, ran = execute(tmp_path, *cells)
    assert again == first
    assert set(ran) == {4, 5, 6}
    assert all("seed of a random generator from the system" in ran[n] for n in (4, 5, 6))


def test_measured_durations_are_reused_unless_the_measured_code_has_changed(tmp_path):
    cells = [
        "def total(n):\n    return sum(range(n))",
        "size = 1000",
        "%timeit -n 2 -r 2 total(size)",
        "%%time\nfound = total(size)\nprint(found)",
        "other = 1",
        "%time print(found + 1)",
    ]
    first, _ = execute(tmp_path, *cells)
    cells[4] = "other = 2"
    again, ran = execute(tmp_path, *cells)
    assert again == first
    assert set(ran) == {5}
    cells[1] = "size = 2000"
    _, ran = execute(tmp_path, *cells)
    assert set(ran) == {2, 3, 4, 6}


def test_generators_that_are_not_seeded_begin_as_in_the_last_execution_into_the_same_file(tmp_path):
    pytest.importorskip("numpy")
    cells = [
        "import random, threading, uuid\nimport numpy as np",
        "a = np.random.rand(3)\nprint(a)",
        "pair = [threading.Lock(), random.random()]\nprint(pair[1])",
        "print(uuid.uuid4(), np.random.default_rng().random())",
        "print('end')",
        "free = np.random.default_rng()\nprint(free.random())",
    ]
    first, _ = execute(tmp_path, *cells, draws_seeds=False)
    cells[4] = "print(pair[1], random.random(), np.random.rand())"
    again, ran = execute(tmp_path, *cells, draws_seeds=False)
    assert set(ran) == {4, 5}
    assert again[1:3] == first[1:3]
    assert again[3] != first[3]  # an identifier does not come twice
    assert again[5] == first[5]
    # a full run begins with the same states: the cell with the lock was run again with the one that it had found
    shutil.rmtree(tmp_path / ".rearview" / "cache" / "cells" / "entries")
    full, ran = execute(tmp_path, *cells, draws_seeds=False)
    assert set(ran) == {1, 2, 3, 4, 5, 6}
    assert full[:3] == again[:3]
    assert full[4] == again[4]
    cells[1] = "a = np.random.rand(4)\nprint(a)"
    _, ran = execute(tmp_path, *cells, draws_seeds=False)
    assert set(ran) == {2, 4, 5}
    other, ran = execute(tmp_path, *cells, draws_seeds=False, out="other.ipynb")
    assert {2, 3, 4, 5, 6} <= set(ran)
    assert other[2] != first[2]


def test_settings_of_skipped_cells_are_set_again_without_running_the_rest_of_them(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [
        "%matplotlib inline\nimport matplotlib.pyplot as plt, numpy as np, warnings\nplt.style.use('ggplot')",
        "before = np.seterr(all='ignore')\nplt.rc('font', size=17)\nprint(sorted(before))",
        "with warnings.catch_warnings():\n    warnings.simplefilter('error')\n    x = np.arange(3)\nprint(x)",
        "warnings.filterwarnings('ignore', message='odd')\ny = x + 1\nprint(y)",
        "print('end')",
    ]
    first, _ = execute(tmp_path, *cells)
    shows = (
        "print(plt.rcParams['font.size'], plt.rcParams['axes.facecolor'], np.geterr()['over'], "
        "any('odd' in str(f[1]) for f in warnings.filters), y)"
    )
    cells[4] = shows
    late, ran = execute(tmp_path, *cells)
    assert set(ran) == {5}
    assert "".join(late[4][0]["text"]) == "17.0 #E5E5E5 ignore True [1 2 3]\n"
    # a cell with a setting is edited, and not the setting: cells that do not depend on it are as before
    cells[3] = cells[3].replace("print(y)", "print(y, 'edited')")
    cells[0] = "print('edited')\n" + cells[0]
    edited, ran = execute(tmp_path, *cells)
    assert set(ran) == {1, 4}
    assert edited[1:3] == first[1:3]
    assert edited[4] == late[4]
    cells[0] = cells[0].replace("ggplot", "dark_background")
    _, ran = execute(tmp_path, *cells)
    assert set(ran) == {1, 2, 3, 4, 5}


def test_an_estimator_that_is_shown_has_the_number_that_it_has_in_a_full_run(tmp_path):
    pytest.importorskip("sklearn")
    cells = [
        "from sklearn.svm import SVC\nfrom sklearn.linear_model import Ridge",
        "SVC()",
        "Ridge()",
        "SVC(C=2)",
    ]
    first, _ = execute(tmp_path, *cells)
    cells[2] = "Ridge(alpha=2)"
    edited, ran = execute(tmp_path, *cells)
    assert set(ran) == {3}
    assert "sk-container-id-2" in str(edited[2])
    assert edited[3] == first[3]
    cells[1] = "SVC()\n'a text'"
    edited, ran = execute(tmp_path, *cells)
    assert "sk-container-id-1" in str(edited[2])
    assert set(ran) == {2, 3, 4}


def test_a_cell_finds_the_values_of_skipped_cells_not_older_ones_that_a_cell_before_them_used(
    tmp_path,
):
    cells = [
        "import time\nx = [1]\nalias = x\ngone = 1",
        "t = time.time()\nprint(x, gone)",  # always runs, so it loads what the first cell left
        "x = [2]\ndel gone",
        "edited = 1",
        "t = time.time()\nprint(x, alias, 'gone' in globals())",
    ]
    first, _ = execute(tmp_path, *cells)
    assert [each[0]["text"] for each in first if each] == [["[1] 1\n"], ["[2] [1] False\n"]]
    cells[3] = "edited = 2"
    again, ran = execute(tmp_path, *cells)
    assert set(ran) == {2, 4, 5}
    assert again == first


IMPORTS = """
import os, sqlite3
import duckdb, h5py, matplotlib, numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq
matplotlib.use("agg")
import matplotlib.pyplot as plt
if not os.path.exists("table.parquet"):
    pq.write_table(pa.table({"x": [1.0]}), "table.parquet")
"""
REPLACED = {
    "savefig": "plt.plot(x); plt.savefig('figure.png'); plt.close()",
    "open": "with open('whole.txt', 'w+') as file: print(x, file=file)",
    "save": "np.savez('arrays.npz', x=x)",
    "arrow": "pq.write_table(pa.table({'x': x}), 'other.parquet')",
    "hdf5": "with h5py.File('whole.h5', 'w') as file: file['x'] = x",
    "polars": "pl.DataFrame({'x': x}).write_parquet('polars.parquet')",
}
UPDATED = {
    "add": "with open('log.txt', 'a') as file: print(x, file=file)",
    "system": "n = os.open('part', os.O_WRONLY | os.O_CREAT); os.write(n, bytes(x)); os.close(n); del n",
    "memmap": "m = np.memmap('map', 'd', 'r+' if os.path.exists('map') else 'w+', shape=4); m += x; m.flush(); del m",
    "sqlite": """with sqlite3.connect('s.db') as db:
    db.execute('create table if not exists t(x real)'); db.execute('insert into t values (?)', x[:1])
db.close()""",
    "duckdb": """with duckdb.connect('d.db') as db:
    db.execute('create table if not exists t(x double)'); db.execute('insert into t values (?)', [x[0]])""",
    "hdf5": "with h5py.File('add.h5', 'a') as file: file[str(len(file))] = x",
    "arrow": """t = pq.read_table('table.parquet')
pq.write_table(pa.concat_tables([t, t]), 'table.parquet')
del t""",
}


def test_a_cell_that_replaces_a_file_is_reused_and_a_cell_that_changes_a_file_runs(
    tmp_path,
):
    cells = [IMPORTS, "x = np.arange(4.0)", *REPLACED.values(), *UPDATED.values(), "print('end')"]
    execute(tmp_path, *cells)
    cells[1] = "x = np.arange(4.0) + 1"  # every cell writes over the files that are there now
    execute(tmp_path, *cells)
    cells[-1] = "print('the end')"
    _, ran = execute(tmp_path, *cells)
    kept = dict(enumerate(REPLACED, 3))
    assert not {kept[n]: ran[n] for n in kept.keys() & ran.keys()}
    changed = dict(enumerate(UPDATED, 3 + len(REPLACED)))
    assert not {changed[n] for n in changed.keys() - ran.keys()}


def test_files_that_a_skipped_cell_wrote_are_as_after_a_full_run(tmp_path):
    cells = [
        "first = 'first'",
        "with open('results.txt', 'w') as file: print(first, file=file)",
        "print(open('results.txt').read())",
        "with open('results.txt', 'w') as file: print('second', file=file)",
        "print(open('results.txt').read())",
        "print('end')",
    ]
    execute(tmp_path, *cells)
    (tmp_path / "results.txt").unlink()
    cells[-1] = "print('the end')"
    shown, ran = execute(tmp_path, *cells)
    assert set(ran) == {6}
    assert (tmp_path / "results.txt").read_text() == "second\n"
    cells[0] = "first = 'other'"
    shown, ran = execute(tmp_path, *cells)
    assert set(ran) == {1, 2, 3}
    assert "other" in str(shown[2])
    assert "second" in str(shown[4])
    assert (tmp_path / "results.txt").read_text() == "second\n"


VALUES_OF_A_FILE = {
    "cannot be stored": ["box = (threading.Lock(), open('data.txt').read())", "print(box[1])"],
    "closure": [
        "def make(x):\n    return lambda: x",
        "f = make(open('data.txt').read())",
        "print(f())",
    ],
    "default": ["x = open('data.txt').read()\ndef f(a=x): return a\nx = 0", "print(f())"],
    "called for a default": ["def f(a=open('data.txt').read()): return a", "print(f())"],
    "class": ["class Table:\n    text = open('data.txt').read()", "print(Table.text)"],
    "decorator": [
        "def adding(f):\n    text = open('data.txt').read()\n    return lambda: text",
        "@adding\ndef g(): pass",
        "print(g())",
    ],
    "defined twice": [
        "def base(): return open('data.txt').read()\ndef f(a=base()): return a\ndef base(): return 0",
        "print(f())",
    ],
    "set up": [
        "import codecs\ncodecs.register_error('named', lambda e, t=open('data.txt').read(): (t, e.end))",
        "print('\\xe4'.encode('ascii', 'named').decode())",
    ],
}


@pytest.mark.parametrize("kind", VALUES_OF_A_FILE)
def test_a_cell_that_shows_data_of_a_file_runs_when_the_file_changes(tmp_path, kind):
    cells = ["import threading", *VALUES_OF_A_FILE[kind], "print('end')"]
    (tmp_path / "data.txt").write_text("first")
    execute(tmp_path, *cells)
    (tmp_path / "data.txt").write_text("second")
    shown, _ = execute(tmp_path, *cells)
    assert "second" in str(shown)


def test_a_print_next_to_a_class_does_not_change_the_class(tmp_path):
    cells = ["from collections import OrderedDict\nclass Table(OrderedDict): pass"]
    cells.append("print(Table(x=1)['x'])")
    execute(tmp_path, *cells)
    _, ran = execute(tmp_path, *cells, "print('end')")
    assert set(ran) == {3}
    cells[0] += "\nprint(3)"
    _, ran = execute(tmp_path, *cells)
    assert set(ran) == {1}


STATE_OF_A_DEFINITION = {
    "attribute of a class": ["class A:\n    x = 1", "A.x = {n}", "print(A.x)"],
    "seen by an instance": ["class A:\n    x = 0", "a = A()", "A.x = {n}", "print(a.x)"],
    "counted by a method": [
        "class A:\n    n = 0\n    def __init__(self, k): A.n += k",
        "a = A({n})",
        "print(A.n)",
    ],
    "counted by type(self)": [
        "class A:\n    n = 0\n    def __init__(self, k): type(self).n += k",
        "a = A({n})",
        "print(A.n)",
    ],
    "list of a class": ["class A:\n    seen = []", "A.seen.append({n})", "print(A.seen)"],
    "list of subclasses": [
        "class A:\n    kinds = []\n    def __init_subclass__(cls): A.kinds.append(cls.__name__)",
        "class B{n}(A): pass",
        "print(A.kinds)",
    ],
    "replaced method": [
        "class A:\n    def f(self): return 1",
        "A.f = lambda self: {n}",
        "print(A().f())",
    ],
    "set by name": ["class A: pass", "setattr(A, 'x', {n})", "print(A.x)"],
    "attribute of a function": ["def f(): return f.n", "f.n = {n}", "print(f())"],
    "default that is a list": [
        "def f(x, seen=[]):\n    seen.append(x)\n    return list(seen)",
        "y = f({n})",
        "print(f(0))",
    ],
    "variable of a closure": [
        "def make():\n    n = 0\n    def f(k):\n        nonlocal n\n        n += k\n        return n\n    return f",
        "count = make()",
        "y = count({n})",
        "print(count(0))",
    ],
    "cache": [
        "import functools\n@functools.lru_cache\ndef f(x): return x",
        "y = [f(i) for i in range({n})]",
        "print(f.cache_info().misses)",
    ],
    "class of a library": [
        "from collections import Counter",
        "Counter.x = {n}",
        "print(Counter.x)",
    ],
    "changed by a function": [
        "from collections import Counter\ndef change(x): Counter.x = x",
        "change({n})",
        "print(Counter.x)",
    ],
    "module of the project": ["import tool", "y = tool.add({n})", "print(tool.state)"],
}


TOGETHER = (
    *("attribute of a class", "counted by a method", "list of subclasses"),
    *("default that is a list", "changed by a function", "module of the project"),
)


@pytest.mark.parametrize(
    ("kind", "together"),
    [*((kind, False) for kind in STATE_OF_A_DEFINITION), *((kind, True) for kind in TOGETHER)],
)
def test_a_cell_sees_the_state_of_functions_and_classes_as_in_a_full_run(tmp_path, kind, together):
    """`together`: the definition is in the cell that changes its state."""
    (tmp_path / "tool.py").write_text("state = []\ndef add(x): state.append(x)\n")

    def cells(n, end):
        *first, last = (text.format(n=n) for text in STATE_OF_A_DEFINITION[kind])
        if together:
            first = ["\n".join(first)]
        return ["import sys", *first, last, f"{last}\nprint({end!r})"]

    execute(tmp_path, *cells(5, "end"))
    ended, _ = execute(tmp_path, *cells(5, "another end"))
    assert "5" in str(ended[-1])
    shown, _ = execute(tmp_path, *cells(6, "another end"))
    assert "6" in str(shown[-1])
    assert "6" in str(shown[-2])


def test_an_object_that_fails_on_every_access_does_not_stop_the_notebook(tmp_path):
    cells = [
        "class Odd:\n    def __getattr__(self, name): raise RuntimeError(name)",
        "x = 41",
        "@lambda f: Odd()\ndef odd(): pass",
        "print(x + 1, type(odd).__name__)",
    ]
    execute(tmp_path, *cells)
    shown, _ = execute(tmp_path, *cells[:3], "print(x + 2, type(odd).__name__)")
    assert "43 Odd" in str(shown[-1])


def test_a_failure_to_look_at_variables_runs_the_notebook_as_a_whole(tmp_path):
    sabotage = (
        "from rearview.runtime.cells.cell_cache import CellCache\n"
        "def begin(self, cell): raise OSError('no')\n"
        "if {broken}: CellCache.begin = begin"
    )
    cells = ["x = 41", "print('first')", sabotage.format(broken=0), "y = x + 1", "print(y)"]
    execute(tmp_path, *cells)
    cells[2:] = [sabotage.format(broken=1), "y = x + 2", "print('sum', y)"]
    shown, _ = execute(tmp_path, *cells, whole=True)
    assert "sum 43" in str(shown[-1])


def test_attributes_of_a_class_may_have_any_name(tmp_path):
    cells = ["class A:\n    code = 1\n    attributes = [2]\nA.code = 3", "print(A.code)"]
    execute(tmp_path, *cells)
    shown, ran = execute(tmp_path, *cells, "print(A.code, A.attributes)")
    assert set(ran) == {3}
    assert "3 [2]" in str(shown[-1])
