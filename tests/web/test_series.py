"""Curves of the page: every point where there are few, the extremes of each pixel where there are many."""

import json

import numpy as np
import pytest

from rearview.errors import UsageError
from rearview.web.run_index import Index
from rearview.web.series import Chart, Series
from recorded import Recorded, at


@pytest.fixture
def made(tmp_path):
    return Recorded(tmp_path)


def lines(index, **chart):
    series = index if isinstance(index, Series) else Series(index)
    data = series.chart(Chart(**chart))
    head, _, rest = data.partition(b"\n")
    about, at_ = json.loads(head), 0
    assert (len(head) + 1) % 8 == 0
    values = np.frombuffer(rest, "<f8")
    out = []
    for line in about["lines"]:
        columns = []
        for _ in range(line["columns"]):
            columns.append(values[at_ : at_ + line["n"]])
            at_ += line["n"]
        out.append((line, columns))
    assert at_ == len(values)
    return out


@pytest.fixture
def opened(made):
    found = []

    def open_():
        index = Index(made.project)
        index.refresh()
        found.append(index)
        return index

    yield open_
    for one in found:
        one.close()


def test_a_short_curve_is_drawn_point_by_point(made, opened):
    run = made.run(*((at(epoch=e), {"loss": e**2}) for e in range(5)))
    [(about, [x, y])] = lines(opened(), name="loss", runs=[run])
    assert about["raw"]
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert y.tolist() == [0, 1, 4, 9, 16]


def test_values_of_an_inner_loop_lie_between_those_of_the_outer(made, opened):
    calls = [(at(epoch=e, step=s), {"loss": 1.0}) for e in range(2) for s in range(4)]
    run = made.run(*calls)
    [(_, [x, _])] = lines(opened(), name="loss", runs=[run])
    assert x.tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    [(_, [x, _])] = lines(opened(), name="loss", runs=[run], x="step")
    assert x.tolist() == list(range(8))


def test_no_extreme_is_lost_when_many_points_share_a_pixel(made, opened):
    values = np.sin(np.arange(20_000) / 50)
    values[12_345] = 99.0
    run = made.run(*((at(step=k), {"v": float(v)}) for k, v in enumerate(values)))
    index = Series(opened())
    [(about, [x, _, low, high])] = lines(index, name="v", runs=[run], pixels=200)
    assert not about["raw"]
    assert len(x) <= 201
    assert high.max() == 99.0
    assert low.min() == values.min()
    [(about, [x, *values])] = lines(index, name="v", runs=[run], pixels=400, lo=12_300, hi=12_400)
    assert values[-1].max() == 99.0
    assert x.min() >= 12_300


def test_a_group_has_the_mean_of_its_runs_at_each_point(made, opened):
    runs = [
        made.run(*((at(epoch=e), {"loss": float(e + k)}) for e in range(3))) for k in (0, 2, 10)
    ]
    group = {runs[0]: 0, runs[1]: 0, runs[2]: 1}
    found = lines(opened(), name="loss", runs=runs, group=group)
    assert found[0][1][1].tolist() == [1, 2, 3]
    assert found[0][1][2].tolist() == [0, 1, 2]
    assert found[1][1][1].tolist() == [10, 11, 12]


def test_a_value_that_is_no_number_leaves_a_gap(made, opened):
    calls = [(at(epoch=e), {"loss": v}) for e, v in enumerate([1.0, float("nan"), 3.0])]
    run = made.run(*calls)
    [(_, [_, y])] = lines(opened(), name="loss", runs=[run])
    assert np.isnan(y[1])


def test_a_replay_fills_the_curve_of_its_run(made, opened):
    run = made.run((at(epoch=0), {"loss": 1.0}))
    made.replay(run, "r1", (at(epoch=1), {"norm": 2.0}), (at(epoch=0), {"norm": 1.0}))
    [(_, [x, y])] = lines(opened(), name="norm", runs=[run])
    assert (x.tolist(), y.tolist()) == ([0, 1], [1, 2])


def test_a_chart_of_too_many_runs_is_refused(opened):
    with pytest.raises(UsageError, match="500"):
        lines(opened(), name="loss", runs=[str(k) for k in range(501)])
