"""Training loops that live in an installed library: recorded, asked afterwards, answered exactly."""

import importlib.util
from pathlib import Path

import oracle
import pytest

from rearview.backfill import backfill

HERE = Path(__file__).parent / "libraries"
PROGRAMS = {path.stem: oracle.Program(path.stem, path) for path in sorted(HERE.glob("*.py"))}


@pytest.fixture(params=sorted(PROGRAMS))
def case(request, tmp_path, zygote, monkeypatch):
    library = request.param.removeprefix("with_").partition("_")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"LOUD: {library} is not installed, so its loops are not tested")
    monkeypatch.setattr(backfill, "Local", lambda *_: zygote)
    return oracle.Case(PROGRAMS[request.param], tmp_path, zygote)


def test_a_probe_in_a_callback_is_answered_as_by_a_run_from_the_start(case):
    kinds = set(case.program.probes)
    expected = case.truth(kinds)
    assert {loops[0] for loops, _, _ in expected if loops} <= {"epoch", "round", "trial"}
    assert any(loops for loops, _, _ in expected)
    recorded = case.record("dense", set(), settings={"every": True}, everywhere=True)
    found = {
        kind: oracle.verdict(expected, case.backfill(recorded, kind)) for kind in sorted(kinds)
    }
    assert found == dict.fromkeys(found, "exact")
