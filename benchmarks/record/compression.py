"""What compressing objects saves and costs, by kind of data, in one interleaved run.

    python benchmarks/record/compression.py [--mb 64] [--rounds 5] [--folder /tmp]

Each kind is put and restored as the store would, and plain; `sample` is what the decision costs, as
a share of what hashing the object costs. MB per processor second; medians over rounds.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from rearview.store.checkpoints import objects as store
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.checkpoints.objects import Batch, Objects, digest
from rearview.store.project import Project


class Always(CompressionPolicy):
    """Compresses everything, to see what else would come of it."""

    def predicted_share(self, *_):
        return 1.0


def frames(rng, nbytes):
    """Screens of a game: flat ground, a few things that move."""
    made = np.zeros((nbytes // (84 * 84) + 1, 84, 84), "u1")
    for k, frame in enumerate(made):
        frame[70:] = 87
        for x, y in rng.integers(0, 60, (6, 2)):
            frame[x : x + 8, y : y + 8] = 40 + k % 200
    return made.reshape(-1)[:nbytes]


def kinds(nbytes):
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(nbytes // 4) * 0.02).astype("f4")
    return {
        "weights, float32": weights,
        "second moments, float32": weights**2 * np.float32(1e-3),
        "weights, bfloat16": np.resize((weights.view("u4") >> 16).astype("u2"), nbytes // 2),
        "weights, float16": np.resize(weights.astype("f2"), nbytes // 2),
        "noise, uint8": rng.integers(0, 256, nbytes, "u1"),
        "after a ReLU, float32": np.maximum(weights, 0),
        "zeros, uint8": np.zeros(nbytes, "u1"),
        "a third filled, float32": np.where(np.arange(len(weights)) * 3 < len(weights), weights, 0),
        "screens, uint8": frames(rng, nbytes),
        "tokens, int64": rng.zipf(1.3, nbytes // 8).clip(0, 50_000),
        "permutation, int64": rng.permutation(nbytes // 8),
        "mask, bool": rng.integers(0, 2, nbytes, "u1").astype(bool),
        "one-hot, float32": np.eye(64, dtype="f4")[rng.integers(0, 64, nbytes // 256)],
    }


def timed(action, *args):
    began = time.thread_time()
    result = action(*args)
    return time.thread_time() - began, result


def put(objects, view, oid, worth):
    with Batch(objects, worth) as batch:
        ref = batch.put(view, oid)
        batch.commit()
    return batch.stored, ref


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/tmp")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run(Objects(Project.create(place)), args)
    finally:
        shutil.rmtree(place)


def run(objects, args):
    store.LARGEST_SHARE = math.inf
    into = memoryview(bytearray(args.mb << 20))
    print("| data | kept | sample / hash | put | put plain | restored | plain |")
    print("|---|---|---|---|---|---|---|")
    for name, array in kinds(args.mb << 20).items():
        view = memoryview(np.ascontiguousarray(array)).cast("B")
        seen = {"sample": [], "hash": []}
        worth = CompressionPolicy()
        chosen = worth.predicted_share(name, view) is not None
        for _ in range(args.rounds):
            spent, oid = timed(digest, view)
            seen["hash"].append(spent)
            seen["sample"].append(timed(worth.sample, view)[0])
            for how, policy in (("packed", Always()), ("plain", None)):
                spent, (stored, ref) = timed(put, objects, view, oid, policy)
                seen.setdefault(f"put {how}", []).append(spent)
                spent, _ = timed(objects.read_into, ref, into[: len(view)])
                seen.setdefault(f"get {how}", []).append(spent)
                seen.setdefault(f"stored {how}", []).append(stored)
                objects.delete(oid)
        mid = {what: statistics.median(values) for what, values in seen.items()}
        speed = {what: f"{len(view) / 1e6 / spent:,.0f}" for what, spent in mid.items() if spent}
        share = mid["stored packed"] / len(view)
        print(
            f"| {name} | {share:.3f}{'' if chosen else ', so plain'} | {mid['sample'] / mid['hash']:.2%} "
            f"| {speed['put packed']} | {speed['put plain']} | {speed['get packed']} | {speed['get plain']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
