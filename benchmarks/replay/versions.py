"""A backfill over many versions of a script: it runs through, in bounded memory.

python benchmarks/replay/versions.py [versions]
"""

import os
import re
import resource
import sys
import time

from common import ENVIRONMENT, SOURCE, command, project

SCRIPT = """import random

random.seed(0)
rate = 0.1
weight = 5.0
for epoch in range(20):
    for step in range(50):
        grad = weight * random.gauss(1, 0.1)
        weight -= rate * grad / 50
"""


def main():
    versions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    sys.path.insert(0, SOURCE)
    os.environ.update(ENVIRONMENT)
    with project("plain") as folder:
        script = folder / "train.py"
        begun = time.perf_counter()
        for k in range(versions):
            text = re.sub("rate = .*", f"rate = {0.1 + k / 1000}", SCRIPT)
            if k >= versions // 2:
                text = text.replace("weight", "w")  # a rename half way
            script.write_text(text)
            command(folder, "run", "train.py")
        recorded = time.perf_counter() - begun
        name = "w" if versions > 1 else "weight"
        lines = script.read_text() + f"    rearview.log('asked', {name})\n"
        script.write_text(lines.replace("import random", "import random\nimport rearview"))
        from rearview.past import history

        os.chdir(folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begun = time.perf_counter()
        report = history(folder).backfill(["asked"])
        took = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows = history(folder).table("asked").pandas()
    print(f"{versions} versions recorded in {recorded:.0f} s")
    print(f"backfill {took:.0f} s ({took / versions * 1000:.0f} ms each), {report.proof}")
    print(f"{len(rows)} rows, {rows['asked'].notna().sum()} filled, {len(report.refusals)} refused")
    print(f"peak memory of the backfill {after:.0f} MB ({after - before:.0f} MB above its start)")


if __name__ == "__main__":
    main()
