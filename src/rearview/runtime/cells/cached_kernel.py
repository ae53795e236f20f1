"""Execute a cell in a kernel, or send its stored results to the front end without executing it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rearview.model.cell_lineage import CellLineage
from rearview.runtime.cells.cell_analysis import analyse
from rearview.runtime.cells.cell_cache import CellCache
from rearview.runtime.cells.cell_inputs import Lineage
from rearview.runtime.cells.result_store import ResultStore
from rearview.runtime.cells.skipped_cells import REUSE_FAILED, ReuseFailed
from rearview.runtime.recorder import Recorder
from rearview.runtime.sandbox import entropy
from rearview.source.notebooks import CodeCell, Notebook
from rearview.store.create_files import publish
from rearview.store.trust import is_trusted

FILE = "reused.json"
"""Name of a file in the folder of a run, with (cell number, reason why it ran or "" if it was skipped)."""
SHOWN = ("stream", "display_data", "execute_result", "update_display_data", "clear_output")
"""Types of the kernel's messages that contain output of a cell."""
_COMMS = ("comm_open", "comm_msg", "comm_close")
"""Types of the kernel's messages by which widgets communicate."""


class RunsCells(Protocol):
    """The attributes and methods of `notebook_kernel.Cells` that `CachedKernel` uses."""

    notebook: Notebook
    random: Any

    def in_part(self, cell: CodeCell, text: str) -> AbstractContextManager[None]:
        """While the body runs, treat `text`, a part of `cell`, as the cell that is being executed."""
        ...

    def is_last(self, cell: CodeCell) -> bool:
        """Return True if `cell` is the last cell of the notebook."""
        ...


