"""Make a small project as a person would have one: runs of three versions, a probe, images, histograms.

python benchmarks/ui/sample.py FOLDER [RUNS]

Every run is real: a small network in NumPy on scikit-learn's digits, recorded by `rearview run`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = '''\
"""Train a small network on handwritten digits."""

import argparse

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import rearview

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

rng = np.random.default_rng(args.seed)
digits = load_digits()
order = rng.permutation(len(digits.target))
X, Y = digits.data[order] / 16.0, digits.target[order]
train_x, train_y, test_x, test_y = X[:1400], Y[:1400], X[1400:], Y[1400:]
w1 = rng.normal(0, 0.3, (64, args.width))
w2 = rng.normal(0, 0.3, (args.width, 10))
m1, m2 = np.zeros_like(w1), np.zeros_like(w2)
momentum = 0.9 if args.optimizer == "momentum" else 0.0


def forward(x):
    hidden = np.maximum(0, x @ w1)
    logits = hidden @ w2
    e = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, e / e.sum(1, keepdims=True)


for epoch in range(args.epochs):
    shuffled = rng.permutation(len(train_y))
    losses = []
    for step in range(0, len(train_y), 50):
        batch = shuffled[step : step + 50]
        x, y = train_x[batch], train_y[batch]
        hidden, p = forward(x)
        loss = -np.log(p[np.arange(len(y)), y] + 1e-12).mean()
        p[np.arange(len(y)), y] -= 1
        g2 = hidden.T @ p / len(y)
        g1 = x.T @ ((p @ w2.T) * (hidden > 0)) / len(y)
        m1, m2 = momentum * m1 + g1, momentum * m2 + g2
        w1, w2 = w1 - args.lr * m1, w2 - args.lr * m2
        losses.append(loss)
        rearview.log("train/loss", float(loss))
    _, p = forward(test_x)
    guess = p.argmax(1)
    rearview.log("loss", float(np.mean(losses)))
    rearview.log("acc", float((guess == test_y).mean()))
    rearview.log("val/loss", float(-np.log(p[np.arange(len(test_y)), test_y] + 1e-12).mean()))
    rearview.log("weights", np.histogram(w1, bins=30))
    if epoch % 6 == 5:
        confusion = np.zeros((10, 10))
        np.add.at(confusion, (test_y, guess), 1)
        shade = (255 * (1 - confusion / confusion.max())).astype("uint8")
        rearview.log("confusion", Image.fromarray(shade).resize((120, 120), Image.NEAREST))
        worst = int(np.argmin(confusion.diagonal() / confusion.sum(1)))
        rearview.log("remark", f"epoch {epoch}: most often wrong is {worst}")
    print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  accuracy {(guess == test_y).mean():.3f}")
'''

SECOND = SCRIPT.replace("0.3, (64", "0.2, (64").replace("0.3, (args", "0.2, (args")
THIRD = SECOND.replace(
    "    _, p = forward(test_x)\n",
    '    rate = args.lr\n    rearview.log("rate", rate)\n    _, p = forward(test_x)\n',
).replace(
    "w1, w2 = w1 - args.lr * m1, w2 - args.lr * m2",
    "w1 -= args.lr * m1\n        w2 -= args.lr * m2",
)
ANCHOR = "        losses.append(loss)\n"
PROBED = THIRD.replace(
    ANCHOR, ANCHOR + '        rearview.log("grad_norm", float(np.sqrt((g1**2).sum() + (g2**2).sum())))\n'
).replace(
    "    _, p = forward(test_x)\n",
    '    rearview.log("weight_norm", float(np.linalg.norm(w1)))\n    _, p = forward(test_x)\n',
)  # fmt: skip


def make(folder: Path, count: int = 18, *, epochs: int = 24) -> None:
    """Record `count` runs in `folder`, the source edited in between, and leave probes in it."""
    folder.mkdir(parents=True, exist_ok=True)
    grid = itertools.product((0.02, 0.1, 0.5), ("sgd", "momentum"), (0, 1, 2))
    settings = list(itertools.islice(itertools.cycle(grid), count))
    texts = [SCRIPT, SECOND, THIRD]
    script = folder / "train.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for k, (lr, optimizer, seed) in enumerate(settings):
        script.write_text(texts[min(2, 3 * k // max(1, count))], "utf-8")
        words = ["--lr", str(lr), "--optimizer", optimizer, "--seed", str(seed)]
        width = str(32 if k % 2 else 64)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "rearview",
                "run",
                "train.py",
                *words,
                "--width",
                width,
                "--epochs",
                str(epochs),
            ],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    script.write_text(PROBED, "utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 18)
