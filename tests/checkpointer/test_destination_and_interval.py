from datetime import timedelta

import pytest

from rearview.checkpointer.destination_and_interval import Pace, Seconds, Share, Steps, interval
from rearview.errors import UsageError


@pytest.mark.parametrize(
    ("every", "meant"),
    [
        (10, Steps(10)),
        (None, Steps(0)),
        ("90s", Seconds(90)),
        ("1.5 h", Seconds(5400)),
        (timedelta(minutes=2), Seconds(120)),
        ("2%", Share(0.02)),
        (Seconds(3), Seconds(3)),
    ],
)
def test_intervals_are_parsed_as_people_write_them(every, meant):
    assert interval(every) == meant


@pytest.mark.parametrize("every", [-1, 2.5, "often", "5 parsecs", True, object()])
def test_an_interval_without_a_meaning_is_refused(every):
    with pytest.raises(UsageError, match="not an interval"):
        interval(every)


def test_an_interval_of_none_is_never_due():
    assert not any(interval(None).due(Pace(n, 1e9, 1e9)) for n in range(5))


def test_a_share_is_never_exceeded_at_any_cost_of_a_save():
    computing = saving = 0.0
    cost, rule = 0.0, Share(0.05)
    for step in range(2000):
        computing += 0.1 + 0.05 * (step % 3)
        if rule.due(Pace(step, 0.0, computing, saving, cost)):
            cost = 0.2 + 0.1 * (step % 2)
            saving += cost
        # the very first save has no known cost; after that the bound holds up to its variation
        assert saving <= 0.05 * computing + 0.3
    assert saving > 0.04 * computing
