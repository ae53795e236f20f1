"""Only those who listen hear, and of nothing else."""

import os
import subprocess
import sys

SCRIPT = """
import os, sys
from rearview.runtime.sandbox import program_inputs

hooks = []
real, sys.addaudithook = sys.addaudithook, lambda hook: (hooks.append(hook), real(hook))
first, second = [], []
program_inputs.listen(lambda event, args: first.append((event, args[0])), "open", "os.mkdir")
program_inputs.listen(lambda event, args: second.append(event), "open")
id(first)
os.mkdir("made")
open("made/it", "w").close()
print(len(hooks), first, second)
"""


def test_each_listener_hears_its_own_events_through_one_hook(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, stdout=-1, text=True, check=True
    )
    assert done.stdout == "1 [('os.mkdir', 'made'), ('open', 'made/it')] ['open']\n"
