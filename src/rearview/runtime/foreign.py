"""Which files outside the project are not the program's own work: the system's, caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/run/")
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_CACHES = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "KERAS_HOME"),
    *("MPLCONFIGDIR", "PYTHONPYCACHEPREFIX"),
)
"""Variables that name folders in which libraries keep what they can make again."""
_CACHED = ("torchinductor_", "pymp-", f"ray{os.sep}", "joblib_", "matplotlib-", "dask", "wandb")
"""How names of temporary files begin that libraries share with other programs."""


def libraries() -> tuple[str, ...]:
    """Return the folders of Python and its packages, and the system's."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent)}
    return (*(f"{one.rstrip(os.sep)}{os.sep}" for one in found), *_SYSTEM)


def foreign() -> tuple[str, ...]:
    """Return the beginnings of paths whose files a run neither keeps nor sets back.

    They are shared with other programs; a replay uses them as they are. Hidden folders of the
    user's home hold settings and caches.
    """
    named = {os.environ[name] for name in _CACHES if os.environ.get(name)}
    home = os.path.expanduser("~")  # noqa: PTH111 - a path of text, for comparisons of text
    hidden = (f"{home.rstrip(os.sep)}{os.sep}.",) if home.strip(os.sep) else ()
    folders = [f"{os.path.abspath(one)}{os.sep}" for one in sorted(named)]  # noqa: PTH100
    shared = [f"{folder}{name}" for folder in temporary() for name in _CACHED]
    return (*libraries(), *folders, *hidden, *shared)


def temporary() -> tuple[str, ...]:
    """Return the folders of temporary files."""
    named = [os.environ[name] for name in _TEMPORARY if os.environ.get(name)]
    found = named or ["/tmp", "/var/tmp"]  # noqa: S108 - not to write there
    return tuple(f"{os.path.abspath(one)}{os.sep}" for one in found)  # noqa: PTH100
