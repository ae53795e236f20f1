"""Commands that start the user's program: run, resume.

People put `rearview run` before a command they know: an interpreter, a shell script, or a launcher such
as torchrun. `program_of` finds the script or module in such a command. If it cannot be recorded that
way, the error names the command to type instead.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.green import Green, green_options, grid_setting, last_time, moment, run_green
from rearview.cli.options import (
    TakesRuns,
    not_started,
    one_run,
    open_history,
    pair,
    quiet_option,
    span,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.run_notebook import (
    check_notebook,
    check_together,
    notebook_options,
    resumed_run,
    run_notebook,
)
from rearview.errors import UsageError
from rearview.model.run import is_notebook

if TYPE_CHECKING:
    from rearview._history import LaunchCommand, Preemption


_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?\Z")
_FLAGS = {
    "-u": {"PYTHONUNBUFFERED": "1"},
    "-B": {"PYTHONDONTWRITEBYTECODE": "1"},
    "-O": {"PYTHONOPTIMIZE": "1"},
    "-OO": {"PYTHONOPTIMIZE": "2"},
    "-v": {"PYTHONVERBOSE": "1"},
    "-s": {"PYTHONNOUSERSITE": "1"},
}
"""Options of Python that an environment variable sets as well."""
_LAUNCHERS = {
    "torchrun": "torchrun {options} --no-python rearview run {program}",
    "accelerate": "accelerate launch {options} --no_python rearview run {program}",
    "deepspeed": "deepspeed {options} --no_python rearview run {program}",
    "mpirun": "mpirun {options} rearview run {program}",
    "mpiexec": "mpiexec {options} rearview run {program}",
    "srun": "srun {options} rearview run {program}",
    "horovodrun": "horovodrun {options} rearview run {program}",
}
"""Programs that start several processes, and the place of `rearview run` on their command line."""
_WRAPPERS = {"uv", "poetry", "pdm", "hatch", "pipenv", "conda", "nohup", "time", "env", "nice"}
"""Programs that start one other program; `rearview run` goes after them."""
_SHELL = re.compile(rb"#!.*\b(ba|da|z|k|fi)?sh\b")


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """The program that a command line starts."""

    target: str
    args: tuple[str, ...]
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set for it."""


def program_of(words: Sequence[str]) -> ProgramCall:
    """Return the script or module that `words` start; if there is none, raise with the command to type.

    >>> program_of([sys.executable, "-u", "train.py", "--lr", "1"])
    ProgramCall(target='train.py', args=('--lr', '1'), module=False, environment={'PYTHONUNBUFFERED': '1'})
    >>> program_of([sys.executable, "-m", "pkg.train"]).module
    True
    """
    first, *rest = words
    name = Path(first).name
    if not Path(first).is_file() or _PYTHON.match(name):
        if _PYTHON.match(name):
            return _python(first, rest)
        if name in _LAUNCHERS:
            raise UsageError(_launcher(name, rest), slug="launcher")
        if name in _WRAPPERS:
            raise UsageError(_wrapper(words), slug="launcher")
        if program_file := shutil.which(first):
            raise UsageError(_command(first, Path(program_file), rest), slug="launcher")
        return ProgramCall(first, tuple(rest))
    if not name.endswith(".py") and _is_shell(Path(first)):
        raise UsageError(_shell_script(Path(first)), slug="launcher")
    return ProgramCall(first, tuple(rest))


def _python(first: str, rest: list[str]) -> ProgramCall:
    _check_interpreter(first)
    environment: dict[str, str] = {}
    words = list(rest)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m" or (word.startswith("-m") and len(word) > 2):
            target = word[2:] or (words.pop(0) if words else "")
            if target:
                return ProgramCall(target, tuple(words), module=True, environment=environment)
            break
        if word in _FLAGS:
            environment |= _FLAGS[word]
        elif word.startswith("-W"):
            environment["PYTHONWARNINGS"] = word[2:] or (words.pop(0) if words else "")
        else:
            raise UsageError(
                f"`rearview run` cannot pass {word} on to Python. Record a script or module: "
                "`rearview run train.py`, `rearview run -m package.train`.",
                slug="launcher",
            )
    if not words:
        raise UsageError(
            "Which script? `rearview run train.py`, or `rearview run -m package.train`.",
            slug="no-script",
        )
    return ProgramCall(words[0], tuple(words[1:]), environment=environment)


def _check_interpreter(first: str) -> None:
    """Raise if `first` is a Python of another environment, which has other packages than this one."""
    interpreter = shutil.which(first)
    if interpreter is None or Path(interpreter).parent == Path(sys.executable).parent:
        return
    if (
        Path(interpreter).resolve() == Path(sys.executable).resolve()
        and sys.prefix == sys.base_prefix
    ):
        return
    raise UsageError(
        f"{first} is {interpreter}, but this `rearview` belongs to {sys.executable}. Record without naming "
        f"it (`rearview run train.py`), or install Rearview there: `{interpreter} -m pip install rearview`.",
        slug="launcher",
    )


