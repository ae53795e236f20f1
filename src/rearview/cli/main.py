"""The command `rearview`: the list of its subcommands, shell completion, and the exit code of each failure."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any, NoReturn

import click

import rearview
from rearview.cli.terminal import output
from rearview.errors import RearviewError


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    Commands, options, run ids and names then complete with the Tab key. For bash or zsh, add
    `eval "$(rearview completion bash)"` (or `zsh`) to the shell's start file; for fish, add `rearview
    completion fish | source`.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "the choices above are click's own"
    complete = kind(cli, {}, "rearview", "_REARVIEW_COMPLETE")
    output.out(complete.source_template % complete.source_vars())


OK = 0
NO = 1
"""Exit code of a negative answer: a replay not exact, damage found, sources differ, nothing could be filled."""
USAGE = 2
BUG = 70
INTERRUPTED = 130
PIPE = 141

# command -> (module in this folder, help text); the module is imported when the command is used
COMMANDS = {
    "inspect": (
        "source",
        "Show whether Rearview will work on a script or notebook, without running it.",
    ),
    "run": ("run", "Record a run of a script or notebook, which needs no changes."),
    "runs": ("runs", "List the runs of this project."),
    "ls": ("runs", "List the runs of this project, oldest first."),
    "show": ("runs", "Show one run: names, loops, checkpoints, cost, and whether it is exact."),
    "table": ("query", "Show logged values, one row per point."),
    "sql": ("query", "Ask the records and runs in SQL."),
    "diff": ("source", "Show how the source of two runs differs."),
    "plot": ("query", "Plot logged values, all runs in one picture."),
    "ui": ("web_page", "Show the project in a browser."),
    "compare": ("runs", "Compare two runs: arguments, results, source, environment."),
    "files": ("runs", "List the files that a run wrote, and fetch them."),
    "export": ("bridges", "Write a table to FILE, or runs to another tracker."),
    "import": ("bridges", "Import the runs of another tracker: TensorBoard, MLflow or W&B."),
    "name": ("runs", "Give a run a name, by which every command finds it."),
    "tag": ("runs", "Give a run tags, to find it again."),
    "note": ("runs", "Write a note about a run."),
    "rm": ("runs", "Remove runs: records, checkpoints, replays and source."),
    "replay": ("backfill", "Run a past run again from its checkpoints and prove it exact."),
    "tree": ("studies", "Show many versions as one execution tree: the cells that they share."),
    "pack": ("studies", "Write versions with their data into one PACKAGE that others can replay."),
    "backfill": ("backfill", "Fill columns for past runs from log statements added since."),
    "workers": (
        "backfill",
        "Show backfills under way and their workers, or give them N workers from now on.",
    ),
    "propagate": ("source", "Show where the statements that log NAMES go in past versions."),
    "resume": ("run", "Resume a run that was stopped."),
    "submit": ("submit", "Write the job file for a script that a batch system runs to its end."),
    "energy": ("green", "Show the power in the grid, and the energy that a run used."),
    "verify": ("doctor_verify_gc", "Check everything in the store; repair what can be rebuilt."),
    "trust": (
        "doctor_verify_gc",
        "Trust a store that was not made here: let replays run its source.",
    ),
    "gc": ("doctor_verify_gc", "Free space by dropping checkpoints."),
    "doctor": ("doctor_verify_gc", "Check this machine and this project, and say what to do."),
    "mcp": ("bridges", "Serve the runs of this project to coding agents."),
    "demo": ("demo", "See it happen: record, edit, backfill, in under a minute."),
    "completion": ("main", "Print the completion script of a shell."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of the commands, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the module of a command and return the command, or None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rearview.cli.{COMMANDS[cmd_name][0]}")
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, command, remaining words) for the words `args`.

        If the first word is no command, raise an error that suggests the commands with similar names.
        """
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=2, cutoff=0.5)
            if args[0].endswith(".py"):
                hint = f"To record it: `rearview run {args[0]}`."
            elif near:
                hint = "Did you mean " + " or ".join(f"`rearview {name}`" for name in near) + "?"
            else:
                hint = "`rearview --help` lists the commands."
            raise click.UsageError(f"There is no command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands with their help texts, without importing the modules of the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 yes, done. 1 a negative answer. 2 wrong use, or a refusal. "
    "`run` and `resume` exit with the code of the script.",
)
@click.version_option(rearview.__version__, "-V", "--version", prog_name="rearview")
@click.option("--traceback", is_flag=True, help="Show where an unexpected error came from.")
@click.pass_context
def cli(ctx: click.Context, traceback: bool) -> int | None:  # noqa: ARG001 - read in `main`
    """Hindsight for model training: log it after the run, exactly."""
    if ctx.invoked_subcommand is None:
        output.overview(rearview.__version__)
        return OK
    return None


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the documented exit code."""
    words = list(sys.argv[1:] if args is None else args)
    for name in ("stdout", "stderr"):
        # the stream is None if the caller closed it; the file is not inherited, so it stays closed in the user's program
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the end
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    try:
        result: Any = cli.main(words, prog_name="rearview", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as exc:
        output.usage(exc)
        return USAGE
    except (KeyboardInterrupt, click.Abort) as exc:
        # click prints a line break after ^C and raises Abort in place of KeyboardInterrupt
        output.note(str(exc.__cause__ or "") or "Interrupted.")
        return INTERRUPTED
    except (BrokenPipeError, output.ReaderGone):
        # the process that read our output has ended: replace stdout, so that Python's last flush does not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE
    except RearviewError as exc:
        if "--traceback" in words[:1]:
            raise
        output.problem(str(exc), exc.slug)
        return USAGE
    except Exception as exc:
        if "--traceback" in words[:1]:
            raise
        output.bug(exc)
        return BUG
    return result if isinstance(result, int) else OK
