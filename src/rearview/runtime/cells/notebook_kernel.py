"""Run the cells of a notebook in an IPython kernel, as a recorded run or as a replay.

When a run is recorded, a front end (nbclient) sends the cells to the kernel. A replay makes an equal kernel without a
front end and runs the cells of the recorded version in order. In both, the loops of each cell are instrumented,
and the code of a cell has the file name that the kernel gives to the cell.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import ctypes
import functools
import os
import random
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from rearview.errors import UsageError
from rearview.model.cell_lineage import CellLineage
from rearview.model.process_messages import Control
from rearview.runtime import importer
from rearview.runtime.base_session import Session
from rearview.runtime.cells.cell_inputs import Lineage
from rearview.runtime.importer import register_module
from rearview.runtime.loops import LoopHistory
from rearview.runtime.recorder import Recorder
from rearview.runtime.sandbox import clock, entropy
from rearview.runtime.sandbox.file_view import PathUse
from rearview.runtime.sandbox.program_inputs import InputFiles
from rearview.source.instrument import instrument, without_targets
from rearview.source.isolate_probes import isolate_probes
from rearview.source.loops import loop_ids
from rearview.source.notebooks import CodeCell, Notebook, parse

if TYPE_CHECKING:
    from rearview.runtime.cells.cached_kernel import CachedKernel

_TIMED = ("<timed exec>", "<timed eval>")
"""File names that IPython gives to code that `%%time` runs."""
_INPUTS = re.compile(r"(In|_ih|_dh|_i{1,3}|_i\d+|_exit_code)\Z")
"""Matches names of variables in which a kernel keeps the sources of cells, and other values of its own."""
_OUTPUTS = re.compile(r"(Out|_oh|_{1,3}|_\d+)\Z")
"""Matches names of variables in which a kernel keeps the results of cells."""
_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_PR_SET_PDEATHSIG = 1
_PARENT = "JPY_PARENT_PID"
"""Name of the environment variable with the process id of the front end."""
_INTERRUPTED = 130


def make_kernel(control: Control) -> Any:
    """Return the IPython kernel application of this process, ready to run cells.

    Called before recording or replaying starts: random numbers, files and imports that a kernel uses while it starts
    do not belong to the program.
    """
    if control.kernel is not None:
        _end_with_parent()
    try:
        import ipykernel
        from ipykernel.kernelapp import IPKernelApp
    except ImportError as exc:
        raise UsageError(
            f"Notebooks need ipykernel, which is not installed here ({exc}). Install it: "
            "`pip install 'rearview[notebook]'`.",
            slug="notebook-extra",
        ) from exc
    traits: dict[str, Any] = {"kernel_class": _kernel_class(), "parent_handle": 1}
    if control.kernel is not None:
        traits["connection_file"] = control.kernel
    else:
        assert control.segment is not None
        traits["connection_file"] = str(Path(control.segment).with_name("kernel.json"))
        traits |= {"transport": "ipc", "ip": f"@rearview-{secrets.token_hex(8)}"}
        traits |= {f"{name}_port": number for number, name in enumerate(_CHANNELS, 1)}
        traits |= {"quiet": False, "capture_fd_output": False}
    launcher = Path(ipykernel.__file__).parent.parent / "ipykernel_launcher.py"
    sys.argv = [str(launcher), "-f", traits["connection_file"]]
    with _without_debugger():
        app: Any = IPKernelApp.instance(**traits)
        app.initialize(["--HistoryManager.hist_file=:memory:"])
    # the program can read `sys.argv`: make it equal in every process that runs this notebook
    sys.argv[2] = f"{control.root}{os.sep}kernel.json"
    return app


@contextlib.contextmanager
def _without_debugger() -> Iterator[None]:
    """While the body runs, prevent the import of debugpy, which would delay the start of a kernel by 0.1 seconds.

    A notebook that runs from top to bottom is not debugged. The program can import debugpy afterwards.
    """
    loaded = sys.modules.get("debugpy")
    # with None in `sys.modules`, importing debugpy fails as if it were not installed
    sys.modules["debugpy"] = cast(Any, None)
    try:
        yield
    finally:
        del sys.modules["debugpy"]
        if loaded is not None:
            sys.modules["debugpy"] = loaded


def _end_with_parent() -> None:
    """Let the system kill this process when the front end ends, because only the front end sends cells."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(_PARENT, "")
    if parent.isdecimal() and int(parent) != os.getppid():
        os._exit(1)  # the front end ended before `prctl` was called


