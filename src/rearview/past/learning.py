"""Keep what past replays teach about cost, for the next plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from rearview.plan.cost import Correction, Corrections
from rearview.store.project import publish

_FILE = "corrections.json"


def read_corrections(cache: Path) -> Corrections:
    """Return what replays in this project have taught so far."""
    try:
        found = msgspec.json.decode((cache / _FILE).read_bytes(), type=dict[str, Correction])
    except (OSError, msgspec.MsgspecError):
        return Corrections()
    return Corrections(found)


def keep_corrections(cache: Path, known: Corrections) -> None:
    """Keep it; a folder that cannot be written costs only better predictions."""
    data = {key: asdict(one) for key, one in known.by.items()}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        publish(cache / _FILE, msgspec.json.encode(data), durable=False)
    except OSError:
        return
