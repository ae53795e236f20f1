import sys

import pytest

from rearview.cli.terminal import output


@pytest.fixture
def screen(monkeypatch, capsys):
    """A terminal of 60 columns; returns what was shown on it."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    return lambda: capsys.readouterr().out


def test_a_terminal_gets_colour(screen):
    assert output.safe(output.paint("x", output.RED)) == "\x1b[31mx\x1b[0m"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(screen, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert output.paint("x", output.RED) == "x"


def test_colour_can_be_forced_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in output.paint("x", output.RED)
    output.table(
        ["a", "b"], [[output.paint("x", output.RED), "y"], ["long", "z"]], right=[False, True]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [output.click.unstyle(line) for line in lines] == ["a     b", "x     y", "long  z"]


def test_a_table_on_a_terminal_keeps_to_its_width(screen):
    output.table(["name", "text"], [["a", "word " * 30]], right=[False, False])
    shown = screen()
    assert all(len(output.click.unstyle(line)) <= 60 for line in shown.splitlines())
    assert shown.count("word") == 30


def test_a_table_in_a_pipe_keeps_every_row_on_one_line(capsys):
    output.table(["name", "text"], [["a", "word " * 30]], right=[False, False])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_brackets_in_values_are_not_markup(screen):
    output.table(["name"], [["[red]x[/red]"]], right=[False])
    assert "[red]x[/red]" in screen()


def test_labels_are_aligned_and_long_texts_wrap_below_their_first_line(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    output.block([("a", "1\n2"), ("long", "3")])
    assert capsys.readouterr().out == "a     1\n      2\nlong  3\n"
