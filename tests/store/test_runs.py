"""A run's folder tells the truth about it, whoever died when."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rearview.durable_files import add_check
from rearview.errors import StoreError, UsageError
from rearview.model import ReplayReport, ReplayStart, RunEnd, RunStart, Status
from rearview.store import machine_and_process as alive_module
from rearview.store.json_files import append_line
from rearview.store.project import Project
from rearview.store.runs import FORMAT, Runs

SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def runs(tmp_path):
    return Runs(Project.create(tmp_path))


def started(runs: Runs, **facts) -> str:
    run = runs.reserve()
    runs.start(run, {"version": "v", "script": "train.py", "argv": ["--lr", "1"], **facts})
    return run


def change(runs: Runs, run: str, **facts) -> None:
    file = runs.folder(run) / "run.json"
    text = json.dumps({**json.loads(file.read_bytes()), **facts}).encode()
    file.write_bytes(add_check(text))


def test_the_facts_of_a_started_run_are_read_back(runs):
    run = started(
        runs, args={"lr": 0.1, "bad": math.nan}, target="\udce9.py", given={"A": "7"}, parent="p"
    )
    found = runs.get(run)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", found.id)
    assert (found.version, found.script, found.argv) == ("v", "train.py", ("--lr", "1"))
    assert found.facts == RunStart(target="\udce9.py", given={"A": "7"})
    assert found.args["lr"] == 0.1
    assert math.isnan(found.args["bad"])
    assert (found.pid, found.parent, found.ended) == (os.getpid(), "p", None)
    assert found.status is Status.RUNNING


@pytest.mark.parametrize(
    ("code", "status"), [(0, Status.FINISHED), (1, Status.FAILED), (85, Status.PAUSED)]
)
def test_the_exit_code_says_how_a_run_ended(runs, code, status):
    run = started(runs)
    runs.end(run, code, RunEnd(files=["train.py"]))
    found = runs.get(run)
    assert (found.status, found.exit_code) == (status, code)
    assert found.end.files == ["train.py"]
    assert found.ended >= found.started


def test_a_killed_run_is_dead_at_once(runs, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from rearview.store.project import Project;"
        "from rearview.store.runs import Runs; r = Runs(Project.create(Path(sys.argv[1])));"
        "run = r.reserve(); r.start(run, {}); print(run, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        text=True,
    )
    run = process.stdout.readline().strip()
    assert runs.get(run).status is Status.RUNNING
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead too
    assert runs.get(run).status is Status.DEAD
    process.wait()
    process.stdout.close()
    assert runs.get(run).status is Status.DEAD


def test_another_process_with_the_same_number_is_not_the_run(runs):
    run = started(runs)
    change(runs, run, born=1)
    assert runs.get(run).status is Status.DEAD
    change(runs, run, born=alive_module.process_identity()["born"], boot="another boot")
    assert runs.get(run).status is Status.DEAD


@pytest.mark.parametrize("elsewhere", [{"host": "far"}, {"space": "pid:[1]"}])
def test_elsewhere_the_heartbeat_decides(runs, elsewhere):
    run = started(runs)
    change(runs, run, **elsewhere)
    assert runs.get(run).status is Status.RUNNING
    old = time.time() - 100
    os.utime(runs.folder(run) / "heartbeat", (old, old))
    assert runs.get(run).status is Status.DEAD
    runs.heartbeat(run)
    assert runs.get(run).status is Status.RUNNING


def test_a_paused_run_that_is_resumed_is_the_same_run(runs):
    run = started(runs)
    change(runs, run, pid=1, born=0)
    runs.end(run, 85)
    assert runs.get(run).status is Status.PAUSED
    runs.resume(run)
    assert runs.get(run).status is Status.RUNNING
    assert runs.get(run).pid == os.getpid()
    runs.end(run, 0)
    assert runs.get(run).status is Status.FINISHED
    assert len(runs.all()) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_has_ended_also_if_the_clock_was_set_back_during_it(runs, resumed):
    run = started(runs)
    if resumed:
        runs.end(run, 85)
        runs.resume(run)
    runs.end(run, 0, moment=time.time() - 3600)
    assert runs.get(run).status is Status.FINISHED
    runs.refuse_if_held(run)


def test_a_run_that_is_resumed_has_not_ended_also_if_the_clock_was_set_back(runs):
    run = started(runs)
    runs.end(run, 85, moment=time.time() + 3600)
    runs.resume(run)
    assert runs.get(run).status is Status.RUNNING


def test_arguments_are_added_and_the_last_one_wins(runs):
    run = started(runs, args={"lr": 1, "a": 1})
    runs.update_args(run, {"lr": 2})
    events = runs.folder(run) / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"event":"args","args":{"lr":9')  # died here
    runs.update_args(run, {"b": [1, 2]})
    assert runs.get(run).args == {"lr": 2, "a": 1, "b": [1, 2]}


def test_starting_a_run_twice_is_refused(runs):
    run = started(runs)
    with pytest.raises(StoreError, match="started before"):
        runs.start(run, {})


def test_ids_of_one_second_sort_by_their_start(runs):
    ids = [runs.reserve(now=1e9 + k / 100) for k in range(100)]
    assert len({run[:15] for run in ids}) == 1
    assert ids == sorted(ids)


def test_eight_starters_get_eight_ids(runs):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: runs.reserve(now=0.0), range(400)))
    assert len(set(ids)) == 400
    assert runs.all() == []  # reserved is not started


def test_a_run_is_found_by_id_part_or_place(runs):
    ids = [started(runs, started=float(i)) for i in range(3)]
    assert runs.find(ids[1]).id == ids[1]
    assert runs.find("latest").id == runs.find("-1").id == ids[2]
    assert runs.find("-3").id == ids[0]
    ends = [run[-4:] for run in ids]
    if len(set(ends)) == 3:
        assert [runs.find(end).id for end in ends] == ids
    with pytest.raises(UsageError, match="fits 3 runs"):
        runs.find(ids[0][:2])
    with pytest.raises(UsageError, match=f"Did you mean .*{ids[1]}"):
        runs.find(ids[1][:-1] + "x")
    with pytest.raises(UsageError, match="There are 3 runs"):
        runs.find("-4")


def test_without_runs_the_error_says_so(runs):
    for text in ("latest", "-1", "x", ""):
        with pytest.raises(UsageError, match=r"no runs yet|No run has been recorded"):
            runs.find(text)


def test_a_damaged_run_does_not_hide_the_others(runs):
    bad, good = started(runs), started(runs)
    (runs.folder(bad) / "run.json").write_bytes(b"{")
    found = {run.id: run for run in runs.all()}
    assert found[good].status is Status.RUNNING
    assert "cannot be read" in found[bad].damaged


def test_a_run_of_a_newer_format_is_refused(runs):
    run = started(runs)
    change(runs, run, format=FORMAT + 1)
    with pytest.raises(StoreError, match=rf"format {FORMAT + 1}.*[Uu]pgrade"):
        runs.get(run)


def test_replays_say_whether_they_were_proved(runs):
    run = started(runs)
    start = ReplayStart(
        version="d",
        names=("loss",),
        operator="DP",
        covered=(2, 5),
        only=(2, 4),
        predicted=1.5,
        head=False,
        tail=True,
        limits=(("step", 1, None, False),),
        same={"loss": "abc"},
        inner={"t.py:0:step": {2: (0, 7)}},
        crew="b",
        redoes="p0",
        because="it differed",
    )
    report = ReplayReport(finished=True, seconds=1.5)
    runs.start_replay(run, "p1", start)
    runs.start_replay(run, "p2", ReplayStart())
    runs.end_replay(run, "p1", proved=True, report=report)
    one, two = runs.replays(run)
    assert (one.id, one.proved, one.names, one.version) == ("p1", True, ("loss",), "d")
    assert (one.start, one.report) == (start, report)
    assert (two.proved, two.ended, two.start, two.report) == (None, None, ReplayStart(), None)


# lines as earlier versions wrote them, before there was a record for them
OLD_STARTS = [
    ({"names": ["w"], "workers": 2}, {"head": None, "tail": None, "covered": None}),
    (
        {
            "names": ["w"],
            "covered": [1, 4611686018427387904],
            "only": None,
            "head": True,
            "tail": False,
        },
        {"covered": (1, 1 << 62), "only": None, "head": True, "tail": False},
    ),
    (
        {"names": ["w"], "inner": {"step": {"3": [4, 7]}}, "limits": [["step", 4, 7, False]]},
        {"inner": {"step": {3: (4, 7)}}, "limits": (("step", 4, 7, False),)},
    ),
    (
        {"names": ["w"], "only": [1, 5], "same": {"w": "abc"}},
        {"only": (1, 5), "same": {"w": "abc"}},
    ),
]


@pytest.mark.parametrize(("line", "expected"), OLD_STARTS)
def test_starts_of_replays_that_earlier_versions_stored_are_read(runs, line, expected):
    run = started(runs)
    append_line(runs.folder(run) / "replays.jsonl", {"format": 2, "replay": "p", **line})
    (replay,) = runs.replays(run)
    assert replay.names == ("w",)
    assert {name: getattr(replay.start, name) for name in expected} == expected


@pytest.mark.parametrize(
    "line", [{"limits": "all"}, {"inner": {"step": [1]}}, {"only": 3}, {"covered": [1]}]
)
def test_a_replay_whose_start_cannot_be_read_counts_for_no_name(runs, line):
    run = started(runs)
    fields = {"format": 2, "replay": "p", "version": "v", "names": ["w"], "redoes": "p0", **line}
    append_line(runs.folder(run) / "replays.jsonl", fields)
    (replay,) = runs.replays(run)
    assert (replay.names, replay.version, replay.redoes) == ((), "v", "p0")
