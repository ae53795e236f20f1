"""Record the lineage of a script that is cut into cells: inputs and cost of each cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rearview.runtime.cells.cell_inputs import Lineage
from rearview.runtime.sandbox import clock, entropy
from rearview.runtime.session import Session


class ScriptCells:
    """Records the cells of one script while they run, one after the other."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        texts: Sequence[str],
        fail: Callable[[BaseException], object],
    ) -> None:
        self._texts = texts
        self._belongs = session.belongs
        self._report = fail
        self._lineage: Lineage | None = Lineage(folder, session.root)
        self._clock: list[int] = session.declared.get(clock.ROOT, [0])
        self._chance: list[Any] = session.declared.get(entropy.ROOT, [])
        self._cell = 0
        self._clock_at, self._drawn = 0, list(self._chance)

    def enter(self, number: int) -> None:
        """End the cell before, and begin cell `number`: the script has reached it."""
        self.end()
        if self._lineage is None or not 0 < number <= len(self._texts):
            return
        self._cell = number
        self._clock_at, self._drawn = self._clock[0], list(self._chance)
        try:
            self._lineage.begin(self._texts[number - 1], _variables())
        except Exception as exc:
            self._fail(exc)

    def end(self) -> None:
        """Write the lineage of the cell that was entered last, if there is one."""
        number, self._cell = self._cell, 0
        if self._lineage is None or not number:
            return
        used = {"clock": self._clock[0] - self._clock_at}
        used["chance"] = int(self._drawn != self._chance)
        try:
            text, belongs = self._texts[number - 1], self._belongs
            self._lineage.end(number, text, belongs, _variables(), used=used)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self._lineage = None
        self._report(exc)


def _variables() -> dict[str, object]:
    main: ModuleType = sys.modules["__main__"]
    return {name: value for name, value in vars(main).items() if not name.startswith("_")}
