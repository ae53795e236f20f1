"""A run that was pushed to a remote can be pulled into another store, whole."""

from rearview.model import Edge, Part, Point, Snapshot, Step
from rearview.remote.open import open_remote
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.manifest_and_packs import INLINE
from rearview.store.maintenance.sync import pull, push
from rearview.store.project import Project
from rearview.store.runs import Runs


def test_a_checkpoint_whose_parts_are_all_those_of_an_earlier_one_arrives(tmp_path):
    here = Project.create(tmp_path / "here")
    runs = Runs(here)
    run = runs.reserve()
    runs.start(run, {"script": "train.py"})
    store = Checkpoints(here)
    contents = {f"part{k}": b"%d" % k for k in range(INLINE + 1)}
    first = store.save(
        Snapshot(run, 0, Point((Step("epoch", 0),)), Edge.START),
        [Part(key, data) for key, data in contents.items()],
    )
    second = store.save(
        Snapshot(run, 1, Point((Step("epoch", 1),)), Edge.START),
        [Part(key, b"", same_as=ref) for key, ref in first.parts.items()],
    )
    store.delete(first.id)  # as a garbage collection may
    remote = open_remote(str(tmp_path / "remote"))
    push(here, run, remote, "commands/x.json")
    there = Project.create(tmp_path / "there")
    assert pull(there, remote, "commands/x.json") == run
    pulled = Checkpoints(there)
    loaded = pulled.load(pulled.get(second.id))
    assert {key: bytes(view) for key, view in loaded.items()} == contents
