"""Runs: start, end, find, list and label them.

Each run has a folder with data of its start (`run.json`) and end (`end.json`), its events (`events.jsonl`) and its
replays (`replays.jsonl`). The labels of a run are the name, tags and notes that the user gives to the run after it
was recorded; each label is an event.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from rearview.model.wording import printable
from rearview.store.create_files import make_folder, make_new_folder, open_file, publish
from rearview.store.json_files import append_line, encode, fields_of_struct, read_facts, read_lines
from rearview.store.machine_and_process import is_alive, process_identity
from rearview.store.project import Project

FORMAT = 2
"""Format of the JSON files of runs. From format 2 on, every document and every line has a checksum."""
ACCOUNT = "energy.jsonl"
"""File in a run's folder: the times at which the run was active, and the energy that it used."""
TRACES = "traces.jsonl"
"""File in a run's folder: the previous content of each file that the run wrote, and the folders it created."""
TRACES_FORMAT = 2
ABSENT = "absent"
"""Value in `TRACES` for a file that did not exist before the run."""
_AGAIN = "-again"
_ID_STEP = 1 / 0x10000  # seconds: start times that differ by this much give different ids
_FIELDS = ("version", "script", "argv", "cwd", "parent", "args", "started")
NAME, TAG, UNTAG, NOTE = "name", "tag", "untag", "note"
"""Events of a run that set its name, add tags, remove tags, or set its note."""
LONGEST_LABEL = 100
"""Most characters of a name or tag."""
LONGEST_NOTE = 10_000
"""Most characters of one note about a run."""
_RESERVED_NAMES = ("latest", "worktree")
"""Words that cannot be names of runs, because commands give them another meaning."""
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of a part of a run; its records are in the run's folder."""

    id: str
    run: str
    started: float
    ended: float | None = None
    proved: bool | None = None
    """Whether all values that were compared with values of the run were equal; None while the replay runs."""
    start: ReplayStart = field(default_factory=ReplayStart)
    """Data stored when the replay started, such as its version and the names whose values it was to compute."""
    report: ReplayReport | None = None
    """Report of the replay; None while the replay runs, or if the report cannot be read."""
    redone: bool = False
    """Whether this replay was replaced by a later replay, which began at the start of the run."""

    @property
    def version(self) -> str:
        """The version that the replay ran: the source with the probes in it."""
        return self.start.version

    @property
    def names(self) -> tuple[str, ...]:
        """Names whose values the replay was to compute."""
        return self.start.names

    @property
    def proof(self) -> Proof:
        """How far the values of the replay can be trusted, and why."""
        return proof_of(self.report, proved=self.proved, redone=self.redone)

    @property
    def redoes(self) -> str:
        """Id of the earlier replay that this replay replaces; empty if it replaces none."""
        return _first_try(self.id) if self.start.redoes is None else self.start.redoes


def _read_report(values: object) -> ReplayReport | None:
    try:
        return msgspec.convert(values, ReplayReport)
    except msgspec.ValidationError:
        return None


def _first_try(replay: str) -> str:
    """Return the id of the replay that `replay` replaces, or "" if it replaces none.

    In old stores, the id of `replay` is the id of the replaced replay with the suffix `-again`.
    """
    return replay.removesuffix(_AGAIN) if replay.endswith(_AGAIN) else ""


