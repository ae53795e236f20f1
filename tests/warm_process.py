"""A process that has imported what every recorded program starts with, and forks a child for each program.

Started by `warm_start.py` as `python warm_process.py NUMBER-OF-A-SOCKET [MODULE …]`. Each request brings a command line, a
folder, an environment and the three standard streams; the answer is the number of the process that runs the command.
The child does what `runtime/bootstrap.py`, or `python -m rearview`, does in a fresh interpreter, to its
normal end.
"""

import os
import sys

PLAIN = frozenset(sys.modules)
"""Names of the modules that Python has loaded before Rearview."""

del sys.path[0]
FIRST = os.environ.get("PYTHONPATH", "").split(os.pathsep)
"""Folders that this process searches first, to find Rearview."""

# only modules that Rearview imports too: a program finds the same ones loaded as in a fresh process
import atexit  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import runpy  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

import rearview.runtime.start_recording  # noqa: E402, F401
from rearview.model.process_messages import LAUNCHER  # noqa: E402
from rearview.runtime import run_program  # noqa: E402

HEAD = struct.Struct("I")
STREAMS = struct.Struct("3i")


def serve(server: socket.socket) -> None:
    """Answer requests; returns in each child, which has become what it was asked for."""
    while True:
        head, ancillary, _, _ = server.recvmsg(HEAD.size, socket.CMSG_SPACE(STREAMS.size))
        if not head:
            os._exit(0)
        streams = STREAMS.unpack(ancillary[0][2][: STREAMS.size])
        text = b""
        while len(text) < HEAD.unpack(head)[0]:
            text += server.recv(HEAD.unpack(head)[0] - len(text))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                os.close(read)
                os.close(write)
                server.close()
                become(json.loads(text), streams)
                return
            os.write(write, HEAD.pack(child))
            os._exit(0)
        os.waitpid(between, 0)  # from now on, whoever asked is the parent of the child
        server.sendall(os.read(read, HEAD.size))
        for number in (read, write, *streams):
            os.close(number)


def become(request: dict, streams: tuple[int, ...]) -> None:
    """Take on the folder, environment, streams and command line of the request."""
    while os.getppid() != request["parent"]:
        time.sleep(0.0001)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for stream in streams:
        os.close(stream)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    take_on(request["command"], request["environment"])


class Replaced(BaseException):
    """The process is to go on as the program that is recorded."""


def exec_here(real):
    """Return a stand-in for `os.execve` that does not start another interpreter for a recorded program."""

    def execve(path, command, environment):
        if tuple(command) != (sys.executable, LAUNCHER):
            real(path, command, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve = real
        take_on(command, environment)
        raise Replaced

    return execve


def take_on(command: list[str], environment: dict[str, str]) -> None:
    """Take on a command line and an environment, with the folders that it names for imports."""
    os.environ.clear()
    os.environ.update(environment)
    first = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    rest = [path for path in sys.path if path not in FIRST]
    sys.path[:] = dict.fromkeys([*first, *rest, *FIRST])
    sys.argv = list(command[1:])
    sys.orig_argv[:] = command
    random.seed()


def run() -> None:
    """Run the command that this process has become."""
    if sys.argv[:2] == ["-m", "rearview"]:
        path, main_module = list(sys.path), sys.modules["__main__"]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as Python does
        sys.argv = ["-m", *sys.argv[2:]]
        os.execve = exec_here(os.execve)
        try:
            runpy._run_module_as_main("rearview")
        except Replaced:
            sys.path[:] = path
            sys.modules["__main__"] = main_module
    run_program.main(PLAIN)


def leave(code: object) -> None:
    """End the process as Python does, but leave the memory of all modules to the system.

    To free the objects of large libraries one by one takes longer than most programs of the tests.
    """
    if code is None or isinstance(code, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # no child searches the objects of libraries for garbage: it would get a copy of their memory
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        run()
    except SystemExit as request:
        leave(request.code)
        raise
