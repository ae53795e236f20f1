"""Run the user's script or module as `python` would, with a session around it.

`bootstrap.py` calls `main`. One environment variable holds the `Control` value that says what to run, so that the
command line belongs to the script alone.
"""

from __future__ import annotations

import atexit
import functools
import linecache
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from rearview.errors import RearviewError, StoreError, UsageError
from rearview.model.process_messages import VARIABLE, Control
from rearview.model.run import is_notebook
from rearview.model.wording import printable
from rearview.runtime.importer import offer_plain_functions, register_module
from rearview.runtime.program_frames import run_at_bottom
from rearview.state.code_lookup import PatchedBuiltin

if TYPE_CHECKING:
    from rearview.runtime.replay.start_replay import SharedStart

THREAD_PREFIX = "rearview-"
"""Prefix of the name of each of Rearview's background threads."""
_INTERRUPTED = 130
_KILLED = object()
"""`run` returns this in place of an exit code after a Ctrl-C: Python then ends the process with SIGINT."""
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")[
    : 4 if sys.version_info >= (3, 12) else 3
]
"""Names in `sys` that hold the exception that ended the program."""
_HERE = str(Path(__file__).resolve().parent.parent) + os.sep


def main(plain: frozenset[str] | None = None) -> None:
    """Run the program that the environment variable `VARIABLE` describes, then end the process.

    `plain` are the names of the modules that Python had loaded before Rearview; None if unknown.
    """
    control = msgspec.json.decode(os.environ.pop(VARIABLE), type=Control)
    _remove_lent_variables(control)
    shared = None
    if control.fork_server is not None:
        import rearview.runtime.replay.setup_process  # noqa: F401 - must precede the patches of files and clock
        from rearview.runtime.replay.fork_server import run_fork_server

        control, shared = run_fork_server(control)
        _remove_lent_variables(control)
    kernel = None
    try:
        if not control.module and is_notebook(control.target):
            from rearview.runtime.cells.notebook_kernel import make_kernel

            kernel = make_kernel(control)
        session = _begin(control, shared)
    except RearviewError as exc:
        print_refusal(exc)
        raise SystemExit(2) from None
    finish_at_exit(session)
    hide_background_threads()
    if sys.version_info >= (3, 12):
        for name in ("fork", "forkpty"):
            _warn_of_own_threads_only(name)
    if kernel is not None:
        _leave(control, _run_notebook(control, session, kernel))
    program_runner: Callable[..., Any] = run_at_bottom
    if shared is not None and shared.setup is not None:
        from rearview.runtime.replay.setup_process import SharedSetup, watch_program

        watch_program()
        program_runner = SharedSetup(shared.setup, shared.channel, shared, session).run
    code = run(control, session, plain, program_runner)
    if code is not _KILLED:
        _leave(control, code)


def _leave(control: Control, code: Any) -> NoReturn:
    """End the process as `sys.exit(code)` does.

    In a replay, only wait for threads and call exit handlers, which may contain probes. `sys.exit` would also clear
    all modules, which takes half a second for a large library and has no effect on the replay.
    """
    if control.segment is None:
        sys.exit(code)
    from rearview.checkpointer.signals import leave_at_once

    status = _print_exit_message(SystemExit(code))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    leave_at_once(status)


def _remove_lent_variables(control: Control) -> None:
    for name in control.lent:
        os.environ.pop(name, None)  # child processes of the program must not inherit them


def _begin(control: Control, shared: SharedStart | None) -> Any:
    if control.segment is not None:
        from rearview.runtime.replay.start_replay import replay

        return replay(control, shared)
    from rearview.runtime.start_recording import begin

    try:
        return begin(control)
    except (StoreError, OSError) as exc:
        if control.resume is not None:
            raise
        from rearview.runtime.start_recording import go_unrecorded

        signal.pthread_sigmask(signal.SIG_UNBLOCK, control.signals)
        return go_unrecorded(Path(control.root), control.given, exc)


