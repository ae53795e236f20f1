"""Pieces run in order, lost ones again, doubtful ones from the start."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rearview.execute.executor import Task
from rearview.execute.pool import PendingSegment, Pool, Turn
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import ReplayReport, Run, Status
from rearview.model.plan import PROBE_RAISED

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

    def from_the_start(self, run, task, because):
        assert because
        return made(f"{task.id}-again", task.folder)

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


def pieces(folder, *names):
    return [PendingSegment(RUN, 1.0, lambda name=name: Turn(made(name, folder))) for name in names]


GOOD = ReplayReport(states=1, finished=True)


def test_pieces_are_started_in_their_order_and_outcomes_keep_it(folder):
    machine = Machine()
    replays = Scripted({"a": [GOOD], "b": [GOOD], "c": [GOOD]})
    outcomes = Pool(replays, machine).carry_out(pieces(folder, "a", "b", "c"))
    assert machine.started == ["a", "b", "c"]
    assert [outcome.replay for outcome in outcomes] == ["a", "b", "c"]
    assert machine.closed


def test_a_killed_worker_s_segment_is_started_again(folder):
    machine = Machine({"a": [-9, 0]})
    outcomes = Pool(Scripted({"a": [GOOD]}), machine).carry_out(pieces(folder, "a"))
    assert machine.started == ["a", "a"]
    assert outcomes[0].proved


def test_a_segment_that_is_killed_again_and_again_is_given_up(folder):
    machine = Machine({"a": [-9] * 9})
    lost = ReplayReport(error="killed")
    outcomes = Pool(Scripted({"a": [lost]}), machine).carry_out(pieces(folder, "a"))
    assert len(machine.started) == 4
    assert not outcomes[0].proved


def test_a_difference_after_a_restore_is_settled_by_a_replay_from_the_start(folder):
    machine = Machine()
    doubt = ReplayReport(difference="w", restored=1, finished=True)
    outcomes = Pool(Scripted({"a": [doubt, GOOD]}), machine).carry_out(pieces(folder, "a"))
    assert machine.started == ["a", "a-again"]
    assert outcomes[0].proved


def test_a_difference_from_the_start_on_is_the_answer(folder):
    machine = Machine()
    doubt = ReplayReport(difference="w", restored=0, finished=True)
    outcomes = Pool(Scripted({"a": [doubt]}), machine).carry_out(pieces(folder, "a"))
    assert machine.started == ["a"]
    assert not outcomes[0].proved


@dataclass
class Sharing(Machine):
    """An executor that keeps who might have shared a start."""

    shared: list[str] = field(default_factory=list)

    def start(self, task, slot):
        if task.imports is not None:
            self.shared.append(task.id)
        return super().start(task, slot)


def alike(folder, *names):
    """Return pieces that begin with the same imports."""
    imports = ("import numpy",)
    return [
        PendingSegment(
            RUN, 1.0, lambda name=name: Turn(replace(made(name, folder), imports=imports))
        )
        for name in names
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        ReplayReport(difference="w", finished=True),
        ReplayReport(differing=["loss"], finished=True),
        ReplayReport(error="exit code 1"),
    ],
)
def test_what_goes_wrong_after_a_shared_start_is_settled_by_a_replay_of_its_own(folder, wrong):
    machine = Sharing(slots=1)
    replays = Scripted({"a": [wrong, GOOD], "b": [GOOD]})
    outcomes = Pool(replays, machine).carry_out(alike(folder, "a", "b"))
    assert machine.started == ["a", "a-again", "b"]
    assert machine.shared == ["a"]  # perhaps that was it
    assert all(outcome.proved for outcome in outcomes)


def test_what_goes_wrong_both_ways_does_not_speak_against_sharing(folder):
    machine = Sharing(slots=1)
    wrong = ReplayReport(difference="w", finished=True)
    outcomes = Pool(Scripted({"a": [wrong, wrong], "b": [GOOD]}), machine).carry_out(
        alike(folder, "a", "b")
    )
    assert machine.shared == ["a", "b"]
    assert [outcome.proved for outcome in outcomes] == [False, True]


def test_a_statement_that_raises_is_asked_twice_once(folder):
    machine = Sharing(slots=1)
    raised = ReplayReport(error=f"{PROBE_RAISED} a.py:1 raised ValueError")
    replays = Scripted({"a": [raised, raised], "b": [raised], "c": [raised]})
    Pool(replays, machine).carry_out(alike(folder, "a", "b", "c"))
    assert machine.started == ["a", "a-again", "b", "c"]


def test_one_that_is_killed_after_a_shared_start_starts_on_its_own(folder):
    machine = Sharing({"a": [-11, 0]}, slots=1)
    Pool(Scripted({"a": [GOOD], "b": [GOOD]}), machine).carry_out(alike(folder, "a", "b"))
    assert machine.started == ["a", "a", "b"]
    assert machine.shared == ["a"]


def test_progress_is_told_from_start_to_end(folder):
    told = []
    replays = Scripted({"a": [GOOD], "b": [GOOD]})
    Pool(replays, Machine(), told.append).carry_out(pieces(folder, "a", "b"))
    kinds = [event.kind for event in told]
    assert kinds.count("started") == kinds.count("proved") == 2
    assert told[-1].done == 1.0


def test_workers_that_come_later_are_used(folder):
    machine = Machine(slots=1)
    real = machine.start

    def start(task, slot):
        machine.slots = 3
        return real(task, slot)

    machine.start = start
    replays = Scripted({name: [GOOD] for name in "abcd"})
    outcomes = Pool(replays, machine).carry_out(pieces(folder, *"abcd"))
    assert len(outcomes) == 4


@dataclass
class Desk:
    """Stands in for the post: asks for so many workers, one number after the other."""

    numbers: list[int]
    said: list[dict] = field(default_factory=list)

    def asked(self):
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]

    def say(self, **facts):
        self.said.append(facts)


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
    machine, told = Slow(5), []
    replays = Scripted({name: [GOOD] for name in "abcdef"})
    pool = Pool(replays, machine, told.append, Desk([1, 1, 4]))
    assert len(pool.carry_out(pieces(folder, *"abcdef"))) == 6
    assert machine.most == 4
    assert [event.workers for event in told if event.kind == "workers"] == [4]


def test_a_short_segment_may_end_when_its_worker_is_taken_away(folder):
    machine = Slow(5)
    replays = Scripted({name: [GOOD] for name in "abcd"})
    outcomes = Pool(replays, machine, None, Desk([3, 3, 1])).carry_out(pieces(folder, *"abcd"))
    assert len(outcomes) == 4
    assert machine.stopped == []


def test_a_long_segment_is_handed_back_when_its_worker_is_taken_away(folder):
    machine, told = Slow(5), []
    replays = Scripted({name: [GOOD] for name in "abc"})
    long = [replace(piece, seconds=1e4) for piece in pieces(folder, *"abc")]
    outcomes = Pool(replays, machine, told.append, Desk([3, 3, 1])).carry_out(long)
    assert [outcome.proved for outcome in outcomes] == [True] * 3
    assert sorted(machine.stopped) == replays.abandoned[::-1] == ["b", "c"]
    assert [event.kind for event in told].count("returned") == 2


def test_a_lost_segment_is_made_ready_anew_so_that_its_records_count_once(folder):
    made_ready = []
    replays = Scripted({"a": [GOOD]})

    def prepare():
        made_ready.append(1)
        return Turn(made("a", folder))

    Pool(replays, Machine({"a": [-9, 0]})).carry_out([PendingSegment(RUN, 1.0, prepare)])
    assert len(made_ready) == 2
    assert replays.abandoned == ["a"]


def test_progress_tells_what_each_worker_does(folder):
    told = []
    replays = Scripted({name: [GOOD] for name in "ab"})
    Pool(replays, Slow(5, slots=2), told.append).carry_out(pieces(folder, "a", "b"))
    both = next(event for event in told if len(event.under_way) == 2)
    assert {one.worker for one in both.under_way} == {0, 1}
    assert all(one.left >= 0 and one.predicted >= 0 for one in both.under_way)


def test_a_cluster_that_shrinks_by_itself_takes_nothing_away_from_the_living(folder):
    machine = Slow(5, slots=3)
    replays = Scripted({name: [GOOD] for name in "abc"})
    long = [replace(piece, seconds=1e4) for piece in pieces(folder, *"abc")]

    def progress(event):
        machine.slots = 1

    assert len(Pool(replays, machine, progress).carry_out(long)) == 3
    assert machine.stopped == []


def turns(*answers):
    """Return a piece that says one thing after the other."""
    left = list(answers)
    return PendingSegment(RUN, 1.0, lambda: left.pop(0))


HELD, FILLED = Turn(None, rest=True), Turn(None, filled=True)


def test_what_another_has_under_way_is_asked_for_again_at_the_end(folder):
    machine = Machine(slots=1)
    replays, told = Scripted({name: [GOOD] for name in "ab"}), []
    pool = Pool(replays, machine, told.append)
    outcomes = pool.carry_out([turns(HELD, HELD, Turn(made("a", folder))), *pieces(folder, "b")])
    assert machine.started == ["b", "a"]
    assert [outcome.replay for outcome in outcomes] == ["a", "b"]
    assert pool.elsewhere == set()
    assert max(event.held for event in told) == 1


def test_what_another_has_filled_is_told_and_not_started(folder):
    machine, told = Machine(), []
    pool = Pool(Scripted({}), machine, told.append)
    assert pool.carry_out([turns(HELD, FILLED), turns(FILLED)]) == []
    assert machine.started == []
    assert pool.elsewhere == {0, 1}
    ended = [event for event in told if event.kind == "filled"]
    assert [event.segment for event in ended] == [1, 0]
    assert ended[-1].done == 1.0


def test_a_piece_of_which_another_has_a_part_is_asked_for_that_once_its_own_part_has_ended(folder):
    machine = Machine()
    replays = Scripted({name: [GOOD] for name in "ab"})
    parts = [Turn(made("a", folder), rest=True), HELD, Turn(made("b", folder))]
    outcomes = Pool(replays, machine).carry_out([turns(*parts)])
    assert [outcome.replay for outcome in outcomes] == ["a", "b"]


def test_a_lost_piece_that_was_to_run_from_the_start_may_be_filled_by_another_meanwhile(folder):
    machine = Machine({"a-again": [-9]})
    replays = Scripted({"a": [ReplayReport(retry=True)]})
    pool = Pool(replays, machine)
    assert pool.carry_out([turns(Turn(made("a", folder)), FILLED)]) == []
    assert (pool.elsewhere, replays.abandoned) == ({0}, ["a-again"])
