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
