"""Draw the picture of a terminal in the README from docs/guides/script.md. `make docs` runs this.

A test runs the commands of that page, so what the picture shows is what they print.
"""

import re
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = ("rearview run", "rearview backfill grad_norm --at", "rearview table grad_norm")
"""Beginnings of the commands that are shown, in the order of the page."""
LINES = 9
"""Lines of output that are shown for each command."""
WIDTH = 104
"""Characters of a line that are shown."""


def session(page: str) -> list[str]:
    """Return the lines of the terminal: the commands with what they print."""
    lines: list[str] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for step in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
            command, *output = step.rstrip("\n").split("\n")
            if command[2:].startswith(COMMANDS):
                more = ["…"] if len(output) > LINES else []
                lines += [command, *output[:LINES], *more, ""]
    return lines[:-1]


def draw() -> str:
    """Return the picture as SVG: light text on a dark ground, so that it is read on any page."""
    lines = session((HERE / "guides" / "script.md").read_text("utf-8"))
    height = 48 + 19 * len(lines)
    font = 'font-size="13.5" font-family="ui-monospace, Menlo, Consolas, monospace"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" {font}>',
        "  <title>A terminal: a run is recorded, a column is filled afterwards, the table shows it</title>",
        f'  <rect width="880" height="{height}" rx="8" fill="#22262b"/>',
        *(f'  <circle cx="{18 + 16 * k}" cy="16" r="5" fill="#565d66"/>' for k in range(3)),
    ]
    for number, line in enumerate(lines):
        shown = line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
        color = "#8fd18f" if line.startswith("exact") else "#d8dbe0"
        color = "#7fb4e6" if line.startswith("$ ") else color
        color = "#8b929b" if line.startswith("rearview: ") else color
        parts.append(
            f'  <text x="18" y="{50 + 19 * number}" fill="{color}" xml:space="preserve">'
            f"{escape(shown, quote=False)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "images" / "session.svg").write_text(draw(), "utf-8")
