"""Commands that start the user's program: run, resume.

Users may put `rearview run` before the command that they usually type: an interpreter, a shell script, or a launcher
such as torchrun. `program_of` finds the script or module in this command. If `rearview run` cannot record the
command, the error says which command to type.
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

from rearview.cli.green import Green, green_options, grid_setting, last_time, parse_time, run_green
from rearview.cli.options import (
    TakesRuns,
    not_started,
    open_history,
    pair,
    quiet_option,
    run_argument,
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
"""Option of Python -> environment variable, with its value, that has the same effect."""
_LAUNCHERS = {
    "torchrun": "torchrun {options} --no-python rearview run {program}",
    "accelerate": "accelerate launch {options} --no_python rearview run {program}",
    "deepspeed": "deepspeed {options} --no_python rearview run {program}",
    "mpirun": "mpirun {options} rearview run {program}",
    "mpiexec": "mpiexec {options} rearview run {program}",
    "srun": "srun {options} rearview run {program}",
    "horovodrun": "horovodrun {options} rearview run {program}",
}
"""Program that starts several processes -> its command line with `rearview run` in the right place."""
_WRAPPERS = {"uv", "poetry", "pdm", "hatch", "pipenv", "conda", "nohup", "time", "env", "nice"}
"""Programs that start another program; `rearview run` must come after this word and before that program."""
_SHELL = re.compile(rb"#!.*\b(ba|da|z|k|fi)?sh\b")


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """The program that a command line starts."""

    target: str
    args: tuple[str, ...]
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set for the program."""


def program_of(words: Sequence[str]) -> ProgramCall:
    """Return the script or module that the command `words` starts; if there is none, raise an error with advice.

    >>> program_of([sys.executable, "-u", "train.py", "--lr", "1"])
    ProgramCall(target='train.py', args=('--lr', '1'), module=False, environment={'PYTHONUNBUFFERED': '1'})
    >>> program_of([sys.executable, "-m", "pkg.train"]).module
    True
    """
    program, *remaining_words = words
    name = Path(program).name
    if not Path(program).is_file() or _PYTHON.match(name):
        if _PYTHON.match(name):
            return _python(program, remaining_words)
        if name in _LAUNCHERS:
            raise UsageError(_launcher(name, remaining_words), slug="launcher")
        if name in _WRAPPERS:
            raise UsageError(_wrapper(words), slug="launcher")
        if program_file := shutil.which(program):
            raise UsageError(
                _command(program, Path(program_file), remaining_words), slug="launcher"
            )
        return ProgramCall(program, tuple(remaining_words))
    if not name.endswith(".py") and _is_shell(Path(program)):
        raise UsageError(_shell_script(Path(program)), slug="launcher")
    return ProgramCall(program, tuple(remaining_words))


def _python(program: str, remaining_words: list[str]) -> ProgramCall:
    _check_interpreter(program)
    environment: dict[str, str] = {}
    words = list(remaining_words)
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


def _check_interpreter(program: str) -> None:
    """Raise if the interpreter `program` is not the one of this process: it may have other packages."""
    interpreter = shutil.which(program)
    if interpreter is None or Path(interpreter).parent == Path(sys.executable).parent:
        return
    if (
        Path(interpreter).resolve() == Path(sys.executable).resolve()
        and sys.prefix == sys.base_prefix
    ):
        return
    raise UsageError(
        f"{program} is {interpreter}, but this `rearview` belongs to {sys.executable}. Record without naming "
        f"it (`rearview run train.py`), or install Rearview there: `{interpreter} -m pip install rearview`.",
        slug="launcher",
    )


def _split(words: Sequence[str]) -> tuple[str, str]:
    """Return (options of the launcher, program with its arguments) of the words after a launcher, both as text."""
    for position, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return shlex.join(_without_python(words[:position])), shlex.join(words[position:])
        if word == "-m" and position + 1 < len(words):
            return shlex.join(_without_python(words[:position])), shlex.join(words[position:])
    return shlex.join(words), "train.py"


def _without_python(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _PYTHON.match(Path(word).name) and word != "launch"]


def _launcher(name: str, arguments: list[str]) -> str:
    options, program = _split(arguments)
    line = " ".join(_LAUNCHERS[name].format(options=options, program=program).split())
    return (
        f"{name} starts the processes, so Rearview goes after it: `{line}`. Each process is recorded "
        "as a separate run; runs of several processes that talk to each other cannot be replayed yet."
    )


def _wrapper(words: Sequence[str]) -> str:
    wrapper, *arguments = words
    for position, word in enumerate(arguments):
        if _PYTHON.match(Path(word).name) or word.endswith(".py"):
            program = (
                arguments[position + 1 :]
                if _PYTHON.match(Path(word).name)
                else arguments[position:]
            )
            line = shlex.join([wrapper, *arguments[:position], "rearview", "run", *program])
            return f"{wrapper} starts the program, so Rearview goes after it: `{line}`."
    return f"{wrapper} starts the program, so `rearview run` goes after it, before the script."


