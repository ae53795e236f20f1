import pytest

from rearview.energy import (
    Account,
    EnergyLog,
    EnergyReading,
    Forecast,
    GridSample,
    Meter,
    RunInterval,
    report,
)
from rearview.energy.meter import process_cpu_seconds

HOUR = 3600
GRID = Forecast.of(
    "x", "", [GridSample(n * HOUR, grams=g) for n, g in enumerate([400.0, 100.0, 200.0])], fetched=0
)


def test_grams_are_those_of_the_hours_in_which_the_run_ran():
    ran = [RunInterval(HOUR, 2 * HOUR, 2.0, "RAPL")]
    found = report(ran, GRID, requested=0)
    assert (found.kwh, found.grams, found.grams_at_once, found.saved) == (2.0, 200.0, 800.0, 600.0)


def test_the_report_says_if_waiting_caused_more_co2():
    ran = [RunInterval(2 * HOUR, 3 * HOUR, 1.0, "RAPL")]
    assert report(ran, GRID, requested=HOUR).saved == -100.0


def test_hours_of_which_nothing_is_known_are_not_made_up():
    found = report([RunInterval(9 * HOUR, 10 * HOUR, 1.0, "RAPL")], GRID, requested=0)
    assert found.grams is None
    assert found.saved is None
    assert found.kwh == 1.0


def test_notes_survive_a_torn_line(tmp_path):
    account = Account(tmp_path / "sub" / "energy.jsonl")
    account.note_request(0)
    account.grid(GRID)
    account.on(RunInterval(HOUR, 2 * HOUR, 2.0, "RAPL"))
    account.note_request(HOUR)  # started again: the first time counts
    account.on(RunInterval(2 * HOUR, 3 * HOUR, 1.0, "estimate: 10 W per busy core"))
    with account.path.open("a") as file:
        file.write('{"format": 1, "on": {"beg')
    found = account.report()
    assert found.kwh == 3.0
    assert found.grams == 2 * 100 + 1 * 200
    assert found.grams_at_once == pytest.approx(3 * 250)
    assert found.how == ("RAPL", "estimate: 10 W per busy core")


def test_an_account_that_was_never_written_is_empty(tmp_path):
    found = Account(tmp_path / "none").report()
    assert (found.kwh, found.saved) == (0, None)


def zone(folder, name, energy, full=10**9):
    (folder / name).mkdir(parents=True)
    (folder / name / "energy_uj").write_text(str(energy))
    (folder / name / "max_energy_range_uj").write_text(str(full))
    return folder / name / "energy_uj"


def test_rapl_is_summed_over_packages_not_their_parts_and_wraps(tmp_path):
    first = zone(tmp_path, "intel-rapl:0", 999_000_000)
    second = zone(tmp_path, "intel-rapl:1", 0)
    part = zone(tmp_path, "intel-rapl:0:0", 0)
    meter = Meter(rapl=tmp_path, cards=lambda: None)
    first.write_text("999999")  # passed its end: 2 J
    second.write_text("1000000")
    part.write_text("5000000")
    reading = meter.read()
    assert reading.how == "RAPL"
    assert reading.kwh * 3.6e6 == pytest.approx(3.0)


def test_cards_are_added(tmp_path):
    joules = iter([100.0, 460.0])
    spent = iter([0.0, 36.0])
    meter = Meter(rapl=tmp_path, cards=lambda: next(joules), cpu_seconds=lambda: next(spent))
    reading = meter.read()
    assert reading.kwh * 3.6e6 == pytest.approx(360 + 360)
    assert reading.how == "estimate: 10 W per busy core + NVML"


def test_on_this_machine_the_meter_reads_energy_and_says_how():
    meter = Meter()
    sum(n * n for n in range(200_000))
    reading = meter.read()
    assert reading.kwh >= 0
    assert reading.how


def test_the_work_of_children_that_still_run_is_counted():
    import subprocess
    import sys

    code = "sum(n * n for n in range(10**7)); print(flush=True); input()"
    before = process_cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert process_cpu_seconds() - before >= 0.1
        assert process_cpu_seconds(child.pid) >= 0.1
        child.communicate(b"\n")
    assert process_cpu_seconds() - before >= 0.1
    assert process_cpu_seconds(child.pid) == 0


def test_time_asleep_is_not_time_on(tmp_path):
    now, slept = [0.0], [0.0]

    class Kilowatt:
        def read(self):
            return EnergyReading((now[0] - slept[0]) / HOUR, "test")

    account = Account(tmp_path / "energy.jsonl")
    used = EnergyLog(account, meter=Kilowatt, clock=lambda: now[0], slept=lambda: slept[0])
    now[0] = 30.0
    used.beat()  # too soon
    assert account.report().intervals == ()
    now[0], slept[0] = 10 * HOUR, 9 * HOUR
    used.beat()
    assert account.report().intervals == (RunInterval(9 * HOUR, 10 * HOUR, 1.0, "test"),)
    used.note()  # no time has passed
    assert len(account.report().intervals) == 1
