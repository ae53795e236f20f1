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
from rearview.store.versions.git_database import (
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
"""Mode of a submodule in a git tree; the commit of a submodule is not stored here."""
_NAME = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_DERIVED = re.compile(r"derived from ([0-9a-f]+)\s*$")
WORKTREE = "worktree"
"""Word that the user may write in place of a version or run; it means the current source of the project."""
MOST_CACHED = 64
"""Most versions whose lists of files are cached in memory."""


class Damage(NamedTuple):
    """A git object of a version that is missing or damaged."""

    database: Database
    name: str
    """Ref of the version: `runs/<run>` or `derived/<version>`."""
    oid: str
    description: str
    """The damage in words."""

    @property
    def file(self) -> Path:
        """The path to report to the user: the file of the damaged object if it exists, else the file of the ref.

        In the user's git repository, this is the git directory.
        """
        if not isinstance(self.database, LooseDatabase):
            return self.database.git_dir
        object_file = self.database.git_dir / "objects" / self.oid[:2] / self.oid[2:]
        return object_file if _NAME.fullmatch(self.oid) and object_file.is_file() else self.ref

    @property
    def ref(self) -> Path:
        """The file that holds the ref of the version."""
        return self.database.git_dir / REFS / self.name


def _first_damage(database: Database, top: str, intact: set[str]) -> tuple[str, str] | None:
    """Return (object name, damage in words) of the first missing or damaged object at or below the object `top`.

    Return None if there is no such object; then all objects that were read are added to `intact`. Objects in
    `intact` are not read again.
    """
    todo = [top]
    visited: set[str] = set()
    while todo:
        names = [name for name in dict.fromkeys(todo) if name not in intact | visited]
        todo = []
        for name, content in zip(names, database.raw(names), strict=True):
            if content is None:
                return name, "is missing, or cannot be read"
            kind, data = content
            if _hash(kind, data, len(name)) != name:
                return name, "is damaged: its content has another hash"
            visited.add(name)
            if kind == "commit":
                todo.append(tree_of(data))
            elif kind == "tree":
                size = len(name) // 2
                todo += [oid for mode, _, oid in rows_of(data, size) if mode != _MODULE]
    # only now: if an object is damaged, the trees that contain it must be read again for the next version
    intact |= visited
    return None


def _hash(kind: str, data: bytes, length: int) -> str:
    method = hashlib.sha1 if length == 40 else hashlib.sha256
    content = b"%b %d\0%b" % (kind.encode(), len(data), data)
    return method(content, usedforsecurity=False).hexdigest()


class Versions:
    """The versions of a project's source; a version is named by the hash of its tree.

    If the project is in a git repository, its versions are stored in the object database of the repository,
    under `refs/rearview/runs/<run>` and `refs/rearview/derived/<version>`; nothing else in the repository
    is written. Else they are stored in `.rearview/versions.git`.
    """

    def __init__(self, project: Project, settings: Settings) -> None:
        self._project = project
        self._limit = settings.max_source
        self._scratch = project.cache / "versions"
        self._own = project.store / "versions.git"
        self._database_in_use: Database | None = None
        self._entries_cache: dict[str, tuple[Database, dict[bytes, Entry]]] = {}
        """Version -> (its database, its files by path): a cache, because these never change."""

    def save(self, run: str) -> str:
        """Store the current source of the project as the version of `run`; return the version.

        The source is all text files, tracked by git or not, without ignored, large and binary files.
        """
        try:
            return self._save_with_retries(run)
        except OSError as exc:
            raise write_error(exc, "The source as it is now", self._scratch) from exc

    def _save_with_retries(self, run: str) -> str:
        database = self._database()
        try:
            return self._save(database, run)
        except (VersionError, OSError):
            # The cache may name objects that were removed: scan again without the cache. If this fails, too,
            # the user's repository may be read-only: use a database of Rearview.
            (self._scratch / "seen").unlink(missing_ok=True)
        try:
            return self._save(database, run)
        except (VersionError, OSError):
            if database.own:
                raise
            self._database_in_use = self._begin_own()
            return self._save(self._database_in_use, run)

    def _save(self, database: Database, run: str) -> str:
        file = self._scratch / "seen"
        cache = source_files.ScanCache.read(file, database.place, self._limit)
        asof = _clock(self._scratch)
        scan = source_files.scan_source(database, cache)
        if not scan.files and database.ignores_all():
            self._database_in_use = self._begin_own()
            return self._save(self._database_in_use, run)
        entries = scan.entries()
        tree = self._tree(database, cache, entries)
        database.keep(f"runs/{run}", tree, f"run {run}\n")
        if scan.changed or scan.files.keys() != cache.files.keys():
            new = source_files.ScanCache(
                place=database.place, tree=tree, asof=asof, limit=self._limit, files=scan.files
            )
            new.write(file)
        return tree

    def _tree(
        self, database: Database, cache: source_files.ScanCache, entries: dict[bytes, Entry]
    ) -> str:
        if not cache.tree:
            return database.tree(None, dict(entries))
        old_entries = source_files.SourceScan(cache.files).entries()
        changes: dict[bytes, Entry | None] = {
            path: entry for path, entry in entries.items() if old_entries.get(path) != entry
        }
        changes |= dict.fromkeys(old_entries.keys() - entries.keys())
        # removals first, because a file may replace a folder
        changes = dict(sorted(changes.items(), key=lambda item: item[1] is not None))
        return database.tree(cache.tree, changes) if changes else cache.tree

    def derive(self, version: str, changes: Mapping[str, bytes | None]) -> str:
        """Store a new version that is `version` with changed files; return the new version.

        `changes` has the new content of each changed file by path, or None for a file to remove.
        """
        database, old_entries = self._look(version)
        entries: dict[bytes, Entry | None] = {}
        for path, data in changes.items():
            key = os.fsencode(path)
            mode = (
                old_entries[key][0]
                if key in old_entries and old_entries[key][0] != _LINK
                else "100644"
            )
            entries[key] = None if data is None else (mode, database.put(data))
        tree = database.tree(version, entries)
        # the method `parents` reads this message
        database.keep(f"derived/{tree}", tree, f"derived from {version}\n")
        return tree

    def files(self, version: str) -> dict[str, bytes]:
        """Return a mapping from the path of every file of a version to its content; links are left out."""
        database, entries = self._look(version)
        names = {p: name for p, (mode, name) in entries.items() if mode != _LINK}
        blobs = database.blobs(names.values())
        return {os.fsdecode(path): data for path, data in zip(names, blobs, strict=True)}

    def packed(self, version: str) -> dict[str, tuple[str, bytes]]:
        """Return a mapping from the path of every file and link of a version to (mode, content).

        `adopt` stores the version in another store from this mapping.
        """
        database, entries = self._look(version)
        blobs = database.blobs([name for _, name in entries.values()])
        return {
            os.fsdecode(path): (mode, data)
            for (path, (mode, _)), data in zip(entries.items(), blobs, strict=True)
        }

    def adopt(self, run: str, packed: Mapping[str, tuple[str, bytes]]) -> str:
        """Store a version of another store, as `packed` returned it there, as the version of `run`; return the version."""
        database = self._database()
        entries: dict[bytes, Entry | None] = {
            os.fsencode(path): (mode, database.put(data)) for path, (mode, data) in packed.items()
        }
        tree = database.tree(None, entries)
        database.keep(f"runs/{run}", tree, f"run {run}\n")
        return tree

    def hashes(self, version: str) -> dict[str, str]:
        """Return a mapping from the path of every file of a version to git's hash of its content."""
        _, entries = self._look(version)
        return {os.fsdecode(path): name for path, (_, name) in entries.items()}

    def read(self, version: str, path: str) -> bytes:
        """Return the content of one file of a version; links to other files of the version are followed."""
        database, entries = self._look(version)
        key = os.fsencode(os.path.normpath(path))
        for _ in range(40):
            if key not in entries:
                break
            mode, name = entries[key]
            data = next(database.blobs([name]))
            if mode != _LINK:
                return data
            key = os.path.normpath(os.path.join(os.path.dirname(key), data))  # noqa: PTH118, PTH120
        raise VersionError(
            f"Version {version[:12]} has no file {path!r}: it did not exist then, was ignored, or "
            f"was larger than the setting max_source ({self._limit} bytes).",
            slug="version-file",
        )

    def export(self, version: str, folder: Path) -> None:
        """Write all files of a version into `folder`, which is created if it does not exist."""
        database, entries = self._look(version)
        # links are written last, so that no file is written through a link
        ordered = sorted(entries.items(), key=lambda item: item[1][0] == _LINK)
        blobs = database.blobs(name for _, (_, name) in ordered)
        for (path, (mode, _)), data in zip(ordered, blobs, strict=True):
            file = folder / os.fsdecode(path)
            make_folder(file.parent)
            file.unlink(missing_ok=True)
            if mode == _LINK:
                file.symlink_to(self._exported_target(os.fsdecode(path), os.fsdecode(data)))
            else:
                file.write_bytes(data)
                file.chmod(0o700 if mode == "100755" else 0o600)

    def _exported_target(self, path: str, link: str) -> str:
        """Return the target for an exported link, which is at `path` in the version and has the target `link` there.

        If the link is relative and leads out of the project, the target is made absolute, because the export is in
        another folder than the project.
        """
        target = os.path.normpath(os.path.join(os.path.dirname(path), link))  # noqa: PTH118, PTH120
        if target.startswith("..") and not os.path.isabs(link):  # noqa: PTH117
            return os.path.normpath(self._project.root / target)
        return link

    def diff(self, a: str, b: str) -> str:
        """Return the unified diff from version `a` to version `b`."""
        database_a, database_b = self._holding(a), self._holding(b)
        if isinstance(database_a, GitDatabase) and database_a is database_b:
            return database_a.diff(a, b)
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

    def versions_by_ref(self) -> dict[str, str]:
        """Return a mapping from the name of every ref, `runs/<run>` or `derived/<version>`, to its version."""
        out: dict[str, str] = {}
        for database in self._all():
            out.update(database.trees_by_ref())
        return out

    def parents(self) -> dict[str, str]:
        """Return a mapping from each derived version to the version from which it was derived."""
        out: dict[str, str] = {}
        for database in self._all():
            for name, message in database.messages_by_ref("derived/").items():
                match = _DERIVED.match(message)
                if match is not None:
                    out[name.removeprefix("derived/")] = match[1]
        return out

    def damage(self) -> Iterator[Damage]:
        """Read every git object of every version; yield the first damaged object of each damaged version."""
        for database in self._all():
            if database.own and not (database.git_dir / "HEAD").is_file():
                continue
            intact: set[str] = set()
            refs = (
                database.refs() if isinstance(database, LooseDatabase) else database.trees_by_ref()
            )
            for name, top in refs.items():
                damage = _first_damage(database, top, intact)
                if damage is not None:
                    yield Damage(database, name, *damage)

    def drop(self, run: str) -> None:
        """Delete the ref of a run's version; git later removes the objects that no other ref needs."""
        for database in self._all():
            database.drop(f"runs/{run}")

    def drop_derived(self, version: str) -> None:
        """Delete the ref of a version that Rearview made from a run's version, for example by adding log statements."""
        if _NAME.fullmatch(version):
            for database in self._all():
                database.drop(f"derived/{version}")

    def _look(self, version: str) -> tuple[Database, dict[bytes, Entry]]:
        """Return (database that holds a version, entries of the files of the version by path)."""
        if version not in self._entries_cache:
            if len(self._entries_cache) >= MOST_CACHED:
                self._entries_cache.clear()
            database = self._holding(version)
            entries = database.entries(version)
            for path in entries:
                _check_path(path, version)
            self._entries_cache[version] = (database, entries)
        return self._entries_cache[version]

    def _holding(self, version: str) -> Database:
        """Return the database that holds a version; raise if none does."""
        databases = self._all()
        for database in databases if _NAME.fullmatch(version) else ():
            if database.has(version):
                return database
        raise VersionError(
            f"Version {version[:12]} is not in {' or '.join(each.place for each in databases)}: its refs "
            "were removed, or it was recorded elsewhere. Bring it from another copy.",
            slug="version-missing",
        )

    def _all(self) -> list[Database]:
        """Return the database in use and, if this is the user's repository, also that of the store if it exists."""
        database = self._database()
        if database.own or not (self._own / "HEAD").is_file():
            return [database]
        return [database, self._begin_own()]

    def _database(self) -> Database:
        if self._database_in_use is None:
            git_dir = repository(self._project.root)
            if git_dir is None:
                self._database_in_use = self._begin_own()
            else:
                self._database_in_use = GitDatabase(
                    git_dir, self._project.root, self._scratch, own=False
                )
        return self._database_in_use

    def _begin_own(self) -> Database:
        return LooseDatabase(self._own, self._project.root)


def _check_path(path: bytes, version: str) -> None:
    """Raise if a path of a version leads outside the folder to which the version is exported, or into `.git`."""
    if not {b"", b".", b"..", b".git"}.isdisjoint(path.lower().split(b"/")):
        raise VersionError(
            f"Version {version[:12]} has a file named {os.fsdecode(path)!r}, which would land "
            "outside its folder. It was not written by Rearview; do not trust it.",
            slug="version-file",
        )


def _clock(folder: Path) -> int:
    """Return the current time in nanoseconds by the clock that sets the modification times of files in `folder`."""
    make_folder(folder)
    file = folder / f".clock.{os.getpid()}"
    try:
        file.write_bytes(b"")
        return file.stat().st_mtime_ns
    finally:
        file.unlink(missing_ok=True)
