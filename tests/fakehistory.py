"""A history without a store, for tests of what the command line says and asks."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview._history import BackfillReport, MissingCells, PlanReport, Refusal, RunReport, Unproved
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import Checkpoint, Operator, Plan, Point, Run, Segment, Status, Step
from rearview.model.process_messages import ReplayReport


class FakeTable:
    def __init__(self, columns, rows):
        self.columns = columns
        self.mark = self.interpolated = ""
        self.unproved = []
        self._rows = rows

    def __iter__(self):
        return (dict(zip(self.columns, row, strict=True)) for row in self._rows)

    def described(self):
        return iter(self)


def a_run(number: int = 1, status: Status = Status.FINISHED, **changes: Any) -> Run:
    return Run(
        **{
            "id": f"20260101-00000{number}-abcd",
            "version": "f" * 40,
            "script": "train.py",
            "argv": ("--lr", "0.1"),
            "started": 1_767_225_600.0 + number,
            "status": status,
            "ended": None if status is Status.RUNNING else 1_767_225_690.0 + number,
            "exit_code": 0,
            "host": "here",
            "args": {"lr": 0.1},
            **changes,
        }
    )


def an_outcome(redone: str = "", **facts: Any) -> ReplayOutcome:
    facts = {"states": 3, "repeated": 4, "restored": 1, "written": 5, "finished": True, **facts}
    report = ReplayReport(**facts)
    log, tree = Path("/replays/1/output.txt"), Path("/replays/1/tree")
    return ReplayOutcome(a_run().id, "replay-1", report, log, tree, redone=redone)


@dataclass
class FakeHistory:
    """Answers from its fields and remembers what it was asked."""

    found: list[Run] = field(default_factory=lambda: [a_run(1), a_run(2, Status.RUNNING)])
    columns: tuple[str, ...] = ("run", "epoch", "loss")
    rows: tuple[tuple[Any, ...], ...] = (
        ("a", 0, 0.1 + 0.2),
        ("a", 1, math.nan),
        ("a", 2, None),
    )
    difference: str = ""
    report: BackfillReport = field(
        default_factory=lambda: BackfillReport([an_outcome()], [], 2.0, 20.0)
    )
    segments: tuple[Segment, ...] = (
        Segment(a_run().id, "f" * 40, Operator.INNER, "epoch", 3, 5, "c/3", ("g",), 4.0, 3.0, 6.0),
    )
    refusals: list[Refusal] = field(default_factory=list)
    unproved: list[Unproved] = field(default_factory=list)
    explained: Any = None
    virtual: tuple[str, ...] = ()
    under_way: list[Any] = field(default_factory=list)
    checked: Any = None
    freed: Any = None
    asked: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)

    def _note(self, verb, what=(), **options):
        self.asked.append((verb, what, options))

    def runs(self):
        return self.found

    def problems(self):
        return []

    def run(self, which="latest"):
        return next((run for run in self.found if which in run.id), self.found[-1])

    def names(self):
        return ["loss", "lr"]

    def captured(self):
        return {}

    def empty(self, names):
        return [name for name in names if name in self.virtual]

    def table(self, *names, **options):
        self._note("table", names, **options)
        return FakeTable(self.columns, self.rows)

    def sql(self, query, **options):
        self._note("sql", query, **options)
        return FakeTable(self.columns, self.rows)

    def diff(self, a, b):
        self._note("diff", (a, b))
        return self.difference

    def show(self, which="latest"):
        self._note("show", which)
        point = Point((Step("epoch", 1),))
        return RunReport(
            run=self.found[0],
            names={"loss": 20},
            loops=[("epoch", 20)],
            checkpoints=[Checkpoint("c/1", "c", 1, point, "start", {})],
            partial=["epoch=3: a generator"],
            logical=2_000_000,
            stored=500_000,
            costs={
                "overhead": 0.02,
                "computed": 60.0,
                "blocking": 0.5,
                "stored": 500_000,
                "saved": 20,
                "skipped_because": {"the disk is busy": 3},
                "odd": 1,
            },
            replays=[],
            exact="exact: 20 states equal",
        )

    def plan(self, question, **choices):
        self._note("plan", question, **choices)
        return PlanReport(
            Plan(self.segments),
            self.refusals,
            MissingCells(5),
            unproved=self.unproved,
            explaining=lambda: self.explained,
        )

    def backfill(self, question, *, progress, plan):
        assert plan.plan.segments == self.segments  # what was shown is run
        self._note("backfill", question)
        return self.report

    def replay(self, which, **options):
        options.pop("progress")
        self._note("replay", which, **options)
        return self.report

    def running_backfills(self):
        return self.under_way

    def set_workers(self, workers, *, of=None):
        self._note("set_workers", workers, of=of)
        return self.under_way[0]

    def verify(self, *, repair=False):
        self._note("verify", repair=repair)
        return self.checked

    def gc(self, **options):
        self._note("gc", **options)
        return self.freed
