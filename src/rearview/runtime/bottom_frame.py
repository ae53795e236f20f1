"""Run the program so that its stack ends where it would end under plain `python`.

`inspect.stack()[-1]`, `warnings.warn(..., stacklevel=9)`, `traceback.print_stack()` and
`sys._getframe(n)` look at everything below the program, and the recursion limit counts it. Python has no
call to hide frames, so on CPython 3.11 the one link from the program's first frame to ours is cut in the
interpreter's own structure. Nothing else of 3.11 follows that link: when a frame that C code entered
returns, the interpreter takes the frame below from the C stack. Before anything is written, the link must
hold the address of the frame that is known to lie below; otherwise, and on every other Python, where the
interpreter itself uses the link, our frames stay visible.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME = 3
"""Words before the pointer to the interpreter's frame in a frame object."""
_BELOW = 6
"""Words before the pointer to the frame below in an interpreter's frame."""
_OBJECT = 5
"""Words before the pointer to the frame object in an interpreter's frame."""
_COUNTERS = range(24, 56, 4)
"""Bytes of a thread's state among which the calls that are left and their limit stand."""
_OWN_CALLS = 4
"""Calls that count against the limit while `_allow_all_calls` runs and end before the program goes on."""


def run_at_bottom(call: Callable[..., Any], *args: Any) -> None:
    """Call `call(*args)`; the first Python frame that it makes has none below it."""
    known, before = _supported(), sys.getprofile()
    if not known or before is not None:
        call(*args)
        return
    own = sys._getframe()

    def first(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            sys.setprofile(None)
            if frame.f_back is own:
                _cut(frame, own)

    sys.setprofile(first)
    try:
        call(*args)
    finally:
        if sys.getprofile() is first:
            sys.setprofile(None)


def _supported() -> bool:
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] == (3, 11)
        and not sysconfig.get_config_var("Py_DEBUG")  # it asserts that the link is there
        and not hasattr(sys, "getobjects")  # Py_TRACE_REFS makes objects larger
    )


def _cut(frame: FrameType, below: FrameType) -> None:
    inner = _inner(frame)
    if _word(inner, _OBJECT) == id(frame) and _word(inner, _BELOW) == _inner(below):
        ctypes.c_void_p.from_address(inner + _BELOW * _WORD).value = None
        _allow_all_calls()


def _allow_all_calls() -> None:
    """Give the program as many nested calls as it has under plain `python`."""
    limit = sys.getrecursionlimit()
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    address = state()
    for offset in _COUNTERS:
        left = ctypes.c_int.from_address(address + offset)
        if ctypes.c_int.from_address(address + offset + 4).value == limit > left.value > 0:
            left.value = limit - _OWN_CALLS
            return


def _inner(frame: FrameType) -> int:
    return _word(id(frame), _FRAME)


def _word(address: int, position: int) -> int:
    return ctypes.c_void_p.from_address(address + position * _WORD).value or 0
