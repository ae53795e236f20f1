"""Look at everything in the store, and put right what can be put right."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rearview.errors import RearviewError, StoreError
from rearview.model import Checkpoint, ObjectRef
from rearview.store.checkpoints import Checkpoints
from rearview.store.direct import unwritable
from rearview.store.manifest import checkpoint_of, seal, unseal
from rearview.store.objects import Objects
from rearview.store.packs import body_of
from rearview.store.project import FORMAT, Project, publish
from rearview.store.sweep import bring_back


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written."""

    path: Path
    what: str
    done: str = ""
    """What was done about it; empty when nothing was."""
    lost: tuple[str, ...] = ()
    """Checkpoints that cannot be loaded because of it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was looked at, and what was found."""

    objects: int = 0
    packs: int = 0
    checkpoints: int = 0
    runs: int = 0
    nbytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Say whether everything is, or now is, as it should be."""
        return all(problem.done for problem in self.problems)


def verify(
    project: Project,
    *,
    repair: bool = False,
    records: Callable[[Path], Iterable[str]] | None = None,
    fetch: Callable[[str], bytes | None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check every byte of the store; with `repair` rebuild what can be, set aside what cannot.

    `records` is called with each run's folder and yields what is wrong with its records. `fetch`
    brings the content of an object from elsewhere by its oid. `progress` is told the bytes checked. Nothing is
    ever deleted: damaged files move to `.rearview/damaged/`.
    """
    check = _Check(project, repair, fetch, progress or (lambda _: None))
    try:
        if repair:
            bring_back(project)
        check.format()
        check.runs(records or (lambda _: ()))
        check.objects_of_their_own()
        check.manifests()
    except OSError as exc:
        raise unwritable(exc, "A repair", project.store) from exc
    return Report(
        objects=check.objects,
        packs=len(check.packs),
        checkpoints=check.checkpoints,
        runs=check.seen_runs,
        nbytes=check.nbytes,
        problems=tuple(check.problems),
    )


@dataclass(slots=True)
class _Check:
    project: Project
    repair: bool
    fetch: Callable[[str], bytes | None] | None
    progress: Callable[[int], None]
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    checkpoints: int = 0
    seen_runs: int = 0
    nbytes: int = 0
    packs: set[str] = field(default_factory=set)
    verdicts: dict[ObjectRef, str] = field(default_factory=dict)
    """What is wrong with a part; empty when it is good."""

    def format(self) -> None:
        try:
            self.project.check()
        except StoreError as exc:
            if exc.slug == "store-newer":
                raise
            done = ""
            if self.repair:
                publish(self.project.store / "format", b"%d\n" % FORMAT)
                done = "written anew"
            self._note(self.project.store / "format", str(exc), done)

    def runs(self, records: Callable[[Path], Iterable[str]]) -> None:
        if not self.project.runs.is_dir():
            return
        for folder in sorted(self.project.runs.iterdir()):
            if not folder.is_dir():
                continue
            self.seen_runs += 1
            for name in ("run.json", "end.json"):
                path = folder / name
                if not path.exists():
                    continue
                try:
                    json.loads(path.read_bytes())
                except (OSError, ValueError) as exc:
                    self._note(path, f"cannot be read: {exc}", self._aside(path))
            for what in records(folder):
                self._note(folder, what)

    def objects_of_their_own(self) -> None:
        store = Objects(self.project)
        for oid in store.all():
            self.objects += 1
            path = store.path(oid)
            try:
                ref = store.ref(oid)
            except FileNotFoundError:
                continue  # swept meanwhile
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
            return checkpoint_of(unseal(path.read_bytes(), name), store.objects.get)
        except FileNotFoundError:
            return None
        except RearviewError as exc:
            if exc.slug == "store-newer":
                raise
            why = str(exc)
        for pack in sorted((self.project.packs / path.parent.name).glob(f"{path.stem}-*.pack")):
            body = body_of(pack)
            if body is None:
                continue
            done = ""
            if self.repair:
                self._aside(path)
                publish(path, seal(body))
                done = f"rebuilt from {pack.name}"
            self._note(path, why, done)
            return checkpoint_of(unseal(seal(body), name), store.objects.get)
        self._note(path, why, self._aside(path), lost=(_id(path),))
        return None

    def _parts_of(self, store: Checkpoints, checkpoint: Checkpoint, path: Path) -> None:
        try:
            refs = list(checkpoint.parts.values())
        except RearviewError as exc:
            self._note(path, str(exc), self._aside(path), lost=(checkpoint.id,))
            return
        bad = ""
        for ref in refs:
            if ref.pack is not None:
                self.packs.add(ref.pack)
            elif not store.objects.has(ref.oid):
                self.verdicts[ref] = f"object {ref.oid[:12]} is missing"
            if self._judge(ref) and not self._bring_back(ref):
                bad = bad or f"{self.verdicts[ref]} ({store.objects.file(ref).name})"
        if bad:
            self._note(path, f"a part is lost: {bad}", self._aside(path), lost=(checkpoint.id,))

    def _judge(self, ref: ObjectRef) -> str:
        """Return what is wrong with `ref`, looking at its bytes once."""
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
        """Put a good copy from elsewhere in place of a damaged object."""
        if not self.repair or self.fetch is None or ref.pack is not None:
            return False
        store = Objects(self.project)
        data = self.fetch(ref.oid)
        if data is None:
            return False
        path = store.path(ref.oid)
        what, done = self.verdicts[ref], "brought back from the remote"
        if path.exists():
            self._aside(path)
        if store.put(data).oid != ref.oid:
            return False
        self.verdicts[ref] = ""
        self._note(path, what, done)
        return True

    def _aside(self, path: Path) -> str:
        if not self.repair:
            return ""
        place = self.project.damaged / path.relative_to(self.project.store)
        place.parent.mkdir(parents=True, exist_ok=True)
        number = 0
        while place.exists():
            number += 1
            place = place.with_name(f"{path.name}.{number}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(place)
        return f"set aside as {place.relative_to(self.project.store)}"

    def _note(self, path: Path, what: str, done: str = "", lost: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(path, what, done, lost))


def _id(path: Path) -> str:
    return f"{path.parent.name}/{int(path.stem)}" if path.stem.isdecimal() else path.stem
