"""The command completion."""

from __future__ import annotations

import click

from rearview.cli import show


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    Commands, options, run ids and names then complete with the Tab key. Put into the shell's start
    file: `eval "$(rearview completion bash)"`, the same with zsh, or for fish `rearview
    completion fish | source`.
    """
    from click.shell_completion import get_completion_class

    from rearview.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "the choices above are click's own"
    complete = kind(cli, {}, "rearview", "_REARVIEW_COMPLETE")
    show.out(complete.source_template % complete.source_vars())
