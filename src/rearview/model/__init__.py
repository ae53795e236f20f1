"""The words: frozen values without I/O that every room speaks in."""

from rearview.model.checkpoint import Checkpoint, Edge, MissingPart, ObjectRef, Part, Snapshot
from rearview.model.plan import Control, Operator, Plan, ReplayReport, Segment, SegmentFile
from rearview.model.proof import Proof, Verdict, proof_of
from rearview.model.run import Origin, Point, Record, Run, Status, Step

__all__ = [
    "Checkpoint",
    "Control",
    "Edge",
    "MissingPart",
    "ObjectRef",
    "Operator",
    "Origin",
    "Part",
    "Plan",
    "Point",
    "Proof",
    "Record",
    "ReplayReport",
    "Run",
    "Segment",
    "SegmentFile",
    "Snapshot",
    "Status",
    "Step",
    "Verdict",
    "proof_of",
]
