"""Runs: one folder each, written by the run itself and never rewritten by anyone else."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import Proof, ReplayReport, Run, Status, proof_of
from rearview.model.checksum import add_check
from rearview.model.secrets import redact_value
from rearview.store.files import make_folder, make_new_folder, open_file
from rearview.store.json_lines import append_line, encode, read_facts, read_lines
from rearview.store.labels import Labels, labels_of
from rearview.store.machine import alive, identity
from rearview.store.project import Project, publish

FORMAT = 2
"""From 2 on, every file of facts and every line carries a checksum."""
ACCOUNT = "energy.jsonl"
"""File in a run's folder in which it keeps account of when it was on and what it used."""
PAUSED_CODE = 85
"""Exit code that says: state is saved, start me again."""
_AGAIN = "-again"
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
    redone: bool = False
    """A later replay, from the start of the run, stands in for it."""

    @property
    def proof(self) -> Proof:
        """How far its values can be trusted, and why."""
        return proof_of(self.report, proved=self.proved, redone=self.redone)

    @property
    def report(self) -> ReplayReport | None:
        """What it reported; None before its end, or if that cannot be read."""
        try:
            return msgspec.convert(self.facts["report"], ReplayReport)
        except (KeyError, msgspec.ValidationError):
            return None

    @property
    def redoes(self) -> str:
        """The first try that it stands in for; empty if there was none."""
        known = self.facts.get("redoes")
        return str(known) if known is not None else _first_try(self.id)


def _first_try(replay: str) -> str:
    """Return the first try that a replay's id names; older stores kept no more than that."""
    return replay.removesuffix(_AGAIN) if replay.endswith(_AGAIN) else ""


