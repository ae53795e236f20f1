"""Predicted against real seconds on ten jobs; nothing is learned from one job for the next.

python benchmarks/replay/cost.py [job...]

Each is asked for an outer value, an inner one where it has one, and a stretch of iterations;
`first` is the prediction before this project has replayed anything.
"""

import os
import statistics
import sys

from common import ENVIRONMENT, JOBS, command, probe, project

from rearview._history import history

LONG = {"long", "images"}
ASKED = (("OUTER", ()), ("INNER", ("--at", "2:8")), ("INNER", ()))


def main():
    os.environ.update(ENVIRONMENT)
    names = sys.argv[1:] or sorted(path.stem for path in JOBS.glob("*.py") if path.stem not in LONG)
    print("| job | asked | predicted s | real s | error |\n|---|---|---|---|---|")
    errors = []
    for name in names:
        with project(name) as folder:
            command(folder, "run", "--every", "train.py")
            text = (folder / "train.py").read_text()
            loop = next(
                (
                    line.split()[1]
                    for line in text.splitlines()
                    if line.strip().startswith("for epoch")
                ),
                None,
            )
            for kind, words in ASKED:
                (folder / "train.py").write_text(text)
                if not probe(folder, kind) or (words and loop is None):
                    continue
                at = f"{loop}={words[1]}" if words else None
                past = history(folder)
                guess = past.plan(["asked"], at=at, workers=1).plan.seconds
                report = past.backfill(["asked"], at=at, workers=1)
                assert report.proved, (report.proof, report.refusals)
                real = sum(one.seconds for one in report.outcomes)
                error = abs(guess - real) / real
                errors.append(error)
                said = kind.lower() + (f" at {at}" if at else "")
                print(f"| {name} | {said} | {guess:.2f} | {real:.2f} | {error:.0%} |", flush=True)
    print(
        f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%} over {len(errors)} questions"
    )


if __name__ == "__main__":
    main()
