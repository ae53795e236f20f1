"""A training whose every step depends on all before; its end state shows any step lost or done twice.

python train.py STEPS SECONDS_PER_STEP FOLDER_FOR_RESULTS [option=value …]
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from rearview import Checkpointer

steps, pause, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
options = {"checkpoint_every": 1}
for text in sys.argv[4:]:
    name, _, value = text.partition("=")
    options[name] = json.loads(value)

checkpointer = Checkpointer(
    Path("state.json"),
    lambda path, state: path.write_text(json.dumps(state)),
    lambda path: json.loads(path.read_text()),
    **options,
)
state = checkpointer.restore(default={"step": 0, "digest": ""})
with (folder / "trace.txt").open("a") as trace:
    trace.write(f"start {state['step']} {os.getpid()}\n")
while state["step"] < steps:
    step = state["step"] + 1
    state = {
        "step": step,
        "digest": hashlib.sha256(f"{state['digest']} {step}".encode()).hexdigest(),
    }
    time.sleep(pause)
    checkpointer.step(state)
(folder / "final.txt").write_text(state["digest"])
