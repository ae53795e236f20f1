import pytest

from energy.grid import HOUR, Grid, serving
from rearview.energy import ElectricityMaps, EnergyCharts, WattTime, open_source
from rearview.errors import UsageError

NOW = 1_750_000_000


class Clock:
    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def grid():
    return Grid(NOW)


@pytest.fixture
def url(grid):
    with serving(grid) as url:
        yield url


def test_energy_charts_says_share_and_light_and_who_is_to_be_credited(url, clock):
    outlook = EnergyCharts(url=url, clock=clock).outlook()
    assert outlook.problem == ""
    assert (outlook.at(NOW).share, outlook.at(NOW).light) == (40.5, 1)
    assert "Fraunhofer ISE" in outlook.attribution


def test_a_null_leaves_its_hour_out_and_a_share_above_100_is_valid(url, clock):
    outlook = EnergyCharts(url=url, clock=clock).outlook()
    assert outlook.at(NOW + 2 * HOUR).share == 104.2
    assert outlook.at(NOW + 2 * HOUR).intensity == 12.0
    assert len(outlook.samples) == 7


def test_when_the_signal_has_only_nulls_the_forecast_is_asked(url, clock, grid):
    grid.shares = grid.lights = [None] * 8
    outlook = EnergyCharts(url=url, clock=clock).outlook()
    assert outlook.at(NOW).share == 50.0
    assert outlook.substitute


def test_past_samples_come_from_public_power(url, clock, grid):
    outlook = EnergyCharts(url=url, clock=clock).measured(NOW, NOW + HOUR)
    assert outlook.at(NOW).share == 40.5
    assert grid.asked[-1][1]["start"] == str(NOW)
    grid.fault = (500, {})
    assert EnergyCharts(url=url, clock=clock).measured(NOW, NOW).problem


def test_electricity_maps_says_grams(url, clock):
    outlook = ElectricityMaps("DE", token="secret", url=url, clock=clock).outlook()
    assert outlook.at(NOW).grams == 380
    assert outlook.at(NOW + 2 * HOUR).grams == 90


def test_watttime_says_grams_from_pounds(url, clock):
    outlook = WattTime(user="me", password="pw", url=url, clock=clock).outlook()
    assert outlook.at(NOW).grams == pytest.approx(380)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((500, {}), "answered 500"),
        ((422, {"detail": [{"msg": "unknown country"}]}), "answered 422.*unknown country"),
        ((429, {}, {"Retry-After": "7200"}), "answered 429"),
        ((200, b"<html>maintenance</html>"), "JSONDecodeError"),
        ((200, {"unix_seconds": [], "share": [], "substitute": False}), "without a single value"),
        ((200, {"unix_seconds": None, "share": None}), "without a single value"),
        ((200, []), "TypeError"),
        ("hang", "imed? ?out"),
    ],
)
def test_every_failure_is_a_problem_and_not_an_exception(url, clock, grid, fault, said):
    import re

    source = EnergyCharts(url=url, clock=clock, timeout=0.3)
    grid.fault = fault
    outlook = source.outlook()
    assert outlook.samples == ()
    assert re.search(said, outlook.problem)


def test_a_server_that_is_not_there_is_a_problem(clock):
    outlook = EnergyCharts(url="http://127.0.0.1:9", clock=clock).outlook()
    assert "did not answer" in outlook.problem


@pytest.mark.parametrize(
    "source",
    [lambda url: ElectricityMaps(token="x", url=url), lambda url: WattTime(user="x", url=url)],
)
def test_wrong_credentials_are_a_problem(url, source):
    assert "answered 40" in source(url).outlook().problem


def test_an_earlier_answer_stays_when_a_later_one_fails(url, clock, grid):
    source = EnergyCharts(url=url, clock=clock)
    first = source.outlook()
    grid.fault = (503, {})
    clock.now += 700
    later = source.outlook()
    assert later.samples == first.samples
    assert "503" in later.problem


def test_an_old_answer_says_nothing_about_a_time_it_does_not_cover(url, clock, grid):
    source = EnergyCharts(url=url, clock=clock)
    source.outlook()
    grid.fault = (503, {})
    clock.now += 48 * HOUR
    assert source.outlook().at(clock.now) is None


def test_a_source_is_asked_rarely_and_a_rate_limit_is_respected(url, clock, grid):
    source = EnergyCharts(url=url, clock=clock, pause=600)
    for _ in range(5):
        source.outlook()
    assert len(grid.asked) == 1
    grid.fault = (429, {}, {"Retry-After": "7200"})
    clock.now += 601
    source.outlook()
    clock.now += 3600
    source.outlook()
    assert len(grid.asked) == 2
    grid.fault = None
    clock.now += 3601
    assert source.outlook().problem == ""


def test_a_cache_file_spares_the_service_and_a_broken_cache_file_is_ignored(
    url, clock, grid, tmp_path
):
    cache = tmp_path / "cache.json"
    first = EnergyCharts(url=url, clock=clock, cache=cache).outlook()
    second = EnergyCharts(url=url, clock=clock, cache=cache).outlook()
    assert second.samples == first.samples
    assert len(grid.asked) == 1
    EnergyCharts("fr", url=url, clock=clock, cache=cache).outlook()
    assert grid.asked[-1][1]["country"] == "fr"
    cache.write_text("{")
    assert EnergyCharts(url=url, clock=clock, cache=cache).outlook().problem == ""


def test_sources_go_by_name():
    assert open_source("energy-charts:at").country == "at"
    assert open_source("watttime").region == "CAISO_NORTH"
    with pytest.raises(UsageError, match="energy-charts"):
        open_source("crystal-ball")


def test_every_source_returns_past_samples(url, clock):
    for source in (
        EnergyCharts(url=url, clock=clock),
        ElectricityMaps(url=url, token="secret", clock=clock),
        WattTime(url=url, user="me", password="pw", clock=clock),
    ):
        found = source.measured(clock(), clock() + 3600)
        assert found.problem == ""
        assert len(found.samples) >= 7
    refused = ElectricityMaps(url=url, token="wrong", clock=clock).measured(0, 1)
    assert "answered 401" in refused.problem
