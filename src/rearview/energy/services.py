"""Who is asked about the grid: energy-charts, Electricity Maps, WattTime."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rearview.energy.outlook import Outlook, Sample
from rearview.energy.sources import Source
from rearview.errors import UsageError

POUNDS_PER_MWH = 0.45359237
"""Grams per kWh in one pound per MWh."""


class EnergyCharts(Source):
    """The traffic light and renewable share of Fraunhofer ISE; free, for Europe."""

    name = "energy-charts"
    attribution = "Data: Energy-Charts, Fraunhofer ISE (energy-charts.info), CC BY 4.0"

    def __init__(
        self, country: str = "de", *, url: str = "https://api.energy-charts.info", **options: Any
    ) -> None:
        self.country = country
        super().__init__(url, **options)

    def _key(self) -> str:
        return f"{super()._key()} {self.country}"

    def _ask(self) -> Outlook:
        query = {"country": self.country}
        answer = self._get("/signal", query, {})
        times = answer["unix_seconds"] or []
        shares, lights = answer.get("share") or [], answer.get("signal") or []
        samples = [
            Sample(float(when), _number(_nth(shares, n)), _light(_nth(lights, n)))
            for n, when in enumerate(times)
        ]
        if not any(sample.intensity is not None for sample in samples):
            answer = self._get("/ren_share_forecast", query, {})
            samples = [
                Sample(float(when), _number(_nth(answer.get("ren_share") or [], n)))
                for n, when in enumerate(answer["unix_seconds"] or [])
            ]
        return self._of(samples, substitute=bool(answer.get("substitute")))

    def _look_back(self, begin: float, end: float) -> Outlook:
        query = {"country": self.country, "start": str(int(begin)), "end": str(int(end) + 1)}
        answer = self._get("/public_power", query, {})
        named = {one["name"]: one["data"] for one in answer["production_types"]}
        shares = named.get("Renewable share of load") or []
        return self._of(
            [
                Sample(float(when), _number(_nth(shares, n)))
                for n, when in enumerate(answer["unix_seconds"] or [])
            ]
        )


class ElectricityMaps(Source):
    """Carbon intensity of a zone; needs a token (`ELECTRICITYMAPS_TOKEN`)."""

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

    def _ask(self) -> Outlook:
        import urllib.error

        query, headers = {"zone": self.zone}, {"auth-token": self._token}
        points = [self._get("/v3/carbon-intensity/latest", query, headers)]
        with contextlib.suppress(urllib.error.HTTPError, KeyError):  # not part of every plan
            points += self._get("/v3/carbon-intensity/forecast", query, headers)["forecast"]
        return self._of(_points(points))

    def _look_back(self, begin: float, end: float) -> Outlook:
        query = {"zone": self.zone, "start": _text(begin), "end": _text(end + 3600)}
        headers = {"auth-token": self._token}
        answer = self._get("/v3/carbon-intensity/past-range", query, headers)
        return self._of(_points(answer["data"]))


class WattTime(Source):
    """Marginal emissions of a region; needs an account (`WATTTIME_USER`, `WATTTIME_PASSWORD`)."""

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

    def _ask(self) -> Outlook:
        return self._series("/v3/forecast", {})

    def _look_back(self, begin: float, end: float) -> Outlook:
        return self._series("/v3/historical", {"start": _text(begin), "end": _text(end + 300)})

    def _series(self, path: str, span: Mapping[str, str]) -> Outlook:
        basic = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        token = self._get("/login", {}, {"Authorization": f"Basic {basic}"})["token"]
        query = {"region": self.region, "signal_type": "co2_moer", **span}
        answer = self._get(path, query, {"Authorization": f"Bearer {token}"})
        samples = []
        for point in answer["data"]:
            pounds = _number(point.get("value"))
            grams = None if pounds is None else pounds * POUNDS_PER_MWH
            samples.append(Sample(_moment(point["point_time"]), grams=grams))
        return self._of(samples)


SOURCES: dict[str, type[Source]] = {
    "energy-charts": EnergyCharts,
    "electricity-maps": ElectricityMaps,
    "watttime": WattTime,
}


def open_source(text: str = "energy-charts:de", **options: Any) -> Source:
    """Return the source that `text` names, such as `energy-charts:de` or `electricity-maps:FR`.

    Another address than the service's own (a proxy, a cache of the site) may follow after an `@`.

    >>> open_source("energy-charts:at@http://localhost:8000").url
    'http://localhost:8000'
    """
    named, _, url = text.partition("@")
    name, _, place = named.partition(":")
    if name not in SOURCES:
        raise UsageError(
            f"There is no source of grid data {name!r}. Choose one of: {', '.join(SOURCES)}, with "
            "the place after a colon, for instance energy-charts:de.",
            slug="energy-source",
        )
    if url:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"The address {url!r} of the source {named!r} is not of the web. Write it like "
                f"{named}@https://proxy.example.org/grid.",
                slug="energy-source",
            )
        options = {"url": url, **options}
    return SOURCES[name](place, **options) if place else SOURCES[name](**options)


def _points(points: Iterable[Mapping[str, Any]]) -> list[Sample]:
    return [
        Sample(_moment(point["datetime"]), grams=_number(point.get("carbonIntensity")))
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


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
