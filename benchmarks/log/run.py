"""Claim: a log call of five scalars takes at most 10 µs and survives a kill.

    PYTHONPATH=src python benchmarks/log/run.py

Peers that are installed are measured in the same run, interleaved: plain json with an unbuffered
write, tensorboardX, Weights & Biases offline, MLflow with a local file store. Only the first two
columns of the table say something about speed; `kept` says how many of the calls that had
returned were there after kill -9.
"""

import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VALUES = {"loss": 0.123456789, "acc": 0.91, "lr": 1e-3, "grad_norm": 3.14159, "tokens": 17}
ROUNDS = 7


def rearview(folder):
    from rearview.model import Point, Step
    from rearview.store.records import RecordFile, encode_point

    out, at = RecordFile(folder, "r"), encode_point(Point((Step("epoch", 3), Step("step", 20))))

    def log(i):
        out.append(at, [("i", i), *list(VALUES.items())[1:]])

    def count():
        from rearview.store.records import read

        return sum(r.name == "i" for file in folder.glob("*.jsonl") for r in read(file))

    return log, count, 20_000


def plain_json(folder):
    fd = os.open(folder / "x.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(i):
        body = {"epoch": 3, "step": 20, "time": time.time(), **VALUES, "i": i}
        os.write(fd, json.dumps(body).encode() + b"\n")

    return log, lambda: (folder / "x.jsonl").read_bytes().count(b"\n"), 20_000


def tensorboardx(folder):
    from tensorboardX import SummaryWriter

    out = SummaryWriter(str(folder))

    def log(i):
        for name, value in VALUES.items():
            out.add_scalar(name, value, i)

    def count():
        data = b"".join(file.read_bytes() for file in folder.glob("events*"))
        return data.count(b"tokens")

    return log, count, 2_000


def wandb_offline(folder):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb

    run = wandb.init(project="bench")
    return (lambda i: run.log({**VALUES, "i": i})), lambda: -1, 1_000


def mlflow_file(folder):
    import mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri(f"sqlite:///{folder}/m.db")
    mlflow.start_run()
    return (lambda i: mlflow.log_metrics(VALUES, step=i)), lambda: -1, 100


WAYS = {"rearview": rearview, "json + write": plain_json}
if importlib.util.find_spec("tensorboardX"):
    WAYS["tensorboardX"] = tensorboardx
if importlib.util.find_spec("wandb"):
    WAYS["wandb offline"] = wandb_offline
if importlib.util.find_spec("mlflow"):
    WAYS["mlflow sqlite"] = mlflow_file


def killed(way: str) -> str:
    """Return how many of the calls that had returned were kept after kill -9."""
    with tempfile.TemporaryDirectory() as name:
        argv = [sys.executable, __file__, "--child", way, name]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
        done = -1
        while done < 1_000:
            done = int(child.stdout.readline() or 10**9)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        done = int(rest[-1]) if rest else done
        _, count, _ = WAYS[way](Path(name) / "again") if way.startswith("mlflow") else (0, None, 0)
        if count is None:
            folder = Path(name)
            kept = {
                "rearview": lambda: sum(
                    line.count(b'"i"') for line in (f.read_bytes() for f in folder.glob("*.jsonl"))
                ),
                "json + write": lambda: (folder / "x.jsonl").read_bytes().count(b"\n"),
                "tensorboardX": lambda: b"".join(
                    f.read_bytes() for f in folder.glob("events*")
                ).count(b"tokens"),
            }[way]()
            return f"{min(kept, done + 1)} of {done + 1}"
        return "-"


def main() -> None:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        logs = {}
        for way, make in WAYS.items():
            folder = Path(name, way.replace(" ", "_"))
            folder.mkdir()
            logs[way] = make(folder)
        for _ in range(ROUNDS):
            for way, (log, _, number) in logs.items():
                begun = time.perf_counter()
                for i in range(number):
                    log(i)
                times[way].append((time.perf_counter() - begun) / number)
        print(
            f"five scalars a call, medians of {ROUNDS}; {platform.machine()}, {os.cpu_count()} cores"
        )
        print(
            f"| {'way':14} | {'µs a call':>10} | {'best':>8} | {'ratio':>8} | kept after kill -9 |"
        )
        base = statistics.median(times["rearview"])
        for way, seen in times.items():
            kept = killed(way) if way in {"rearview", "json + write", "tensorboardX"} else "-"
            mid = statistics.median(seen)
            print(
                f"| {way:14} | {mid * 1e6:10.1f} | {min(seen) * 1e6:8.1f} | {mid / base:8.1f} | {kept} |"
            )
    os._exit(0)  # peers with background threads take long to leave


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        log, _, _ = WAYS[sys.argv[2]](Path(sys.argv[3]))
        for i in range(10**9):
            log(i)
            os.write(1, b"%d\n" % i)
    main()
