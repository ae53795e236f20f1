"""Plain training of one workload, as a user would write it; prints what it took.

The hands-free way is `rearview run train.py WORKLOAD`.
"""

import json
import resource
import sys
import time

import torch
from workloads import WORKLOADS


def main():
    name, epochs, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    _, train = WORKLOADS[name]()
    train()  # allocations of the first epoch are nobody's overhead
    wall, cpu = time.perf_counter(), time.process_time()
    for epoch in range(epochs):  # noqa: B007 - the loop that Rearview sees
        train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"wall": wall, "cpu": cpu, "peak_mb": peak / 1024}))


if __name__ == "__main__":
    main()
