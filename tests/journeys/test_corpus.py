"""Every program of the corpus, recorded without probes and asked afterwards, tells the truth."""

from concurrent.futures import ThreadPoolExecutor

import oracle
import pytest

PROGRAMS = {program.name: program for program in oracle.programs()}


@pytest.fixture(params=sorted(PROGRAMS))
def case(request, tmp_path, zygote, monkeypatch):
    monkeypatch.setattr("rearview.backfill.backfill.Local", lambda *_: zygote)
    return oracle.Case(PROGRAMS[request.param], tmp_path, zygote)


def test_the_corpus_is_large_and_every_program_has_an_outer_and_an_inner_probe():
    assert len(PROGRAMS) >= 30
    assert [name for name, one in PROGRAMS.items() if {"outer", "inner"} - set(one.probes)] == []


def third(checkpoint):
    return oracle.outermost(checkpoint) and checkpoint.point.steps[0].index % 3 == 2


def test_a_backfill_equals_a_run_from_the_start(case):
    """With a checkpoint at every boundary, then with few; the whole run, then a part of it."""
    kinds = set(case.program.probes)
    with ThreadPoolExecutor(2) as both:
        truth = both.submit(case.truth, kinds)
        dense = both.submit(case.record, "dense", set(), settings={"every": True}, everywhere=True)
        expected, recorded = truth.result(), dense.result()
    found = {
        kind: oracle.verdict(expected, case.backfill(recorded, kind, workers=1))
        for kind in sorted(kinds)
    }
    oracle.thin(recorded, lambda c: oracle.final(c) or third(c))
    found["inner, sparse, 2 workers"] = oracle.verdict(expected, case.backfill(recorded, "inner"))
    at, inside = oracle.middle(recorded)
    outer = set(case.program.probes.get("outer", ()))
    if any(inside(key) for key in expected if key[2] in outer):
        oracle.thin(recorded, lambda c: oracle.final(c) or oracle.outermost(c))
        answer = case.backfill(recorded, "outer", at=at, workers=1)
        found[f"outer at {at}"] = oracle.verdict(expected, answer, inside)
    assert found == dict.fromkeys(found, "exact")
