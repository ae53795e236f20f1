"""Machines are known by what they are made of, and measured when it is worth it."""

import pytest

from rearview.backfill import machine_speed
from rearview.backfill.machine_speed import BUSY, FRESH, FRESH_BUSY, Machines, Measured, cores_of
from rearview.model import Run, RunEnd, RunStart, Status

HERE = {"cpu": "a", "cores": 2, "gpus": []}
THERE = {"cpu": "b", "cores": 64, "gpus": ["H100"]}


@pytest.fixture
def measured(monkeypatch):
    """Measurements that take no time; returns where they were taken, and the next result."""
    taken = []
    found = {"measured": Measured({"python": 0.5}, 800.0, 200.0)}

    def measure(folder):
        taken.append(folder)
        return found["measured"]

    monkeypatch.setattr(machine_speed, "measure", measure)
    return taken, found


def run(hardware=None, host="node7"):
    facts = RunStart() if hardware is None else RunStart(hardware=hardware)
    return Run("r", "v", "train.py", (), 0.0, Status.FINISHED, host=host, facts=facts)


def test_a_measurement_is_remembered_where_the_other_machines_see_it(tmp_path, measured):
    first = Machines(tmp_path, HERE)
    assert first.due()
    assert first.this_machine().kernels == {}
    assert first.measure().read == 800.0
    assert not first.due()
    elsewhere = Machines(tmp_path, THERE)
    assert elsewhere.due()
    assert elsewhere.of(run(HERE)).kernels == {"python": 0.5}
    assert len(measured[0]) == 1


def test_an_old_or_busy_measurement_is_repeated(tmp_path, measured):
    import time

    one = Machines(tmp_path, HERE)
    one.measure()
    now = time.time()
    assert not one.due(now + FRESH - 60)
    assert one.due(now + FRESH + 60)
    measured[1]["measured"] = Measured({"python": 0.5}, 800.0, 200.0, load=2 * BUSY)
    one.measure()
    assert one.due(now + FRESH_BUSY + 60)


def test_other_cores_make_another_machine(tmp_path, measured):
    Machines(tmp_path, HERE).measure()
    assert Machines(tmp_path, {**HERE, "cores": 4}).due()


def test_nodes_that_are_alike_are_measured_once(tmp_path, measured):
    here = Machines(tmp_path, HERE)
    here.measure()
    assert here.of(run(HERE, "node8")).name == here.name
    assert here.unmeasured([run(HERE, "node8")]) == []


def test_a_machine_that_was_never_measured_is_named(tmp_path, measured):
    here = Machines(tmp_path, HERE)
    here.measure()
    (told,) = here.unmeasured([run(THERE), run(THERE), run(HERE)])
    assert "node7" in told
    assert "`rearview doctor`" in told
    Machines(tmp_path, THERE).measure()
    assert here.unmeasured([run(THERE)]) == []


def test_a_run_without_machine_id_belongs_to_this_machine_if_its_host_does(tmp_path):
    here = Machines(tmp_path, HERE)
    assert here.of(run(None, machine_speed.gethostname())).name == here.name
    assert here.of(run(None, "node7")).name != here.name


def test_a_failed_measurement_only_widens_predictions(tmp_path, measured):
    measured[1]["measured"] = None
    one = Machines(tmp_path, HERE)
    assert one.measure().kernels == {}
    (tmp_path / "machines" / f"{one.name}.json").write_text("{")
    assert one.due()
    assert one.this_machine().kernels == {}


@pytest.mark.parametrize(
    ("told", "end", "cores"),
    [
        ({}, {}, 1),
        ({"OMP_NUM_THREADS": "4"}, {}, 4),
        ({"OMP_NUM_THREADS": "4"}, {"cpu": 11.0, "seconds": 10.0}, 1),
        ({"OMP_NUM_THREADS": "1"}, {"cpu": 30.0, "seconds": 10.0}, 1),
        ({}, {"cpu": 17.0, "seconds": 10.0}, 2),
    ],
)
def test_a_replay_is_given_the_cores_that_the_run_kept_busy(told, end, cores):
    facts = {"facts": RunStart(threads=told), "end": RunEnd(**end)}
    assert cores_of(Run("r", "v", "t.py", (), 0.0, Status.FINISHED, **facts)) == cores
