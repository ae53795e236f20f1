import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.runtime.saving.policy import (
    INNER_LEAST,
    LOSS_WITHOUT_FREE_CORE,
    RESTORE_PER_SAVE,
    BoundaryFacts,
    Iteration,
    Policy,
    Reason,
    Restored,
    Saved,
)


def simulate(policy, *, iterations, compute, cost, depth=0, cpu=0.0):
    """Train `iterations` of `compute` seconds each, saving as the policy says; return it and the saves."""
    saved, since = [], 0.0
    for index in range(iterations):
        policy = policy.observe("epoch", Iteration(compute, depth))
        since += compute
        if policy.decide("epoch", BoundaryFacts(since=since, depth=depth)).save:
            policy = policy.observe("epoch", Saved(blocking=cost, cpu=cpu))
            saved.append(index)
            since = 0.0
    return policy, saved


@given(
    epsilon=st.floats(0.005, 0.5),
    compute=st.floats(1e-3, 1e3),
    ratio=st.floats(1e-4, 10),
    iterations=st.integers(1, 300),
)
@settings(max_examples=150, deadline=None)
def test_the_budget_holds_after_every_save_once_the_cost_is_known(
    epsilon, compute, ratio, iterations
):
    policy = Policy.from_facts(epsilon, False, {"sites": {"epoch": {"save": ratio * compute}}})
    policy, saved = simulate(policy, iterations=iterations, compute=compute, cost=ratio * compute)
    assert policy.paid <= epsilon * policy.computed * (1 + 1e-9)
    assert policy.paid == pytest.approx(len(saved) * ratio * compute)


def test_equation_four_of_the_paper_decides():
    """M/C < n/(k+1) * min(1/(1+c), epsilon), on both sides of the bound."""
    epsilon, cost, n = 0.0667, 1.0, 10
    for compute, expected in (
        (cost / (n * epsilon) * 1.001, True),
        (cost / (n * epsilon) * 0.999, False),
    ):
        policy = Policy.from_facts(epsilon, False, {"sites": {"epoch": {"save": cost}}})
        for _ in range(n):
            policy = policy.observe("epoch", Iteration(compute))
        assert policy.decide("epoch", BoundaryFacts(since=n * compute)).save is expected


def test_the_replay_bound_decides_when_epsilon_is_generous():
    policy = Policy.from_facts(0.9, False, {"sites": {"epoch": {"save": 1.0, "restores": 3.0}}})
    policy = policy.observe("epoch", Iteration(3.9))
    assert policy.share("epoch") == pytest.approx(1 / 4)
    assert not policy.decide("epoch", BoundaryFacts(since=3.9)).save
    policy = policy.observe("epoch", Iteration(0.2))
    assert policy.decide("epoch", BoundaryFacts(since=4.1)).save


def test_every_epoch_is_saved_where_saving_is_cheap():
    _, saved = simulate(Policy(0.0667), iterations=200, compute=2.0, cost=0.1)
    assert saved == list(range(200))


def test_a_dear_state_is_saved_periodically():
    policy, saved = simulate(Policy(0.0667), iterations=200, compute=1.0, cost=0.91)
    assert 10 <= len(saved) <= 200 * 0.0667 / 0.91 + 1
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert max(gaps[1:]) <= 14  # the first one was taken before its cost was known
    assert policy.paid <= 0.0667 * policy.computed + 0.91


def test_off_is_off_and_every_is_every():
    assert not Policy(0.0).decide("epoch", BoundaryFacts(since=1e9)).save
    assert Policy(0.0).decide("epoch", BoundaryFacts(since=1e9)).reason is Reason.OFF
    always = Policy(0.0, every=True)
    for _ in range(3):
        always = always.observe("epoch", Saved(blocking=100.0))
    assert always.decide("epoch", BoundaryFacts(since=0.001)).save
    assert not always.decide("step", BoundaryFacts(since=0.001, depth=1)).save


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (BoundaryFacts(since=10.0, busy=True), Reason.BUSY),
        (BoundaryFacts(since=0.0), Reason.NO_NEED),
        (BoundaryFacts(since=10.0, nbytes=10**12), Reason.OVER_BUDGET),
        (BoundaryFacts(since=0.001, nbytes=10**8), Reason.NO_GAIN),
        (BoundaryFacts(since=5.0, nbytes=10**6, depth=1), Reason.INNER_INTERVAL),
    ],
)
def test_a_skipped_checkpoint_has_its_reason(facts, reason):
    policy = Policy(0.0667).observe("epoch", Iteration(100.0))
    decision = policy.decide("epoch", facts)
    assert not decision.save
    assert decision.reason is reason


