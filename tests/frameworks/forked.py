"""Trainings in forked children, so that a kill is a kill and imports are paid once."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL
PAUSED = 85


def run(train: Callable[..., Any], folder: Path, **given: Any) -> int:
    """Run `train` in a child inside `folder`; returns its exit code, negative for a signal."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.touch()
    imported, report = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: none compute
        pid = os.fork()
    if pid:
        os.close(report)
        with os.fdopen(imported) as names:
            _import(names.read().split())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    loaded = set(sys.modules)
    try:
        os.chdir(folder)
        os.environ["REARVIEW_ROOT"] = str(folder)
        sys.argv = [str(script)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(folder, **given)
        os.write(report, " ".join(sys.modules.keys() - loaded).encode())
        code = 0
    except SystemExit as exc:
        code = int(exc.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _import(names: list[str]) -> None:
    """Import what a child had to import, so that the next one has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(names):
            with contextlib.suppress(Exception):  # not every name can be imported by itself
                importlib.import_module(name)


def kill(number: int = signal.SIGKILL) -> None:
    """End this process as a power cut would, or ask it to end as a batch system does."""
    os.kill(os.getpid(), number)


def run_with_random_kills(train: Callable[..., Any], folder: Path, seed: int, **given: Any) -> int:
    """Run `train` again and again, ended at random steps by kills and polite requests, to its end.

    Returns how often it was ended.
    """
    chance = random.Random(seed)
    for count in range(30):
        how = chance.choice([signal.SIGKILL, signal.SIGTERM])
        code = run(train, folder, until=chance.randrange(2, 8), how=how, **given)
        if code == 0:
            return count
        assert code in {KILLED, PAUSED}, code
    assert run(train, folder, **given) == 0
    return 30


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two sets of weights are equal bit for bit."""
    import numpy as np

    return one.keys() == other.keys() and all(
        np.asarray(one[k]).tobytes() == np.asarray(other[k]).tobytes() for k in one
    )
