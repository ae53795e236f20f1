"""Predictions carry an interval, move to another machine, and learn from what replay took."""

import random
from dataclasses import replace

import pytest

from plan.runs import run, starts
from rearview.model import Operator, Segment
from rearview.plan.cost import CostCorrections, CostModel, Prediction, refine, speed
from rearview.plan.divide_work import divide
from rearview.plan.facts import CheckpointFacts, Machine, RunQuestion, ValueRequest
from rearview.plan.survey_work import survey

SLOW = Machine("slow", {"python": 2.0}, read=100.0, write=100.0)
FAST = Machine("fast", {"python": 1.0}, read=1000.0, write=500.0)


def test_errors_that_even_out_shrink_against_the_sum_and_shared_ones_do_not():
    many = Prediction(0.0)
    for _ in range(100):
        many = many + Prediction(1.0, variance=0.01)
    assert many.half_width / many.seconds == pytest.approx(0.0196)
    shared = Prediction(0.0)
    for _ in range(100):
        shared = shared + Prediction(1.0, share=0.1)
    assert shared.half_width / shared.seconds == pytest.approx(0.196)


def test_an_interval_never_goes_below_zero():
    assert Prediction(1.0, share=2.0).low == 0.0


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    draw = random.Random(4)
    inside = 0
    for _ in range(400):
        recorded = [max(0.1, draw.gauss(10, 1)) for _ in range(30)]
        real = sum(max(0.1, draw.gauss(10, 1)) for _ in range(30)) + 3.0
        facts = run(recorded, inner=recorded)
        wanted = ValueRequest(("n",), ("epoch", "step"))
        known = CostCorrections(prior=0.0)
        (segment,) = divide(survey([RunQuestion(facts, (wanted,))], corrections=known)).segments
        inside += segment.low <= real <= segment.high
    assert 300 <= inside <= 400


def test_another_machine_scales_computing_and_reading_apart():
    facts = run([10.0] * 3, starts(1, restore=4.0), machine=SLOW)
    model = CostModel(facts, machine=FAST)
    assert model.startup().seconds == pytest.approx(1.5)
    assert model.restore(facts.checkpoints[0]) == pytest.approx(0.4)
    wanted = ValueRequest(("n",), ("epoch",), missing_iterations=frozenset({1}))
    here = divide(survey([RunQuestion(facts, (wanted,))], machine=FAST)).segments[0]
    there = divide(survey([RunQuestion(facts, (wanted,))], machine=SLOW)).segments[0]
    assert here.seconds == pytest.approx(1.5 + 0.4 + 5.0)
    assert there.seconds == pytest.approx(3.0 + 4.0 + 10.0)
    assert (here.high - here.low) / here.seconds > (there.high - there.low) / there.seconds


def test_a_machine_that_was_never_measured_counts_as_equal_with_a_wide_interval():
    assert speed(None, FAST).compute == 1.0
    assert speed(None, FAST).share > speed(SLOW, FAST).share > speed(SLOW, SLOW).share


def test_kinds_of_computing_that_disagree_widen_the_interval():
    old = Machine("old", {"python": 1.0, "numpy": 1.0, "cuda": 1.0}, 100.0)
    even = Machine("even", {"python": 2.0, "numpy": 2.0}, 100.0)
    odd = Machine("odd", {"python": 1.0, "numpy": 4.0}, 100.0)
    assert speed(old, even).compute == pytest.approx(speed(old, odd).compute) == pytest.approx(2.0)
    assert speed(old, odd).share > speed(old, even).share
    strange = Machine("strange", {"tpu": 1.0}, 100.0)
    assert speed(old, strange).share == speed(None, old).share