def _kernel_class() -> Any:
    from ipykernel.ipkernel import IPythonKernel

    class Kernel(IPythonKernel):
        cells: Cells | None = None

        async def poll_stopped_queue(self) -> None:
            """Do nothing: debugpy is not used, so no cell can stop in the debugger."""

        async def do_execute(
            self, code: str, silent: bool, store_history: bool = True, *args: Any, **kwargs: Any
        ) -> Any:
            run: Any = super().do_execute
            cell = None
            if self.cells is not None and not silent and store_history:
                cell = self.cells.match(code)
            if self.cells is None or cell is None:
                return await run(code, silent, store_history, *args, **kwargs)
            if self.cells.reuse is not None:
                reused = await self.cells.reuse.before(cell, run)
                if reused is not None:
                    return reused
            self.cells.begin(cell)
            reply: Mapping[str, Any] = {"status": "error", "ename": ""}
            try:
                reply = await run(code, silent, store_history, *args, **kwargs)
            finally:
                self.cells.end(cell, reply)
            return reply

    return Kernel


class Cells:
    """Follows the cells of a notebook in a kernel: instruments their loops, sets random states, records inputs."""

    def __init__(self, session: Session, notebook: Notebook, path: str) -> None:
        self.session = session
        self.notebook = notebook
        self.path = path
        """Path, relative to the project, under which the notebook's code is known as a Python program."""
        self.current: CodeCell | None = None
        self.part = ""
        """Source of the whole cell while only a part of it runs; else empty."""
        self.failed: str = ""
        """Name of the class of the exception that ended the notebook; empty if none did."""
        self._next = 0
        self.lineage: Lineage | None = None
        if isinstance(session, Recorder):
            self.lineage = Lineage(session.runs.folder(session.run), session.root)
        self._clock: list[int] = session.declared.get(clock.ROOT, [])
        self._clock_before = 0
        self._stream_position: list[Any] = session.declared.get(entropy.ROOT, [])
        # states at the end of the last cell, to be set for the next cell: in between, the kernel draws random numbers
        self.random, self._last_position = random.getstate(), list(self._stream_position)
        self.reuse: CachedKernel | None = None
        clock.between_cells[:] = [lambda: not session.cell]
        self._expected = ""
        self._recorded = isinstance(session.compiler, importer.Compiler)
        ids: Mapping[int, str] | None = None
        if self._recorded:
            ids = session.compiler.ids.get(path)
        if ids is None:
            parsed_ids = loop_ids(ast.parse(notebook.text), path)
            ids = {line: str(loop_id) for line, loop_id in parsed_ids.items()}
        self._ids = ids

    def match(self, source: str) -> CodeCell | None:
        """Return the next cell of the notebook whose source is `source`, or None if no later cell has it."""
        for cell in self.notebook.cells[self._next :]:
            if cell.source == source:
                self._next = cell.number
                return cell
        return None

    def begin(self, cell: CodeCell) -> None:
        """Prepare to run `cell`: start to record its inputs, and set the random state that the previous cell left."""
        self.current = cell
        self.session.cell = cell.number
        self._expected = ast.dump(cell.tree())
        self._clock_before = self._clock[0] if self._clock else 0
        if self.reuse is not None:
            self.reuse.begin(cell)
        if self.lineage is not None:
            self.lineage.begin(cell.text, self._variables())
        random.setstate(self.random)
        self._stream_position[:] = self._last_position

    def _variables(self) -> dict[str, object]:
        """Return name -> value of the notebook's variables, without variables of the kernel."""
        hides = self.session.modules.hides
        space = vars(sys.modules["__main__"])
        return {name: value for name, value in list(space.items()) if not hides(name)}

    @contextlib.contextmanager
    def in_part(self, cell: CodeCell, text: str) -> Iterator[None]:
        """While the body runs, treat `text`, a part of `cell`, as the cell that is being executed."""
        self.current, self._expected = replace(cell, text=text), ast.dump(ast.parse(text))
        self.part = cell.source
        try:
            yield
        finally:
            self.current, self.part = None, ""

    def is_last(self, cell: CodeCell) -> bool:
        """Return True if `cell` is the last cell of the notebook."""
        return cell is self.notebook.cells[-1]

    def end(self, cell: CodeCell, reply: Mapping[str, Any]) -> None:
        """Record the inputs and results of `cell`, which has run; `reply` is the kernel's reply to its execution."""
        self.current = None
        self.session.cell = 0
        position_before = self._last_position
        self._last_position = list(self._stream_position)
        self.random = random.getstate()
        lineage: CellLineage | None = None
        if self.lineage is not None:
            counts = {"clock": (self._clock[0] if self._clock else 0) - self._clock_before}
            counts["chance"] = int(position_before != self._last_position)
            try:
                variables = self._variables()
                public = {name: variables[name] for name in variables if not name.startswith("_")}
                lineage = self.lineage.end(
                    *(cell.number, cell.text, self.session.belongs, public),
                    as_written=cell.source,
                    counts=counts,
                )
            except Exception as exc:
                self.lineage = None
                cast(Recorder, self.session).fail(exc)
        if self.reuse is not None:
            self.reuse.after(cell, reply, lineage)
        if reply.get("status") != "ok" and "raises-exception" not in cell.tags:
            self.failed = self.failed or str(reply.get("ename") or "error")
            interrupted = self.failed == KeyboardInterrupt.__name__
            self.session.code = _INTERRUPTED if interrupted else 1
        elif self.is_last(cell):
            self.session.code = 0

    def visit(self, tree: Any) -> Any:
        """Return `tree` with instrumented loops if it is the code of the current cell; else return it unchanged."""
        cell = self.current
        if cell is None or not self._recorded or not isinstance(tree, ast.Module) or not tree.body:
            return tree
        if ast.dump(tree) != self._expected:
            return tree  # a magic in the cell compiles code of its own
        try:
            return self._instrumented(cell, tree)
        except Exception as exc:
            fail: Callable[[BaseException], None] | None = getattr(self.session, "fail", None)
            if fail is None:
                raise
            fail(exc)
            return ast.parse(cell.text)

    def _instrumented(self, cell: CodeCell, tree: ast.Module) -> ast.Module:
        compiler = self.session.compiler
        # difference of line numbers: in the text of the whole program minus in the code that the kernel compiles
        shift = cell.line - 1 + cell.tree().body[0].lineno - tree.body[0].lineno
        last_line = cell.line + cell.text.count("\n")
        lines = range(cell.line, last_line + 1)
        probes = {
            (line - shift, column): drawn
            for (line, column), drawn in compiler.probes.get(self.path, {}).items()
            if line in lines
        }
        if probes:
            tree = isolate_probes(tree, probes)
        if compiler.watched:
            ids = {line - shift: loop_id for line, loop_id in self._ids.items() if line in lines}
            suspends = any(map(_awaits, tree.body))
            for site in instrument(
                tree, self.path, ids=ids, autolog=compiler.autolog, suspends=suspends
            ):
                self.session.histories.setdefault(site.id, LoopHistory(site))
        return tree


