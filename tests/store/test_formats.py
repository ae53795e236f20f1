"""A store of every past format is still read."""

import shutil
from pathlib import Path

import pytest

from rearview.energy import Account
from rearview.model import CheckpointMeta, MissingPart, Point, Step
from rearview.runtime.sandbox.written_files import OverwrittenFiles
from rearview.store import printed_lines, runs
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.compression import MARK
from rearview.store.checkpoints.objects import Objects
from rearview.store.json_files import CHECKED
from rearview.store.maintenance.verify import verify
from rearview.store.project import COMPRESSED, FORMAT, Project

GOLD = Path(__file__).parent.parent / "gold"


def test_there_is_a_store_of_every_format():
    assert {path.name for path in GOLD.glob("store-*")} == {
        f"store-{number}" for number in range(1, FORMAT + 1)
    }


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_store_of_an_old_format_is_read(tmp_path, number):
    shutil.copytree(GOLD / f"store-{number}", tmp_path / ".rearview")
    project = Project.open(tmp_path)
    store = Checkpoints(project)
    first, second = store.of("20240101-000000-gold")
    assert (first.id, first.seq, first.edge) == ("20240101-000000-gold/1", 1, "start")
    assert first.time == 1700000000.25
    assert first.meta == CheckpointMeta()  # unknown keys of old manifests are ignored
    assert second.point == Point((Step("epoch", 2, "second"), Step("step", 5, 0.5)))
    assert (second.edge, second.complete, second.missing) == (
        "end",
        False,
        (MissingPart("", "a socket"),),
    )
    weights = bytes(range(256)) * 4096
    assert store.load(first)["weights"] == weights
    loaded = store.load(second)
    assert loaded["weights"] == weights
    assert loaded["skeleton"] == b"two"
    assert [len(loaded[f"bias.{i}"]) for i in range(40)] == list(range(40))
    assert verify(project).problems == ()
    assert project.check() == number
    file = Objects(project).file(first.parts["weights"])
    assert file.read_bytes().startswith(MARK) == (number >= COMPRESSED)


@pytest.mark.parametrize("number", range(1, printed_lines.FORMAT + 1))
def test_printed_lines_of_an_old_format_are_read(tmp_path, number):
    shutil.copy(GOLD / "printed" / f"{number}.jsonl", tmp_path / printed_lines.FILE)
    begins, loss, dropped = printed_lines.read_printed_lines(tmp_path)
    assert (begins.where, begins.stream, begins.text) == ("", "out", "begins")
    assert (loss.where, loss.stream, loss.text) == ("epoch=3/step=20", "err", "loss 0.5")
    assert (dropped.stream, dropped.text) == ("", "only 8 MB are kept")


@pytest.mark.parametrize("number", range(1, runs.FORMAT + 1))
def test_facts_of_runs_of_an_old_format_are_read(tmp_path, number):
    project = Project.create(tmp_path)
    name = "20240101-000000-gold"
    shutil.copytree(GOLD / "facts" / f"format-{number}", project.runs / name)
    found = runs.Runs(project).get(name)
    assert (found.script, found.argv, found.args) == ("train.py", ("--lr", "1"), {"lr": 0.5})
    assert (found.started, found.ended, found.exit_code) == (1704067200.5, 1704067300.5, 0)
    (replay,) = runs.Runs(project).replays(name)
    assert (replay.id, replay.names, replay.proved) == ("a.1", ("norm",), True)
    kept = OverwrittenFiles.of(project.runs / name, "/project/", lambda: False)
    assert (kept.was_created("out.txt"), list(kept.folders), kept.read) == (
        True,
        ["logs"],
        {"out.txt"},
    )
    assert Account(project.runs / name / runs.ACCOUNT).report().kwh == 0.5
    report = verify(project)
    assert report.problems == ()
    assert bool(report.unchecked) == (number < CHECKED)
