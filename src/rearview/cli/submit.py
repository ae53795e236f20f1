"""The command submit: write the job file with which a batch system runs a script to its end."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from rearview.cli.options import pair, quiet_option
from rearview.cli.run import ProgramCommand, check_script, run
from rearview.cli.terminal import output
from rearview.errors import SiteError, UsageError

_OWN = {"preemptible", "quiet"}
"""Options of `run` that the user cannot give to `submit`, because `submit` sets them itself."""
RUN_OPTIONS = [
    param for param in run.params if isinstance(param, click.Option) and param.name not in _OWN
]
CODE = (".py", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg")
SKIPPED = {"__pycache__", "venv", "node_modules", "site-packages", "wandb", "mlruns"}
EXIT_EVERY = "1h"
"""Default of --exit-every under HTCondor: at most this much work is lost if a machine dies."""


class Submit(ProgramCommand):
    """A command that keeps the words of its command line, so that the job's command line can repeat the options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the words `args` in `ctx.meta["words"]`, and parse them."""
        ctx.meta["words"] = self.end_options_after_module(list(args))
        return super().parse_args(ctx, args)


@click.command(
    cls=Submit, params=[*RUN_OPTIONS], context_settings={"allow_interspersed_args": False}
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.PY [ARGS]...")
@click.option("--condor", "site", flag_value="condor", help="For HTCondor: a submit file.")
@click.option("--slurm", "site", flag_value="slurm", help="For Slurm: a batch script.")
@click.option(
    "-o",
    "--output",
    "destination",
    metavar="FILE",
    help="Where to write it (default SCRIPT.sub, SCRIPT.sbatch).",
)
@click.option("--submit", "hand_in", is_flag=True, help="Submit it too.")
@click.option(
    "--set",
    "lines",
    type=pair,
    multiple=True,
    metavar="NAME=VALUE",
    help="A line of the batch system's own, such as request_gpus=1 or time=4:00:00; may be "
    "repeated.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="PATH",
    help="With --condor: a file or folder that the script reads; code is found automatically; may be "
    "repeated.",
)
@click.option(
    "--result",
    "results",
    multiple=True,
    metavar="PATH",
    help="With --condor: transfer back only this; may be repeated.",
)
@click.option(
    "--python", metavar="PATH", help="The interpreter where it runs (default: this one's path)."
)
@quiet_option
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    *,
    program: tuple[str, ...],
    module: str | None,
    site: str | None,
    destination: str | None,
    hand_in: bool,
    lines: tuple[tuple[str, str], ...],
    inputs: tuple[str, ...],
    results: tuple[str, ...],
    python: str | None,
    quiet: bool,
    retries: int,
    **_given: Any,
) -> None:
    """Write the job file for a script that a batch system runs to its end.

    The job is a `rearview run --preemptible`: on a signal, it saves and exits with code 85, and the
    batch system starts it again until it has ended. Options of `run` may be given, too.
    """
    if site is None or (module is None and not program):
        raise click.UsageError(
            "For which batch system, and which script? `rearview submit --condor train.py`.", ctx
        )
    from rearview.checkpointer.submit_files import BatchJob, batch_script, submit_file

    folder = Path.cwd()
    target = module or program[0]
    if module is None:
        check_script(Path(target))
        if not Path(target).resolve().is_relative_to(folder):
            raise UsageError(
                f"{target} is not below {folder}. Go to the folder of the project and name the script "
                "from there.",
                slug="no-script",
            )
        target = str(Path(target).resolve().relative_to(folder)) if site == "condor" else target
    name = Path(target).stem if module is None else target
    file = Path(destination or f"{name}.{'sub' if site == 'condor' else 'sbatch'}")
    program_words = program if module is not None else (target, *program[1:])
    job = BatchJob(
        name=name,
        command=(
            python or sys.executable,
            *("-m", "rearview", "run", "--preemptible"),
            *_options(ctx, condor=site == "condor"),
            *(("-m", module) if module is not None else ()),
            *program_words,
        ),
        folder=str(folder),
        retries=retries,
        inputs=tuple(_code(folder)) + tuple(_existing(path) for path in inputs),
        results=results,
        settings=dict(lines),
    )
    if site == "condor":
        results_folder = _results(file)
        text = submit_file(job, results=str(results_folder.resolve()))
        results_folder.mkdir(parents=True)
    else:
        text = batch_script(job)
    file.write_text(text, "utf-8")
    command = ["condor_submit", str(file)] if site == "condor" else ["sbatch", str(file)]
    if hand_in:
        _hand_in(command)
    elif not quiet:
        output.prefixed_note(f"wrote {file}; submit it with `{shlex.join(command)}`")
    if site == "condor" and not quiet:
        output.prefixed_note(f"its results will be in {results_folder}")


def _options(ctx: click.Context, *, condor: bool) -> list[str]:
    """Return the options of `run` that the user gave to `submit`, as words of a command line.

    With `condor`, --exit-every is added if the user did not give it.
    """
    parsed, _, _ = ctx.command.make_parser(ctx).parse_args(list(ctx.meta["words"]))
    if condor:
        parsed.setdefault("exit_every", EXIT_EVERY)
    words: list[str] = []
    for option in RUN_OPTIONS:
        value = parsed.get(str(option.name))
        if option.name == "module" or value is None:
            continue
        if option.is_flag:
            words.append(option.opts[0])
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [option.opts[0], str(item)]
    return words


def _code(folder: Path) -> list[str]:
    """Return the paths of the project's code: files in `folder` with a suffix in `CODE`, folders with Python files."""
    paths = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED or path.suffix == ".results":
            continue
        code = path.suffix in CODE if path.is_file() else any(path.rglob("*.py"))
        if code and not (path / "pyvenv.cfg").exists():
            paths.append(str(path))
    return paths


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise UsageError(
            f"There is no {path} to transfer. Give the path of a file or folder that the script "
            "reads.",
            slug="submit-input",
        )
    return str(Path(path).resolve())


def _results(file: Path) -> Path:
    """Return a path that does not exist yet, next to the job file `file`, for the folder of the job's results."""
    folder, number = file.with_suffix(".results"), 1
    while folder.exists():
        number += 1
        folder = file.with_suffix(f".{number}.results")
    return folder


def _hand_in(command: list[str]) -> None:
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as exc:
        raise SiteError(
            f"There is no {command[0]} here. Submit {command[-1]} on a machine of the batch system "
            "that has it.",
            slug="no-submit",
        ) from exc
    if completed.returncode:
        raise SiteError(
            f"{command[0]} refused {command[-1]}: {(completed.stderr or completed.stdout).strip()}. Correct "
            "what it says, with --set NAME=VALUE for a line of its own.",
            slug="refused",
        )
    output.out(completed.stdout.strip())
