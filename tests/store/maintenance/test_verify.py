import os

import pytest

from rearview.errors import StoreError
from rearview.model import CheckpointMeta
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance.verify import verify
from rearview.store.runs import Runs


@pytest.fixture
def three(save):
    return [save(seq) for seq in range(3)]


def flip(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_whole_store_has_no_problems(project, three, state):
    report = verify(project)
    assert report.ok
    assert report.problems == ()
    assert (report.checkpoints, report.packs, report.objects) == (3, 3, 6)
    assert report.nbytes >= sum(len(data) for data in state(0).values())


def test_a_damaged_object_is_named_with_the_lost_values(project, checkpoints, three):
    flip(checkpoints.objects.path(three[1].parts["large"].oid))
    report = verify(project)
    assert not report.ok
    assert {each for problem in report.problems for each in problem.lost} == {"r/1"}
    assert len(checkpoints.of("r")) == 3


def test_repair_sets_aside_and_keeps_the_rest(project, checkpoints, three, holds):
    path = checkpoints.objects.path(three[1].parts["large"].oid)
    flip(path)
    damaged = path.read_bytes()
    report = verify(project, repair=True)
    assert report.ok
    assert [each.seq for each in Checkpoints(project).of("r")] == [0, 2]
    assert holds(0)
    assert holds(2)
    aside = [path for path in project.damaged.rglob("*") if path.is_file()]
    assert damaged in [path.read_bytes() for path in aside]
    assert any(path.name == "00000001.json" for path in aside)
    assert verify(project).problems == ()


def test_an_object_is_brought_back_from_elsewhere(project, checkpoints, three, state, holds):
    ref = three[1].parts["large"]
    flip(checkpoints.objects.path(ref.oid))
    checkpoints.objects.path(three[2].parts["odd"].oid).unlink()
    elsewhere = {ref.oid: state(1)["large"], three[2].parts["odd"].oid: state(2)["odd"]}
    report = verify(project, repair=True, fetch=elsewhere.get)
    assert report.ok
    assert len(report.problems) == 2
    assert all(holds(seq) for seq in range(3))


def test_a_wrong_object_from_elsewhere_is_not_believed(project, checkpoints, three):
    flip(checkpoints.objects.path(three[1].parts["large"].oid))
    report = verify(project, repair=True, fetch=lambda _: b"something else")
    assert {each for problem in report.problems for each in problem.lost} == {"r/1"}


def test_a_damaged_slice_of_a_pack_is_found(project, checkpoints, three):
    ref = three[2].parts["small"]
    flip(checkpoints.objects.file(ref), ref.offset + 5)
    report = verify(project, repair=True)
    assert {each for problem in report.problems for each in problem.lost} == {"r/2"}
    assert [each.seq for each in Checkpoints(project).of("r")] == [0, 1]


def test_a_problem_names_the_run_whose_file_it_is(project, checkpoints, three):
    flip(project.checkpoints / "r" / "00000001.json")
    flip(checkpoints.objects.path(three[2].parts["large"].oid))
    runs = {problem.path.suffix: problem.run for problem in verify(project).problems}
    assert runs == {".json": "r", "": ""}


@pytest.mark.parametrize("damage", ["flip", "empty", "half"])
def test_a_damaged_manifest_is_rebuilt_from_its_pack(project, three, holds, damage):
    path = project.checkpoints / "r" / "00000001.json"
    if damage == "flip":
        flip(path)
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size // 2)
    assert not verify(project).ok
    report = verify(project, repair=True)
    assert report.ok
    assert "rebuilt from" in report.problems[0].done
    assert report.problems[0].lost == ()
    assert holds(1)
    assert Checkpoints(project).get("r/1").meta == CheckpointMeta(records=1)


def test_a_manifest_that_cannot_be_rebuilt_is_set_aside(project, checkpoints, three):
    path = project.checkpoints / "r" / "00000001.json"
    path.write_bytes(b"not json")
    flip(checkpoints.objects.file(three[1].parts["small"]), -20)
    report = verify(project, repair=True)
    assert report.problems[0].lost == ("r/1",)
    assert not path.exists()
    assert (project.damaged / "checkpoints" / "r" / "00000001.json").read_bytes() == b"not json"


def test_a_lost_format_number_is_rewritten(project, three):
    (project.store / "format").write_text("what?")
    assert not verify(project).ok
    assert verify(project, repair=True).ok
    project.check()


def test_a_newer_store_is_refused_not_repaired(project):
    (project.store / "format").write_text("99")
    with pytest.raises(StoreError, match="Upgrade"):
        verify(project, repair=True)
    assert (project.store / "format").read_text() == "99"


def test_damaged_facts_of_a_run_are_reported_and_repaired(project):
    runs = Runs(project)
    for name in ("20240101-000000-aaaa", "20240101-000001-bbbb"):
        (project.runs / name).mkdir(parents=True)
        runs.start(name, {"version": "", "script": "train.py"})
        runs.update_args(name, {"lr": 1})
        runs.update_args(name, {"lr": 2})
    bad = project.runs / "20240101-000001-bbbb"
    (bad / "run.json").write_text("{")
    events = bad / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"lr":2', b'"lr":3'))
    report = verify(project)
    assert report.runs == 2
    assert {problem.path for problem in report.problems} == {bad / "run.json", events}
    assert not report.ok
    assert verify(project, repair=True).ok
    assert verify(project).problems == ()
    second, first = runs.all()
    assert (first.script, first.args) == ("train.py", {"lr": 2})
    assert (second.id, second.args) == (bad.name, {"lr": 1})


def test_progress_is_called_with_the_number_of_checked_bytes(project, three):
    told = []
    report = verify(project, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == report.nbytes


def test_objects_that_a_killed_sweep_renamed_are_restored(project, checkpoints, three, holds):
    path = checkpoints.objects.path(three[1].parts["large"].oid)
    path.rename(path.with_name(f".gone-{path.name}"))
    assert not verify(project).ok
    assert verify(project, repair=True).problems == ()
    assert holds(1)
