"""A run that goes on finds the project's folder as it found it the first time."""

import json
import os
import subprocess

import pytest

from limits import HUNG
from plainly import SOURCE, plain, recorded, write
from rearview._history import history
from rearview.runtime.sandbox.written_files import OverwrittenFiles

TEXT = """
import logging, os, pickle, random, signal, time
random.seed(0)
os.makedirs("out/logs")
name = f"exp{len([d for d in os.listdir('.') if d.startswith('exp')])}"
os.mkdir(name)
if not os.path.exists("data.txt"):
    open("data.txt", "w").write(str(random.random()))
w, first = float(open("data.txt").read()), 0
if os.path.exists("out/ckpt.pkl"):
    w, first = pickle.load(open("out/ckpt.pkl", "rb"))
log = open("train.log", "a")
logging.basicConfig(filename="messages.log", filemode="w", level="INFO")
open(f"{name}/args.txt", "x").write("args")
held = __HELD__
for epoch in range(first, 6):
    for step in range(5):
        w = 0.9 * w + 0.1 * random.random()
    os.mkdir(f"{name}/epoch{epoch}")
    with open("out/ckpt.pkl", "wb") as file:
        pickle.dump((w, epoch + 1), file)
    log.write(f"{epoch} {w}\\n")
    log.flush()
    logging.info("epoch %d", epoch)
    with open("out/logs/all.csv", "a") as file:
        file.write(f"{epoch},{w}\\n")
    if epoch == 3 and os.environ.get("REARVIEW_DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
print(w, first, name)
"""


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not {".rearview", "__pycache__"} & set(path.parts)
    }


def resumed(folder):
    how = history(folder).resume()
    return subprocess.run(
        how.command,
        cwd=how.folder,
        env={**how.environment, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )


@pytest.mark.parametrize("held", ["None", "__import__('sqlite3').connect(':memory:')"])
def test_a_resumed_program_that_looks_for_its_own_files_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, held
):
    """From its last checkpoint, or from the start where it holds what cannot be saved."""
    text = TEXT.replace("__HELD__", held)
    truth, folder = tmp_path / "truth", tmp_path / "folder"
    for each in (truth, folder):
        each.mkdir()
        write(each, train=text)
        (each / "train.log").write_text("of an earlier day\n")
    expected = plain(truth, "train.py")
    assert expected.code == 0, expected.err
    monkeypatch.setenv("REARVIEW_DIES", "1")
    assert recorded(folder, "train.py").code == -9
    monkeypatch.delenv("REARVIEW_DIES")
    done = resumed(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.out
    assert tree(folder) == tree(truth)
    kept = folder / ".rearview" / "runs"
    assert not [*kept.glob("*/aside"), *kept.glob("*/before")]


def test_a_file_too_large_to_be_copied_is_moved_away_and_back(tmp_path):
    root = f"{tmp_path}{os.sep}"
    run = tmp_path / ".rearview"
    run.mkdir()
    traces = OverwrittenFiles.of(run, root, lambda: True)
    traces.record_write("best.pt")
    (tmp_path / "best.pt").write_text("weights")
    again = OverwrittenFiles.of(run, root, lambda: False)
    assert again.restore_initial_files(data=False) == set()
    assert not (tmp_path / "best.pt").exists()
    again.restore_large_files(["best.pt"])
    assert (tmp_path / "best.pt").read_text() == "weights"
    assert not again.aside.exists()


def test_a_second_attempt_keeps_the_files_that_the_first_had_set_aside(tmp_path):
    run = tmp_path / ".rearview"
    run.mkdir()
    traces = OverwrittenFiles.of(run, f"{tmp_path}{os.sep}", lambda: True)
    traces.record_write("log.txt")
    (tmp_path / "log.txt").write_text("all of it")
    traces.restore_initial_files(data=False)
    (tmp_path / "log.txt").write_text("begun")
    traces.restore_initial_files(data=False)
    traces.restore_large_files(["log.txt"])
    assert (tmp_path / "log.txt").read_text() == "all of it"


def test_data_that_the_program_made_stays_unless_the_run_starts_over(tmp_path):
    run = tmp_path / ".rearview"
    run.mkdir()
    traces = OverwrittenFiles.of(run, f"{tmp_path}{os.sep}", lambda: False)
    traces.record_mkdir("data")
    (tmp_path / "data").mkdir()
    traces.record_write("data/a.npy")
    (tmp_path / "data" / "a.npy").write_text("1")
    traces.record_read("data/a.npy")
    assert traces.restore_initial_files(data=False) == {"data"}
    assert traces.restore_initial_files(data=True) == set()
    traces.ended(well=False)
    assert (tmp_path / "data" / "a.npy").read_text() == "1"


ANEW = """
import json, os, time
def save(d):
    with open(b"vocab.json", "w") as f: json.dump(d, f)
vocab = {}
for word in "the quick brown fox jumps".split():
    vocab[word] = len(vocab); save(vocab)
save({k: v for k, v in vocab.items() if v < 2})
vocab = json.load(open("vocab.json"))
log = open("../log.txt", "wb")
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i * epoch * len(vocab)
    log.write(b"%d\\n" % total)
    log.flush()
    if epoch == int(os.environ.get("REARVIEW_DIES", -1)):
        os._exit(9)
"""


def test_files_that_the_set_up_writes_several_times_are_complete_in_a_resumed_run(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "log.txt").write_text("of an earlier run, and longer than what is written now " * 9)
    folder = write(tmp_path / "proj", train=ANEW)
    monkeypatch.setenv("REARVIEW_DIES", "4")
    assert recorded(folder, "train.py").code == 9
    monkeypatch.delenv("REARVIEW_DIES")
    done = resumed(folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "vocab.json").read_text()) == {"the": 0, "quick": 1}
    totals = [int(line) for line in (tmp_path / "log.txt").read_text().split()]
    assert len(totals) == 6
    assert totals == sorted(set(totals))


