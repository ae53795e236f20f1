"""Versions: save, read, derive, export and compare the source of every run, as git trees."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rearview.config import Settings
from rearview.errors import VersionError
from rearview.store.create_files import make_folder, write_error
from rearview.store.project import Project
from rearview.store.versions import source_files
from rearview.store.versions.git import (
    REFS,
    Entry,
    GitDatabase,
    LooseDatabase,
    empty_repository,
    has_git,
    repository,
    rows_of,
    tree_of,
)

Database = GitDatabase | LooseDatabase
_LINK = "120000"
_MODULE = "160000"
"""Mode of a submodule, whose commit is not stored here."""
_NAME = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_DERIVED = re.compile(r"derived from ([0-9a-f]+)\s*$")
WORKTREE = "worktree"
"""Names the source as it is now, where a version or run is expected."""
MOST_SEEN = 64
"""Most versions whose lists of files are cached."""


class Damage(NamedTuple):
    """An object of a version that is missing or damaged."""

    home: Database
    name: str
    """Ref that needs it: `runs/<run>` or `derived/<version>`."""
    oid: str
    what: str

    @property
    def file(self) -> Path:
        """The file of the object in Rearview's database; else the database."""
        if not isinstance(self.home, LooseDatabase):
            return self.home.git_dir
        place = self.home.git_dir / "objects" / self.oid[:2] / self.oid[2:]
        return place if _NAME.fullmatch(self.oid) and place.is_file() else self.ref

    @property
    def ref(self) -> Path:
        """The file of the ref."""
        return self.home.git_dir / REFS / self.name


def _first_bad(home: Database, top: str, sound: set[str]) -> tuple[str, str] | None:
    """Return the first object below `top` that is missing or damaged, and why."""
    todo = [top]
    seen: set[str] = set()
    while todo:
        names = [name for name in dict.fromkeys(todo) if name not in sound | seen]
        todo = []
        for name, content in zip(names, home.raw(names), strict=True):
            if content is None:
                return name, "is missing, or cannot be read"
            kind, data = content
            if _hash(kind, data, len(name)) != name:
                return name, "is damaged: its content has another hash"
            seen.add(name)
            if kind == "commit":
                todo.append(tree_of(data))
            elif kind == "tree":
                size = len(name) // 2
                todo += [oid for mode, _, oid in rows_of(data, size) if mode != _MODULE]
    sound |= seen  # trees above a damaged object are not intact, for other versions either
    return None


def _hash(kind: str, data: bytes, length: int) -> str:
    method = hashlib.sha1 if length == 40 else hashlib.sha256
    whole = b"%b %d\0%b" % (kind.encode(), len(data), data)
    return method(whole, usedforsecurity=False).hexdigest()


