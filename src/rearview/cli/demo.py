"""The command demo: record, edit and backfill a small training run, with times measured here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from difflib import unified_diff
from pathlib import Path

import click

from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration
from rearview.errors import UsageError

NEEDS = {"torch": "torch", "sklearn": "scikit-learn"}


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--epochs", type=click.IntRange(2), metavar="N", default=20, help="How long to train (20)."
)
def demo(folder: Path | None, epochs: int) -> int:
    """See it happen: record, edit, backfill, in under a minute.

    A small PyTorch network is trained on digits that ship with scikit-learn, in FOLDER (which must
    be new or empty) or in a temporary one, which is left there to look at.
    """
    missing_packages = [
        package for module, package in NEEDS.items() if not importlib.util.find_spec(module)
    ]
    if missing_packages:
        raise UsageError(
            f"The demo trains a network and needs {' and '.join(missing_packages)}, which this Python does "
            f"not have. Install it: `pip install {' '.join(missing_packages)}`.",
            slug="demo-needs",
        )
    place = _demo_folder(folder)
    script = place / "train.py"
    script.write_text(SCRIPT, "utf-8")

    _step(1, "Record. This is plain PyTorch; it does not know Rearview.")
    start = time.monotonic()
    code = _show_command(place, "run", "train.py", "--epochs", str(epochs))
    if code:
        return code
    output.out(f"\nTrained and recorded in {duration(time.monotonic() - start)}.")

    _step(
        2,
        "Hindsight. How did the weights and the gradients grow? The script did not log them. Log them now.",
    )
    script.write_text(edited(), "utf-8")
    output.diff("\n".join(_changes(SCRIPT, edited())))

    _step(3, "Backfill. The weights' norm, once an epoch: epochs are restored, not trained again.")
    code = _show_command(place, "backfill", "weight_norm", "--quiet")

    middle = epochs // 2
    iterations = f"epoch={middle}:{middle + 1}"
    _step(4, "And inside one epoch, for each batch: only that epoch runs again.")
    code = code or _show_command(place, "backfill", "grad_norm", "--at", iterations, "--quiet")
    if code:
        return code

    _step(5, "The table, as if the script had logged them.")
    _show_command(place, "table", "weight_norm")
    output.out("")
    _show_command(place, "table", "grad_norm", "--where", f"epoch = {middle}", "--limit", "8")

    output.out(f"\nAll of it is in {place}. Try there:")
    for words in ("show", "table grad_norm --format csv", "replay", 'sql "select * from runs"'):
        output.out(f"  rearview {words}")
    return 0


def _demo_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="rearview-demo-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(
                f"{folder} is not empty, and the demo overwrites nothing. Name a new folder.",
                slug="demo-folder",
            )
    except OSError as exc:
        raise UsageError(
            f"{folder} cannot be used: {exc.strerror or exc}. Name another folder.",
            slug="demo-folder",
        ) from exc
    return folder.resolve()


def _step(number: int, text: str) -> None:
    output.out(output.paint(f"\n{number}. {text}\n", output.BOLD))


def _show_command(place: Path, *words: str) -> int:
    """Print the command `rearview WORDS` and run it in the folder `place`, as a user would; return its exit code."""
    line = " ".join(f'"{word}"' if " " in word else word for word in words)
    output.out(output.paint(f"$ rearview {line}", output.CYAN))
    sys.stdout.flush()
    env = {name: value for name, value in os.environ.items() if name != "REARVIEW_ROOT"}
    return subprocess.run(
        [sys.executable, "-m", "rearview", *words], cwd=place, env=env, check=False
    ).returncode


def _changes(before: str, after: str) -> list[str]:
    lines = unified_diff(
        before.splitlines(), after.splitlines(), "train.py", "train.py", "", "", 1, ""
    )
    return list(lines)


SCRIPT = '''\
"""Train a small convolutional network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--width", type=int, default=40)
args = parser.parse_args()
torch.set_num_threads(1)  # the network is small

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
loader = DataLoader(train, batch_size=32, shuffle=True)
held_out = DataLoader(test, batch_size=len(test))

model = nn.Sequential(
    nn.Conv2d(1, args.width, 3, padding=1),
    nn.BatchNorm2d(args.width),
    nn.ReLU(),
    nn.Conv2d(args.width, 2 * args.width, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(2 * args.width * 16, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    scheduler.step()

    model.eval()
    with torch.no_grad():
        x, y = next(iter(held_out))
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"epoch {epoch:2d}  loss {total / len(train):.4f}  accuracy {accuracy:.3f}")
'''

ANCHOR = "    scheduler.step()\n"
PROBE = '    rearview.log("weight_norm", sum(p.norm().item() ** 2 for p in model.parameters()) ** 0.5)\n'
INNER_ANCHOR = "        loss.backward()\n"
INNER_PROBE = (
    '        rearview.log("grad_norm", sum(p.grad.norm().item() ** 2 '
    "for p in model.parameters()) ** 0.5)\n"
)


def edited() -> str:
    """Return the text of the demo's program with the two log statements that the demo adds after the run.

    >>> from difflib import ndiff
    >>> lines = ndiff(SCRIPT.splitlines(), edited().splitlines())
    >>> sum(line.startswith("+ ") for line in lines)
    3
    """
    text = SCRIPT.replace("import torch\n", "import rearview\nimport torch\n", 1)
    text = text.replace(ANCHOR, ANCHOR + PROBE, 1)
    return text.replace(INNER_ANCHOR, INNER_ANCHOR + INNER_PROBE, 1)
