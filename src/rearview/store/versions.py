"""Versions: the source of every run, kept as git trees under refs of our own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rearview.config import Settings
from rearview.errors import VersionError
from rearview.store import sources
from rearview.store.direct import unwritable
from rearview.store.git import Entry, GitDatabase, repository, run_git
from rearview.store.loose import LooseDatabase
from rearview.store.project import Project

Database = GitDatabase | LooseDatabase
_LINK = "120000"
MOST_SEEN = 64
"""Versions whose lists of files are remembered."""


class Versions:
    """The versions of a project's source; a version is named by the hash of its tree.

    In a git repository they stand in the repository's own object database under
    `refs/rearview/runs/<run>` and `refs/rearview/derived/<version>`, and nothing else of the
    repository is written. Anywhere else they stand in `.rearview/versions.git`.
    """

    def __init__(self, project: Project, settings: Settings) -> None:
        self._project = project
        self._limit = settings.max_source
        self._scratch = project.cache / "versions"
        self._own = project.store / "versions.git"
        self._home: Database | None = None
        self._seen: dict[str, tuple[Database, dict[bytes, Entry]]] = {}
        """Where versions are and what is in them; their names are hashes of that."""

    def save(self, run: str) -> str:
        """Keep the project's text files as they are now for `run`; return the version.

        Tracked and untracked files are taken; ignored, big and binary ones are not.
        """
        try:
            return self._saved(run)
        except OSError as exc:
            raise unwritable(exc, "The source as it is now", self._scratch) from exc

    def _saved(self, run: str) -> str:
        home = self._database()
        try:
            return self._save(home, run)
        except (VersionError, OSError):
            # a cache that speaks of objects which are gone, or a repository that turns out to
            # be read-only: begin anew, and if that fails too, in a place of our own
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
        cache = sources.Cache.read(file, home.place, self._limit)
        asof = _clock(self._scratch)
        found = sources.look(home, cache)
        if not found.files and home.ignores_all():
            self._home = self._begin_own()
            return self._save(self._home, run)
        entries = found.entries()
        tree = self._tree(home, cache, entries)
        home.keep(f"runs/{run}", tree, f"run {run}\n")
        if found.changed or found.files.keys() != cache.files.keys():
            new = sources.Cache(
                place=home.place, tree=tree, asof=asof, limit=self._limit, files=found.files
            )
            new.write(file)
        return tree

    def _tree(self, home: Database, cache: sources.Cache, entries: dict[bytes, Entry]) -> str:
        if not cache.tree:
            return home.tree(None, dict(entries))
        old = sources.Look(cache.files).entries()
        changes: dict[bytes, Entry | None] = {
            path: entry for path, entry in entries.items() if old.get(path) != entry
        }
        changes |= dict.fromkeys(old.keys() - entries.keys())
        # taken out first: a file may stand where a folder stood
        changes = dict(sorted(changes.items(), key=lambda item: item[1] is not None))
        return home.tree(cache.tree, changes) if changes else cache.tree

    def derive(self, version: str, changes: Mapping[str, bytes | None]) -> str:
        """Return the version that is `version` with files replaced, added or, if None, removed."""
        home, old = self._look(version)
        entries: dict[bytes, Entry | None] = {}
        for path, data in changes.items():
            key = os.fsencode(path)
            mode = old[key][0] if key in old and old[key][0] != _LINK else "100644"
            entries[key] = None if data is None else (mode, home.put(data))
        tree = home.tree(version, entries)
        home.keep(f"derived/{tree}", tree, f"derived from {version}\n")
        return tree

    def files(self, version: str) -> dict[str, bytes]:
        """Return content by path of every file of a version; links are left out."""
        home, found = self._look(version)
        entries = {p: name for p, (mode, name) in found.items() if mode != _LINK}
        blobs = home.blobs(entries.values())
        return {os.fsdecode(path): data for path, data in zip(entries, blobs, strict=True)}

    def packed(self, version: str) -> dict[str, tuple[str, bytes]]:
        """Return mode and content by path of everything in a version, links included."""
        home, entries = self._look(version)
        blobs = home.blobs([name for _, name in entries.values()])
        return {
            os.fsdecode(path): (mode, data)
            for (path, (mode, _)), data in zip(entries.items(), blobs, strict=True)
        }

    def adopt(self, run: str, packed: Mapping[str, tuple[str, bytes]]) -> str:
        """Keep for `run` a version that comes from elsewhere; return its id."""
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
        """Write all files of a version below `folder`, which is made if it is not there."""
        home, found = self._look(version)
        # links last, so that no file is ever written through one
        entries = sorted(found.items(), key=lambda item: item[1][0] == _LINK)
        blobs = home.blobs(name for _, (_, name) in entries)
        for (path, (mode, _)), data in zip(entries, blobs, strict=True):
            if not {b"", b".", b"..", b".git"}.isdisjoint(path.split(b"/")):
                raise VersionError(
                    f"Version {version[:12]} has a file named {os.fsdecode(path)!r}, which would "
                    "land outside its folder. It was not written by Rearview; do not trust it.",
                    slug="version-file",
                )
            file = folder / os.fsdecode(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            if mode == _LINK:
                file.symlink_to(os.fsdecode(data))
            else:
                file.write_bytes(data)
                file.chmod(0o755 if mode == "100755" else 0o644)

    def diff(self, a: str, b: str) -> str:
        """Return what changed from version `a` to version `b` as a unified difference."""
        one, two = self._holding(a), self._holding(b)
        return one.diff(a, b, also=two.git_dir if two.git_dir != one.git_dir else None)

    def names(self) -> dict[str, str]:
        """Return version by name: `runs/<run>` or `derived/<version>`."""
        out: dict[str, str] = {}
        for home in self._all():
            out.update(home.names())
        return out

    def drop(self, run: str) -> None:
        """Let go of a run's version; git frees its space when nothing else needs it."""
        for home in self._all():
            home.drop(f"runs/{run}")

    def _look(self, version: str) -> tuple[Database, dict[bytes, Entry]]:
        """Return the database that holds a version, and its files by path."""
        if version not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            home = self._holding(version)
            self._seen[version] = (home, home.entries(version))
        return self._seen[version]

    def _holding(self, version: str) -> Database:
        homes = self._all()
        for home in homes:
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
            found = repository(self._project.root)
            if found is None:
                self._home = self._begin_own()
            else:
                self._home = GitDatabase(found, self._project.root, self._scratch, own=False)
        return self._home

    def _begin_own(self) -> Database:
        root = self._project.root
        if not _has_git(root):
            return LooseDatabase(self._own, root)
        if not (self._own / "HEAD").is_file():
            # made aside and renamed, so that two runs that start at once do not see half of it
            aside = self._own.with_name(f".versions.{os.getpid()}.{os.urandom(4).hex()}")
            done = run_git(["init", "-q", "--bare", "--template=", str(aside)], cwd=root)
            if done.returncode:
                shutil.rmtree(aside, ignore_errors=True)
                raise VersionError(
                    f"`git init` failed in {self._project.store}: {done.stderr.decode().strip()}. "
                    "Make the folder writable or free some space.",
                    slug="version-git",
                )
            try:
                aside.rename(self._own)
            except OSError:  # the other run was first
                shutil.rmtree(aside, ignore_errors=True)
        return GitDatabase(self._own, root, self._scratch, own=True)


def _has_git(cwd: Path) -> bool:
    try:
        return run_git(["--version"], cwd=cwd).returncode == 0
    except VersionError:
        return False


def _clock(folder: Path) -> int:
    """Return the time by the clock of the file system, which is the one files are stamped with."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".clock.{os.getpid()}"
    try:
        file.write_bytes(b"")
        return file.stat().st_mtime_ns
    finally:
        file.unlink(missing_ok=True)
