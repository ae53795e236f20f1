"""How a service is asked about the grid: seldom, with its failures kept from the run."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rearview.energy.outlook import Outlook, Sample

# urllib is imported where somebody is asked: a run that only meters itself does without it


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
        opener: Callable[..., Any] | None = None,
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

    @abstractmethod
    def _look_back(self, begin: float, end: float) -> Outlook:
        """Return what was from `begin` to `end`; may raise anything."""

    def outlook(self) -> Outlook:
        """Return what is known now."""
        now = self._clock()
        if now < self._not_before:
            return self._last
        self._not_before = now + self.pause
        try:
            fresh = self._ask()
        except Exception as exc:  # whatever a far server does, the run goes on
            self._not_before = now + max(self.pause, _retry_after(exc))
            self._failed(self._problem(exc))
        else:
            if fresh.samples:
                self._last = fresh
                self._remember()
            else:
                self._failed(fresh.problem)
        return self._last

    def measured(self, begin: float, end: float) -> Outlook:
        """Return the grid as it was, asked for anew; empty, with a problem, if it cannot be had."""
        try:
            return self._look_back(begin, end)
        except Exception as exc:
            return self._empty(self._problem(exc))

    def _problem(self, exc: Exception) -> str:
        code = getattr(exc, "code", None)
        if code is not None:
            return f"{self.name} answered {code}: {_detail(exc)}"
        return f"{self.name} could not be asked: {type(exc).__name__}: {exc}"

    def _failed(self, problem: str) -> None:
        self._last = replace(self._last, problem=problem)

    def _empty(self, problem: str) -> Outlook:
        return Outlook(self.name, self.attribution, problem=problem)

    def _get(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Any:
        import urllib.parse
        import urllib.request

        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(address, headers={"User-Agent": "rearview", **headers})  # noqa: S310
        opened = self._opener or urllib.request.urlopen
        with opened(request, timeout=self.timeout) as answer:
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


def _retry_after(exc: Exception) -> float:
    headers = getattr(exc, "headers", None)
    text = headers.get("Retry-After", "") if headers is not None else ""
    return float(text) if text.isdigit() else 0.0


def _detail(exc: Any) -> str:
    try:
        return exc.read(400).decode("utf-8", "replace") or str(exc.reason)
    except (OSError, ValueError, AttributeError):
        return str(getattr(exc, "reason", exc))
