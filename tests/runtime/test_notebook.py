"""The Checkpointer in a real notebook kernel, interrupted as the stop button does."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parents[2] / "src"

MISSING = [name for name in ("ipykernel", "jupyter_client") if not importlib.util.find_spec(name)]

# one program drives the kernel, so that its event loop and warnings stay out of ours
DRIVER = r"""
import sys, time
from jupyter_client import KernelManager

manager = KernelManager()
manager.kernel_spec.argv[:] = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=1200)

def cell(code, interrupt_when=None):
    sent = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=1200)
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            print(content["text"], end="")
            if interrupt_when and interrupt_when in content["text"]:
                manager.interrupt_kernel()
                interrupt_when = None
        elif kind == "error":
            print("raised", content["ename"])
        elif kind == "status" and content["execution_state"] == "idle":
            return

MAKE = '''
from pathlib import Path
import time
from rearview import Checkpointer
one = Checkpointer(Path("ck"), lambda p, v: p.write_text(str(v)), lambda p: int(p.read_text()),
                   checkpoint_every=None)
'''
LOOP = '''
value = one.restore(0)
print("from", "zero" if value == 0 else "later", flush=True)
for value in range(value + 1, 10**6):
    time.sleep(0.01)
    one.step(value)
    if value % 20 == 10:
        print("going", flush=True)
'''
cell(MAKE)
cell(LOOP, interrupt_when="going")
cell("print('saved', one.checkpoint_exists, one.restore(0) == value)")
cell(LOOP, interrupt_when="going")
cell("print('alive', one.restore(0) == value)")
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.skipif(bool(MISSING), reason=f"NOT TESTED in a real kernel: {MISSING} not installed")
def test_the_stop_button_saves_ends_the_cell_and_leaves_the_kernel_usable(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line != "going"]
    assert said == [
        "from zero",
        "raised KeyboardInterrupt",
        "saved True True",
        "from later",
        "raised KeyboardInterrupt",
        "alive True",
    ], done.stdout + done.stderr


KERNEL_CELLS = r"""
import sys
from jupyter_client import KernelManager

manager = KernelManager()
manager.kernel_spec.argv[:] = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready()

def show(message):
    content = message["content"]
    if message["msg_type"] == "error":
        print("raised", content["ename"], content["evalue"])
    elif "text" in content:
        print(content["text"], end="")
    elif "data" in content:
        print(content["data"].get("text/html") or content["data"]["text/plain"])

for code in (
    "import sys; sys.modules['ipywidgets'] = None",
    "%load_ext rearview",
    "import rearview; rearview.log('a', 1)",
    "dir(rearview) == sorted([*rearview.__all__, '__version__'])",
    "rearview.history()",
    "rearview.history().runs()",
    "rearview.history().table('a')",
    "rearview.history().table('a').pandas().shape",
):
    client.execute_interactive(code, output_hook=show)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_live_kernel_records_into_the_folder_of_the_notebook_and_shows_its_records(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_CELLS],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "raised" not in done.stdout
    assert f"recording into {tmp_path / '.rearview'}" in done.stdout
    assert "rearview.log(" in done.stdout
    assert "\nTrue\n" in done.stdout
    assert f"<History of {tmp_path}: 1 run>" in done.stdout
    assert "<td>1</td>" in done.stdout
    assert "(1, 2)" in done.stdout
    assert (tmp_path / ".rearview").is_dir()