def test_inner_boundaries_are_for_long_iterations():
    policy = Policy(0.0667).observe("epoch", Iteration(1000.0))
    near, far = (
        BoundaryFacts(since=INNER_LEAST / 2, depth=1),
        BoundaryFacts(since=INNER_LEAST * 2, depth=1),
    )
    assert not policy.decide("step", near).save
    assert policy.decide("step", far).save


def test_inner_boundaries_share_the_budget_of_the_run():
    policy, since, saved = Policy(0.02), 0.0, 0
    for epoch in range(20):
        for _ in range(100):
            policy = policy.observe("step", Iteration(1.0, depth=1))
            since += 1.0
            if policy.decide("step", BoundaryFacts(since=since, depth=1)).save:
                policy, since, saved = policy.observe("step", Saved(0.8)), 0.0, saved + 1
        policy = policy.observe("epoch", Iteration(100.0))
        if policy.decide("epoch", BoundaryFacts(since=since)).save:
            policy, since, saved = policy.observe("epoch", Saved(0.8)), 0.0, saved + 1
        if epoch:
            assert policy.paid <= 0.02 * policy.computed
    assert saved > 20


def test_a_long_flat_loop_does_not_drown_in_checkpoints():
    _, saved = simulate(Policy(0.0667), iterations=30_000, compute=0.01, cost=1e-5)
    assert saved[:100] == list(range(saved[0], saved[0] + 100))
    assert saved[0] < 25  # what a save costs is not known before the first
    assert len(saved) < 22_000


def test_a_moment_of_computing_is_not_saved_at_the_price_of_epsilon():
    _, saved = simulate(Policy(0.0667), iterations=1000, compute=0.01, cost=5e-4)
    assert 150 < len(saved) < 210  # once in 50 ms, where epsilon would allow every iteration
    _, saved = simulate(Policy(0.0667), iterations=100, compute=0.3, cost=0.015)
    assert len(saved) > 90


def test_a_part_of_the_budget_is_kept_back_where_no_core_is_free():
    policy = Policy(0.1).observe("epoch", Iteration(1000.0)).observe("epoch", Saved(45.0))
    assert policy.decide("epoch", BoundaryFacts(since=1000.0)).save
    assert not policy.decide("epoch", BoundaryFacts(since=1000.0, crowded=1.0)).save


def test_the_cost_includes_the_time_that_training_loses_to_background_threads():
    policy = Policy(0.5)
    for _ in range(20):
        policy = policy.observe("epoch", Iteration(1.0))
    for _ in range(20):
        policy = policy.observe("epoch", Iteration(1.4, overlap=0.8))
    policy = policy.observe("epoch", Saved(blocking=0.1, background=0.8, cpu=0.2))
    assert policy.cost("epoch") == pytest.approx(0.1 + 0.4, rel=0.2)
    calm = Policy(0.5)
    for _ in range(20):
        calm = calm.observe("epoch", Iteration(1.0))
        calm = calm.observe("epoch", Iteration(1.0, overlap=0.8))
    calm = calm.observe("epoch", Saved(blocking=0.1, background=0.8, cpu=0.2))
    assert calm.cost("epoch") == pytest.approx(0.1, abs=0.05)


def test_the_slowdown_of_a_save_after_an_inner_loop_is_measured_in_the_outer_loop():
    policy = Policy(0.5)
    for _ in range(20):
        policy = policy.observe("epoch", Iteration(1.0, depth=1))
    for _ in range(20):
        policy = policy.observe("epoch", Iteration(1.4, depth=1, overlap=0.8))
    policy = policy.observe("step end", Saved(blocking=0.1, background=0.8, cpu=0.01))
    assert policy.cost("step end") == pytest.approx(0.1 + 0.4, rel=0.2)


def test_before_anything_is_measured_the_processor_time_counts():
    policy = Policy(0.5).observe("epoch", Saved(blocking=0.1, background=9.0, cpu=0.2))
    assert policy.cost("epoch") == pytest.approx(0.1 + LOSS_WITHOUT_FREE_CORE * 0.2)