def print_refusal(exc: RearviewError) -> None:
    """Print `exc`, which says why the program is not run, and the page of the documentation about it."""
    text = f"rearview: {printable(str(exc))} (docs/errors.md#{exc.slug})\n"
    # a notebook kernel has replaced `sys.stderr` and would forward the text: write to the original stream
    real: int | None = getattr(sys.stderr, "_original_stdstream_copy", None)
    if real is not None:
        os.write(real, text.encode())
    else:
        sys.stderr.write(text)


def finish_at_exit(session: Any) -> None:
    """Call `session.finish` when the process ends in any way, except by a kill."""
    from rearview.runtime.sandbox.printed_lines import unwatch_streams

    # `atexit` calls in reverse order: these two after the program's handlers and after `session.finish`
    atexit.register(unwatch_streams)
    atexit.register(offer_plain_functions)
    atexit.register(lambda: session.finish(None))
    real = os._exit

    def leave(status: int) -> None:
        if os.getpid() == session.pid:
            session.finish(status)
        real(status)

    replacement: Any = PatchedBuiltin(leave, real)
    for module in {os, sys.modules[real.__module__]}:
        vars(module)["_exit"] = replacement


def _warn_of_own_threads_only(name: str) -> None:
    """Let `os.fork` or `os.forkpty` (`name`) warn about threads of the program, but not about Rearview's threads.

    Python's own warning about threads would name the line in this file that calls the original function. Python
    shows deprecation warnings only for lines of the program's main file, so Python's own warning is not shown.
    """
    real = getattr(os, name)

    def fork() -> Any:
        result = real()
        child = result[0] if name == "forkpty" else result
        if child and threading.active_count() > 1:
            warnings.warn(
                f"This process (pid={os.getpid()}) is multi-threaded, use of {name}() may lead to "
                "deadlocks in the child.",
                DeprecationWarning,
                stacklevel=2,
            )
        return result

    replacement: Any = PatchedBuiltin(fork, real)
    for module in {os, sys.modules[real.__module__]}:
        vars(module)[name] = replacement


def hide_background_threads() -> None:
    """Patch `threading.enumerate()` and `threading.active_count()` so that they leave out Rearview's threads.

    Some programs wait until only the main thread is left; Rearview's threads would make them wait for ever.
    """
    original = threading.enumerate

    @functools.wraps(original)
    def enumerate() -> list[threading.Thread]:  # noqa: A001 - the name that a program sees
        return [thread for thread in original() if not thread.name.startswith(THREAD_PREFIX)]

    @functools.wraps(threading.active_count)
    def active_count() -> int:
        return len(enumerate())

    threading.enumerate, threading.active_count = enumerate, active_count


def run(
    control: Control,
    session: Any,
    plain: frozenset[str] | None = None,
    program_runner: Callable[..., Any] = run_at_bottom,
) -> Any:
    """Run the user's program; return its exit code, the value that it passed to `sys.exit`, or `_KILLED`.

    `program_runner` is called with a function that runs the program, and the arguments of this function.
    """
    try:
        try:
            program = prepare_program(control, session, plain)
        except UsageError as exc:
            session.code = 2
            print_refusal(exc)
            return 2
        program_runner(*program)
    except SystemExit as exc:
        session.code = exit_code(exc)
        session.note_failure(exc)
        return exc.code  # any object: Python prints it if it is not a number
    except BaseException as exc:
        failure = exc  # printed below: here, `exc` would become the context of an error in the program's hook
    else:
        session.code = 0
        return 0
    session.note_failure(failure)
    interrupted = type(failure) is KeyboardInterrupt
    session.code = print_traceback(failure, _INTERRUPTED if interrupted else 1)
    if interrupted and session.code == _INTERRUPTED:
        _die_interrupted()
        return _KILLED
    del failure  # its traceback refers to this frame: break the reference cycle
    return int(session.code)


