"""What a run writes is part of its state, and a replay leaves the user's files alone."""

import textwrap

from plainly import recorded, write
from rearview.past import history
from rearview.store.records import read

TEXT = """
import os, pathlib
here = pathlib.Path(__file__).parent
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i % 7
    if epoch in (1, 3):
        (here / "out").mkdir(exist_ok=True)
        (here / "out" / "best.txt").write_text(str(total))
    if epoch == 2:
        with open("temporary.txt", "w") as file:
            file.write("x")
        os.replace("temporary.txt", "kept.txt")
    with open("log.txt", "a") as file:
        file.write(f"{epoch}\\n")
best = int((here / "out" / "best.txt").read_text())
lines = open("log.txt").read().split()
"""
PROBE = 'rearview.log("best", best)\nrearview.log("lines", len(lines))\nrearview.log("files", sorted(os.listdir(".")))\n'


def test_files_written_in_skipped_iterations_are_there_in_a_replay(tmp_path):
    write(tmp_path, train=TEXT)
    assert recorded(tmp_path, "train.py").code == 0
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.txt")}
    (tmp_path / "train.py").write_text("import rearview\n" + TEXT + PROBE)
    report = history(tmp_path).backfill(["best", "lines"])
    assert report.proved, report.proof
    assert report.outcomes[0].report.restored >= 1
    found = {
        record.name: record.value
        for file in (tmp_path / ".rearview" / "runs").glob("*/records-*.jsonl")
        for record in read(file)
    }
    assert found["best"] == int((tmp_path / "out" / "best.txt").read_text())
    assert found["lines"] == 6
    assert {p: p.stat().st_mtime_ns for p in written} == written


def test_a_replay_does_not_write_through_links_into_the_users_tree(tmp_path):
    text = """
    import numpy, torch, pathlib
    here = pathlib.Path(__file__).parent
    total = 0
    for epoch in range(4):
        for i in range(2000): total += i
    torch.save({"total": total}, here / "model.pt")
    with open(here / "notes.txt", "a") as file:
        file.write("done\\n")
    """
    write(tmp_path, train=textwrap.dedent(text))
    assert recorded(tmp_path, "train.py").code == 0
    model = (tmp_path / "model.pt").stat().st_mtime_ns
    probed = "import rearview\n" + textwrap.dedent(text) + 'rearview.log("total", total)\n'
    (tmp_path / "train.py").write_text(probed)
    report = history(tmp_path).backfill(["total"])
    assert report.written == 1, report.proof
    assert (tmp_path / "model.pt").stat().st_mtime_ns == model
    assert (tmp_path / "notes.txt").read_text() == "done\n"
