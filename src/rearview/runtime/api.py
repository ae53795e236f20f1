"""The functions that a script may call: log, arg, params, loop, block, checkpointing.

Under `rearview run` these use the session that was started with the program; in a script started
with plain `python` the first call starts one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from rearview.errors import StoreError, UsageError
from rearview.model.wording import printable
from rearview.runtime.base_session import NamedLoop, Session, current_session, use_session

T = TypeVar("T")
V = TypeVar("V", bound="int | float | str | bool | None")


def current() -> Session:
    """Return this process's session, starting one if the script runs under plain `python`."""
    session = current_session()
    if session is None:
        # imported here, so that `import rearview` does not load the code that records
        from rearview.runtime.start_recording import attach, go_unrecorded

        try:
            session = attach()
        except (StoreError, OSError) as exc:
            session = go_unrecorded(Path.cwd(), {}, exc)
        use_session(session)
    return session


@overload
def log(name: str, value: T) -> T: ...
@overload
def log(name: Mapping[str, Any]) -> None: ...
def log(name: str | Mapping[str, Any], value: Any = None) -> Any:
    """Record `value` under `name` at the current point and return it.

    If `name` is a mapping (name -> value), each of its items is recorded and None is returned. Scalars and strings
    are stored in the record itself; arrays, tensors, images and histograms as objects. After the call, even a kill
    does not lose the record.
    """
    session = current()
    if type(name) is str:
        if name in _USABLE or _is_name(name):
            session.log({name: value}, session.place(sys._getframe(1)))
        return value
    if not isinstance(name, Mapping):
        _refuse(name, "a name is a string")
        return value
    items = {key if type(key) is str else _text(key): item for key, item in name.items()}
    usable = {key: item for key, item in items.items() if key in _USABLE or _is_name(key)}
    session.log(usable, session.place(sys._getframe(1)))
    return None


LONGEST = 1000
"""Maximum number of characters in a name that `log` accepts."""
_USABLE: set[str] = set()
"""Names that `log` has checked and accepted."""
_REFUSED: set[str] = set()
"""Names that `log` has refused with a warning, as the warning shows them."""


def _is_name(name: str) -> bool:
    """Return True if `log` accepts `name`; otherwise warn, once for each name, and return False."""
    why = ""
    if not name.strip():
        why = "it is empty"
    elif name.startswith("$"):
        why = "names that begin with $ are reserved for Rearview"
    elif "\0" in name or not _is_encodable(name):
        why = "it holds characters that cannot be stored"
    elif len(name) > LONGEST:
        why = f"it has {len(name)} characters, more than {LONGEST}"
    if why:
        _refuse(name, why)
        return False
    if len(_USABLE) < 10_000:
        _USABLE.add(name)
    return True


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(key: object) -> str:
    """Return a key of a logged mapping as text, or an empty text if `str(key)` raises."""
    try:
        return str(key)
    except Exception:
        return ""


def _refuse(name: object, why: str) -> None:
    try:
        shown = printable(repr(name), line=True)
    except Exception:
        shown = f"<{type(name).__name__}>"
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    if shown in _REFUSED or len(_REFUSED) >= _MOST_REFUSED:
        return
    _REFUSED.add(shown)
    problem = UsageError(
        f"rearview.log was given {shown} as a name, and its values are not recorded: {why}. Write "
        'log("loss", loss), or log({"loss": loss, "acc": acc}).',
        slug="log-name",
    )
    # a warning, not an error: a bad name must not end the training
    warnings.warn(f"{problem} (docs/errors.md#{problem.slug})", RuntimeWarning, stacklevel=4)


_SHOWN, _MOST_REFUSED = 60, 20
"""Maximum number of characters of a refused name that a warning shows; maximum number of these warnings."""


def arg(name: str, default: V) -> V:
    """Return the value of the hyper-parameter `name` from the command line, or `default` if it is not given there.

    `--lr 0.1`, `--lr=0.1` and `lr=0.1` on the script's command line all set `lr`;
    `rearview run --arg lr=0.1 train.py` also does. The value is converted to the type of `default` and recorded.
    """
    session = current()
    text = session.arg_values.get(name)
    if text is None:
        text = text_on_command_line(sys.argv[1:], name)
    value = default if text is None else convert_text(name, text, default)
    session.record_arguments({name: value})
    return value


def params(values: Mapping[str, Any]) -> None:
    """Record `values` (name -> value) as hyper-parameters of the run, like the values that `arg` returns.

    Each hyper-parameter becomes a column that conditions can use. A later value of a name replaces an earlier one.
    """
    if values:
        current().record_arguments({str(name): value for name, value in values.items()})


def text_on_command_line(argv: list[str], name: str) -> str | None:
    """Return the value that the command line `argv` gives for the option `name`, or None if it gives none.

    >>> text_on_command_line(["--lr", "0.1", "epochs=3"], "lr"), text_on_command_line(["--lr=1"], "lr")
    ('0.1', '1')
    >>> text_on_command_line([], "lr")
    """
    flags = {f"--{name}", f"--{name.replace('_', '-')}"}
    text_given = None
    for position, word in enumerate(argv):
        key, equals, text = word.partition("=")
        if equals and (key in flags or key == name):
            text_given = text
        elif word in flags and position + 1 < len(argv):
            text_given = argv[position + 1]
    return text_given


def convert_text(name: str, text: str, default: Any) -> Any:
    """Return `text` converted to the type of `default` if that is bool, int, float or str; otherwise return `text`.

    >>> convert_text("lr", "1e-3", 0.1), convert_text("flag", "no", True), convert_text("n", "3", None)
    (0.001, False, '3')
    """
    kind = type(default)
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if kind in (int, float, str):
            return kind(text)
    except (KeyError, ValueError) as exc:
        raise UsageError(
            f"The command line gives {name}={text!r}, but its default {default!r} is a "
            f"{kind.__name__}. Give a value of that type.",
            slug="arg-type",
        ) from exc
    return text


def loop(name: str, iterable: Iterable[T]) -> Iterable[T]:
    """Return an iterable with the items of `iterable`; a `for` statement over it is a loop called `name`.

    Each iteration of this loop is a point in the run and can be replayed.
    """
    explicit: Iterable[T] = NamedLoop(current(), name, iterable)
    return explicit


def block(name: str) -> Iterable[None]:
    """Return a loop of one iteration, called `name`: `for _ in rearview.block("prepare"): …`.

    Recording runs the body and saves the changes that it made, if saving is cheaper than running the body again. A
    replay or resumed run skips the body and restores these changes, unless it must log a value inside the body.
    """
    return loop(name, (None,))


@contextmanager
def checkpointing(**objects: Any) -> Iterator[None]:
    """Let Rearview save checkpoints of the loops inside the `with` block; `objects` are part of the saved state.

    Recording runs the loops and saves the changes that they make. A replay skips each loop that logs none of the
    requested values, and restores the changes that it made.
    """
    session = current()
    outer_objects = dict(session.declared)
    session.declared.update(objects)
    session.checkpointing += 1
    try:
        yield
    finally:
        session.checkpointing -= 1
        session.declared = outer_objects
