import json
import time

import pytest

from energy.grid import HOUR, Grid, serving
from rearview.energy import Account, Forecast, GridSample, RunInterval
from rearview.store.project import Project
from rearview.store.runs import ACCOUNT, Runs


@pytest.fixture
def account(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = Runs(Project.create(tmp_path))
    run = runs.reserve()
    folder = runs.start(run, {"script": "train.py"})
    runs.end(run, 0)
    return Account(folder / ACCOUNT)


def test_energy_now_shows_the_power_and_whether_a_green_run_would_start(command):
    with serving(Grid(time.time())) as url:
        code, out, _ = command("energy", "now", "--grid", f"energy-charts:de@{url}")
        assert code == 1
        assert "renewable  40 %" in out
        assert "waits: not green enough: 40 % renewable, until" in out
        assert "Fraunhofer" in out
        code, out, _ = command(
            "energy", "now", "--json", "--share", "30", "--grid", f"energy-charts@{url}"
        )
    found = json.loads(out)
    assert code == 0
    assert (found["green"], found["share"], found["stated"]) == (True, 40.5, False)
    assert len(found["samples"]) == 7  # one says nothing


def test_a_grid_service_that_is_down_is_reported(command):
    code, out, _ = command("energy", "now", "--grid", "energy-charts:de@http://127.0.0.1:9")
    assert code == 0
    assert "not held back: energy-charts did not answer" in out


def test_an_invalid_address_is_reported(command):
    code, _, err = command("energy", "now", "--grid", "energy-charts:de@ftp://here")
    assert code == 2
    assert "#energy-source" in err


def test_the_energy_report_has_the_hours_of_a_run_and_the_saved_co2(command, account):
    begun = 1_750_000_000
    samples = [GridSample(begun + n * HOUR, grams=g) for n, g in enumerate([400.0, 300.0, 100.0])]
    account.note_request(begun)
    account.grid(Forecast.of("x", "Data: X", samples, fetched=1))
    for minute in range(60):
        begin = begun + 2 * HOUR + minute * 60
        account.on(RunInterval(begin, begin + 60, 0.01, "RAPL"))
    code, out, _ = command("energy", "report", "--offline", "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found["on"]) == 1
    assert found["seconds"] == HOUR
    assert found["kwh"] == pytest.approx(0.6)
    assert found["grams_saved"] == pytest.approx(0.6 * 300)
    _, out, _ = command("energy", "report", "--offline")
    assert "0.6 kWh in 1 h 0 min (RAPL)" in out
    assert "180 g against 240 g without waiting" in out
    assert "Data: X" in out


def test_the_report_requests_grid_data_that_was_measured_after_the_run(command, account):
    grid = Grid(begun := time.time() - 4 * HOUR)
    grid.shares = [0.0, 100.0, *[50.0] * 6]  # from an hour before the run on
    account.note_request(begun)
    account.on(RunInterval(begun + 60, begun + 120, 1.0, "RAPL"))
    with serving(grid) as url:
        source = f"energy-charts:de@{url}"
        code, out, _ = command("energy", "report", "--json", "--grid", source)
    assert code == 0
    assert json.loads(out)["grams"] == pytest.approx(12.0)
    assert grid.asked[0][0] == "/public_power"
    code, out, _ = command("energy", "report", "--grid", "energy-charts:de@http://127.0.0.1:9")
    assert "not known: energy-charts did not answer" in out


def test_a_run_without_an_energy_account_is_reported(command, account):
    code, _, err = command("energy", "report", "--offline")
    assert code == 2
    assert "kept no account" in err