def _command(first: str, program_file: Path, arguments: list[str]) -> str:
    line = shlex.join(["rearview", "run", str(program_file), *arguments])
    try:
        with program_file.open("rb") as file:
            head = file.readline(200)
    except OSError:
        head = b""
    if head.startswith(b"#!") and b"python" in head:
        module = shlex.join(["rearview", "run", "-m", first, *arguments])
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
    """Return a text that tells the user how to change the line of a shell script that starts Python."""
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
    """Give a command the options that only apply to notebooks."""
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
    """A click command whose options come before the name of a program; later words belong to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command's own options in `args`; raise if an unknown option comes before the program's name."""
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
        """Return `args` with `--` inserted after `-m MODULE`, so that later words count as arguments of the module."""
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
    target, arguments = program_call.target, list(program_call.args)
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
        out, timeout = notebook_options(target, arguments, out, timeout)
        arguments, data = [], Path(target).read_bytes()
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
        green_settings = Green(
            grid_setting(), by, hours, share, grams, exits_when_paused=exit_when_paused
        )
        if by is not None:
            parse_time(by, 0.0)  # called for its error only: report a typing error before waiting
            if hours is None:
                green_settings = replace(
                    green_settings,
                    hours=_last_time(target, arguments, options["module"], quiet=quiet),
                )

        def start() -> LaunchCommand:
            command = start_run(target, arguments, **options)
            if not quiet:
                print_notes(command)
            return command

        return run_green(start, green_settings, preemption.signals, quiet=quiet)
    if preemption is not None:
        # the program inherits the blocked signals and unblocks them when it can handle them, so that none is lost
        signal.pthread_sigmask(signal.SIG_BLOCK, preemption.signals)
    command = start_run(target, arguments, **options)
    if not quiet:
        output.prefixed_note(f"recording {'-m ' if program_call.module else ''}{target}")
    if not quiet and preemption is not None:
        print_notes(command)  # there are notes if the command resumes a stopped run
    if notebook:
        stopped = resumed_run(command)
        data = data if stopped is None else open_history().notebook(stopped)
        return run_notebook(command, data, target, out, timeout)
    replace_process(command)
    return None


def _last_time(target: str, args: list[str], module: bool, *, quiet: bool) -> float | None:
    """Return the hours that a similar run of the program took, or None if not known; print the result.

    Nothing is printed if `quiet` is True.
    """
    from rearview._history import similar_run

    similar = similar_run(target, args, module=module)
    hours = last_time(similar[1]) if similar is not None else None
    if not quiet and similar is not None and hours is not None:
        output.prefixed_note(
            f"it takes {hours:.2g} h, as run {similar[0].id} did (--hours says otherwise)"
        )
    elif not quiet:
        output.prefixed_note(
            "how long it takes is not known, so it starts at --by at the latest; --hours tells it"
        )
    return hours


def _check_target(program: ProgramCall) -> None:
    """Raise if `program` is a script that does not exist or cannot be read."""
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
    """Raise an error with a hint if `script` does not exist, is a folder, or cannot be read."""
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
    """Return a sentence that suggests an existing script for `script`, which does not exist."""
    from difflib import get_close_matches

    scripts_here = sorted(path.name for path in Path().glob("*.py"))
    scripts_below = sorted(str(path) for path in Path().glob(f"*/{script.name}"))
    suggestions = get_close_matches(script.name, scripts_here, n=1, cutoff=0.6) or scripts_below[:1]
    if suggestions:
        return f"Did you mean `rearview run {suggestions[0]}`?"
    if scripts_here:
        return f"The scripts here are {', '.join(scripts_here[:5])}."
    return "There is no .py file in this folder: go to the folder of your script first."


@click.command(cls=TakesRuns)
@run_argument
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
            output.prefixed_note(f"wrote {output.plural(len(written), 'source file')} missing here")
        preemption = _preemption((), remote, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, preemption.signals)
    command = open_history().resume(which, preemption, source=source)
    if not quiet:
        output.prefixed_note(f"resuming {which}")
        print_notes(command)
    stopped = open_history().run(which)
    if is_notebook(stopped.script):
        return run_notebook(command, open_history().notebook(which), stopped.script, out, timeout)
    replace_process(command)
    return None


def print_notes(command: LaunchCommand) -> None:
    """Print the notes of `command`, for example on changed source, before its program starts."""
    for text in command.notes:
        output.prefixed_note(text)


def replace_process(command: LaunchCommand) -> None:
    """Replace this process by the program that `command` starts; return only by raising if that fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(command.folder)
        os.execve(command.command[0], command.command, command.environment)  # noqa: S606 - no shell
    except OSError as exc:
        raise not_started(command, exc) from exc
