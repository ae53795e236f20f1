"""Before a plan runs it says what it does, what it costs and what would make it cheaper."""

import pytest

from plan.runs import ends, run, starts
from rearview.model import Operator
from rearview.plan.divide_work import divide
from rearview.plan.explain_cost import explain
from rearview.plan.facts import RunQuestion, ValueRequest, parse_at
from rearview.plan.survey_work import survey

DEEP = ValueRequest(("n",), ("epoch", "step"))


def explained(*questions, **more):
    found = survey(questions)
    plan = divide(found)
    return explain(found, plan, **more)


def test_the_parts_add_up_to_the_whole():
    facts = run([10.0] * 8, ends(*range(8)), inner=[9.0] * 8)
    told = explained(RunQuestion(facts, (ValueRequest(("n",), ("epoch",), place="after"),)))
    assert (told.startup, told.restoring, told.running) == (3.0, 8.0, pytest.approx(8.0))
    assert told.seconds == pytest.approx(told.startup + told.restoring + told.running)
    assert told.low < told.seconds < told.high
    assert (told.cells, told.nbytes_written, told.nbytes_read) == (8, 8 * 64, 80)


def test_more_workers_are_listed_with_their_times_and_balance():
    facts = run([10.0] * 64, starts(*range(1, 64)), inner=[9.0] * 64)
    told = explained(RunQuestion(facts, (DEEP,)), workers=(1, 2, 4, 8))
    times = [on.seconds for on in told.workers]
    assert times == sorted(times, reverse=True)
    assert all(0.95 <= on.balance <= 1.0 for on in told.workers)
    assert told.workers[3].segments >= 8
    assert told.cells == 640


def texts(told):
    return " ".join(item.text for item in told.cheaper)


def test_cheaper_questions_are_suggested_with_their_savings():
    facts = [run([10.0] * 20, starts(5), inner=[9.0] * 20, name=f"r{i}") for i in range(20)]
    told = explained(*(RunQuestion(one, (DEEP,)) for one in facts))
    assert "most expensive runs" in texts(told)
    assert "`--at epoch=:10`" in texts(told)
    assert "`--at step=0:1`" in texts(told)
    assert [item.saves for item in told.cheaper] == sorted(
        (item.saves for item in told.cheaper), reverse=True
    )
    assert all(0 < item.saves < told.seconds for item in told.cheaper)


def saving(told, text):
    return next((item.saves for item in told.cheaper if text in item.text), 0.0)


@pytest.mark.parametrize(
    ("points", "half", "steps"),
    # with a checkpoint at each iteration, what is not asked for is not run; without, it is
    [(starts(*range(1, 20)), 100.0, 160.0), ((), 100.0, 9.0)],
)
def test_the_saving_of_another_question_comes_from_its_plan(points, half, steps):
    facts = run([10.0] * 20, points, inner=[10.0] * 20, counts=[100] * 20)
    told = explained(RunQuestion(facts, (DEEP,)))
    assert saving(told, "`--at epoch=:10`") == pytest.approx(half, rel=0.01)  # writing counts, too
    assert saving(told, "`--at step=0:10`") == pytest.approx(steps, rel=0.05)
    for text in ("epoch=:10", "step=0:10"):
        wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at(text))
        planned = divide(survey([RunQuestion(facts, (wanted,))])).seconds
        assert saving(told, f"`--at {text}`") == pytest.approx(told.seconds - planned)


def test_a_long_history_is_explained_from_some_of_its_runs():
    many = [run([10.0] * 20, starts(5), inner=[9.0] * 20, name=f"r{i}") for i in range(100)]
    told = explained(*(RunQuestion(one, (DEEP,)) for one in many))
    one = explained(RunQuestion(many[0], (DEEP,)))
    assert saving(told, "epoch=:10") == pytest.approx(100 * saving(one, "epoch=:10"))


def test_the_seconds_from_the_nearest_checkpoint_count_as_wasted():
    facts = run([10.0] * 20, starts(5), inner=[9.0] * 20)
    told = explained(
        RunQuestion(facts, (ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=15")),))
    )
    assert told.wasted == pytest.approx(100.0)
    assert "nearest checkpoint" in texts(told)


def test_a_probe_that_carries_values_between_iterations_gets_the_advice_to_log_single_values():
    facts = run([10.0] * 20, starts(5), inner=[9.0] * 20)
    told = explained(RunQuestion(facts, (ValueRequest(("n",), ("epoch",), depth=0),)))
    assert "keeps a value from one iteration" in texts(told)


def test_a_statement_before_the_loop_needs_the_set_up_alone():
    facts = run([10.0] * 4, inner=[9.0] * 4)
    plan = divide(survey([RunQuestion(facts, (ValueRequest(("n",), (), place="before"),))]))
    assert [(each.operator, each.seconds) for each in plan.segments] == [(Operator.SETUP, 3.0)]


def test_an_empty_plan_is_explained_as_empty():
    told = explained()
    assert (told.seconds, told.cheaper, told.segments) == (0, (), ())


def test_a_rerun_is_explained_as_a_rerun():
    facts = run([0.02] * 8, ends(*range(8), restore=0.001), inner=[0.018] * 8)
    found = survey([RunQuestion(facts, (ValueRequest(("n",), ("epoch",), place="after"),))])
    told = explain(found, divide(found, rerun=True), rerun=True)
    assert (told.restoring, told.nbytes_read) == (0, 0)
    assert told.running == pytest.approx(8 * 0.02)
    assert [on.segments for on in told.workers] == [1, 1, 1, 1]
