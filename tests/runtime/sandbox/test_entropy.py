"""Everything random in a run follows from one number, also what was begun before the program."""

import importlib
import importlib.util
import textwrap

from plainly import plain, recorded, write
from rearview._history import history
from rearview.runtime.sandbox.entropy import after_import

TEXT = """
import os, random, secrets, shutil, tempfile, uuid
seen = []
for epoch in range(3):
    for i in range(3000): pass
    folder = tempfile.mkdtemp()
    seen += [folder, tempfile.gettempdir(), uuid.uuid4(), secrets.token_hex(4), random.random()]
    shutil.rmtree(folder)
"""


def test_names_of_temporary_files_are_drawn_again(tmp_path):
    write(tmp_path, train=textwrap.dedent(TEXT))
    assert recorded(tmp_path, "train.py").code == 0
    report = history(tmp_path).replay()
    assert report.proved, report.proof
    assert report.outcomes[0].report.states > 0


LIBRARY = "import random\nown = random.Random().random()\n"
LOADS = """
import os, random, sys
sys.path.insert(0, os.path.join({folder!r}, "site-packages"))
# probe: import drawing as ahead
seen = []
for epoch in range(3):
    for i in range(3000): pass
    seen.append(random.Random().random())
    if epoch == 1:
        import drawing
        seen.append(drawing.own)
    # probe: import rearview; rearview.log("last", seen[-1])
"""


def test_a_library_that_draws_when_it_is_loaded_may_be_loaded_earlier(tmp_path):
    library = tmp_path / "elsewhere" / "site-packages"
    library.mkdir(parents=True)
    (library / "drawing.py").write_text(LIBRARY)
    text = LOADS.format(folder=str(library.parent))
    project = tmp_path / "project"
    project.mkdir()
    write(project, train=text)
    assert recorded(project, "train.py").code == 0
    write(project, train=text.replace("# probe: ", ""))
    report = history(project).backfill(["last"])
    assert report.proved, report.proof
    assert report.outcomes[0].report.written == 3


def test_restoring_imports_no_module_that_draws_random_numbers_at_import(tmp_path):
    """A probe is shielded between `import torch` and the first optimizer, which imports a lot."""
    text = """
    import sys
    import torch
    from rearview.state.codecs.rng import read_global, write_global
    before = set(sys.modules)
    write_global(read_global())
    print(sorted(name for name in set(sys.modules) - before if name.startswith("torch._")))
    """
    write(tmp_path, train=textwrap.dedent(text))
    done = plain(tmp_path, "train.py")
    assert (done.code, done.out) == (0, "[]\n"), done.err


def test_a_module_that_was_only_looked_for_is_still_awaited(tmp_path, monkeypatch):
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import("looked_for", lambda module: seen.append(("first", module.value)))
    after_import("looked_for", lambda module: seen.append(("second", module.value)))
    assert importlib.util.find_spec("looked_for") is not None
    assert not seen
    importlib.import_module("looked_for")
    assert seen == [("first", 1), ("second", 1)]
    after_import("looked_for", lambda module: seen.append(("third", module.value)))
    assert seen[2:] == [("third", 1)]


DRAWS = """
import secrets
import numpy as np
import numpy.random.bit_generator as drawing
a, b = np.random.default_rng().integers(1 << 40), np.random.default_rng().integers(1 << 40)
if SLOWLY:
    drawing.randbits = secrets.randbits
c = np.random.default_rng().integers(1 << 40)
print(a, b, c, secrets.token_hex(4))
"""


def test_the_fast_patch_of_numpy_draws_the_same_numbers_as_os_urandom(tmp_path, monkeypatch):
    monkeypatch.setenv("REARVIEW_ENTROPY", "07" * 32)
    said = []
    for slowly in (True, False):
        write(tmp_path, train=f"SLOWLY = {slowly}\n" + DRAWS)
        said.append(recorded(tmp_path, "train.py").out)
    assert said[0] == said[1]
    assert len(set(said[0].split())) == 4


FOLLOWS = """
import os, random, sys, tempfile, uuid
from rearview.runtime.sandbox import entropy

key = bytes(range(32))
if sys.argv[1] == "late":
    randomness = entropy.install(b"")
    import numpy as np
    import drawing
    if os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    randomness.follow(key)
else:
    randomness = entropy.install(key)
    import numpy as np
    import drawing
print(os.urandom(4), random.random(), uuid.uuid4(), tempfile.mktemp(), np.random.random())
print(np.random.default_rng().random(), drawing.again(), randomness.stream.place)
"""


def test_random_hooks_installed_before_a_fork_follow_a_key_after_it(tmp_path):
    site = tmp_path / "site-packages"
    write(tmp_path, late=FOLLOWS)
    write(site, drawing="import random\nrandom.Random()\nagain = lambda: random.Random().random()")
    text = (tmp_path / "late.py").read_text()
    (tmp_path / "late.py").write_text(f"import sys\nsys.path.append({str(site)!r})\n{text}")
    ended = [plain(tmp_path, "late.py", when) for when in ("late", "at once")]
    assert ended[0].out == ended[1].out != "", ended[0].err
