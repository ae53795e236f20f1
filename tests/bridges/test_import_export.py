"""Runs come in from other trackers and go out to them, and no second time."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rearview import media
from rearview._history import history
from rearview.bridges.import_export import exported_runs, import_runs
from rearview.bridges.mlflow_runs import read_mlflow, write_mlflow
from rearview.bridges.tensorboard_files import read_tensorboard, write_tensorboard
from rearview.bridges.wandb_files import log_records, read_wandb, write_wandb
from rearview.errors import DamagedError, UsageError
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from recorded import Recorded, at

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mlflow


@pytest.fixture
def project(tmp_path):
    return Project.create(tmp_path / "project")


@pytest.fixture
def some_runs(tmp_path):
    """Two runs with numbers, texts and media, one of them backfilled."""
    recorded = Recorded(tmp_path / "project")
    put = Checkpoints(recorded.project).objects.put
    run = recorded.runs.reserve()
    recorded.runs.start(
        run, {"version": "v", "script": "train.py", "args": {"lr": 0.1, "opt": "a"}}
    )
    calls = [(at(epoch=k), {"loss": 1 / (k + 1), "note": f"epoch {k}"}) for k in range(3)]
    inner = [(at(epoch=k, step=j), {"inner": 10 * k + j}) for k in range(2) for j in range(2)]
    shown = {
        "weights": np.histogram(np.arange(10.0), bins=4),
        "picture": media.Image(np.zeros((4, 6, 3))),
        "sound": media.Audio(np.zeros(80), 8000),
        "cases": media.DataTable(["a"], [[1], [2]]),
    }
    recorded.add(run, *calls, *inner, (at(), {"best": 0.25}), (at(epoch=0), shown), put=put)
    recorded.runs.end(run, 0)
    recorded.replay(run, "r1", (at(epoch=0), {"norm": 3.5}), (at(epoch=1), {"norm": 4.5}))
    recorded.replay(run, "r2", (at(epoch=0), {"wrong": 1.0}), proved=False)
    recorded.run((at(epoch=0), {"loss": 7.0}))
    return history(tmp_path / "project")


def columns(past, run, *names):
    return [
        tuple(row[name] for name in ("step", *names))
        for row in past.table(*names, runs=[run]).rows()
    ]


# --- TensorBoard


def write_events(folder, steps, start=0):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(start, start + steps):
            writer.add_scalar("loss", step / 2, step)
            writer.add_histogram("w", np.arange(10.0) * (step + 1), step)
        writer.add_text("about", "some *text*", 0)
        writer.add_image("picture", np.zeros((3, 4, 4)), 1)
        writer.add_hparams({"lr": 0.1, "opt": "adam"}, {"acc": 0.9}, run_name=".")


def test_event_files_become_runs(tmp_path, project):
    write_events(tmp_path / "logs" / "one", 3)
    write_events(tmp_path / "logs" / "two", 2)
    done = import_runs(project, read_tensorboard(tmp_path / "logs"))
    past = history(project.root)
    assert [each.is_new for each in done] == [True, True]
    assert {run.name for run in past.runs()} == {"one", "two"}
    assert columns(past, "one", "loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert past.run("one").args == {"lr": 0.1, "opt": "adam"}
    assert [run.name for run in past.runs("opt = 'adam' and loss > 0.6")] == ["one"]
    counts, edges = past.value("one", "w", step=2)
    assert counts.sum() == 10
    assert edges[-1] >= 27
    assert str(past.value("one", "about", step=0)) == "some *text*"
    assert past.value("one", "picture", step=1).size == (4, 4)
    assert past.run("one").status == "finished"


def test_importing_again_adds_only_new_values(tmp_path, project):
    write_events(tmp_path / "logs", 3)
    first = import_runs(project, read_tensorboard(tmp_path / "logs"))
    again = import_runs(project, read_tensorboard(tmp_path / "logs"))
    assert [(each.run, each.records, each.is_new) for each in again] == [(first[0].run, 0, False)]
    write_events(tmp_path / "logs", 2, start=3)
    import_runs(project, read_tensorboard(tmp_path / "logs"))
    past = history(project.root)
    assert len(past.runs()) == 1
    assert columns(past, "latest", "loss") == [(k, k / 2) for k in range(5)]


def test_the_tenth_event_file_of_a_second_does_not_make_another_run(tmp_path, project):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "logs")) as writer:
        writer.add_scalar("loss", 0.5, 0)
    (file,) = (tmp_path / "logs").iterdir()
    stem = file.name.rpartition(".")[0]
    file.rename(file.with_name(f"{stem}.9"))
    first = import_runs(project, read_tensorboard(tmp_path / "logs"))
    shutil.copy(file.with_name(f"{stem}.9"), file.with_name(f"{stem}.10"))
    again = import_runs(project, read_tensorboard(tmp_path / "logs"))
    assert [each.run for each in again] == [first[0].run]


def test_a_folder_without_event_files_is_refused(tmp_path, project):
    with pytest.raises(UsageError, match="no event file"):
        import_runs(project, read_tensorboard(tmp_path))


def events(folder):
    found = EventAccumulator(str(folder), dict.fromkeys(("scalars", "histograms", "tensors"), 0))
    found.Reload()
    return found


def test_runs_become_event_files_that_include_values_filled_by_replays(tmp_path, some_runs):
    chosen = list(exported_runs(some_runs))
    done = [write_tensorboard(run, tmp_path / "out") for run in chosen]
    assert [each.left_out for each in done] == [1, 0]  # a table has no place in TensorBoard
    found = events(done[0].place)
    assert [(e.step, e.value) for e in found.Scalars("norm")] == [(0, 3.5), (1, 4.5)]
    assert [e.step for e in found.Scalars("inner")] == [0, 1, 2, 3]
    assert found.Scalars("loss")[1].value == 0.5
    assert "wrong" not in found.Tags()["scalars"]
    assert sum(found.Histograms("weights")[0].histogram_value.bucket) == 10
    assert (found.Images("picture")[0].width, found.Images("picture")[0].height) == (6, 4)
    assert found.Audio("sound")[0].sample_rate == 8000
    assert found.Tensors("note")[2].tensor_proto.string_val[0] == b"epoch 2"
    files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*tfevents*")}
    again = [write_tensorboard(run, tmp_path / "out") for run in exported_runs(some_runs)]
    assert [each.values for each in again] == [0, 0]
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*tfevents*")} == files


def test_an_export_to_tensorboard_can_be_imported_again(tmp_path, some_runs, project):
    for run in exported_runs(some_runs):
        write_tensorboard(run, tmp_path / "out")
    other = Project.create(tmp_path / "other")
    import_runs(other, read_tensorboard(tmp_path / "out"))
    past = history(other.root)
    first = past.runs()[0].id
    assert past.run(first).args == {"lr": 0.1, "opt": "a"}
    assert columns(past, first, "norm") == [(0, 3.5), (1, 4.5)]


def test_only_the_names_asked_for_go_out(some_runs):
    chosen = list(exported_runs(some_runs, ["loss"], where="lr = 0.1"))
    assert len(chosen) == 1
    assert {value.name for value in chosen[0].values} == {"loss"}


# --- MLflow


@pytest.fixture(scope="module")
def new_store(tmp_path_factory):
    """A database without runs, made once: MLflow takes seconds for it."""
    place = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.MlflowClient(f"sqlite:///{place}").search_experiments()
    return place


@pytest.fixture
def mlflow_store(tmp_path, new_store):
    place = shutil.copy(new_store, tmp_path / "mlflow.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield str(place), mlflow.MlflowClient(f"sqlite:///{place}")


def test_runs_of_mlflow_become_runs(mlflow_store, project):
    place, client = mlflow_store
    run = client.create_run("0", run_name="fine")
    key = run.info.run_id
    for step in range(3):
        client.log_metric(key, "loss", 1 / (step + 1), step=step)
    client.log_param(key, "lr", 0.1)
    running = import_runs(project, read_mlflow(place))
    client.log_metric(key, "loss", 0.1, step=3)
    client.set_terminated(key, "FAILED")
    again = import_runs(project, read_mlflow(place))
    assert [(each.records, each.is_new) for each in running + again] == [(3, True), (1, False)]
    past = history(project.root)
    assert columns(past, "fine", "loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.1)]
    assert past.run("fine").args == {"lr": 0.1}
    assert past.run("fine").status == "failed"
    assert [each.records for each in import_runs(project, read_mlflow(place))] == [0]


def test_runs_go_out_to_mlflow_once(mlflow_store, some_runs, project):
    place, client = mlflow_store
    done = [write_mlflow(run, place, "mine") for run in exported_runs(some_runs)]
    again = [write_mlflow(run, place, "mine") for run in exported_runs(some_runs)]
    assert [each.values for each in done] == [10, 1]
    assert [each.values for each in again] == [0, 0]
    found = client.get_run(done[0].place)
    assert found.data.params == {"lr": "0.1", "opt": "a"}
    assert found.info.status == "FINISHED"
    history_of = client.get_metric_history(done[0].place, "norm")
    assert [(m.step, m.value) for m in history_of] == [(0, 3.5), (1, 4.5)]
    other = import_runs(project, read_mlflow(place))
    assert other == []  # they came from here


def test_a_store_of_mlflow_that_is_not_there_is_refused(tmp_path, project):
    with pytest.raises(UsageError, match=r"no mlflow.db"):
        import_runs(project, read_mlflow(str(tmp_path / "nothing")))


# --- W&B


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path / "tracked"


def test_offline_runs_of_wandb_become_runs(wandb_folder, project):
    import wandb

    wandb_folder.mkdir()
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    run = wandb.init(
        project="p",
        name="tracked",
        mode="offline",
        dir=str(wandb_folder),
        config={"lr": 0.1, "net": {"depth": 3}},
        settings=settings,
    )
    for step in range(300):  # more than one block of the file
        run.log({"loss": 1 / (step + 1), "nested": {"a": step}, "text": "x" * 200})
    run.log({"picture": wandb.Image(np.zeros((4, 6, 3), np.uint8)), "odd": float("nan")}, step=300)
    run.log({"w": wandb.Histogram(np.arange(10.0)), "t": wandb.Table(["a"], [[1]])}, step=301)
    run.finish()
    wandb.teardown()  # its service may still write
    done = import_runs(project, read_wandb(wandb_folder))
    past = history(project.root)
    assert [each.is_new for each in done] == [True]
    assert past.run("tracked").args == {"lr": 0.1, "net/depth": 3}
    found = columns(past, "tracked", "loss")
    assert found == [(step, 1 / (step + 1)) for step in range(300)]
    assert past.value("tracked", "nested/a", step=7) == 7
    assert past.value("tracked", "picture", step=300).size == (6, 4)
    assert np.isnan(past.value("tracked", "odd", step=300))
    assert past.value("tracked", "w", step=301)[0].sum() == 10
    assert past.value("tracked", "t", step=301).rows == [[1]]
    assert [each.records for each in import_runs(project, read_wandb(wandb_folder))] == [0]


def wandb_rows(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = Path(folder).glob("*.wandb")
    records = [Record.FromString(data) for data in log_records(file)]
    return [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_runs_go_out_to_wandb_once(wandb_folder, some_runs, project):
    done = [write_wandb(run, wandb_folder, "mine") for run in exported_runs(some_runs)]
    again = [write_wandb(run, wandb_folder, "mine") for run in exported_runs(some_runs)]
    assert [each.values > 0 for each in done] == [True, True]
    assert [each.values for each in again] == [0, 0]
    assert [each.place for each in done] == [each.place for each in again]
    import wandb

    wandb.teardown()  # its service may still write
    rows = wandb_rows(done[0].place)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 0.5, 1 / 3]
    assert [(row["_step"], row["norm"]) for row in rows if "norm" in row] == [(0, 3.5), (1, 4.5)]
    with pytest.raises(UsageError, match="no data of W&B"):
        import_runs(project, read_wandb(wandb_folder))  # they came from here


def test_a_damaged_offline_run_is_refused(tmp_path, project):
    file = tmp_path / "run-x.wandb"
    file.write_bytes(b":W&B\xe1\xbe\x00" + b"\x00\x01\x02\x03\x05\x00\x01hello")
    with pytest.raises(DamagedError, match="damaged at byte 7"):
        list(log_records(file))
    file.write_bytes(b"something else")
    with pytest.raises(DamagedError, match="not an offline run"):
        list(log_records(file))


# --- the commands


def test_the_commands_import_and_export(tmp_path, project, monkeypatch):
    from click.testing import CliRunner

    from rearview.cli.main import cli

    write_events(tmp_path / "logs", 2)
    monkeypatch.chdir(project.root)

    def run(*words):
        done = CliRunner().invoke(cli, [str(word) for word in words])
        assert not isinstance(done.exception, Exception), done.exception
        return done.output

    assert "1 new run of 1" in run("import", "tensorboard", tmp_path / "logs")
    assert "0 new runs of 1, 0 new records" in run("import", "tensorboard", tmp_path / "logs")
    assert "1 run, 2 new values" in run("export", "tensorboard", tmp_path / "out", "loss")
    assert "1 run, 0 new values" in run("export", "tensorboard", tmp_path / "out", "loss")
    run("export", "csv", tmp_path / "table", "loss")
    run("export", tmp_path / "table.csv", "loss")
    run("export", "parquet", tmp_path / "table.pq", "loss")
    assert (tmp_path / "table").read_bytes() == (tmp_path / "table.csv").read_bytes()
    assert (tmp_path / "table.pq").read_bytes()[:4] == b"PAR1"