def test_replays_narrow_the_interval_of_a_machine_that_was_never_measured():
    facts = run([10.0] * 3)
    before = CostModel(facts, machine=FAST)
    known = CostCorrections()
    for _ in range(9):
        guess = Segment("r", "v-r", Operator.INNER, seconds=3.0 * known.factor("v-r", "DPi")[0])
        known = refine(known, guess, 6.0)
    after = CostModel(facts, machine=FAST, corrections=known)
    doubt = [one.corrected(one.startup(), "DPi").share for one in (before, after)]
    assert doubt[0] > 0.4
    assert doubt[1] < 0.2


def test_restores_are_predicted_from_those_that_were_measured():
    measured = CheckpointFacts("a", starts(1)[0].point, nbytes=100, restore=2.0)
    new = CheckpointFacts("b", starts(2)[0].point, nbytes=300)
    model = CostModel(run([1.0] * 3, [measured, new]))
    assert model.restore(new) == pytest.approx(6.0)
    alone = CostModel(run([1.0] * 3, [new]))
    assert 0 < alone.restore(new) < 1


def test_the_time_of_a_replay_corrects_predictions_of_its_kind_most():
    known = CostCorrections()
    segment = Segment("r", "v", Operator.INNER, seconds=10.0)
    for _ in range(4):
        guess = replace(segment, seconds=10.0 * known.factor("v", "DPi")[0])
        known = refine(known, guess, 15.0)
    own, spread = known.factor("v", "DPi")
    same_operator, _ = known.factor("other", "DPi")
    other, wide = known.factor("other", "setup")
    assert own == pytest.approx(1.5, rel=0.05)
    assert 1.0 < other <= same_operator <= own
    assert spread < wide


def took(known, *seconds, predicted=5.0, version="v"):
    """Return the corrections after replays of one segment that took so many seconds."""
    for real in seconds:
        told = predicted * known.factor(version, "DPi")[0]
        known = refine(known, Segment("r", version, Operator.INNER, seconds=told), real)
    return known


def test_one_odd_measurement_does_not_spoil_the_next_prediction():
    for before in ((), (5.0,), (5.2, 4.9, 5.0)):
        odd = took(CostCorrections(), *before, 40.0)
        assert 0.8 < odd.factor("v", "DPi")[0] < 1.3
        assert 0.8 < odd.factor("other", "DPi")[0] < 1.3


def test_a_second_measurement_confirms_the_first():
    once, twice = (took(CostCorrections(), *[20.0] * count) for count in (1, 2))
    assert once.factor("v", "DPi")[0] < 1.3
    assert twice.factor("v", "DPi")[0] > 2.0


def test_odd_measurements_among_many_move_nothing():
    steady = took(CostCorrections(), *[10.0] * 8)
    mixed = took(steady, 90.0, 0.1, 70.0)
    assert mixed.factor("v", "DPi")[0] == pytest.approx(steady.factor("v", "DPi")[0], rel=0.05)


def test_the_corrections_of_many_replays_are_forgotten_when_the_machine_has_changed():
    before = took(CostCorrections(), *[20.0] * 30)
    assert took(before, *[5.0] * 15).factor("v", "DPi")[0] == pytest.approx(1.0, rel=0.1)


def test_a_tiny_job_teaches_little_about_a_long_one():
    tiny = took(CostCorrections(), *[0.5] * 4, predicted=0.05)
    assert tiny.factor("long", "DPi")[0] < 2.5


def test_a_prediction_without_sense_teaches_nothing():
    known = CostCorrections()
    assert refine(known, Segment("r", "v", Operator.INNER, seconds=0.0), 3.0) == known


def test_corrections_move_the_plan():
    known = CostCorrections()
    for _ in range(20):
        factor = known.factor("v-r", "DPi")[0]
        known = refine(known, Segment("r", "v-r", Operator.INNER, seconds=10.0 * factor), 20.0)
    wanted = ValueRequest(("n",), ("epoch",))
    question = RunQuestion(run([10.0] * 3), (wanted,))
    before = divide(survey([question])).segments[0].seconds
    after = divide(survey([question], corrections=known)).segments[0].seconds
    assert after == pytest.approx(2 * before, rel=0.05)
