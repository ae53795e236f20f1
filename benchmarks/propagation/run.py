"""How well statements are carried: made cases, labelled ones, and cases mined from git histories.

    python benchmarks/propagation/run.py mine OUT.jsonl REPOSITORY...
    python benchmarks/propagation/run.py ecological CASES.jsonl [--show] [--plot FILE.svg]
    python benchmarks/propagation/run.py hlast FOLDER           # the folder `tests` of HLAST
    python benchmarks/propagation/run.py synthetic [--count 20]

A repository is the path of any git repository, bare or not. Times are processor time of this process
(for the two that start programs: wall time), so that a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import hlast
from judge import verdict
from methods import METHODS, rearview
from mine import Case, Miner
from plot import calibration
from synthetic import cases as synthetic_cases


@dataclass(frozen=True)
class Result:
    """What one method said to one case."""

    case: Case
    verdict: str
    seconds: float
    confidence: float = 1.0
    reason: str = ""
    answer: tuple[int, str] | None = None

    @property
    def right(self) -> bool:
        return self.verdict in {"exact", "equivalent", "right-refusal"}


def load(path: Path) -> list[Case]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Case(**{**row, "commits": tuple(row["commits"]), "lines": tuple(row["lines"])})
        for row in rows
    ]


def mine(out: Path, repositories: list[Path], seed: int) -> None:
    with out.open("w") as file:
        for path in repositories:
            found = Miner(path, seed).cases(files=6, limit=45, positives=28, negatives=9)
            levels = Counter(case.level for case in found)
            print(path.parent.name.replace("+", "/"), dict(levels), flush=True)
            file.writelines(json.dumps(asdict(case)) + "\n" for case in found)


def measure(cases: list[Case], methods: list[str]) -> dict[str, list[Result]]:
    """Ask every method every case, interleaved."""
    results: dict[str, list[Result]] = defaultdict(list)
    for case in cases:
        truth = None if case.line is None else (case.line, case.text or "")
        started = time.process_time()
        answer, sure, reason = rearview(case)
        spent = time.process_time() - started
        judged = verdict(case.old, truth, answer)
        results["rearview"].append(Result(case, judged, spent, sure, reason, answer))
        for name in methods if case.others is None else ():
            clock = time.process_time if name == "difflib" else time.perf_counter
            started = clock()
            answer = METHODS[name](case.new, case.lines, case.old)
            spent = clock() - started
            results[name].append(Result(case, verdict(case.old, truth, answer), spent))
    return results


def table(results: dict[str, list[Result]]) -> None:
    head = ("method", "cases", "right", "hard right", "inserted wrongly", "refused needlessly",
            "refused where due", "median ms", "p95 ms")  # fmt: skip
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, rows in results.items():
        has = [r for r in rows if r.case.line is not None]
        lacks = [r for r in rows if r.case.line is None]
        hard = [r for r in has if r.case.level == "hard"]
        times = sorted(1000 * r.seconds for r in rows)
        cells = [
            name, len(rows), share(sum(r.right for r in rows), len(rows)),
            share(sum(r.right for r in hard), len(hard)),
            share(sum(r.verdict == "wrong" for r in rows), len(rows)),
            share(sum(r.verdict == "refused" for r in has), len(has)),
            share(sum(r.right for r in lacks), len(lacks)),
            f"{statistics.median(times):.0f}", f"{times[int(len(times) * 0.95)]:.0f}",
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def strata(rows: list[Result], key) -> None:
    groups: dict[object, Counter] = defaultdict(Counter)
    for row in rows:
        groups[key(row.case)][row.verdict] += 1
    for group, count in sorted(groups.items(), key=lambda item: str(item[0]).zfill(12)):
        print(
            f"  {group!s:32} {count.total():5}  "
            + ", ".join(f"{k} {v}" for k, v in count.most_common())
        )


def show(row: Result) -> None:
    """Print a case that went wrong, with the lines around both ends."""
    case = row.case
    print(f"\n=== {row.verdict} {case.kind} {case.repo} {case.path} {case.name} "
          f"d={case.distance} sure={row.confidence:.2f} {row.reason}")  # fmt: skip
    new, old = case.new.split("\n"), case.old.split("\n")
    start, end = case.lines
    for at in range(max(0, start - 6), min(len(new), end + 5)):
        print(f"  new {at + 1:5}{'>' if start <= at + 1 <= end else ' '} {new[at][:110]}")
    for what, place in (("truth", case.line and (case.line, case.text)), ("given", row.answer)):
        if place:
            print(f"  {what}:")
            at, text = place
            for k in range(max(0, at - 6), at - 1):
                print(f"    old {k + 1:5}  {old[k][:110]}")
            for line in text.rstrip("\n").split("\n"):
                print(f"    old      > {line[:110]}")
            for k in range(max(0, at - 1), min(len(old), at + 4)):
                print(f"    old {k + 1:5}  {old[k][:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["synthetic", "ecological", "mine", "hlast"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="which versions and statements to mine")
    parser.add_argument("--peers", action="store_true", help="measure the other methods as well")
    parser.add_argument("--show", action="store_true", help="print what is wrong or refused")
    parser.add_argument("--plot", type=Path, help="write how sure and how right it is, as SVG")
    options = parser.parse_args()
    if options.what == "mine":
        mine(options.paths[0], options.paths[1:], options.seed)
        return
    if options.what == "synthetic":
        cases = [case for _, case in synthetic_cases(options.count)]
    elif options.what == "hlast":
        cases = hlast.cases(options.paths[0])
    else:
        cases = [case for path in options.paths for case in load(path)]
    results = measure(cases, list(METHODS) if options.peers else [])
    table(results)
    rows = results["rearview"]
    for title, key in (
        ("level", lambda c: c.level),
        ("kind", lambda c: c.kind),
        ("distance", lambda c: c.distance),
        ("history", lambda c: c.repo),
    ):
        print(f"\nrearview by {title}:")
        strata(rows, key)
    sure = [(r.confidence, r.right) for r in rows if r.answer is not None]
    print("\ninsertions by how sure they are said to be:")
    for low, high in ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 0.99), (0.99, 1.01)):  # fmt: skip
        bin_ = [(c, right) for c, right in sure if low <= c < high]
        if bin_:
            said = statistics.mean(c for c, _ in bin_)
            print(f"  {low:.2f}-{min(high, 1):.2f} {len(bin_):5}  said {said:.1%}, right "
                  f"{statistics.mean(r for _, r in bin_):.1%}")  # fmt: skip
    if options.plot:
        options.plot.write_text(calibration(sure), "utf-8")
    if options.show:
        for row in rows:
            if not row.right:
                show(row)


if __name__ == "__main__":
    main()
