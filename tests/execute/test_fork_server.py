"""Which segments share a process to be forked from, and how many such processes there are."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rearview.execute import local
from rearview.execute.executor import Task
from rearview.model.process_messages import VARIABLE

TASK = Task("t", ("python",), {}, Path(), Path(), Path(), imports=("import torch",))


def key(task=TASK, **environment):
    return local.fork_server_key(task, environment)


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    monkeypatch.setattr(local, "FORK_SERVER_SUPPORTED", True)


def test_tasks_that_differ_only_in_their_control_message_share_a_fork_server():
    assert key(**{VARIABLE: "a", "HOME": "/"}) == key(**{VARIABLE: "b", "HOME": "/"}) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"task": replace(TASK, imports=("import numpy",))},
        {"task": replace(TASK, command=("python3",))},
        {"PYTHONHASHSEED": "2"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ],
)
def test_tasks_that_differ_in_imports_command_or_environment_do_not_share(other):
    assert key(**{"PYTHONHASHSEED": "1", **other}) != key(PYTHONHASHSEED="1")


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_threads_that_are_bound_when_a_library_is_loaded_share_nothing(name):
    assert key(**{name: "1"}) is None


def test_a_relative_search_path_is_not_shared():
    assert key(PYTHONPATH="/a:/b") is not None
    assert key(PYTHONPATH="/a:src") is key(PYTHONPATH="/a:") is None


def test_no_fork_server_without_imports_or_system_support(monkeypatch):
    assert key(replace(TASK, imports=None)) is None
    assert key(replace(TASK, imports=())) is not None
    monkeypatch.setattr(local, "FORK_SERVER_SUPPORTED", False)
    assert key() is None


@dataclass
class Idle:
    children: int = 0
    closed: bool = False

    def close(self):
        self.closed = True


def test_the_least_recently_used_idle_fork_server_is_closed(monkeypatch):
    begun = []

    def start(task, environment):
        begun.append(Idle())
        return begun[-1]

    monkeypatch.setattr(local.ForkServerClient, "start", start)
    executor = local.Local(2)

    def get(number):
        return executor._fork_server(TASK, {"NUMBER": str(number)})

    first = [get(number) for number in range(local.MAX_FORK_SERVERS)]
    first[0].children = 1
    assert get(0) is first[0]
    assert get(99) is begun[-1]
    assert [one.closed for one in first] == [False, True, False, False]
    for one in begun:
        one.children = 1
    assert get(100) is None
    executor.close()
    assert all(one.closed for one in begun)


def test_a_closed_fork_server_is_not_started_again(monkeypatch):
    monkeypatch.setattr(local.ForkServerClient, "start", lambda task, environment: Idle())
    executor = local.Local(2)
    executor._fork_server(TASK, {}).close()
    assert executor._fork_server(TASK, {}) is None
