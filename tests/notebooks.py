"""Notebooks made and run as people do it, for the tests of this room."""

import json
import os
import subprocess
import sys
from pathlib import Path

from limits import HUNG

SRC = Path(__file__).parents[1] / "src"
ENTROPY = "11" * 32


def cell(source: str, **metadata) -> dict:
    """Return a code cell."""
    return {
        "cell_type": "code",
        "id": f"cell-{abs(hash(source)) % 10**8}",
        "metadata": metadata,
        "source": source,
        "outputs": [],
        "execution_count": None,
    }


def write(file: Path, *cells, language: str = "python") -> Path:
    """Write a notebook of these cells; a text is the source of a code cell."""
    spec = {"name": "python3", "display_name": "Python", "language": language}
    made = [cell(one) if isinstance(one, str) else one for one in cells]
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": spec}, "cells": made}
    file.write_text(json.dumps(content, indent=1))
    return file


def environment(**more: str) -> dict[str, str]:
    """Return what a notebook is run with in tests: the same chance each time."""
    return {**os.environ, "PYTHONPATH": str(SRC), "REARVIEW_ENTROPY": ENTROPY, **more}


def rearview(folder: Path, *words: str, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run a command of Rearview in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def outputs(file: Path) -> list[list[dict]]:
    """Return the outputs of each code cell of a notebook."""
    content = json.loads(file.read_text())
    return [one["outputs"] for one in content["cells"] if one["cell_type"] == "code"]
