"""A forked child that writes raw memory, against a copy into staging memory and a thread.

    python benchmarks/record/fork.py [--mb 1200] [--rounds 5] [--threads 1] [--folder /tmp]

Both leave the same bytes on disk, unhashed. `blocks` is what the training thread waits for; `after`
is by how much the next two steps, which write all of the state, are slower than steps alone: page
faults of the parent after a fork, and the competition for memory and cores. `in all` is the sum,
which is what a training run pays per checkpoint. Interleaved, medians over rounds.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

CHUNK = 8 << 20


def write(path, views, bounce):
    """Write `views` end to end past the page cache, through aligned memory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
    at = 0
    for view in views:
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            bounce[: len(piece)] = piece
            os.pwrite(fd, bounce[: len(piece) + -len(piece) % 4096], at)
            at += CHUNK
    os.fsync(fd)
    os.close(fd)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parameters = [torch.nn.Parameter(torch.randn(1 << 20)) for _ in range(args.mb // 12)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer = torch.optim.AdamW(parameters)
    step = optimizer.step
    step()
    tensors = [t.detach() for p in parameters for t in (p, *optimizer.state[p].values())]
    views = [memoryview(t.numpy()).cast("B") for t in tensors if t.numel() > 1]
    staging = memoryview(mmap.mmap(-1, sum(map(len, views)), mmap.MAP_PRIVATE))
    staging[:] = bytes(len(staging))
    bounce = memoryview(mmap.mmap(-1, CHUNK))
    path = Path(tempfile.mkdtemp(dir=args.folder)) / "raw"

    def copied():
        at = 0
        for view in views:
            staging[at : at + len(view)] = view
            at += len(view)
        thread = threading.Thread(target=write, args=(path, [staging], bounce))
        thread.start()
        return thread.join

    def forked():
        pid = os.fork()
        if not pid:
            write(path, views, bounce)
            os._exit(0)
        return lambda: os.waitpid(pid, 0)

    ways = {"copy and thread": copied, "fork": forked}
    found = {name: [] for name in ways}
    alone = []
    for _ in range(args.rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            step()
            step()
            plain = time.perf_counter() - begun
            alone.append(plain / 2)
            begun = time.perf_counter()
            finish = way()
            blocks = time.perf_counter() - begun
            step()
            step()
            after = time.perf_counter() - begun - blocks - plain
            finish()
            found[name].append((blocks, after, blocks + after, time.perf_counter() - begun))
    path.unlink()
    path.parent.rmdir()
    print(f"{len(staging) / 1e6:.0f} MB, a step takes {statistics.median(alone):.2f} s")
    print(f"{'':<18}{'blocks':>10}{'after':>10}{'in all':>10}{'durable':>10}   (seconds)")
    for name, rows in found.items():
        print(
            f"{name:<18}"
            + "".join(f"{statistics.median(c):>10.3f}" for c in zip(*rows, strict=True))
        )


if __name__ == "__main__":
    main()
