import sys

from rearview.cli import progress
from rearview.past import Event


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_nothing_is_said_in_the_first_two_seconds(capsys):
    clock = Clock()
    bar = progress.Bar(clock=clock)
    clock.now = 1.9
    bar(Event("progress", 0, 2, "r", 0.5))
    bar.tick()
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_line_comes_now_and_then(capsys):
    clock = Clock()
    bar = progress.Bar(clock=clock)
    for clock.now in (5.0, 12.0, 13.0, 25.0):
        bar(Event("finished", 0, 9, "r", clock.now / 100, left=30.0))
        bar.tick()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "rearview: 12% done, 2 of 9 segments, about 30.0 s left",
        "rearview: 25% done, 4 of 9 segments, about 30.0 s left",
    ]


def test_quiet_watches_nothing():
    with progress.Bar(quiet=True) as bar:
        assert not bar._thread.is_alive()


def test_a_terminal_gets_a_bar_that_goes_away(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    clock = Clock()
    with progress.Bar(clock=clock) as bar:
        clock.now = 3.0
        bar(Event("started", 0, 2, "r", 0.5))
        bar.tick()
    assert "segment 1 of 2" in capsys.readouterr().err


def test_waiting_is_announced_only_when_it_lasts(capsys, monkeypatch):
    with progress.waiting("reading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    said = progress.threading.Event()
    monkeypatch.setattr(progress.show, "said", lambda text: said.set())
    with progress.waiting("reading"):
        assert said.wait(10)
