"""Fabricate a large store: many runs, many names, one very long run.

python benchmarks/ui/store.py FOLDER [RUNS]

The shape is that of a tracker's issue about a page that would not open: 75,000 runs and 1,500 names. Here
75,000 runs log 20 names at 5 points each, 200 more runs log 1,500 names at 10 points, and one run logs ten
million values of one name. Files are written as a sealed run leaves them (docs/store-format.md); they hold
no checkpoints and no source, so nothing in them can be replayed.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rearview.durable_files import add_check
from rearview.store.json_files import encode
from rearview.store.project import Project
from rearview.store.tables.convert_to_parquet import FORMAT, NameSummary, Summary, write_check

BEGAN = 1_760_000_000.0
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("process", pa.string()),
        ("attempt", pa.int32()),
        ("replay", pa.string()),
        ("seq", pa.int64()),
        ("time", pa.float64()),
        ("path", pa.string()),
        ("indices", pa.list_(pa.int64())),
        ("labels", pa.string()),
        ("name", pa.string()),
        ("kind", pa.string()),
        ("number", pa.float64()),
        ("whole", pa.int64()),
        ("text", pa.string()),
    ]
)


def write(project: Project, k: int, names: list[str], values: np.ndarray, args: dict) -> str:
    """Write one run that logged `values`, a row per point and a column per name, and has ended."""
    started = BEGAN + 60.0 * k
    run = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started)) + f"-{k % 65536:04x}"
    folder = project.runs / run
    folder.mkdir()
    points = len(values)
    process = f"{started:.0f}-1"
    about = {
        "format": 2, "id": run, "version": "", "script": "train.py", "started": started, "cwd": "/",
        "argv": [f"--{n}={v}" for n, v in args.items()], "args": args, "host": "node", "pid": 1,
        "boot": "x", "space": "x", "born": 1, "heartbeat": 10.0, "facts": {},
    }  # fmt: skip
    (folder / "run.json").write_bytes(add_check(encode(about)))
    end = {"format": 2, "time": started + 40 + k % 50, "exit_code": 0}
    (folder / "end.json").write_bytes(add_check(encode(end)))
    rows = points * len(names)
    epoch = np.repeat(np.arange(points), 1)
    columns = [
        pa.repeat(run, rows),
        pa.repeat(process, rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.nulls(rows, pa.string()),
        pa.array(
            np.tile(epoch * len(names), len(names)) + np.repeat(np.arange(len(names)), points)
        ),
        pa.array(started + np.tile(epoch * 1e-4, len(names))),
        pa.repeat("epoch", rows),
        pa.ListArray.from_arrays(
            pa.array(np.arange(rows + 1, dtype=np.int32)), pa.array(np.tile(epoch, len(names)))
        ),
        pa.nulls(rows, pa.string()),
        pa.array(np.repeat(names, points)),
        pa.repeat("float", rows),
        pa.array(values.T.ravel()),
        pa.nulls(rows, pa.int64()),
        pa.nulls(rows, pa.string()),
    ]
    summary = Summary(
        format=FORMAT, run=run, process=process, attempt=0, replay=None, rows=rows, unique=True,
        damaged=0, names=[NameSummary("epoch", name, {"float": points}) for name in names],
    )  # fmt: skip
    mark = {"rearview": msgspec.json.encode(summary).decode()}
    table = pa.Table.from_arrays(columns, schema=SCHEMA).replace_schema_metadata(mark)
    file = folder / "records-1-0.parquet"
    pq.write_table(table, file, compression="zstd")
    write_check(file)
    return run


def make(folder: Path, runs: int = 75_000, wide: int = 200, long: int = 10_000_000) -> None:
    """Write the whole store; `wide` runs have 1,500 names, one run has `long` values."""
    project = Project.create(folder)
    project.runs.mkdir(exist_ok=True)
    numbers = np.random.default_rng(0)
    names = ["loss", "acc", *(f"metric_{k:02d}" for k in range(18))]
    choose = random.Random(0)
    begun = time.monotonic()
    for k in range(runs):
        args = {
            "lr": choose.choice([1e-4, 3e-4, 1e-3, 3e-3, 1e-2]),
            "width": choose.choice([64, 128, 256, 512]),
            "optimizer": choose.choice(["adam", "sgd", "lion"]),
            "seed": k % 5,
        }
        fall = 1 / (1 + np.arange(5))[:, None]
        values = fall * numbers.uniform(0.5, 1.5, 20) - math.log10(args["lr"]) * 0.1
        write(project, k, names, values, args)
        if k and k % 10_000 == 0:
            print(f"{k:,} runs after {time.monotonic() - begun:.0f} s", flush=True)
    many = [f"layer{a:02d}/{b}{c}" for a in range(50) for b in "wb" for c in range(15)]
    for k in range(runs, runs + wide):
        write(project, k, many, numbers.normal(size=(10, len(many))), {"lr": 0.1, "seed": k})
    steps = np.arange(long)
    walk = np.cumsum(numbers.normal(size=long)) / 1000 + np.sin(steps / 1e5)
    write(project, runs + wide, ["signal"], walk[:, None], {"lr": 0.5, "seed": 0})
    made = {"runs": runs, "wide": wide, "long": long, "seconds": time.monotonic() - begun}
    print(json.dumps(made))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 75_000)
