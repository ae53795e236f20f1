"""A tree is replayed as every version alone would run, whatever is kept and whatever fails."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import replace as changed
from importlib import metadata
from pathlib import Path

import pytest
from studies import notebook, printed, replay, scripts, texts

from rearview.multiversion.cell_process_control import CellProcesses
from rearview.multiversion.compare_outputs import OutputMatch
from rearview.multiversion.execution_tree import CellFacts, Measurements, build_tree
from rearview.multiversion.study import FileRef, Study, study_from_files

SETUP = """import random
import sys

random.seed(3)
COUNT = 1

def count():
    return COUNT

class Box:
    def __init__(self):
        self.items = [count()]

box = Box()
out = open("log.txt", "w")
out.write("start\\n")
"""
END = """
COUNT = {n}
box.items.append(count())
out.write("version {n}\\n")
out.close()
print(box.items, random.random(), open("log.txt").read(), sys.argv[1:])
"""


def slow(files, known, seconds=10.0):
    """Let the planner believe that every cell is slow, so that it keeps states."""
    for node in build_tree(study_from_files(files)).nodes:
        known.add(node.chain, CellFacts(seconds, 1 << 20, ()))
    return known


def alone(file):
    done = subprocess.run(
        [sys.executable, file.name], cwd=file.parent, capture_output=True, text=True, check=True
    )
    (file.parent / "log.txt").unlink(missing_ok=True)
    return done.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_versions_from_parked_states_print_the_same_as_alone(tmp_path, workers):
    files = scripts(tmp_path, **{f"v{n}": SETUP + END.format(n=n) for n in range(4)})
    expected = {file.stem: alone(file) for file in files}
    report = replay(files, measurements=slow(files, Measurements()), workers=workers)
    assert {v.name: texts(report, v.name) for v in report.versions} == expected
    assert report.result.checkpoints == 1
    assert report.result.restores == 3
    assert report.result.computed == len(report.tree.tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{n}.py" for n in range(4)]


def test_versions_from_stored_namespaces_print_the_same_as_alone(tmp_path):
    setup = SETUP.replace('out = open("log.txt", "w")\nout.write("start\\n")', "").rstrip() + "\n"
    end = "\nCOUNT = {n}\nbox.items.append(count())\nprint(box.items, random.random(), type(box))\n"
    files = scripts(tmp_path, **{f"v{n}": setup + end.format(n=n) for n in range(3)})
    expected = {file.stem: alone(file) for file in files}
    report = replay(files, measurements=slow(files, Measurements()), backend="stored", cache=1e9)
    assert {v.name: texts(report, v.name) for v in report.versions} == expected
    assert (report.result.checkpoints, report.result.restores) == (1, 2)


def test_states_that_an_earlier_replay_stored_are_used_and_a_changed_file_makes_them_invalid(
    tmp_path,
):
    data = tmp_path / "data.txt"
    data.write_text("1")
    text = "x = open('data.txt').read()\n\nprint(x, {n})\n"
    files = scripts(tmp_path, **{f"v{n}": text.format(n=n) for n in range(2)})
    store = tmp_path.parent / "states"
    options = {"backend": "stored", "cache": 1e9, "keep_states": True, "store": store}
    first = replay(files, measurements=slow(files, Measurements()), **options)
    assert first.result.computed == 3
    again = replay(files, measurements=slow(files, Measurements()), **options)
    assert again.result.computed == 2
    assert texts(again, "v1") == "1 1\n"
    data.write_text("2")
    changed_data = replay(files, measurements=slow(files, Measurements()), **options)
    assert changed_data.result.computed == 3
    assert texts(changed_data, "v1") == "2 1\n"


def test_a_failing_cell_ends_its_branch_only(tmp_path):
    files = scripts(
        tmp_path,
        good="x = 1\n\nprint(x)\n",
        bad="x = 1\n\nprint(x / 0)\n\nprint('never')\n",
        stops="x = 1\n\nraise SystemExit\n\nprint('never')\n",
    )
    report = replay(files)
    good, bad, stops = report.versions
    assert texts(report, "good") == "1\n"
    assert not good.problem
    assert "ZeroDivisionError" in bad.problem
    assert bad.cells[2].ended == "not run"
    assert not stops.problem
    assert not report.exact


def test_an_endless_cell_and_a_dying_process_end_their_branches_only(tmp_path):
    files = scripts(
        tmp_path,
        endless="x = 1\n\nwhile True:\n    pass\n",
        dying="x = 1\n\nimport os\nos.kill(os.getpid(), 9)\n",
        good="x = 1\n\nprint(x)\n",
    )
    report = replay(files, measurements=slow(files, Measurements()), cell_limit=1.0)
    assert "did not end within 1 seconds" in report.versions[0].problem
    assert "process died" in report.versions[1].problem
    assert texts(report, "good") == "1\n"


def test_a_process_with_threads_is_stored_instead_and_one_that_cannot_be_is_computed_again(
    tmp_path,
):
    thread = "import threading\n\nwait = threading.Event()\nthreading.Thread(target={t}).start()\n"
    text = thread + "\nprint(1)\nprint({n})\n"
    files = scripts(
        tmp_path, **{f"v{n}": text.format(n=n, t="wait.wait, daemon=True") for n in range(2)}
    )
    report = replay(files, measurements=slow(files, Measurements()))
    assert [texts(report, f"v{n}") for n in range(2)] == ["1\n0\n", "1\n1\n"]
    notes = " ".join(report.result.notes)
    assert "cannot be parked: thread" in notes
    assert "cannot be stored: variable wait cannot be pickled" in notes
    assert report.result.restores == 0


def test_without_room_nothing_is_kept_and_too_large_a_state_is_let_go(tmp_path):
    files = scripts(tmp_path, **{f"v{n}": f"x = 1\n\nprint(x, {n})\n" for n in range(2)})
    known = slow(files, Measurements())
    none = replay(files, measurements=known, cache=0)
    assert none.result.checkpoints == 0
    assert none.result.computed == 4
    files = scripts(
        tmp_path,
        **{f"v{n}": f"x = bytearray(90_000_000)\n\nprint(len(x), {n})\n" for n in range(2)},
    )
    report = replay(files, measurements=slow(files, Measurements()), cache=20e6)
    assert texts(report, "v1") == "90000000 1\n"
    assert any("was not kept" in note or "was evicted" in note for note in report.result.notes)


def test_the_users_files_are_never_written(tmp_path):
    (tmp_path / "big.bin").write_bytes(b"a" * (2 << 20))
    (tmp_path / "small.txt").write_text("small")
    text = (
        "open('small.txt', 'w').write('changed')\n"
        "open('big.bin', 'r+b').write(b'changed')\n\n"
        "print(open('small.txt').read(), open('big.bin', 'rb').read(9), {n})\n"
    )
    files = scripts(tmp_path, **{f"v{n}": text.format(n=n) for n in range(2)})
    report = replay(files, measurements=slow(files, Measurements()))
    assert texts(report, "v1") == "changed b'changedaa' 1\n"
    assert (tmp_path / "small.txt").read_text() == "small"
    assert (tmp_path / "big.bin").read_bytes() == b"a" * (2 << 20)


def test_each_version_reads_its_own_files_and_arguments(tmp_path):
    text = "import sys\n\nx = [1]\n\nfrom tools import name\nprint(x, name, sys.argv[1:])\n"
    files = scripts(tmp_path, a=text, b=text)
    study = study_from_files(files)
    versions = []
    for version in study.versions:
        place = tmp_path.parent / f"tools-{version.name}.py"
        place.write_text(f"name = {version.name!r}")
        ref = FileRef(version.name, place.stat().st_size, place)
        versions.append(changed(version, files={"tools.py": ref}, argv=(version.name,)))
    study = Study(tuple(versions))
    known = Measurements()
    for node in build_tree(study).nodes:
        known.add(node.chain, CellFacts(5.0, 1 << 20, ("tools.py",) if node.number == 3 else ()))
    report = replay(files, study=study, measurements=known)
    assert texts(report, "a") == "[1] a ['a']\n"
    assert texts(report, "b") == "[1] b ['b']\n"


def test_reads_are_measured_per_cell(tmp_path):
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "tools.py").write_text("import json")
    (file,) = scripts(tmp_path, a="import tools\n\nx = open('data.txt').read()\n\ny = 1\n")
    known = Measurements()
    report = replay([file], measurements=known)
    reads = [known.get(node.chain).reads for node in report.tree.nodes]
    assert reads == [("*.py", "tools.py"), ("data.txt",), ()]


def test_multithreaded_torch_and_sklearn_continue_from_a_parked_process(tmp_path):
    setup = """import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier

