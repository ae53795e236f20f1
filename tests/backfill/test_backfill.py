"""Probes of the ordinary kind are answered exactly, whatever else changes with them."""

import pytest

from plainly import recorded, write
from rearview._history import history

CLOSURE = """
def main():
    w, lr = 1.0, 0.1
    def step():
        nonlocal w
        for _ in range(2000):
            w *= 0.9999
        # PROBE lr
        return w
    for epoch in range(5):
        loss = step()
        lr *= 0.95
main()
"""
FILES = """
import fsspec
fs = fsspec.filesystem("file")
total = 0
for epoch in range(5):
    for i in range(2000):
        total += i
    with fs.open("ck.txt", "w") as file:
        file.write(str(total))
    # PROBE total
"""
BYTES = """
total = 0
with open(b"log.txt", "wb") as file:
    file.write(b"begun")
for epoch in range(5):
    for i in range(2000):
        total += i
    with open(b"log.txt", "rb+") as file:
        file.write(b"%d" % total)
    found = open(b"log.txt", "rb").read()
    # PROBE total
"""


@pytest.mark.parametrize("text", [CLOSURE, FILES, BYTES], ids=["closure", "fsspec", "bytes"])
def test_a_probe_is_answered_exactly(tmp_path, text):
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    name = text.partition("# PROBE ")[2].split()[0]
    probed = text.replace(f"# PROBE {name}", f'rearview.log("asked", {name})')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["asked"])
    assert report.proved, report.proof
    assert report.written == 5


ABOVE = """
import sys
sys.path.append("../../")
from pkg.sub.model import f
total = 0
for epoch in range(5):
    for i in range(2000):
        total = f(total)
    # PROBE total
"""


@pytest.mark.parametrize("package", [True, False])
def test_a_script_that_imports_itself_from_above_its_folder_is_replayed(tmp_path, package):
    folder = tmp_path / "pkg" / "sub"
    write(folder, train=ABOVE, model="def f(x): return x + 1\n")
    if package:
        for place in (folder, folder.parent):
            (place / "__init__.py").touch()
    assert recorded(folder, "train.py").code == 0
    probed = ABOVE.replace("# PROBE total", 'rearview.log("asked", total)')
    (folder / "train.py").write_text("import rearview\n" + probed)
    report = history(folder).backfill(["asked"])
    assert report.proved, report.proof
    assert report.written == 5


TWO_LOOPS = """
w = 1.0
for epoch in range(5):
    for step in range(20):
        w = w * 0.99 + step
    # FIRST
for fold in range(4):
    for i in range(10):
        w = w * 0.5 + i
    # SECOND
print(w)
"""


@pytest.mark.parametrize("rerun", ["true", "false"])
@pytest.mark.parametrize(
    ("names", "values"), [(["first"], 5), (["second"], 4), (["first", "second"], 9)]
)
def test_two_loops_at_the_top_level_are_both_planned(tmp_path, monkeypatch, rerun, names, values):
    monkeypatch.setenv("REARVIEW_RERUN", rerun)
    write(tmp_path, train=TWO_LOOPS)
    assert recorded(tmp_path, "train.py").code == 0
    text = TWO_LOOPS
    for name in names:
        text = text.replace(f"# {name.upper()}", f'rearview.log("{name}", w)')
    (tmp_path / "train.py").write_text("import rearview\n" + text)
    past = history(tmp_path)
    (segment,) = past.plan(names).plan.segments
    # the main loop is the one that took longer: on a busy machine, it may be the second
    assert segment.tail or "second" not in names or past.run().end.main.name == "fold"
    report = past.backfill(names)
    assert (report.written, report.proved) == (values, True), report.proof
    assert not report.redone
    assert past.plan(names).nothing
