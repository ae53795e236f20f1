"""Start the kernel that records a notebook, send it the cells, and collect their outputs.

The command from `execute.program_command` starts the process of the kernel. nbclient and nbformat are imported while
the kernel starts, because both take about as long. nbclient sends the cells, so outputs, widgets, tags and errors
are the same as with `jupyter execute`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from rearview.errors import UsageError
from rearview.execute.program_command import LaunchCommand
from rearview.model.process_messages import AGAIN, VARIABLE, Control
from rearview.source.notebooks import language_and_positions
from rearview.store.create_files import open_file

EXECUTED = "executed.ipynb"
"""Name of the file in the folder of a run with the executed notebook and its outputs."""
TIMED_OUT = 124
"""Exit code if a cell exceeded its time limit; the command `timeout` has the same exit code."""
REUSE_FAILED = "KeptResultsUnusable"
"""Name of the error that a kernel shows if it cannot use stored results of cells: all cells must be run again."""
REUSE_VARIABLE = "REARVIEW_REUSE_CELLS"
"""Environment variable that forbids the reuse of stored results of cells if its value is 0."""
_REUSED = "reused.json"
"""Name of a file in the folder of a run with the reason why each cell ran, or "" if its results were reused."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that this process passes on to the kernel."""
_GRACE = 5.0
"""Seconds to wait for the end of the kernel after a cell was interrupted at its time limit."""
Show = Callable[[str, str], None]
"""Function `(stream, text)` that prints output of a cell; `stream` is `stdout` or `stderr`."""

_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_RECONNECT = 10
"""Milliseconds between attempts to connect to a kernel that is starting."""
_CHECK = 0.2
"""Seconds to wait for an answer of a starting kernel before checking whether its process still runs."""


def control_of(command: LaunchCommand) -> Control:
    """Return the `Control` that `command` passes to the process that it starts."""
    return msgspec.json.decode(command.environment[VARIABLE], type=Control)


@dataclass
class KernelProcess:
    """The process of a kernel, which may still be starting, with its connection file."""

    process: subprocess.Popen[bytes]
    connection_file: Path
    command: LaunchCommand

    @classmethod
    def start(cls, command: LaunchCommand, folder: Path) -> KernelProcess:
        """Write a connection file to `folder`, and start the kernel of `command` with it."""
        file = folder / "kernel.json"
        connection: dict[str, Any] = {
            "transport": "ipc",
            "ip": f"@rearview-{token_hex(8)}",
            "key": token_hex(32),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
            **{f"{name}_port": number for number, name in enumerate(_CHANNELS, 1)},
        }
        file.write_bytes(msgspec.json.encode(connection))
        control = msgspec.structs.replace(control_of(command), kernel=str(file))
        environment = {
            **command.environment,
            VARIABLE: msgspec.json.encode(control).decode(),
            "JPY_PARENT_PID": str(os.getpid()),
        }
        # the variable would mislead Python in a virtual environment; Jupyter removes it, too
        environment.pop("PYTHONEXECUTABLE", None)
        process = subprocess.Popen(
            command.command,
            env=environment,
            cwd=command.folder,
            stdin=subprocess.PIPE,
            start_new_session=True,  # signals to its process group reach only the kernel and its children
        )
        assert process.stdin is not None
        process.stdin.close()
        return cls(process, file, command)

    def forward(self, number: int) -> None:
        """Send the signal `number` to the kernel's process, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or 128 plus the number of the killing signal."""
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def end_unused(self) -> None:
        """Kill the process, if it still runs, because no client will use the kernel."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def manager(self) -> Any:
        """Return the kernel manager through which nbclient connects to, watches and ends this process."""
        import zmq
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.provisioning.local_provisioner import LocalProvisioner

        spec = KernelSpec(argv=list(self.command.command), display_name="Python", language="python")
        manager = _manager_class()(
            connection_file=str(self.connection_file),
            # no time limit: before a kernel ends, it writes all records to disk
            shutdown_wait_time=float(10**6),
        )
        manager.load_connection_file()
        manager.client_factory = _channels_class()
        manager.context.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        manager._kernel_spec = spec  # noqa: SLF001 - no kernel spec is installed
        kernel = self

        class StartedKernel(LocalProvisioner):
            async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
                return {**kwargs, "cmd": list(kernel.command.command)}

            async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:  # noqa: ARG002
                process: Any = kernel.process
                self.process, self.pid, self.pgid = process, process.pid, process.pid
                self.cwd = kwargs.get("cwd")
                self.connection_info = manager.get_connection_info()
                return self.connection_info

        manager.provisioner = StartedKernel(kernel_spec=spec, parent=manager)
        return manager


def _manager_class() -> Any:
    from jupyter_client.manager import AsyncKernelManager

    class KernelManager(AsyncKernelManager):
        async def _async_wait(self, pollinterval: float = 0.1) -> None:
            """Wait for the end of the kernel's process, without polling if the system can report it."""
            pid = getattr(self.provisioner, "pid", None)
            if pid is not None and self.has_kernel:
                await _end_of(pid)
            await super()._async_wait(pollinterval)

    return KernelManager


