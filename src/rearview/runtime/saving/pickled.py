"""How values are saved and restored when the user says nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


def write(path: Path, value: Any) -> None:
    """Write `value` to `path`."""
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def read(path: Path) -> Any:
    """Return the value that `write` wrote to `path`."""
    with path.open("rb") as file:
        return pickle.load(file)
