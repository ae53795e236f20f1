"""Runs: start, end, find and list them; each has a folder that only its own process writes."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rearview.durable_files import add_check
from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import (
    EXIT_PAUSED,
    Continuation,
    Proof,
    ReplayReport,
    ReplayStart,
    Run,
    RunEnd,
    RunStart,
    Status,
    proof_of,
)
from rearview.model.process_messages import read_replay_start
from rearview.model.run import read_record
from rearview.model.secrets import redact_value
from rearview.store.files import (
    append_line,
    encode,
    fields_of_record,
    make_folder,
    make_new_folder,
    open_file,
    publish,
    read_facts,
    read_lines,
)
from rearview.store.labels import Labels, labels_of
from rearview.store.machine import is_alive, process_identity
from rearview.store.project import Project

FORMAT = 2
"""From 2 on, every file of facts and every line has a checksum."""
ACCOUNT = "energy.jsonl"
"""File in a run's folder: when it ran, and the energy it used."""
TRACES = "traces.jsonl"
"""File in a run's folder: the earlier state of each file that it wrote, and the folders it created."""
TRACES_FORMAT = 2
ABSENT = "absent"
"""Value in `TRACES` for a file that did not exist before."""
_AGAIN = "-again"
_ID_STEP = 1 / 0x10000  # seconds between two ids that follow each other
_FIELDS = ("version", "script", "argv", "cwd", "parent", "args", "started")


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of a part of a run; its records are in the run's folder."""

    id: str
    run: str
    started: float
    ended: float | None = None
    proved: bool | None = None
    """Whether everything compared with the run was equal; None before its end."""
    start: ReplayStart = field(default_factory=ReplayStart)
    """What it was started to compute."""
    report: ReplayReport | None = None
    """Its report; None before its end, or if the report cannot be read."""
    redone: bool = False
    """Whether a later replay, from the start of the run, replaces it."""

    @property
    def version(self) -> str:
        """The source that it ran, with the probes in it."""
        return self.start.version

    @property
    def names(self) -> tuple[str, ...]:
        """Names that it was to fill."""
        return self.start.names

    @property
    def proof(self) -> Proof:
        """How far its values can be trusted, and why."""
        return proof_of(self.report, proved=self.proved, redone=self.redone)

    @property
    def redoes(self) -> str:
        """Id of the first try that it replaces; empty if there was none."""
        return _first_try(self.id) if self.start.redoes is None else self.start.redoes


def _read_report(values: object) -> ReplayReport | None:
    try:
        return msgspec.convert(values, ReplayReport)
    except msgspec.ValidationError:
        return None


def _first_try(replay: str) -> str:
    """Return the first try that a replay's id names, as old stores recorded it."""
    return replay.removesuffix(_AGAIN) if replay.endswith(_AGAIN) else ""


def id_of_moment(moment: float) -> str:
    """Return the id of what starts at `moment`, for example `20260314-092653-96cb`.

    The four digits at the end are the fraction of the second. So ids sort by time, also those of
    runs that a script starts one right after the other.
    """
    second, fraction = divmod(moment, 1)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(second))
    return f"{stamp}-{int(fraction / _ID_STEP):04x}"


