"""The launcher: signals reach the program, its code reaches the batch system."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parents[2] / "src"

TRAIN = """
import sys, time
from rearview import Checkpointer
one = Checkpointer(sys.argv[1], checkpoint_every=None)
print("ready", flush=True)
for value in range(one.restore(-1) + 1, 10**6):
    time.sleep(0.01)
    one.step(value)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    started = []

    def start(*command, options=()):
        process = subprocess.Popen(
            [sys.executable, "-m", "rearview.checkpointer.supervisor", *options, "--", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [0, 1, 85])
def test_the_code_of_the_command_is_the_code(start, code):
    process = start("sh", "-c", f"exit {code}")
    process.communicate(timeout=HUNG)
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_program_gets_the_signal_and_85_comes_out(start, number):
    process = start(sys.executable, "train.py", "ck")
    process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=HUNG)
    assert process.returncode == 85


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_shell_that_dies_of_the_signal_does_not_turn_exit_code_85_into_143(
    start, tmp_path, number
):
    (tmp_path / "run.sh").write_text(f"echo begin\n{sys.executable} train.py ck\necho after\n")
    process = start("bash", "run.sh")
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(number)
    out, _ = process.communicate(timeout=HUNG)
    assert process.returncode == 85
    assert (tmp_path / "ck").exists()
    assert "after" not in out


def test_the_exit_code_shows_that_a_program_without_a_checkpointer_was_killed(start):
    process = start("sh", "-c", "echo ready; sleep 60")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HUNG)
    assert process.returncode == 128 + signal.SIGTERM


def test_another_code_may_mean_to_be_continued(start, tmp_path):
    (tmp_path / "run.sh").write_text(
        "echo ready\n"
        f'{sys.executable} -c "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(77)); '
        # not signal.pause(): a signal that comes just before it would be waited for for ever
        "print('r', flush=True); any(time.sleep(0.01) for _ in iter(int, 1))\"\n"
        "exit 0\n"
    )
    process = start("bash", "run.sh", options=("--code", "77"))
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HUNG)
    assert process.returncode == 77


def test_killing_the_launcher_kills_the_command(start):
    process = start(sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()")
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(500):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("the command outlived its launcher")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--", "no-such-command-anywhere"], 127), (["--signals", "NOPE", "--", "true"], 2)],
)
def test_a_command_that_cannot_be_run_is_reported(arguments, code):
    done = subprocess.run(
        [sys.executable, "-m", "rearview.checkpointer.supervisor", *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr
