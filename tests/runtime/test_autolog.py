"""Numbers assigned in loops become columns by themselves, and arguments are kept."""

from plainly import recorded, write
from rearview._history import history

TEXT = """
import argparse
import numpy as np
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.5)
rate = parser.parse_args().rate
for epoch in range(3):
    for i in range(2000): pass
    loss = epoch * rate
    error = np.float32(loss) + 1
    array = np.array(2.5)
    name = "text"
    count = bool(epoch)
"""


def test_every_scalar_assigned_in_a_loop_is_logged_under_its_name(tmp_path):
    write(tmp_path, train=TEXT)
    assert recorded(tmp_path, "train.py", "--rate", "0.25", autolog=True).code == 0
    assert dict(history(tmp_path).run().args) == {"rate": 0.25}
    rows = history(tmp_path).table("loss", "error", "array", "count").rows()
    found = [(row["epoch"], row["loss"], row["error"], row["array"]) for row in rows]
    assert found == [(0, 0.0, 1.0, 2.5), (1, 0.25, 1.25, 2.5), (2, 0.5, 1.5, 2.5)]
    assert "name" not in history(tmp_path).show().names
