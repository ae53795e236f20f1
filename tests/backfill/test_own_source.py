"""A program that reads its own source finds it as it was recorded, without the probes."""

from plainly import recorded, write
from rearview._history import history

TEXT = """
import pathlib, shutil, sys
import part
code = open(sys.argv[0]).read() + pathlib.Path(part.__file__).read_text()
size = pathlib.Path("part.py").stat().st_size
shutil.copy(__file__, "copied.txt")
total = 0
for epoch in range(4):
    for i in range(2000):
        total = part.add(total, i)
"""
PART = "def add(total, i):\n    return total + i % 7\n"
PROBED = "import rearview\ndef add(total, i):\n    rearview.log('seen', total)\n    return total + i % 7\n"


def test_a_program_that_keeps_its_own_source_is_replayed_exactly(tmp_path):
    write(tmp_path, train=TEXT, part=PART)
    assert recorded(tmp_path, "train.py").code == 0
    (tmp_path / "part.py").write_text(PROBED)
    (tmp_path / "train.py").write_text("import rearview\n" + TEXT + 'rearview.log("t", total)\n')
    report = history(tmp_path).backfill(["t", "seen"])
    assert report.proved, report.proof
    assert report.written == 8001
    copies = (tmp_path / ".rearview" / "replays").glob("*/tree/copied.txt")
    assert {copy.read_text() for copy in copies} == {TEXT}
