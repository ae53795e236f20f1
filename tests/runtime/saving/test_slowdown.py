"""What training loses beside a save is told by its steps, alone and beside one."""

import pytest

from rearview.runtime.saving.overhead import SlowdownMeter
from rearview.runtime.saving.policy import Policy, Saved


def told(meter, steps, seconds, *, over=0.0, waited=0.0):
    """Tell of a loop with steps that take so long each, of which writing goes on for `over`."""
    before = meter._last[3]
    for index in range(steps + 1):
        meter.begin_step("batch", index, index * seconds, before + index * over, index * waited)


def test_steps_during_a_save_are_compared_with_steps_without_a_save():
    meter = SlowdownMeter()
    told(meter, 20, 0.010)
    assert meter.slowdown() == (0.0, 0)
    told(meter, 20, 0.015, over=0.015)
    told(meter, 20, 0.010)
    slowdown, sure = meter.slowdown()
    assert slowdown == pytest.approx(1 / 3)
    assert sure == pytest.approx(19 / 22 * 0.95)


def test_writing_outside_of_steps_lowers_the_confidence_in_the_slowdown_of_steps():
    meter = SlowdownMeter()
    told(meter, 20, 0.010)
    told(meter, 20, 0.010, over=0.010)
    meter.begin_step("batch", 0, 9.0, 4 * meter._last[3], 0.0)
    slowdown, sure = meter.slowdown()
    assert slowdown == pytest.approx(0.0)
    assert sure == pytest.approx(19 / 22 * 0.95 / 4)


def test_steps_that_writing_takes_only_a_part_of_tell_as_well():
    meter = SlowdownMeter()
    told(meter, 20, 0.010)
    told(meter, 20, 0.012, over=0.004)
    assert meter.slowdown()[0] == pytest.approx(0.5)


def test_steps_in_which_training_waited_do_not_count():
    meter = SlowdownMeter()
    told(meter, 20, 0.01)
    told(meter, 20, 0.02, over=0.02, waited=0.01)
    assert meter.slowdown() == (0.0, 0)


def test_the_first_step_of_a_loop_and_the_longest_tenth_do_not_count():
    meter = SlowdownMeter()
    told(meter, 30, 0.01)
    told(meter, 1, 9.0)
    meter.begin_step("batch", 20, 99.0, 0.0, 0.0)
    told(meter, 1, 9.0, over=1.0)
    told(meter, 30, 0.01, over=0.01)
    assert meter.slowdown()[0] == pytest.approx(0.0, abs=1e-9)


def test_a_loop_of_short_steps_is_measured_per_step_of_a_slice():
    meter = SlowdownMeter()
    for seconds, over in ((0.002, 0.0), (0.004, 0.004)):
        for part in range(1, 12):
            meter.begin_step("batch", part * 100, part * seconds, part * over, 0.0)
    assert meter.slowdown()[0] == pytest.approx(0.5)


def test_slower_steps_are_charged_for_the_time_that_writing_took():
    events = [
        Saved(blocking=0.1, background=1.0, cpu=0.2, crowded=0.0, slowdown=0.5, confidence=sure)
        for sure in (1.0, 0.5, 0.0)
    ]
    paid = [Policy(0.1).observe("epoch", event).paid for event in events]
    assert paid == pytest.approx([0.6, 0.36, 0.12])