def _split(words: Sequence[str]) -> tuple[str, str]:
    """Return a launcher's own options and the program that it starts, both as text."""
    for at, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return shlex.join(_without_python(words[:at])), shlex.join(words[at:])
        if word == "-m" and at + 1 < len(words):
            return shlex.join(_without_python(words[:at])), shlex.join(words[at:])
    return shlex.join(words), "train.py"


def _without_python(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _PYTHON.match(Path(word).name) and word != "launch"]


def _launcher(name: str, rest: list[str]) -> str:
    options, program = _split(rest)
    line = " ".join(_LAUNCHERS[name].format(options=options, program=program).split())
    return (
        f"{name} starts the processes, so Rearview goes after it: `{line}`. Each process is recorded "
        "as a separate run; runs of several processes that talk to each other cannot be replayed yet."
    )


def _wrapper(words: Sequence[str]) -> str:
    first, *rest = words
    for at, word in enumerate(rest):
        if _PYTHON.match(Path(word).name) or word.endswith(".py"):
            program = rest[at + 1 :] if _PYTHON.match(Path(word).name) else rest[at:]
            line = shlex.join([first, *rest[:at], "rearview", "run", *program])
            return f"{first} starts the program, so Rearview goes after it: `{line}`."
    return f"{first} starts the program, so `rearview run` goes after it, before the script."


def _command(first: str, program_file: Path, rest: list[str]) -> str:
    line = shlex.join(["rearview", "run", str(program_file), *rest])
    try:
        with program_file.open("rb") as file:
            head = file.readline(200)
    except OSError:
        head = b""
    if head.startswith(b"#!") and b"python" in head:
        module = shlex.join(["rearview", "run", "-m", first, *rest])
        return f"{first} is a command, not a script. Record its module: `{module}`; or its file: `{line}`."
    return (
        f"{first} is a program, not a Python script. Put `rearview run` in front of the Python script "
        "that it starts."
    )


def _is_shell(file: Path) -> bool:
    if file.suffix in {".sh", ".bash", ".zsh", ".slurm", ".sbatch"}:
        return True
    try:
        with file.open("rb") as lines:
            return bool(_SHELL.match(lines.readline(200)))
    except OSError:
        return False


def _shell_script(file: Path) -> str:
    """Return how to change a shell script: the first line that starts Python, and its new text."""
    head = f"{file} is a shell script; Rearview records the Python program that it starts."
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            continue
        match = re.search(r"(?<!\S)\S*python[\d.]*\s+(-u\s+)?(?P<rest>(-m\s+)?[\w./$\"{].*)", text)
        if match:
            changed = f"{text[: match.start()]}rearview run {match['rest']}"
            return f"{head} Change its line {number} to `{changed}` and run {file} as before."
        if re.search(r"\b(torchrun|accelerate launch|deepspeed|srun|mpirun)\b", text):
            return (
                f"{head} Its line {number} starts processes through a launcher: try `rearview run -- "
                f"{text.split('#')[0].strip()}` to see where Rearview goes."
            )
    return f"{head} Put `rearview run` in front of the script's name in it, in place of `python`."


