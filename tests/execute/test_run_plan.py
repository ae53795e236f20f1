"""Segments run in order, lost ones again, doubtful ones from the start."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.execute.executor import Task
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.execute.run_plan import Claim, Pool
from rearview.model import Operator, ReplayReport, Run, Segment, Status
from rearview.model.process_messages import ReplayFailure

RUN = Run("r", "v", "train.py", (), 0.0, Status.FINISHED)


@dataclass
class Scripted:
    """Stands in for the replays: each task ends with the next verdict of its script."""

    verdicts: dict[str, list[ReplayReport]]
    judged: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)

    def judge(self, run, task, code, seconds, redone=""):
        self.judged.append(task.id)
        name = task.id.removesuffix("-again")
        report = self.verdicts[name].pop(0)
        return ReplayOutcome(run.id, task.id, report, task.log, task.folder, seconds, redone=redone)

    def prepare_rerun(self, run, task, because):
        assert because
        return made(f"{task.id}-again", task.folder)

    def run_folder(self, run):
        return Path("nowhere")

    def interrupt(self, run, task):
        self.abandoned.append(task.id)

    def abandon(self, run, task, why):
        self.abandoned.append(task.id)


@dataclass
class Job:
    task: Task
    codes: list[int]

    def wait(self, timeout=None):
        return self.codes.pop(0)

    def stop(self):
        pass


@dataclass
class Machine:
    """An executor whose tasks end as told."""

    codes: dict[str, list[int]] = field(default_factory=dict)
    slots: int = 2
    started: list[str] = field(default_factory=list)
    closed: bool = False

    def start(self, task, slot):
        self.started.append(task.id)
        return Job(task, self.codes.setdefault(task.id, [0]))

    def resize(self, slots):
        self.slots = slots

    def close(self):
        self.closed = True


def made(name, folder):
    return Task(name, (), {}, folder, folder / "log", folder / name)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


def segment(name, seconds=1.0):
    """Return a segment that stands for the task of that name."""
    return Segment("r", name, Operator.FULL, seconds=seconds)


@dataclass
class Granted:
    """Stands in for the claims: grants each segment what its script says, or all of it, always."""

    folder: Path
    replays: Scripted
    script: dict[str, list[Claim]] = field(default_factory=dict)
    imports: tuple[str, ...] | None = None
    taken: list[str] = field(default_factory=list)

    def take(self, segment):
        self.taken.append(segment.version)
        if segment.version in self.script:
            return self.script[segment.version].pop(0)
        return Claim(replace(made(segment.version, self.folder), imports=self.imports))

    def release(self, segment, task, why):
        self.replays.abandon(RUN, task, why)


def run(folder, replays, machine, names, *options, seconds=1.0, **claims):
    """Run segments of these names; return the outcomes, and the pool."""
    granted = Granted(folder, replays, **claims)
    pool = Pool(replays, machine, granted, *options)
    return pool.run([segment(name, seconds) for name in names], {"r": RUN}), pool


GOOD = ReplayReport(states=1, finished=True)
SHARED = {"imports": ("import numpy",)}


def test_segments_are_started_in_order_and_outcomes_have_the_same_order(folder):
    machine = Machine()
    replays = Scripted({"a": [GOOD], "b": [GOOD], "c": [GOOD]})
    outcomes, _ = run(folder, replays, machine, "abc")
    assert machine.started == ["a", "b", "c"]
    assert [outcome.replay for outcome in outcomes] == ["a", "b", "c"]
    assert machine.closed


def test_a_killed_worker_s_segment_is_started_again(folder):
    machine = Machine({"a": [-9, 0]})
    outcomes, _ = run(folder, Scripted({"a": [GOOD]}), machine, "a")
    assert machine.started == ["a", "a"]
    assert outcomes[0].proved


def test_a_segment_that_is_killed_again_and_again_is_given_up(folder):
    machine = Machine({"a": [-9] * 9})
    lost = ReplayReport(error="killed")
    outcomes, _ = run(folder, Scripted({"a": [lost]}), machine, "a")
    assert len(machine.started) == 4
    assert not outcomes[0].proved


def test_a_difference_after_a_restore_is_settled_by_a_replay_from_the_start(folder):
    machine = Machine()
    doubt = ReplayReport(difference="w", restored=1, finished=True)
    outcomes, _ = run(folder, Scripted({"a": [doubt, GOOD]}), machine, "a")
    assert machine.started == ["a", "a-again"]
    assert outcomes[0].proved


def test_a_difference_from_the_start_on_is_the_answer(folder):
    machine = Machine()
    doubt = ReplayReport(difference="w", restored=0, finished=True)
    outcomes, _ = run(folder, Scripted({"a": [doubt]}), machine, "a")
    assert machine.started == ["a"]
    assert not outcomes[0].proved


@dataclass
class Sharing(Machine):
    """An executor that keeps which tasks might have shared a start."""

    shared: list[str] = field(default_factory=list)

    def start(self, task, slot):
        if task.imports is not None:
            self.shared.append(task.id)
        return super().start(task, slot)


@pytest.mark.parametrize(
    "wrong",
    [
        ReplayReport(difference="w", finished=True),
        ReplayReport(differing=["loss"], finished=True),
        ReplayReport(error="exit code 1"),
    ],
)
def test_a_failure_after_a_shared_start_is_repeated_in_a_separate_process(folder, wrong):
    machine = Sharing(slots=1)
    replays = Scripted({"a": [wrong, GOOD], "b": [GOOD]})
    outcomes, _ = run(folder, replays, machine, "ab", **SHARED)
    assert machine.started == ["a", "a-again", "b"]
    assert machine.shared == ["a"]  # perhaps that was it
    assert all(outcome.proved for outcome in outcomes)


def test_a_failure_with_and_without_a_shared_start_keeps_sharing_on(folder):
    machine = Sharing(slots=1)
    wrong = ReplayReport(difference="w", finished=True)
    outcomes, _ = run(folder, Scripted({"a": [wrong, wrong], "b": [GOOD]}), machine, "ab", **SHARED)
    assert machine.shared == ["a", "b"]
    assert [outcome.proved for outcome in outcomes] == [False, True]


def test_a_statement_that_raises_is_run_twice_only_once(folder):
    machine = Sharing(slots=1)
    raised = ReplayReport(error="a.py:1 raised", failure=ReplayFailure.PROBE_RAISED)
    replays = Scripted({"a": [raised, raised], "b": [raised], "c": [raised]})
    run(folder, replays, machine, "abc", **SHARED)
    assert machine.started == ["a", "a-again", "b", "c"]


def test_an_error_that_only_reads_like_a_raising_statement_is_another_error(folder):
    machine = Sharing(slots=1)
    wrong = ReplayReport(error="the added statement at a.py:1 raised ValueError")
    replays = Scripted({"a": [wrong, wrong], "b": [wrong, wrong]})
    run(folder, replays, machine, "ab", **SHARED)
    assert machine.started == ["a", "a-again", "b", "b-again"]


def test_a_segment_killed_after_a_shared_start_starts_on_its_own(folder):
    machine = Sharing({"a": [-11, 0]}, slots=1)
    run(folder, Scripted({"a": [GOOD], "b": [GOOD]}), machine, "ab", **SHARED)
    assert machine.started == ["a", "a", "b"]
    assert machine.shared == ["a"]


def test_progress_is_reported_from_start_to_end(folder):
    events = []
    replays = Scripted({"a": [GOOD], "b": [GOOD]})
    run(folder, replays, Machine(), "ab", events.append)
    kinds = [event.kind for event in events]
    assert kinds.count("started") == kinds.count("proved") == 2
    assert events[-1].fraction == 1.0


@dataclass
class Tail:
    """Stands in for the records of a segment: claims to have come as far as its script says."""

    script: list[float]
    rows: int = 0
    reached: float | None = None

    def read(self):
        if self.script:
            self.reached = self.script.pop(0)
            self.rows += 1
        return True


BAD = ReplayReport(retry=True, error="the state could not be restored")
fractions = st.lists(st.floats(0.0, 1.0), max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_progress_never_goes_backwards(data):
    """However segments are lost, run again, or turn out to be slower than they seemed."""
    names = "abcd"[: data.draw(st.integers(1, 4))]
    verdicts = {name: data.draw(st.sampled_from([[GOOD], [BAD, GOOD]])) for name in names}
    codes = {
        name: data.draw(st.sampled_from([[None, 0], [0], [None, None, -9, None, 0]]))
        for name in [*names, *(f"{name}-again" for name in names)]
    }
    machine = Machine({name: list(each) for name, each in codes.items()})
    replays, events = Scripted({name: list(each) for name, each in verdicts.items()}), []
    # drawn before the pool runs: how often it asks may depend on more than the draws
    steps = itertools.cycle(
        data.draw(st.lists(st.sampled_from([0.0, 0.3, 2.0, 20.0]), min_size=1, max_size=30))
    )
    scripts = itertools.cycle(data.draw(st.lists(fractions, min_size=1, max_size=8)))
    segments = [segment(name, data.draw(st.floats(0.1, 9.0))) for name in names]
    now = [0.0]

    def clock():
        now[0] += next(steps)
        return now[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rearview.execute.run_plan.time.monotonic", clock)
        patch.setattr(Pool, "_records_of", lambda *_: Tail(sorted(next(scripts))))
        granted = Granted(Path("nowhere"), replays)
        pool = Pool(replays, machine, granted, events.append)
        pool.run(segments, {"r": RUN})
    told = [event.fraction for event in events]
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    for number in range(len(names)):
        done = [
            one.fraction for event in events for one in event.under_way if one.segment == number
        ]
        assert done == sorted(done)


def test_workers_that_come_later_are_used(folder):
    machine = Machine(slots=1)
    real = machine.start

    def start(task, slot):
        machine.slots = 3
        return real(task, slot)

    machine.start = start
    replays = Scripted({name: [GOOD] for name in "abcd"})
    outcomes, _ = run(folder, replays, machine, "abcd")
    assert len(outcomes) == 4


@dataclass
class Requests:
    """Stands in for the status file: asks for so many workers, one number after the other."""

    numbers: list[int]
    updates: list[dict] = field(default_factory=list)

    def requested_workers(self):
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]

    def update(self, **facts):
        self.updates.append(facts)


@dataclass
class Slow:
    """An executor whose tasks take some turns each."""

    turns: int
    slots: int = 1
    most: int = 0
    running: int = 0
    stopped: list[str] = field(default_factory=list)

    def resize(self, slots):
        self.slots = slots

    def start(self, task, slot):
        self.running += 1
        self.most = max(self.most, self.running)
        return SlowJob(task, self, self.turns)

    def close(self):
        pass


@dataclass
class SlowJob:
    task: Task
    machine: Slow
    left: int

    def wait(self, timeout=None):
        self.left -= 1
        if self.left > 0:
            return None
        self.machine.running -= 1
        return 0

    def stop(self):
        self.machine.running -= 1
        self.machine.stopped.append(self.task.id)


def test_workers_that_are_asked_for_start_at_once(folder):
    machine, events = Slow(5), []
    replays = Scripted({name: [GOOD] for name in "abcdef"})
    outcomes, _ = run(folder, replays, machine, "abcdef", events.append, Requests([1, 1, 4]))
    assert len(outcomes) == 6
    assert machine.most == 4
    assert [event.workers for event in events if event.kind == "workers"] == [4]


def test_a_short_segment_may_end_when_its_worker_is_taken_away(folder):
    machine = Slow(5)
    replays = Scripted({name: [GOOD] for name in "abcd"})
    outcomes, _ = run(folder, replays, machine, "abcd", None, Requests([3, 3, 1]))
    assert len(outcomes) == 4
    assert machine.stopped == []


def test_a_long_segment_is_handed_back_when_its_worker_is_taken_away(folder):
    machine, events = Slow(5), []
    replays = Scripted({name: [GOOD] for name in "abc"})
    options = events.append, Requests([3, 3, 1])
    outcomes, _ = run(folder, replays, machine, "abc", *options, seconds=1e4)
    assert [outcome.proved for outcome in outcomes] == [True] * 3
    assert sorted(machine.stopped) == replays.abandoned[::-1] == ["b", "c"]
    assert [event.kind for event in events].count("returned") == 2


def test_a_lost_segment_is_claimed_again_so_that_its_records_count_once(folder):
    replays = Scripted({"a": [GOOD]})
    _, pool = run(folder, replays, Machine({"a": [-9, 0]}), "a")
    assert pool.claims.taken == ["a", "a"]
    assert replays.abandoned == ["a"]


def test_progress_reports_the_segment_of_each_worker(folder):
    events = []
    replays = Scripted({name: [GOOD] for name in "ab"})
    run(folder, replays, Slow(5, slots=2), "ab", events.append)
    both = next(event for event in events if len(event.under_way) == 2)
    assert {each.worker for each in both.under_way} == {0, 1}
    assert all(each.seconds_left >= 0 and each.predicted >= 0 for each in both.under_way)


def test_a_cluster_that_shrinks_takes_no_segment_from_the_remaining_workers(folder):
    machine = Slow(5, slots=3)
    replays = Scripted({name: [GOOD] for name in "abc"})

    def progress(event):
        machine.slots = 1

    outcomes, _ = run(folder, replays, machine, "abc", progress, seconds=1e4)
    assert len(outcomes) == 3
    assert machine.stopped == []


HELD, FILLED = Claim(None, retry_later=True), Claim(None, filled=True)


def test_a_segment_claimed_by_another_backfill_is_tried_again_at_the_end(folder):
    machine = Machine(slots=1)
    replays, events = Scripted({name: [GOOD] for name in "ab"}), []
    script = {"a": [HELD, HELD, Claim(made("a", folder))]}
    outcomes, pool = run(folder, replays, machine, "ab", events.append, script=script)
    assert machine.started == ["b", "a"]
    assert [outcome.replay for outcome in outcomes] == ["a", "b"]
    assert pool.filled_elsewhere == set()
    assert max(event.claimed_elsewhere for event in events) == 1


def test_a_segment_filled_by_another_backfill_is_reported_and_not_started(folder):
    machine, events = Machine(), []
    script = {"a": [HELD, FILLED], "b": [FILLED]}
    outcomes, pool = run(folder, Scripted({}), machine, "ab", events.append, script=script)
    assert (outcomes, machine.started) == ([], [])
    assert pool.filled_elsewhere == {0, 1}
    ended = [event for event in events if event.kind == "filled"]
    assert [event.segment for event in ended] == [1, 0]
    assert ended[-1].fraction == 1.0


def test_the_part_that_another_has_claimed_is_claimed_once_our_own_part_has_ended(folder):
    replays = Scripted({name: [GOOD] for name in "ab"})
    parts = [Claim(made("a", folder), retry_later=True), HELD, Claim(made("b", folder))]
    outcomes, _ = run(folder, replays, Machine(), "a", script={"a": parts})
    assert [outcome.replay for outcome in outcomes] == ["a", "b"]


def test_a_lost_segment_that_was_to_run_from_the_start_may_be_filled_by_another(folder):
    machine = Machine({"a-again": [-9]})
    replays = Scripted({"a": [ReplayReport(retry=True)]})
    script = {"a": [Claim(made("a", folder)), FILLED]}
    outcomes, pool = run(folder, replays, machine, "a", script=script)
    assert outcomes == []
    assert (pool.filled_elsewhere, replays.abandoned) == ({0}, ["a-again"])
