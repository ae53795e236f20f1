"""A recorded program ends, fails and talks as it would under plain Python."""

import sys
import textwrap

import pytest

from plainly import plain, recorded, write
from rearview._history import history
from rearview.store.records import read

ENDINGS = {
    "returns": "print('done')",
    "exits with a code": "import sys\nfor i in range(3):\n    if i == 1: sys.exit(7)",
    "exits with a text": "import sys\nfor i in range(3): sys.exit('no data')",
    "exits with None": "raise SystemExit",
    "leaves at once": "import os\nfor i in range(3):\n    print(i, flush=True)\n    os._exit(5)",
    "fails": "def f(x):\n    for y in x:\n        return 1 / y\nfor i in range(2):\n    f([i])\n",
    "fails with a cause": (
        "def f():\n    try:\n        {}['a']\n    except KeyError as e:\n"
        "        raise ValueError('bad') from e\nwhile True:\n    f()\n"
    ),
    "does not parse": "for i in range(3)\n    print(i)\n",
    "is not utf-8": "# -*- coding: latin-1 -*-\nprint('caf\xe9')\n",
    "raises in a generator": (
        "def g():\n    for i in range(3):\n        yield 1 // (1 - i)\nprint(list(g()))\n"
    ),
    "imports what is not there": "import nothing_of_that_name\n",
    "kills itself": "import os, signal\nfor i in range(3): os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import os, signal\nfor i in range(3): os.kill(os.getpid(), signal.SIGINT)",
    "leaves threads": (
        "import threading, time\n"
        "def work():\n    for i in range(3): time.sleep(0.01)\n    print('worked')\n"
        "threading.Thread(target=work).start()\nfor i in range(2): print(i)\n"
    ),
    "registers an exit handler": (
        "import atexit\natexit.register(lambda: print('bye'))\nfor i in range(2): print(i)\n"
    ),
    "changes the excepthook": (
        "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\n"
        "for i in range(2): raise ValueError(i)\n"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_under_plain_python(ending, tmp_path):
    encoding = "latin-1" if "utf-8" in ending else "utf-8"
    write(tmp_path)
    (tmp_path / "train.py").write_text(ENDINGS[ending], encoding=encoding)
    expected = plain(tmp_path, "train.py")
    found = recorded(tmp_path, "train.py")
    assert (found.code, found.out) == (expected.code, expected.out)
    assert found.err.replace(str(tmp_path) + "/", "") == expected.err.replace(
        str(tmp_path) + "/", ""
    )


def test_the_exit_code_is_kept_with_the_run(tmp_path):
    write(tmp_path, train="import sys\nfor i in range(3):\n    if i: sys.exit(7)")
    recorded(tmp_path, "train.py")
    assert history(tmp_path).run().exit_code == 7


def test_a_program_sees_the_same_of_itself_as_under_plain_python(tmp_path):
    text = """
    import os, pickle, sys, __main__
    class Thing: pass
    if __name__ == "__main__":
        print(__file__, __spec__, __package__, sys.argv, sys.path[0], __main__ is sys.modules["__main__"])
        print(pickle.dumps(Thing()), Thing.__module__, sorted(k for k in globals() if k[0] == "_"))
        print([k for k in os.environ if k.startswith("REARVIEW_CONTROL")], os.getcwd())
        for i in range(2):
            print(sorted(locals() if False else []))
    """
    write(tmp_path, train=textwrap.dedent(text))
    assert (
        recorded(tmp_path, "train.py", "--a", "b").out
        == plain(tmp_path, "train.py", "--a", "b").out
    )


def test_a_module_runs_as_with_dash_m(tmp_path):
    text = """
    import sys
    from . import helper
    from pkg.sub import value
    print(__name__, __package__, __spec__.name, sys.argv[1:], helper.double(value))
    for i in range(2):
        print(i)
    """
    write(
        tmp_path,
        pkg__dot____init__="",
        pkg__dot__helper="def double(x):\n    for i in range(2): x += i\n    return 2 * x\n",
        pkg__dot__sub="value = 4\n",
        pkg__dot__train=textwrap.dedent(text),
    )
    expected = plain(tmp_path, "-m", "pkg.train", "x")
    assert expected.code == 0, expected.err
    assert recorded(tmp_path, "-m", "pkg.train", "x") == expected


CHILDREN = """
import multiprocessing, os, sys

def square(x):
    total = 0
    for i in range(x):
        total += x
    return total

if __name__ == "__main__":
    for turn in range(2):
        with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
            print(turn, pool.map(square, range(5)))
    pid = os.fork()
    if pid == 0:
        for i in range(3):
            pass
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_that_import_the_script_work_as_ever(method, tmp_path):
    write(tmp_path, train=CHILDREN)
    expected = plain(tmp_path, "train.py", method)
    found = recorded(tmp_path, "train.py", method)
    assert (found.code, found.out) == (expected.code, expected.out)
    assert len(history(tmp_path).runs()) == 1


DELETIONS = ["shutil.rmtree('.rearview')", "subprocess.run(['rm', '-rf', '.rearview'])"]


@pytest.mark.parametrize("deletion", DELETIONS)
def test_deleting_the_store_does_not_stop_the_program(deletion, tmp_path):
    text = """
    import shutil, subprocess, rearview
    for epoch in range(6):
        for i in range(1000): pass
        rearview.log("x", epoch)
        if epoch == 2:
            DELETE
    print("through")
    """
    write(tmp_path, train=textwrap.dedent(text).replace("DELETE", deletion))
    found = recorded(tmp_path, "train.py")
    assert (found.code, found.out) == (0, "through\n")


def test_editing_the_script_while_it_runs_changes_nothing(tmp_path):
    text = """
    import pathlib
    total = 0
    for epoch in range(6):
        for i in range(1000): total += i
        if epoch == 2:
            pathlib.Path("train.py").write_text("raise SystemExit(9)")
    print("through", total)
    """
    write(tmp_path, train=textwrap.dedent(text))
    found = recorded(tmp_path, "train.py")
    assert (found.code, found.out) == (0, "through 2997000\n")
    past = history(tmp_path)
    files = past._versions.files(past.run().version)
    assert b"through" in files["train.py"]


def test_a_debugger_shows_the_users_lines(tmp_path):
    text = """
    total = 0
    for epoch in range(2):
        total += epoch
        breakpoint()
    """
    write(tmp_path, train=textwrap.dedent(text))
    environment = "import pdb, io, sys\nsys.stdin = io.StringIO('where\\np total\\nc\\nc\\n')\n"
    (tmp_path / "train.py").write_text(environment + textwrap.dedent(text))
    out = recorded(tmp_path, "train.py").out
    assert "train.py(5)<module>()" in out or "train.py(7)<module>()" in out
    assert "breakpoint()" in out or "for epoch in range(2):" in out


def test_coverage_sees_the_users_lines(tmp_path):
    text = """
    import coverage
    cov = coverage.Coverage(data_file=None, include=["*/helper.py"])
    cov.start()
    import helper
    helper.work()
    cov.stop()
    print(cov.analysis2("helper.py")[1], cov.analysis2("helper.py")[3])
    """
    helper = """
    def work():
        n = 0
        while n < 3:
            n += 1
            if n > 5:
                n = 0
        for i in range(2):
            n += i
        return n
    """
    write(tmp_path, train=textwrap.dedent(text), helper=textwrap.dedent(helper))
    expected = plain(tmp_path, "train.py")
    assert expected.code == 0, expected.err
    assert recorded(tmp_path, "train.py").out == expected.out


def test_a_profile_names_the_users_functions(tmp_path):
    text = """
    import cProfile, pstats, io
    def work():
        total = 0
        for i in range(1000):
            total += i
        return total
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile)
    print(sorted((line, name) for (file, line, name) in stats.stats if file.endswith("train.py")))
    """
    write(tmp_path, train=textwrap.dedent(text))
    assert recorded(tmp_path, "train.py").out == plain(tmp_path, "train.py").out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_a_group_of_exceptions_shows_only_the_users_frames(tmp_path):
    text = """
    def f():
        for i in range(1): raise ValueError(i)
    errors = []
    for k in range(2):
        try:
            f()
        except ValueError as e:
            errors.append(e)
    raise ExceptionGroup("both", errors)
    """
    write(tmp_path, train=textwrap.dedent(text))
    expected = plain(tmp_path, "train.py")
    assert recorded(tmp_path, "train.py").err == expected.err


POINTS = """
import asyncio, threading
import rearview

def numbers(n):
    for k in range(n):
        rearview.log("inside", k)
        yield k

async def worker(name):
    for turn in range(3):
        rearview.log(name, turn)
        await asyncio.sleep(0)

def threaded():
    for i in range(3):
        rearview.log("thread", i)

held = numbers(10)
next(held)
for epoch in range(3):
    for step in range(2):
        x = next(held)
        rearview.log("x", x)
    rearview.log("end", epoch)
    if epoch == 1:
        held.close()
        held = numbers(10)
    for last in numbers(2):
        break
    rearview.log("after", epoch)

async def main():
    await asyncio.gather(worker("a"), worker("b"))

asyncio.run(main())
thread = threading.Thread(target=threaded)
thread.start()
thread.join()
rearview.log("done", 1)
"""


def test_generators_coroutines_and_threads_do_not_confuse_points(tmp_path):
    write(tmp_path, train=POINTS)
    found = recorded(tmp_path, "train.py")
    assert found.code == 0, found.err
    points = {}
    for file in (tmp_path / ".rearview" / "runs").glob("*/records-*.jsonl"):
        for record in read(file):
            if record.origin == "recorded":  # not what is captured from variables
                points.setdefault(record.name, []).append(str(record.point))
    assert points["x"] == [f"epoch={e}/step={s}" for e in range(3) for s in range(2)]
    assert points["end"] == points["after"] == ["epoch=0", "epoch=1", "epoch=2"]
    assert points["inside"][:3] == ["k=0", "epoch=0/step=0/k=1", "epoch=0/step=1/k=2"]
    assert points["inside"][3] == "epoch=0/last=0/k=0"
    assert points["a"] == points["b"] == ["turn=0", "turn=1", "turn=2"]
    assert points["thread"] == ["", "", ""]
    assert points["done"] == [""]
