"""A run whose state is mostly empty is stored small, and replays exact."""

import numpy as np
import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.config import Settings
from rearview.errors import UsageError
from rearview.model import Edge, Point, Snapshot, Step
from rearview.remote.folder import FolderRemote
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.maintenance.sync import pull, push
from rearview.store.maintenance.thin_and_collect import usage
from rearview.store.maintenance.verify import verify
from rearview.store.project import COMPRESSED, PLAIN, Project

MB = 1 << 20
SCRIPT = """\
import numpy as np

frames = np.zeros((64, 84, 84, 8), np.uint8)
weights = np.random.default_rng(1).standard_normal(1 << 18)
for epoch in range(6):
    rng = np.random.default_rng(epoch)
    frames[epoch] = rng.integers(0, 255, frames.shape[1:])
    weights = weights * 0.9 + rng.standard_normal(len(weights))
    loss = float(frames[: epoch + 1].mean() + weights.mean())
"""
PROBED = SCRIPT.replace("import numpy", "import rearview\nimport numpy") + (
    "    rearview.log('loss', loss)\n    rearview.log('seen', int(frames.astype(int).sum()))\n"
)
FRAMES, WEIGHTS = 64 * 84 * 84 * 8, 8 << 18


@pytest.mark.parametrize("compress", ["auto", "never"])
def test_a_replay_buffer_is_stored_small_and_its_run_replays_exact(tmp_path, compress):
    write(tmp_path, train=SCRIPT)
    ended = recorded(tmp_path, "train.py", compress=compress)
    assert (ended.code, ended.err) == (0, "")
    past = history(tmp_path)
    shown = past.show()
    count = len(shown.checkpoints)
    assert count >= 6
    assert shown.logical > count * (FRAMES + WEIGHTS)
    assert shown.stored <= usage(past.project) + count * 10_000
    full = 6 * (FRAMES + WEIGHTS)
    assert (shown.stored < full - 4 * FRAMES) == (compress == "auto")
    assert past.project.check() == (COMPRESSED if compress == "auto" else PLAIN)
    assert verify(past.project).problems == ()
    (tmp_path / "train.py").write_text(PROBED)
    report = history(tmp_path).backfill(["loss", "seen"])
    assert report.proved, report.proof
    rows = history(tmp_path).sql("SELECT whole FROM records WHERE name = 'seen'")
    filled = np.zeros((64, 84, 84, 8), np.uint8)
    expected = []
    for epoch in range(6):
        filled[epoch] = np.random.default_rng(epoch).integers(0, 255, filled.shape[1:])
        expected.append(int(filled.astype(int).sum()))
    assert sorted(int(row["whole"]) for row in rows) == expected


def test_a_word_that_is_no_choice_is_refused():
    with pytest.raises(UsageError, match=r"compress is 'always'. It may be auto or never"):
        Settings().changed({"compress": "always"})


def save(store, count=2):
    """Save states of 8 MB of zeros with one number in them; return what that cost."""
    writer = Writer(store, Settings())
    state = np.zeros(MB)
    for seq in range(count):
        state[seq] = 1.0
        point = Point((Step("epoch", seq),))
        assert writer.submit(Snapshot("r", seq, point, Edge.START, b"", {"a": state}), wait=True)
    assert writer.close(30)
    return writer.costs


def test_the_writer_reports_the_bytes_that_are_on_disk(tmp_path):
    project = Project.create(tmp_path)
    costs = save(Checkpoints(project, CompressionPolicy()))
    assert costs.logical == 2 * 8 * MB
    assert costs.stored == usage(project) < 100_000
    assert costs.cpu > 0


def test_a_run_with_compressed_objects_travels_by_a_remote(tmp_path):
    home, away = Project.create(tmp_path / "home"), Project.create(tmp_path / "away")
    save(Checkpoints(home, CompressionPolicy()))
    (home.runs / "r").mkdir(parents=True)
    (home.runs / "r" / "run.json").write_text('{"format": 1, "id": "r", "started": 0.0}')
    remote = FolderRemote(tmp_path / "remote")
    assert push(home, "r", remote, "commands/x.json") < 100_000
    assert push(home, "r", remote, "commands/x.json") < 10_000
    assert (away.check(), pull(away, remote, "commands/x.json"), away.check()) == (1, "r", 2)
    store = Checkpoints(away)
    state = np.frombuffer(store.load(store.get("r/1"))["a"])
    assert (state[:3].tolist(), state.sum()) == ([1.0, 1.0, 0.0], 2.0)
    assert verify(away).problems == ()
