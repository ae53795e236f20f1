"""The words: frozen values without I/O that every room speaks in."""

from rearview.model.checkpoint import Checkpoint, ObjectRef, Part
from rearview.model.plan import Operator, Plan, Segment
from rearview.model.point import Point, Step
from rearview.model.record import Origin, Record
from rearview.model.run import Run, Status

__all__ = [
    "Checkpoint",
    "ObjectRef",
    "Operator",
    "Origin",
    "Part",
    "Plan",
    "Point",
    "Record",
    "Run",
    "Segment",
    "Status",
    "Step",
]
