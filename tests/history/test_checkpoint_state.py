"""The state and the values of a past run are to be had again, by name and point."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from plainly import SOURCE
from rearview._history import history
from rearview.errors import UsageError
from rearview.model import Run

SCRIPT = """\
import numpy as np
import torch
import rearview
from torch import nn

def main():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = {}
    for epoch in range(1, 5):
        opt.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        opt.step()
        kept[epoch] = float(model.weight.sum())
        rearview.log("w", model.weight)
        rearview.log("../../up", np.full(3, epoch, "<i2"))
        rearview.log("loss", 1 / epoch)
    return model

main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a project with one recorded run that has a checkpoint at every epoch."""
    root = tmp_path_factory.mktemp("project")
    (root / "train.py").write_text(SCRIPT)
    command(root, "run", "-q", "--every", "train.py")
    return root


def command(root, *words, code=0):
    env = {**os.environ, "PYTHONPATH": SOURCE, "REARVIEW_ROOT": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_value_is_had_by_run_name_and_point(folder):
    past = history(folder)
    run = past.run()
    value = past.value(run.id, "w", epoch=3)
    assert (value.dtype, tuple(value.shape)) == (torch.float32, (2, 3))
    assert torch.equal(run.value("w", "epoch=3"), value)
    assert past.value("latest", "loss", epoch=2) == 0.5
    for asked, slug in (
        ({}, "no-single-value"),
        ({"epoch": 9}, "no-single-value"),
        ({"step": 1}, "no-point"),
    ):
        with pytest.raises(UsageError) as error:
            past.value("latest", "w", **asked)
        assert error.value.slug == slug


def test_the_state_at_an_epoch_is_that_of_its_start_or_end(folder):
    past = history(folder)
    run = past.run()
    start, end = run.at(epoch=3), run.at(epoch=3, end=True)
    assert start.exact
    assert end.exact
    assert start["kept"].keys() == {1, 2}
    assert end["main.kept"].keys() == {1, 2, 3}
    assert torch.equal(end["model"]["weight"], run.value("w", epoch=3))
    assert torch.equal(past.at(run.id, "epoch=3")["model"]["weight"], run.value("w", epoch=2))
    assert torch.equal(run.at()["main.model"]["weight"], run.value("w", epoch=4))


def test_a_model_and_its_optimizer_continue_from_a_past_state(folder):
    run = history(folder).run()
    state = run.at(epoch=3)
    model = nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters())
    model.load_state_dict(state["main.model"])
    opt.load_state_dict(state["main.opt"])
    model(torch.ones(4, 3)).square().sum().backward()
    opt.step()
    assert torch.equal(model.weight, run.value("w", epoch=3))


def test_a_variable_that_cannot_be_read_is_named_with_the_reason(folder):
    state = history(folder).run().at(epoch=2)
    assert set(state) == {"main.model", "main.opt", "main.kept", "main.epoch"}
    assert dict(state).keys() == set(state)
    assert "model" in state
    assert "main" not in state
    assert "function" in state.missing["main"]
    for name, said in (("torch", "a module"), ("modle", "main.model")):
        with pytest.raises(KeyError, match=said):
            state[name]


def test_the_nearest_checkpoint_is_returned_with_a_warning(folder, caplog):
    past = history(folder)
    run = past.run()
    gone = run.at(epoch=3).checkpoint
    (folder / "kept").mkdir()
    manifest = past._checkpoints._path(gone.id)
    manifest.rename(folder / "kept" / manifest.name)
    try:
        with caplog.at_level(logging.WARNING, "rearview"):
            state = history(folder).run().at(epoch=3)
    finally:
        (folder / "kept" / manifest.name).rename(manifest)
    assert not state.exact
    assert state.point == "epoch=2"
    assert "no checkpoint at epoch=3" in caplog.text
    assert "nearest" in repr(state)


def test_a_point_that_is_none_is_refused(folder):
    run = history(folder).run()
    for asked in ({"step": 3}, {"epoch": "three"}):
        with pytest.raises(UsageError) as error:
            run.at(**asked)
        assert error.value.slug == "no-point"
    with pytest.raises(UsageError):
        run.at("epoch")


def test_a_run_of_a_history_is_still_the_value_that_it_was(folder):
    past = history(folder)
    run = past.run()
    plain = past._runs.find("latest")
    assert type(plain) is Run
    assert run == plain
    assert plain == run
    assert past.runs() == [run]
    assert repr(run) == repr(plain)


def test_values_are_saved_to_files_that_stay_in_the_folder(folder, tmp_path):
    out = tmp_path / "out"
    told = command(folder, "show", "--save", str(out))
    run = history(folder).run().id
    files = sorted(out.iterdir())
    assert len(files) == 8
    assert sorted(tmp_path.iterdir()) == [out]
    assert "float32[2, 3]" in told
    array = np.load(out / f"{run}_epoch=3_w.npy", allow_pickle=False)
    assert array.tolist() == history(folder).value(run, "w", epoch=3).tolist()
    assert "was there already" in command(folder, "show", run, "--save", str(out), "w")
    command(folder, "show", "-1", "--save", str(out), "loss")
    assert (out / f"{run}_epoch=2_loss.json").read_text() == "0.5\n"


def test_no_file_is_overwritten_or_written_through_a_link(folder, tmp_path):
    run = history(folder).run().id
    for make in (
        lambda path: path.write_text("mine"),
        lambda path: path.symlink_to(tmp_path / "t"),
    ):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        out.mkdir()
        file = out / f"{run}_epoch=1_w.npy"
        make(file)
        assert "save-exists" in command(folder, "show", "--save", str(out), "w", code=2)
        assert file.is_symlink() or file.read_text() == "mine"
    assert not (tmp_path / "t").exists()


def test_a_failed_save_names_its_reason(folder, tmp_path):
    assert "unknown-name" in command(folder, "show", "--save", str(tmp_path / "o"), "nope", code=2)
    (tmp_path / "file").write_text("")
    told = command(folder, "show", "--save", str(tmp_path / "file" / "x"), code=2)
    assert "save-failed" in told
    command(folder, "show", "latest", "more", code=2)
