"""What a notebook shows of plans and runs is escaped like everything that the page shows."""

from pages import HOSTILE
from rearview.backfill.reports import MissingCells, PlanReport, Refusal
from rearview.model import Operator, Plan, Run, Segment, Status


def test_a_plan_shows_its_segments_and_refused_runs():
    segment = Segment("20260101-000000-abcd", "v", Operator.OUTER, "epoch", 0, 3, seconds=1.5)
    report = PlanReport(Plan((segment,)), [Refusal("other", HOSTILE)], MissingCells(3))
    text = report._repr_html_()
    assert "3 cells to fill" in text
    assert "<td>0:3</td>" in text
    assert "<img" not in text


def test_a_run_shows_its_facts_and_parameters():
    run = Run("r", "v", "train.py", ("--lr", HOSTILE), 0.0, Status.FINISHED, 2.0, args={"lr": 0.1})
    text = run._repr_html_()
    assert "<th>--lr</th><td>0.1</td>" in text
    assert "<img" not in text
