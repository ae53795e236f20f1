"""The first look: the page of that name as it stands, and what a person at a terminal is told."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plainly import SOURCE, recorded, write
from rearview._history import history

PAGE = Path(__file__).parents[2] / "docs" / "first-look.md"
REARVIEW = (sys.executable, "-m", "rearview")


def script():
    return re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def commands(folder, *words):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "REARVIEW_ROOT": str(folder)}
    return subprocess.run(
        [*REARVIEW, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    write(folder, train=script())
    return folder, commands(folder, "run", "train.py")


def test_a_script_that_logs_nothing_has_its_results_in_the_table(looked_at):
    folder, ran = looked_at
    assert ran.returncode == 0, ran.stderr
    printed = re.findall(r"epoch (\d) loss (\S+) acc (\S+)%", ran.stdout)
    assert len(printed) == 5
    rows = history(folder).table().rows()
    assert [f"{row['loss']:.3f}" for row in rows] == [loss for _, loss, _ in printed]
    assert [f"{row['acc'] * 100:.1f}" for row in rows] == [acc for _, _, acc in printed]
    shown = commands(folder, "table")
    assert shown.returncode == 0
    assert "loss" in shown.stdout.splitlines()[0]
    assert "captured: loss, acc (assigned)" in shown.stderr


def test_no_closing_line_is_printed_if_stderr_is_not_a_terminal(looked_at):
    _, ran = looked_at
    assert ran.stderr == "rearview: recording train.py\n"


def test_an_unknown_name_is_answered_with_names_that_contain_it(tmp_path):
    write(tmp_path, train=script().replace("loss", "train_loss"))
    assert recorded(tmp_path, "train.py").code == 0
    asked = commands(tmp_path, "table", "los")
    assert "Did you mean train_loss" in asked.stderr


def test_on_a_terminal_a_run_ends_with_what_was_recorded_its_cost_and_the_next_command(tmp_path):
    write(tmp_path, train=script())
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": SOURCE, "REARVIEW_ROOT": str(tmp_path)}
    ran = subprocess.run(
        [*REARVIEW, "run", "train.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
        check=True,
    )
    os.close(follower)
    told = b""
    while chunk := _read(leader):
        told += chunk
    os.close(leader)
    lines = [line for line in told.decode().splitlines() if line.startswith("rearview: ")]
    run = history(tmp_path).run().id
    assert lines[-3].startswith(f"rearview: recorded run {run}: 5 x epoch, columns loss, acc")
    assert "it cost" in lines[-2]
    assert "`rearview table`" in lines[-1]
    assert "rearview" not in ran.stdout


def _read(leader):
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux: the other end is closed
        return b""
