"""Who is asked about the grid: energy-charts, Electricity Maps, WattTime."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rearview.energy.outlook import Outlook, Sample
from rearview.errors import UsageError

POUNDS_PER_MWH = 0.45359237
"""Grams per kWh in one pound per MWh."""


class Source(ABC):
    """A service that is asked at most every `pause` seconds, and whose failures are no failures.

    `outlook()` always returns: the newest answer, an older one with a `problem`, or an empty one.
    `cache` keeps the answer in a file, so that many short programs ask once.
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
        opener: Callable[..., Any] = urllib.request.urlopen,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url.rstrip("/")
        self.pause, self.timeout, self.cache = pause, timeout, cache
        self._opener, self._clock = opener, clock
        self._last = self._empty("not asked yet")
        self._not_before = 0.0
        self._recall()

    @abstractmethod
    def _ask(self) -> Outlook:
        """Return a fresh outlook; may raise anything."""

    def outlook(self) -> Outlook:
        """Return what is known now."""
        now = self._clock()
        if now < self._not_before:
            return self._last
        self._not_before = now + self.pause
        try:
            fresh = self._ask()
        except urllib.error.HTTPError as exc:
            self._not_before = now + max(self.pause, _retry_after(exc))
            self._failed(f"{self.name} answered {exc.code}: {_detail(exc)}")
        except Exception as exc:  # whatever a far server does, the run goes on
            self._failed(f"{self.name} could not be asked: {type(exc).__name__}: {exc}")
        else:
            if fresh.samples:
                self._last = fresh
                self._remember()
            else:
                self._failed(fresh.problem)
        return self._last

    def _failed(self, problem: str) -> None:
        self._last = replace(self._last, problem=problem)

    def _empty(self, problem: str) -> Outlook:
        return Outlook(self.name, self.attribution, problem=problem)

    def _get(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Any:
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(address, headers={"User-Agent": "rearview", **headers})  # noqa: S310
        with self._opener(request, timeout=self.timeout) as answer:
            return json.loads(answer.read(16 << 20))

    def _of(self, samples: list[Sample], *, substitute: bool = False) -> Outlook:
        return Outlook.of(
            self.name, self.attribution, samples, fetched=self._clock(), substitute=substitute
        )

    def _recall(self) -> None:
        if self.cache is None:
            return
        try:
            kept = json.loads(self.cache.read_text("utf-8"))
            if kept["key"] != self._key():
                return
            samples = [Sample(*values) for values in kept["samples"]]
            self._last = replace(self._of(samples), fetched=kept["fetched"])
            self._not_before = kept["fetched"] + self.pause
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _remember(self) -> None:
        if self.cache is None:
            return
        samples = [(s.start, s.share, s.light, s.grams) for s in self._last.samples]
        text = json.dumps({"key": self._key(), "fetched": self._last.fetched, "samples": samples})
        temporary = self.cache.with_name(f".{self.cache.name}.{os.getpid()}")
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(self.cache)
        except OSError:
            return

    def _key(self) -> str:
        return f"{self.name} {self.url}"


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

    def measured(self, begin: float, end: float) -> Outlook:
        """Return the renewable share that was, from /public_power; empty if it cannot be had."""
        query = {"country": self.country, "start": str(int(begin)), "end": str(int(end))}
        try:
            answer = self._get("/public_power", query, {})
            named = {one["name"]: one["data"] for one in answer["production_types"]}
            shares = named.get("Renewable share of load") or []
            samples = [
                Sample(float(when), _number(_nth(shares, n)))
                for n, when in enumerate(answer["unix_seconds"] or [])
            ]
        except Exception as exc:
            return self._empty(f"{self.name} could not be asked: {type(exc).__name__}: {exc}")
        return self._of(samples)


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
        query, headers = {"zone": self.zone}, {"auth-token": self._token}
        points = [self._get("/v3/carbon-intensity/latest", query, headers)]
        with contextlib.suppress(urllib.error.HTTPError, KeyError):  # not part of every plan
            points += self._get("/v3/carbon-intensity/forecast", query, headers)["forecast"]
        return self._of(
            [
                Sample(_moment(point["datetime"]), grams=_number(point.get("carbonIntensity")))
                for point in points
            ]
        )


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
        basic = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        token = self._get("/login", {}, {"Authorization": f"Basic {basic}"})["token"]
        query = {"region": self.region, "signal_type": "co2_moer"}
        answer = self._get("/v3/forecast", query, {"Authorization": f"Bearer {token}"})
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
    """Return the source that `text` names, such as `energy-charts:de` or `electricity-maps:FR`."""
    name, _, place = text.partition(":")
    if name not in SOURCES:
        raise UsageError(
            f"There is no source of grid data {name!r}. Choose one of: {', '.join(SOURCES)}, with "
            "the place after a colon, for instance energy-charts:de.",
            slug="energy-source",
        )
    return SOURCES[name](place, **options) if place else SOURCES[name](**options)


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


def _retry_after(exc: urllib.error.HTTPError) -> float:
    text = exc.headers.get("Retry-After", "") if exc.headers is not None else ""
    return float(text) if text.isdigit() else 0.0


def _detail(exc: urllib.error.HTTPError) -> str:
    try:
        return exc.read(400).decode("utf-8", "replace") or str(exc.reason)
    except (OSError, ValueError):
        return str(exc.reason)
