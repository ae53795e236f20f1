"""The words: frozen values without I/O that every room speaks in."""

from rearview.model.checkpoint import (
    Checkpoint,
    CheckpointMeta,
    Edge,
    LoopStep,
    MissingPart,
    ObjectRef,
    Part,
    Snapshot,
)
from rearview.model.plan import Control, Operator, Plan, ReplayReport, Segment, SegmentFile
from rearview.model.proof import Proof, Verdict, proof_of
from rearview.model.run import EXIT_PAUSED, Origin, Point, Record, Run, Status, Step
from rearview.model.run_facts import Continuation, EarlyEnd, LoopTotals, MainLoop, RunEnd, RunStart

__all__ = [
    "EXIT_PAUSED",
    "Checkpoint",
    "CheckpointMeta",
    "Continuation",
    "Control",
    "EarlyEnd",
    "Edge",
    "LoopStep",
    "LoopTotals",
    "MainLoop",
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
    "RunEnd",
    "RunStart",
    "Segment",
    "SegmentFile",
    "Snapshot",
    "Status",
    "Step",
    "Verdict",
    "proof_of",
]
