"""Git objects and refs in the store, written and read without git.

The folder is a bare git repository of loose objects, which git could read. Rearview does not let it: a store
may come from a stranger, and git would follow the configuration next to the objects. Every object is checked against
its name when it is read.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rearview.errors import VersionError
from rearview.store.files import make_folder, publish
from rearview.store.versions.git import REFS, Entry, begin_bare, empty_repository, has_git

_FOLDER = "40000"
_SKIPPED = {b".git", b".hg", b".svn", b".rearview"}
_NAME = re.compile("[0-9a-f]{40}")
LARGEST = 1 << 28
"""Most bytes of an object that are decompressed; sources are much smaller."""


class LooseDatabase:
    """The git database in a store; same methods as `GitDatabase`."""

    own = True

    def __init__(self, git_dir: Path, work_tree: Path) -> None:
        self.git_dir = git_dir
        self.work_tree = work_tree

    @property
    def place(self) -> str:
        """Where the database is, for messages and as a cache key."""
        return str(self.git_dir)

    def has(self, tree: str) -> bool:
        """Return True if the database has the tree."""
        return bool(_NAME.fullmatch(tree)) and (
            self._path(tree).is_file() or self._packed(tree) is not None
        )

    def put_files(self, paths: Sequence[bytes]) -> list[str]:
        """Store the raw bytes of files of the work tree; return their names in order."""
        return [self.put(Path(self.work_tree, os.fsdecode(p)).read_bytes()) for p in paths]

    def put(self, data: bytes) -> str:
        """Store bytes; return their name."""
        return self._write(b"blob", data)

    def tree(self, base: str | None, changes: Mapping[bytes, Entry | None]) -> str:
        """Return the tree `base` (None: empty) with entries added, replaced or, if None, removed."""
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
            head, slash, inner_path = path.partition(b"/")
            if slash:
                inner.setdefault(head, {})[inner_path] = (mode, name)
            else:
                lines.append((head, b"%b %b\0%b" % (mode.encode(), head, bytes.fromhex(name))))
        for head, below in inner.items():
            name = self._folder(below)
            line = b"%b %b\0%b" % (_FOLDER.encode(), head, bytes.fromhex(name))
            lines.append((head + b"/", line))  # git sorts folders as if they ended in a slash
        return self._write(b"tree", b"".join(line for _, line in sorted(lines)))

    def keep(self, name: str, tree: str, message: str) -> None:
        """Keep a tree under `refs/rearview/<name>`, in a commit without a parent."""
        who = f"rearview <rearview@localhost> {int(time.time())} +0000"
        text = f"tree {tree}\nauthor {who}\ncommitter {who}\n\n{message}"
        file = self.git_dir / REFS / name
        commit = self._write(b"commit", text.encode())
        make_folder(file.parent)
        publish(file, commit.encode() + b"\n", durable=False)

    def drop(self, name: str) -> None:
        """Delete `refs/rearview/<name>`."""
        (self.git_dir / REFS / name).unlink(missing_ok=True)

    def names(self) -> dict[str, str]:
        """Return the trees below `refs/rearview/`, by name."""
        out = {}
        for name, commit in self.refs().items():
            with contextlib.suppress(VersionError):  # damaged: `verify` says so
                out[name] = tree_of(self._read(commit, b"commit"))
        return out

    def messages(self, below: str) -> dict[str, str]:
        """Return the message of the commit of each ref below `refs/rearview/<below>`, by name."""
        out = {}
        for name, commit in self.refs().items():
            if name.startswith(below):
                with contextlib.suppress(VersionError):  # damaged: `verify` says so
                    text = self._read(commit, b"commit").partition(b"\n\n")[2]
                    out[name] = text.decode("utf-8", "replace")
        return out

    def refs(self) -> dict[str, str]:
        """Return the content of each ref below `refs/rearview/`, unchecked."""
        out = {}
        with contextlib.suppress(OSError):
            for line in (self.git_dir / "packed-refs").read_text("utf-8", "replace").splitlines():
                commit, _, ref = line.partition(" ")
                if ref.startswith(REFS):
                    out[ref.removeprefix(REFS)] = commit
        top = self.git_dir / REFS
        for file in sorted(top.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                text = file.read_text("utf-8", "replace")
                out[file.relative_to(top).as_posix()] = text.strip()
        return out

    def entries(self, tree: str) -> dict[bytes, Entry]:
        """Return the files of a tree by path."""
        out: dict[bytes, Entry] = {}
        todo = [(b"", tree)]
        while todo:
            prefix, name = todo.pop()
            for mode, path, oid in rows_of(self._read(name, b"tree")):
                if mode == _FOLDER:
                    todo.append((prefix + path + b"/", oid))
                else:
                    out[prefix + path] = (mode, oid)
        return dict(sorted(out.items()))

    def blobs(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the bytes of each blob in order."""
        for name in names:
            yield self._read(name, b"blob")

    def diff(self, a: str, b: str) -> str:
        """Return the unified diff of two trees."""
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
        """Yield (tracked?, path below the work tree) of all files.

        Without ignored files, if git is installed to tell which they are.
        """
        if has_git(self.work_tree):
            with empty_repository(self.work_tree) as git:
                yield from git.listed()
            return
        top = os.fsencode(self.work_tree)
        for folder, below, files in os.walk(top):
            below[:] = sorted(set(below) - _SKIPPED)
            for name in files:
                yield False, os.path.relpath(os.path.join(folder, name), top)  # noqa: PTH118

    def ignores_all(self) -> bool:
        """Return False: no repository around it could ignore the folder."""
        return False

    def _path(self, name: str) -> Path:
        return self.git_dir / "objects" / name[:2] / name[2:]

    def _write(self, kind: bytes, data: bytes) -> str:
        whole = b"%b %d\0%b" % (kind, len(data), data)
        name = _name_of(whole)
        file = self._path(name)
        if not file.exists() or self._whole(name) != whole:
            if not (self.git_dir / "HEAD").exists():
                begin_bare(self.git_dir)
            make_folder(file.parent)
            publish(file, zlib.compress(whole, 1), durable=False)
        return name

    def raw(self, names: Iterable[str]) -> Iterator[tuple[str, bytes] | None]:
        """Yield kind and bytes of each object in order, None for one that cannot be read."""
        for name in names:
            whole = self._whole(name) if _NAME.fullmatch(name) else None
            whole = self._packed(name) if whole is None else whole
            kind, _, data = whole.partition(b"\0") if whole else (b"", b"", b"")
            yield (kind.split()[0].decode("ascii", "replace"), data) if kind.strip() else None

    def _read(self, name: str, kind: bytes) -> bytes:
        if not _NAME.fullmatch(name):
            raise self._missing(name, kind)
        whole = self._whole(name) or self._packed(name)
        if whole is None:
            raise self._missing(name, kind)
        head, _, data = whole.partition(b"\0")
        if _name_of(whole) != name or head.split()[:1] != [kind]:
            raise VersionError(
                f"{kind.decode().capitalize()} {name[:12]} in {self.place} is damaged: its content "
                "has another hash. `rearview verify --repair` moves it away and lists the versions "
                "that are lost with it.",
                slug="version-damaged",
            )
        return data

    def _whole(self, name: str) -> bytes | None:
        """Return an object with its header, unchecked; None if it is missing or unreadable."""
        with contextlib.suppress(OSError, zlib.error):
            unpack = zlib.decompressobj()
            data = unpack.decompress(self._path(name).read_bytes(), LARGEST)
            return data if unpack.eof else b""
        return b"" if self._path(name).exists() else None

    def _packed(self, name: str) -> bytes | None:
        """Return an object from a git pack, read by git; None if there is none."""
        packs = sorted((self.git_dir / "objects" / "pack").glob("*.*"))
        if not packs or not has_git(self.work_tree):
            return None
        with empty_repository(self.work_tree) as git:
            folder = git.git_dir / "objects" / "pack"
            folder.mkdir()
            for pack in packs:
                (folder / pack.name).symlink_to(pack.resolve())
            object_data = next(git.raw([name]))
        return (
            None
            if object_data is None
            else b"%b %d\0%b" % (object_data[0].encode(), len(object_data[1]), object_data[1])
        )

    def _missing(self, name: str, kind: bytes) -> VersionError:
        return VersionError(
            f"{kind.decode().capitalize()} {name[:12]} cannot be read from {self.place}: it is not "
            "there. Bring the version from another copy.",
            slug="version-missing",
        )


def _name_of(whole: bytes) -> str:
    """Return git's name of an object."""
    return hashlib.sha1(whole, usedforsecurity=False).hexdigest()


def tree_of(commit: bytes) -> str:
    """Return the tree that a commit holds."""
    return commit.split(b"\n", 1)[0].removeprefix(b"tree ").decode("ascii", "replace")


def rows_of(tree: bytes, size: int = 20) -> Iterator[tuple[str, bytes, str]]:
    """Yield mode, name and object of each entry of a tree; a hash has `size` bytes."""
    at = 0
    while at < len(tree):
        end = tree.find(b"\0", at)
        if end < 0:
            return
        mode, _, name = tree[at:end].partition(b" ")
        yield mode.decode("ascii", "replace"), name, tree[end + 1 : end + 1 + size].hex()
        at = end + 1 + size
