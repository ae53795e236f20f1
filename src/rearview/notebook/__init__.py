"""Rearview in a live notebook: what `%load_ext rearview` offers."""

from __future__ import annotations

from typing import Any

_WHAT_THERE_IS = """\
Rearview {version} in this notebook:
  rearview.log("loss", loss)              keeps a value; the first call starts a run in {folder}
  rearview.history().table("loss")        the values of all runs here; .pandas() gives a DataFrame
  rearview.history().runs()               the runs of this folder
Loops of notebooks are not recorded yet: put the training into a script and record it with
`rearview run train.py`, or use rearview.Checkpointer to go on after a restart of the kernel."""


def load(shell: Any) -> None:  # noqa: ARG001 - IPython's signature
    """Print what can be used in a notebook, and where it records."""
    from pathlib import Path

    import rearview

    print(_WHAT_THERE_IS.format(version=rearview.__version__, folder=Path.cwd()))  # noqa: T201 - asked for
