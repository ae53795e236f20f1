"""The proxy of a logger that `rearview.background` returns: calls return at once, and the logger process makes them.

A thread in place of the process would not help: drawing histograms and encoding images hold the interpreter lock.
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
    """Return a proxy for a logger whose calls return at once; another process makes the calls.

    `writer` is a class or function that makes the logger in the other process, followed by its arguments:
    `background(SummaryWriter, "logs")`. `writer` may also be an existing logger, if Rearview knows for certain how
    to make a second one like it. Calls keep their order. `flush()`, `close()` and the end of the program wait until
    all calls were made. If a call raises an exception in the other process, a later call raises it here.

    Two options: `background_memory` is the number of bytes that waiting calls may take (a call waits while there
    is no room); `background_start` is "spawn" for a new interpreter, or "fork" for a copy of this process with the
    logger as it is.
    """
    memory = kwargs.pop("background_memory", None)
    start = kwargs.pop("background_start", "spawn")
    if start not in STARTS:
        raise UsageError(
            f"background_start is {start!r}. It may be 'spawn' or 'fork'.", slug="background-start"
        )
    memory_bound = _settings().background_memory if memory is None else int(memory)
    replay = _is_replay()
    recipe = recipe_of(writer, args, kwargs, forks=start == "fork" or replay)
    channel = CallChannel(recipe, memory_bound)
    if replay:
        channel.state = REPLAY
    else:
        channel.start(start)
    return _make_proxy(channel, ())


def _settings() -> Settings:
    session = _session()
    return Settings.read() if session is None else session.settings


def _session() -> Any:
    sessions = sys.modules.get("rearview.runtime.base_session")  # not loaded if nothing is recorded
    return None if sessions is None else sessions.current_session()


def _is_replay() -> bool:
    """Return True if this process is a replay or a child process of one, in which loggers write nothing."""
    session = _session()
    if session is not None and session.view is not None:
        return True
    return b"REARVIEW_REPLAY" in getattr(
        os.environ, "_data", {}
    )  # `os.environ` itself would record the variable as an input of the program


class Background:
    """A proxy of a logger in the logger process. Calls of its methods return None at once.

    Reading an attribute, and calling a method whose name begins with `get_`, wait for the logger process and return
    its answer.
    """

    __slots__ = ("__weakref__", "_rearview_root")
    _rearview_channel: CallChannel
    _rearview_attribute_path: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        cls, attribute_path = type(self), self._rearview_attribute_path
        channel = cls._rearview_channel
        if _is_method(channel, attribute_path, name):
            return self._add_method(name)
        kind, value = channel.ask("read", attribute_path, name)
        if kind == "method":
            return self._add_method(name)
        if kind == "object":
            root = self if not attribute_path else self._rearview_root
            return _make_proxy(channel, (*attribute_path, name), root)
        return value

    def _add_method(self, name: str) -> Any:
        cls, attribute_path = type(self), self._rearview_attribute_path
        channel = cls._rearview_channel
        if name.startswith("get_"):

            def method(_self: Any, *args: Any, **kwargs: Any) -> Any:
                return channel.ask("call", attribute_path, name, args, **kwargs)[1]
        else:
            method = channel.method(attribute_path, name)
        type.__setattr__(cls, name, method)
        return types.MethodType(method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_rearview"):
            object.__setattr__(self, name, value)
        else:
            self._rearview_channel.send(SET, (self._rearview_attribute_path, name, value), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._add_method("__setitem__")(key, value)

    def __getitem__(self, key: Any) -> Any:
        return self._rearview_channel.ask(
            "call", self._rearview_attribute_path, "__getitem__", (key,)
        )[1]

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rearview_channel.ask("items", self._rearview_attribute_path, "")[1])

    def __contains__(self, item: Any) -> bool:
        return item in list(iter(self))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the logger itself, without waiting for the call."""
        channel = self._rearview_channel
        channel.send(channel.number_of(self._rearview_attribute_path, "__call__"), args, kwargs)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self._rearview_channel.close()

    def __dir__(self) -> list[str]:
        recipe = self._rearview_channel.recipe
        return ["close", "flush", *(dir(recipe.type) if recipe.type is not None else ())]

    def __repr__(self) -> str:
        name = ".".join((self._rearview_channel.recipe.name, *self._rearview_attribute_path))
        return f"<background {name}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to this process and cannot be pickled. Make another writer in the "
            "other process."
        )


def _is_method(channel: CallChannel, attribute_path: tuple[str, ...], name: str) -> bool:
    """Return True if the class of the logger is known here and has the method `name`.

    Otherwise the logger process has to be asked.
    """
    if attribute_path or channel.recipe.type is None:
        return False
    member = inspect.getattr_static(channel.recipe.type, name, None)
    return isinstance(member, (types.FunctionType, staticmethod, classmethod))


def _flush(self: Background) -> None:
    """Wait until all calls were made and the logger has flushed its output."""
    self._rearview_channel.flush()


def _closing(name: str) -> Callable[[Background], None]:
    def close(self: Background) -> None:
        self._rearview_channel.close(name)

    close.__name__ = name
    return close


def _make_proxy(channel: CallChannel, attribute_path: tuple[str, ...], root: Any = None) -> Any:
    """Return a proxy of the logger, or of the object that `attribute_path` reaches from the logger.

    Each proxy has a class of its own, with methods as attributes, so calls are as fast as ordinary calls. `root` is the
    proxy of the logger itself; a reference to it keeps the logger open.
    """
    names: dict[str, Any] = {
        "__slots__": (),
        "__module__": __name__,
        "_rearview_channel": channel,
        "_rearview_attribute_path": attribute_path,
    }
    if not attribute_path:
        names |= {"flush": _flush, "close": _closing("")}
        names |= {name: _closing(name) for name in channel.recipe.closes}
    proxy = type("Background", (Background,), names)()
    proxy._rearview_root = root  # noqa: SLF001 - keeps the logger open
    if not attribute_path:
        weakref.finalize(proxy, channel.close, wait=False).atexit = False
    return proxy


def _finish_all() -> None:
    """At the end of the program, wait until every logger process has made all calls; warn about errors."""
    for channel in list(CHANNELS):
        if channel.state not in {OPEN, PENDING}:
            continue
        try:
            channel.close()
        except KeyboardInterrupt:
            return  # the logger processes make all calls even if the program ends now
        except Exception as exc:
            notes = "\n".join(getattr(exc, "__notes__", ()))
            warnings.warn(
                f"A background writer failed as the program ended: {type(exc).__name__}: {exc}\n"
                f"{notes} (docs/errors.md#background-writer)",
                RuntimeWarning,
                stacklevel=1,
            )


def _disconnect_all() -> None:
    for channel in list(CHANNELS):
        channel.disconnect_in_child()


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_disconnect_all)
