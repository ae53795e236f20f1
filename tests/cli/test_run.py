import os
from pathlib import Path

import pytest

from rearview.cli import run
from rearview.cli.run import ProgramCommand


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What `rearview run` asked for, without becoming it."""
    import rearview._history

    started = []

    def start_run(target, args, *, preemption, cells, **options):
        assert (preemption, cells) == (None, False)
        started.append((target, list(args), options))

    monkeypatch.setattr(rearview._history, "start_run", start_run)
    monkeypatch.setattr(run, "replace_process", lambda command: None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return started


def test_everything_after_the_script_is_the_scripts(command, begun):
    code, out, err = command("run", "--every", "train.py", "--every", "-q", "--", "--help", "-m")
    assert (code, out) == (0, "")
    assert err == "rearview: recording train.py\n"
    target, args, options = begun[0]
    assert target == "train.py"
    assert args == ["--every", "-q", "--", "--help", "-m"]
    assert options == {"module": False, "given": {}, "settings": {"every": True}}


def test_everything_after_the_module_is_the_modules(command, begun):
    words = ["run", "--arg", "lr=0.1", "--epsilon", "0.02", "-m", "pkg.train", "--epochs", "3", "x"]
    command(*words)
    assert begun == [
        (
            "pkg.train",
            ["--epochs", "3", "x"],
            {"module": True, "given": {"lr": "0.1"}, "settings": {"epsilon": 0.02}},
        )
    ]


def test_a_module_may_be_written_without_a_space(command, begun):
    command("run", "-mpkg", "-m")
    assert begun[0][:2] == ("pkg", ["-m"])


def test_the_value_of_an_option_does_not_count_as_the_script():
    words = ["--arg", "-m", "train.py", "-m", "x"]
    assert ProgramCommand("run", params=run.run.params).end_options_after_module(words) == words


def test_quiet_says_nothing(command, begun):
    assert command("run", "-q", "train.py") == (0, "", "")


def test_a_missing_script_is_reported_with_the_scripts_of_the_folder(command, begun):
    code, _, err = command("run", "trian.py")
    assert code == 2
    assert "Did you mean `rearview run train.py`?" in err
    assert "#no-script" in err
    assert begun == []


def test_a_folder_is_not_a_script(command, begun):
    Path("pkg").mkdir()
    code, _, err = command("run", "pkg")
    assert code == 2
    assert "rearview run -m pkg" in err


def test_an_unreadable_script_is_reported(command, begun, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be read" in command("run", "train.py")[2]


def test_no_script_at_all_is_wrong_use(command, begun):
    code, _, err = command("run")
    assert code == 2
    assert "Which script?" in err


def test_an_argument_without_a_value_is_wrong_use(command, begun):
    code, _, err = command("run", "--arg", "lr", "train.py")
    assert code == 2
    assert "NAME=VALUE" in err


def test_a_program_whose_folder_is_gone_cannot_be_started(tmp_path):
    from types import SimpleNamespace

    from rearview.errors import UsageError

    gone = SimpleNamespace(command=("/bin/true",), environment={}, folder=tmp_path / "gone")
    with pytest.raises(UsageError, match="cannot be started in"):
        run.replace_process(gone)
