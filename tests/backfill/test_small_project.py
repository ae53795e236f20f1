"""A question about a small project is answered without what only large ones need."""

import subprocess
import sys

from plainly import recorded, write

SCRIPT = """
total = 0
for epoch in range(4):
    total += epoch
    # PROBE total
"""
ASK = """
import sys
from rearview._history import history
report = history({folder!r}).backfill(["asked"])
assert report.proved, report.proof
assert history({folder!r}).plan(["asked"]).nothing
heavy = {{"duckdb", "numpy", "pandas", "rich", "torch", "pyarrow", "ray"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_backfill_loads_no_database_and_no_library_for_it(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    probed = SCRIPT.replace("# PROBE total", 'rearview.log("asked", total)')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    code = ASK.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