TAIL = """
    if epoch == int(os.environ.get("REARVIEW_DIES", -1)):
        os._exit(9)
"""
LATEST = """
import os
os.makedirs("out", exist_ok=True)
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i
    with open(f"out/{epoch}.txt", "w") as f: f.write(str(total))
    if os.path.islink("out/latest"): os.unlink("out/latest")
    os.symlink(f"{epoch}.txt", "out/latest")
    assert open("out/latest").read() == str(total)
"""
ROWS = """
import csv, os
out = csv.writer(open("rows.csv", "w", newline=""))
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i
    out.writerow([epoch, total])
"""
TEE = """
import os, sys
class Tee:
    def __init__(self, path):
        self.file, self.stream = open(path, "w"), sys.stdout
    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()
sys.stdout = Tee("log.txt")
print("begun")
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i
    print(epoch, total)
"""
NAMELESS = """
import os, tempfile
os.makedirs("out", exist_ok=True)
with tempfile.TemporaryFile(dir="out") as f:
    f.write(b"x")
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i
"""


@pytest.mark.parametrize(
    "text", [LATEST, ROWS, TEE, NAMELESS], ids=["link", "rows", "tee", "nameless"]
)
def test_a_resumed_run_leaves_the_same_traces_as_an_uninterrupted_one(tmp_path, monkeypatch, text):
    whole = write(tmp_path / "whole", train=text)
    assert plain(whole, "train.py").code == 0
    folder = write(tmp_path / "parted", train=text + TAIL)
    monkeypatch.setenv("REARVIEW_DIES", "4")
    assert recorded(folder, "train.py").code == 9
    monkeypatch.delenv("REARVIEW_DIES")
    done = resumed(folder)
    assert done.returncode == 0, done.stderr
    assert _left(folder) == _left(whole)


def _left(folder):
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_text()
        for path in folder.rglob("*")
        if ".rearview" not in path.parts
        and path.suffix != ".py"
        and (path.is_file() or path.is_symlink())
    }


def test_a_link_that_the_run_moved_is_not_an_input_of_its_replay(tmp_path):
    write(tmp_path, train=LATEST)
    assert recorded(tmp_path, "train.py").code == 0
    probed = "import rearview\n" + LATEST + '    rearview.log("t", total)\n'
    (tmp_path / "train.py").write_text(probed)
    report = history(tmp_path).backfill(["t"])
    assert report.proved, report.proof
    assert str((tmp_path / "out" / "latest").readlink()) == "5.txt"
