"""Check every byte of the store, and repair damaged files if possible.

A repair moves damaged files to `.rearview/damaged/`; it deletes only stored states of cells, which a replay can
compute again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rearview.config import Settings
from rearview.errors import DamagedError, RearviewError, StoreError, VersionError
from rearview.model import Checkpoint, ObjectRef
from rearview.model.wording import plural
from rearview.store import printed_lines, recorded_inputs, trust
from rearview.store.checkpoints.checkpoints import Checkpoints, check_owner
from rearview.store.checkpoints.manifest_and_packs import checkpoint_of, pack_body, seal, unseal
from rearview.store.checkpoints.objects import Objects
from rearview.store.create_files import make_folder, publish, write_error
from rearview.store.json_files import CHECKED, damaged_lines, decode_facts, read_facts
from rearview.store.maintenance.thin_and_collect import restore_renamed
from rearview.store.project import FORMAT, Project
from rearview.store.records import scan, without_damage
from rearview.store.runs import ACCOUNT, Runs
from rearview.store.runs import FORMAT as FACTS
from rearview.store.tables.convert_to_parquet import unreadable_lines
from rearview.store.tables.duckdb_connection import Duck
from rearview.store.tables.read_record_files import summary_of
from rearview.store.versions.git_database import LooseDatabase
from rearview.store.versions.versions import Versions


class FileCheck(NamedTuple):
    """Result of checking one file of records."""

    file: Path
    damage: str = ""
    """The damage in words; empty if the file is intact."""
    has_checksums: bool = True
    """False for a file of an old format without checksums: changed values in it are not noticed."""


def check_records(project: Project) -> Iterator[str]:
    """Yield one sentence for every damaged run or file of records."""
    runs, duck = Runs(project), Duck(project.store)
    try:
        for run in runs.ids():
            try:
                damage = runs.get(run).damaged
                if damage:
                    yield damage
                runs.replays(run)
            except RearviewError as exc:
                yield str(exc)
            for check in check_record_files(duck, runs.folder(run)):
                if check.damage:
                    yield f"{check.file} {check.damage}"
    finally:
        duck.close()


def check_record_files(duck: Duck, folder: Path) -> Iterator[FileCheck]:
    """Yield the result of checking each file of records in a run's folder."""
    for file in sorted(folder.glob("records-*")):
        try:
            if file.suffix == ".jsonl":
                yield _check_lines(file)
            elif file.suffix == ".parquet":
                yield FileCheck(file, has_checksums=bool(summary_of(duck, file).check))
        except FileNotFoundError:
            continue  # a reader has just converted the file to Parquet
        except DamagedError as exc:
            yield FileCheck(file, f"is damaged: {exc}")
        except OSError as exc:
            yield FileCheck(file, f"cannot be read: {exc.strerror or exc}")


