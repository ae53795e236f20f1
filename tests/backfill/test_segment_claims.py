"""Backfills beside each other: what one has under way another leaves to it, as long as it lives."""

import os
import secrets
import time

import msgspec
import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.backfill.facts_and_segments import replay_start
from rearview.execute.backfill_status import SILENT, StatusFile, folder_of
from rearview.store.runs import Runs

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
w = 1.0
for epoch in range(4):
    for step in range(2):
        w = w * 0.9 + step
print(w)
"""
PROBED = "import rearview\n" + SCRIPT.replace(
    "+ step\n", '+ step\n        rearview.log("w", w)\n'
).replace("print(w)\n", 'print(w)\nrearview.log("end", w)\n')
EVERY = [(epoch, step) for epoch in range(4) for step in range(2)]


@pytest.fixture
def past(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    (tmp_path / "train.py").write_text(PROBED)
    return history(tmp_path)


class Other:
    """Another backfill of the same: it lives as long as its file says so, and replays nothing."""

    def __init__(self, past, name="w"):
        self.runs, self.run = Runs(past.project), past.run().id
        plan = past.plan([name])
        (request,) = (each.request for each in plan.prepared.values())
        self.status = StatusFile(past.project, [name])
        start = replay_start(request, plan.plan.segments[0], self.status.id)
        self.start = msgspec.structs.replace(
            start, version=request.version, names=(name,), head=False, tail=False
        )

    def claim(self, *covered, **facts):
        """Say that a replay has started; return its name."""
        replay = f"{self.run}.{secrets.token_hex(4)}"
        start = msgspec.structs.replace(self.start, covered=covered, **facts)
        self.runs.start_replay(self.run, replay, start)
        return replay

    def end(self, replay, *, proved):
        self.runs.end_replay(self.run, replay, proved=proved)


def points(past, name="w"):
    found = past.sql(
        f"SELECT indices FROM records WHERE name = '{name}' AND (origin = 'recorded' OR replay IS NOT NULL)"
    )
    return sorted(tuple(row["indices"]) for row in found)


def when_held(act):
    """Return a listener that acts once, when something waits for another backfill."""
    done = []

    def progress(event):
        if event.claimed_elsewhere and not done:
            done.append(event)
            act()

    return progress


def test_a_segment_that_another_fills_is_waited_for_and_not_run(past):
    other = Other(past)
    with other.status.open():
        replay = other.claim(0, 4)
        progress = when_held(lambda: other.end(replay, proved=True))
        report = past.backfill(["w"], workers=1, progress=progress)
    assert (report.elsewhere, report.outcomes) == (1, [])
    assert points(past) == []


def test_a_segment_that_another_backfill_fails_is_taken_over(past):
    other = Other(past)
    with other.status.open():
        replay = other.claim(0, 4)
        progress = when_held(lambda: other.end(replay, proved=False))
        report = past.backfill(["w"], workers=1, progress=progress)
    assert (report.elsewhere, report.proved) == (0, True)
    assert points(past) == EVERY


def test_only_segments_that_no_other_backfill_runs_start_at_once(past):
    other, seen = Other(past), []
    with other.status.open():
        replay = other.claim(1, 3)

        def act():
            seen.extend(points(past))
            other.end(replay, proved=True)

        report = past.backfill(["w"], workers=1, progress=when_held(act))
    assert seen == points(past) == [point for point in EVERY if point[0] not in (1, 2)]
    assert (report.elsewhere, report.proved) == (1, True)
    assert past.plan(["w"]).nothing


def test_the_end_of_a_run_is_left_to_the_backfill_that_runs_it(past):
    other = Other(past, "end")
    with other.status.open():
        replay = other.claim(0, 4, tail=True)
        progress = when_held(lambda: other.end(replay, proved=True))
        assert past.backfill(["w", "end"], workers=1, progress=progress).proved
    assert points(past) == EVERY
    assert points(past, "end") == []


def test_claims_of_a_backfill_that_is_gone_count_for_nothing(past):
    other = Other(past)
    with other.status.open():
        other.claim(0, 4)
    assert past.backfill(["w"]).proved
    assert points(past) == EVERY


def test_claims_of_a_suspended_backfill_are_ignored(past):
    other = Other(past)
    with other.status.open():
        other.claim(0, 4)
        file = folder_of(past.project) / f"{other.status.id}.json"
        os.utime(file, (0, time.time() - SILENT - 1))
        assert past.backfill(["w"]).proved
    assert points(past) == EVERY


def test_the_first_of_two_backfills_that_claim_at_once_gets_the_segment(past, monkeypatch):
    other, claimed = Other(past), []
    start = Runs.start_replay

    def beaten(self, run, replay, facts):
        if not claimed:
            claimed.append(True)
            claimed.append(other.claim(2, 4))
        start(self, run, replay, facts)

    with other.status.open():
        monkeypatch.setattr(Runs, "start_replay", beaten)
        progress = when_held(lambda: other.end(claimed[1], proved=True))
        report = past.backfill(["w"], workers=1, progress=progress)
    assert (report.elsewhere, report.proved) == (1, True)
    assert points(past) == [point for point in EVERY if point[0] < 2]


def test_another_statement_of_the_same_name_is_not_the_same_work(past, tmp_path):
    other = Other(past)
    with other.status.open():
        other.claim(0, 4)
        (tmp_path / "train.py").write_text(PROBED.replace('log("w", w)', 'log("w", w + 1)'))
        assert history(tmp_path).backfill(["w"]).proved
