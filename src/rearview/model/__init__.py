"""Values that all rooms share: runs, points, records, checkpoints, plans, messages and proofs; no I/O."""

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
from rearview.model.plan import Operator, Plan, Segment
from rearview.model.process_messages import Control, ReplayReport, ReplayStart, SegmentFile
from rearview.model.proof import Proof, Verdict, proof_of
from rearview.model.run import (
    EXIT_PAUSED,
    Continuation,
    EarlyEnd,
    LoopTotals,
    MainLoop,
    Origin,
    Point,
    Record,
    Run,
    RunEnd,
    RunStart,
    Status,
    Step,
)

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
    "ReplayStart",
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
