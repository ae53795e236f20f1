from datetime import datetime

import click
import pytest

from rearview.cli.green import moment

NOON = datetime(2026, 5, 1, 12, 0).astimezone().timestamp()


def test_a_time_of_day_is_the_next_one():
    assert moment("18:30", NOON) == NOON + 6.5 * 3600
    assert moment("08:00", NOON) == NOON + 20 * 3600


def test_a_date_is_that_date_and_a_span_counts_from_when_it_was_asked_for():
    assert moment("2026-05-02T12:00", NOON) == NOON + 24 * 3600
    assert moment("90m", NOON) == NOON + 5400


def test_what_is_no_time_is_told(command, tmp_path, monkeypatch):
    with pytest.raises(click.BadParameter, match="'tomorrow' is not a time"):
        moment("tomorrow", NOON)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    code, _, err = command("run", "--green", "--by", "tomorrow", "train.py")
    assert code == 2
    assert "is not a time" in err


def test_options_of_a_green_run_need_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    code, _, err = command("run", "--share", "60", "train.py")
    assert code == 2
    assert "go with --green" in err
