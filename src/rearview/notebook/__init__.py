"""Rearview in notebooks: record a notebook, and undo cells of a live one. `%load_ext rearview` calls `load`."""

from __future__ import annotations

from typing import Any

_WELCOME = """\
Rearview {version} in this notebook:
  rearview.log("loss", loss)              keeps a value; the first call starts a run in {folder}
  rearview.history().table("loss")        the values of all runs here; .pandas() gives a DataFrame
  rearview.history().runs()               the runs of this folder
  %rv history, %rv undo, %rv checkout 3   go back to what the variables were after a cell
To record the loops of a notebook, run it with `rearview run study.ipynb` (docs/notebooks.md)."""


def load(shell: Any) -> None:
    """Print a short help with the folder of the records, and add the magic `%rv` to the IPython shell `shell`."""
    from pathlib import Path

    import rearview

    print(_WELCOME.format(version=rearview.__version__, folder=Path.cwd()))  # noqa: T201 - asked for
    from rearview.notebook.undo import register

    register(shell)