def id_of_moment(moment: float) -> str:
    """Return the id of a run or replay that starts at `moment`, for example `20260314-092653-96cb`.

    The four hexadecimal digits at the end are the fraction of the second, so that ids sort by time, also the ids of
    runs that a script starts within one second.
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
        """Return a new, unique run id for a run that starts now, or at the time `now`, and create the run's folder."""
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
        """Store that `run` has started in this process; return the folder of the run.

        `facts` may hold version, script, argv, cwd, parent, args, started and heartbeat (seconds
        between signs of life). All other facts are stored as the `RunStart` of the run.
        """
        folder = self.folder(run)
        make_folder(folder)
        run_fields = {key: facts[key] for key in _FIELDS if key in facts}
        run_facts = {"format": FORMAT, "id": run, "started": time.time(), "cwd": str(Path.cwd())}
        run_facts |= {**run_fields, **process_identity(), "heartbeat": facts.get("heartbeat", 10.0)}
        run_facts["facts"] = {k: v for k, v in facts.items() if k not in (*_FIELDS, "heartbeat")}
        if (folder / "run.json").exists():
            raise StoreError(
                f"Run {run} has been started before. Resume it instead: `rearview resume`.",
                slug="run-exists",
            )
        publish(folder / "run.json", add_check(encode(run_facts)))
        self.heartbeat(run)
        return folder

    def resume(self, run: str, facts: Mapping[str, Any] | None = None) -> Path:
        """Store that this process resumes a run, with `facts` as fields of the event; return the folder of the run."""
        facts = {"heartbeat": 10.0, **(facts or {})}
        self.append_event(run, "resumed", {**facts, **process_identity()})
        self.heartbeat(run)
        return self.folder(run)

    def claim(self, run: str) -> None:
        """Claim the right to resume `run`; raise if another live process has claimed it.

        A claim is a numbered file, created as a link: only one process can create it, also on a shared disk. If
        the process that made the last claim is dead, the file with the next number is created, so that no claim
        ever has to be removed.
        """
        folder, identity = self.folder(run), process_identity()
        self.refuse_if_held(run)
        claim_file = folder / f".claim.{os.getpid()}.{os.urandom(4).hex()}"
        seconds = self.get(run).heartbeat
        publish(claim_file, add_check(encode({"format": FORMAT, "heartbeat": seconds, **identity})))
        try:
            while True:
                claims = sorted(folder.glob("attempt-*.json"))
                last_claim = _read(claims[-1]) if claims else None
                if last_claim is not None and _same_process(last_claim, identity):
                    return  # this process has claimed the run before
                if last_claim is not None and is_alive(
                    last_claim, _newest(claims[-1], folder / "heartbeat")
                ):
                    raise _held_error(run, last_claim)
                number = int(claims[-1].stem.partition("-")[2]) + 1 if claims else 1
                try:
                    _link(claim_file, folder / f"attempt-{number:06d}.json")
                except FileExistsError:
                    continue  # another process was first: check whether it is alive
                return
        finally:
            claim_file.unlink(missing_ok=True)

    def _holder(self, run: str) -> dict[str, Any] | None:
        """Return the identity of the live process that records a run now, or None if there is no such process."""
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
        """Return the measurements at the end of a run, or None if the run has not ended."""
        facts = _read(self.folder(run) / "end.json")
        return None if facts is None else read_record(RunEnd, facts)

    def refuse_if_held(self, run: str) -> None:
        """Raise if another live process records `run` now."""
        holder = self._holder(run)
        if holder is not None and not _same_process(holder, process_identity()):
            raise _held_error(run, holder)

    def heartbeat(self, run: str) -> None:
        """Show that a run is alive: set the modification time of its heartbeat file to now."""
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
        """Store that a run has ended, now or at `moment`, with its exit code and what it `measured`."""
        ended = time.time() if moment is None else moment
        events = read_lines(self.folder(run) / "events.jsonl", FORMAT)
        attempts = sum(event.get("event") == "resumed" for event in events)
        end = msgspec.structs.replace(
            measured or RunEnd(), time=ended, attempts=attempts, exit_code=exit_code
        )
        facts = {"format": FORMAT, **fields_of_struct(end)}
        publish(self.folder(run) / "end.json", add_check(encode(facts)))

    def append_event(self, run: str, event: str, facts: Mapping[str, Any]) -> None:
        """Append the event `event`, with `facts` as its fields, to the events of a run that has started."""
        line = {"format": FORMAT, "event": event, "time": time.time(), **facts}
        append_line(self.folder(run) / "events.jsonl", line)

    def created_paths(self, run: str) -> tuple[set[str], set[str]]:
        """Return (files, folders) that the run created, as paths relative to the root of the project."""
        files: set[str] = set()
        folders: set[str] = set()
        for line in read_lines(self.folder(run) / TRACES, TRACES_FORMAT):
            if "folder" in line:
                folders.add(str(line["folder"]))
            elif line.get("was") == ABSENT:
                files.add(str(line["path"]))
        return files, folders

    def update_args(self, run: str, args: Mapping[str, Any], origin: str = "") -> None:
        """Add `args`, values of hyper-parameters by name, to a run; a new value replaces an earlier value of the name.

        `origin` is the library by which the program reads its hyper-parameters, such as "argparse" or "hydra".
        """
        redacted = {name: redact_value(name, value) for name, value in args.items()}
        self.append_event(run, "args", {"args": redacted, **({"origin": origin} if origin else {})})

    def start_replay(self, run: str, replay: str, start: ReplayStart) -> None:
        """Store that a replay of `run` has started; `start` says what it is to compute."""
        line = {"format": FORMAT, "replay": replay, "started": time.time()}
        append_line(
            self.folder(run) / "replays.jsonl",
            {**line, **msgspec.to_builtins(start, str_keys=True)},
        )

    def end_replay(
        self, run: str, replay: str, *, proved: bool, report: ReplayReport | None = None
    ) -> None:
        """Store that a replay has ended; `proved` is True if all compared values were equal to those of the run."""
        line: dict[str, Any] = {"format": FORMAT, "replay": replay, "ended": time.time()}
        line["proved"] = proved
        if report is not None:
            line["report"] = msgspec.to_builtins(report)
        append_line(self.folder(run) / "replays.jsonl", line)

    def rebuild(self, run: str, version: str) -> None:
        """Write `run.json` of a run again, which was damaged, with only the id, the version and the start time.

        The start time is read from the id.
        """
        run_facts: dict[str, Any] = {"format": FORMAT, "id": run, "version": version}
        run_facts["started"] = _start_time(run)
        run_facts["facts"] = {"rebuilt": True}
        publish(self.folder(run) / "run.json", add_check(encode(run_facts)))

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
        """Return the ids of all runs that have started, sorted, so that older runs come first."""
        if not self._project.runs.is_dir():
            return []
        folders = self._project.runs.iterdir()
        return sorted(folder.name for folder in folders if (folder / "run.json").is_file())

    def all(self) -> list[Run]:
        """Return all runs in the order they started; for a run that cannot be read, `Run.damaged` says why."""
        out = []
        for run in self.ids():
            try:
                out.append(self.get(run))
            except DamagedError as exc:
                start = _start_time(run)
                out.append(Run(run, "", "", (), start, Status.DEAD, damaged=str(exc)))
        return sorted(out, key=lambda run: (run.started, run.id))

    def get(self, run: str) -> Run:
        """Return the run with the id `run`, with its current status."""
        folder = self.folder(run)
        run_facts = _read(folder / "run.json")
        if run_facts is None:
            raise self._unknown(run)
        process, attempt_began, args = (
            run_facts,
            float(run_facts.get("started", 0.0)),
            dict(run_facts.get("args") or {}),
        )
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
                process, attempt_began = event, float(event["time"])
                attempts += 1
            elif event.get("event") == "continued":
                continued.append(Continuation(str(event["version"]), str(event["point"])))
        damage = ""
        try:
            end = self._end(run)
        except DamagedError as exc:  # only `end.json` is damaged
            end, damage = None, str(exc)
        if end is not None and not _ended_after(end, attempts, attempt_began):
            end = None  # the run was resumed after this end
        code = None if end is None else end.exit_code
        if end is None:
            status = Status.RUNNING if is_alive(process, folder / "heartbeat") else Status.DEAD
        elif code == 0:
            status = Status.FINISHED
        else:
            status = Status.PAUSED if code == EXIT_PAUSED else Status.FAILED
        return Run(
            id=run,
            version=str(run_facts.get("version", "")),
            script=str(run_facts.get("script", "")),
            argv=tuple(run_facts.get("argv", ())),
            started=float(run_facts.get("started", 0.0)),
            status=status,
            ended=None if end is None else end.time,
            exit_code=code,
            host=str(process.get("host", "")),
            pid=int(process.get("pid", 0)),
            heartbeat=float(process.get("heartbeat", 10.0)),
            cwd=str(run_facts.get("cwd", "")),
            parent=run_facts.get("parent"),
            args=args,
            facts=read_record(RunStart, run_facts.get("facts", {})),
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
        """Return the name, tags and note of a run, even if its other files are damaged."""
        return labels_of(read_lines(self.folder(run) / "events.jsonl", FORMAT))

    def ids_by_name(self, name: str) -> list[str]:
        """Return the ids of the runs that have the name `name`, oldest first."""
        return [run for run in self.ids() if name and self.labels(run).name == name]

    def find(self, text: str) -> Run:
        """Return the run that `text` names: its id, its name, the beginning or end of its id, or its position.

        `latest` and `-1` are the newest run, `-2` is the run before the newest. Raise if there is no such run, or
        more than one.
        """
        return self.get(self.find_id(text))

    def is_stored(self, run: str) -> bool:
        """Return True if `run.json` of a run exists; the user may have removed the store during the run."""
        return (self.folder(run) / "run.json").exists()

    def find_id(self, text: str) -> str:
        """Return the id of the run that `text` names, as for `find`; the files of the run may be damaged."""
        if Path(text).name == text and (self.folder(text) / "run.json").is_file():
            return text  # a complete id: other runs need not be read
        ids = self.ids()
        if text == "latest" or _counts_from_end(text):
            ids = [run.id for run in self.all()]
            position = 1 if text == "latest" else -int(text)
            if position > len(ids):
                count_text = f"There are {len(ids)} runs" if ids else "There are no runs yet"
                if len(ids) == 1:
                    count_text = "There is 1 run"
                raise UsageError(
                    f"There is no run {text!r}. {count_text}; `rearview runs` lists them.",
                    slug="no-run",
                )
            return ids[-position]
        if text in ids:
            return text
        if (same_name := self.ids_by_name(text)) and len(same_name) > 1:
            raise UsageError(
                f"{len(same_name)} runs have the name {text!r}: {', '.join(same_name[-4:])}. Give the id, or "
                f"rename one: `rearview name {same_name[-1]} NEWNAME`.",
                slug="no-run",
            )
        if same_name:
            return same_name[0]
        matching_ids = [run for run in ids if text and (run.startswith(text) or run.endswith(text))]
        if len(matching_ids) == 1:
            return matching_ids[0]
        if matching_ids:
            newest = ", ".join(matching_ids[-4:])
            raise UsageError(
                f"{text!r} fits {len(matching_ids)} runs, the newest of them {newest}. Give more of the id.",
                slug="no-run",
            )
        raise self._unknown(text)

    def _unknown(self, text: str) -> UsageError:
        ids = self.ids()
        names = [name for run in ids if (name := self.labels(run).name)]
        similar_names = difflib.get_close_matches(text, [*names, *ids, "latest"], n=3, cutoff=0.5)
        hint = "No run has been recorded"
        if similar_names and ids:
            hint = f"Did you mean {' or '.join(similar_names)}?"
        elif ids:
            hint = f"The newest are {', '.join(ids[-3:])}, and `latest` is the last of them"
        return UsageError(
            f"There is no run {text!r}. {hint} (`rearview runs` lists them all).", slug="no-run"
        )


def _ended_after(end: RunEnd, attempts: int, began: float) -> bool:
    """Return True if `end` is the end of the last attempt at a run, which began at the time `began`.

    `attempts` is how often the run was resumed. If `end` has this number, the numbers are compared, because the
    clock may have been set back during the run. Only for old runs, the times are compared.
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
    """Create the file `target` with the content of `source`; raise `FileExistsError` if `target` exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # the file system does not support links
        with open(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:  # noqa: PTH123
            file.write(source.read_bytes())


def _same_process(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(key) == b.get(key) for key in ("host", "pid", "boot", "space", "born"))


def _newest(a: Path, b: Path) -> Path:
    """Return the file that was modified last; `a` if one of the two files does not exist."""
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
    """Return the time at which a run started, in seconds since 1970, according to its id; 0.0 if the id has no time."""
    try:
        return time.mktime(time.strptime(run[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return 0.0


class Labels(NamedTuple):
    """Name, tags and note that the user gave to a run; each is empty if not given."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


def labels_of(events: Iterable[Mapping[str, Any]]) -> Labels:
    """Return the name, tags and note of a run, given its events; the note joins all notes by line ends.

    >>> labels_of([{"event": "tag", "tags": ["a", "b"]}, {"event": "untag", "tags": ["a"]}])
    Labels(name='', tags=('b',), note='')
    """
    name, tags, notes = "", dict[str, None](), list[str]()
    for event in events:
        kind = event.get("event")
        if kind == NAME:
            name = str(event.get("name", ""))
        elif kind == TAG:
            tags |= dict.fromkeys(map(str, event.get("tags", ())))
        elif kind == UNTAG:
            for tag in event.get("tags", ()):
                tags.pop(str(tag), None)
        elif kind == NOTE:
            text = event.get("text")
            notes = [*notes, str(text)] if text is not None else []
    return Labels(name, tuple(tags), "\n".join(notes))


def check_name(text: str) -> str:
    """Return `text`, a name for a run, without surrounding spaces; raise if a run could not be found by this name."""
    name = _checked_label(text, "name")
    if name in _RESERVED_NAMES or _ID.fullmatch(name) or name.startswith("-"):
        raise UsageError(
            f"{name!r} cannot be the name of a run: commands take it for something else. Choose a "
            "name that is no id, does not begin with a dash, and is not `latest` or `worktree`.",
            slug="bad-label",
        )
    return name


def check_tag(text: str) -> str:
    """Return `text`, a tag, without surrounding spaces; raise if it is no valid label, or contains a comma."""
    tag = _checked_label(text, "tag")
    if "," in tag:
        raise UsageError(
            f"The tag {tag!r} has a comma, which separates tags where they are shown. Give two tags: "
            "`rearview tag RUN a b`.",
            slug="bad-label",
        )
    return tag


def check_note(text: str) -> str:
    """Return `text`, a note, without surrounding spaces; raise if it is empty or longer than `LONGEST_NOTE`."""
    note = text.strip()
    if not note or len(note) > LONGEST_NOTE:
        fault = "is empty" if not note else f"has {len(note):,} characters"
        raise UsageError(
            f"The note {fault}. Write 1 to {LONGEST_NOTE:,} characters: "
            '`rearview note RUN "diverged after the warm-up"`.',
            slug="bad-label",
        )
    return note


def _checked_label(text: str, label_kind: str) -> str:
    label = text.strip()
    if not label:
        fault = "is empty"
    elif printable(label, line=True) != label:
        fault = "has control characters"
    elif len(label) > LONGEST_LABEL:
        fault = f"has {len(label):,} characters"
    else:
        return label
    raise UsageError(
        f"The {label_kind} {printable(label[:LONGEST_LABEL], line=True)!r} {fault}. Give a {label_kind} of 1 to "
        f"{LONGEST_LABEL} visible characters, such as `baseline`.",
        slug="bad-label",
    )
