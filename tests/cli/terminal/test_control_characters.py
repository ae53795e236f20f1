"""No control character of a name, value or message reaches a terminal; programs get what was logged."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rearview.cli.terminal import output
from rearview.model.wording import printable

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202egnp.exe\x00\r[red]x[/red][link=http://e]y\x1b[8m"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
OURS = re.compile(r"\x1b\[(0|1|2|31|32|33|36)m")

JOB = f"""\
import rearview
for epoch in range(2):
    rearview.log({EVIL.replace(chr(0), "")!r}, {EVIL!r})
    rearview.log("plain", {EVIL!r})
    print({EVIL!r})
"""


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_the_rest(text):
    shown = printable(text, line=True)
    assert not UNSAFE.search(shown)
    assert "\n" not in shown
    if not UNSAFE.search(text) and text.isprintable():
        assert shown == text


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_json_and_csv_are_read_back_unchanged(text):
    line = output.json_text({"v": text})
    assert json.loads(line) == {"v": text}
    assert not UNSAFE.search(line)
    if "\0" not in text:  # which Python's reader refuses
        lines = "\r\n".join(output.csv_lines(["v"], [(text,), ("x",)]))
        rows = list(csv.reader(io.StringIO(lines, newline="")))
        assert rows[1] == [text] or text == ""


@given(st.text())
def test_our_colours_pass_and_those_of_others_do_not(text):
    os.environ["FORCE_COLOR"] = "1"
    try:
        painted = output.safe(output.paint(text, output.RED))
        other = output.safe(text)
    finally:
        del os.environ["FORCE_COLOR"]
    assert painted == f"\x1b[31m{printable(text)}\x1b[0m"
    assert "\x1b" not in other


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    name = "job\x1b[31m.py"
    (folder / name).write_text(JOB)
    command = [sys.executable, "-m", "rearview", "run", "-q", name, EVIL.replace("\0", "")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def on_a_terminal(folder, *words):
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(ours)
    process.wait()
    return seen.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


@pytest.mark.parametrize(
    "words",
    [
        *(("runs",), ("show",), ("table",), ("table", "plain"), ("sql", "select * from records")),
        *(("table", "plain", "--format", "csv"), ("table", "plain", "--format", "json")),
        *(("table", "plain", "--format", "markdown"), ("runs", "--json"), ("table", EVIL[:8])),
        *(("show", "\x1b[31mnone"), ("backfill", "\x1b]0;x\x07"), ("nonsense\x1b[2J",)),
    ],
    ids=lambda words: " ".join(words).encode("unicode_escape").decode(),
)
def test_no_command_lets_a_control_through(project, words):
    seen = on_a_terminal(project, *words)
    # a spinner of our own may move the cursor; nothing else may
    rest = OURS.sub("", re.sub(r"\r?\x1b\[(\?25[lh]|2K|1A|[0-9;]*m)|\r", "", seen))
    assert not UNSAFE.search(rest), rest.encode("unicode_escape")
    for part in ("\x1b[31mred", "\x1b[8m", "\x1b[2J", "\x1b]0;"):
        assert part not in seen


def test_markup_is_text(project):
    assert "[red]x[/red]" in on_a_terminal(project, "table", "plain")
