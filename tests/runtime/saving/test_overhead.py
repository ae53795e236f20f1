"""What is told of a run's cost is what it cost."""

import pytest

from rearview.config import Settings
from rearview.runtime.saving import overhead
from rearview.runtime.saving.overhead import Costs, Overhead
from rearview.runtime.saving.policy import Reason
from rearview.store.project import Project


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0
        self.used = 5.0

    def compute(self, seconds, *, cores=1.0):
        self.now += seconds
        self.used += seconds * cores


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(overhead, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(overhead, "process_time", lambda: clock.used)
    monkeypatch.setattr(overhead, "_CORES", 2)
    return clock


@pytest.fixture
def costs(tmp_path, clock):
    made = Overhead.begin(Settings(), Project.create(tmp_path), "r", "train.py")
    made.counted_until, made._cpu_counted = clock.now, clock.used
    return made


def save(costs, clock, seq, **spent):
    costs.begin_save(seq, "epoch", 0.02)
    clock.compute(0.02 + spent["blocking"])
    costs.add_wait(0.02 + spent["blocking"])
    costs.end_save(seq, Costs(saved=1, **spent))


def test_the_overhead_is_the_time_waited_plus_the_time_lost(costs, clock):
    for seq in range(4):
        clock.compute(10.0, cores=2)
        costs.end_iteration("epoch", 10.0)
        assert costs.decide("epoch", 10.0, 0).save
        save(costs, clock, seq, blocking=0.08, background=0.5, cpu=0.2)
    clock.compute(10.0, cores=2)
    told = costs.report(Costs())
    costs.end_iteration("epoch", 10.0)
    told = costs.report(Costs())
    assert told["waited"] == pytest.approx(0.4)
    assert told["computed"] == pytest.approx(50.0)
    assert told["lost"] > 0
    assert told["overhead"] == pytest.approx((0.4 + told["lost"]) / 50.0)
    assert told["overhead"] < 0.0667


def test_iterations_are_counted_without_the_time_that_they_waited_for_rearview(costs, clock):
    clock.compute(10.0)
    costs.end_iteration("epoch", 10.0)
    save(costs, clock, 0, blocking=5.0, background=1.0, cpu=1.0)
    clock.compute(10.0)
    costs.end_iteration("epoch", 15.02)
    assert costs.policy.sites["epoch"].computed == pytest.approx(20.0)
    assert costs.policy.sites["epoch"].beside == pytest.approx(10.0)


def test_the_size_of_the_state_is_known_to_the_policy(costs, clock):
    costs.nbytes = 10**12
    clock.compute(10.0)
    refused = costs.decide("epoch", 10.0, 0)
    assert not refused.save
    assert costs.refusals == {"the budget is used up": 1}


def test_reasons_are_counted_by_kind_without_their_numbers(costs, clock):
    costs.nbytes = 10**12
    for seconds in (1.0, 2.0, 3.0):
        clock.compute(seconds)
        costs.decide("epoch", seconds, 0)
    costs.begin_save(1, "epoch", 0.5)
    costs.skip_save(1, Reason.BUSY)
    assert costs.report(Costs())["skipped_because"] == {
        "the budget is used up": 3,
        "the previous checkpoint is still being written": 1,
    }
    assert costs.report(Costs())["skipped"] == 4
    assert costs.policy.paid == pytest.approx(0.5)


def test_a_machine_whose_clock_jumps_back_computes_nothing_negative(costs, clock):
    clock.compute(10.0)
    costs.end_iteration("epoch", 10.0)
    clock.now -= 1e6
    costs.end_iteration("epoch", 5.0)
    assert costs.policy.computed == pytest.approx(10.0)


def test_saves_that_failed_are_over(costs, clock):
    for seq in range(2):
        clock.compute(10.0)
        costs.end_iteration("epoch", 10.0)
        assert costs.decide("epoch", 10.0, 0).save
        costs.begin_save(seq, "epoch", 0.02)
        costs.end_save(seq, Costs(failed=1, blocking=0.08, background=0.5, cpu=0.2))
    clock.compute(10.0)
    assert costs.decide("epoch", 10.0, 0).save
    assert costs.in_flight == 0
    assert costs.policy.paid == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("nbytes", "saves"), [(300 << 20, False), (900 << 20, True), (10 << 20, True)]
)
def test_the_cost_of_saving_another_state_is_forgotten(costs, clock, tmp_path, nbytes, saves):
    costs.enter_loop(0.01, 400 << 20)
    clock.compute(100.0)
    costs.end_iteration("epoch", 100.0)
    save(costs, clock, 1, blocking=5.0, background=0.1, cpu=0.1)
    costs.close()
    again = Overhead.begin(Settings(), Project.open(tmp_path), "s", "train.py")
    again.counted_until, again._cpu_counted = clock.now, clock.used
    again.enter_loop(0.01, nbytes)
    clock.compute(20.0)
    again.end_iteration("epoch", 20.0)
    assert again.decide("epoch", 20.0, 0).save == saves
