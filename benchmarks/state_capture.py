"""How long capture blocks the program, against the copies people make by hand.

    PYTHONPATH=src python benchmarks/state_capture.py

Four programs: 500 parameters under AdamW, a deep residual net with BatchNorm under AdamW (1,460 small
tensors, most of them born after the loop was entered), a list of 10^6 numbers, a replay buffer of
10^5 transitions. Medians of interleaved repetitions, in milliseconds.
"""

import copy
import io
import pickle
import random
import statistics
import time
from collections import deque

import numpy as np
import torch

from rearview.state.capture import capture
from rearview.state.compare import compare
from rearview.state.object_numbers import Anchors
from rearview.state.restore import restore

ROUNDS = 7


def adamw():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(250)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": []}


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(width, width, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, width, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def residual():
    torch.manual_seed(0)
    blocks = [Residual(24) for _ in range(40)]
    head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(24, 10))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 24, 3, padding=1), *blocks, *head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "losses": []}


def residual_step(names):
    torch_step(names, torch.randn(2, 3, 8, 8))


def adamw_step(names):
    torch_step(names, torch.randn(4, 16))


def torch_step(names, data):
    names["optimizer"].zero_grad()
    loss = names["model"](data).square().mean()
    loss.backward()
    names["optimizer"].step()
    names["losses"].append(loss.item())


def numbers():
    return {"numbers": list(range(1_000_000)), "seen": 0}


def numbers_step(names):
    names["seen"] += 1
    names["numbers"][names["seen"]] = random.random()


def buffer():
    return {"buffer": deque(maxlen=100_000), "last": np.zeros(8, np.float32)}


def buffer_step(names):
    for _ in range(60_000):
        fresh = names["last"] + 1
        names["buffer"].append((names["last"], 1, 0.5, fresh, False))
        names["last"] = fresh


PROGRAMS = {
    "500 parameters, AdamW": (adamw, adamw_step),
    "residual net, BatchNorm": (residual, residual_step),
    "list of 10^6 numbers": (numbers, numbers_step),
    "replay buffer of 10^5": (buffer, buffer_step),
}


def torch_save(names):
    out = io.BytesIO()
    kept = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in names.items()}
    torch.save(kept, out)


def measure(work):
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main():
    head = ("program", "anchors", "walk", "capture", "restore", "compare", "torch.save", "deepcopy")
    print(("{:<24}" + "{:>12}" * 7).format(*head))
    for title, (setup, step) in PROGRAMS.items():
        names = setup()
        roots = {f"local:main:{name}": value for name, value in names.items()}
        anchors = Anchors.walk(roots, project=lambda _: False)
        for _ in range(2):
            step(names)
        roots = {f"local:main:{name}": value for name, value in names.items()}
        then = capture(anchors, roots)
        kept = {key: bytes(data) for key, data in then.buffers.items()}
        ways = {
            "walk": lambda r=roots: Anchors.walk(r, project=lambda _: False),
            "capture": lambda a=anchors, r=roots: capture(a, r),
            "restore": lambda a=anchors, t=then, k=kept: restore(a, {}, t.skeleton, k.__getitem__),
            "compare": lambda a=anchors, t=then, k=kept: compare(a, t, t.skeleton, k.__getitem__),
            "torch.save": lambda n=names: torch_save(n),
            "deepcopy": lambda n=names: copy.deepcopy(dict(n)),
        }
        taken = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, work in ways.items():
                taken[way].append(measure(work))
        row = [f"{statistics.median(times):.1f}" for times in taken.values()]
        print(("{:<24}" + "{:>12}" * 7).format(title, len(anchors), *row))
        plain = statistics.median(measure(lambda n=names: pickle.dumps(n, 5)) for _ in range(3))
        print(
            f"    skeleton {len(then.skeleton):,} bytes, buffers {len(kept)}; pickle {plain:.1f} ms"
        )


if __name__ == "__main__":
    main()
