"""Run the pages of docs/guides as a reader would, and compare what they show with what comes out.

A page is read from top to bottom, in an empty folder:

- A fenced block below a line that ends with the name of a file and a colon (`train.py`:) is that file. A file
  that ends with .ipynb is given as cells that begin with `# %%`.
- A `diff` block changes the file above it: its lines without `+` must follow each other in the file.
- In a `console` block, `$ ` begins a command, and the lines below it are what it prints.

In what a page shows, `…` alone on a line stands for any lines, and inside a line for any text. Ids of runs, times,
sizes, percentages and counts of checkpoints, states and segments may differ, and numbers with a point by one percent.
Lines that depend on how fast the machine is are left out.

`python tests/journeys/guide_pages.py docs/guides/script.md` writes into a page what its commands print now.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w./-]+)`:\n+\Z")
LIKE = (
    (r"\d{8}-\d{6}-[0-9a-f]{4}", r"\d{8}-\d{6}-[0-9a-f]{4}"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[A-Z][a-z]{2} \d\d \d\d:\d\d", r"[\w: -]+?"),
    (r"\d+(?:\.\d+)? (?:ms|s|min(?: \d+ s)?)\b", r"\d+(?:\.\d+)? (?:ms|s|min(?: \d+ s)?)"),
    (r"\d+(?:\.\d+)? [kKMG]?B\b", r"\d+(?:\.\d+)? [kKMG]?B"),
    (r"\d+(?:\.\d+)?%", r"\d+(?:\.\d+)?%"),
    (r"\d+ (?:checkpoint|state|segment)s?\b", r"\d+ (?:checkpoint|state|segment)s?"),
    (r"-?\d+\.\d+(?:e-?\d+)?", r"(-?\d+\.\d+(?:e-?\d+)?|-?\d+)"),
    (r"…", r".*?"),
    (r"\s+", r"\s+"),
)
"""What may differ between a page and its output, as it looks, and what may stand there instead."""
PASSING = re.compile(
    r"^(rearview: (\d+% done, .*|\w+( \w+)? …)|note: .* again from the start, in one process.*)\n",
    re.MULTILINE,
)
"""Lines that come or not as the machine is fast or slow: how far a command is, and how it is planned."""
ANY = re.compile("|".join(f"({pattern})" for pattern, _ in LIKE))


@dataclass
class Step:
    """A command of a page, what the page shows below it, and where that is in the text."""

    command: str
    shown: str
    start: int
    end: int


def pattern_of(shown):
    """Return a regular expression for a shown output, and the numbers in it."""
    text, numbers = "", []
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "…":
            text += r"(?:.*\n)*?"
            continue
        position = 0
        for match in ANY.finditer(line.rstrip()):
            text += re.escape(line[position : match.start()])
            kind = match.lastindex - 1
            text += LIKE[kind][1]
            if LIKE[kind][1].startswith("(-"):
                numbers.append(float(match[0]))
            position = match.end()
        text += re.escape(line.rstrip()[position:]) + r"[ \t]*\n"
    return text, numbers


COUNTED = re.compile(r"^exact: \d+ states? restored, .*$", re.MULTILINE)
"""The proof of a replay: how many states there are depends on the speed of the machine."""


def differs(shown, printed):
    """Return how an output differs from what a page shows; empty if it does not."""
    printed = "\n".join(line.rstrip() for line in printed.strip("\n").split("\n")) + "\n"
    if not shown.strip():
        return ""
    shown, printed = (COUNTED.sub("exact: N states", text) for text in (shown, printed))
    pattern, numbers = pattern_of(shown.strip("\n"))
    match = re.fullmatch(pattern, printed)
    if match is None:
        return f"the page shows\n{shown}\nand it prints\n{printed}"
    for expected, found in zip(numbers, match.groups(), strict=True):
        if abs(float(found) - expected) > 0.01 * max(abs(expected), 0.001):
            return f"the page shows {expected}, and it prints {found}"
    return ""


def as_notebook(text):
    cells = [cell.strip("\n") for cell in re.split(r"^# %%.*\n", text, flags=re.MULTILINE)]
    return json.dumps({
        "nbformat": 4, "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {"cell_type": "code", "id": f"c{k}", "metadata": {}, "execution_count": None, "outputs": [],
             "source": cell}
            for k, cell in enumerate(cells) if cell
        ],
    })  # fmt: skip


class Reader:
    """Somebody who does what a page says, in a folder."""

    def __init__(self, page, folder):
        self.text = page.read_text("utf-8")
        self.folder = folder
        self.files = {}
        self.named = ""

    def steps(self):
        """Write the files of the page, and yield its commands, in order."""
        for block in FENCE.finditer(self.text):
            kind, body = block[1], block[2]
            name = NAMED.search(self.text[: block.start()])
            if kind == "console":
                yield from self._commands(body, block.start(2))
            elif kind == "diff":
                self._change(name[1] if name else self.named, body)
            elif name:
                self.named = name[1]
                self._write(name[1], body)

    def _commands(self, body, offset):
        marks = [match.start() for match in re.finditer(r"^\$ ", body, re.MULTILINE)]
        for start, end in zip(marks, [*marks[1:], len(body)], strict=True):
            lines = body[start:end].splitlines(keepends=True)
            count = 1
            while lines[count - 1].rstrip().endswith("\\"):
                count += 1
            head = "".join(lines[:count])
            yield Step(
                head[2:].strip(),
                body[start + len(head) : end],
                offset + start + len(head),
                offset + end,
            )

    def _write(self, name, body):
        self.files[name] = body
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_notebook(body) if name.endswith(".ipynb") else body, "utf-8")

    def _change(self, name, body):
        lines = [line for line in body.splitlines(keepends=True) if line.strip("\n") != "…"]
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert self.files[name].count(before) == 1, f"{name} does not have\n{before}"
        self._write(name, self.files[name].replace(before, after))

    def run(self, command):
        """Return what a command prints."""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "REARVIEW_CLOSING_LINES": "always", "COLUMNS": "110", "KERAS_BACKEND": "torch",
            "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return PASSING.sub("", done.stdout)


def rewrite(page):
    """Put what the commands print into a page; blocks with `…` are only compared."""
    with tempfile.TemporaryDirectory() as folder:
        reader, text, shift = Reader(page, Path(folder)), page.read_text("utf-8"), 0
        for step in reader.steps():
            printed = reader.run(step.command)
            if "…" in step.shown:
                sys.stdout.write(f"$ {step.command}\n{printed}\n{differs(step.shown, printed)}\n")
                continue
            clean = "\n".join(line.rstrip() for line in printed.strip("\n").split("\n"))
            clean = clean.replace(folder, "/home/you/project") + "\n" if clean else ""
            text = text[: step.start + shift] + clean + text[step.end + shift :]
            shift += len(clean) - (step.end - step.start)
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
