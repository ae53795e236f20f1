import subprocess
import sys
import time
from pathlib import Path

import pytest

from energy.grid import HOUR, Grid, serving
from rearview import Checkpointer
from rearview.energy import Account, EnergyCharts, EnergyReading, Gate, Rule

NOW = 1_750_000_000
SRC = Path(__file__).parents[2] / "src"


class Clock:
    def __init__(self):
        self.now = float(NOW)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FixedPower:
    """One kilowatt, all the time."""

    def __init__(self, clock):
        self.clock, self.begun = clock, clock.now

    def read(self):
        return EnergyReading((self.clock.now - self.begun) / HOUR, "test")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def url():
    with serving(Grid(NOW)) as url:
        yield url


def gate(url, clock, tmp_path, rule=None):
    source = EnergyCharts(url=url, clock=clock)
    return Gate(
        source,
        rule,
        account=Account(tmp_path / "energy.jsonl"),
        meter=lambda: FixedPower(clock),
        clock=clock,
        sleep=clock.sleep,
    )


def test_a_green_run_waits_pauses_resumes_and_accounts_for_itself(url, clock, tmp_path):
    told = []
    codes = []
    for _ in range(3):
        door = gate(url, clock, tmp_path)
        door.wait(told.append)
        began = clock.now
        with Checkpointer(
            tmp_path / "ck", checkpoint_every=None, pause_when=door.closed, signals=()
        ) as one:
            value = one.restore(0)
            try:
                while value < 300:
                    clock.now += 60
                    value += 1
                    one.step(value)
            except SystemExit as left:
                codes.append((left.code, (began - NOW) / HOUR, (clock.now - NOW) / HOUR))
                clock.now += HOUR
                one.signals.clear()  # this process continues: it must be possible to interrupt it
                continue
        break
    # green from hour 2, yellow until hour 5, then red, then congested, then nothing is known
    assert codes == [(85, 2.0, 5.0)]
    assert told[0].reason == "not green enough: 40 % renewable"
    found = door.account.report()
    assert found.kwh == pytest.approx(300 / 60, abs=0.2)
    assert "Fraunhofer" in found.attribution[0]


def test_hours_already_done_by_earlier_executions_count(url, clock, tmp_path):
    rule = Rule(hours=2, deadline=NOW + 20 * HOUR)
    first = gate(url, clock, tmp_path, rule)
    first.wait()
    assert clock.now == NOW + 2 * HOUR
    for _ in range(60):
        clock.now += 60
        assert not first.closed()
    assert gate(url, clock, tmp_path, rule)._computed_seconds == pytest.approx(HOUR)


def test_when_the_service_is_down_the_run_is_not_held_back(clock, tmp_path):
    door = gate("http://127.0.0.1:9", clock, tmp_path)
    door.wait()
    assert clock.now == NOW
    clock.now += 3600
    assert not door.closed()


def probe(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "rearview.energy.htcondor_cron", *arguments],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_probe_of_a_node_speaks_classad():
    with serving(Grid(time.time())) as url:
        out = probe("--url", url, "--share", "90")
    lines = dict(line.split(" = ", 1) for line in out.splitlines()[:-1])
    assert out.endswith("\n-\n")
    assert lines["GreenStart"] == lines["GreenContinue"] == "False"
    assert lines["GreenShare"] == "40.5"
    assert lines["GreenReason"].startswith('"not green enough')


def test_the_probe_lets_a_node_work_when_nothing_is_known():
    out = probe("--url", "http://127.0.0.1:9")
    assert "GreenStart = True\n" in out
    assert "GreenKnown = False\n" in out
