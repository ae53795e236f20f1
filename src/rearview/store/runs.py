"""Runs: one folder each, written by the run itself and never rewritten by anyone else."""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import Run, Status
from rearview.store.alive import alive, identity
from rearview.store.lines import append_line, check_format, encode, read_lines
from rearview.store.project import Project, publish

FORMAT = 1
ACCOUNT = "energy.jsonl"
"""File in a run's folder in which it keeps account of when it was on and what it used."""
PAUSED_CODE = 85
"""Exit code that says: state is saved, start me again."""
_FIELDS = ("version", "script", "argv", "cwd", "parent", "args", "started")


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of a part of a run: whose records stand beside the run's own."""

    id: str
    run: str
    version: str
    started: float
    ended: float | None = None
    proved: bool | None = None
    """True once its end state was found equal to the recorded one; None while it runs."""
    names: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


class Runs:
    """The runs of a project."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def folder(self, run: str) -> Path:
        """Return where the files of a run are."""
        return self._project.runs / run

    def reserve(self, now: float | None = None) -> str:
        """Return a new run id that nobody else has or will get."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        while True:
            run = f"{stamp}-{os.urandom(2).hex()}"
            try:
                self.folder(run).mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as exc:
                raise StoreError(
                    f"No folder for a run can be made in {self._project.runs}: "
                    f"{exc.strerror or exc}. Make it writable or free some space.",
                    slug="store-unwritable",
                ) from exc
            return run

    def start(self, run: str, facts: Mapping[str, Any]) -> Path:
        """Publish that `run` has started in this process; return its folder.

        `facts` may hold version, script, argv, cwd, parent, args, started and heartbeat (seconds
        between signs of life); whatever else it holds is kept as the run's facts.
        """
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        known = {key: facts[key] for key in _FIELDS if key in facts}
        about = {"format": FORMAT, "id": run, "started": time.time(), "cwd": str(Path.cwd())}
        about |= {**known, **identity(), "heartbeat": facts.get("heartbeat", 10.0)}
        about["facts"] = {k: v for k, v in facts.items() if k not in (*_FIELDS, "heartbeat")}
        if (folder / "run.json").exists():
            raise StoreError(
                f"Run {run} has been started before. A run that goes on is resumed, not started.",
                slug="run-exists",
            )
        publish(folder / "run.json", encode(about))
        self.heartbeat(run)
        return folder

    def resume(self, run: str, facts: Mapping[str, Any] | None = None) -> Path:
        """Publish that this process goes on with a run that stopped; return its folder."""
        facts = {"heartbeat": 10.0, **(facts or {})}
        self.note(run, "resumed", {**facts, **identity()})
        self.heartbeat(run)
        return self.folder(run)

    def heartbeat(self, run: str) -> None:
        """Give a sign of life."""
        file = self.folder(run) / "heartbeat"
        file.touch()

    def end(self, run: str, exit_code: int, facts: Mapping[str, Any] | None = None) -> None:
        """Publish how a run ended."""
        end = {"format": FORMAT, "time": time.time(), "exit_code": exit_code, **(facts or {})}
        publish(self.folder(run) / "end.json", encode(end))

    def note(self, run: str, event: str, facts: Mapping[str, Any]) -> None:
        """Add a fact to a run that has started."""
        line = {"format": FORMAT, "event": event, "time": time.time(), **facts}
        append_line(self.folder(run) / "events.jsonl", line)

    def update_args(self, run: str, args: Mapping[str, Any]) -> None:
        """Add hyper-parameters to a run; a later value of the same name wins."""
        self.note(run, "args", {"args": dict(args)})

    def start_replay(self, run: str, replay: str, facts: Mapping[str, Any]) -> None:
        """Say that a replay of `run` has started; `facts` may hold version, names and more."""
        line = {"format": FORMAT, "replay": replay, "started": time.time(), **facts}
        append_line(self.folder(run) / "replays.jsonl", line)

    def end_replay(
        self, run: str, replay: str, *, proved: bool, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Say how a replay ended: whether it was proved equal to the run."""
        line = {"format": FORMAT, "replay": replay, "ended": time.time(), "proved": proved}
        append_line(self.folder(run) / "replays.jsonl", {**line, **(facts or {})})

    def replays(self, run: str) -> list[Replay]:
        """Return the replays of a run, oldest first."""
        found: dict[str, dict[str, Any]] = {}
        for line in read_lines(self.folder(run) / "replays.jsonl", FORMAT):
            found.setdefault(str(line.pop("replay", "")), {}).update(line)
        return [
            Replay(
                id=replay,
                run=run,
                version=str(facts.pop("version", "")),
                started=float(facts.pop("started", 0.0)),
                ended=facts.pop("ended", None),
                proved=facts.pop("proved", None),
                names=tuple(facts.pop("names", ())),
                facts={key: value for key, value in facts.items() if key != "format"},
            )
            for replay, facts in found.items()
        ]

    def ids(self) -> list[str]:
        """Return the ids of all runs that have started, oldest first."""
        if not self._project.runs.is_dir():
            return []
        found = self._project.runs.iterdir()
        return sorted(folder.name for folder in found if (folder / "run.json").is_file())

    def all(self) -> list[Run]:
        """Return all runs in the order they started; one that cannot be read says so in facts."""
        out = []
        for run in self.ids():
            try:
                out.append(self.get(run))
            except DamagedError as exc:
                facts = {"damaged": str(exc)}
                out.append(Run(run, "", "", (), 0.0, Status.DEAD, facts=facts))
        return sorted(out, key=lambda run: (run.started, run.id))

    def get(self, run: str) -> Run:
        """Return one run by its whole id, with the status that is true now."""
        folder = self.folder(run)
        about = _read(folder / "run.json")
        if about is None:
            raise self._unknown(run)
        process, last, args = about, float(about.get("started", 0.0)), dict(about.get("args") or {})
        attempts = 0
        for event in read_lines(folder / "events.jsonl", FORMAT):
            if event.get("event") == "args":
                args.update(event.get("args", {}))
            elif event.get("event") == "resumed":
                process, last = event, float(event["time"])
                attempts += 1
        end = _read(folder / "end.json")
        if end is not None and float(end.get("time", 0.0)) < last:
            end = None  # it has been resumed since
        code = None if end is None else int(end.get("exit_code", 1))
        if end is None:
            status = Status.RUNNING if alive(process, folder / "heartbeat") else Status.DEAD
        elif code == 0:
            status = Status.FINISHED
        else:
            status = Status.PAUSED if code == PAUSED_CODE else Status.FAILED
        return Run(
            id=run,
            version=str(about.get("version", "")),
            script=str(about.get("script", "")),
            argv=tuple(about.get("argv", ())),
            started=float(about.get("started", 0.0)),
            status=status,
            ended=None if end is None else float(end.get("time", 0.0)),
            exit_code=code,
            host=str(process.get("host", "")),
            pid=int(process.get("pid", 0)),
            cwd=str(about.get("cwd", "")),
            parent=about.get("parent"),
            args=args,
            facts=dict(about.get("facts", {}))
            | ({"attempts": attempts} if attempts else {})
            | ({"end": end} if end else {}),
        )

    def find(self, text: str) -> Run:
        """Return the run that `text` means: an id, a part of one, or a place from the end.

        A part is its beginning or its end; `latest` and `-1` are the newest run, `-2` the one before.
        """
        ids = self.ids()
        if text == "latest" or _is_back(text):
            ids = [run.id for run in self.all()]
            back = 1 if text == "latest" else -int(text)
            if back > len(ids):
                have = f"There are {len(ids)} runs" if ids else "There are no runs yet"
                raise UsageError(
                    f"There is no run {text!r}. {have}; `rearview runs` lists them.", slug="no-run"
                )
            return self.get(ids[-back])
        if text in ids:
            return self.get(text)
        fits = [run for run in ids if text and (run.startswith(text) or run.endswith(text))]
        if len(fits) == 1:
            return self.get(fits[0])
        if fits:
            some = ", ".join(fits[-4:])
            raise UsageError(
                f"{text!r} fits {len(fits)} runs, the newest of them {some}. Give more of the id.",
                slug="no-run",
            )
        raise self._unknown(text)

    def _unknown(self, text: str) -> UsageError:
        ids = self.ids()
        near = difflib.get_close_matches(text, ids, n=3, cutoff=0.5) or ids[-3:]
        hint = f"The nearest are {', '.join(near)}" if near else "No run has been recorded"
        return UsageError(
            f"There is no run {text!r}. {hint}; `rearview runs` lists them all.", slug="no-run"
        )


def _is_back(text: str) -> bool:
    return text.startswith("-") and text[1:].isdigit() and int(text) < 0


def _read(file: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as exc:
        raise DamagedError(
            f"{file} cannot be read: {exc}. `rearview verify` says what else is damaged.",
            slug="damaged",
        ) from exc
    if not isinstance(facts, dict):
        raise DamagedError(f"{file} does not hold facts of a run. Run `rearview verify`.")
    check_format(facts, FORMAT, file)
    return facts
