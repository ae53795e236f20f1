"""Collect the outputs of a cell inside its process: printed text, displayed values, errors.

This module imports only the standard library and IPython.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

MOST_OUTPUT = 16 << 20
"""Size in bytes after which the output of a cell is cut off."""


class CellOutputs:
    """Collects the outputs of a cell, each as a dict as in a notebook file."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.size = 0
        self.clear_next = False

    def take(self) -> list[dict[str, Any]]:
        """Return the outputs collected since the last call."""
        items, self.items, self.size, self.clear_next = self.items, [], 0, False
        return items

    def add(self, item: dict[str, Any], size: int) -> None:
        """Add the output `item` of `size` bytes; after MOST_OUTPUT bytes, add one note that output is cut off."""
        if self.clear_next:
            self.items, self.clear_next = [], False
        if self.size > MOST_OUTPUT:
            return
        self.size += size
        if self.size > MOST_OUTPUT:
            item = {"output_type": "stream", "name": "stderr", "text": "[output cut off]\n"}
        self.items.append(item)

    def write(self, name: str, text: str) -> None:
        """Add text that was written to the stream `name`, to the last output if that is of the same stream."""
        last = self.items[-1] if self.items and not self.clear_next else None
        if last and last["output_type"] == "stream" and last["name"] == name:
            self.size += len(text)
            if self.size <= MOST_OUTPUT:
                last["text"] += text
            return
        self.add({"output_type": "stream", "name": name, "text": text}, len(text))


class OutputStream(io.TextIOBase):
    """Replacement for `sys.stdout` or `sys.stderr`: written text becomes an output of the cell."""

    def __init__(self, outputs: CellOutputs, name: str, fd: int) -> None:
        self.outputs, self.stream, self._fd = outputs, name, fd

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Name of the encoding of this stream: always UTF-8."""
        return "utf-8"

    def write(self, text: str) -> int:
        """Add `text` to the outputs of the cell; return the number of characters."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.outputs.write(self.stream, text)
        return len(text)

    def writable(self) -> bool:
        """Return True: text can be written to this stream."""
        return True

    def isatty(self) -> bool:
        """Return False: this stream is no terminal."""
        return False

    def fileno(self) -> int:
        """Return the file descriptor, 1 or 2, to which child processes write if they inherit this stream."""
        return self._fd


class OutputDescriptors:
    """Collects the text that C code and child processes write to file descriptors 1 and 2."""

    def __init__(self) -> None:
        self.open_files()

    def open_files(self) -> None:
        """Redirect descriptors 1 and 2 to new files; called after each fork, so that no two processes share files."""
        for fd in (1, 2):
            name = f"rearview-{os.getpid()}-{fd}"
            target = os.memfd_create(name) if hasattr(os, "memfd_create") else _unnamed_file()
            os.dup2(target, fd)
            os.set_inheritable(fd, True)
            os.close(target)

    def take(self, outputs: CellOutputs) -> None:
        """Move the text written to the descriptors since the last call to `outputs`."""
        for fd, name in ((1, "stdout"), (2, "stderr")):
            end = os.lseek(fd, 0, os.SEEK_END)
            if end:
                text = os.pread(fd, min(end, MOST_OUTPUT), 0).decode("utf-8", "replace")
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                outputs.write(name, text)


def _unnamed_file() -> int:
    import tempfile

    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def make_shell(outputs: CellOutputs) -> Any:
    """Return the IPython shell of this process, which adds displayed values and errors to `outputs`."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Hook(DisplayHook):
        def write_output_prompt(self) -> None:
            pass

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            data = _json_data(format_dict)
            item = {"output_type": "execute_result", "data": data, "metadata": md_dict or {}}
            item["execution_count"] = self.prompt_count
            outputs.add(item, len(json.dumps(data)))

        def finish_displayhook(self) -> None:
            pass

    class Publisher(DisplayPublisher):
        def publish(
            self,
            data: Any,
            metadata: Any = None,
            source: Any = None,  # noqa: ARG002 - IPython's signature
            *,
            transient: Any = None,
            update: Any = False,
            **more: Any,  # noqa: ARG002
        ) -> None:
            mime_data = _json_data(data)
            item = {"output_type": "display_data", "data": mime_data, "metadata": metadata or {}}
            display_id = (transient or {}).get("display_id")
            if display_id:
                item["display_id"] = display_id
            if update:
                for item_on_page in outputs.items:
                    if display_id and item_on_page.get("display_id") == display_id:
                        item_on_page["data"] = mime_data
                return
            outputs.add(item, len(json.dumps(mime_data)))

        def clear_output(self, wait: bool = False) -> None:
            if wait:
                outputs.clear_next = True
            else:
                outputs.items = []

    class Shell(InteractiveShell):
        def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
            name = getattr(etype, "__name__", str(etype))
            item = {"output_type": "error", "ename": name, "evalue": str(evalue)}
            item["traceback"] = stb if isinstance(stb, list) else [str(stb)]
            outputs.add(item, 0)

        # `!command` writes to a pipe, not to a terminal, as in a kernel
        system = InteractiveShell.system_piped

        def ask_exit(self) -> None:
            pass

        def enable_gui(self, gui: Any = None) -> None:
            pass

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryAccessor.enabled = False
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.display_page = True
    Shell.displayhook_class.default_value = Hook
    Shell.display_pub_class.default_value = Publisher
    shell = Shell.instance(config=config, displayhook_class=Hook, display_pub_class=Publisher)
    setattr(InteractiveShell, "_instance", shell)  # noqa: B010 - get_ipython() looks there
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    if inline is not None:
        # the backend was imported before the shell existed: let it show figures as images now
        inline._enable_matplotlib_integration()  # noqa: SLF001
    return shell


def _json_data(data: Any) -> dict[str, Any]:
    import base64

    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for kind, value in dict(data).items()
    }
