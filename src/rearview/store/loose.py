"""Versions without git: the same objects and refs, written and read by ourselves.

What stands here is a bare git repository of loose objects, so git can read it the day it is
installed. Only what Rearview wrote is read; packs are git's business.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rearview.errors import VersionError
from rearview.store.git import REFS, Entry
from rearview.store.project import publish

_FOLDER = "40000"
_SKIPPED = {b".git", b".hg", b".svn", b".rearview"}


class LooseDatabase:
    """The git database of a machine that has no git; same methods as `GitDatabase`."""

    own = True

    def __init__(self, git_dir: Path, work_tree: Path) -> None:
        self.git_dir = git_dir
        self.work_tree = work_tree

    @property
    def place(self) -> str:
        """Where versions of this database are, for messages and for cache keys."""
        return str(self.git_dir)

    def has(self, tree: str) -> bool:
        """Say whether the tree is here."""
        return self._path(tree).is_file()

    def put_files(self, paths: Sequence[bytes]) -> list[str]:
        """Store the raw bytes of files of the work tree; return their names in order."""
        return [self.put(Path(self.work_tree, os.fsdecode(p)).read_bytes()) for p in paths]

    def put(self, data: bytes) -> str:
        """Store bytes as they are; return their name."""
        return self._write(b"blob", data)

    def tree(self, base: str | None, changes: Mapping[bytes, Entry | None]) -> str:
        """Return the tree that is `base` (None: empty) with entries put in or, if None, taken out."""
        files = self.entries(base) if base else {}
        for path, entry in changes.items():
            if entry is None:
                files.pop(path, None)
            else:
                files[path] = entry
        return self._folder(files)

    def _folder(self, files: Mapping[bytes, Entry]) -> str:
        inner: dict[bytes, dict[bytes, Entry]] = {}
        lines: list[tuple[bytes, bytes]] = []
        for path, (mode, name) in files.items():
            head, slash, rest = path.partition(b"/")
            if slash:
                inner.setdefault(head, {})[rest] = (mode, name)
            else:
                lines.append((head, b"%b %b\0%b" % (mode.encode(), head, bytes.fromhex(name))))
        for head, below in inner.items():
            name = self._folder(below)
            line = b"%b %b\0%b" % (_FOLDER.encode(), head, bytes.fromhex(name))
            lines.append((head + b"/", line))  # git sorts folders as if they ended in a slash
        return self._write(b"tree", b"".join(line for _, line in sorted(lines)))

    def keep(self, name: str, tree: str, message: str) -> None:
        """Hold a tree under `refs/rearview/<name>` by a commit that has no parent."""
        who = f"rearview <rearview@localhost> {int(time.time())} +0000"
        text = f"tree {tree}\nauthor {who}\ncommitter {who}\n\n{message}"
        file = self.git_dir / REFS / name
        commit = self._write(b"commit", text.encode())
        file.parent.mkdir(parents=True, exist_ok=True)
        publish(file, commit.encode() + b"\n", durable=False)

    def drop(self, name: str) -> None:
        """Let go of what `refs/rearview/<name>` holds."""
        (self.git_dir / REFS / name).unlink(missing_ok=True)

    def names(self) -> dict[str, str]:
        """Return tree by name below `refs/rearview/`."""
        top = self.git_dir / REFS
        out = {}
        for file in sorted(top.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                commit = self._read(file.read_text("ascii").strip(), b"commit")
                out[file.relative_to(top).as_posix()] = (
                    commit.split(b"\n", 1)[0].split()[1].decode()
                )
        return out

    def entries(self, tree: str) -> dict[bytes, Entry]:
        """Return the files of a tree by path."""
        data, at = self._read(tree, b"tree"), 0
        out: dict[bytes, Entry] = {}
        while at < len(data):
            end = data.index(b"\0", at)
            mode, _, name = data[at:end].partition(b" ")
            oid, at = data[end + 1 : end + 21].hex(), end + 21
            if mode.decode() == _FOLDER:
                out |= {name + b"/" + path: entry for path, entry in self.entries(oid).items()}
            else:
                out[name] = (mode.decode(), oid)
        return out

    def blobs(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the bytes of each blob in order."""
        for name in names:
            yield self._read(name, b"blob")

    def diff(self, a: str, b: str, also: Path | None = None) -> str:
        """Return the unified difference of two trees."""
        del also
        old, new = self.entries(a), self.entries(b)
        out: list[str] = []
        for path in sorted(old.keys() | new.keys()):
            if old.get(path) != new.get(path):
                left, right = self._lines(old.get(path)), self._lines(new.get(path))
                shown = os.fsdecode(path)
                out += difflib.unified_diff(left, right, f"a/{shown}", f"b/{shown}")
        return "".join(line if line.endswith("\n") else line + "\n" for line in out)

    def _lines(self, entry: Entry | None) -> list[str]:
        data = self._read(entry[1], b"blob") if entry else b""
        return data.decode("utf-8", "replace").splitlines(keepends=True)

    def listed(self) -> Iterator[tuple[bool, bytes]]:
        """Yield (tracked?, path below the work tree) of all files; ignore files are not read."""
        top = os.fsencode(self.work_tree)
        for folder, below, files in os.walk(top):
            below[:] = sorted(set(below) - _SKIPPED)
            for name in files:
                yield False, os.path.relpath(os.path.join(folder, name), top)  # noqa: PTH118

    def ignores_all(self) -> bool:
        """Say that nothing is ignored here."""
        return False

    def _path(self, name: str) -> Path:
        return self.git_dir / "objects" / name[:2] / name[2:]

    def _write(self, kind: bytes, data: bytes) -> str:
        whole = b"%b %d\0%b" % (kind, len(data), data)
        name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()  # git's own naming
        file = self._path(name)
        if not file.exists():
            if not (self.git_dir / "HEAD").exists():
                self._begin()
            file.parent.mkdir(parents=True, exist_ok=True)
            publish(file, zlib.compress(whole, 1), durable=False)
        return name

    def _begin(self) -> None:
        for folder in ("objects", "refs/heads"):
            (self.git_dir / folder).mkdir(parents=True, exist_ok=True)
        config = b"[core]\n\trepositoryformatversion = 0\n\tbare = true\n"
        publish(self.git_dir / "config", config, durable=False)
        publish(self.git_dir / "HEAD", b"ref: refs/heads/none\n", durable=False)

    def _read(self, name: str, kind: bytes) -> bytes:
        with contextlib.suppress(OSError, zlib.error):
            head, _, data = zlib.decompress(self._path(name).read_bytes()).partition(b"\0")
            if head.split()[0] == kind:
                return data
        raise VersionError(
            f"{kind.decode().capitalize()} {name[:12]} cannot be read from {self.place} without "
            "git. Install git, or bring the version from another copy.",
            slug="version-missing",
        )
