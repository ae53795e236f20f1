"""Prices (estimated seconds) of backfills, and the backfills that the page starts.

A backfill runs as the command `rearview backfill --json` in a separate process. So the page stays fast, the
backfill can be stopped like any command, and it does the same as on the command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rearview._history import History, PlanReport
from rearview.errors import RearviewError, UsageError
from rearview.model.run import name_of
from rearview.web.run_index import Index

MOST_PRICED = 60
"""Maximum number of runs for which one request returns prices; a screen does not show more runs."""
MOST_JOBS = 4
"""Maximum number of backfills started by this page that run at the same time."""
KEPT_JOBS = 20
KEPT_EVENTS = 4000
"""Maximum number of events of one backfill that are kept in memory for the page."""
MOST_SEGMENTS = 600
"""Maximum number of segments of a plan that are described one by one."""


class BackfillRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the page to fill empty cells of tables: the names (columns), and the runs and points to fill."""

    names: list[str]
    runs: list[str] = []
    where: str = ""
    at: str = ""
    workers: int | None = None


class Prices:
    """Plans backfills and estimates their seconds. Locks let one thread at a time use each `History` object."""

    def __init__(self, history: History, index: Index) -> None:
        self._history, self._index = history, index
        self._lock = threading.Lock()
        self._prices: OrderedDict[tuple[str, str, int, str], dict[str, Any]] = OrderedDict()
        # separate `History` objects with separate locks, because `of` takes seconds and others should not wait for it
        self._source, self._pricing = History(history.project), History(history.project)
        self._source_lock, self._pricing_lock = threading.Lock(), threading.Lock()
        self._fillable_names: tuple[float, list[tuple[str, tuple[str, ...]]]] = (-1e9, [])

    def fillable_names(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (name, loops around its log call) for each name that the work tree logs.

        The work tree is read again if the last reading is more than two seconds old.
        """
        with self._source_lock:
            checked_at, names = self._fillable_names
            if time.monotonic() - checked_at > 2.0:
                names = self._source.virtual()
                self._fillable_names = (time.monotonic(), names)
            return names

    def of(self, name: str, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return run -> price: the estimated seconds to fill `name` in the run, or why filling is refused."""
        known_runs = [run for run in runs if run in self._index.entries][:MOST_PRICED]
        source = repr(self.fillable_names())
        keys = {run: (name, run, self._index.entries[run].revision, source) for run in known_runs}
        unpriced_runs = [run for run in known_runs if keys[run] not in self._prices]
        if unpriced_runs:
            with self._pricing_lock:
                prices = self._priced(name, unpriced_runs)
            for run in unpriced_runs:
                self._prices[keys[run]] = prices[run]
            while len(self._prices) > 20_000:
                self._prices.popitem(last=False)
        return {run: self._prices[keys[run]] for run in known_runs if keys[run] in self._prices}

    def _priced(self, name: str, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {run: {"seconds": 0.0, "nothing": True} for run in runs}
        try:
            report = self._pricing.plan([name], runs=list(runs))
        except RearviewError as exc:
            return {run: {"refused": str(exc)} for run in runs}
        for segment in report.plan.segments:
            price = out[segment.run]
            price.pop("nothing", None)
            price["seconds"] += segment.seconds
            price["operator"] = segment.operator.value
        for refusal in report.refusals:
            out[refusal.run] = {"refused": refusal.reason}
        return out

    def plan(self, request: BackfillRequest) -> dict[str, Any]:
        """Return the plan of the requested backfill as values for JSON, see `plan_as_json`."""
        with self._lock:
            report = self._history.plan(
                request.names,
                runs=request.runs or None,
                where=request.where or None,
                at=request.at or None,
                workers=request.workers,
            )
            return plan_as_json(report, request)


def plan_as_json(report: PlanReport, request: BackfillRequest) -> dict[str, Any]:
    """Return a plan as values for JSON: segments, estimates, refusals, inserted statements, the command line."""
    segments = report.plan.segments
    explanation = report.explained
    return {
        "names": request.names,
        "missing": str(report.missing),
        "cells": report.missing.cells,
        "seconds": report.plan.seconds,
        "low": sum(segment.low for segment in segments),
        "high": sum(segment.high for segment in segments),
        "runs": len({segment.run for segment in segments}),
        "count": len(segments),
        "segments": [
            {
                "run": segment.run,
                "operator": segment.operator.value,
                "statement_in": segment.operator.in_words.partition(":")[0],
                "loop": name_of(segment.loop) if segment.loop else "",
                "first": segment.first,
                "last": segment.last,
                "start": segment.start or "",
                "seconds": segment.seconds,
                "low": segment.low,
                "high": segment.high,
                "restores": [iteration for iteration, _ in segment.restores][:200],
                "nbytes": segment.nbytes,
            }
            for segment in segments[:MOST_SEGMENTS]
        ],
        "workers": [
            {"workers": on.workers, "seconds": on.seconds}
            for on in (explanation.workers if explanation else ())
        ],
        "cheaper": [
            {"saves": advice.saves, "text": advice.text}
            for advice in (explanation.cheaper if explanation else ())
        ],
        "nbytes_read": explanation.nbytes_read if explanation else 0,
        "nbytes_written": explanation.nbytes_written if explanation else 0,
        "refusals": [{"run": refusal.run, "reason": refusal.reason} for refusal in report.refusals],
        "notes": [*report.changed_inputs, *report.environment_differences, *report.notes],
        "insertions": [
            {"runs": list(insertion.runs), "diff": insertion.diff}
            for insertion in report.insertions
        ],
        "command": " ".join(command_of(request, shown=True)),
    }


def command_of(request: BackfillRequest, *, shown: bool = False) -> list[str]:
    """Return the words of a command line that does the requested backfill, for a new process.

    With `shown`, the words are those that a user would type, quoted for a shell.
    """
    import shlex

    words = ["backfill"]
    for run in request.runs:
        words += ["--runs", run]
    if request.where:
        words += ["--where", request.where]
    if request.at:
        words += ["--at", request.at]
    if request.workers:
        words += ["--workers", str(request.workers)]
    words += [] if shown else ["--json", "--yes"]
    words += (
        ["--", *request.names]
        if any(name.startswith("-") for name in request.names)
        else request.names
    )
    if shown:
        return ["rearview", *map(shlex.quote, words)]
    return [sys.executable, "-m", "rearview", *words]


@dataclass
class PageBackfill:
    """A backfill that the page started, with its output so far."""

    id: str
    request: BackfillRequest
    plan: dict[str, Any]
    started: float
    process: subprocess.Popen[str]
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    progress: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    ended: float | None = None
    error: str = ""
    code: int | None = None

    def status(self, *, whole: bool = False) -> dict[str, Any]:
        """Return the progress and result of the backfill as values for JSON; with `whole`, also plan and events."""
        status: dict[str, Any] = {
            "id": self.id,
            "names": self.request.names,
            "runs": len(self.request.runs),
            "started": self.started,
            "ended": self.ended,
            "seconds": self.plan.get("seconds"),
            "segments": self.plan.get("count"),
            "progress": self.progress,
            "done": self.done,
            "error": self.error,
            "code": self.code,
        }
        if whole:
            status |= {"plan": self.plan, "events": list(self.events)}
        return status


class PageBackfills:
    """Starts, follows and stops the backfills of this page; also keeps the newest backfills that have ended."""

    def __init__(self, root: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._root, self._tell = root, tell
        self._jobs: OrderedDict[str, PageBackfill] = OrderedDict()
        self._lock = threading.Lock()

    def all(self) -> list[PageBackfill]:
        """Return the running backfills and the newest ended ones that this page started, newest first."""
        return list(reversed(self._jobs.values()))

    def get(self, job: str) -> PageBackfill:
        """Return the backfill with the id `job`; raise if this page has not started it."""
        backfill = self._jobs.get(job)
        if backfill is None:
            raise UsageError(f"This page has started no backfill {job!r}.", slug="page-question")
        return backfill

    def start(self, request: BackfillRequest, plan: dict[str, Any]) -> PageBackfill:
        """Start the requested backfill in a new process and return it; its output is sent to the pages as events."""
        with self._lock:
            running_jobs = [job for job in self._jobs.values() if job.ended is None]
            if len(running_jobs) >= MOST_JOBS:
                raise UsageError(
                    f"{len(running_jobs)} backfills of this page are running, which is the limit. Wait until "
                    "one ends, or stop one.",
                    slug="page-busy",
                )
            process = subprocess.Popen(
                command_of(request),
                cwd=self._root,
                env={**os.environ, "REARVIEW_ROOT": self._root, "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in the terminal reaches only the server, which calls `close`
            )
            job = PageBackfill(f"{int(time.time() * 1000):x}", request, plan, time.time(), process)
            self._jobs[job.id] = job
            for job_id in list(self._jobs)[:-KEPT_JOBS]:
                if self._jobs[job_id].ended is not None:
                    del self._jobs[job_id]
        threading.Thread(target=self._follow, args=(job,), daemon=True).start()
        return job

    def _follow(self, job: PageBackfill) -> None:
        """Read the output of a backfill until it ends, and tell the pages each event."""
        assert job.process.stdout is not None
        assert job.process.stderr is not None
        lines: list[str] = []
        errors = threading.Thread(
            target=lambda: lines.extend(deque(job.process.stderr or (), maxlen=40)), daemon=True
        )
        errors.start()
        for line in job.process.stdout:
            try:
                event = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                continue
            event["at"] = time.time() - job.started
            kind = event.get("event")
            if kind == "progress":
                job.progress = event
            elif kind == "done":
                job.done = event
            elif kind != "planned":
                job.events.append(event)
            self._tell({"type": "replay", "job": job.id, "event": event})
        job.code = job.process.wait()
        errors.join(2.0)
        job.error = "" if job.done is not None else "".join(lines)[-2000:].strip()
        job.ended = time.time()
        self._tell({"type": "replay", "job": job.id, "event": {"event": "ended", **job.status()}})

    def stop(self, job: str) -> PageBackfill:
        """Interrupt the backfill with the id `job` and return it; cells that it has filled stay filled."""
        backfill = self.get(job)
        if backfill.ended is None:
            backfill.process.send_signal(signal.SIGINT)
        return backfill

    def close(self) -> None:
        """Interrupt every running backfill of this page; kill those that do not end within five seconds."""
        for job in self._jobs.values():
            if job.ended is None:
                job.process.send_signal(signal.SIGINT)
        for job in self._jobs.values():
            try:
                job.process.wait(5.0)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