def _awaits(node: ast.AST) -> bool:
    """Return True if `node` contains `await`, `async for` or `async with` outside functions and classes."""
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return False
    return any(map(_awaits, ast.iter_child_nodes(node)))


def _watch(app: Any, cells: Cells) -> None:
    """Make the kernel pass the code of each cell to `cells`, which instruments the code, before the kernel compiles it."""
    from ipykernel.compiler import XCachingCompiler

    session = cells.session

    class CellCompiler(XCachingCompiler):
        def get_code_name(self, raw_code: str, code: str, number: int) -> str:
            real: Any = super().get_code_name
            # warnings and tracebacks show the file name, so a part of a cell gets the name of the whole cell
            name: str = real(cells.part or raw_code, code, number)
            if cells.current is not None:
                session.adopt(name)
            return name

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            code = super().__call__(*args, **kwargs)
            return without_targets(code) if isinstance(code, CodeType) else code

    shell = app.kernel.shell
    compiler_class: Any = CellCompiler
    compiler = compiler_class()
    vars(compiler).update(vars(shell.compile))
    shell.compile, shell.compiler_class = compiler, CellCompiler
    shell.ast_transformers.append(cells)
    for name in _TIMED:
        session.adopt(name)
    session.modules.main = shell.user_module
    session.modules.hides = _hidden(set(shell.user_ns_hidden), cells.notebook)
    register_module(shell.user_module)
    app.kernel.cells = cells


