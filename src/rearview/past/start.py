"""How to start recording, from the folder where the user stands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rearview.errors import UsageError
from rearview.execute.start import Start, start
from rearview.model import Control
from rearview.store.project import root_of


def begin(
    target: str,
    args: Sequence[str],
    *,
    module: bool = False,
    given: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Start:
    """Return how to start recording a script or module from the current folder."""
    here = Path.cwd()
    root = Path(os.environ["REARVIEW_ROOT"]) if "REARVIEW_ROOT" in os.environ else here
    if not module:
        script = Path(target)
        if not script.is_file():
            raise UsageError(
                f"There is no script {target} in {here}. Give the path of a Python file, or "
                "`-m module`.",
                slug="no-script",
            )
        root = root_of(script)
    control = Control(
        root=str(root.resolve()),
        target=target,
        module=module,
        args=tuple(args),
        given=dict(given or {}),
        settings=dict(settings or {}),
    )
    return start(control, os.environ, here)
