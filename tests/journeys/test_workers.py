"""Journey: workers come, go and die while a backfill runs; every cell is filled, once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent.parent / "src"
RUNS = 3
SCRIPT = """\
import random
import sys
import time

weight = float(sys.argv[1])
for epoch in range(3):
    for step in range(4):
        time.sleep(0.12)
        weight = weight * 0.9 + random.random()
    print(epoch, weight)
"""
PROBED = "import rearview\n" + SCRIPT.replace(
    "random.random()\n", "random.random()\n        rearview.log('weight', weight)\n"
)


def started(folder, *words):
    env = {key: value for key, value in os.environ.items() if not key.startswith("REARVIEW_")}
    return subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env=env | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(folder, *words):
    process = started(folder, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(SCRIPT)
    many = [started(folder, "run", "-q", "--every", "train.py", str(k)) for k in range(RUNS)]
    for process in many:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    (folder / "train.py").write_text(PROBED)
    return folder


def events(process):
    """Yield the events that a backfill prints, as they come."""
    for line in process.stdout:
        yield json.loads(line)


def filled(folder, name):
    code, out, err = done(folder, "table", name, "--format", "json")
    assert code == 0, err
    return [row for row in json.loads(out) if row[name] is not None]


def rename(folder, name):
    (folder / "train.py").write_text(PROBED.replace("'weight'", repr(name)))


def test_workers_that_are_added_take_what_waits_at_once(recorded):
    rename(recorded, "added")
    process = started(recorded, "backfill", "added", "--workers", "1", "--json")
    seen = []
    for event in events(process):
        seen.append(event)
        if [one["event"] for one in seen].count("started") == 1 and event["event"] == "started":
            # the first progress may come before the backfill has said where it is
            deadline = time.monotonic() + 60
            while (told := done(recorded, "workers", "3"))[0] and time.monotonic() < deadline:
                pass
            assert told[0] == 0, told
    assert process.wait(300) == 0
    assert {"event": "workers", "workers": 3} in seen
    assert max(len(e["under_way"]) for e in seen if e["event"] == "progress") > 1
    assert (seen[-1]["exact"], len(filled(recorded, "added"))) == (True, RUNS * 12)


def test_workers_that_are_taken_away_leave_nothing_undone(recorded):
    rename(recorded, "fewer")
    process = started(recorded, "backfill", "fewer", "--workers", "3", "--json")
    seen = []
    for event in events(process):
        seen.append(event)
        if event["event"] == "started" and event["worker"] == 2:
            deadline = time.monotonic() + 60
            while (told := done(recorded, "workers", "1"))[0] and time.monotonic() < deadline:
                pass
            assert told[0] == 0, told
    assert process.wait(300) == 0
    assert {"event": "workers", "workers": 1} in seen
    assert (seen[-1]["exact"], len(filled(recorded, "fewer"))) == (True, RUNS * 12)


def test_what_a_killed_worker_had_written_does_not_count_twice(recorded):
    rename(recorded, "killed")
    process = started(recorded, "backfill", "killed", "--workers", "1", "--json")
    seen, victims = [], []
    for event in events(process):
        seen.append(event)
        if event["event"] == "rows" and not victims:
            victims = children(process.pid)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
    assert process.wait(300) == 0
    assert victims
    assert [one["event"] for one in seen].count("lost") == 1
    rows = filled(recorded, "killed")
    assert len(rows) == RUNS * 12
    assert len({(row["run"], row["epoch"], row["step"]) for row in rows}) == RUNS * 12


def children(pid):
    """Return the processes that a process started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found