TRACES = "traces.jsonl"
"""File of a run: what was there before each file that it wrote, and the folders that it made."""
TRACES_FORMAT = 2
ABSENT = "absent"
"""Says there that nothing was."""


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
                make_folder(self._project.runs)
                make_new_folder(self.folder(run))
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
        make_folder(folder)
        known = {key: facts[key] for key in _FIELDS if key in facts}
        about = {"format": FORMAT, "id": run, "started": time.time(), "cwd": str(Path.cwd())}
        about |= {**known, **identity(), "heartbeat": facts.get("heartbeat", 10.0)}
        about["facts"] = {k: v for k, v in facts.items() if k not in (*_FIELDS, "heartbeat")}
        if (folder / "run.json").exists():
            raise StoreError(
                f"Run {run} has been started before. A run that goes on is resumed, not started.",
                slug="run-exists",
            )
        publish(folder / "run.json", add_check(encode(about)))
        self.heartbeat(run)
        return folder

    def resume(self, run: str, facts: Mapping[str, Any] | None = None) -> Path:
        """Publish that this process goes on with a run that stopped; return its folder."""
        facts = {"heartbeat": 10.0, **(facts or {})}
        self.note(run, "resumed", {**facts, **identity()})
        self.heartbeat(run)
        return self.folder(run)

    def claim(self, run: str) -> None:
        """Take the right to go on with `run`; refuse if a process that lives has it.

        Each attempt is a file with the next number, made by a link, which only one process can make,
        also on a shared disk. An attempt whose process is dead is followed by the next number, so
        no file has to be taken away from anyone.
        """
        folder, me = self.folder(run), identity()
        self.refuse_if_held(run)
        aside = folder / f".claim.{os.getpid()}.{os.urandom(4).hex()}"
        seconds = self.get(run).facts.get("heartbeat", 10.0)
        publish(aside, add_check(encode({"format": FORMAT, "heartbeat": seconds, **me})))
        try:
            while True:
                taken = sorted(folder.glob("attempt-*.json"))
                last = _read(taken[-1]) if taken else None
                if last is not None and _same_process(last, me):
                    return  # it began anew in the same process
                if last is not None and alive(last, _younger(taken[-1], folder / "heartbeat")):
                    raise _held(run, last)
                number = int(taken[-1].stem.partition("-")[2]) + 1 if taken else 1
                try:
                    _link(aside, folder / f"attempt-{number:06d}.json")
                except FileExistsError:
                    continue  # another process was first: look who it is
                return
        finally:
            aside.unlink(missing_ok=True)

    def _holder(self, run: str) -> dict[str, Any] | None:
        """Return the process that records a run now, or None."""
        folder = self.folder(run)
        if (end := _read(folder / "end.json")) is not None:
            ended = float(end.get("time", 0.0))
        else:
            ended = 0.0
        process = _read(folder / "run.json") or {}
        began = float(process.get("started", 0.0))
        for event in read_lines(folder / "events.jsonl", FORMAT):
            if event.get("event") == "resumed":
                process, began = event, float(event["time"])
        return process if began >= ended and alive(process, folder / "heartbeat") else None

    def refuse_if_held(self, run: str) -> None:
        """Raise if a process that lives, and is not this one, records `run` now."""
        holder = self._holder(run)
        if holder is not None and not _same_process(holder, identity()):
            raise _held(run, holder)

    def heartbeat(self, run: str) -> None:
        """Give a sign of life."""
        file = self.folder(run) / "heartbeat"
        os.close(open_file(file, os.O_WRONLY | os.O_CREAT))
        os.utime(file)

    def end(self, run: str, exit_code: int, facts: Mapping[str, Any] | None = None) -> None:
        """Publish how a run ended."""
        end = {"format": FORMAT, "time": time.time(), "exit_code": exit_code, **(facts or {})}
        publish(self.folder(run) / "end.json", add_check(encode(end)))

    def note(self, run: str, event: str, facts: Mapping[str, Any]) -> None:
        """Add a fact to a run that has started."""
        line = {"format": FORMAT, "event": event, "time": time.time(), **facts}
        append_line(self.folder(run) / "events.jsonl", line)

    def made(self, run: str) -> tuple[set[str], set[str]]:
        """Return the files and the folders of the project that were not there before the run.

        Both by their path from the root, as the run noted them when it made them.
        """
        files: set[str] = set()
        folders: set[str] = set()
        for line in read_lines(self.folder(run) / TRACES, TRACES_FORMAT):
            if "folder" in line:
                folders.add(str(line["folder"]))
            elif line.get("was") == ABSENT:
                files.add(str(line["path"]))
        return files, folders

    def update_args(self, run: str, args: Mapping[str, Any], origin: str = "") -> None:
        """Add hyper-parameters to a run; a later value of the same name wins.

        `origin` says what the program reads them with: "argparse", "hydra".
        """
        hidden = {name: redact_value(name, value) for name, value in args.items()}
        self.note(run, "args", {"args": hidden, **({"origin": origin} if origin else {})})

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

    def rebuild(self, run: str, version: str) -> None:
        """Publish what is still known of a run whose first facts are lost."""
        about: dict[str, Any] = {"format": FORMAT, "id": run, "version": version}
        about["started"] = _moment(run)
        about["facts"] = {"rebuilt": True}
        publish(self.folder(run) / "run.json", add_check(encode(about)))

    def replays(self, run: str) -> list[Replay]:
        """Return the replays of a run, oldest first."""
        found: dict[str, dict[str, Any]] = {}
        for line in read_lines(self.folder(run) / "replays.jsonl", FORMAT):
            found.setdefault(str(line.pop("replay", "")), {}).update(line)
        redone = {str(facts.get("redoes", _first_try(replay))) for replay, facts in found.items()}
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
                redone=replay in redone,
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
                out.append(Run(run, "", "", (), _moment(run), Status.DEAD, facts=facts))
        return sorted(out, key=lambda run: (run.started, run.id))

    def get(self, run: str) -> Run:
        """Return one run by its whole id, with the status that is true now."""
        folder = self.folder(run)
        about = _read(folder / "run.json")
        if about is None:
            raise self._unknown(run)
        process, last, args = about, float(about.get("started", 0.0)), dict(about.get("args") or {})
        attempts = 0
        origins: dict[str, str] = {}
        continued: list[dict[str, Any]] = []
        events = list(read_lines(folder / "events.jsonl", FORMAT))
        labels = labels_of(events)
        for event in events:
            if event.get("event") == "args":
                args.update(event.get("args", {}))
                origins |= dict.fromkeys(event.get("args", {}), str(event.get("origin", "")))
            elif event.get("event") == "resumed":
                process, last = event, float(event["time"])
                attempts += 1
            elif event.get("event") == "continued":
                continued.append({"version": event["version"], "point": event["point"]})
        damage = {}
        try:
            end = _read(folder / "end.json")
        except DamagedError as exc:  # what was known at the start is still known
            end, damage = None, {"damaged": str(exc)}
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
            | ({"continued": continued} if continued else {})
            | ({"arg_origins": origins} if origins else {})
            | ({"end": end} if end else {})
            | damage,
            name=labels.name,
            tags=labels.tags,
            note=labels.note,
        )

    def labels(self, run: str) -> Labels:
        """Return the name, tags and note of a run, also of one whose other facts are damaged."""
        return labels_of(read_lines(self.folder(run) / "events.jsonl", FORMAT))

    def named(self, name: str) -> list[str]:
        """Return the ids of the runs of that name, oldest first."""
        return [run for run in self.ids() if name and self.labels(run).name == name]

    def find(self, text: str) -> Run:
        """Return the run that `text` means: an id, a name, a part of an id, or a place from the end.

        A part is its beginning or its end; `latest` and `-1` are the newest run, `-2` the one before.
        """
        return self.get(self.find_id(text))

    def find_id(self, text: str) -> str:
        """Return the id of the run that `text` means; the run itself may be damaged."""
        ids = self.ids()
        if text == "latest" or _is_back(text):
            ids = [run.id for run in self.all()]
            back = 1 if text == "latest" else -int(text)
            if back > len(ids):
                have = f"There are {len(ids)} runs" if ids else "There are no runs yet"
                raise UsageError(
                    f"There is no run {text!r}. {have}; `rearview runs` lists them.", slug="no-run"
                )
            return ids[-back]
        if text in ids:
            return text
        if (same := self.named(text)) and len(same) > 1:
            raise UsageError(
                f"{len(same)} runs have the name {text!r}: {', '.join(same[-4:])}. Give the id, or "
                f"rename one: `rearview name {same[-1]} NEWNAME`.",
                slug="no-run",
            )
        if same:
            return same[0]
        fits = [run for run in ids if text and (run.startswith(text) or run.endswith(text))]
        if len(fits) == 1:
            return fits[0]
        if fits:
            some = ", ".join(fits[-4:])
            raise UsageError(
                f"{text!r} fits {len(fits)} runs, the newest of them {some}. Give more of the id.",
                slug="no-run",
            )
        raise self._unknown(text)

    def _unknown(self, text: str) -> UsageError:
        ids = self.ids()
        names = [name for run in ids if (name := self.labels(run).name)]
        near = difflib.get_close_matches(text, [*names, *ids], n=3, cutoff=0.5) or ids[-3:]
        hint = f"The nearest are {', '.join(near)}" if near else "No run has been recorded"
        return UsageError(
            f"There is no run {text!r}. {hint}; `rearview runs` lists them all.", slug="no-run"
        )


def _held(run: str, holder: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"Run {run} is under way in process {holder.get('pid')} on {holder.get('host')}; a second "
        "process would train it twice. Wait for it, or end that process first. If that machine is "
        "gone for good, try again in a minute.",
        slug="run-held",
    )


def _link(source: Path, target: Path) -> None:
    """Make `target` hold what `source` does; raise `FileExistsError` if it is there."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:  # noqa: PTH123
            file.write(source.read_bytes())


def _same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("host", "pid", "boot", "space", "born"))


def _younger(one: Path, other: Path) -> Path:
    """Return which of two files is the later sign of life."""
    try:
        return other if other.stat().st_mtime > one.stat().st_mtime else one
    except OSError:
        return one


def _is_back(text: str) -> bool:
    return text.startswith("-") and text[1:].isdigit() and int(text) < 0


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_facts(file, FORMAT)
    except FileNotFoundError:
        return None


def _moment(run: str) -> float:
    """Return when a run started, by its id: for the order of runs whose facts are damaged."""
    try:
        return time.mktime(time.strptime(run[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return 0.0