def test_a_site_whose_time_is_counted_elsewhere_is_judged_by_the_run():
    policy = Policy(0.0667).observe("epoch", Iteration(0.0, depth=1)).observe("", Iteration(10.0))
    assert policy.decide("epoch", BoundaryFacts(since=10.0)).save


def test_restores_refine_the_scale():
    policy = Policy(0.0667).observe("epoch", Saved(blocking=1.0))
    assert policy.restore("epoch") == pytest.approx(RESTORE_PER_SAVE)
    assert policy.observe("epoch", Restored(5.0)).restore("epoch") == 5.0


def test_an_unmeasured_site_is_assumed_to_cost_as_much_as_its_neighbours():
    policy = Policy(0.0667).observe("epoch", Saved(blocking=1.0))
    assert policy.cost("step") == 1.0
    assert Policy(0.0667).cost("step", nbytes=4 * 10**9) == pytest.approx(1.0, rel=1e-3)


def test_measured_costs_are_kept_between_runs():
    policy, _ = simulate(Policy(0.0667), iterations=30, compute=1.0, cost=0.5)
    policy = policy.observe("epoch", Restored(0.7))
    again = Policy.from_facts(0.0667, False, json.loads(json.dumps(policy.facts())))
    assert again.cost("epoch") == policy.cost("epoch")
    assert again.restore("epoch") == policy.restore("epoch")
    assert (again.paid, again.computed) == (0.0, 0.0)
    assert again.sites["epoch"].n == again.sites["epoch"].k == 0


@pytest.mark.parametrize(
    "facts",
    [{}, {"sites": {"epoch": None}}, {"sites": {"epoch": {"save": "x", "beside": -1, "z": 1}}}],
)
def test_a_damaged_memory_is_no_memory(facts):
    assert Policy.from_facts(0.1, False, facts).decide("epoch", BoundaryFacts(since=10.0)).save


def test_deciding_changes_nothing():
    policy = Policy(0.1)
    policy.observe("epoch", Iteration(1.0))
    policy.decide("epoch", BoundaryFacts(since=1.0))
    assert policy == Policy(0.1)


def test_the_end_of_an_inner_loop_leaves_enough_for_the_boundary():
    policy = Policy.from_facts(0.1, False, {"sites": {"epoch": {"save": 1.0}}})
    policy = policy.observe("epoch", Iteration(15.0, depth=0))
    assert policy.decide("epoch", BoundaryFacts(since=15.0)).save
    refused = policy.decide("epoch", BoundaryFacts(since=15.0, ends=True))
    assert not refused.save
    assert refused.reason is Reason.FOR_OUTER_LOOP
    policy = policy.observe("epoch", Iteration(15.0, depth=0))
    assert policy.decide("epoch", BoundaryFacts(since=15.0, ends=True)).save


def test_every_means_boundaries_of_the_outermost_loop():
    policy = Policy(1e-9, every=True).observe("epoch", Iteration(1.0))
    assert policy.decide("epoch", BoundaryFacts(since=1.0)).save
    assert not policy.decide("epoch", BoundaryFacts(since=1.0, ends=True)).save
    assert not policy.decide("step", BoundaryFacts(since=1.0, depth=1)).save
    assert Policy(0.0, every=True).decide("epoch", BoundaryFacts(since=1.0)).save


def test_the_first_save_of_a_run_does_not_speak_for_the_others():
    """It also stores what never changes."""
    policy = Policy(0.1).observe("epoch", Iteration(10.0))
    for blocking in (2.0, 0.1):
        policy = policy.observe("epoch", Saved(blocking))
    assert policy.cost("epoch") == pytest.approx(0.1)
    assert policy.paid == pytest.approx(2.1)


def test_where_a_core_is_free_less_is_assumed_to_be_lost():
    crowded = Policy(0.1).observe("epoch", Saved(0.0, 1.0, cpu=1.0, crowded=1.0))
    alone = Policy(0.1).observe("epoch", Saved(0.0, 1.0, cpu=1.0, crowded=0.0))
    assert 0 < alone.paid < crowded.paid


def test_a_failed_save_still_counts_as_cost():
    policy = Policy(0.1).observe("epoch", Iteration(10.0)).with_spent(0.9)
    assert not policy.decide("epoch", BoundaryFacts(since=10.0, nbytes=10**9)).save
