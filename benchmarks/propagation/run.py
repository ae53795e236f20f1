"""How well statements are carried: made cases, and cases mined from git histories.

    python benchmarks/propagation/run.py synthetic [--count 20]
    python benchmarks/propagation/run.py mine OUT.jsonl REPOSITORY...
    python benchmarks/propagation/run.py ecological CASES.jsonl
    python benchmarks/propagation/run.py ecological REPOSITORY...

A repository is the path of any git repository, bare or not. Times are processor time of this process
(for the two that start programs: wall time), so that a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from judge import verdict
from methods import METHODS
from mine import Case, Miner
from synthetic import cases as synthetic_cases


def load(path: Path) -> list[Case]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Case(**{**row, "commits": tuple(row["commits"]), "lines": tuple(row["lines"])})
        for row in rows
    ]


def mined(paths: list[Path]) -> list[Case]:
    found: list[Case] = []
    for path in paths:
        found += Miner(path).cases(files=8, limit=80, positives=36, negatives=12)
    return found


def measure(cases: list[Case], methods: list[str]) -> dict[str, list[tuple[Case, str, float]]]:
    """Ask every method every case, interleaved."""
    results: dict[str, list[tuple[Case, str, float]]] = defaultdict(list)
    for case in cases:
        truth = None if case.line is None else (case.line, case.text or "")
        for name in methods:
            clock = time.process_time if name in {"rearview", "difflib"} else time.perf_counter
            started = clock()
            answer = METHODS[name](case.new, case.lines, case.old)
            spent = clock() - started
            results[name].append((case, verdict(case.old, truth, answer), spent))
    return results


def table(results: dict[str, list[tuple[Case, str, float]]]) -> None:
    head = (
        "method",
        "cases",
        "exact",
        "equivalent",
        "wrong",
        "refused",
        "must refuse",
        "did",
        "median ms",
        "p95 ms",
    )
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, rows in results.items():
        has = [v for c, v, _ in rows if c.line is not None]
        lacks = [v for c, v, _ in rows if c.line is None]
        count = Counter(has)
        times = sorted(1000 * spent for _, _, spent in rows)
        wrong = count["wrong"] + lacks.count("wrong")
        cells = [
            name, len(rows), share(count["exact"], len(has)), share(count["equivalent"], len(has)),
            f"{wrong} ({100 * wrong / max(1, len(rows)):.1f} % of all)", share(count["refused"], len(has)),
            len(lacks), share(lacks.count("right-refusal"), len(lacks)),
            f"{statistics.median(times):.0f}", f"{times[int(len(times) * 0.95)]:.0f}",
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def strata(rows: list[tuple[Case, str, float]], key) -> None:
    groups: dict[object, Counter] = defaultdict(Counter)
    for case, judged, _ in rows:
        groups[key(case)][judged] += 1
    for group, count in sorted(groups.items(), key=lambda item: str(item[0]).zfill(12)):
        print(
            f"  {group!s:16} {count.total():5}  "
            + ", ".join(f"{k} {v}" for k, v in count.most_common())
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["synthetic", "ecological", "mine"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", action="append", choices=list(METHODS))
    options = parser.parse_args()
    if options.what == "mine":
        with options.paths[0].open("w") as file:
            for path in options.paths[1:]:
                found = mined([path])
                print(path, len(found), flush=True)
                file.writelines(json.dumps(asdict(case)) + "\n" for case in found)
        return
    if options.what == "synthetic":
        cases = [case for _, case in synthetic_cases(options.count)]
    elif options.paths[0].suffix == ".jsonl":
        cases = [case for path in options.paths for case in load(path)]
    else:
        cases = mined(options.paths)
    results = measure(cases, options.only or list(METHODS))
    table(results)
    for title, key in (
        ("kind", lambda c: c.kind),
        ("distance", lambda c: c.distance),
        ("history", lambda c: c.repo),
    ):
        print(f"\nrearview by {title}:")
        strata(results["rearview"], key)


if __name__ == "__main__":
    main()
