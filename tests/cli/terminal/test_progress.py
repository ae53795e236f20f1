import json
import sys

from limits import HUNG
from rearview._history import Event, SegmentProgress
from rearview.cli.terminal import progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_no_progress_is_shown_in_the_first_two_seconds(capsys):
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
        bar(Event("proved", 0, 9, "r", clock.now / 100, seconds_left=30.0))
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
    monkeypatch.delenv("NO_COLOR", raising=False)
    clock = Clock()
    with progress.Bar(clock=clock) as bar:
        clock.now = 3.0
        bar(Event("started", 0, 2, "r", 0.5))
        bar.tick()
    assert "0 of 2 segments" in capsys.readouterr().err


def busy(*workers, total=300, done=0.25):
    under_way = tuple(SegmentProgress(k, k, f"run-{k}", 0.5, 10.0, 8.0, 12.0) for k in workers)
    return Event("progress", 0, total, "r", done, seconds_left=90.0, workers=8, under_way=under_way)


def on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_each_worker_has_a_bar_with_its_remaining_and_predicted_time(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    clock = Clock()
    with progress.Bar(clock=clock) as bar:
        clock.now = 3.0
        bar(busy(0, 1))
        bar.tick()
    shown = capsys.readouterr().err
    assert "worker 1: run-0" in shown
    assert "worker 2: run-1" in shown
    assert "12.0 s left, 8.0 s predicted" in shown
    assert "0 of 300 segments" in shown
    assert "about 1 min 30 s left" in shown


def test_bars_do_not_grow_with_the_number_of_segments(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    clock = Clock()
    with progress.Bar(clock=clock) as bar:
        for clock.now in range(3, 303):
            bar(Event("started", int(clock.now), 300, "r", worker=0))
            bar(busy(*range(clock.now % 40)))
            bar(Event("proved", int(clock.now), 300, "r", worker=0))
            if clock.now % 20 == 0:
                bar.tick()
            assert len(bar._bars) <= progress.MAX_BARS + 1
    assert bar._ended == 300


def test_without_colours_there_are_lines(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    clock = Clock()
    bar = progress.Bar(clock=clock)
    clock.now = 11.0
    bar(busy(0, 1))
    bar.tick()
    assert capsys.readouterr().err == (
        "rearview: 25% done, 0 of 300 segments on 8 workers, about 1 min 30 s left\n"
    )


def test_programs_get_a_line_per_event_and_progress_once_a_second(capsys):
    clock = Clock()
    lines = progress.Lines(clock=clock)
    lines(Event("started", 2, 9, "r", seconds=4.0, worker=1))
    for clock.now in (0.0, 0.5, 1.5):
        lines(busy(0))
    lines(Event("rows", 2, 9, "r", worker=1, rows=7))
    lines(Event("failed", 2, 9, "r", 0.5, 3.0, message="w", worker=1, rows=7))
    lines(Event("workers", 0, 9, "r", workers=5))
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in told] == [
        "started", "progress", "progress", "rows", "failed", "workers",
    ]  # fmt: skip
    assert told[0] == {
        "event": "started", "segment": 2, "run": "r", "worker": 1, "predicted": 4.0,
    }  # fmt: skip
    assert told[1]["under_way"][0]["predicted"] == 8.0
    assert told[4]["message"] == "w"
    assert told[5] == {"event": "workers", "workers": 5}


def test_waiting_is_announced_only_when_it_lasts(capsys, monkeypatch):
    with progress.waiting("reading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    said = progress.threading.Event()
    monkeypatch.setattr(progress.output, "said", lambda text: said.set())
    with progress.waiting("reading"):
        assert said.wait(HUNG)
