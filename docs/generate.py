"""Write the pages that follow from the code: cli.md, settings.md and schema.md. `make docs` runs this."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import click

from rearview import config
from rearview.cli.main import COMMANDS, cli
from rearview.store.tables import schema

HERE = Path(__file__).parent

CLI_HEAD = """\
# Commands

`rearview COMMAND --help` shows the same. `python -m rearview` is `rearview`.

Answers go to stdout and remarks to stderr, so answers can be piped. `--json` and `--format json` print
JSON; since JSON has no NaN and no infinities, these are the strings `"NaN"`, `"Infinity"` and
`"-Infinity"`, and `null` always means that nothing was logged. `NO_COLOR=1` turns colours off.

| exit code | means |
|---|---|
| 0 | yes, done |
| 1 | a negative answer: not exact, refused, damage found, sources differ |
| 2 | wrong use, or a refusal: see [errors.md](errors.md) |
| 70 | a defect in Rearview: `rearview --traceback …` shows where |
| 130 | interrupted |
| 141 | the program that read the output has ended |

`run` and `resume` exit with the script's exit code.
"""

SETTINGS_HEAD = """\
# Settings

A setting is a line in `.rearview/config.toml` (under `[rearview]`) or an environment variable, which
overrides the file. Options of a command override both.

```toml
[rearview]
epsilon = 0.02
```

| setting | environment | default | what it does |
|---|---|---|---|
"""

SETTINGS_FOOT = """
`REARVIEW_ROOT` names the project's folder for commands in any folder; scripts must be below it. The
folder `.rearview` in it may be a link to another disk. `NO_COLOR` turns colours off, `FORCE_COLOR`
turns them on without a terminal.
"""


def main() -> None:
    """Write the pages."""
    (HERE / "cli.md").write_text(cli_page(), "utf-8")
    (HERE / "settings.md").write_text(settings_page(), "utf-8")
    (HERE / "schema.md").write_text(schema.markdown(), "utf-8")


def cli_page() -> str:
    """Return the page of commands."""
    return "\n".join([CLI_HEAD, *(command_section(name) for name in COMMANDS)])


def command_section(name: str) -> str:
    """Return the section of one command, and of the commands below it."""
    with click.Context(cli, info_name="rearview") as parent:
        command = cli.get_command(parent, name)
        assert command is not None
        sections = [_section(name, command, parent)]
        if isinstance(command, click.Group):
            with click.Context(command, info_name=name, parent=parent) as ctx:
                below = command.commands.items()
                sections += [_section(f"{name} {each}", one, ctx) for each, one in below]
    return "\n".join(sections)


def _section(name: str, command: click.Command, parent: click.Context) -> str:
    with click.Context(command, info_name=name, parent=parent) as ctx:
        usage = " ".join(command.collect_usage_pieces(ctx))
    lines = [f"## {name}", "", f"`rearview {name} {usage}`", "", _prose(command.help or "")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        lines += ["", "| option | |", "|---|---|", *map(_option, options)]
    return "\n".join([*lines, ""])


def _option(option: click.Option) -> str:
    value = ""
    if not option.is_flag:
        choices = getattr(option.type, "choices", None)
        value = " " + (option.metavar or ("|".join(choices) if choices else option.type.name))
    spelled = ", ".join(f"`{name}{value}`" for name in option.opts).replace("|", "\\|")
    return f"| {spelled} | {option.help or ''} |"


def _prose(text: str) -> str:
    return inspect.cleandoc(text)


def settings_page() -> str:
    """Return the page of settings."""
    told = _documented()
    rows = [
        f"| `{field.name}` | `{config.ENV_PREFIX}{field.name.upper()}` | `{field.default}` | {told[field.name]} |"
        for field in fields(config.Settings)
    ]
    return SETTINGS_HEAD + "\n".join(rows) + "\n" + SETTINGS_FOOT


def _documented() -> dict[str, str]:
    """Return what stands in the string under each field."""
    (tree,) = ast.parse(inspect.getsource(config.Settings)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(node.target, ast.Name)
            found[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return found


if __name__ == "__main__":
    main()
