"""Run the user's script or module as `python` would, with a session around it.

Started as `python -P -m rearview.runtime.launch`; what to do stands in one environment variable,
so that the script's own command line stays its own.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from rearview.errors import RearviewError, UsageError
from rearview.model.segment import VARIABLE, Control

if TYPE_CHECKING:
    from rearview.runtime.hooks import Shared

_HERE = str(Path(__file__).resolve().parent.parent) + os.sep


def main() -> None:
    """Do what the control variable says; ends the process."""
    control = msgspec.json.decode(os.environ.pop(VARIABLE), type=Control)
    _give_back(control)
    shared = None
    if control.nursery is not None:
        from rearview.runtime.nursery import attend

        control, shared = attend(control)
        _give_back(control)
    try:
        session = _begin(control, shared)
    except RearviewError as exc:
        refuse(exc)
        raise SystemExit(2) from None
    guard_exit(session)
    sys.exit(run(control, session))


def _give_back(control: Control) -> None:
    for name in control.lent:
        os.environ.pop(name, None)  # it has done its work, and children are none of ours


def _begin(control: Control, shared: Shared | None) -> Any:
    if control.segment is not None:
        from rearview.runtime.replaying import replay

        return replay(control, shared)
    from rearview.runtime.begin import begin

    return begin(control)


def refuse(exc: RearviewError) -> None:
    """Say on the error stream why nothing is run, and where that is explained."""
    sys.stderr.write(f"rearview: {exc} (docs/errors.md#{exc.slug})\n")


def guard_exit(session: Any) -> None:
    """Let every way out of the process but a kill bring the session to its end."""
    atexit.register(lambda: session.finish(None))
    real = os._exit

    def leave(status: int) -> None:
        if os.getpid() == session.pid:
            session.finish(status)
        real(status)

    os._exit = leave  # type: ignore[assignment]


def run(control: Control, session: Any) -> int:
    """Execute the user's program and return its exit code."""
    try:
        try:
            code, module = prepare(control, session)
        except UsageError as exc:
            session.code = 2
            refuse(exc)
            return 2
        exec(code, vars(module))  # noqa: S102 - this is what we are for
    except SystemExit as exc:
        session.code = exit_code(exc)
        return _leave(exc)
    except KeyboardInterrupt as exc:
        session.code = 130
        show(exc)
        session.finish(130)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException as exc:
        session.code = 1
        show(exc)
        return 1
    session.code = 0
    return 0


def _leave(exc: SystemExit) -> int:
    if exc.code is not None and not isinstance(exc.code, int):
        sys.stderr.write(f"{exc.code}\n")
    return exit_code(exc)


def exit_code(exc: SystemExit) -> int:
    """Return the exit code that `exc` stands for.

    >>> exit_code(SystemExit(None)), exit_code(SystemExit("bad")), exit_code(SystemExit(3))
    (0, 1, 3)
    """
    if exc.code is None:
        return 0
    return exc.code if isinstance(exc.code, int) else 1


def prepare(control: Control, session: Any) -> tuple[CodeType, ModuleType]:
    """Return the program's code and a fresh `__main__`, with argv and path as under `python`."""
    from rearview.runtime.names import furnish
    from rearview.runtime.view import Use

    known = sys.modules["__main__"]
    # one without a file is there for us, and libraries know it already
    module = ModuleType("__main__") if hasattr(known, "__file__") else known
    if control.module:
        sys.path.insert(0, session.real(os.getcwd()))  # noqa: PTH109 - patched in a replay
        spec = _find_main(control.target)
        sys.argv = [str(spec.origin), *control.args]
        module.__spec__ = spec
        module.__package__ = spec.parent
        module.__loader__ = spec.loader
        file = str(spec.origin)
        module.__dict__["__cached__"] = spec.cached
        if not session.belongs(file):
            raise UsageError(
                f"Module {control.target} lies at {file}, outside the project {session.root}, of "
                "which only files below it are watched. Start it in a folder above its source.",
                slug="outside-project",
            )
    else:
        file = os.path.abspath(control.target)  # noqa: PTH100 - as Python itself spells it
        sys.path.insert(0, session.real(os.path.dirname(os.path.realpath(file))))  # noqa: PTH120
        sys.argv = [control.target, *control.args]
        module.__spec__ = None
        module.__package__ = None
        module.__loader__ = SourceFileLoader("__main__", file)
        module.__dict__["__cached__"] = None
    module.__file__ = file
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    furnish(vars(module))
    sys.modules["__main__"] = module
    data = Path(session.real(file, Use.RUN)).read_bytes()
    return session.compiler.compile(data, file), module


def _find_main(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {name}")
    return spec


def show(exc: BaseException) -> None:
    """Print a traceback as plain Python would: the user's frames only."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = strip(one.__traceback__)
        todo += [one.__cause__, one.__context__]
        todo += getattr(one, "exceptions", ())
    sys.excepthook(type(exc), exc, exc.__traceback__)


def strip(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that are ours."""
    kept: Sequence[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen runpy")):
            kept = [*kept, trace]
        trace = trace.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=False):
        one.tb_next = following
    return kept[0] if kept else None


if __name__ == "__main__":
    main()
