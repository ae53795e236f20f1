"""A run says how long it waited for the libraries that it imports itself."""

from plainly import recorded, write
from rearview._history import history

LIBRARY = "import inner\nimport time\ntime.sleep(0.05)\nSPEC = __spec__.loader"
INNER = "import time\ntime.sleep(0.05)"
SCRIPT = """
import sys
sys.path.insert(0, "site-packages")
import outer
import quick
import own
print("exec_module" in vars(outer.SPEC), "exec_module" in vars(quick.__loader__))
for epoch in range(2):
    pass
"""


def test_imports_are_timed_with_all_that_they_import_and_left_as_they_are(tmp_path):
    write(tmp_path, train=SCRIPT, own="import time\ntime.sleep(0.05)")
    write(tmp_path / "site-packages", outer=LIBRARY, inner=INNER, quick="VALUE = 1")
    ended = recorded(tmp_path, "train.py")
    assert ended.out.split() == ["False", "False"], ended.err
    found = history(tmp_path).run().end.imports
    assert found["outer"] >= 0.1
    assert not found.keys() & {"inner", "own"}
