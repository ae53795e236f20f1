"""One logged value at a point."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rearview.model.point import Point


class Origin(StrEnum):
    """Where a record comes from, and how far it can be trusted."""

    RECORDED = "recorded"
    """Logged by the run itself."""
    REPLAYED = "replayed"
    """Logged by a replay that was proved exact."""
    UNPROVED = "unproved"
    """Logged by a replay that was interrupted, or that nothing could be compared with."""
    REDONE = "redone"
    """Logged by a first try that a second one, from the start of the run, stands in for."""
    INEXACT = "not exact"
    """Logged by a replay that differed from the recording."""
    WANDB = "wandb"
    """Given to Weights & Biases by the run."""
    MLFLOW = "mlflow"
    """Given to MLflow by the run."""
    TENSORBOARD = "tensorboard"
    """Given to TensorBoard or tensorboardX by the run."""
    LIGHTNING = "lightning"
    """Given to Lightning's loggers by the run."""
    TRANSFORMERS = "transformers"
    """Logged by the Hugging Face Trainer of the run."""
    KERAS = "keras"
    """Logged by Keras at the end of an epoch of the run."""
    ASSIGNED = "assigned"
    """Value that a variable had when an iteration of a loop of the run ended."""
    PRINTED = "printed"
    """Read from a line that the run printed."""
    INNER = "inner"
    """Last value that a variable had in a loop inside an iteration of the run."""


LOGGERS = (
    *(Origin.WANDB, Origin.MLFLOW, Origin.TENSORBOARD),
    *(Origin.LIGHTNING, Origin.TRANSFORMERS, Origin.KERAS),
)
"""Origins of values that a run gave to a logger. Of two with one name, tables show the first here."""
CAPTURED = (*LOGGERS, Origin.ASSIGNED, Origin.PRINTED, Origin.INNER)
"""Origins of values that a run did not log with Rearview, the strongest first."""
UNASKED = frozenset({Origin.ASSIGNED, Origin.PRINTED, Origin.INNER})
"""Origins of values that the program gave to no logger."""
MARK = "$"
"""Stands before the origin in a file of captured records, where a file of a replay has its id."""


def captured_origin(replay: str | None) -> Origin | None:
    """Return the origin of captured records; None for those of a run or of a replay.

    >>> captured_origin("$printed"), captured_origin("20261118-r1"), captured_origin(None)
    (<Origin.PRINTED: 'printed'>, None, None)
    """
    if replay is None or not replay.startswith(MARK):
        return None
    found = replay.removeprefix(MARK)
    return next((origin for origin in CAPTURED if origin.value == found), None)


@dataclass(frozen=True, slots=True)
class Record:
    """One value under one name at one point.

    `value` is a JSON scalar, or a dict with the key `"$object"` that names the stored bytes of
    an array, tensor, image or histogram.
    """

    run: str
    seq: int
    point: Point
    name: str
    value: Any
    origin: Origin = Origin.RECORDED
    time: float = 0.0
