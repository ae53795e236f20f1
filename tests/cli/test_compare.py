"""Two runs side by side."""

import json

import pytest

from recorded import Recorded, at


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Recorded(tmp_path)


def a_run(project, lr, acc, **facts):
    return project.run(
        (at(epoch=0), {"acc": 0.1}), (at(epoch=1), {"acc": acc}), args={"lr": lr, "seed": 1},
        version="", **facts,
    )  # fmt: skip


def test_differences_are_shown_with_exit_code_1(command, project):
    a, b = a_run(project, 0.1, 0.5, machine="one"), a_run(project, 0.2, 0.75, machine="two")
    command("name", a, "base")
    code, out, err = command("compare", "base", b)
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert ["base", b] in lines
    assert ["lr", "0.1", "0.2"] in lines
    assert ["acc", "0.5", "0.75"] in lines
    assert ["machine", "one", "two"] in lines
    assert "seed" not in out
    assert "1 of arguments" in err
    assert ["seed", "1", "1"] in [
        x.split() for x in command("compare", a, b, "--all")[1].splitlines()
    ]


def test_two_equal_runs_are_reported_as_equal(command, project):
    a, b = a_run(project, 0.1, float("nan")), a_run(project, 0.1, float("nan"))
    assert command("compare", a, b)[0] == 0


def test_a_comparison_for_programs(command, project):
    a, b = a_run(project, 0.1, 0.5), a_run(project, 0.2, 0.5)
    found = json.loads(command("compare", a, b, "--json")[1])
    assert found["a"] == a
    assert {"name": "lr", "a": 0.1, "b": 0.2, "differs": True} in found["arguments"]
    assert {"name": "acc", "a": 0.5, "b": 0.5, "differs": False} in found["results"]


def test_an_unknown_run_is_refused(command, project):
    a_run(project, 0.1, 0.5)
    code, _, err = command("compare", "nothing-like-it", "latest")
    assert code == 2
    assert "no-run" in err
