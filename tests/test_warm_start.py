"""A program that is forked from a warm process finds what it finds in a process of its own."""

import os
import subprocess
import sys

import pytest

import warm_start
from plainly import SOURCE, recorded, write
from rearview._history import history

SHOW = """
import os, sys
known = sorted(set(sys.modules))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, __name__, __file__, os.getcwd())
print(os.environ["SHOWN"], sorted(os.environ), hash("text"), os.getsid(0) == os.getpid())
print(sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.encoding)
print("to stderr", file=sys.stderr)
for epoch in range(3):
    value = epoch / 2
if len(sys.argv) > 1:
    print(known)
sys.exit(3)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOWN", "as it was set")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "more"), SOURCE)))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return write(tmp_path, train=SHOW)


def command(folder, *words):
    line = [sys.executable, "-m", "rearview", "run", "-q", *words]
    done = subprocess.run(
        line,
        cwd=folder,
        env=dict(os.environ),
        input="typed",
        capture_output=True,
        text=True,
        check=False,
    )
    return [str(done.returncode), *done.stdout.splitlines(), *done.stderr.splitlines()]


def test_a_command_that_records_does_the_same_from_a_warm_process(project):
    usual = command(project, "train.py")
    with warm_start.warm_starts() as processes:
        assert command(project, "train.py") == usual
        assert processes.servers
    assert (usual[0], usual[-1]) == ("3", "to stderr")


def test_a_program_has_the_same_modules_and_streams_in_a_warm_process(project):
    usual = recorded(project, "train.py", "modules")
    with warm_start.warm_starts() as processes:
        assert recorded(project, "train.py", "modules") == usual
        assert processes.servers
    assert usual.code == 3
    runs = history(project).runs()
    assert [run.status for run in runs] == ["failed", "failed"]


def test_what_a_fork_cannot_give_is_started_as_usual(project):
    with warm_start.warm_starts() as processes:
        before = dict(processes.servers)
        read, write_end = os.pipe()
        done = subprocess.run(
            [sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=False
        )
        with_file = subprocess.run(
            [sys.executable, "-m", "rearview", "--version"],
            pass_fds=[read],
            capture_output=True,
            check=False,
        )
        os.close(read)
        os.close(write_end)
        assert (done.stdout, with_file.returncode) == ("1\n", 0)
        assert processes.servers == before
