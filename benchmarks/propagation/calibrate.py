"""Fit how sure an insertion is said to be: score of the evidence -> share of insertions that are right.

    python benchmarks/propagation/calibrate.py CASES.jsonl ...

Prints the table `CALIBRATION` of `rearview.source.propagate.carry_statement`. Give it cases of the tuning
repositories only. Cases are sorted by score; neighbours whose share of right answers falls are pooled
(isotonic regression), then groups of fewer than `LEAST` cases with the next one. Half a right and half
a wrong answer are added to each group, so that no group is called certain.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from judge import verdict
from methods import carry
from run import load

LEAST = 20


def observed(paths: list[Path]) -> list[tuple[float, bool]]:
    """Return (score, right) of every insertion, whatever its score."""
    found: list[tuple[float, bool]] = []
    for case in (case for path in paths for case in load(path)):
        if case.others is not None:
            continue
        answer = carry(case.new, case.lines, case.old, min_confidence=0.0)
        if answer.line is not None:
            truth = None if case.line is None else (case.line, case.text or "")
            right = verdict(case.old, truth, (answer.line, answer.text)) != "wrong"
            found.append((answer.score, right))
    return sorted(found)


def fitted(answers: list[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Return (mean score, share right) of pooled groups, both rising.

    >>> fitted([(0.5, False)] * 20 + [(0.9, True)] * 19 + [(0.8, True)] * 1 + [(0.9, False)] * 20)
    [(0.5, 0.024), (0.897, 0.5)]
    """
    groups: list[list[tuple[float, bool]]] = []
    for _, tied in groupby(answers, key=lambda answer: round(answer[0], 2)):
        groups.append(list(tied))
        while len(groups) > 1 and _share(groups[-2]) >= _share(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    pooled: list[list[tuple[float, bool]]] = []
    for group in groups:
        if pooled and (len(pooled[-1]) < LEAST or len(group) < LEAST):
            pooled[-1] = pooled[-1] + group
        else:
            pooled.append(group)
    return [
        (
            round(sum(score for score, _ in group) / len(group), 3),
            round((sum(right for _, right in group) + 0.5) / (len(group) + 1), 3),
        )
        for group in pooled
    ]


def _share(group: list[tuple[float, bool]]) -> float:
    return sum(right for _, right in group) / len(group)


if __name__ == "__main__":
    for score, share in fitted(observed([Path(word) for word in sys.argv[1:]])):
        print(f"    ({score}, {share}),")
