"""A question about a small project is answered without what only large ones need."""

import os
import subprocess
import sys

import msgspec

from plainly import recorded, write
from rearview._history import history

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


PHOTOS = """
import os
import pathlib
names = sorted(name for _, _, files in os.walk("photos") for name in files)
same = sorted(path.name for path in pathlib.Path(".").rglob("*.png"))
total = 0
for epoch in range(4):
    for name in names[epoch::4]:
        total += pathlib.Path("photos", name[0], name).stat().st_size + len(same)
    # PROBE total
"""


def test_a_folder_of_many_files_is_one_link_in_a_replay(tmp_path):
    write(tmp_path, train=PHOTOS)
    photos = tmp_path / "photos"
    for k in range(150):
        file = photos / str(k)[0] / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x89PNG\0" * k)
    for path in (*photos.rglob("*"), photos):
        os.utime(path, (1000, 1000))
    assert recorded(tmp_path, "train.py").code == 0
    probed = PHOTOS.replace("# PROBE total", 'rearview.log("asked", total)')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["asked"])
    assert report.proved, report.proof
    (file,) = (tmp_path / ".rearview/replays").glob("*/segment.json")
    assert msgspec.json.decode(file.read_bytes())["folded"] == ["photos"]
    assert len(list(photos.rglob("*.png"))) == 150  # the tree was removed, not what it led to
