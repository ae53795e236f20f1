"""`rearview.background`: a logger whose calls return at once and are made in another process.

The arguments of a call are copied into shared memory; the process that owns the logger makes the call. A
thread would not help: drawing histograms and encoding images hold the interpreter lock.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from rearview.background_logger.call_channel import CHANNELS, OPEN, PENDING, REPLAY, CallChannel
from rearview.background_logger.logger_factories import recipe_of
from rearview.background_logger.logger_process import SET
from rearview.config import Settings
from rearview.errors import UsageError

STARTS = ("spawn", "fork")


def background(writer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a stand-in for a logger whose calls return at once; another process makes them.

    `writer` is a class or function that makes the logger in that process, followed by its arguments:
    `background(SummaryWriter, "logs")`. It may also be an existing logger, if Rearview knows for
    certain how to make it again. Calls keep their order. `flush()`, `close()` and the end of the program wait until all calls
    were made. An exception that a call of the logger raises is raised by a later call.

    Two options: `background_memory`, the bytes that waiting calls may take (a call waits while there
    is no room), and `background_start`, "spawn" for a new interpreter or "fork" for a copy of this
    process with the logger as it is.
    """
    memory = kwargs.pop("background_memory", None)
    start = kwargs.pop("background_start", "spawn")
    if start not in STARTS:
        raise UsageError(
            f"background_start is {start!r}. It may be 'spawn' or 'fork'.", slug="background-start"
        )
    bound = _settings().background_memory if memory is None else int(memory)
    replay = _is_replay()
    recipe = recipe_of(writer, args, kwargs, forks=start == "fork" or replay)
    channel = CallChannel(recipe, bound)
    if replay:
        channel.state = REPLAY
    else:
        channel.start(start)
    return _stand_in(channel, ())


def _settings() -> Settings:
    session = _session()
    return Settings.read() if session is None else session.settings


def _session() -> Any:
    sessions = sys.modules.get("rearview.runtime.session")  # not loaded: nothing is recorded
    return None if sessions is None else sessions.current_session()


def _is_replay() -> bool:
    """Return True in a replay and in its child processes: loggers write nothing there."""
    session = _session()
    if session is not None and session.view is not None:
        return True
    return b"REARVIEW_REPLAY" in getattr(os.environ, "_data", {})  # not an input of the run


class Background:
    """Represents a logger in another process. Methods return None at once.

    Attributes, and methods whose name begins with `get_`, wait for the writer process and return its answer.
    """

    __slots__ = ("__weakref__", "_rearview_root")
    _rearview_channel: CallChannel
    _rearview_path: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        cls, path = type(self), self._rearview_path
        channel = cls._rearview_channel
        if _is_method(channel, path, name):
            return self._add_method(name)
        kind, value = channel.ask("read", path, name)
        if kind == "method":
            return self._add_method(name)
        if kind == "object":
            root = self if not path else self._rearview_root
            return _stand_in(channel, (*path, name), root)
        return value

    def _add_method(self, name: str) -> Any:
        cls, path = type(self), self._rearview_path
        channel = cls._rearview_channel
        if name.startswith("get_"):

            def method(_self: Any, *args: Any, **kwargs: Any) -> Any:
                return channel.ask("call", path, name, args, **kwargs)[1]
        else:
            method = channel.method(path, name)
        type.__setattr__(cls, name, method)
        return types.MethodType(method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_rearview"):
            object.__setattr__(self, name, value)
        else:
            self._rearview_channel.send(SET, (self._rearview_path, name, value), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._add_method("__setitem__")(key, value)

    def __getitem__(self, key: Any) -> Any:
        return self._rearview_channel.ask("call", self._rearview_path, "__getitem__", (key,))[1]

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rearview_channel.ask("items", self._rearview_path, "")[1])

    def __contains__(self, item: Any) -> bool:
        return item in list(iter(self))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the writer itself."""
        channel = self._rearview_channel
        channel.send(channel.number_of(self._rearview_path, "__call__"), args, kwargs)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self._rearview_channel.close()

    def __dir__(self) -> list[str]:
        recipe = self._rearview_channel.recipe
        return ["close", "flush", *(dir(recipe.type) if recipe.type is not None else ())]

    def __repr__(self) -> str:
        name = ".".join((self._rearview_channel.recipe.name, *self._rearview_path))
        return f"<background {name}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to this process and cannot be pickled. Make another writer in the "
            "other process."
        )


def _is_method(channel: CallChannel, path: tuple[str, ...], name: str) -> bool:
    """Return True if the writer's class has the method; the writer process is not asked."""
    if path or channel.recipe.type is None:
        return False
    member = inspect.getattr_static(channel.recipe.type, name, None)
    return isinstance(member, (types.FunctionType, staticmethod, classmethod))


def _flush(self: Background) -> None:
    """Wait until all calls were made and the writer has flushed."""
    self._rearview_channel.flush()


def _closing(name: str) -> Callable[[Background], None]:
    def close(self: Background) -> None:
        self._rearview_channel.close(name)

    close.__name__ = name
    return close


def _stand_in(channel: CallChannel, path: tuple[str, ...], root: Any = None) -> Any:
    """Return an object of a new class, so that its methods are found as fast as ordinary ones."""
    names: dict[str, Any] = {
        "__slots__": (),
        "__module__": __name__,
        "_rearview_channel": channel,
        "_rearview_path": path,
    }
    if not path:
        names |= {"flush": _flush, "close": _closing("")}
        names |= {name: _closing(name) for name in channel.recipe.closes}
    stand_in = type("Background", (Background,), names)()
    stand_in._rearview_root = root  # noqa: SLF001 - keeps the writer open
    if not path:
        weakref.finalize(stand_in, channel.close, wait=False).atexit = False
    return stand_in


def _finish_all() -> None:
    """Wait at the end of the program until every writer has made its calls."""
    for channel in list(CHANNELS):
        if channel.state not in {OPEN, PENDING}:
            continue
        try:
            channel.close()
        except KeyboardInterrupt:
            return  # the writer processes make their calls even if the program is killed
        except Exception as exc:
            notes = "\n".join(getattr(exc, "__notes__", ()))
            warnings.warn(
                f"A background writer failed as the program ended: {type(exc).__name__}: {exc}\n"
                f"{notes} (docs/errors.md#background-writer)",
                RuntimeWarning,
                stacklevel=1,
            )


def _forget_all() -> None:
    for channel in list(CHANNELS):
        channel.forked()


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_forget_all)