def _run_notebook(control: Control, session: Any, kernel: Any) -> int:
    from rearview.runtime.cells.notebook_kernel import run_notebook

    try:
        return run_notebook(control, session, kernel)
    except RearviewError as exc:
        session.code = 2
        print_refusal(exc)
        return 2


def _die_interrupted() -> None:
    """Let the interpreter kill the process with SIGINT at its end, as Python does after a Ctrl-C.

    Python does this after a KeyboardInterrupt in code that Python itself executes (here `raise KeyboardInterrupt`),
    unless `SystemExit` ends the process.
    """
    import ctypes  # imported here: only interrupted programs need it

    hook, last = sys.excepthook, {name: vars(sys)[name] for name in _LAST if name in vars(sys)}
    sys.excepthook = lambda *_: None
    ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")
    sys.excepthook = hook
    vars(sys).update(last)


def _print_exit_message(exc: SystemExit) -> int:
    if exc.code is not None and not isinstance(exc.code, int):
        sys.stderr.write(f"{exc.code}\n")
    return exit_code(exc)


def exit_code(exc: SystemExit) -> int:
    """Return the exit code of a process that `exc` ends.

    >>> exit_code(SystemExit(None)), exit_code(SystemExit("bad")), exit_code(SystemExit(3))
    (0, 1, 3)
    """
    if exc.code is None:
        return 0
    return exc.code if isinstance(exc.code, int) else 1


