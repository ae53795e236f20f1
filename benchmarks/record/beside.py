"""What training loses to each part of the work that a checkpoint makes beside it.

    python benchmarks/record/beside.py [adamw25] [--rounds 6] [--folder /tmp]

Half an epoch on one thread while another thread does nothing but copy, hash or write 400 MB, again
and again. Medians over interleaved rounds; what is lost is told for each time that 400 MB were done.
"""

import argparse
import mmap
import os
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from workloads import WORKLOADS

from rearview.runtime.saving.late_copy import CopyRange, copy_if_mapped

SIZE = 400 << 20


def memory():
    held = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(held, dtype="u1")
    array[:] = 1
    return array


def measure(job, action):
    """Return the seconds of training, and how often the action was done beside it."""
    over, done = threading.Event(), []

    def work():
        while not over.is_set():
            action()
            done.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    began = time.perf_counter()
    job.train()
    took = time.perf_counter() - began
    over.set()
    thread.join()
    return took, len(done)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", nargs="?", default="adamw25", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = WORKLOADS[args.workload](0.5)
    job.train()
    source, target = memory(), memory()
    view, file = memoryview(target), args.folder / f"beside-{os.getpid()}"

    def write():
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        for at in range(0, SIZE, 8 << 20):
            os.pwrite(fd, view[at : at + (8 << 20)], at)
        os.fsync(fd)
        os.close(fd)

    actions = {
        "nothing": lambda: time.sleep(0.05),
        "copy": lambda: copy_if_mapped(CopyRange(target.ctypes.data, source.ctypes.data, SIZE)),
        "hash": lambda: blake3(view).digest(),
        "write": write,
    }
    found = {name: [] for name in actions}
    try:
        for _ in range(args.rounds):
            for name, action in actions.items():
                found[name].append(measure(job, action))
    finally:
        file.unlink(missing_ok=True)
    alone = statistics.median(took for took, _ in found["nothing"])
    for name, rows in found.items():
        took = statistics.median(seconds for seconds, _ in rows)
        rate = sum(count for _, count in rows) / sum(seconds for seconds, _ in rows)
        print(
            f"{args.workload} beside {name:8} {took:6.3f} s {took / alone - 1:+7.1%}, "
            f"each time {(took / alone - 1) / rate * 1e3:+6.1f} ms"
        )


if __name__ == "__main__":
    main()
