"""Every program of the corpus, recorded without probes and asked afterwards, tells the truth."""

import oracle
import pytest

from rearview.past import filling

PROGRAMS = {program.name: program for program in oracle.programs()}


@pytest.fixture(params=sorted(PROGRAMS))
def case(request, tmp_path, zygote, monkeypatch):
    monkeypatch.setattr(filling, "Local", lambda *_: zygote)
    return oracle.Case(PROGRAMS[request.param], tmp_path, zygote)


def test_a_backfill_equals_a_run_from_the_start(case):
    kinds = set(case.program.probes)
    expected = case.truth(kinds)
    recorded = case.record("dense", set(), settings={"every": True}, everywhere=True)
    found = {
        kind: oracle.verdict(expected, case.backfill(recorded, kind)) for kind in sorted(kinds)
    }
    oracle.thin(
        recorded,
        lambda c: c.edge == "start" and len(c.point.steps) == 1 and c.point.steps[0].index % 3 == 2,
    )
    for kind in sorted(kinds & {"inner", "after"}):
        found[f"sparse {kind}"] = oracle.verdict(expected, case.backfill(recorded, kind))
    assert found == dict.fromkeys(found, "exact")
