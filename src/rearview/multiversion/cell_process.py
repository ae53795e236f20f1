"""The program of a cell process: it runs cells, forks to keep its state, and saves or loads its variables.

A cell process runs in the interpreter that the versions need, which may not have Rearview installed. This
module imports only the standard library, IPython for notebooks, and cloudpickle for stored namespaces. The
process executes commands that `cell_process_control` sends over a Unix socket; each message is its length in
bytes, followed by JSON.
"""

from __future__ import annotations
import __future__ as future

import ast
import builtins
import contextlib
import gc
import io
import linecache
import os
import random
import re
import signal
import socket
import sys
import tempfile
import traceback
import types
import warnings
from json import dumps, loads
from struct import pack, unpack
from time import perf_counter
from typing import Any

from rearview.multiversion.cell_file_access import CellFileAccess
from rearview.multiversion.cell_outputs import (
    CellOutputs,
    OutputDescriptors,
    OutputStream,
    make_shell,
)
from rearview.multiversion.cell_process_state import (
    CannotKeepState,
    apply_process_settings,
    apply_settings,
    end_idle_worker_pools,
    library_settings,
    list_open_files,
    module_state,
    mount_folder,
    pause_openmp,
    pickler,
    process_settings,
    random_states,
    reason_against_fork,
    reason_against_storing,
    reopen,
    restore_module,
    set_random_states,
    unpickler,
    use_thread_pools,
)


class ControlChannel:
    """The connection of a cell process to the process that controls the replay."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = self._connected()

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)
        return connection

    def reconnect(self) -> None:
        """Close the connection shared with the parent process after a fork, and open a new one."""
        self.socket.close()
        self.socket = self._connected()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message to the controlling process."""
        data = dumps(message, default=str).encode("utf-8", "surrogatepass")
        self.socket.sendall(pack(">Q", len(data)) + data)

    def receive(self) -> dict[str, Any] | None:
        """Wait for and return the next message, or None if the controlling process has closed the connection."""
        head = self._read_exactly(8)
        data = self._read_exactly(unpack(">Q", head)[0]) if head else None
        return loads(data.decode("utf-8", "surrogatepass")) if data is not None else None

    def _read_exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self.socket.recv(min(1 << 20, count - len(parts)))
            if not part:
                return None
            parts += part
        return bytes(parts)


