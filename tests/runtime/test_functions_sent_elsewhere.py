"""Instrumented functions work in processes that know nothing of Rearview."""

import os
import subprocess
import sys

from plainly import plain, recorded, write
from rearview._history import history

FUNCTION = """
import time
from time import perf_counter

def numbers(n):
    for i in range(n):
        yield i
    while n > 0:
        n -= 1
        yield n

def work(n):
    begun = perf_counter(), time.time()
    total = 0
    for i in range(n):
        if i > 50:
            break
        total += i
    else:
        total += 1
    for x in [1, 2]:
        total += x
    while n > 0:
        n -= 1
    return total + n + sum(numbers(4))
"""


def test_functions_of_the_script_run_in_the_processes_of_joblib(tmp_path):
    text = (
        f"{FUNCTION}\nfrom joblib import Parallel, delayed\n"
        "for epoch in range(2):\n"
        "    print(Parallel(n_jobs=2)(delayed(work)(k + epoch) for k in (3, 70)))\n"
    )
    write(tmp_path, train=text)
    expected = plain(tmp_path, "train.py")
    assert expected.code == 0, expected.err
    for autolog in (False, True):
        done = recorded(tmp_path, "train.py", autolog=autolog)
        assert (done.code, done.out) == (0, expected.out), done.err
    report = history(tmp_path).replay()
    assert report.proved, report.proof


def test_a_pickled_function_needs_nothing_of_ours(tmp_path):
    text = (
        f"{FUNCTION}\nimport cloudpickle, pathlib\n"
        "pathlib.Path('work.pkl').write_bytes(cloudpickle.dumps(work))\nprint(work(70))\n"
    )
    write(tmp_path, train=text)
    done = recorded(tmp_path, "train.py")
    assert done.code == 0, done.err
    there = "import pickle, sys; print(pickle.load(open('work.pkl', 'rb'))(70)); "
    there += "assert not any(name.startswith('rearview') for name in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    other = subprocess.run(
        [sys.executable, "-c", there],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == done.out
