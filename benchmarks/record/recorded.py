"""Print what Rearview says of the newest run in a folder, and what a restore of it takes."""

import json
import sys
import time
from pathlib import Path

import rearview
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project


def main():
    folder = Path(sys.argv[1])
    report = rearview.history(folder).show()
    costs = report.costs
    result = {
        # the warm-up before it is a loop, too
        "saved": sum(str(each.point).startswith("epoch") for each in report.checkpoints),
        "logical_mb": report.logical / 1e6,
        "stored_mb": report.stored / 1e6,
        "blocking_ms": 1e3 * costs["waited"] / max(costs["saved"], 1),
        "told": costs["overhead"],
    }
    if report.checkpoints:
        loaded = Checkpoints(Project.open(folder)).load(report.checkpoints[-1])
        parts = report.checkpoints[-1].parts
        buffers = {key: bytearray(ref.nbytes) for key, ref in parts.items()}
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            loaded.fill(buffers)
            taken.append(1e3 * (time.perf_counter() - began))
        result["restore_ms"] = min(taken)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