class CellProcess:
    """A process that has the state of a program between two cells, and executes commands."""

    def __init__(self, channel: ControlChannel) -> None:
        self.channel = channel
        self.outputs = CellOutputs()
        self.descriptors = OutputDescriptors()
        self.file_access = CellFileAccess()
        self.shell: Any = None
        self.namespace: dict[str, Any] = {}
        self.flags = 0
        self.program = ""
        self.folder = self.cwd = ""
        self.environment = dict(os.environ)
        self.version_variables: dict[str, str | None] = {}
        self.open_files: list[tuple[int, str, int, int]] = []
        self.sources: dict[str, list[str]] = {}
        """Path of a program -> source lines of its cells that ran in this process."""

    # -- preparation --

    def setup(self, message: dict[str, Any]) -> None:
        """Prepare this process to run the first cell of the program that the command `message` describes."""
        program, cwd = message["program"], message["cwd"]
        self.folder = self.file_access.folder = os.path.realpath(message["folder"])
        self.file_access.inputs_folder = message["inputs"]
        self.file_access.author_folder = message["author_folder"]
        self.file_access.watch()
        tempfile.tempdir = None  # let `tempfile` read TMPDIR again
        os.chdir(os.path.join(self.folder, cwd))
        self.program = os.path.join(self.folder, program)
        sys.path[0:1] = [os.path.dirname(self.program)]
        sys.stdout = OutputStream(self.outputs, "stdout", 1)
        sys.stderr = OutputStream(self.outputs, "stderr", 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        builtins.input = _no_input
        if message["notebook"]:
            self._start_notebook()
        else:
            module = types.ModuleType("__main__")
            module.__dict__.update({"__file__": self.program, "__builtins__": builtins})
            sys.modules["__main__"] = module
            self.namespace = module.__dict__

    def _start_notebook(self) -> None:
        self.shell = make_shell(self.outputs)
        self.namespace = self.shell.user_ns

    def switch(self, program: str, argv: list[str], environment: dict[str, str | None]) -> None:
        """Set program name, arguments and environment variables to those of the version whose cells run next."""
        self.program = os.path.join(self.folder, program)
        if self.shell is None:
            self.namespace["__file__"] = self.program
        sys.argv = [self.program, *argv]
        new_values = {
            name: self.environment.get(name) for name in self.version_variables
        } | environment
        for name, value in new_values.items():
            previous_value = self.version_variables.get(name, self.environment.get(name))
            if value == previous_value or os.environ.get(name) != previous_value:
                continue  # the value is right, or the program has set the variable itself
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self.version_variables = dict(environment)

    # -- cells --

    def run(self, text: str, line: int) -> dict[str, Any]:
        """Run the cell `text`, which begins on `line` of its program; return its outputs, seconds, reads and ending."""
        self.outputs.take()
        self.file_access.begin(text, self.namespace)
        begin = perf_counter()
        try:
            ended = self._run_notebook(text) if self.shell else self._run_script(text, line)
        finally:
            seconds = perf_counter() - begin
            reads = self.file_access.end()
        self.descriptors.take(self.outputs)
        return {"outputs": self.outputs.take(), "seconds": seconds, "ended": ended, **reads}

    def _run_notebook(self, text: str) -> str:
        result = self.shell.run_cell(text, store_history=True)
        failure = result.error_before_exec or result.error_in_exec
        if isinstance(failure, SystemExit):
            return "exit"
        return "failed" if failure is not None else "done"

    def _run_script(self, text: str, line: int) -> str:
        try:
            line = self._register_source(text, line)
            tree = ast.parse(text, self.program)
            ast.increment_lineno(tree, line - 1)
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    for alias in node.names:
                        self.flags |= getattr(future, alias.name).compiler_flag
            code = compile(tree, self.program, "exec", flags=self.flags, dont_inherit=True)
            exec(code, self.namespace)  # noqa: S102 - running the user's program is the purpose
        except SystemExit as exc:
            if exc.code not in {None, 0}:
                message = exc.code if isinstance(exc.code, str) else f"exit code {exc.code}"
                self._add_error("SystemExit", str(message), [])
                return "failed"
            return "exit"
        except BaseException as exc:
            lines = traceback.format_exception(exc)
            user_lines = [entry for entry in lines if __file__ not in entry]
            self._add_error(type(exc).__name__, str(exc), user_lines)
            return "failed"
        return "done"

    def _register_source(self, text: str, line: int) -> int:
        """Register the cell's source for tracebacks and `inspect`; return the line on which the cell begins there.

        The returned line may be greater than `line`: the earlier cells may have run for another version, with more
        lines of comments.
        """
        lines = self.sources.setdefault(self.program, [])
        line = max(line, len(lines) + 1)
        lines.extend(["\n"] * (line - 1 - len(lines)))
        lines.extend(text.splitlines(keepends=True))
        # `linecache` never discards an entry without a time stamp, even if the file does not exist
        linecache.cache[self.program] = (sum(map(len, lines)), None, lines, self.program)
        return line

    def _add_error(self, name: str, value: str, lines: list[str]) -> None:
        item = {"output_type": "error", "ename": name, "evalue": value, "traceback": lines}
        self.outputs.add(item, len(value))

    # -- forks --

    def fork(self, token: str, folder: str, mount: str, *, first: bool) -> None:
        """Fork: the child connects with `token` and runs the next cells; this process waits with the state.

        The child mounts `folder` at `mount` unless `mount` is empty. `first` says that this process has run cells since
        its last fork; it then raises CannotKeepState if a fork would not be safe.
        """
        if first:
            end_idle_worker_pools()
            gc.collect()  # close the files of unreachable objects
            reason = reason_against_fork(self.channel.socket.fileno(), self.folder)
            if reason:
                raise CannotKeepState(reason)
            pause_openmp()
            self.open_files = list_open_files()
            self.cwd = os.getcwd()
        state = random.getstate()
        with warnings.catch_warnings():
            # Python 3.12 warns about forks with threads; `reason_against_fork` has checked the threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return
        random.setstate(state)  # Python reseeds `random` in a forked process
        try:
            self.channel.reconnect()
            self.descriptors.open_files()
            if mount:
                mount_folder(folder, mount)
            if self.cwd:
                os.chdir(self.cwd)
            reopen(self.open_files)
            use_thread_pools()
            self.file_access.watch()
            self.channel.send({"hello": token, "pid": os.getpid()})
        except BaseException as exc:
            with contextlib.suppress(Exception):
                self.channel.send({"hello": token, "pid": os.getpid(), "error": repr(exc)})
            os._exit(1)

    # -- stored variables --

    def save(self, file: str) -> int:
        """Write the program's variables and the process settings to `file`; return its size in bytes.

        Raise CannotKeepState if that would not store the whole state.
        """
        if self._open_figures():
            raise CannotKeepState("matplotlib figures are open")
        reason = reason_against_storing(self.folder, self.namespace)
        if reason:
            raise CannotKeepState(reason)
        state = {
            "namespace": self._variables(),
            "modules": self._module_variables(),
            "random": random_states(),
            "settings": library_settings(),
            "flags": self.flags,
            "sources": self._source_texts(),
            "outside": self.file_access.outside_files,
            "count": self.shell.execution_count if self.shell else 0,
        }
        part = f"{file}.{os.getpid()}"
        try:
            with open(part, "wb") as stream:
                pickler(stream, self.namespace).dump(process_settings(self.folder))
                pickler(stream, self.namespace).dump(state)
            os.replace(part, file)
        except Exception as exc:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise CannotKeepState(self._unpicklable(exc)) from exc
        return os.stat(file).st_size

    def _variables(self) -> dict[str, Any]:
        hidden = set(self.shell.user_ns_hidden) if self.shell else set()
        skip = {
            "__builtins__",
            "In",
            "Out",
            "_ih",
            "_oh",
            "_dh",
            "get_ipython",
            "exit",
            "quit",
            "open",
        }
        return {
            name: value
            for name, value in self.namespace.items()
            if name not in skip
            and not (name in hidden and not name.startswith("__"))
            and not re.fullmatch(r"_+|_i+|_\d+|_i\d+", name)
            and not (self.shell and name in {"__name__", "__doc__", "__package__", "__loader__"})
            and name not in {"__spec__", "__loader__"}
        }

    def _module_variables(self) -> dict[str, dict[str, Any]]:
        """Return module name -> variables, for the project's modules: importing them again would not restore these."""
        by_module: dict[str, dict[str, Any]] = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not file or not str(file).startswith(self.folder + os.sep):
                continue
            if name in {"__main__", "__mp_main__"} or module is sys.modules["__main__"]:
                continue
            by_module[name] = module_state(module)
        return by_module

    def _source_texts(self) -> dict[str, list[str]]:
        """Return file name -> source lines, for all cells that ran in this process."""
        lines = {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        }
        return lines | self.sources

    def _open_figures(self) -> bool:
        plotting = sys.modules.get("matplotlib.pyplot")
        return bool(plotting and plotting.get_fignums())

    def _unpicklable(self, exc: Exception) -> str:
        for name, value in self._variables().items():
            try:
                pickler(io.BytesIO(), self.namespace).dump(value)
            except Exception as why:
                return f"variable {name} cannot be pickled: {why}"
        return f"the namespace cannot be pickled: {exc}"

    def load(self, file: str) -> None:
        """Load the variables and settings that `save` wrote to `file`."""
        with open(file, "rb") as stream:
            # first, because unpickling imports modules, which may depend on `sys.path` and the current folder
            apply_process_settings(unpickler(stream, self.namespace).load(), self.folder)
            state = unpickler(stream, self.namespace).load()
        self.namespace.update(state["namespace"])
        for name, values in state["modules"].items():
            module = sys.modules.get(name) or __import__(name, fromlist=["_"])
            restore_module(module, values)
        self.flags = state["flags"]
        self.file_access.outside_files.update(state["outside"])
        linecache.cache.update(
            (name, (sum(map(len, lines)), None, lines, name))
            for name, lines in state["sources"].items()
        )
        self.sources.update(state["sources"])
        if self.shell:
            self.shell.execution_count = state["count"]
        apply_settings(state["settings"])
        set_random_states(state["random"])

    # -- commands --

    def serve(self) -> None:
        """Execute commands until the controlling process closes the connection; then end this process."""
        while True:
            message = self.channel.receive()
            if message is None:
                os._exit(0)
            self._reap_children()
            token = message.get("token")
            pid = os.getpid()
            try:
                answer = self._execute(message)
            except CannotKeepState as exc:
                answer = {"refused": str(exc)}
            except BaseException as exc:
                answer = {"refused": f"{type(exc).__name__}: {exc}"}
            if token is not None and os.getpid() != pid:
                continue  # this is the forked child: it has sent its token, its parent sends the answer
            self.channel.send(answer)

    def _execute(self, message: dict[str, Any]) -> dict[str, Any]:
        command = message["do"]
        if command == "cell":
            return self.run(message["text"], int(message["line"]))
        if command == "setup":
            self.setup(message)
        elif command == "switch":
            self.switch(message["program"], message["argv"], message["environment"])
        elif command == "fork":
            self.fork(message["token"], message["folder"], message["mount"], first=message["first"])
        elif command == "save":
            size = self.save(message["file"])
            return {"saved": size, "outside": self.file_access.depends_on()}
        elif command == "load":
            self.load(message["file"])
        elif command == "end":
            os._exit(0)
        return {"ok": True}

    def _reap_children(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _no_input(prompt: object = "") -> str:
    raise EOFError(f"input({prompt!r}) was called, but a replay has no keyboard.")


def main() -> None:
    """Connect to the controlling process, send the token of this process, and execute commands."""
    path, token, notebook = sys.argv[-3:]
    # the controlling process handles Ctrl-C and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ControlChannel(path)
    if notebook == "1":  # imported once, in the process that the others are forked from
        import IPython  # noqa: F401

        with contextlib.suppress(ImportError):  # without matplotlib there are no figures to show
            import matplotlib_inline  # noqa: F401
    process = CellProcess(channel)
    channel.send({"hello": token, "pid": os.getpid()})
    process.serve()


if __name__ == "__main__":
    main()
