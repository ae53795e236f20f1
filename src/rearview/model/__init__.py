"""The words: frozen values without I/O that every room speaks in."""

from rearview.model.checkpoint import Checkpoint, ObjectRef, Part
from rearview.model.plan import Operator, Plan, Segment
from rearview.model.point import Point, Step
from rearview.model.proof import Proof, Verdict, proof_of
from rearview.model.record import Origin, Record
from rearview.model.run import Run, Status
from rearview.model.segment import Control, Report, Wanted

__all__ = [
    "Checkpoint",
    "Control",
    "ObjectRef",
    "Operator",
    "Origin",
    "Part",
    "Plan",
    "Point",
    "Proof",
    "Record",
    "Report",
    "Run",
    "Segment",
    "Status",
    "Step",
    "Verdict",
    "Wanted",
    "proof_of",
]