async def _end_of(pid: int) -> None:
    """Wait until the process `pid` has ended; return at once if this system cannot report that."""
    import asyncio

    try:
        number = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(number, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(number)
        os.close(number)


def _channels_class() -> Any:
    from queue import Empty
    from time import monotonic

    from jupyter_client.asynchronous.client import AsyncKernelClient

    class KernelChannels(AsyncKernelClient):
        def start_channels(self, *args: Any, **kwargs: Any) -> None:
            """Start all channels except the heartbeat, which is not needed: the process of the kernel is known."""
            super().start_channels(*args, **{**kwargs, "hb": False})

        async def wait_for_ready(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
            """Wait until the kernel answers a request, and until a message that it publishes has arrived.

            jupyter_client also waits until nothing has been published for 0.2 s, which is not needed: nbclient ignores
            messages that do not answer its own requests.
            """
            latest = float("inf") if timeout is None else monotonic() + timeout
            self.kernel_info()
            while True:
                try:
                    message = await self.get_shell_msg(timeout=_CHECK)
                except Empty:
                    if not await self.is_alive():
                        raise RuntimeError("Kernel died before replying to kernel_info") from None
                    if monotonic() > latest:
                        raise RuntimeError(f"Kernel didn't respond in {timeout} seconds") from None
                    continue
                if message["msg_type"] != "kernel_info_reply":
                    continue
                try:
                    await self.get_iopub_msg(timeout=_CHECK)
                except Empty:
                    self.kernel_info()  # ask again: published messages do not arrive here yet
                    continue
                self._handle_kernel_info_reply(message)
                return

    return KernelChannels


@dataclass
class Executed:
    """The result of running all cells of a notebook."""

    code: int
    cell: int = 0
    """Number of the cell that failed, from 1, counting executed cells only; 0 if none failed."""
    why: str = ""
    """The error in one line; empty if there was none."""
    raised: str = ""
    """Name of the class of the exception that ended the notebook; empty if no exception did."""
    trace: str = ""
    """The traceback that the kernel sent for a failed cell; else empty."""
    content: Any = field(default=None, repr=False)
    """The notebook with its outputs, as an object of nbformat."""


def check(data: bytes, path: str) -> list[int]:
    """Return the indices, among all cells, of the cells to execute; raise UsageError if it is no Python notebook."""
    language, positions = language_and_positions(data, path)
    if language != "python":
        raise UsageError(
            f"{path} is a notebook for {language}; only those for Python are recorded. "
            "Choose a Python kernel in Jupyter if it is one after all.",
            slug="notebook-language",
        )
    return positions


def execute(
    command: LaunchCommand,
    data: bytes,
    *,
    path: str,
    show: Show = lambda *_: None,
    timeout: float | None = None,
) -> Executed:
    """Run all cells of the notebook with the content `data` in the kernel that `command` starts.

    `path` is for error messages, `show` prints outputs, and `timeout` is the time limit for each cell in seconds.
    """
    positions = check(data, path)
    _check_installed()
    with tempfile.TemporaryDirectory(prefix="rearview-") as folder:
        kernel = KernelProcess.start(command, Path(folder))
        try:
            # these imports take place while the kernel starts
            import nbformat
            from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

            content = nbformat.reads(data.decode("utf-8"), as_version=4)
            client = _client(content, kernel, show, timeout)
        except BaseException:
            kernel.end_unused()
            raise
        executed, died = Executed(0, content=content), False
        try:
            client.execute()
        except CellExecutionError as exc:
            executed.why = _first_line(f"{exc.ename}: {exc.evalue}")
            executed.raised = exc.ename
            executed.trace = "\n".join(_error_of(content, client.position).get("traceback", ()))
        except CellTimeoutError:
            executed.code = TIMED_OUT
            executed.why = f"it took longer than {timeout:g} seconds (--timeout)"
        except (DeadKernelError, RuntimeError) as exc:  # RuntimeError: the kernel died at its start
            if kernel.process.poll() is None:
                raise
            executed.why = str(exc) or "the kernel died"
            died = True
        finally:
            code = kernel.wait()
        retry_file = Path(folder) / AGAIN
        if died and retry_file.is_file():
            env = {**command.environment, VARIABLE: retry_file.read_text("utf-8")}
            retry = replace(command, environment=env)
            return execute(retry, data, path=path, show=show, timeout=timeout)
    if executed.why:
        if client.position in positions:
            executed.cell = 1 + positions.index(client.position)
        executed.why = _death(code) if died else executed.why
        executed.code = executed.code or code or 1
    else:
        executed.code = code
    if command.run_folder is not None:
        store_executed(command.run_folder, content)
    return executed


def _check_installed() -> None:
    """Raise UsageError if nbclient or nbformat is not installed, without importing them."""
    missing_libraries = [name for name in ("nbclient", "nbformat") if find_spec(name) is None]
    if missing_libraries:
        raise UsageError(
            f"Notebooks need nbclient and nbformat (there is no {missing_libraries[0]}). Install them: "
            "`pip install 'rearview[notebook]'`.",
            slug="notebook-extra",
        )


def with_reuse(command: LaunchCommand, *, reuse: bool) -> LaunchCommand:
    """Return `command`, changed to reuse stored results of cells if `reuse` is True.

    With either value of `reuse`, random generators that the notebook does not seed begin in the same states as in its
    last run, unless `REUSE_VARIABLE` forbids reuse.
    """
    control = msgspec.structs.replace(
        control_of(command), reuse_cells=reuse, repeat_seeds=reuse_is_allowed(os.environ)
    )
    environment = {**command.environment, VARIABLE: msgspec.json.encode(control).decode()}
    return replace(command, environment=environment)


def reuse_is_allowed(environment: Mapping[str, str]) -> bool:
    """Return True unless `REUSE_VARIABLE` in `environment` forbids the reuse of stored results."""
    return environment.get(REUSE_VARIABLE, "1").lower() not in {"0", "false", "no", "off"}


def reuse_failure(content: Any) -> str:
    """Return the reason in the outputs of `content` why stored results could not be used; empty if they could."""
    for cell in content.cells:
        for output in cell.get("outputs", ()):
            if output.get("output_type") == "error" and output.get("ename") == REUSE_FAILED:
                return str(output.get("evalue"))
    return ""


def write(content: Any, file: Path) -> None:
    """Write the notebook `content` with its outputs to `file`."""
    import nbformat

    nbformat.write(content, str(file))


def store_executed(folder: Path, content: Any) -> None:
    """Store the notebook `content` with its outputs as `EXECUTED` in `folder`, the folder of its run."""
    import nbformat

    with contextlib.suppress(OSError):  # the store was removed, about which the recorder has warned
        fd = open_file(folder / EXECUTED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
            out.write(nbformat.writes(content) + "\n")


def reuse_lines(folder: Path) -> list[str]:
    """Return lines for the user: how many cells of the run were reused, and why each other cell ran.

    Return [] if the run reused no results at all.
    """
    try:
        facts = msgspec.json.decode((folder / _REUSED).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return []
    cells: list[tuple[int, str]] = facts["cells"]
    reused = sum(not why for _, why in cells)
    lines = [
        f"rearview: {reused} of {len(cells)} cells have not changed; their results are reused."
    ]
    return lines + [f"rearview: cell {number} ran: {why}." for number, why in cells if why]


def _error_of(content: Any, position: int) -> dict[str, Any]:
    outputs = content.cells[position].get("outputs", ())
    return next((output for output in outputs if output.get("output_type") == "error"), {})


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _death(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"the kernel was killed by {signal.Signals(code - 128).name}"
    return f"the kernel ended with exit code {code}"


def _client(content: Any, kernel: KernelProcess, show: Show, timeout: float | None) -> Any:
    """Return the nbclient client that sends the cells of `content` to `kernel` and prints their output by `show`."""
    import asyncio

    from nbclient import NotebookClient

    manager = kernel.manager()

    class Client(NotebookClient):  # type: ignore[misc]
        position = -1

        async def async_execute_cell(
            self, cell: Any, cell_index: int, *args: Any, **kw: Any
        ) -> Any:
            if cell.cell_type == "code" and cell.source.strip():
                self.position = cell_index
            return await super().async_execute_cell(cell, cell_index, *args, **kw)

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            kind, content = msg["header"]["msg_type"], msg["content"]
            if kind == "stream":
                show(content["name"], content["text"])
            elif kind in {"display_data", "execute_result"}:
                text = content["data"].get("text/plain", "")
                show("stdout", f"{text}\n" if text else "")
            return super().process_message(msg, cell, cell_index)

        async def async_start_new_kernel(self, **kwargs: Any) -> None:
            loop = asyncio.get_running_loop()
            # replace nbclient's handlers, which would end the kernel in the middle of a cell
            for number in _FORWARDED:
                loop.add_signal_handler(number, kernel.forward, number)
            await super().async_start_new_kernel(**kwargs)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

        async def _async_handle_timeout(self, *args: Any) -> Any:
            kernel.forward(signal.SIGINT)
            manager.shutdown_wait_time = _GRACE
            return await super()._async_handle_timeout(*args)

    client = Client(
        content,
        km=manager,
        timeout=None if timeout is None else max(1, round(timeout)),
        startup_timeout=600,
        store_widget_state=True,
    )
    client.owns_km = True  # so nbclient ends the kernel after the last cell
    return client
