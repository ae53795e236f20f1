import json
import os
import subprocess
import sys

import click
import pytest

import rearview
from rearview.cli.main import COMMANDS, cli
from rearview.errors import UsageError


def test_rearview_without_a_command_prints_the_first_steps(command):
    code, out, _ = command()
    assert code == 0
    assert "rearview run train.py" in out
    assert "rearview demo" in out


def test_rearview_without_a_command_counts_the_runs_of_a_project(command, tmp_path, monkeypatch):
    store = tmp_path / ".rearview"
    (store / "runs" / "r1").mkdir(parents=True)
    (store / "runs" / "r1" / "run.json").write_text("{}")
    (store / "format").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    assert "has 1 run:" in command()[1]


def test_version(command):
    assert command("--version")[1] == f"rearview, version {rearview.__version__}\n"


def test_help_lists_every_command(command):
    _, out, _ = command("--help")
    for name in COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_list_of_commands_is_the_first_line_of_its_help(name):
    own = cli.get_command(click.Context(cli), name).help
    listed = COMMANDS[name][1].removesuffix(".")
    assert own.split("\n")[0].startswith(listed)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"Usage: rearview {name}" in out


def test_an_unknown_command_gets_the_nearest(command):
    code, _, err = command("tabel")
    assert code == 2
    assert "There is no command 'tabel'. Did you mean `rearview table`" in err


def test_a_script_given_without_the_command_run_gets_a_hint(command):
    code, _, err = command("train.py")
    assert code == 2
    assert "`rearview run train.py`" in err


def test_an_unknown_option_is_wrong_use(command):
    code, _, err = command("runs", "--jsn")
    assert code == 2
    assert "--jsn" in err


def test_an_error_of_ours_is_one_line_with_its_slug(command, past, monkeypatch):
    def fail():
        raise UsageError("There is no run 'x'.", slug="no-run")

    monkeypatch.setattr(past, "runs", fail)
    code, out, err = command("runs")
    assert (code, out) == (2, "")
    assert err == "rearview: There is no run 'x'. (docs/errors.md#no-run)\n"


def test_an_unexpected_error_is_short_and_names_the_way_to_more(command, past, monkeypatch):
    monkeypatch.setattr(past, "runs", lambda: 1 / 0)
    code, _, err = command("runs")
    assert code == 70
    assert "ZeroDivisionError: division by zero" in err
    assert "rearview --traceback" in err
    assert "Traceback" not in err


def test_the_option_traceback_prints_the_whole_traceback(past, monkeypatch):
    monkeypatch.setattr(past, "runs", lambda: 1 / 0)
    from rearview.cli.main import main

    with pytest.raises(ZeroDivisionError):
        main(["--traceback", "runs"])


def test_ctrl_c_ends_without_a_traceback(command, past, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(past, "runs", interrupted)
    code, _, err = command("runs")
    assert code == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    script = tmp_path / "many.py"
    script.write_text(
        "import rearview.cli.query as ask\n"
        "from types import SimpleNamespace\n"
        "class Table(list):\n"
        "    columns, mark, interpolated, unproved = ['n'], '', '', []\n"
        "    def described(self):\n"
        "        return iter(self)\n"
        "table = Table({'n': n} for n in range(200000))\n"
        "ask.open_history = lambda: SimpleNamespace(sql=lambda query, **_: table, problems=list)\n"
        "from rearview.cli.main import main\n"
        "main(['sql', 'select 1', '--format', 'csv'])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 141


def test_python_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "rearview", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == f"rearview, version {rearview.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(command, shell):
    code, out, _ = command("completion", shell)
    assert code == 0
    assert "_REARVIEW_COMPLETE" in out


def complete(words, position, monkeypatch, capsys):
    monkeypatch.setenv("_REARVIEW_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(position))
    from rearview.cli.main import main

    with pytest.raises(SystemExit):
        main([])
    return [line.partition(",")[2] for line in capsys.readouterr().out.split()]


def test_commands_and_names_and_runs_complete(past, monkeypatch, capsys):
    assert complete("rearview ver", 1, monkeypatch, capsys) == ["verify"]
    assert complete("rearview table l", 2, monkeypatch, capsys) == ["loss", "lr"]
    runs = complete("rearview show 2026", 2, monkeypatch, capsys)
    assert runs == [run.id for run in reversed(past.found)]


def test_completion_stays_silent_where_there_is_no_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert complete("rearview table l", 2, monkeypatch, capsys) == []


def test_json_of_runs_is_for_programs(command, past):
    code, out, _ = command("runs", "--json")
    assert code == 0
    first = json.loads(out)[0]
    assert first["id"] == past.found[0].id
    assert first["status"] == "finished"
    assert first["seconds"] == 90.0
