"""What a shared start spares is left out of predictions, and out of what they are corrected by."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rearview._history import history
from rearview.backfill.examine_run import PreparedRun
from rearview.backfill.facts_and_segments import RunRequest
from rearview.backfill.machine_speed import read_cost_corrections
from rearview.backfill.setup_sharing import LeadingImports, import_seconds, leading_imports_of
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import Operator, ReplayReport, Run, RunEnd, RunStart, Segment, Status
from rearview.plan.facts import RunFacts
from rearview.store.project import Project

LEAD = LeadingImports(
    ("import numpy as np", "from torch.utils.data import DataLoader", "import torch._dynamo")
)
TOOK = {"numpy": 0.1, "torch": 1.5, "torch._dynamo": 1.4, "pandas": 0.7}


def run(imports=None, **facts):
    start, end = RunStart(**facts), RunEnd(imports=imports or {})
    return Run("r", "v", "train.py", (), 0.0, Status.FINISHED, facts=start, end=end)


def test_only_shared_imports_are_spared():
    assert import_seconds(run(imports=TOOK), LEAD) == pytest.approx(3.0)
    assert import_seconds(run(), LEAD) == 0.0


def test_a_run_that_follows_others_is_predicted_without_its_start():
    facts = RunFacts("r", "v", start=0.2, setup=4.0)
    request = RunRequest(run(imports=TOOK), "v", None, (), (), None)
    shared = PreparedRun(request, facts, leading_imports=LEAD).with_shared_start()
    assert (shared.facts.start, shared.facts.setup) == pytest.approx((0.04, 1.0))
    assert shared.spared == pytest.approx(3.16)


@pytest.mark.parametrize(("spared", "planned"), [(3.0, 3.0), (0.0, 0.0), (3.0, 0.0), (0.0, 3.0)])
def test_corrections_compare_like_with_like(tmp_path, spared, planned):
    backfiller = history(Project.create(tmp_path).root)._backfiller
    segment = Segment("r", "v", Operator.INNER, seconds=5.0 - planned)
    real = 5.0 - spared
    report = ReplayReport(finished=True, spared=spared)
    outcome = ReplayOutcome("r", "r.1", report, Path(), Path(), real)
    prepared = {"r": SimpleNamespace(spared=planned, facts=SimpleNamespace(machine=None))}
    backfiller._correct_predictions({"r.1": segment}, [outcome], prepared)
    known = read_cost_corrections(backfiller.project.cache, backfiller.machines.name)
    assert known.factor("v", "DPi")[0] == pytest.approx(1.0)


def test_programs_that_name_their_loops_themselves_share_nothing():
    files = {"train.py": b"import torch"}
    facts = {"target": "train.py", "hash_seed": "1", "threads": {"OMP_NUM_THREADS": "1"}}
    lead = leading_imports_of(run(**facts), files, "/p")
    assert lead == LeadingImports(("import torch",), "1", (("OMP_NUM_THREADS", "1"),))
    assert leading_imports_of(run(**facts, watched=False), files, "/p") is None
    assert leading_imports_of(run(**facts), {"train.py": b"import jax"}, "/p").imports == ()