def prepare_program(
    control: Control, session: Any, plain: frozenset[str] | None = None
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """Create `__main__`, set `sys.argv` and `sys.path` as `python` does; return how to run the program.

    The result is a function and the arguments to call it with.
    """
    from rearview.runtime.sandbox.file_view import PathUse

    main_module = sys.modules["__main__"]
    # keep a `__main__` without a file, which Rearview has created: libraries may refer to it
    module = ModuleType("__main__") if hasattr(main_module, "__file__") else main_module
    for name in ("__file__", "__cached__"):
        vars(module).pop(name, None)
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    register_module(module)
    sys.modules["__main__"] = module
    options = ["-m"] if control.module else []
    sys.orig_argv[1:] = [*sys.orig_argv[1:-1], *options, control.target, *control.args]
    if control.module:
        folder = session.real(os.getcwd())  # noqa: PTH109 - patched in a replay
        _insert_into_path(folder, plain)
        file = _file_of_module(control.target)
        if file is not None and not session.belongs(_path_in_program(session, file)):
            raise UsageError(
                f"Module {control.target} is at {file}, outside the project {session.root}; only files "
                "inside the project are recorded. Start it in a folder above its source.",
                slug="outside-project",
            )
        sys.argv = ["-m", *control.args]
        return runpy._run_module_as_main, control.target  # type: ignore[attr-defined]
    file = control.target
    if not os.path.isabs(file):  # noqa: PTH117
        file = f"{os.getcwd()}{os.sep}{file}"  # noqa: PTH109 - as Python itself spells it
    _insert_into_path(session.real(os.path.dirname(os.path.realpath(file))), plain)  # noqa: PTH120
    sys.argv = [control.target, *control.args]
    module.__spec__ = None
    module.__package__ = None
    module.__loader__ = SourceFileLoader("__main__", file)
    module.__file__ = file
    module.__dict__["__cached__"] = None
    data = Path(session.real(file, PathUse.RUN)).read_bytes()
    try:
        code = session.compiler.compile(data, file)
    except (SyntaxError, ValueError):
        if control.segment is None:
            _run_unrecorded(control, session)
        raise
    return exec, code, vars(module)


def _run_unrecorded(control: Control, session: Any) -> None:
    """Replace this process by plain Python, which reports that the script cannot be compiled; does not return.

    The report of `compile` would differ: Python reads a file differently and reports encoding errors differently.
    """
    from rearview.runtime.start_recording import RUN_VARIABLE

    session.code = 1
    session.finish(1)
    os.environ.pop(RUN_VARIABLE, None)
    command = (sys.executable, control.target, *control.args)
    os.execve(command[0], command, os.environ)  # noqa: S606 - no shell


def _insert_into_path(folder: str, plain: frozenset[str] | None) -> None:
    if sys.flags.safe_path:
        return
    sys.path.insert(0, folder)
    if plain is not None:
        _unload_shadowed(folder, plain)


def _unload_shadowed(folder: str, plain: frozenset[str]) -> None:
    """Unload the modules that a file in `folder` shadows, such as `secrets` for a `secrets.py`.

    Modules in `plain` were loaded before Rearview and stay. Rearview keeps its references to the unloaded modules;
    the program imports its own files, as under plain Python.
    """
    loaded = {name.partition(".")[0] for name in sys.modules.keys() - plain} - {
        "__main__",
        "rearview",
    }
    for name in sorted(loaded):
        spec = PathFinder.find_spec(name, [folder])
        if spec is not None and spec.origin is not None:
            for module_name in [
                loaded_name
                for loaded_name in sys.modules
                if f"{loaded_name}.".startswith(f"{name}.")
            ]:
                del sys.modules[module_name]


def _path_in_program(session: Any, file: str) -> str:
    return file if session.view is None else str(session.view.program_path(file))


def _file_of_module(name: str) -> str | None:
    """Return the path of the file that `python -m name` would run, or None if there is none; import nothing."""
    path: Sequence[str] | None = None
    spec = None
    prefix = ""
    for part in [*name.split("."), "__main__"]:
        prefix = f"{prefix}.{part}".lstrip(".")
        part_spec = PathFinder.find_spec(prefix, path)
        if part_spec is None:
            break
        spec, path = part_spec, part_spec.submodule_search_locations
        if path is None:
            break
    return None if spec is None else spec.origin


def print_traceback(exc: BaseException, code: int = 1) -> int:
    """Print the traceback of `exc` as plain Python would, without Rearview's frames; return the exit code.

    The exit code is `code`, unless the program's own `sys.excepthook` exits with another one.
    """
    _strip_all(exc)
    exception_info = (type(exc), exc, exc.__traceback__)
    vars(sys).update(zip(_LAST, (*exception_info, exc), strict=False))
    hook = sys.excepthook
    if hook is sys.__excepthook__ and _runs_recorded_text(exc.__traceback__):
        # `print_exception` shows the recorded source; Python's hook would read the file in the work tree
        hook = traceback.print_exception
    try:
        hook(*exception_info)
    except SystemExit as exit_request:
        return _print_exit_message(exit_request)
    except BaseException as hook_error:
        _strip_all(hook_error)
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(hook_error), hook_error, hook_error.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(*exception_info)
    return code


def _runs_recorded_text(trace: TracebackType | None) -> bool:
    """Return True if a frame of `trace` runs recorded source instead of a file of the work tree."""
    while trace is not None:
        entry = linecache.cache.get(trace.tb_frame.f_code.co_filename)
        if entry is not None and len(entry) > 1 and entry[1] is None:
            return True
        trace = trace.tb_next
    return False


def _strip_all(exc: BaseException) -> None:
    """Remove Rearview's frames from the tracebacks of `exc`, of its causes and of exceptions grouped in it."""
    visited_ids: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        exception = todo.pop()
        if exception is None or id(exception) in visited_ids:
            continue
        visited_ids.add(id(exception))
        exception.__traceback__ = without_own_frames(exception.__traceback__)
        todo += [exception.__cause__, exception.__context__]
        todo += getattr(exception, "exceptions", ())


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback `trace` without Rearview's frames, or None if no other frame is left."""
    program_entries: Sequence[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            program_entries = [*program_entries, trace]
        trace = trace.tb_next
    for entry, following in zip(program_entries, [*program_entries[1:], None], strict=False):
        entry.tb_next = following
    return program_entries[0] if program_entries else None
