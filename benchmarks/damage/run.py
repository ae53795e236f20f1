"""Change one bit of a real store, a thousand times: what do the answers say then, and what `verify`?

    python benchmarks/damage/run.py [--flips 1000] [--seed 1]

Every file of the store is met in turn. A changed answer that `verify` calls ok, an internal error (exit
code 70), an answer about another run that changed, and a store that is not whole after `verify --repair`
are each counted as wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from damage import build, expected_of, flips, judge


def main() -> None:
    """Print one line per wrong flip, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        whole = Path(folder, "whole")
        whole.mkdir()
        build(whole)
        expected = expected_of(whole, Path(folder, "asked"))
        counts: Counter[str] = Counter()
        for number, flip in enumerate(flips(whole, given.flips, given.seed), 1):
            found = judge(whole, expected, flip, Path(folder, f"{number}"))
            counts["flips"] += 1
            counts["changed an answer"] += found.changed
            counts["named by verify"] += found.named
            counts["wrong"] += bool(found.wrong)
            for what in found.wrong:
                print(f"{found.file} byte {found.offset} bit {found.bit}: {what}", flush=True)
            if number % 100 == 0:
                print(dict(counts), file=sys.stderr, flush=True)
    for what, count in counts.items():
        print(f"{count:6d} {what}")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
