"""Projects with recorded runs, for tests of tables."""

from pathlib import Path

from rearview.durable_files import add_check
from rearview.model import Point, ReplayStart, Step
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point
from rearview.store.runs import Runs


def at(**loops) -> Point:
    """Return a point: `at(epoch=3, step=(0, "a"))` gives a loop's number and its value."""
    return Point(
        tuple(
            Step(loop, *(where if isinstance(where, tuple) else (where,)))
            for loop, where in loops.items()
        )
    )


class Recorded:
    """A project whose runs are written here as a session would write them."""

    def __init__(self, root: Path):
        self.project = Project.create(root)
        self.runs = Runs(self.project)

    def run(self, *calls, over=True, origin="recorded", **facts) -> str:
        """Record a run: each call is (point, {name: value}) or (point, [(name, value), …])."""
        run = self.runs.reserve()
        self.runs.start(run, {"version": "v", "script": "train.py", **facts})
        self.add(run, *calls, origin=origin, close=over)
        if over:
            self.runs.end(run, 0)
        return run

    def add(self, run, *calls, origin="recorded", attempt=0, close=True, **options) -> None:
        """Add records to a run from a process of their own."""
        out = RecordFile(self.runs.folder(run), run, origin, attempt=attempt, **options)
        for point, items in calls:
            pairs = list(items.items()) if isinstance(items, dict) else items
            out.append(encode_point(point), pairs)
        if close:
            out.close()
        else:
            self.open = out

    def replay(self, run, name, *calls, proved=True) -> None:
        """Add the records of a replay that has ended."""
        self.runs.start_replay(run, name, ReplayStart())
        self.add(run, *calls, origin=name)
        self.runs.end_replay(run, name, proved=proved)


def rechecked(text: bytes) -> bytes:
    """Return lines that were edited, each with the checksum that fits it."""
    lines = [line.rpartition(b',"c":') for line in text.split(b"\n")]
    return b"\n".join(add_check(body + b"}") if found else end for body, found, end in lines)
