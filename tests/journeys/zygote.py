"""A process that has imported torch once and forks a child for each program to run.

Started as `python zygote.py SOCKET`. Each connection brings one line of JSON (environment, folder,
log file) and gets one back: the exit code. The child runs the same entry point as a fresh interpreter
would, to its normal end, so only the import is shared.
"""

import atexit
import contextlib
import gc
import json
import os
import socket
import sys
import threading


def serve(path: str) -> dict | None:
    """Answer requests; returns a request in the child that has to run it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    while True:
        connection, _ = server.accept()
        line = connection.makefile("rb").readline()
        if not line:
            return None
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            server.close()
            connection.close()
            return request
        threading.Thread(target=reap, args=(pid, connection), daemon=True).start()


def reap(pid: int, connection: socket.socket) -> None:
    """Tell whoever asked how its child ended."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    connection.close()


def become(request: dict) -> None:
    """Take on the environment, folder and output of the request."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        del sys.modules[name]  # torch brought it, with the clock as it was then
    if request.get("everywhere"):
        from rearview.runtime import recorder
        from rearview.runtime.saving.policy import Policy, Reason, SaveDecision

        recorder.INNER_LEAST = 0.0
        Policy.decide = lambda *_: SaveDecision(True, Reason.EVERY)


def leave(code: object) -> None:
    """End the process as Python does, but leave the memory of all modules to the system."""
    if code is None or isinstance(code, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # this folder; not by `-P`, which a program would see in `sys.flags`
    import random

    import numpy as np  # noqa: F401
    import sklearn.linear_model
    import sklearn.model_selection  # noqa: F401
    import torch
    import torch._dynamo
    import torch.utils.data  # noqa: F401

    import rearview.runtime.replay.start_replay
    import rearview.runtime.start_recording  # noqa: F401
    from rearview.runtime import run_program

    # no child searches the libraries' objects for garbage, which takes longer than most programs
    gc.freeze()
    asked = serve(sys.argv[1])
    if asked is not None:
        become(asked)
        random.seed()
        sys.argv = ["-m"]
        try:
            run_program.main()
        except SystemExit as request:
            leave(request.code)
            raise