def _check_lines(file: Path) -> FileCheck:
    """Return the result of checking a file of records that has JSON lines, not Parquet."""
    scanned = scan(file)
    if scanned.header.format >= CHECKED:
        return FileCheck(
            file, f"has lost at least {plural(scanned.lost, 'record')}" if scanned.lost else ""
        )
    unreadable = unreadable_lines(scanned.lines)
    damage = (
        f"has {plural(unreadable, 'line')} that cannot be read; all others can."
        if unreadable
        else ""
    )
    return FileCheck(file, damage, has_checksums=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged file, and how it was repaired."""

    path: Path
    what: str
    """The damage in words."""
    done: str = ""
    """Words that say how the file was repaired; empty if it was not repaired."""
    lost: tuple[str, ...] = ()
    """Ids of checkpoints that cannot be loaded because of the damage."""
    run: str = ""
    """Id of the run to which the file belongs; empty if it does not belong to a single run."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of checking a store: how much was checked, and the damaged files."""

    objects: int = 0
    packs: int = 0
    checkpoints: int = 0
    runs: int = 0
    nbytes: int = 0
    problems: tuple[Problem, ...] = ()
    unchecked: int = 0
    """Number of files of an old format without checksums: changed values in them are not noticed."""

    @property
    def ok(self) -> bool:
        """Whether no file is damaged any more: there was no problem, or each was repaired."""
        return all(problem.done for problem in self.problems)


def verify(
    project: Project,
    *,
    repair: bool = False,
    versions: Versions | None = None,
    fetch: Callable[[str], bytes | None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check every byte of the store; with `repair`, rebuild damaged files or move them to `.rearview/damaged/`.

    `versions` reads the source of the project's versions, which may be in the user's git. `fetch(oid)` returns
    the bytes of an object from a remote, or None if the remote does not have the object. `progress` is called with
    the number of bytes checked so far.
    """
    sources = versions or Versions(project, Settings())
    check = _Check(project, repair, fetch, progress or (lambda _: None), sources)
    try:
        if repair:
            restore_renamed(project)
        check.format()
        check.runs()
        check.single_objects()
        check.manifests()
        check.versions()
        check.cell_states()
    except OSError as exc:
        raise write_error(exc, "A repair", project.store) from exc
    return VerifyReport(
        objects=check.objects,
        packs=len(check.packs),
        checkpoints=check.checkpoints,
        runs=check.checked_runs,
        nbytes=check.nbytes,
        problems=tuple(check.problems),
        unchecked=check.unchecked,
    )


@dataclass(slots=True)
class _Check:
    """A check of a store. Each method checks some files of the store, and adds damaged files to `problems`."""

    project: Project
    repair: bool
    fetch: Callable[[str], bytes | None] | None
    progress: Callable[[int], None]
    sources: Versions
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    checkpoints: int = 0
    checked_runs: int = 0
    nbytes: int = 0
    unchecked: int = 0
    packs: set[str] = field(default_factory=set)
    verdicts: dict[ObjectRef, str] = field(default_factory=dict)
    """Reference of an object, or of a slice of a pack -> its damage in words, empty if it is intact."""

    def format(self) -> None:
        try:
            self.project.check()
        except StoreError as exc:
            if exc.slug == "store-newer":
                raise
            repair = ""
            if self.repair:
                self._write_format()
                repair = "rewritten"
            self._note(self.project.store / "format", str(exc), repair)
            return
        layout = trust.layout_of(self.project.store)
        text = (self.project.store / "format").read_bytes()
        if not 1 <= int(text) <= FORMAT:
            damage = f"is {text!r}, which is not a format of a store"
            self._note(self.project.store / "format", damage, self._write_format())
        identity = self.project.store / trust.FILE
        if layout is None and identity.exists():
            damage = "is damaged: the store is not known to have been made here"
            self._note(identity, damage, self._aside(identity))

    def _write_format(self) -> str:
        if not self.repair:
            return ""
        number = trust.layout_of(self.project.store) or FORMAT
        publish(self.project.store / "format", b"%d\n" % number)
        return "rewritten"

    def runs(self) -> None:
        duck = Duck(self.project.store)
        try:
            for folder in self._folders(self.project.runs):
                self.checked_runs += 1
                self._facts(folder)
                for name in (
                    "events.jsonl",
                    "replays.jsonl",
                    "traces.jsonl",
                    "environment.jsonl",
                    ACCOUNT,
                ):
                    self._lines(folder / name)
                self._printed(folder)
                self._clock(folder)
                for check in check_record_files(duck, folder):
                    self.unchecked += not check.has_checksums
                    if check.damage:
                        self._note(check.file, check.damage, self._without_damage(check.file))
        finally:
            duck.close()

    def _folders(self, parent: Path) -> list[Path]:
        return (
            sorted(folder for folder in parent.iterdir() if folder.is_dir())
            if parent.is_dir()
            else []
        )

    def _facts(self, folder: Path) -> None:
        for name in ("run.json", "end.json"):
            path = folder / name
            try:
                self.unchecked += read_facts(path, FACTS).get("format", 1) < CHECKED
            except FileNotFoundError:
                continue
            except DamagedError as exc:
                repair = self._aside(path)
                lost_facts = "how it ended, its loops and its costs"
                if name == "run.json" and self.repair:
                    version = self.sources.versions_by_ref().get(f"runs/{folder.name}", "")
                    Runs(self.project).rebuild(folder.name, version)
                    lost_facts = "its command, its arguments and its surroundings"
                    repair += "; rewritten from its id and its version"
                self._note(path, str(exc), f"{repair}; {lost_facts} are lost" if repair else "")

    def _lines(self, path: Path) -> None:
        """Check the file `path` of JSON lines, each of which has a checksum."""
        damaged = damaged_lines(path, FACTS)
        if not damaged:
            return
        repair = ""
        if self.repair:
            intact = [line for line in path.read_bytes().split(b"\n") if decode_facts(line, FACTS)]
            repair = f"{self._aside(path)}; intact lines stay"
            publish(path, b"".join(line + b"\n" for line in intact))
        self._note(path, f"{plural(damaged, 'line')} damaged, or cut off by a kill", repair)

    def _printed(self, folder: Path) -> None:
        path = folder / printed_lines.FILE
        intact, damaged = printed_lines.intact_lines(folder)
        if intact and not printed_lines.has_checksums(folder):
            self.unchecked += 1
        if not damaged:
            return
        repair = ""
        if self.repair:
            repair = f"{self._aside(path)}; intact lines stay"
            publish(path, b"".join(line + b"\n" for line in intact))
        self._note(path, f"{plural(damaged, 'printed line')} damaged", repair)

    def _clock(self, folder: Path) -> None:
        path = folder / recorded_inputs.CLOCK_FILE
        try:
            recorded_inputs.read_clock(path)
        except DamagedError as exc:
            repair = self._aside(path)
            if repair:
                recorded_inputs.remove_clock(path)
            loss = "its clock readings are lost: replays of it may differ"
            self._note(path, str(exc), f"{repair}; {loss}" if repair else "")

    def _without_damage(self, file: Path) -> str:
        """Repair a damaged file of records; return in words how, or "" if the check is not to repair.

        The file is moved to `.rearview/damaged/`, and its intact records are written to a new file of its name.
        """
        if not self.repair:
            return ""
        intact = without_damage(file) if file.suffix == ".jsonl" else None
        repair = self._aside(file)
        if intact is None:
            return f"{repair}; all records in it are lost"
        publish(file, intact)
        return f"{repair}; intact records stay"

    def cell_states(self) -> None:
        """Check the states of cells that replays of many versions have stored, and the file of measurements of cells."""
        multiversion_folder = self.project.store / "multiversion"
        for folder in self._folders(multiversion_folder / "states"):
            damage = _state_damage(folder)
            if damage:
                # the next replay that needs the state computes it again
                repair = "removed" if self.repair else ""
                if self.repair:
                    shutil.rmtree(folder, ignore_errors=True)
                self._note(folder, damage, repair)
        file = multiversion_folder / "cells.jsonl"
        if file.is_file():
            unreadable_lines = sum(not _is_json(line) for line in file.read_bytes().splitlines())
            if unreadable_lines:
                damage = (
                    f"has {plural(unreadable_lines, 'line')} that cannot be read; all others can."
                )
                self._note(file, damage, "skipped")

    def versions(self) -> None:
        try:
            for damage in self.sources.damage():
                path, repair = damage.file, ""
                version_name = damage.name.removeprefix("runs/")
                if self.repair and isinstance(damage.database, LooseDatabase):
                    repair = self._aside(path) if path.is_file() else ""
                    if damage.ref.is_file() and path != damage.ref:
                        repair += f", {self._aside(damage.ref)}"
                    repair += f"; the source of {version_name} is lost"
                text = (
                    f"{damage.oid[:12]}, part of the source of {version_name}, {damage.description}"
                )
                self._note(path, text, repair)
        except (VersionError, OSError) as exc:
            self._note(self.project.store / "versions.git", str(exc))

    def single_objects(self) -> None:
        """Check the objects that are files of their own; small objects are in packs, with their manifests."""
        store = Objects(self.project)
        for oid in store.all():
            self.objects += 1
            path = store.path(oid)
            try:
                ref = store.ref(oid)
            except FileNotFoundError:
                continue  # garbage collection has just removed the object
            except OSError:
                ref = ObjectRef(oid, path.stat().st_size)
            if self._judge(ref) and not self._bring_back(ref):
                self._note(path, self.verdicts[ref], self._aside(path))

    def manifests(self) -> None:
        store = Checkpoints(self.project)
        for run in store.runs():
            for path in sorted((self.project.checkpoints / run).glob("[!.]*.json")):
                self.checkpoints += 1
                checkpoint = self._manifest(store, path)
                if checkpoint is not None:
                    self._parts_of(store, checkpoint, path)

    def _manifest(self, store: Checkpoints, path: Path) -> Checkpoint | None:
        name = f"{path.parent.name}/{path.stem}"
        try:
            return check_owner(
                path, checkpoint_of(unseal(path.read_bytes(), name), store.objects.get)
            )
        except FileNotFoundError:
            return None
        except RearviewError as exc:
            if exc.slug == "store-newer":
                raise
            damage = str(exc)
        for pack in sorted((self.project.packs / path.parent.name).glob(f"{path.stem}-*.pack")):
            body = pack_body(pack)
            if body is None:
                continue
            repair = ""
            if self.repair:
                self._aside(path)
                publish(path, seal(body))
                repair = f"rebuilt from {pack.name}"
            self._note(path, damage, repair)
            return checkpoint_of(unseal(seal(body), name), store.objects.get)
        self._note(path, damage, self._aside(path), lost=(_id(path),))
        return None

    def _parts_of(self, store: Checkpoints, checkpoint: Checkpoint, path: Path) -> None:
        try:
            refs = list(checkpoint.parts.values())
        except RearviewError as exc:
            self._note(path, str(exc), self._aside(path), lost=(checkpoint.id,))
            return
        damage = ""
        for ref in refs:
            if ref.pack is not None:
                self.packs.add(ref.pack)
            elif not store.objects.has(ref.oid):
                self.verdicts[ref] = f"object {ref.oid[:12]} is missing"
            if self._judge(ref) and not self._bring_back(ref):
                damage = damage or f"{self.verdicts[ref]} ({store.objects.file(ref).name})"
        if damage:
            self._note(path, f"a part is lost: {damage}", self._aside(path), lost=(checkpoint.id,))

    def _judge(self, ref: ObjectRef) -> str:
        """Read the object or slice `ref`, if it was not read before; return its damage in words, or "" if intact."""
        verdict = self.verdicts.get(ref)
        if verdict is None:
            verdict = ""
            try:
                Objects(self.project).check(ref)
            except RearviewError as exc:
                verdict = str(exc)
            self.verdicts[ref] = verdict
            self.nbytes += ref.nbytes
            self.progress(self.nbytes)
        return verdict

    def _bring_back(self, ref: ObjectRef) -> bool:
        """Replace the damaged object `ref` by a copy from the remote, if repairing; return True if that succeeded."""
        if not self.repair or self.fetch is None or ref.pack is not None:
            return False
        store = Objects(self.project)
        data = self.fetch(ref.oid)
        if data is None:
            return False
        path = store.path(ref.oid)
        damage, repair = self.verdicts[ref], "brought back from the remote"
        if path.exists():
            self._aside(path)
        if store.put(data).oid != ref.oid:
            return False
        self.verdicts[ref] = ""
        self._note(path, damage, repair)
        return True

    def _aside(self, path: Path) -> str:
        """If repairing, move a file to `.rearview/damaged/` and return a phrase with its new path; else return ""."""
        if not self.repair:
            return ""
        target = self.project.damaged / path.relative_to(self.project.store)
        make_folder(target.parent)
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{path.name}.{number}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
        return f"set aside as {target.relative_to(self.project.store)}"

    def _note(self, path: Path, damage: str, repair: str = "", lost: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(path, damage, repair, lost, _run_of(path, self.project)))


def _state_damage(folder: Path) -> str:
    """Return in words the damage of the stored state of a cell in `folder`, or "" if the state is complete."""
    try:
        facts = json.loads((folder / "complete.json").read_text("utf-8"))
        size = (folder / "namespace").stat().st_size
        if size != facts["bytes"]:
            return f"has {size} of {facts['bytes']} bytes"
    except FileNotFoundError:
        return "is incomplete: the replay that stored it was interrupted"
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return f"cannot be read: {exc}"
    return ""


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _run_of(path: Path, project: Project) -> str:
    """Return the id of the run whose folder of records, packs or manifests contains `path`, or "" if there is none."""
    for folder in (project.runs, project.packs, project.checkpoints):
        if path.is_relative_to(folder):
            return path.relative_to(folder).parts[0]
    return ""


def _id(path: Path) -> str:
    return f"{path.parent.name}/{int(path.stem)}" if path.stem.isdecimal() else path.stem
