"""The write and restore path against what the machine can do at best, in one interleaved run.

    python benchmarks/record/path.py [--mb 1200] [--rounds 5] [--folder /tmp]

Blocking time against a warm memcpy of the same tensors, time until durable against a raw O_DIRECT
write of the same bytes, restore against a plain read from the page cache; the wait where the state is
only read for a while after the boundary, as weights are until the optimizer's next step, so that it
is copied late; and the wait for a state of which all but 3 % is frozen. Medians over rounds; the ratio is taken within each round.
"""

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from rearview.config import Settings
from rearview.model import Edge, Point, Snapshot, Step
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project


def clock(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def raw_write(path, view):
    """Write `view` past the page cache, one file, 8 MB at a time, and sync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    for at in range(0, len(view), 8 << 20):
        os.pwrite(fd, view[at : at + (8 << 20)], at)
    os.fsync(fd)
    os.close(fd)


def report(name, ours, best):
    ratios = [a / b for a, b in zip(ours, best, strict=True)]
    print(
        f"{name:<42} {statistics.median(ours) * 1e3:>9.1f} ms  best {statistics.median(best) * 1e3:>8.1f} ms"
        f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/tmp")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run(place, args)
    finally:
        shutil.rmtree(place)


def run(place, args):
    size, count = 8 << 20, args.mb // 8
    rng = np.random.default_rng(0)
    seed = rng.standard_normal(size // 8)
    state = {f"t{i}": seed + i for i in range(count)}
    total = size * count
    plain = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(plain, dtype="f8").reshape(count, -1)
    target[:] = 0

    store = Checkpoints(Project.create(place))
    writer = Writer(store, Settings(), warn=print)
    writer.prepare(total + (1 << 20))

    def memcpy():
        for row, array in zip(target, state.values(), strict=True):
            row[:] = array

    def submit(seq):
        assert writer.submit(
            Snapshot("r", seq, Point((Step("epoch", seq),)), Edge.START, b"", state), wait=True
        )

    block, copy, durable, raw, restore, read = [], [], [], [], [], []
    for seq in range(args.rounds + 1):
        for key in state:
            state[key] += 1
        copy.append(clock(memcpy))
        block.append(clock(lambda s=seq: submit(s)))
        durable.append(clock(writer.drain))
        raw.append(clock(lambda: raw_write(place / "raw", memoryview(plain))))
        found = store.of("r")[-1]
        files = [store.objects.file(found.parts[key]) for key in state]
        views = [memoryview(row).cast("B") for row in target]

        def plain_read(files=files, views=views):
            for file, view in zip(files, views, strict=True):
                fd = os.open(file, os.O_RDONLY)
                at = 0
                while at < len(view):
                    at += os.preadv(fd, [view[at:]], at)
                os.close(fd)

        plain_read()  # into the page cache
        read.append(clock(plain_read))
        restore.append(clock(lambda f=found: store.load(f).fill(state)))
        store.delete(found.id)
        for file in files:
            file.unlink(missing_ok=True)
    print(f"{total / 1e6:.0f} MB in {count} tensors, {args.rounds} rounds, store in {args.folder}")
    report("wait of the training thread / memcpy", block[1:], copy[1:])
    report("until durable / raw O_DIRECT write", durable[1:], raw[1:])
    report("restore, checked / page-cache read", restore[1:], read[1:])
    print(f"staging memory {writer.staging / 1e6:.0f} MB")

    waits, copies = [], []
    for seq in range(50, 51 + args.rounds):
        for key in state:
            state[key] += 1
        copies.append(clock(memcpy))
        began = time.perf_counter()
        assert writer.submit(
            Snapshot("l", seq, Point((Step("epoch", seq),)), Edge.START, b"", state)
        )
        waits.append(time.perf_counter() - began)
        until = time.perf_counter() + 5 * copies[-1]
        while time.perf_counter() < until:
            sum(float(array.sum()) for array in state.values())
        writer.drain()
    print("copied late: waits in ms " + ", ".join(f"{wait * 1e3:.1f}" for wait in waits))
    report("wait, copied late / memcpy", waits[1:], copies[1:])
    print(f"{writer.costs.skipped} skipped of {len(waits)}")
    writer.close()

    # other bytes than before, so that they are new to the store
    frozen = {key: array + 0.5 for key, array in list(state.items())[: count // 3]}
    changing = {"head": np.zeros(3 * (1 << 20) // 2)}
    writer = Writer(store, Settings(), warn=print)
    waits, copies = [], []
    spare = np.empty_like(changing["head"])
    for seq in range(100, 104 + args.rounds):
        changing["head"] += 1
        copies.append(clock(lambda: np.copyto(spare, changing["head"])))
        began = time.perf_counter()
        writer.submit(
            Snapshot("f", seq, Point(), Edge.START, b"", {**frozen, **changing}), wait=True
        )
        waits.append(time.perf_counter() - began)
        writer.drain()
    nbytes = sum(each.nbytes for each in frozen.values())
    stored = writer.costs.stored - nbytes
    changed = changing["head"].nbytes * len(waits)
    print(
        f"{nbytes / 1e6:.0f} MB frozen, {changing['head'].nbytes / 1e6:.1f} MB changing: waits in ms "
        + ", ".join(f"{wait * 1e3:.1f}" for wait in waits)
    )
    report("wait, frozen known / memcpy of the changed", waits[3:], copies[3:])
    print(f"stored / changed bytes {stored / changed:.3f}")
    writer.close()


if __name__ == "__main__":
    main()