class ShownMessages:
    """Collects the messages by which a kernel sends the output of cells to its front end."""

    def __init__(self, kernel: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.problem = ""
        """Reason why the collected output cannot be shown again later; empty if it can."""
        self.muted = False
        self._send = kernel.session.send
        kernel.session.send = self._pass
        self._kernel = kernel

    def _pass(self, stream: Any, message: Any, content: Any = None, *args: Any, **kw: Any) -> Any:
        whole = isinstance(message, Mapping)
        kind = str(message["header"]["msg_type"] if whole else message)
        if kind in SHOWN or kind in _COMMS or kind == "error":
            if self.muted:
                return None
            output = message["content"] if whole else content
            if kind in _COMMS or kw.get("buffers"):
                self.problem = "it shows a widget"
            elif kind in SHOWN:
                # a copy: the program may change the shown objects later
                self.messages.append(
                    {"type": kind, "content": msgspec.json.decode(msgspec.json.encode(output))}
                )
        if whole:
            return self._send(stream, message, *args, **kw)
        return self._send(stream, message, content, *args, **kw)

    def take(self) -> list[dict[str, Any]]:
        """Return the messages collected since the last call."""
        sys.stdout.flush()
        sys.stderr.flush()
        messages, self.messages = self.messages, []
        return messages

    def show(self, kind: str, content: Mapping[str, Any]) -> None:
        """Send a message of type `kind` to the front end, as output of the cell that is being executed."""
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        self._send(
            kernel.iopub_socket,
            kind,
            dict(content),
            parent=kernel.get_parent("shell"),
            ident=topic,
        )


class CachedKernel:
    """Decides for each cell of a notebook whether to show its stored results or to run it."""

    def __init__(
        self, kernel: Any, cells: RunsCells, session: Recorder, cache: CellCache, off: str
    ) -> None:
        self._kernel = kernel
        self._cells = cells
        self._session = session
        self._cache = cache
        self._published = ShownMessages(kernel)
        self._off = off
        """Reason why no results of this notebook are reused; empty if results are reused."""
        self._why = ""
        self._logged = 0

    @classmethod
    def start(
        cls, kernel: Any, cells: RunsCells, session: Recorder, lineage: Lineage
    ) -> CachedKernel | None:
        """Return the CachedKernel of a notebook, or None if the store is not trusted, so that nothing is unpickled."""
        if not is_trusted(session.project.store, session.settings.trust):
            return None
        off = ""
        for cell in cells.notebook.cells:
            if analyse(cell.source).reads_outputs:
                off = f"cell {cell.number} reads results of earlier cells by `_`, `Out` or `In`"
            if "cache_info" in analyse(cell.source).attributes:
                off = f"cell {cell.number} asks how often a cache was used"
        cache = CellCache(
            ResultStore(session.project.cache / "cells"),
            kernel.shell.user_ns,
            session.modules.hides,
            lineage,
            session.belongs,
            session.clock,
            session.declared.get(entropy.ROOT, []),
        )
        return cls(kernel, cells, session, cache, off)

    async def before(self, cell: CodeCell, run: Callable[..., Any]) -> dict[str, Any] | None:
        """Show the stored results of `cell` and return the reply to its execution, or return None if it has to run.

        Before a cell that has to run, the state that skipped cells would have left is restored; `run` executes code for
        that.
        """
        if self._off:
            if self._cache.has_skipped():
                return self._give_up(self._off)  # this cell may need variables of skipped cells
            self._cache.decisions.append((cell.number, self._off))
            return None
        try:
            entry, self._why = self._cache.find(cell)
            if entry is not None:
                for message in self._cache.reuse(cell, entry):
                    self._show(message)
                return self._answer(cell)

            async def late_run(part: CodeCell, text: str) -> str:
                return await self._run_late(run, part, text)

            random.setstate(self._cells.random)
            await self._cache.prepare(cell, late_run)
            self._cells.random = random.getstate()
        except ReuseFailed as exc:
            return self._give_up(str(exc))
        except Exception as exc:
            return self._give_up(f"{type(exc).__name__}: {exc}")
        self._published.take()
        self._published.problem = ""
        return None

    def _show(self, message: Mapping[str, Any]) -> None:
        content = dict(message["content"])
        if message["type"] == "execute_result":
            content["execution_count"] = self._kernel.shell.execution_count
        self._published.show(message["type"], content)

    def _answer(self, cell: CodeCell) -> dict[str, Any]:
        shell = self._kernel.shell
        number = shell.execution_count
        shell.execution_count += 1
        self._published.take()
        if self._cells.is_last(cell):
            self._session.code = 0
        return {"status": "ok", "execution_count": number, "payload": [], "user_expressions": {}}

    def _give_up(self, why: str) -> dict[str, Any]:
        """Show the error that tells the client to run all cells again; return it as the reply to the execution."""
        error = {"ename": REUSE_FAILED, "evalue": why, "traceback": [f"{REUSE_FAILED}: {why}"]}
        self._published.show("error", error)
        self._session.code = 1
        number = self._kernel.shell.execution_count
        return {"status": "error", "execution_count": number, "payload": [], **error}

    async def _run_late(self, run: Callable[..., Any], cell: CodeCell, text: str) -> str:
        """Run `text`, a skipped cell or a part of it, without showing its output; return the error, or ""."""
        self._published.take()
        self._published.muted = True
        try:
            with self._cells.in_part(cell, text):
                source = cell.source if text == cell.text else text
                reply = await run(source, False, False)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            self._published.muted = False
        return "" if reply["status"] == "ok" else f"{reply.get('ename')}: {reply.get('evalue')}"

    def begin(self, cell: CodeCell) -> None:
        """Remember the state before `cell` runs, to find out afterwards what the cell has changed."""
        if not self._off:
            self._logged = self._session.log_calls
            try:
                self._cache.begin(cell)
            except Exception as exc:
                self._off = f"looking at the variables failed: {type(exc).__name__}: {exc}"

    def after(self, cell: CodeCell, reply: Mapping[str, Any], lineage: CellLineage | None) -> None:
        """Store the inputs, results and output of `cell`, which has run, if they can be reused later."""
        if self._off:
            return
        messages = self._published.take()
        problem = self._published.problem
        if reply.get("status") != "ok":
            problem = "it failed"
        elif reply.get("payload"):
            problem = "it asks something of the front end"
        elif self._session.log_calls != self._logged:
            problem = "it logs values of this run"
        try:
            self._cache.end(cell, lineage, messages, problem, self._why)
        except Exception as exc:
            self._off = f"keeping results failed: {type(exc).__name__}: {exc}"

    def close(self) -> None:
        """Write the decision about each cell to the folder of the run, and remove the least recently used results."""
        folder: Path = self._session.runs.folder(self._session.run)
        if folder.is_dir():
            facts = {"format": 1, "cells": self._cache.decisions, "off": self._off}
            publish(folder / FILE, msgspec.json.encode(facts))
        self._cache.store.prune()
