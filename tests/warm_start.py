"""Start recorded programs by forking a process that has imported Rearview, where the start is not what is tested.

Importing what a recorded program starts with takes several times as long as most programs of the tests. Under
`warm_starts`, `subprocess` gets such a process by a fork. It is a child of the test's process like any other: waiting
for it, killing it and reading what it prints is the same. What a fork cannot give (a terminal, other options of the
interpreter) is started as usual.
"""

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import rearview
from rearview.model.process_messages import LAUNCHER

PROCESS = str(Path(__file__).with_name("warm_process.py"))
SOURCE = str(Path(rearview.__file__).resolve().parent.parent)
FIXED = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_")
"""Beginnings of the variables that an interpreter or a library may read only when it starts."""
MOST = 8
"""Warm processes that are kept, one for each set of such variables and each kind of command."""
ORPHANS_COME_HERE = 36  # PR_SET_CHILD_SUBREAPER
USUAL = {
    **dict.fromkeys(("executable", "preexec_fn", "gid", "gids", "uid")),
    "close_fds": True,
    "shell": False,
    "restore_signals": True,
    "umask": -1,
    "process_group": -1,
}
"""What a program that can be forked is started with."""
RUN = ("rearview.cli.main", "rearview.cli.run", "rearview._history.start_and_resume_commands")
ASK = (*RUN, "rearview.backfill.backfill", "rearview.store.tables.answer_queries", "duckdb")
"""What commands import that record a program, and all others."""


class WarmProcesses:
    """The warm processes of this process, by the variables that they were started with."""

    def __init__(self):
        self.lock = threading.Lock()
        self.servers = {}
        self.libraries = ()

    def fork(self, request, streams):
        """Return the process number of a command; None if there are too many warm processes."""
        environment = request["environment"] | {"PYTHONPATH": SOURCE}
        words = request["command"][3:]
        records = not words or words[0] == "run"
        modules = (
            *(() if not words else RUN if records else ASK),
            *(self.libraries if records else ()),
        )
        fixed = sorted(pair for pair in environment.items() if pair[0].startswith(FIXED))
        with self.lock:
            key = (modules, *fixed)
            if key not in self.servers:
                if len(self.servers) >= MOST:
                    return None
                self.servers[key] = self._start(modules, environment)
            return self._ask(self.servers[key][0], request, streams)

    def _start(self, modules, environment):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, PROCESS, str(theirs.fileno()), *modules],
            cwd="/",
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        return ours, process

    def _ask(self, server, request, streams):
        text = json.dumps(request).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", *streams))
        libc = ctypes.CDLL(None)
        libc.prctl(ORPHANS_COME_HERE, 1, 0, 0, 0)
        try:
            server.sendmsg([struct.pack("I", len(text))], [rights])
            server.sendall(text)
            return struct.unpack("I", server.recv(4))[0]
        finally:
            libc.prctl(ORPHANS_COME_HERE, 0, 0, 0, 0)

    def close(self):
        """End the warm processes."""
        for server, process in self.servers.values():
            server.close()
            process.wait()
        self.servers.clear()


PROCESSES = WarmProcesses()
atexit.register(PROCESSES.close)


@contextlib.contextmanager
def warm_starts(*libraries):
    """Let `subprocess` fork recorded programs that are started in this context.

    Programs find these libraries imported.
    """
    usual = subprocess.Popen._execute_child
    names = inspect.signature(usual)

    def execute_child(*arguments):
        given = names.bind(*arguments).arguments
        number = _fork(given)
        if number is None:
            usual(*arguments)
            return
        popen = given["self"]
        popen.pid, popen._child_created = number, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[name] for name in pipes))

    # the seed of hashes, which is otherwise another one in each project, is fixed when an interpreter starts
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    subprocess.Popen._execute_child = execute_child
    PROCESSES.libraries = libraries
    try:
        yield PROCESSES
    finally:
        subprocess.Popen._execute_child = usual
        PROCESSES.libraries = ()
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _is_ours(command):
    """Return True for a program that is recorded or replayed, and for a command of Rearview."""
    return command == [sys.executable, LAUNCHER] or command[:3] == [
        sys.executable,
        "-m",
        "rearview",
    ]


def _fork(given):
    """Return the number of a process that was forked, None if the program has to be started as usual."""
    streams = [
        target if given[name] == -1 else given[name]
        for target, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    if (
        not isinstance(given["args"], list | tuple)
        or not _is_ours(list(map(str, given["args"])))
        or given["pass_fds"]
        or any(given[name] != value for name, value in USUAL.items() if name in given)
        or any(map(os.isatty, streams))
        or signal.pthread_sigmask(signal.SIG_BLOCK, ())
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        return None
    request = {
        "command": list(map(str, given["args"])),
        "environment": dict(os.environ if given["env"] is None else given["env"]),
        "folder": os.path.abspath(given["cwd"] or "."),  # noqa: PTH100 - as the system reads it
        "new_session": given["start_new_session"],
        "parent": os.getpid(),
    }
    return PROCESSES.fork(request, streams)
