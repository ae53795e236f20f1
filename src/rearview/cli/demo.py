"""The command demo: the whole idea, on a real training run, with numbers measured on the spot."""

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

from rearview.cli.demo_script import SCRIPT, edited
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
    missing = [package for module, package in NEEDS.items() if not importlib.util.find_spec(module)]
    if missing:
        raise UsageError(
            f"The demo trains a network and needs {' and '.join(missing)}, which this Python does "
            f"not have. Install it: `pip install {' '.join(missing)}`.",
            slug="demo-needs",
        )
    place = _made(folder)
    script = place / "train.py"
    script.write_text(SCRIPT, "utf-8")

    _step(1, "Record. This is plain PyTorch; it does not know Rearview.")
    start = time.monotonic()
    code = _do(place, "run", "train.py", "--epochs", str(epochs))
    if code:
        return code
    output.out(f"\nTrained and recorded in {duration(time.monotonic() - start)}.")

    _step(
        2,
        "Hindsight. How did the weights and the gradients grow? Nobody logged them. Log them now.",
    )
    script.write_text(edited(), "utf-8")
    output.diff("\n".join(_changes(SCRIPT, edited())))

    _step(3, "Backfill. The weights' norm, once an epoch: epochs are restored, not trained again.")
    code = _do(place, "backfill", "weight_norm", "--quiet")

    middle = epochs // 2
    at = f"epoch={middle}:{middle + 1}"
    _step(4, "And inside one epoch, for each batch: only that epoch runs again.")
    code = code or _do(place, "backfill", "grad_norm", "--at", at, "--quiet")
    if code:
        return code

    _step(5, "The table, as if it had been logged all along.")
    _do(place, "table", "weight_norm")
    output.out("")
    _do(place, "table", "grad_norm", "--where", f"epoch = {middle}", "--limit", "8")

    output.out(f"\nAll of it is in {place}. Try there:")
    for words in ("show", "table grad_norm --format csv", "replay", 'sql "select * from runs"'):
        output.out(f"  rearview {words}")
    return 0


def _made(folder: Path | None) -> Path:
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


def _do(place: Path, *words: str) -> int:
    """Run one of our own commands in `place` as a user would, and show it."""
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
