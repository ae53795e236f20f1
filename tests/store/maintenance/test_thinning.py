import itertools
import random

import pytest

from rearview.store.maintenance.thin_and_collect import ThinningCandidate, expected_replay, thin


def kept(times, count, **more):
    held = [ThinningCandidate(str(i), "r", float(t), 1, **more) for i, t in enumerate(times)]
    gone = set(thin(held, excess=len(held) - count))
    return [each.at for each in held if each.id not in gone]


def test_equal_epochs_are_thinned_almost_evenly():
    left = kept(range(1, 101), 12)
    best = expected_replay([101 / 13 * i for i in range(1, 13)], 101)
    assert len(left) == 12
    assert expected_replay(left, 101) <= 1.2 * best


@pytest.mark.parametrize("seed", range(20))
def test_thinning_is_close_to_the_best_choice(seed):
    dice = random.Random(seed)
    times = sorted(dice.random() for _ in range(9))
    left = kept(times, 4)
    best = min(
        expected_replay([*choice, times[-1]], times[-1])
        for choice in itertools.combinations(times[:-1], 3)
    )
    assert expected_replay(left, times[-1]) <= 1.35 * best


def test_the_last_checkpoint_and_promised_ones_are_never_removed():
    held = [
        ThinningCandidate(f"{run}{i}", run, i, 5, promised=i == 2) for run in "ab" for i in range(5)
    ]
    gone = thin(held, excess=10**9)
    assert set(gone) == {f"{run}{i}" for run in "ab" for i in (0, 1, 3)}


def test_no_more_goes_than_needed():
    held = [ThinningCandidate(str(i), "r", i, 100) for i in range(10)]
    assert len(thin(held, excess=301)) == 4
    assert thin(held, excess=0) == []
    assert thin([], excess=10) == []


def test_the_larger_of_two_equally_useful_checkpoints_goes_first():
    held = [ThinningCandidate("small", "a", 1, 1), ThinningCandidate("end a", "a", 2, 1)]
    held += [ThinningCandidate("large", "b", 1, 100), ThinningCandidate("end b", "b", 2, 1)]
    assert thin(held, excess=1) == ["large"]


def test_checkpoints_of_one_moment_cost_nothing_to_give_up():
    held = [
        ThinningCandidate("first", "r", 1, 1),
        ThinningCandidate("again", "r", 1, 1),
        ThinningCandidate("last", "r", 9, 1),
    ]
    assert thin(held, excess=1) in (["first"], ["again"])
