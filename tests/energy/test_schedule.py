from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rearview.energy import Forecast, GridSample, Rule, decide

HOUR = 3600


def forecast(shares, lights=None):
    lights = lights or [None] * len(shares)
    return Forecast.of(
        "x",
        "",
        [
            GridSample(n * HOUR, share, light)
            for n, (share, light) in enumerate(zip(shares, lights, strict=True))
        ],
        fetched=0,
    )


def test_by_the_traffic_light_a_run_starts_at_green_and_continues_at_yellow():
    outlook = forecast([20, 50, 80], [0, 1, 2])
    assert not decide(outlook, 0, Rule(), running=False).run
    assert not decide(outlook, HOUR, Rule(), running=False).run
    assert decide(outlook, HOUR, Rule(), running=True).run
    assert decide(outlook, 2 * HOUR, Rule(), running=False).run


def test_a_decision_says_until_when_it_holds():
    outlook = forecast([20, 50, 80, 10], [0, 1, 2, 0])
    assert decide(outlook, 0, Rule(), running=False).until == 2 * HOUR
    assert decide(outlook, 2 * HOUR, Rule(), running=True).until == 3 * HOUR


def test_a_share_or_grams_given_by_the_user_decide():
    outlook = forecast([60], [0])
    assert decide(outlook, 0, Rule(share=55), running=False).run
    assert not decide(outlook, 0, Rule(share=65), running=False).run
    grams = Forecast.of("x", "", [GridSample(0, grams=200)], fetched=0)
    assert decide(grams, 0, Rule(grams=250), running=False).run
    assert not decide(grams, 0, Rule(grams=150), running=True).run


def test_a_congested_grid_holds_back_at_any_share():
    assert not decide(forecast([99], [-1]), 0, Rule(share=10), running=True).run


def test_when_nothing_is_known_nothing_is_held_back():
    empty = Forecast("x", "", problem="server on fire")
    for running in (True, False):
        decision = decide(empty, 0, Rule(), running=running)
        assert decision.run
        assert "server on fire" in decision.reason


def test_a_pause_that_is_too_short_is_not_made():
    outlook = forecast([80, 20, 80], [2, 0, 2])
    assert decide(outlook, 2 * HOUR - 300, Rule(), running=True).run
    assert not decide(outlook, HOUR, Rule(), running=True).run


def test_the_greenest_hours_before_the_deadline_are_taken():
    outlook = forecast([20, 30, 90, 20, 95, 10, 99])
    ran = []
    for hour in range(5):
        rule = Rule(hours=2 - len(ran), deadline=6 * HOUR)
        if decide(outlook, hour * HOUR, rule, running=False).run:
            ran.append(hour)
    assert ran == [2, 4]


def test_work_in_one_piece_gets_the_greenest_window():
    outlook = forecast([20, 30, 90, 20, 80, 85])
    rule = Rule(hours=2, deadline=6 * HOUR, pieces=False, margin=0)
    assert decide(outlook, 0, rule, running=False).until == 4 * HOUR


def test_a_deadline_that_could_be_missed_runs_at_any_colour():
    outlook = forecast([0] * 8 + [99] * 2)
    rule = Rule(hours=2, deadline=10 * HOUR, margin=0.5)
    assert not decide(outlook, 6.9 * HOUR, rule, running=False).run
    decision = decide(outlook, 7 * HOUR, rule, running=False)
    assert decision.run
    assert "deadline" in decision.reason


shares = st.lists(st.integers(0, 120), min_size=6, max_size=12)


@given(shares, st.integers(1, 5))
def test_following_the_decisions_always_meets_the_deadline_and_never_costs_more_than_at_once(
    values, hours
):
    outlook, deadline = forecast(values), len(values) * HOUR
    done, cost, ran = 0, 0.0, []
    for hour in range(len(values)):
        rule = Rule(hours=hours - done, deadline=deadline, margin=0, switch=0)
        if done < hours and decide(outlook, hour * HOUR, rule, running=bool(ran)).run:
            done += 1
            ran.append(hour)
            cost += outlook.samples[hour].intensity
    assert done == hours
    grams = [sample.intensity for sample in outlook.samples]
    best = min(sum(grams[i] for i in chosen) for chosen in combinations(range(len(grams)), hours))
    assert cost == pytest.approx(best)
    assert cost <= sum(grams[:hours]) + 1e-9


def test_a_deadline_without_known_hours_is_the_latest_start():
    outlook = forecast([10] * 8)
    rule = Rule(deadline=3.5 * HOUR)
    waits = decide(outlook, 2 * HOUR, rule, running=False)
    assert (waits.run, waits.until) == (False, 3.5 * HOUR)
    assert decide(outlook, 3.5 * HOUR, rule, running=False).run
    assert decide(outlook, 5 * HOUR, rule, running=True).run


def test_a_wait_without_a_green_hour_in_sight_lasts_until_nothing_is_known():
    outlook = forecast([10, 20])
    assert decide(outlook, 0, Rule(), running=False).until == 2 * HOUR
    assert decide(outlook, 2 * HOUR, Rule(), running=False).run


def test_where_only_grams_are_stated_half_renewable_power_is_green():
    outlook = Forecast.of(
        "x", "", [GridSample(0, grams=200), GridSample(HOUR, grams=300)], fetched=0
    )
    assert decide(outlook, 0, Rule(), running=False).run
    assert not decide(outlook, HOUR, Rule(), running=False).run