torch.manual_seed(0)
torch.set_num_threads(2)
x = torch.tanh(torch.randn(400, 400) @ torch.randn(400, 400))
X = np.random.default_rng(0).normal(size=(300, 8))
forest = RandomForestClassifier(12, n_jobs=2, random_state=0).fit(X, X[:, 0] > 0)

"""
    end = """model = torch.nn.Linear(400, {n})
for _ in range(3):
    loss = model(x).pow(2).mean()
    loss.backward()
print(loss.item(), forest.predict_proba(X).sum(0).tolist(), (x @ x).sum().item(), torch.randn(2))
"""
    files = scripts(tmp_path, **{f"v{n}": setup + end.format(n=n) for n in (2, 3)})
    expected = alone(files[1])
    report = replay(files, measurements=slow(files, Measurements()))
    assert texts(report, "v3") == expected
    assert report.result.restores == 1
    assert not report.result.notes


def test_notebooks_give_the_outputs_that_a_kernel_gives(tmp_path):
    import nbclient
    import nbformat

    cells = [
        "import pandas as pd\nimport matplotlib.pyplot as plt\nfrom IPython.display import display",
        "frame = pd.DataFrame({'a': [1.5, 2.0]})\nprint('x')\nframe",
        "plt.plot([1, 3]); plt.show()\ndisplay(frame.describe())",
        "%time _ = sum(range(300_000))\n!echo shell",
        "import asyncio\nawait asyncio.sleep(0)\n'done'",
        "raise ValueError('wrong')",
    ]
    files = [
        notebook(tmp_path / f"v{n}.ipynb", [*cells[:2], f"n = {n}", *cells[2:]]) for n in (1, 2)
    ]
    book = nbformat.read(files[0], as_version=4)
    nbclient.NotebookClient(book, allow_errors=True, kernel_name="python3").execute()
    nbformat.write(book, files[0])
    book.cells[2]["source"] = "n = 2"
    nbformat.write(book, files[1])
    report = replay(files, measurements=slow(files, Measurements()))
    for version in report.versions:
        judged = [cell.verdict.match for cell in version.cells]
        assert judged[:4] == [OutputMatch.SAME] * 4, [c.verdict for c in version.cells]
        assert judged[4] is OutputMatch.NOT_COMPARABLE  # it shows durations
        assert judged[5:] == [OutputMatch.SAME] * 2
        assert not version.problem  # the author's cell failed in the same way
    assert report.result.restores == 1


def test_input_is_refused_with_the_question(tmp_path):
    file = notebook(tmp_path / "a.ipynb", ["name = input('Who?')"])
    (version,) = replay([file]).versions
    assert "input('Who?') was called" in version.problem


def test_no_process_and_no_folder_stays_when_the_replay_is_killed(tmp_path):
    mark = tmp_path.parent / "pid"
    short = tmp_path.parent / "t"
    short.mkdir()
    (file,) = scripts(
        tmp_path,
        # one process of the cell is in a session of its own
        a="import os\nimport subprocess\nimport sys\n\n"
        "code = 'import time\\nwhile True: time.sleep(1)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\nwhile True:\n    pass\n",
    )
    code = (
        f"import tempfile; tempfile.tempdir = {str(short)!r}\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from studies import replay\nfrom pathlib import Path\nreplay([Path({str(file)!r})])"
    )
    engine = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (mark.exists() and mark.read_text().endswith(" ")):
            assert engine.poll() is None
            time.sleep(0.02)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    pids = mark.read_text().split()
    for _ in range(1000):
        if not any(map(runs, pids)) and not list(short.iterdir()):
            break
        time.sleep(0.02)
    else:
        pytest.fail(f"{[*filter(runs, pids)]} {list(short.iterdir())} are still there")


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_cell_process_loads_nothing_of_rearview_but_itself():
    code = (
        "import sys; import rearview.multiversion.cell_process; "
        "print([m for m in sys.modules if m.startswith('rearview')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.replace("'", '"'))
    assert set(loaded) == {
        "rearview",
        "rearview.multiversion",
        *(
            f"rearview.multiversion.{m}"
            for m in ("cell_file_access", "cell_outputs", "cell_process", "cell_process_state")
        ),
        "rearview.opened_files",
    }


def test_a_process_that_dies_while_its_state_is_stored_ends_only_its_own_branch(tmp_path):
    start = "import os\n\nclass Fatal:\n    def __reduce__(self):\n        os._exit(1)\n\nkept = Fatal()\n"
    files = scripts(tmp_path, a=f"{start}\nprint(1)\n", b=f"{start}\nprint(2)\n")
    report = replay(
        files, measurements=slow(files, Measurements()), backend="stored", cache=1e9, disk=1e9
    )
    assert any("its process died" in note for note in report.result.notes)
    problems = {version.name: version.problem for version in report.versions}
    assert "its process died" in problems["a"]
    assert not problems["b"]


READS_BELOW = """
import os
import re
import sys
from rearview.multiversion.cell_file_access import CellFileAccess

