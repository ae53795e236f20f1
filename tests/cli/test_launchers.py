"""What people type after `rearview run` that is not the name of a script."""

import subprocess
import sys
from pathlib import Path

import pytest

from rearview.cli.run import program_of
from rearview.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nprint('ran', sys.argv[1:])\n")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return tmp_path


def refusal(*words):
    with pytest.raises(UsageError) as caught:
        program_of(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "target", "args", "module"),
    [
        (["train.py", "--lr", "1"], "train.py", ("--lr", "1"), False),
        (["python", "train.py", "-u"], "train.py", ("-u",), False),
        (["python", "-m", "pkg.train", "x"], "pkg.train", ("x",), True),
        (["python", "-mpkg"], "pkg", (), True),
        ([sys.executable, "train.py"], "train.py", (), False),
        (["nowhere.py"], "nowhere.py", (), False),
    ],
)
def test_a_script_is_meant_with_or_without_the_interpreter(words, target, args, module):
    found = program_of(words)
    assert (found.target, found.args, found.module) == (target, args, module)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["-u"], {"PYTHONUNBUFFERED": "1"}),
        (["-O", "-B"], {"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"}),
        (["-W", "error"], {"PYTHONWARNINGS": "error"}),
        (["-Wignore"], {"PYTHONWARNINGS": "ignore"}),
    ],
)
def test_options_of_python_become_variables(flags, variables):
    assert program_of(["python", *flags, "train.py"]).environment == variables


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "torchrun --nproc-per-node 2 train.py --lr 1",
            "`torchrun --nproc-per-node 2 --no-python rearview run train.py --lr 1`",
        ),
        (
            "accelerate launch --num_processes 2 train.py",
            "`accelerate launch --num_processes 2 --no_python rearview run train.py`",
        ),
        ("mpirun -n 2 python train.py", "`mpirun -n 2 rearview run train.py`"),
        ("srun -N1 python -m pkg.train", "`srun -N1 rearview run -m pkg.train`"),
        ("uv run python train.py --x 1", "`uv run rearview run train.py --x 1`"),
        ("env A=1 python train.py", "`env A=1 rearview run train.py`"),
        ("python -c 1", "`rearview run train.py`"),
        ("pytest tests", "`rearview run -m pytest tests`"),
    ],
)
def test_a_launcher_is_answered_with_the_line_to_type(words, line):
    assert line in refusal(*words.split())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "#!/bin/bash\nset -e\nA=1 python -u train.py --lr $LR\n",
            "line 3 to `A=1 rearview run train.py --lr $LR`",
        ),
        ("python3.11 -m pkg.train\n", "line 1 to `rearview run -m pkg.train`"),
        ("# python train.py\ntorchrun train.py\n", "line 2 starts processes through a launcher"),
        ("echo hello\n", "in place of `python`"),
    ],
)
def test_a_shell_script_is_answered_with_the_line_to_change(folder, text, line):
    (folder / "train.sh").write_text(text)
    assert line in refusal("./train.sh")


def test_a_shell_script_is_known_by_its_first_line_too(folder):
    (folder / "launch").write_text("#!/usr/bin/env bash\npython train.py\n")
    assert "shell script" in refusal("launch")


def test_another_environment_is_not_silently_replaced_by_ours(folder):
    other = folder / "elsewhere" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert str(other) in refusal(str(other), "train.py")


def test_run_python_records_the_script(folder):
    command = [sys.executable, "-m", "rearview", "run", "python", "-u", "train.py", "a"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ran ['a']\n"
    assert "recording train.py" in done.stderr
