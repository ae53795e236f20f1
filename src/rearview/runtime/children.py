"""Processes that a replay starts: they run in its scratch tree, and what they log is the replay's."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import msgspec

from rearview.runtime.entropy import after_import
from rearview.runtime.view import Use, View

VARIABLE = "REARVIEW_REPLAY"
"""Tells the children of a replay whose they are."""
_PATHS = ("dir", "orig_dir", "init_main_from_path")


class Replaying(msgspec.Struct, frozen=True):
    """The replay that a process belongs to."""

    root: str
    run: str
    replay: str
    names: tuple[str, ...]
    """What it is to log; the rest was logged before."""


def parent() -> Replaying | None:
    """Return the replay that started this process, if one did."""
    told = os.environ.get(VARIABLE)
    return msgspec.json.decode(told, type=Replaying) if told else None


def install(replaying: Replaying, view: View) -> None:
    """Let processes started from now on belong to the replay."""
    os.environ[VARIABLE] = msgspec.json.encode(replaying).decode()
    after_import("multiprocessing.spawn", functools.partial(_redirect, view=view))


def _redirect(spawn: ModuleType, *, view: View) -> None:
    real = spawn.get_preparation_data

    @functools.wraps(real)
    def prepared(name: str) -> dict[str, Any]:
        data: dict[str, Any] = real(name)
        for key in _PATHS:
            if data.get(key):
                data[key] = view.real(data[key], Use.RUN)
        if "sys_path" in data:
            data["sys_path"] = [view.real(path) for path in data["sys_path"]]
        return data

    vars(spawn)["get_preparation_data"] = prepared
