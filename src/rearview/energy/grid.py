"""CO2 data of the power grid: samples and forecasts from energy-charts, Electricity Maps and WattTime.

A `Source` sends few requests, keeps the last answer in a file, and does not raise if a request fails.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rearview.durable_files import publish
from rearview.errors import UsageError

WIND = 12.0
GAS = 490.0
"""`WIND` and `GAS`: grams of CO2 per kWh of a plant's life cycle, medians of IPCC AR5 (WG III, annex III, 2014)."""

STALE = 6 * 3600.0
"""Maximum number of seconds for which a sample is valid."""


@dataclass(frozen=True, slots=True)
class GridSample:
    """The state of the grid from `start` until the next sample; unknown values are None."""

    start: float
    """Time at which this state begins, in seconds since 1970."""
    share: float | None = None
    """Renewable share of the load in percent; above 100 while power is exported."""
    light: int | None = None
    """Traffic light of the source: -1 grid congested, 0 red, 1 yellow, 2 green."""
    grams: float | None = None
    """Grams of CO2 per kWh that the source states."""

    @property
    def intensity(self) -> float | None:
        """Grams of CO2 per kWh: as stated, else estimated from the renewable share or the traffic light, else None.

        The estimate assumes that all power that is not renewable comes from gas, so it never
        overstates a saving in a grid with coal.

        >>> GridSample(0, share=50.0).intensity
        251.0
        """
        if self.grams is not None:
            return self.grams
        if self.share is not None:
            renewable = min(max(self.share, 0.0), 100.0) / 100
            return renewable * WIND + (1 - renewable) * GAS
        if self.light is not None:
            return {-1: GAS, 0: GAS, 1: (GAS + WIND) / 2, 2: WIND}.get(self.light)
        return None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The samples of one source, in order of time, and the problem if the last request for samples failed."""

    source: str
    attribution: str
    samples: tuple[GridSample, ...] = ()
    fetched: float = 0.0
    substitute: bool = False
    """Whether the source says that it has estimated the values."""
    problem: str = ""
    """Why there are no new samples; empty if the last request succeeded."""

    @classmethod
    def of(
        cls,
        source: str,
        attribution: str,
        samples: Iterable[GridSample],
        *,
        fetched: float,
        substitute: bool = False,
    ) -> Forecast:
        """Return a forecast of the samples whose `intensity` is known, sorted; with a `problem` if there are none."""
        useful = sorted(
            (sample for sample in samples if sample.intensity is not None),
            key=lambda sample: sample.start,
        )
        problem = "" if useful else f"{source} answered without a single value"
        return cls(source, attribution, tuple(useful), fetched, substitute, problem)

    def at(self, time: float) -> GridSample | None:
        """Return the sample that is valid at `time`, or None if no sample is.

        A sample is valid until the next sample, and at most `STALE` seconds. The last sample is valid as long as the
        sample before it, or for an hour if it is the only sample.
        """
        index = bisect_right([sample.start for sample in self.samples], time) - 1
        if index < 0:
            return None
        return self.samples[index] if time < self.end_of(index) else None

    @property
    def end(self) -> float:
        """Time at which the last sample stops being valid (seconds since 1970), or 0 if there are no samples."""
        return self.end_of(len(self.samples) - 1) if self.samples else 0.0

    def end_of(self, index: int) -> float:
        """Return the time at which the sample at `index` stops being valid, in seconds since 1970."""
        samples = self.samples
        step = samples[-1].start - samples[-2].start if len(samples) > 1 else 3600.0
        step = min(step, STALE)
        if index + 1 < len(samples):
            return min(samples[index + 1].start, samples[index].start + STALE)
        return samples[index].start + step


# `Source._get` imports urllib, because a run that only measures energy does not need it


class Source(ABC):
    """A web service with data about the grid, which gets at most one request every `pause` seconds.

    `outlook()` never raises: if a request fails, it returns the last forecast, or an empty one, with a `problem`.
    `cache` is a file for the last forecast, so that many short programs send one request.
    """

    name = ""
    attribution = ""

    def __init__(
        self,
        url: str,
        *,
        pause: float = 600.0,
        timeout: float = 20.0,
        cache: Path | None = None,
        opener: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url.rstrip("/")
        self.pause, self.timeout, self.cache = pause, timeout, cache
        self._opener, self._clock = opener, clock
        self._last = self._empty("not asked yet")
        self._not_before = 0.0
        self._load_cache()

    @abstractmethod
    def _fetch(self) -> Forecast:
        """Request a new forecast from the service and return it; may raise any exception."""

    @abstractmethod
    def _fetch_measured(self, begin: float, end: float) -> Forecast:
        """Request the measured samples from `begin` to `end` (seconds since 1970); may raise any exception."""

    def outlook(self) -> Forecast:
        """Return the newest forecast; request a new one if the last request was `pause` seconds ago; never raise."""
        now = self._clock()
        if now < self._not_before:
            return self._last
        self._not_before = now + self.pause
        try:
            new_forecast = self._fetch()
        except Exception as exc:  # the run continues after any failure of the server
            self._not_before = now + max(self.pause, _retry_after(exc))
            self._set_problem(self._problem(exc))
        else:
            if new_forecast.samples:
                self._last = new_forecast
                self._save_cache()
            else:
                self._set_problem(new_forecast.problem)
        return self._last

    def measured(self, begin: float, end: float) -> Forecast:
        """Return the measured samples from `begin` to `end`, or a forecast without samples that has the problem."""
        try:
            return self._fetch_measured(begin, end)
        except Exception as exc:
            return self._empty(self._problem(exc))

    def _problem(self, exc: Exception) -> str:
        code = getattr(exc, "code", None)
        if code is not None:
            return f"{self.name} answered {code}: {_detail(exc)}"
        return f"{self.name} did not answer: {type(exc).__name__}: {exc}"

    def _set_problem(self, problem: str) -> None:
        self._last = replace(self._last, problem=problem)

    def _empty(self, problem: str) -> Forecast:
        return Forecast(self.name, self.attribution, problem=problem)

    def _get(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Any:
        import urllib.parse
        import urllib.request

        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(address, headers={"User-Agent": "rearview", **headers})  # noqa: S310
        opener = self._opener or urllib.request.urlopen
        with opener(request, timeout=self.timeout) as answer:
            return json.loads(answer.read(16 << 20))

    def _forecast(self, samples: list[GridSample], *, substitute: bool = False) -> Forecast:
        return Forecast.of(
            self.name, self.attribution, samples, fetched=self._clock(), substitute=substitute
        )

    def _load_cache(self) -> None:
        if self.cache is None:
            return
        try:
            cached = json.loads(self.cache.read_text("utf-8"))
            if cached["key"] != self._key():
                return
            samples = [GridSample(*values) for values in cached["samples"]]
            self._last = replace(self._forecast(samples), fetched=cached["fetched"])
            self._not_before = cached["fetched"] + self.pause
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _save_cache(self) -> None:
        if self.cache is None:
            return
        samples = [(s.start, s.share, s.light, s.grams) for s in self._last.samples]
        text = json.dumps({"key": self._key(), "fetched": self._last.fetched, "samples": samples})
        with contextlib.suppress(OSError):
            publish(self.cache, text.encode(), durable=False)

    def _key(self) -> str:
        return f"{self.name} {self.url}"


def _retry_after(exc: Exception) -> float:
    headers = getattr(exc, "headers", None)
    text = headers.get("Retry-After", "") if headers is not None else ""
    return float(text) if text.isdigit() else 0.0


def _detail(exc: Any) -> str:
    try:
        return exc.read(400).decode("utf-8", "replace") or str(exc.reason)
    except (OSError, ValueError, AttributeError):
        return str(getattr(exc, "reason", exc))


POUNDS_PER_MWH = 0.45359237
"""Factor from pounds per MWh to grams per kWh."""


class EnergyCharts(Source):
    """Source of the traffic light and renewable share of European countries, by Fraunhofer ISE; free of charge."""

    name = "energy-charts"
    attribution = "Data: Energy-Charts, Fraunhofer ISE (energy-charts.info), CC BY 4.0"

    def __init__(
        self, country: str = "de", *, url: str = "https://api.energy-charts.info", **options: Any
    ) -> None:
        self.country = country
        super().__init__(url, **options)

    def _key(self) -> str:
        return f"{super()._key()} {self.country}"

    def _fetch(self) -> Forecast:
        query = {"country": self.country}
        answer = self._get("/signal", query, {})
        times = answer["unix_seconds"] or []
        shares, lights = answer.get("share") or [], answer.get("signal") or []
        samples = [
            GridSample(float(when), _number(_nth(shares, n)), _light(_nth(lights, n)))
            for n, when in enumerate(times)
        ]
        if not any(sample.intensity is not None for sample in samples):
            answer = self._get("/ren_share_forecast", query, {})
            samples = [
                GridSample(float(when), _number(_nth(answer.get("ren_share") or [], n)))
                for n, when in enumerate(answer["unix_seconds"] or [])
            ]
        return self._forecast(samples, substitute=bool(answer.get("substitute")))

    def _fetch_measured(self, begin: float, end: float) -> Forecast:
        query = {"country": self.country, "start": str(int(begin)), "end": str(int(end) + 1)}
        answer = self._get("/public_power", query, {})
        series_by_name = {series["name"]: series["data"] for series in answer["production_types"]}
        shares = series_by_name.get("Renewable share of load") or []
        return self._forecast(
            [
                GridSample(float(when), _number(_nth(shares, n)))
                for n, when in enumerate(answer["unix_seconds"] or [])
            ]
        )


class ElectricityMaps(Source):
    """Source of the grams of CO2 per kWh in a zone; needs a token (`ELECTRICITYMAPS_TOKEN`)."""

    name = "electricity-maps"
    attribution = "Data: Electricity Maps (electricitymaps.com)"

    def __init__(
        self,
        zone: str = "DE",
        *,
        token: str | None = None,
        url: str = "https://api.electricitymaps.com",
        **options: Any,
    ) -> None:
        self.zone = zone
        self._token = token or os.environ.get("ELECTRICITYMAPS_TOKEN", "")
        super().__init__(url, **options)

    def _key(self) -> str:
        return f"{super()._key()} {self.zone}"

    def _fetch(self) -> Forecast:
        import urllib.error

        query, headers = {"zone": self.zone}, {"auth-token": self._token}
        points = [self._get("/v3/carbon-intensity/latest", query, headers)]
        # some subscriptions have no forecast
        with contextlib.suppress(urllib.error.HTTPError, KeyError):
            points += self._get("/v3/carbon-intensity/forecast", query, headers)["forecast"]
        return self._forecast(_samples(points))

    def _fetch_measured(self, begin: float, end: float) -> Forecast:
        query = {"zone": self.zone, "start": _iso_time(begin), "end": _iso_time(end + 3600)}
        headers = {"auth-token": self._token}
        answer = self._get("/v3/carbon-intensity/past-range", query, headers)
        return self._forecast(_samples(answer["data"]))


class WattTime(Source):
    """Source of the marginal emissions of a region; needs an account (`WATTTIME_USER`, `WATTTIME_PASSWORD`)."""

    name = "watttime"
    attribution = "Data: WattTime (watttime.org)"

    def __init__(
        self,
        region: str = "CAISO_NORTH",
        *,
        user: str | None = None,
        password: str | None = None,
        url: str = "https://api.watttime.org",
        **options: Any,
    ) -> None:
        self.region = region
        self._user = user or os.environ.get("WATTTIME_USER", "")
        self._password = password or os.environ.get("WATTTIME_PASSWORD", "")
        super().__init__(url, **options)

    def _key(self) -> str:
        return f"{super()._key()} {self.region}"

    def _fetch(self) -> Forecast:
        return self._series("/v3/forecast", {})

    def _fetch_measured(self, begin: float, end: float) -> Forecast:
        return self._series(
            "/v3/historical", {"start": _iso_time(begin), "end": _iso_time(end + 300)}
        )

    def _series(self, path: str, span: Mapping[str, str]) -> Forecast:
        basic = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        token = self._get("/login", {}, {"Authorization": f"Basic {basic}"})["token"]
        query = {"region": self.region, "signal_type": "co2_moer", **span}
        answer = self._get(path, query, {"Authorization": f"Bearer {token}"})
        samples = []
        for point in answer["data"]:
            pounds = _number(point.get("value"))
            grams = None if pounds is None else pounds * POUNDS_PER_MWH
            samples.append(GridSample(_timestamp(point["point_time"]), grams=grams))
        return self._forecast(samples)


SOURCES: dict[str, type[Source]] = {
    "energy-charts": EnergyCharts,
    "electricity-maps": ElectricityMaps,
    "watttime": WattTime,
}


def open_source(text: str = "energy-charts:de", **options: Any) -> Source:
    """Return the source for a text such as `energy-charts:de` or `electricity-maps:FR`.

    The name of the service comes first, then a country, zone or region. After an `@` may follow the address of
    a proxy or cache of the service. `options` go to the class of the source.

    >>> open_source("energy-charts:at@http://localhost:8000").url
    'http://localhost:8000'
    """
    source_text, _, url = text.partition("@")
    name, _, zone = source_text.partition(":")
    if name not in SOURCES:
        raise UsageError(
            f"There is no source of grid data {name!r}. Choose one of: {', '.join(SOURCES)}, with "
            "the place after a colon, for instance energy-charts:de.",
            slug="energy-source",
        )
    if url:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"The address {url!r} of the source {source_text!r} is not a web address. Write it like "
                f"{source_text}@https://proxy.example.org/grid.",
                slug="energy-source",
            )
        options = {"url": url, **options}
    return SOURCES[name](zone, **options) if zone else SOURCES[name](**options)


def _samples(points: Iterable[Mapping[str, Any]]) -> list[GridSample]:
    return [
        GridSample(_timestamp(point["datetime"]), grams=_number(point.get("carbonIntensity")))
        for point in points
    ]


def _nth(values: list[Any], n: int) -> Any:
    return values[n] if n < len(values) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # noqa: PLR0124
        return None
    return float(value)


def _light(value: Any) -> int | None:
    return int(value) if value in {-1, 0, 1, 2} else None


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _iso_time(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
