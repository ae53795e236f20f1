"""Keep the program's own trace and profile functions from seeing our work.

What they note is part of the program's state. Were they called while that state is walked, the walk
would make what it walks longer, without an end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")

_set_trace, _set_profile = sys.settrace, sys.setprofile  # debuggers put others in their place


def unobserved(function: Callable[_Parameters, _Answer]) -> Callable[_Parameters, _Answer]:
    """Suspend what `sys.settrace` and `sys.setprofile` were given while `function` runs."""

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Answer:
        trace, profile = sys.gettrace(), sys.getprofile()
        if not callable(profile):  # cProfile's: it writes down nothing that is walked
            profile = None
        if trace is None and profile is None:
            return function(*args, **kwargs)
        if profile is not None:
            _set_profile(None)
        if trace is not None:
            _set_trace(None)
        try:
            return function(*args, **kwargs)
        finally:
            if trace is not None:
                _set_trace(trace)
            if profile is not None:
                _set_profile(profile)

    return call