class Versions:
    """The versions of a project's source; a version is named by the hash of its tree.

    In a git repository they are in the repository's own object database, under
    `refs/rearview/runs/<run>` and `refs/rearview/derived/<version>`; nothing else in the repository
    is written. Anywhere else they are in `.rearview/versions.git`.
    """

    def __init__(self, project: Project, settings: Settings) -> None:
        self._project = project
        self._limit = settings.max_source
        self._scratch = project.cache / "versions"
        self._own = project.store / "versions.git"
        self._home: Database | None = None
        self._seen: dict[str, tuple[Database, dict[bytes, Entry]]] = {}
        """Database and files of versions, cached; a version never changes."""

    def save(self, run: str) -> str:
        """Store the current text files of the project for `run`; return the version.

        Tracked and untracked files are taken; ignored, big and binary ones are not.
        """
        try:
            return self._saved(run)
        except OSError as exc:
            raise write_error(exc, "The source as it is now", self._scratch) from exc

    def _saved(self, run: str) -> str:
        home = self._database()
        try:
            return self._save(home, run)
        except (VersionError, OSError):
            # the cache names objects that were removed, or the repository is read-only: start over,
            # and if that fails too, use a database of Rearview
            (self._scratch / "seen").unlink(missing_ok=True)
        try:
            return self._save(home, run)
        except (VersionError, OSError):
            if home.own:
                raise
            self._home = self._begin_own()
            return self._save(self._home, run)

    def _save(self, home: Database, run: str) -> str:
        file = self._scratch / "seen"
        cache = source_files.Cache.read(file, home.place, self._limit)
        asof = _clock(self._scratch)
        scan = source_files.scan_source(home, cache)
        if not scan.files and home.ignores_all():
            self._home = self._begin_own()
            return self._save(self._home, run)
        entries = scan.entries()
        tree = self._tree(home, cache, entries)
        home.keep(f"runs/{run}", tree, f"run {run}\n")
        if scan.changed or scan.files.keys() != cache.files.keys():
            new = source_files.Cache(
                place=home.place, tree=tree, asof=asof, limit=self._limit, files=scan.files
            )
            new.write(file)
        return tree

    def _tree(self, home: Database, cache: source_files.Cache, entries: dict[bytes, Entry]) -> str:
        if not cache.tree:
            return home.tree(None, dict(entries))
        old = source_files.SourceScan(cache.files).entries()
        changes: dict[bytes, Entry | None] = {
            path: entry for path, entry in entries.items() if old.get(path) != entry
        }
        changes |= dict.fromkeys(old.keys() - entries.keys())
        # removals first: a file may replace a folder
        changes = dict(sorted(changes.items(), key=lambda item: item[1] is not None))
        return home.tree(cache.tree, changes) if changes else cache.tree

    def derive(self, version: str, changes: Mapping[str, bytes | None]) -> str:
        """Return `version` with files replaced, added or, if None, removed, as a new version."""
        home, old = self._look(version)
        entries: dict[bytes, Entry | None] = {}
        for path, data in changes.items():
            key = os.fsencode(path)
            mode = old[key][0] if key in old and old[key][0] != _LINK else "100644"
            entries[key] = None if data is None else (mode, home.put(data))
        tree = home.tree(version, entries)
        home.keep(f"derived/{tree}", tree, f"derived from {version}\n")  # as `parents` reads it
        return tree

    def files(self, version: str) -> dict[str, bytes]:
        """Return content by path of every file of a version; links are left out."""
        home, entries = self._look(version)
        names = {p: name for p, (mode, name) in entries.items() if mode != _LINK}
        blobs = home.blobs(names.values())
        return {os.fsdecode(path): data for path, data in zip(names, blobs, strict=True)}

    def packed(self, version: str) -> dict[str, tuple[str, bytes]]:
        """Return mode and content by path of everything in a version, links included."""
        home, entries = self._look(version)
        blobs = home.blobs([name for _, name in entries.values()])
        return {
            os.fsdecode(path): (mode, data)
            for (path, (mode, _)), data in zip(entries.items(), blobs, strict=True)
        }

    def adopt(self, run: str, packed: Mapping[str, tuple[str, bytes]]) -> str:
        """Store a version from another store for `run`; return its id."""
        home = self._database()
        entries: dict[bytes, Entry | None] = {
            os.fsencode(path): (mode, home.put(data)) for path, (mode, data) in packed.items()
        }
        tree = home.tree(None, entries)
        home.keep(f"runs/{run}", tree, f"run {run}\n")
        return tree

    def hashes(self, version: str) -> dict[str, str]:
        """Return git's name of the content by path of every file of a version."""
        _, entries = self._look(version)
        return {os.fsdecode(path): name for path, (_, name) in entries.items()}

    def read(self, version: str, path: str) -> bytes:
        """Return the content of one file of a version, following links inside it."""
        home, entries = self._look(version)
        key = os.fsencode(os.path.normpath(path))
        for _ in range(40):
            if key not in entries:
                break
            mode, name = entries[key]
            data = next(home.blobs([name]))
            if mode != _LINK:
                return data
            key = os.path.normpath(os.path.join(os.path.dirname(key), data))  # noqa: PTH118, PTH120
        raise VersionError(
            f"Version {version[:12]} has no file {path!r}: it did not exist then, was ignored, or "
            f"was larger than the setting max_source ({self._limit} bytes).",
            slug="version-file",
        )

    def export(self, version: str, folder: Path) -> None:
        """Write all files of a version below `folder`, which is created if needed."""
        home, entries = self._look(version)
        # links last, so that no file is written through one
        ordered = sorted(entries.items(), key=lambda item: item[1][0] == _LINK)
        blobs = home.blobs(name for _, (_, name) in ordered)
        for (path, (mode, _)), data in zip(ordered, blobs, strict=True):
            file = folder / os.fsdecode(path)
            make_folder(file.parent)
            file.unlink(missing_ok=True)
            if mode == _LINK:
                file.symlink_to(self._aim(os.fsdecode(path), os.fsdecode(data)))
            else:
                file.write_bytes(data)
                file.chmod(0o700 if mode == "100755" else 0o600)

    def _aim(self, path: str, link: str) -> str:
        """Return the target of an exported link; one that leads out of the project still does."""
        target = os.path.normpath(os.path.join(os.path.dirname(path), link))  # noqa: PTH118, PTH120
        if target.startswith("..") and not os.path.isabs(link):  # noqa: PTH117
            return os.path.normpath(self._project.root / target)
        return link

    def diff(self, a: str, b: str) -> str:
        """Return the unified diff from version `a` to version `b`."""
        home_a, home_b = self._holding(a), self._holding(b)
        if isinstance(home_a, GitDatabase) and home_a is home_b:
            return home_a.diff(a, b)
        with empty_repository(self._project.root) as git:
            shared = LooseDatabase(git.git_dir, self._project.root)
            first, second = (
                shared.tree(
                    None,
                    {
                        os.fsencode(path): (mode, shared.put(data))
                        for path, (mode, data) in self.packed(version).items()
                    },
                )
                for version in (a, b)
            )
            return (git if has_git(self._project.root) else shared).diff(first, second)

    def names(self) -> dict[str, str]:
        """Return the versions by name: `runs/<run>` or `derived/<version>`."""
        out: dict[str, str] = {}
        for home in self._all():
            out.update(home.names())
        return out

    def parents(self) -> dict[str, str]:
        """Return the version that each derived version was made from."""
        out: dict[str, str] = {}
        for home in self._all():
            for name, message in home.messages("derived/").items():
                match = _DERIVED.match(message)
                if match is not None:
                    out[name.removeprefix("derived/")] = match[1]
        return out

    def damage(self) -> Iterator[Damage]:
        """Read every object of every version; yield each that is damaged."""
        for home in self._all():
            if home.own and not (home.git_dir / "HEAD").is_file():
                continue
            sound: set[str] = set()
            refs = home.refs() if isinstance(home, LooseDatabase) else home.names()
            for name, top in refs.items():
                bad = _first_bad(home, top, sound)
                if bad is not None:
                    yield Damage(home, name, *bad)

    def drop(self, run: str) -> None:
        """Delete the ref of a run's version; git frees its space if nothing else needs it."""
        for home in self._all():
            home.drop(f"runs/{run}")

    def drop_derived(self, version: str) -> None:
        """Delete the ref of a derived version."""
        if _NAME.fullmatch(version):
            for home in self._all():
                home.drop(f"derived/{version}")

    def _look(self, version: str) -> tuple[Database, dict[bytes, Entry]]:
        """Return the database that holds a version, and its files by path."""
        if version not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            home = self._holding(version)
            entries = home.entries(version)
            for path in entries:
                _check_path(path, version)
            self._seen[version] = (home, entries)
        return self._seen[version]

    def _holding(self, version: str) -> Database:
        homes = self._all()
        for home in homes if _NAME.fullmatch(version) else ():
            if home.has(version):
                return home
        raise VersionError(
            f"Version {version[:12]} is not in {' or '.join(h.place for h in homes)}: its refs "
            "were removed, or it was recorded elsewhere. Bring it from another copy.",
            slug="version-missing",
        )

    def _all(self) -> list[Database]:
        home = self._database()
        if home.own or not (self._own / "HEAD").is_file():
            return [home]
        return [home, self._begin_own()]

    def _database(self) -> Database:
        if self._home is None:
            git_dir = repository(self._project.root)
            if git_dir is None:
                self._home = self._begin_own()
            else:
                self._home = GitDatabase(git_dir, self._project.root, self._scratch, own=False)
        return self._home

    def _begin_own(self) -> Database:
        return LooseDatabase(self._own, self._project.root)


def _check_path(path: bytes, version: str) -> None:
    """Raise if a path would be outside the folder of its version."""
    if not {b"", b".", b"..", b".git"}.isdisjoint(path.lower().split(b"/")):
        raise VersionError(
            f"Version {version[:12]} has a file named {os.fsdecode(path)!r}, which would land "
            "outside its folder. It was not written by Rearview; do not trust it.",
            slug="version-file",
        )


def _clock(folder: Path) -> int:
    """Return the time by the clock of the file system, which sets the times of files."""
    make_folder(folder)
    file = folder / f".clock.{os.getpid()}"
    try:
        file.write_bytes(b"")
        return file.stat().st_mtime_ns
    finally:
        file.unlink(missing_ok=True)