def _notebook_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that only notebooks have."""
    command = click.option(
        "--timeout",
        type=span,
        metavar="SPAN",
        help="Of a notebook: the longest that a cell may take (10m); it is interrupted then.",
    )(command)
    return click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Of a notebook: write it with its outputs there.",
    )(command)


class ProgramCommand(click.Command):
    """A command whose own options end at the program's name, as with `python`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the script, or up to the module's name."""
        try:
            return super().parse_args(ctx, self.end_options_after_module(args))
        except click.NoSuchOption as exc:
            script = next((word for word in args if word.endswith((".py", ".ipynb"))), "train.py")
            raise click.UsageError(
                f"`rearview {self.name}` has no option {exc.option_name!r}. Options of the script come "
                f"after its name: `rearview {self.name} {script} {exc.option_name} …`.",
                ctx,
            ) from exc

    def end_options_after_module(self, args: list[str]) -> list[str]:
        """Return the words with `--` after `-m MODULE`: the words that follow belong to the module."""
        takes_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for name in param.opts
        }
        position = 0
        while position < len(args):
            word = args[position]
            if word == "-m":
                return [*args[: position + 2], "--", *args[position + 2 :]]
            if word.startswith("-m") and not word.startswith("--"):
                return [*args[:position], "-m", word[2:], "--", *args[position + 1 :]]
            if not word.startswith("-") or word in {"-", "--"}:
                break
            position += 2 if word in takes_value else 1
        return args


@click.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.PY [ARGS]...")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.option(
    "--arg",
    "given",
    type=pair,
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a `rearview.arg`; may be repeated.",
)
@click.option(
    "--epsilon",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of training time that recording may cost (default 0.0667, of a notebook 0.02); "
    "0: no checkpoints.",
)
@click.option(
    "--every", is_flag=True, help="Checkpoint each outer iteration, without regard to its cost."
)
@click.option("--autolog", is_flag=True, help="Log every scalar that is assigned in a loop.")
@click.option(
    "--cells",
    is_flag=True,
    help="Cut a script into cells, at `# %%` or between its paragraphs: points begin with the cell.",
)
@click.option(
    "--preemptible",
    is_flag=True,
    help="On a signal, save and exit with code 85; the same command then continues the run.",
)
@click.option(
    "--signal",
    "signals",
    metavar="NAME",
    multiple=True,
    help="With --preemptible: the signal that stops it (default TERM and USR1); may be repeated.",
)
@click.option(
    "--remote",
    metavar="URL",
    help="A folder or URL to which the run is copied, and fetched from; implies --preemptible.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    metavar="N",
    default=1000,
    show_default=True,
    help="With --preemptible: how often one run is resumed.",
)
@click.option(
    "--exit-every",
    type=span,
    metavar="SPAN",
    help="With --preemptible: also save and exit after this time (1h), for batch systems that "
    "transfer files then.",
)
@_notebook_options
@green_options
@quiet_option
def run(
    *,
    program: tuple[str, ...],
    module: str | None,
    given: tuple[tuple[str, str], ...],
    epsilon: float | None,
    every: bool,
    autolog: bool,
    cells: bool,
    preemptible: bool,
    signals: tuple[str, ...],
    remote: str | None,
    retries: int,
    exit_every: float | None,
    out: Path | None,
    timeout: float | None,
    green: bool,
    by: str | None,
    hours: float | None,
    share: float | None,
    grams: float | None,
    exit_when_paused: bool,
    quiet: bool,
) -> int | None:
    """Record a run of a script or notebook, which needs no changes.

    All words after the script (or after `-m MODULE`) belong to it. Output, exit code, signals
    and tracebacks are those of the script; lines of Rearview go to stderr. The cells of a notebook run in order
    in a new kernel; --out and --timeout may also come after its name.
    """
    if module is None and not program:
        raise click.UsageError(
            "Which script? `rearview run train.py`, or `rearview run -m package.train`.",
            click.get_current_context(),
        )
    program_call = (
        program_of(program) if module is None else ProgramCall(module, program, module=True)
    )
    target, rest = program_call.target, list(program_call.args)
    notebook = not program_call.module and is_notebook(target)
    _check_target(program_call)
    notebook_only = out is not None or timeout is not None
    check_together(
        (cells and program_call.module, "--cells is for scripts, not for modules."),
        (green and notebook, "--green is not for notebooks."),
        (notebook_only and not notebook, "--out and --timeout are for notebooks."),
        (
            not green and (exit_when_paused or {by, hours, share, grams} != {None}),
            "--by, --hours, --share, --grams and --exit-when-paused go with --green.",
        ),
    )
    data = b""
    if notebook:
        out, timeout = notebook_options(target, rest, out, timeout)
        rest, data = [], Path(target).read_bytes()
        check_notebook(data, target, quiet=quiet)
    os.environ.update(program_call.environment)
    from rearview._history import start_run

    settings: dict[str, Any] = {
        "epsilon": epsilon,
        "every": every or None,
        "autolog": autolog or None,
        "closing_lines": "never" if quiet else None,
    }
    preemption = (
        replace(_preemption(signals, remote, retries), exit_every=exit_every, waits=green)
        if preemptible or green or remote is not None
        else None
    )
    options: dict[str, Any] = {
        "module": program_call.module,
        "given": dict(given),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "preemption": preemption,
        "cells": cells and not notebook,
    }
    if green and preemption is not None:
        green_settings = Green(grid_setting(), by, hours, share, grams, leaves=exit_when_paused)
        if by is not None:
            moment(by, 0.0)  # a typing error is reported now, not when power is green
            if hours is None:
                green_settings = replace(
                    green_settings, hours=_last_time(target, rest, options["module"], quiet=quiet)
                )

        def start() -> LaunchCommand:
            command = start_run(target, rest, **options)
            if not quiet:
                print_notes(command)
            return command

        return run_green(start, green_settings, preemption.signals, quiet=quiet)
    if preemption is not None:
        # A signal that arrives now is delivered once the program handles it.
        signal.pthread_sigmask(signal.SIG_BLOCK, preemption.signals)
    command = start_run(target, rest, **options)
    if not quiet:
        output.said(f"recording {'-m ' if program_call.module else ''}{target}")
    if not quiet and preemption is not None:
        print_notes(command)  # it may resume a stopped run
    if notebook:
        stopped = resumed_run(command)
        data = data if stopped is None else open_history().notebook(stopped)
        return run_notebook(command, data, target, out, timeout)
    become(command)
    return None


def _last_time(target: str, args: list[str], module: bool, *, quiet: bool) -> float | None:
    """Return how many hours the program took last time, and print it."""
    from rearview._history import similar_run

    similar = similar_run(target, args, module=module)
    hours = last_time(similar[1]) if similar is not None else None
    if not quiet and similar is not None and hours is not None:
        output.said(f"it takes {hours:.2g} h, as run {similar[0].id} did (--hours says otherwise)")
    elif not quiet:
        output.said(
            "how long it takes is not known, so it starts at --by at the latest; --hours tells it"
        )
    return hours


def _check_target(program: ProgramCall) -> None:
    """Raise if the program to run is a script that does not exist."""
    if not program.module:
        check_script(Path(program.target))


def _preemption(signals: tuple[str, ...], remote: str | None, retries: int) -> Preemption:
    from rearview._history import Preemption

    try:
        numbers = tuple(
            int(signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]) for name in signals
        )
    except KeyError as exc:
        raise UsageError(
            f"There is no signal {exc.args[0]!r}. Give a name such as TERM, USR1 or INT.",
            slug="no-signal",
        ) from exc
    plain = Preemption(remote=remote, retries=retries)
    return replace(plain, signals=numbers) if numbers else plain


def check_script(script: Path) -> None:
    """Raise, with a hint, if a script does not exist or cannot be read."""
    if script.is_dir():
        raise UsageError(
            f"{script} is a folder. Name the script in it, or run a package with "
            f"`rearview run -m {script.name}`.",
            slug="no-script",
        )
    if not script.exists():
        raise UsageError(
            f"There is no script {str(script)!r} in {Path.cwd()}. {_nearest_script(script)}",
            slug="no-script",
        )
    if not os.access(script, os.R_OK):
        raise UsageError(
            f"{script} cannot be read. Give yourself the right: `chmod u+r {script}`.",
            slug="no-script",
        )


def _nearest_script(script: Path) -> str:
    """Return a sentence on the script that was probably meant."""
    from difflib import get_close_matches

    here = sorted(path.name for path in Path().glob("*.py"))
    below = sorted(str(path) for path in Path().glob(f"*/{script.name}"))
    near = get_close_matches(script.name, here, n=1, cutoff=0.6) or below[:1]
    if near:
        return f"Did you mean `rearview run {near[0]}`?"
    if here:
        return f"The scripts here are {', '.join(here[:5])}."
    return "There is no .py file in this folder: go to the folder of your script first."


@click.command(cls=TakesRuns)
@one_run
@click.option(
    "--source",
    type=click.Choice(["run", "worktree"]),
    default="run",
    show_default=True,
    help="Continue with the source that the run had, or with that of the work tree.",
)
@click.option(
    "--remote",
    metavar="URL",
    help="Fetch the run from this folder or URL first, and copy every save there.",
)
@_notebook_options
@quiet_option
def resume(
    which: str,
    source: str,
    remote: str | None,
    out: Path | None,
    timeout: float | None,
    quiet: bool,
) -> int | None:
    """Resume a run that was stopped.

    It continues from its last checkpoint, with the source, arguments and random state it had,
    as the same run. With --source worktree it continues with the source as it is now, if no changed
    line ran before that checkpoint. RUN is an id or part of one, `latest` (the default), or -2 for the
    one before. With --remote it works in an empty folder too: missing source files are written.
    """
    preemption = None
    if remote is not None:
        from rearview._history import fetch_run

        run, written = fetch_run(remote, which)
        which = run.id
        if written and not quiet:
            output.said(f"wrote {output.plural(len(written), 'source file')} missing here")
        preemption = _preemption((), remote, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, preemption.signals)
    command = open_history().resume(which, preemption, source=source)
    if not quiet:
        output.said(f"resuming {which}")
        print_notes(command)
    stopped = open_history().run(which)
    if is_notebook(stopped.script):
        return run_notebook(command, open_history().notebook(which), stopped.script, out, timeout)
    become(command)
    return None


def print_notes(command: LaunchCommand) -> None:
    """Print the notes of a command before the program starts."""
    for text in command.notes:
        output.said(text)


def become(command: LaunchCommand) -> None:
    """Replace this process by the user's program."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(command.folder)
        os.execve(command.command[0], command.command, command.environment)  # noqa: S606 - no shell
    except OSError as exc:
        raise not_started(command, exc) from exc
