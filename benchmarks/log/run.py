"""Claim: a log call of five scalars takes at most 10 µs and survives a kill.

    PYTHONPATH=src python benchmarks/log/run.py

Peers that are installed are measured in the same run, interleaved: plain json with an unbuffered
write, tensorboardX, Weights & Biases offline, MLflow with a local SQLite store. CPU time counts the
whole process, background threads included; `kept` says how many of the calls that had returned
were there after kill -9.
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

VALUES = {"loss": 0.123456789, "acc": 0.91, "lr": 1e-3, "grad_norm": 3.14159}
ROUNDS = 7


def rearview(folder):
    from rearview.model import Point, Step
    from rearview.store.records import RecordFile, encode_point

    out, at = RecordFile(folder, "r"), encode_point(Point((Step("epoch", 3), Step("step", 20))))
    items = list(VALUES.items())
    return (lambda i: out.append(at, [("i", i), *items])), 20_000


def plain_json(folder):
    fd = os.open(folder / "x.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(i):
        body = {"epoch": 3, "step": 20, "time": time.time(), **VALUES, "i": i}
        os.write(fd, json.dumps(body).encode() + b"\n")

    return log, 20_000


def tensorboardx(folder):
    from tensorboardX import SummaryWriter

    out = SummaryWriter(str(folder))

    def log(i):
        for name, value in (("i", i), *VALUES.items()):
            out.add_scalar(name, value, i)

    return log, 2_000


def wandb_offline(folder):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb

    run = wandb.init(project="bench")
    return (lambda i: run.log({**VALUES, "i": i})), 1_000


def mlflow_sqlite(folder):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/m.db")
    mlflow.start_run()
    return (lambda i: mlflow.log_metrics({**VALUES, "i": i}, step=i)), 100


PEERS = {
    "tensorboardX": ("tensorboardX", tensorboardx),
    "wandb offline": ("wandb", wandb_offline),
    "mlflow sqlite": ("mlflow", mlflow_sqlite),
}
WAYS = {"rearview": rearview, "json + write": plain_json} | {
    way: make for way, (library, make) in PEERS.items() if importlib.util.find_spec(library)
}

KEPT = {
    "rearview": lambda folder: _all(folder, "*.jsonl").count(b'["i"'),
    "json + write": lambda folder: _all(folder, "x.jsonl").count(b"\n"),
    "tensorboardX": lambda folder: _all(folder, "events*").count(b"grad_norm"),
}
"""How many log calls a folder holds."""


def _all(folder: Path, pattern: str) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob(pattern))


def killed(way: str) -> str:
    """Return how many of the calls that had returned were kept after kill -9."""
    with tempfile.TemporaryDirectory() as name:
        argv = [sys.executable, __file__, "--child", way, name]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
        done = -1
        while done < 1_000:
            done = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split(b"\n")[:-1]
        child.wait()
        done = (int(rest[-1]) if rest else done) + 1
        return f"{min(KEPT[way](Path(name)), done)} of {done}"


def main() -> None:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    works: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        logs = {}
        for way, start in WAYS.items():
            folder = Path(name, way.replace(" ", "_"))
            folder.mkdir()
            logs[way] = start(folder)
        for _ in range(ROUNDS):
            for way, (log, number) in logs.items():
                begun, worked = time.perf_counter(), time.process_time()
                for i in range(number):
                    log(i)
                times[way].append((time.perf_counter() - begun) / number * 1e6)
                works[way].append((time.process_time() - worked) / number * 1e6)
        about = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
        print(f"five scalars a call, medians of {ROUNDS}; {about}")
        print("| way            | µs a call |   of CPU |  ratio | kept after kill -9 |")
        base = statistics.median(works["rearview"])
        for way, seen in times.items():
            mid, work = statistics.median(seen), statistics.median(works[way])
            kept = killed(way) if way in KEPT else "-"
            print(f"| {way:14} | {mid:9.1f} | {work:8.1f} | {work / base:6.1f} | {kept} |")
    os._exit(0)  # peers with background threads take long to leave


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        log, _ = WAYS[sys.argv[2]](Path(sys.argv[3]))
        for i in range(10**9):
            log(i)
            os.write(1, b"%d\n" % i)
    main()