class Runs:
    """The runs of a project."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def folder(self, run: str) -> Path:
        """Return the folder of a run."""
        return self._project.runs / run

    def reserve(self, now: float | None = None) -> str:
        """Return a new, unique run id, and create its folder."""
        moment = time.time() if now is None else now
        while True:
            run = id_of_moment(moment)
            try:
                make_folder(self._project.runs)
                make_new_folder(self.folder(run))
            except FileExistsError:
                moment += _ID_STEP
                continue
            except OSError as exc:
                raise StoreError(
                    f"No folder for a run can be created in {self._project.runs}: "
                    f"{exc.strerror or exc}. Make it writable or free some space.",
                    slug="store-unwritable",
                ) from exc
            return run

    def start(self, run: str, facts: Mapping[str, Any]) -> Path:
        """Publish that `run` has started in this process; return its folder.

        `facts` may hold version, script, argv, cwd, parent, args, started and heartbeat (seconds
        between signs of life); everything else is stored as the run's `RunStart`.
        """
        folder = self.folder(run)
        make_folder(folder)
        given_fields = {key: facts[key] for key in _FIELDS if key in facts}
        about = {"format": FORMAT, "id": run, "started": time.time(), "cwd": str(Path.cwd())}
        about |= {**given_fields, **process_identity(), "heartbeat": facts.get("heartbeat", 10.0)}
        about["facts"] = {k: v for k, v in facts.items() if k not in (*_FIELDS, "heartbeat")}
        if (folder / "run.json").exists():
            raise StoreError(
                f"Run {run} has been started before. Resume it instead: `rearview resume`.",
                slug="run-exists",
            )
        publish(folder / "run.json", add_check(encode(about)))
        self.heartbeat(run)
        return folder

    def resume(self, run: str, facts: Mapping[str, Any] | None = None) -> Path:
        """Publish that this process resumes a run; return its folder."""
        facts = {"heartbeat": 10.0, **(facts or {})}
        self.note(run, "resumed", {**facts, **process_identity()})
        self.heartbeat(run)
        return self.folder(run)

    def claim(self, run: str) -> None:
        """Claim the right to resume `run`; raise if a live process has it.

        Each attempt is a file with the next number, created as a link, which only one process can do,
        also on a shared disk. An attempt of a dead process is followed by the next number, so no file
        ever has to be removed.
        """
        folder, me = self.folder(run), process_identity()
        self.refuse_if_held(run)
        aside = folder / f".claim.{os.getpid()}.{os.urandom(4).hex()}"
        seconds = self.get(run).heartbeat
        publish(aside, add_check(encode({"format": FORMAT, "heartbeat": seconds, **me})))
        try:
            while True:
                taken = sorted(folder.glob("attempt-*.json"))
                last = _read(taken[-1]) if taken else None
                if last is not None and _same_process(last, me):
                    return  # this process has started over
                if last is not None and is_alive(last, _newest(taken[-1], folder / "heartbeat")):
                    raise _held_error(run, last)
                number = int(taken[-1].stem.partition("-")[2]) + 1 if taken else 1
                try:
                    _link(aside, folder / f"attempt-{number:06d}.json")
                except FileExistsError:
                    continue  # another process was first: check it
                return
        finally:
            aside.unlink(missing_ok=True)

    def _holder(self, run: str) -> dict[str, Any] | None:
        """Return the process that records a run now, or None."""
        folder = self.folder(run)
        end = self._end(run)
        process = _read(folder / "run.json") or {}
        began, attempts = float(process.get("started", 0.0)), 0
        for event in read_lines(folder / "events.jsonl", FORMAT):
            if event.get("event") == "resumed":
                process, began = event, float(event["time"])
                attempts += 1
        if end is not None and _ended_after(end, attempts, began):
            return None
        return process if is_alive(process, folder / "heartbeat") else None

    def _end(self, run: str) -> RunEnd | None:
        facts = _read(self.folder(run) / "end.json")
        return None if facts is None else read_record(RunEnd, facts)

    def refuse_if_held(self, run: str) -> None:
        """Raise if another live process records `run` now."""
        holder = self._holder(run)
        if holder is not None and not _same_process(holder, process_identity()):
            raise _held_error(run, holder)

    def heartbeat(self, run: str) -> None:
        """Update the sign of life of a run."""
        file = self.folder(run) / "heartbeat"
        os.close(open_file(file, os.O_WRONLY | os.O_CREAT))
        os.utime(file)

    def end(
        self,
        run: str,
        exit_code: int,
        measured: RunEnd | None = None,
        *,
        moment: float | None = None,
    ) -> None:
        """Publish that a run has ended, now or at `moment`, with its measurements."""
        when = time.time() if moment is None else moment
        events = read_lines(self.folder(run) / "events.jsonl", FORMAT)
        attempts = sum(event.get("event") == "resumed" for event in events)
        end = msgspec.structs.replace(
            measured or RunEnd(), time=when, attempts=attempts, exit_code=exit_code
        )
        facts = {"format": FORMAT, **fields_of_record(end)}
        publish(self.folder(run) / "end.json", add_check(encode(facts)))

    def note(self, run: str, event: str, facts: Mapping[str, Any]) -> None:
        """Add a fact to a run that has started."""
        line = {"format": FORMAT, "event": event, "time": time.time(), **facts}
        append_line(self.folder(run) / "events.jsonl", line)

    def created_paths(self, run: str) -> tuple[set[str], set[str]]:
        """Return the files and the folders of the project that the run created.

        Paths are relative to the root.
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

        `origin` names the library with which the program reads them: "argparse", "hydra".
        """
        hidden = {name: redact_value(name, value) for name, value in args.items()}
        self.note(run, "args", {"args": hidden, **({"origin": origin} if origin else {})})

    def start_replay(self, run: str, replay: str, start: ReplayStart) -> None:
        """Publish that a replay of `run` has started, and what it is to compute."""
        line = {"format": FORMAT, "replay": replay, "started": time.time()}
        append_line(
            self.folder(run) / "replays.jsonl",
            {**line, **msgspec.to_builtins(start, str_keys=True)},
        )

    def end_replay(
        self, run: str, replay: str, *, proved: bool, report: ReplayReport | None = None
    ) -> None:
        """Publish that a replay has ended, and whether it was proved equal to the run."""
        line: dict[str, Any] = {"format": FORMAT, "replay": replay, "ended": time.time()}
        line["proved"] = proved
        if report is not None:
            line["report"] = msgspec.to_builtins(report)
        append_line(self.folder(run) / "replays.jsonl", line)

    def rebuild(self, run: str, version: str) -> None:
        """Rewrite the facts of a run, whose file is damaged, from its id and version."""
        about: dict[str, Any] = {"format": FORMAT, "id": run, "version": version}
        about["started"] = _start_time(run)
        about["facts"] = {"rebuilt": True}
        publish(self.folder(run) / "run.json", add_check(encode(about)))

    def replays(self, run: str) -> list[Replay]:
        """Return the replays of a run, oldest first."""
        lines_by_id: dict[str, dict[str, Any]] = {}
        for line in read_lines(self.folder(run) / "replays.jsonl", FORMAT):
            lines_by_id.setdefault(str(line.pop("replay", "")), {}).update(line)
        replays = [
            Replay(
                id=replay,
                run=run,
                started=float(fields.get("started", 0.0)),
                ended=fields.get("ended"),
                proved=fields.get("proved"),
                start=read_replay_start(fields),
                report=_read_report(fields.get("report")),
            )
            for replay, fields in lines_by_id.items()
        ]
        redone = {replay.redoes for replay in replays}
        return [replace(replay, redone=replay.id in redone) for replay in replays]

    def ids(self) -> list[str]:
        """Return the ids of all runs that have started, by the second in which each one did."""
        if not self._project.runs.is_dir():
            return []
        folders = self._project.runs.iterdir()
        return sorted(folder.name for folder in folders if (folder / "run.json").is_file())

    def all(self) -> list[Run]:
        """Return all runs in the order they started; one that cannot be read has `damaged` set."""
        out = []
        for run in self.ids():
            try:
                out.append(self.get(run))
            except DamagedError as exc:
                start = _start_time(run)
                out.append(Run(run, "", "", (), start, Status.DEAD, damaged=str(exc)))
        return sorted(out, key=lambda run: (run.started, run.id))

    def get(self, run: str) -> Run:
        """Return one run by its whole id, with its current status."""
        folder = self.folder(run)
        about = _read(folder / "run.json")
        if about is None:
            raise self._unknown(run)
        process, last, args = about, float(about.get("started", 0.0)), dict(about.get("args") or {})
        attempts = 0
        origins: dict[str, str] = {}
        continued: list[Continuation] = []
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
                continued.append(Continuation(str(event["version"]), str(event["point"])))
        damage = ""
        try:
            end = self._end(run)
        except DamagedError as exc:  # the facts of the start can still be read
            end, damage = None, str(exc)
        if end is not None and not _ended_after(end, attempts, last):
            end = None  # it has been resumed since
        code = None if end is None else end.exit_code
        if end is None:
            status = Status.RUNNING if is_alive(process, folder / "heartbeat") else Status.DEAD
        elif code == 0:
            status = Status.FINISHED
        else:
            status = Status.PAUSED if code == EXIT_PAUSED else Status.FAILED
        return Run(
            id=run,
            version=str(about.get("version", "")),
            script=str(about.get("script", "")),
            argv=tuple(about.get("argv", ())),
            started=float(about.get("started", 0.0)),
            status=status,
            ended=None if end is None else end.time,
            exit_code=code,
            host=str(process.get("host", "")),
            pid=int(process.get("pid", 0)),
            heartbeat=float(process.get("heartbeat", 10.0)),
            cwd=str(about.get("cwd", "")),
            parent=about.get("parent"),
            args=args,
            facts=read_record(RunStart, about.get("facts", {})),
            end=end or RunEnd(),
            attempts=attempts,
            arg_origins=origins,
            continued=tuple(continued),
            damaged=damage,
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
        """Return the run that `text` names: an id, a name, the beginning or end of an id, or a position.

        `latest` and `-1` are the newest run, `-2` is the one before.
        """
        return self.get(self.find_id(text))

    def is_stored(self, run: str) -> bool:
        """Return True if the folder of a run is there: a user may remove the store during the run."""
        return (self.folder(run) / "run.json").exists()

    def find_id(self, text: str) -> str:
        """Return the id of the run that `text` names; the run may be damaged."""
        if Path(text).name == text and (self.folder(text) / "run.json").is_file():
            return text  # a whole id: other runs need not be read
        ids = self.ids()
        if text == "latest" or _counts_from_end(text):
            ids = [run.id for run in self.all()]
            back = 1 if text == "latest" else -int(text)
            if back > len(ids):
                have = f"There are {len(ids)} runs" if ids else "There are no runs yet"
                if len(ids) == 1:
                    have = "There is 1 run"
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
            newest = ", ".join(fits[-4:])
            raise UsageError(
                f"{text!r} fits {len(fits)} runs, the newest of them {newest}. Give more of the id.",
                slug="no-run",
            )
        raise self._unknown(text)

    def _unknown(self, text: str) -> UsageError:
        ids = self.ids()
        names = [name for run in ids if (name := self.labels(run).name)]
        near = difflib.get_close_matches(text, [*names, *ids, "latest"], n=3, cutoff=0.5)
        hint = "No run has been recorded"
        if near and ids:
            hint = f"Did you mean {' or '.join(near)}?"
        elif ids:
            hint = f"The newest are {', '.join(ids[-3:])}, and `latest` is the last of them"
        return UsageError(
            f"There is no run {text!r}. {hint} (`rearview runs` lists them all).", slug="no-run"
        )


def _ended_after(end: RunEnd, attempts: int, began: float) -> bool:
    """Return True if an end belongs to the last of the attempts at a run, which began at `began`.

    The clock of a machine may be set back during a run, so attempts are counted if their number is known.
    """
    return end.time >= began if end.attempts is None else end.attempts >= attempts


def _held_error(run: str, holder: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"Run {run} is recorded now by process {holder.get('pid')} on {holder.get('host')}; a second "
        "process would train it twice. Wait for it, or stop that process first. If that machine no "
        "longer exists, try again in a minute.",
        slug="run-held",
    )


def _link(source: Path, target: Path) -> None:
    """Create `target` with the content of `source`; raise `FileExistsError` if it exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:  # noqa: PTH123
            file.write(source.read_bytes())


def _same_process(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(key) == b.get(key) for key in ("host", "pid", "boot", "space", "born"))


def _newest(a: Path, b: Path) -> Path:
    """Return which of two files changed last; `a` if one does not exist."""
    try:
        return b if b.stat().st_mtime > a.stat().st_mtime else a
    except OSError:
        return a


def _counts_from_end(text: str) -> bool:
    return text.startswith("-") and text[1:].isdigit() and int(text) < 0


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_facts(file, FORMAT)
    except FileNotFoundError:
        return None


def _start_time(run: str) -> float:
    """Return when a run started, from its id, for runs whose facts are damaged."""
    try:
        return time.mktime(time.strptime(run[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return 0.0