def _hidden(kernel_names: set[str], notebook: Notebook) -> Callable[[str], bool]:
    """Return a function that returns True if a name in the notebook's namespace belongs to the kernel.

    Results of cells (`Out`, `_3`) belong to the program, and not to the kernel, if their name is in the source.
    """
    names_in_source = {
        node.id for node in ast.walk(ast.parse(notebook.text)) if isinstance(node, ast.Name)
    }

    @functools.cache  # called for each name at each cell
    def hides(name: str) -> bool:
        if _OUTPUTS.match(name):
            return name not in names_in_source
        return bool(_INPUTS.match(name)) or name in kernel_names

    return hides


def run_notebook(control: Control, session: Session, app: Any) -> int:
    """Run the cells of the notebook `control.target` in the kernel application `app`; return the exit code."""
    file = os.path.abspath(control.target)  # noqa: PTH100 - patched in a replay
    root = session.root
    name = os.path.relpath(os.path.realpath(file), root)
    inputs = getattr(session, "inputs", None)
    if isinstance(inputs, InputFiles):
        inputs.active = False  # the notebook itself is not an input of the program
    data = Path(session.real(file, PathUse.RUN)).read_bytes()
    if isinstance(inputs, InputFiles):
        inputs.active = True
    sources: Mapping[str, bytes] = getattr(session.compiler, "sources", {})
    notebook = parse(sources.get(name, data), name)
    cells = Cells(session, notebook, f"{name}.py")
    _watch(app, cells)
    if control.reuse_cells and isinstance(session, Recorder) and cells.lineage is not None:
        from rearview.runtime.cells.cached_kernel import CachedKernel

        cells.reuse = CachedKernel.start(app.kernel, cells, session, cells.lineage)
    session.code = 1 if notebook.cells else 0
    if control.kernel is not None:
        app.start()
        if cells.reuse is not None:
            cells.reuse.close()
    else:
        asyncio.run(_run_all(app.kernel, notebook))
    return int(session.code or 0)


async def _run_all(kernel: Any, notebook: Notebook) -> None:
    """Run all cells in order; stop after the first cell that fails without the tag `raises-exception`."""
    from tornado.ioloop import IOLoop

    kernel.io_loop = IOLoop.current()
    for cell in notebook.cells:
        reply = await kernel.do_execute(cell.source, silent=False, store_history=True)
        if reply["status"] != "ok":
            sys.stderr.write("\n".join(reply.get("traceback", ())) + "\n")
            if "raises-exception" not in cell.tags:
                return
