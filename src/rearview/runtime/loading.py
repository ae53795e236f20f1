"""How long a program waits for installed libraries: replays that begin alike need not wait again."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from time import perf_counter
from types import ModuleType
from typing import Any

LEAST = 0.01
"""Seconds below which an import is not worth a word."""


class Loading:
    """The imports of installed libraries by a program, without those that they make themselves."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By module."""
        self._busy = False

    def watch(self, name: str, loader: Any) -> None:
        """Time the execution of a module, if it is not one that another is waiting for."""
        if self._busy or type(loader) not in {SourceFileLoader, ExtensionFileLoader}:
            return
        execute = loader.exec_module

        def load(module: ModuleType) -> None:
            self._busy, before = True, self._busy
            begun = perf_counter()
            try:
                execute(module)
            finally:
                self._busy = before
                if not before:
                    self.seconds[name] = perf_counter() - begun
                if vars(loader).get("exec_module") is load:
                    del loader.exec_module

        loader.exec_module = load

    def facts(self) -> dict[str, float]:
        """Return the longer ones as plain values."""
        return {name: round(each, 3) for name, each in self.seconds.items() if each >= LEAST}
