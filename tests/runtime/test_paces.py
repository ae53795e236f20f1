"""What training loses beside a save is told by its steps, alone and beside one."""

import pytest

from rearview.runtime.paces import Paces
from rearview.runtime.policy import Policy
from rearview.runtime.sites import Saved


def told(paces, steps, seconds, *, writing, waited=0.0, start=0.0):
    """Tell of a loop with steps that take so long each."""
    for index in range(steps + 1):
        paces.step("batch", index, start + index * seconds, writing, waited)


def test_steps_beside_a_save_are_compared_with_steps_alone():
    paces = Paces()
    told(paces, 20, 0.010, writing=0)
    assert paces.slowed() == (0.0, 0)
    told(paces, 20, 0.015, writing=1)
    told(paces, 20, 0.010, writing=2)
    slowed, steps = paces.slowed()
    assert slowed == pytest.approx(1 / 3)
    assert steps == 19


def test_steps_in_which_writing_began_or_ended_or_training_waited_do_not_count():
    paces = Paces()
    for index in range(40):
        paces.step("batch", index, index * 0.01, writing=index, waited=0.0)
        paces.step("batch", index, index * 0.01, writing=index, waited=0.0)
    told(paces, 20, 0.01, writing=0)
    for index in range(20):
        paces.step("batch", index, index * 0.01, writing=1, waited=float(index))
    assert paces.slowed() == (0.0, 0)


def test_the_first_step_of_a_loop_and_the_longest_tenth_do_not_count():
    paces = Paces()
    told(paces, 30, 0.01, writing=0)
    paces.step("batch", 0, 0.0, 1, 0.0)
    told(paces, 1, 9.0, writing=1)
    told(paces, 30, 0.01, writing=1)
    paces.step("batch", 31, 99.0, 1, 0.0)
    assert paces.slowed()[0] == pytest.approx(0.0, abs=1e-9)


def test_a_loop_of_short_steps_is_told_per_step_of_a_slice():
    paces = Paces()
    for writing, seconds in ((0, 0.002), (1, 0.004)):
        for part in range(1, 12):
            paces.step("batch", part * 100, part * seconds, writing, 0.0)
    assert paces.slowed()[0] == pytest.approx(0.5)


def test_what_steps_tell_is_charged_for_the_time_that_writing_took():
    many = Saved(blocking=0.1, background=1.0, cpu=0.2, slowed=0.5, steps=997)
    few = Saved(blocking=0.1, background=1.0, cpu=0.2, crowded=0.0, slowed=0.5, steps=3)
    none = Saved(blocking=0.1, background=1.0, cpu=0.2, crowded=0.0)
    paid = [Policy(0.1).observe("epoch", event).paid for event in (many, few, none)]
    assert paid == pytest.approx([0.6, 0.36, 0.12], abs=0.002)
