"""Start, fork, command, measure and end cell processes: processes that run cells with `cell_process`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rearview.errors import ReplayError
from rearview.multiversion.study import StudyVersion
from rearview.multiversion.work_folder import INPUTS, LINKS, PROJECT

_BOOT = (
    "import sys; p = sys.argv[1]; sys.path.insert(0, p); "
    "from rearview.multiversion.cell_process import main; sys.path.remove(p); main()"
)
_CLEANER = f"""
import os, shutil, signal, sys
ended = sys.stdin.buffer.read()
group, mark, *folders = sys.argv[1:]
try:
    os.killpg(int(group), signal.SIGKILL)
except ProcessLookupError:
    pass  # all processes of the group have ended
for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
    try:  # processes that cells started in a session of their own
        with open("/proc/" + pid + "/environ", "rb") as file:
            if os.fsencode(mark) in file.read().split(bytes(1)):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
if not ended:  # the process that controls the replay was killed
    for folder in folders:
        try:
            with open(os.path.join(folder, "{LINKS}")) as file:
                for link in file.read().splitlines():
                    os.unlink(link)
                    os.rmdir(os.path.dirname(link))
        except OSError:
            pass
        shutil.rmtree(folder, ignore_errors=True)
"""
PROCESS_MARK = "_REARVIEW_CELLS"
"""Environment variable that all processes of a replay inherit, by which they are found and killed at its end."""
SOURCE = Path(__file__).parent.parent.parent
CONNECT_SECONDS = 60.0
"""Seconds within which a new cell process must connect to the control socket, or answer a fork command."""
FORK_SECONDS = 20.0
"""Seconds within which a forked child must have tested its thread pools and connected to the control socket."""


class ProcessDied(Exception):  # noqa: N818 - it says what happened
    """Raised if a cell process has ended, or was killed at its time limit."""


class CellHandle:
    """A running cell process, with the connection over which it gets commands and answers them."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self._lock = threading.Lock()

    def ask(self, message: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """Send the command `message` and return the answer; raise `ProcessDied` if none comes within `seconds`."""
        data = json.dumps(message).encode("utf-8", "surrogatepass")
        try:
            with self._lock:
                self.connection.settimeout(seconds)
                self.connection.sendall(struct.pack(">Q", len(data)) + data)
                return receive(self.connection)
        except TimeoutError as exc:
            self.kill()
            raise ProcessDied(f"it did not end within {seconds:g} seconds") from exc
        except (OSError, EOFError) as exc:
            self.kill()
            raise ProcessDied("its process died") from exc

    def kill(self) -> None:
        """Kill the process and close the connection."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()

    def memory(self) -> tuple[int, int]:
        """Return (proportional set size, anonymous memory) of the process in bytes; (0, 0) if the process is gone."""
        fields: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, value = line.partition(":")
                fields[name] = int(value.split()[0]) << 10
        return fields.get("Pss", 0), fields.get("Anonymous", 0)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for and return the next message of a cell process; raise EOFError if the process is gone."""
    size = struct.unpack(">Q", _read_exactly(connection, 8))[0]
    try:
        message: dict[str, Any] = json.loads(
            _read_exactly(connection, size).decode("utf-8", "surrogatepass")
        )
    except (ValueError, RecursionError) as exc:
        raise EOFError("it sent no message") from exc
    return message


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class CellProcesses:
    """All cell processes of a replay. The first process runs no cells; the other processes are forked from it."""

    def __init__(
        self,
        scratch: Path,
        environment: Mapping[str, str],
        *,
        python: str,
        notebook: bool,
        author_folder: Path | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        """Start the first process with `python`, and a process that cleans up.

        The latter removes `folders` if this process, which controls the replay, is killed. `scratch` is the scratch
        folder of the replay; cells may not change files in `author_folder`.
        """
        self._scratch = scratch
        self._author_folder = os.path.realpath(author_folder) if author_folder is not None else ""
        self._address = scratch / "control.sock"
        self._link_folder: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # the path of a socket is limited to 107 bytes: bind it by a short path
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            self._listener.bind(f"/proc/self/fd/{descriptor}/control.sock")
        finally:
            os.close(descriptor)
        self._listener.listen(64)
        self._connected: dict[str, tuple[CellHandle, str]] = {}
        self._connection_news = threading.Condition()
        self._tokens = 0
        self._handles: list[CellHandle] = []
        self._log = (scratch / "processes.log").open("wb")
        threading.Thread(target=self._accept, daemon=True, name="rearview-cells").start()
        token = self._token()
        self._process = subprocess.Popen(
            [
                *(python, "-c", _BOOT, str(SOURCE), self._short_address()),
                *(token, "1" if notebook else "0"),
            ],
            env={**environment, PROCESS_MARK: str(scratch)},
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._cleaner = subprocess.Popen(
            [
                *(sys.executable, "-I", "-c", _CLEANER, str(self._process.pid)),
                *(f"{PROCESS_MARK}={scratch}", *map(str, folders)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self.first = self._wait(token, CONNECT_SECONDS)
        except ProcessDied as exc:
            self.close()
            log = (scratch / "processes.log").read_text("utf-8", "replace").strip()
            raise ReplayError(
                f"The process that runs cells could not be started with {python}: "
                f"{log.splitlines()[-1] if log else exc}. Notebooks need IPython there: "
                "pip install ipykernel.",
                slug="cell-process",
            ) from exc

    def _short_address(self) -> str:
        """Return a path of the control socket of at most 107 bytes, through a link in a temporary folder if needed."""
        if len(os.fsencode(self._address)) < 100:
            return str(self._address)
        self._link_folder = Path(tempfile.mkdtemp(prefix="rv-"))
        (self._link_folder / "s").symlink_to(self._address.parent)
        return f"{self._link_folder}/s/{self._address.name}"

    def _token(self) -> str:
        with self._connection_news:
            self._tokens += 1
            return f"process-{self._tokens}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            try:
                connection.settimeout(CONNECT_SECONDS)
                hello = receive(connection)
            except (OSError, EOFError, ValueError):
                connection.close()
                continue
            handle = CellHandle(connection, int(hello["pid"]))
            with self._connection_news:
                self._handles.append(handle)
                self._connected[str(hello["hello"])] = (handle, str(hello.get("error", "")))
                self._connection_news.notify_all()

    def _wait(self, token: str, seconds: float) -> CellHandle:
        end = time.monotonic() + seconds
        with self._connection_news:
            while token not in self._connected:
                seconds_left = end - time.monotonic()
                ended = getattr(self, "first", None) is None and self._process.poll() is not None
                if seconds_left <= 0 or ended:
                    raise ProcessDied("it did not announce itself")
                self._connection_news.wait(min(seconds_left, 0.2))
            handle, error = self._connected.pop(token)
        if error:
            raise ProcessDied(f"it could not continue after the fork: {error}")
        return handle

    def fork(
        self, parent: CellHandle, folder: Path, mount: Path | None, *, first: bool
    ) -> CellHandle | str:
        """Fork `parent`, which keeps its state; return the child process, or the reason as text if that fails.

        The child works in `folder`, which it mounts at `mount` unless that is None. With `first`, `parent`
        has run cells since the last fork and checks whether a fork is safe.
        """
        token = self._token()
        answer = parent.ask(
            {
                "do": "fork",
                "token": token,
                "folder": str(folder),
                "mount": str(mount) if mount else "",
                "first": first,
            },
            seconds=CONNECT_SECONDS,
        )
        if "refused" in answer:
            return str(answer["refused"])
        try:
            return self._wait(token, FORK_SECONDS)
        except ProcessDied as exc:
            return f"the forked process does not work: {exc}"

    def start(self, version: StudyVersion, folder: Path, mount: Path | None) -> CellHandle:
        """Return a new process that is ready to run the first cell of `version`; raise `ProcessDied` if that fails."""
        process = self.fork(self.first, folder, mount, first=False)
        if isinstance(process, str):
            raise ProcessDied(process)
        process.ask(
            {
                "do": "setup",
                "folder": str((mount or folder) / PROJECT),
                "inputs": os.path.realpath(self._scratch / INPUTS),
                "author_folder": self._author_folder,
                "program": version.program,
                "cwd": version.cwd,
                "notebook": version.notebook,
            }
        )
        return process

    def close(self) -> None:
        """Kill all cell processes and the processes that they started, and close the control socket."""
        self._listener.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._connection_news:
            handles = list(self._handles)
        for handle in handles:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(handle.pid) == self._process.pid:
                    os.kill(handle.pid, signal.SIGKILL)
        if self._cleaner.stdin:
            with contextlib.suppress(OSError):
                self._cleaner.stdin.write(b"ended")
                self._cleaner.stdin.flush()
            self._cleaner.stdin.close()
        # wait for the cleaner first: it kills a process group by the id of `_process`, and the system can give
        # this id to an unrelated process as soon as `_process` was waited for
        self._cleaner.wait()
        self._process.wait()
        for handle in handles:
            handle.connection.close()
        self._log.close()
        self._address.unlink(missing_ok=True)
        if self._link_folder is not None:
            shutil.rmtree(self._link_folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