reads = CellFileAccess()
reads.folder = os.path.realpath(sys.argv[1])
os.chdir(os.path.join(reads.folder, "sub"))
reads.active = True
open("data.csv").close()
open("../top.csv").close()
open("../../work-2/other.csv").close()
reads.active = False
print(list(reads.read_names))
"""


def test_reads_are_named_from_the_work_folder_wherever_a_cell_runs(tmp_path):
    for name in ("work/sub/data.csv", "work/top.csv", "work-2/other.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = subprocess.run(
        [sys.executable, "-c", READS_BELOW, tmp_path / "work"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['sub/data.csv', 'top.csv']\n"


def test_a_replay_closes_the_connections_to_its_processes(tmp_path):
    files = scripts(tmp_path, **{f"v{n}": SETUP + END.format(n=n) for n in range(2)})
    replay(files)  # libraries that a replay loads may keep files open
    open_before = set(Path("/proc/self/fd").iterdir())
    replay(files)
    assert set(Path("/proc/self/fd").iterdir()) == open_before


def test_a_short_link_to_a_deep_scratch_folder_is_removed_at_the_end(tmp_path, monkeypatch):
    short = tmp_path / "t"
    short.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    deep = tmp_path.joinpath(*["deep-folder"] * 10)
    deep.mkdir(parents=True)
    with CellProcesses(deep, os.environ, python=sys.executable, notebook=False) as processes:
        assert processes.first.ask({"do": "switch", "program": "", "argv": [], "environment": {}})
        assert list(short.iterdir())
    assert not list(short.iterdir())


def test_a_notebook_runs_in_an_environment_that_has_ipython_and_nothing_else(tmp_path):
    """Such is the fresh environment of a package whose versions import no library."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    packages = next(environment.glob("lib/*/site-packages"))
    for path in set(files_of("ipython", set())):
        (packages / path.name).symlink_to(path)
    has_matplotlib = [
        python,
        "-c",
        "import importlib.util as u; exit(not u.find_spec('matplotlib'))",
    ]
    assert subprocess.run(has_matplotlib, check=False).returncode
    shown = [printed("3\n")]
    file = notebook(tmp_path / "a.ipynb", ["print(3)"], shown)
    report = replay([file], python=str(python))
    assert [v.worst_match for v in report.versions] == ["same"]


def files_of(distribution, seen):
    """Yield the top-level files and folders of a distribution and of all that it requires."""
    seen.add(distribution)
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = metadata.distribution(distribution)
        yield from {
            found.locate_file(file.parts[0]) for file in found.files if ".." not in file.parts
        }
        for line in found.requires or ():
            name = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
            if name not in seen and "extra ==" not in line:
                yield from files_of(name, seen)
