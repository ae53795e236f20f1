"""Keep what past replays teach about cost, for the next plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from rearview.plan.cost import Correction, Corrections
from rearview.store.private import make_folder
from rearview.store.project import publish


def _file(cache: Path, machine: str) -> Path:
    return cache / f"corrections-{machine}.json"


def read_corrections(cache: Path, machine: str) -> Corrections:
    """Return what replays of this project on machines of this make have taught so far."""
    try:
        data = _file(cache, machine).read_bytes()
        found = msgspec.json.decode(data, type=dict[str, Correction])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Corrections()
    return Corrections(found)


def keep_corrections(cache: Path, machine: str, known: Corrections) -> None:
    """Keep it; a folder that cannot be written costs only better predictions."""
    data = {key: asdict(one) for key, one in known.by.items()}
    try:
        make_folder(cache)
        publish(_file(cache, machine), msgspec.json.encode(data), durable=False)
    except OSError:
        return
