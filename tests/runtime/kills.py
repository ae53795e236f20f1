"""A job that saves, reports and is killed; as a program, against a target of any kind.

python kills.py FOLDER KILLS TARGET OPTIONS_AS_JSON
"""

import importlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

from rearview.checkpointer.checkpointer import Checkpointer
from rearview.remote.base import Retry

PIECES = 6
ENOUGH = 2
"""Saves at a server that must have been reported for kills to have had something to spoil."""


def write(path, value):
    """Write a value in pieces, so that a kill can fall between them."""
    with path.open("wb", buffering=0) as file:
        for piece in range(PIECES):
            file.write(struct.pack("<QQ", value, piece) * 500)


def read(path):
    """Return the value if every piece is that of one save."""
    data = path.read_bytes()
    value = struct.unpack_from("<Q", data)[0]
    expected = b"".join(struct.pack("<QQ", value, piece) * 500 for piece in range(PIECES))
    assert data == expected, "half a save was restored"
    return value


def make(folder, **options):
    options = {"checkpoint_transfer_target": folder / "far" / "ck.pt", **options}
    return Checkpointer(
        folder / "here" / "ck.pt",
        write,
        read,
        checkpoint_every=1,
        signals=(),
        retry=Retry(attempts=1),
        **options,
    )


def job(folder, report, options):
    """Go on from the last save, report each step once it is done, until killed."""
    one = make(folder, **options)
    value = one.restore(0)
    os.write(report, struct.pack("<Q", 0))
    while True:
        value += 1
        one.step(value)
        os.write(report, struct.pack("<Q", value))


def step_takes(folder, **options):
    """Return the seconds that one step takes on this machine, as busy as it is now."""
    (folder / "here").mkdir()
    with make(folder, **options) as one:
        begun = time.perf_counter()
        for value in range(1, 6):
            one.step(value)
    return (time.perf_counter() - begun) / 5


def killed_after(folder, seconds, options):
    """Run the job for so long; return the last step it reported as saved, or None."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            job(folder, write_end, options)
        finally:
            os._exit(1)  # only an error comes here
    os.close(write_end)
    os.read(read_end, 8)  # it has begun
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    reported = b""
    while data := os.read(read_end, 1 << 16):
        reported += data
    os.close(read_end)
    return struct.unpack("<Q", reported[-8:])[0] if reported else None


def in_a_child(action):
    """Return the number that `action` returns, run in a fork: some clients cannot be forked later."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write_end, struct.pack("<d", action()))
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    data = os.read(read_end, 8)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return struct.unpack("<d", data)[0]


def restored(folder, options):
    with make(folder, **options) as one:
        return one.restore(0)


def main(folder, kills, options):
    """Kill the job so many times, moving it to another node now and then; say what was seen."""
    dice = random.Random(9)
    takes = in_a_child(lambda: step_takes(folder, **options))
    shutil.rmtree(folder / "here")
    acknowledged, worst = 0, 0.0
    for kill in range(3 * kills):
        if kill >= kills:
            if acknowledged > ENOUGH:
                break
            takes *= 1.5  # on a busy machine connecting takes longer than a step
        (folder / "here").mkdir(exist_ok=True)
        last = killed_after(folder, dice.uniform(0, 2 * takes), options)
        acknowledged = max(acknowledged, last or 0)
        if dice.random() < 0.5:
            shutil.rmtree(folder / "here")
            (folder / "here").mkdir()
        worst = min(worst, in_a_child(lambda: restored(folder, options)) - acknowledged)
    sys.stdout.write(json.dumps({"acknowledged": acknowledged, "worst": worst}))


if __name__ == "__main__":
    # imported once, here, not in every child; they start nothing before they are used
    for name in {"s3": ["s3fs"], "webdav+http": ["webdav4.fsspec"]}.get(
        sys.argv[3].split(":")[0], ()
    ):
        importlib.import_module(name)
    target = {"checkpoint_transfer_target": sys.argv[3], "remote_options": json.loads(sys.argv[4])}
    main(Path(sys.argv[1]), int(sys.argv[2]), target)
