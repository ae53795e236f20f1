"""Start the process of a recording kernel, and manage it for nbclient.

The process is started before the libraries that talk to it are imported: importing them takes about as long
as a kernel takes to start, and both happen at once.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from rearview.execute.start_command import StartCommand
from rearview.model.messages import VARIABLE, Control

_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_RECONNECT = 10
"""Milliseconds between attempts to connect to a kernel that is starting."""
_CHECK = 0.2
"""Seconds without an answer after which to check that a starting kernel still lives."""


def control_of(command: StartCommand) -> Control:
    """Return the control message of the process that `command` starts."""
    return msgspec.json.decode(command.environment[VARIABLE], type=Control)


@dataclass
class KernelProcess:
    """The process of a kernel, which may still be starting, and its connection file."""

    process: subprocess.Popen[bytes]
    connection_file: Path
    command: StartCommand

    @classmethod
    def start(cls, command: StartCommand, folder: Path) -> KernelProcess:
        """Start the kernel that `command` describes; its connection file is written to `folder`."""
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
        environment.pop(
            "PYTHONEXECUTABLE", None
        )  # as Jupyter does: it misleads a virtual environment
        process = subprocess.Popen(
            command.command,
            env=environment,
            cwd=command.folder,
            stdin=subprocess.PIPE,
            start_new_session=True,  # an interrupt then reaches the kernel and its children alone
        )
        assert process.stdin is not None
        process.stdin.close()
        return cls(process, file, command)

    def forward(self, number: int) -> None:
        """Pass a signal on to the kernel, which runs the program."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def ended(self) -> int:
        """Wait for the end of the process and return its exit code."""
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def end_unused(self) -> None:
        """Kill a kernel that no client talks to."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def manager(self) -> Any:
        """Return the manager with which nbclient watches and ends the process."""
        import zmq
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.provisioning.local_provisioner import LocalProvisioner

        spec = KernelSpec(argv=list(self.command.command), display_name="Python", language="python")
        manager = _manager_class()(
            connection_file=str(self.connection_file),
            # a kernel that is asked to end first writes all its records to disk
            shutdown_wait_time=float(10**6),
        )
        manager.load_connection_file()
        manager.client_factory = _channels_class()
        manager.context.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        manager._kernel_spec = spec  # noqa: SLF001 - none is installed, so none is looked up
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
            """Wait for the end of the process; the system reports it, where it can."""
            pid = getattr(self.provisioner, "pid", None)
            if pid is not None and self.has_kernel:
                await _end_of(pid)
            await super()._async_wait(pollinterval)

    return KernelManager


async def _end_of(pid: int) -> None:
    """Return when a process has ended, or at once if this system cannot report it."""
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
            """Start the channels except the heartbeat: the process itself shows whether it lives."""
            super().start_channels(*args, **{**kwargs, "hb": False})

        async def wait_for_ready(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
            """Wait until the kernel answers, and until a message that it publishes arrives.

            jupyter_client also waits until 0.2 s have passed in which nothing is published; nbclient
            takes only messages that answer its own requests, so nothing has to be discarded here.
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
                    self.kernel_info()  # published messages do not arrive yet
                    continue
                self._handle_kernel_info_reply(message)
                return

    return KernelChannels
