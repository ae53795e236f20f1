"""Start, fork, command, measure and end cell processes: the engine's side of `cell_process`."""

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
_REAPER = f"""
import os, shutil, signal, sys
ended = sys.stdin.buffer.read()
group, mark, *folders = sys.argv[1:]
try:
    os.killpg(int(group), signal.SIGKILL)
except ProcessLookupError:
    pass  # all of them have ended
for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
    try:  # those that cells started in a session of their own
        with open("/proc/" + pid + "/environ", "rb") as file:
            if os.fsencode(mark) in file.read().split(bytes(1)):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
if not ended:  # the engine was killed
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
MARK = "_REARVIEW_CELLS"
"""Environment variable of all processes that the cells of a replay start."""
SOURCE = Path(__file__).parent.parent.parent
HELLO = 60.0
"""Seconds within which a new process must announce itself."""
FORKED = 20.0
"""Seconds within which a forked child must have used its thread pools once."""


class Died(Exception):  # noqa: N818 - it says what happened
    """The cell process has ended, or was killed at its time limit."""


class CellHandle:
    """One running cell process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self._lock = threading.Lock()

    def ask(self, message: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """Send a command and return the answer; raise `Died` if no answer comes in time."""
        data = json.dumps(message).encode("utf-8", "surrogatepass")
        try:
            with self._lock:
                self.connection.settimeout(seconds)
                self.connection.sendall(struct.pack(">Q", len(data)) + data)
                return receive(self.connection)
        except TimeoutError as exc:
            self.kill()
            raise Died(f"it did not end within {seconds:g} seconds") from exc
        except (OSError, EOFError) as exc:
            self.kill()
            raise Died("its process died") from exc

    def kill(self) -> None:
        """Kill the process at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()

    def memory(self) -> tuple[int, int]:
        """Return (Pss, anonymous memory) in bytes; zeros if the process is gone."""
        fields: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, value = line.partition(":")
                fields[name] = int(value.split()[0]) << 10
        return fields.get("Pss", 0), fields.get("Anonymous", 0)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message of a cell process; raise EOFError if it is gone."""
    size = struct.unpack(">Q", _exactly(connection, 8))[0]
    try:
        message: dict[str, Any] = json.loads(
            _exactly(connection, size).decode("utf-8", "surrogatepass")
        )
    except (ValueError, RecursionError) as exc:
        raise EOFError("it sent no message") from exc
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class CellProcesses:
    """Starts one process with only the interpreter in it; all others are forked from it."""

    def __init__(
        self,
        scratch: Path,
        environment: Mapping[str, str],
        *,
        python: str,
        notebook: bool,
        home: Path | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        """`folders` are removed if this process is killed."""
        self._scratch = scratch
        self._home = os.path.realpath(home) if home is not None else ""
        self._address = scratch / "engine.sock"
        self._link_folder: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # the path of a deep folder may be too long for a socket: bind it by a short path
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            self._listener.bind(f"/proc/self/fd/{descriptor}/engine.sock")
        finally:
            os.close(descriptor)
        self._listener.listen(64)
        self._arrived: dict[str, tuple[CellHandle, str]] = {}
        self._news = threading.Condition()
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
            env={**environment, MARK: str(scratch)},
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._reaper = subprocess.Popen(
            [
                *(sys.executable, "-I", "-c", _REAPER, str(self._process.pid)),
                *(f"{MARK}={scratch}", *map(str, folders)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self.first = self._wait(token, HELLO)
        except Died as exc:
            self.close()
            log = (scratch / "processes.log").read_text("utf-8", "replace").strip()
            raise ReplayError(
                f"The process that runs cells could not be started with {python}: "
                f"{log.splitlines()[-1] if log else exc}. Notebooks need IPython there: "
                "pip install ipykernel.",
                slug="cell-process",
            ) from exc

    def _short_address(self) -> str:
        """Return an address of the socket that fits into 107 bytes; a link in a short folder if needed."""
        if len(os.fsencode(self._address)) < 100:
            return str(self._address)
        self._link_folder = Path(tempfile.mkdtemp(prefix="rv-"))
        (self._link_folder / "s").symlink_to(self._address.parent)
        return f"{self._link_folder}/s/{self._address.name}"

    def _token(self) -> str:
        with self._news:
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
                connection.settimeout(HELLO)
                hello = receive(connection)
            except (OSError, EOFError, ValueError):
                connection.close()
                continue
            handle = CellHandle(connection, int(hello["pid"]))
            with self._news:
                self._handles.append(handle)
                self._arrived[str(hello["hello"])] = (handle, str(hello.get("error", "")))
                self._news.notify_all()

    def _wait(self, token: str, seconds: float) -> CellHandle:
        end = time.monotonic() + seconds
        with self._news:
            while token not in self._arrived:
                seconds_left = end - time.monotonic()
                ended = getattr(self, "first", None) is None and self._process.poll() is not None
                if seconds_left <= 0 or ended:
                    raise Died("it did not announce itself")
                self._news.wait(min(seconds_left, 0.2))
            handle, error = self._arrived.pop(token)
        if error:
            raise Died(f"it could not continue after the fork: {error}")
        return handle

    def fork(
        self, parent: CellHandle, folder: Path, mount: Path | None, *, first: bool
    ) -> CellHandle | str:
        """Return a new process with the state of `parent`, which keeps it too; or why it cannot be forked."""
        token = self._token()
        answer = parent.ask(
            {
                "do": "park",
                "token": token,
                "folder": str(folder),
                "mount": str(mount) if mount else "",
                "first": first,
            },
            seconds=HELLO,
        )
        if "refused" in answer:
            return str(answer["refused"])
        try:
            return self._wait(token, FORKED)
        except Died as exc:
            return f"the forked process does not work: {exc}"

    def start(self, version: StudyVersion, folder: Path, mount: Path | None) -> CellHandle:
        """Return a fresh process that is ready for the cells of a version; raise `Died` if none can be started."""
        process = self.fork(self.first, folder, mount, first=False)
        if isinstance(process, str):
            raise Died(process)
        process.ask(
            {
                "do": "setup",
                "folder": str((mount or folder) / PROJECT),
                "inputs": os.path.realpath(self._scratch / INPUTS),
                "home": self._home,
                "program": version.program,
                "cwd": version.cwd,
                "notebook": version.notebook,
            }
        )
        return process

    def close(self) -> None:
        """End every process."""
        self._listener.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._news:
            handles = list(self._handles)
        for handle in handles:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(handle.pid) == self._process.pid:
                    os.kill(handle.pid, signal.SIGKILL)
        if self._reaper.stdin:
            with contextlib.suppress(OSError):
                self._reaper.stdin.write(b"ended")
                self._reaper.stdin.flush()
            self._reaper.stdin.close()
        self._reaper.wait()  # before waiting for the leader, as long as no other process can get its group id
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
