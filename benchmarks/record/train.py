"""Plain training of one workload, as a user would write it; prints what it took.

The hands-free way is `rearview run train.py WORKLOAD …`: this file knows nothing of Rearview.
"""

import json
import resource
import sys
import time

import torch
from workloads import WORKLOADS


def main():
    name, epochs, threads, part = sys.argv[1:5]
    torch.set_num_threads(int(threads))
    job = WORKLOADS[name](float(part))
    entered, began, cpu = time.perf_counter(), 0.0, 0.0
    for epoch in range(int(epochs) + 1):
        job.train()
        if epoch == 0:  # the first epoch allocates; `whole` counts it too
            began, cpu = time.perf_counter(), time.process_time()
    ended = time.perf_counter()
    time.sleep(1.0)  # what threads still do counts as well
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spans = {"span": [began, ended], "whole": [entered, ended]}
    print(json.dumps({**spans, "cpu": cpu, "peak_mb": peak / 1024}))


if __name__ == "__main__":
    main()
