"""What a run stood on: versions of the libraries it loaded, and how many threads they use.

Other versions or thread counts may give other bits. A replay that differs names them first.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rearview.store.fingerprint import fingerprint

_HERE = __name__.partition(".")[0]


def surroundings() -> dict[str, str]:
    """Return versions and thread counts of this process, by name."""
    found = {"Python": platform.python_version(), "machine": platform.machine()}
    for name, module in sorted(sys.modules.items()):
        version = None if "." in name else vars(module).get("__version__") if module else None
        if isinstance(version, str) and name not in sys.stdlib_module_names and name != _HERE:
            found[name] = version
    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            found["threads of torch"] = str(torch.get_num_threads())
        except Exception:
            found["threads of torch"] = "unknown"
    for name in sorted(os.environ):
        if name.endswith("_NUM_THREADS"):
            found[name] = os.environ[name]
    return found


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield what is not as it was, one phrase each.

    >>> list(changes({"torch": "2.12.0", "numpy": "2.0"}, {"torch": "2.13.0", "numpy": "2.0"}))
    ['torch was 2.12.0, is 2.13.0']
    >>> list(changes({"OMP_NUM_THREADS": "1"}, {}))
    ['OMP_NUM_THREADS was 1, is not set']
    """
    for name, before in then.items():
        after = now.get(name)
        if after is None and not name.endswith("_NUM_THREADS"):
            continue  # a replay that ends early has not loaded everything
        if after != before:
            yield f"{name} was {before}, is {after or 'not set'}"
    for name, after in now.items():
        if name.endswith("_NUM_THREADS") and name not in then:
            yield f"{name} was not set, is {after}"


def changed_inputs(then: Mapping[str, list[Any]], real: Callable[[str], str]) -> Iterator[str]:
    """Yield which files are not what the run read, one phrase each; `real` says where they are."""
    for path, about in then.items():
        try:
            same = fingerprint(Path(real(path)))[2] == about[2]
        except OSError:
            yield f"{path} is gone"
            continue
        if not same:
            yield f"{path} is not what the run read"
