"""Probes through TensorBoard leave event files that TensorBoard's own reader opens."""

import importlib.util

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

TEXT = """
import random
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("events")
weight = random.random()
for epoch in range(4):
    for step in range(500):
        weight += 0.001 * random.random()
    writer.add_scalar("weight", weight, epoch)
    weight *= 0.9
writer.close()
"""
PROBES = """    writer.add_scalar("half", weight / 2, epoch * 10)
    writer.add_histogram("values", np.array([weight, 2 * weight]), epoch)
    weight *= 0.9
"""


def test_a_probe_through_a_writer_fills_a_column_and_leaves_event_files(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("LOUD: tensorboard is not installed, so its event files are not tested")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, train=TEXT)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    assert len(history(tmp_path).table("weight").rows()) == 4
    originals = {path: path.read_bytes() for path in (tmp_path / "events").iterdir()}
    probed = "import numpy as np\n" + TEXT.replace("    weight *= 0.9\n", PROBES)
    (tmp_path / "train.py").write_text(probed)
    report = history(tmp_path).backfill(["half", "values"], workers=1)
    assert report.proved, report.proof
    rows = [row for row in history(tmp_path).table("half", "weight").rows() if row["half"]]
    assert [row["half"] for row in rows] == [row["weight"] / 2 for row in rows]
    assert len(rows) == 4
    [folder] = report.event_files
    assert folder.startswith(str(tmp_path / ".rearview"))
    found = {}
    for place in (tmp_path / ".rearview" / "tensorboard").glob("*/*"):
        events = EventAccumulator(str(place)).Reload()
        found |= {event.step: event.value for event in events.Scalars("half")}
        assert events.Histograms("values")
    assert found == pytest.approx({k * 10: row["half"] for k, row in enumerate(rows)})
    assert {path: path.read_bytes() for path in (tmp_path / "events").iterdir()} == originals
    history(tmp_path).remove(history(tmp_path).run().id)
    assert not list((tmp_path / ".rearview" / "tensorboard").glob("*/*"))


FROM_IMPORTS = """
import time
from mlflow import set_tracking_uri
set_tracking_uri("sqlite:///mlflow.db")
weight = 1.0
for epoch in range(3):
    for step in range(20000):
        weight *= 1.0001
    time.sleep(0.05)
"""


def test_a_program_that_holds_a_silenced_function_of_a_tracker_is_replayed_exactly(tmp_path):
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("LOUD: mlflow is not installed, so a silenced function of it is not tested")
    write(tmp_path, train=FROM_IMPORTS)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    probe = "    rearview.log('half', weight / 2)\n    time.sleep(0.05)\n"
    text = FROM_IMPORTS.replace("    time.sleep(0.05)\n", probe)
    (tmp_path / "train.py").write_text("import rearview\n" + text)
    report = history(tmp_path).backfill(["half"], workers=1)
    assert report.proved, report.proof
    assert len(history(tmp_path).table("half").rows()) == 3


def test_messages_of_logging_are_captured_on_request(tmp_path):
    text = """
import logging, time
logging.basicConfig(filename="log.txt", level=logging.INFO)
log = logging.getLogger("train")

class Odd:
    def __str__(self):
        raise AssertionError("nobody asks")

for epoch in range(3):
    time.sleep(0.01)
    log.info("epoch %d loss %.2f", epoch, epoch / 4)
    log.debug("%s loss 3", Odd())
"""
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    assert history(tmp_path).captured() == {}
    assert recorded(tmp_path, "train.py", capture="all,logging").code == 0
    run = history(tmp_path).run().id
    rows = history(tmp_path).table("loss", runs=[run]).rows()
    assert [row["loss"] for row in rows] == [0.0, 0.25, 0.5]
    assert history(tmp_path).captured() == {"loss": "logging"}
