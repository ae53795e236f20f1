"""Journey: what a backfill cannot do it says, with the reason, and leaves nothing half done."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parent.parent.parent / "src"
SCRIPT = """\
import random
import time

import elsewhere

data = open("data.bin", "rb").read()
weight = 0.0
for epoch in range(6):
    for step in range(3):
        weight = weight * 0.9 + random.random() + data[step] * elsewhere.FACTOR
        time.sleep(elsewhere.PAUSE)
    print(epoch, weight, flush=True)
"""
PROBED = "import rearview\n" + SCRIPT.replace(
    "FACTOR\n", "FACTOR\n        rearview.log('weight', weight)\n", 1
)


class Place:
    """A project, and a package that stands elsewhere."""

    def __init__(self, folder):
        self.root, self.site = folder / "project", folder / "site"
        for made in (self.root, self.site):
            made.mkdir()
        (self.site / "elsewhere.py").write_text("FACTOR = 0.5\nPAUSE = 0.0\n")
        (self.root / "train.py").write_text(SCRIPT)
        (self.root / "data.bin").write_bytes(bytes(range(256)))

    def started(self, *words, installed=True, **more):
        env = {key: value for key, value in os.environ.items() if not key.startswith("REARVIEW_")}
        path = [str(SRC), str(self.site)] if installed else [str(SRC)]
        return subprocess.Popen(
            [sys.executable, "-m", "rearview", *words],
            cwd=self.root,
            env=env | {"PYTHONPATH": os.pathsep.join(path), "REARVIEW_CAPTURE": "none"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def done(self, *words, **more):
        process = self.started(*words, **more)
        out, err = process.communicate(timeout=HUNG)
        return process.returncode, out, err

    def filled(self, name="weight"):
        code, out, err = self.done("table", name, "--format", "json")
        assert code == 0, err
        return [row for row in json.loads(out) if row[name] is not None]


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    code, _, err = made.done("run", "-q", "--every", "train.py")
    assert code == 0, err
    (made.root / "train.py").write_text(PROBED)
    return made


def test_a_predicate_on_a_name_that_does_not_exist_is_refused(place):
    code, _, err = place.done("backfill", "weight", "--where", "acc < 0.9")
    assert code == 2
    assert "'acc'" in err
    assert "unknown-name" in err


@pytest.mark.parametrize(
    "words",
    [
        ("sql", "delete from records"),
        ("sql", "copy records to 'out.csv'"),
        ("sql", "select 1; drop table records"),
        ("sql", "attach 'other.db'"),
        ("backfill", "weight", "--where", "true; drop table records"),
        ("backfill", "weight", "--where", "true) union select * from read_text('train.py'"),
    ],
)
def test_sql_that_writes_or_is_more_than_a_question_is_refused(place, words):
    before = sorted(path.name for path in place.root.iterdir())
    code, _, err = place.done(*words)
    assert code == 2
    assert "errors.md#sql" in err
    assert sorted(path.name for path in place.root.iterdir()) == before


def test_a_package_that_is_no_longer_installed_is_named_before_anything_runs(place):
    code, _, err = place.done("backfill", "weight", installed=False)
    assert code == 1
    assert "it imports elsewhere, which is not installed here any more" in err
    assert "Nothing to run." in err
    code, _, err = place.done("backfill", "weight")
    assert code == 0, err


def test_a_package_that_is_missed_only_when_it_runs_is_named_too(tmp_path):
    place = Place(tmp_path)
    late = SCRIPT.replace("import elsewhere\n", "import importlib\n", 1).replace(
        "weight = 0.0\n", "elsewhere = importlib.import_module('elsewhere')\nweight = 0.0\n", 1
    )
    (place.root / "train.py").write_text(late)
    assert place.done("run", "-q", "--every", "train.py")[0] == 0
    probe = "FACTOR\n        rearview.log('weight', weight)\n"
    (place.root / "train.py").write_text("import rearview\n" + late.replace("FACTOR\n", probe, 1))
    code, out, err = place.done("backfill", "weight", installed=False)
    assert code == 1, err
    assert "failed:" in out
    assert "No module named 'elsewhere'" in out
    assert place.filled() == []


def test_a_data_file_that_is_gone_is_named_before_anything_runs(place):
    (place.root / "data.bin").rename(place.root / "moved.bin")
    code, _, err = place.done("backfill", "weight")
    assert code == 1
    assert "data.bin is gone; bring it back" in err
    (place.root / "moved.bin").rename(place.root / "data.bin")
    assert place.done("backfill", "weight")[0] == 0


def test_a_run_that_never_finished_is_filled_as_far_as_it_came(tmp_path):
    place = Place(tmp_path)
    (place.site / "elsewhere.py").write_text("FACTOR = 0.5\nPAUSE = 0.1\n")
    process = place.started("run", "-q", "--every", "train.py")
    for line in process.stdout:
        if line.startswith("3 "):
            break
    process.kill()
    process.communicate()
    (place.site / "elsewhere.py").write_text("FACTOR = 0.5\nPAUSE = 0.0\n")
    (place.root / "train.py").write_text(PROBED + "rearview.log('last', weight)\n")
    code, out, err = place.done("backfill", "weight")
    assert code == 0, out + err
    epochs = {row["epoch"] for row in place.filled()}
    assert {0, 1, 2} <= epochs <= {0, 1, 2, 3, 4}
    code, _, err = place.done("backfill", "last")
    assert code == 1
    assert "never finished" in err


def test_a_full_disk_stops_a_backfill_which_continues_when_there_is_room(place):
    large = PROBED.replace("log('weight', weight)", "log('large', str(weight) * 20_000)")
    (place.root / "train.py").write_text(large)

    def small():
        # files cannot grow further, as on a disk that has no room left
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))

    code, out, err = place.done("backfill", "large", preexec_fn=small)
    assert code in {1, 2}
    assert "Traceback" not in err
    assert "File too large" in out + err
    code, out, err = place.done("backfill", "large")
    assert code == 0, out + err
    rows = place.filled("large")
    assert len(rows) == len({(row["epoch"], row["step"]) for row in rows}) == 18
    assert place.done("verify")[0] == 0


def test_a_full_disk_is_reported_with_what_to_do(place, monkeypatch, capsys):
    from rearview.cli import main
    from rearview.execute.replay_jobs import ReplayJobs

    def full(self, *_args, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReplayJobs, "prepare", full)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place.site)])
    monkeypatch.chdir(place.root)
    with pytest.raises(SystemExit) as ended:
        main.main(["backfill", "weight"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "is full" in said
    assert "disk-full" in said
