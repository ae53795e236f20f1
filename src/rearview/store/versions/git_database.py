"""A git object database, with git or without it: blobs, trees and Rearview's own refs.

`GitDatabase` calls git, with plumbing commands only: HEAD, index and files of the user are not changed.
`LooseDatabase` is the database in the store, written and read without git. Its layout is that of a bare git
repository with loose objects, but git is never called on it: a store may come from a stranger, and git would obey
the configuration file next to the objects. Every object is checked against its hash when it is read, except by `raw`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rearview.errors import VersionError
from rearview.store.create_files import folder_mode, make_folder, publish

Entry = tuple[str, str]
"""Mode and object name of one file in a tree."""

REFS = "refs/rearview/"
_WHO = {"NAME": "rearview", "EMAIL": "rearview@localhost"}
_QUIET = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.logAllRefUpdates": "false",
    "core.looseCompression": "1",
    "core.quotePath": "false",
    "core.precomposeUnicode": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "utf-8",
    "maintenance.auto": "false",
}
"""Git settings in place of those of the user, which could start programs, write files or change bytes."""
_ALONE = {
    "GIT_ALLOW_PROTOCOL": "none",  # never fetch objects from a promisor remote
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_GRAFT_FILE": os.devnull,
    "GIT_PAGER": "cat",
    "GIT_EDITOR": "false",
    "GIT_SSH_COMMAND": "false",
    "GIT_ASKPASS": "false",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Environment variables with which git reads only this database and starts no other program."""

_FOLDER = "40000"
_SKIPPED = {b".git", b".hg", b".svn", b".rearview"}
_NAME = re.compile("[0-9a-f]{40}")
LARGEST = 1 << 28
"""Most bytes of a git object that are decompressed; source files are much smaller."""


class GitDatabase:
    """Blobs, trees and Rearview's refs in one git directory: of the user, or a temporary one.

    `git_dir` holds refs and objects; `work_tree` holds the files to list and hash. `own` is True if Rearview made
    the git directory, False if it is that of the user's repository.
    """

    def __init__(self, git_dir: Path, work_tree: Path, scratch: Path, *, own: bool) -> None:
        self.git_dir = git_dir
        self.own = own
        self.work_tree = work_tree
        self._scratch = scratch

    @property
    def place(self) -> str:
        """The folder of the database, for messages and as a cache key."""
        return str(self.git_dir)

    def has(self, tree: str) -> bool:
        """Return True if the database has the tree with the object name `tree`."""
        return self._git("cat-file", "-t", tree, check=False).strip() == b"tree"

    def put_files(self, paths: Sequence[bytes]) -> list[str]:
        """Store files of the work tree as git blobs, without git's filters; return their object names in order."""
        root = os.fsencode(self.work_tree)
        # absolute paths, one per line: git resolves relative paths from the top of the repository
        absolute_paths = [root + b"/" + path for path in paths]
        single_line_paths = [path for path in absolute_paths if b"\n" not in path]
        names: dict[bytes, str] = {}
        if single_line_paths:
            lines = b"\n".join(single_line_paths) + b"\n"
            out = self._git("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=lines)
            names = dict(zip(single_line_paths, out.decode().split(), strict=True))
        for path in absolute_paths:
            if path not in names:
                names[path] = self.put(Path(os.fsdecode(path)).read_bytes())
        return [names[path] for path in absolute_paths]

    def put(self, data: bytes) -> str:
        """Store `data` as a git blob; return its object name."""
        out = self._git("hash-object", "-w", "--no-filters", "--stdin", stdin=data)
        return out.decode().strip()

    def tree(self, base: str | None, changes: Mapping[bytes, Entry | None]) -> str:
        """Store a git tree that is `base` with `changes`; return its object name.

        `base` is None for an empty tree. `changes` has the new entry of each changed path, or None for a path to
        remove. A temporary index is used, so that the user's index is neither read nor locked.
        """
        make_folder(self._scratch)
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix="index-") as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self._git("read-tree", base or "--empty", env=env)
            if changes:
                null_name = "0" * len(base or "")
                lines = [
                    b"%b %b\t%b\0"
                    % ((b"0", null_name.encode(), path) if entry is None else _line(entry, path))
                    for path, entry in changes.items()
                ]
                self._git("update-index", "-z", "--index-info", stdin=b"".join(lines), env=env)
            return self._git("write-tree", env=env).decode().strip()

    def keep(self, name: str, tree: str, message: str) -> None:
        """Create the ref `refs/rearview/<name>` to a commit of `tree`, which has this message and no parent."""
        commit = self._git("commit-tree", tree, "-F", "-", stdin=message.encode()).decode().strip()
        self._git("update-ref", REFS + name, commit)

    def drop(self, name: str) -> None:
        """Delete `refs/rearview/<name>`."""
        self._git("update-ref", "-d", REFS + name)

    def trees_by_ref(self) -> dict[str, str]:
        """Return a mapping from the name of each ref below `refs/rearview/` to its tree."""
        out = self._git("for-each-ref", "--format=%(refname)%00%(tree)", REFS)
        pairs = (line.split("\0") for line in out.decode().splitlines())
        return {ref.removeprefix(REFS): tree for ref, tree in pairs}

    def messages_by_ref(self, below: str) -> dict[str, str]:
        """Return a mapping from the name of each ref below `refs/rearview/<below>` to the message of its commit."""
        out = self._git("for-each-ref", "--format=%(refname)%00%(contents:subject)", REFS + below)
        pairs = (line.split("\0") for line in out.decode().splitlines())
        return {ref.removeprefix(REFS): message for ref, message in pairs}

    def entries(self, tree: str) -> dict[bytes, Entry]:
        """Return a mapping from the path of each file of the git tree `tree` to (mode, object name)."""
        out: dict[bytes, Entry] = {}
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0"):
            if line:
                facts, _, path = line.partition(b"\t")
                mode, _, name = facts.decode().split()
                out[path] = (mode, name)
        return out

    def blobs(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the bytes of the git blobs with these object `names`, in order; raise if one is missing."""
        names = list(names)
        if not names:
            return
        out = memoryview(self._git("cat-file", "--batch", stdin="\n".join(names).encode() + b"\n"))
        at = 0
        for name in names:
            end = bytes(out[at : at + 200]).index(b"\n") + at
            head = bytes(out[at:end]).decode().split()
            if len(head) != 3 or head[1] != "blob":
                raise VersionError(
                    f"File content {name[:12]} is missing from {self.place}: it was removed from "
                    "the object database. Bring it from another copy.",
                    slug="version-missing",
                )
            size = int(head[2])
            yield bytes(out[end + 1 : end + 1 + size])
            at = end + 2 + size

    def raw(self, names: Iterable[str]) -> Iterator[tuple[str, bytes] | None]:
        """Yield (type, bytes) of each git object in order, or None for an object that is missing."""
        names = list(names)
        if not names:
            return
        out = self._git("cat-file", "--batch", stdin="\n".join(names).encode() + b"\n", check=False)
        at = 0
        for _ in names:
            end = out.find(b"\n", at)
            head = out[at:end].decode("ascii", "replace").split() if end >= 0 else []
            if len(head) != 3 or not head[2].isdecimal():
                yield None
                at = end + 1 if end >= 0 else len(out)
                continue
            size = int(head[2])
            yield head[1], out[end + 1 : end + 1 + size]
            at = end + 2 + size

    def diff(self, a: str, b: str) -> str:
        """Return the unified diff from the git tree `a` to the git tree `b`."""
        plain = (
            "--no-ext-diff",
            "--no-textconv",
            "--no-color",
            "--src-prefix=a/",
            "--dst-prefix=b/",
        )
        out = self._git("diff-tree", "-p", "-r", "-M", "--no-commit-id", *plain, a, b)
        return out.decode("utf-8", "replace")

    def listed(self) -> Iterator[tuple[bool, bytes]]:
        """Yield (whether git tracks the file, path in the work tree) for each file that git does not ignore.

        The user's index says which files are tracked; a git directory that Rearview made tracks none. A folder
        that is a separate repository (a submodule, a nested clone) is listed as one path with a trailing `/`.
        """
        env = {"GIT_INDEX_FILE": str(self._scratch / "none")} if self.own else {}
        out = self._git("ls-files", "-z", "-t", "-c", "-o", "--exclude-standard", env=env)
        listed_paths = set()
        for line in out.split(b"\0"):
            path = line[2:]
            if path and path not in listed_paths:
                listed_paths.add(path)  # git lists an unmerged file once per stage
                yield line[:1] != b"?", path

    def ignores_all(self) -> bool:
        """Return True if the git repository around the work tree ignores the folder of the work tree."""
        result = run_git(["check-ignore", "-q", "--", "."], cwd=self.work_tree)
        return result.returncode == 0

    def _git(
        self,
        *args: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> bytes:
        extra = dict(env or {})
        if self.own:  # of the user's repository, git itself finds the git directory
            extra |= {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(self.work_tree)}
        umask = _umask_of(self.git_dir) if self.own else -1
        result = run_git(list(args), cwd=self.work_tree, stdin=stdin, env=extra, umask=umask)
        if check and result.returncode:
            message = result.stderr.decode("utf-8", "replace").strip()
            raise VersionError(
                f"`git {args[0]}` failed in {self.place}: {message or f'code {result.returncode}'}. "
                "`git fsck` there says more; the run is recorded without its source.",
                slug="version-git",
            )
        return result.stdout


def _umask_of(git_dir: Path) -> int:
    """Return the umask with which git gives files in `git_dir`, which Rearview made, the mode of the store."""
    return 0o777 & ~folder_mode(git_dir.parent)


def run_git(
    args: Sequence[str],
    *,
    cwd: Path,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[bytes]:
    """Run one git command that cannot start another program, such as a hook, filter, pager or transport.

    Environment variables named `GIT_*` have no effect, and the configuration of the repository starts nothing.
    """
    clean = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")}
    for role in ("AUTHOR", "COMMITTER"):
        clean.update({f"GIT_{role}_{key}": text for key, text in _WHO.items()})
    clean.update(_ALONE)
    clean.update(env or {})
    options = [part for key, text in _QUIET.items() for part in ("-c", f"{key}={text}")]
    try:
        return subprocess.run(
            ["git", *options, *args],
            cwd=cwd,
            input=stdin,
            env=clean,
            capture_output=True,
            check=False,
            umask=umask,
        )
    except FileNotFoundError as exc:
        raise VersionError(
            "There is no `git` on PATH. Install git; until then versions are kept by Rearview "
            "itself, without regard to .gitignore.",
            slug="git-missing",
        ) from exc


@contextlib.contextmanager
def empty_repository(files: Path) -> Iterator[GitDatabase]:
    """Provide a temporary bare git repository, with Rearview's configuration only, whose work tree is `files`."""
    with tempfile.TemporaryDirectory(prefix="rearview-git-") as folder:
        git_dir = Path(folder)
        create_bare_repository(git_dir)
        yield GitDatabase(git_dir, files, git_dir, own=True)


def create_bare_repository(git_dir: Path) -> None:
    """Create an empty bare git repository in the folder `git_dir`."""
    for folder in ("objects", "refs/heads"):
        make_folder(git_dir / folder)
    config = b"[core]\n\trepositoryformatversion = 0\n\tbare = true\n"
    publish(git_dir / "config", config, durable=False)
    publish(git_dir / "HEAD", b"ref: refs/heads/none\n", durable=False)


def has_git(cwd: Path) -> bool:
    """Return True if git is installed and can be called."""
    try:
        return run_git(["--version"], cwd=cwd).returncode == 0
    except VersionError:
        return False


def repository(root: Path) -> Path | None:
    """Return the git directory of the git repository around `root`, or None if it cannot be used.

    It cannot be used if there is no repository, if git is missing or refuses the folder, if the repository has
    another work tree, or if the git directory is read-only.
    """
    with contextlib.suppress(VersionError, OSError):
        options = ["--is-inside-work-tree", "--git-common-dir", "--show-toplevel"]
        result = run_git(["rev-parse", *options], cwd=root)
        lines = result.stdout.split(b"\n")
        if result.returncode == 0 and lines[0] == b"true":
            git_dir = Path(root, os.fsdecode(lines[1])).resolve()
            # a repository may be configured with a work tree that does not contain the project
            top, project_root = Path(os.fsdecode(lines[2])).resolve(), root.resolve()
            if top != project_root and top not in project_root.parents:
                return None
            if os.access(git_dir, os.W_OK) and os.access(git_dir / "objects", os.W_OK):
                return git_dir
    return None


def _line(entry: Entry, path: bytes) -> tuple[bytes, bytes, bytes]:
    return entry[0].encode(), entry[1].encode(), path


class LooseDatabase:
    """The git database in a store. Its methods do what those of `GitDatabase` do, without git."""

    own = True

    def __init__(self, git_dir: Path, work_tree: Path) -> None:
        self.git_dir = git_dir
        self.work_tree = work_tree

    @property
    def place(self) -> str:
        """The folder of the database, for messages and as a cache key."""
        return str(self.git_dir)

    def has(self, tree: str) -> bool:
        """Return True if the database has the tree with the object name `tree`."""
        return bool(_NAME.fullmatch(tree)) and (
            self._path(tree).is_file() or self._read_from_pack(tree) is not None
        )

    def put_files(self, paths: Sequence[bytes]) -> list[str]:
        """Store files of the work tree as git blobs, without git's filters; return their object names in order."""
        return [self.put(Path(self.work_tree, os.fsdecode(p)).read_bytes()) for p in paths]

    def put(self, data: bytes) -> str:
        """Store `data` as a git blob; return its object name."""
        return self._write(b"blob", data)

    def tree(self, base: str | None, changes: Mapping[bytes, Entry | None]) -> str:
        """Store a git tree that is `base` with `changes`; return its object name.

        `base` is None for an empty tree. `changes` has the new entry of each changed path, or None for a path to
        remove.
        """
        entries = self.entries(base) if base else {}
        for path, entry in changes.items():
            if entry is None:
                entries.pop(path, None)
            else:
                entries[path] = entry
        return self._folder(entries)

    def _folder(self, files: Mapping[bytes, Entry]) -> str:
        """Store the tree of a folder with these `files`, and the trees of its subfolders; return its object name."""
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
            lines.append(
                (head + b"/", line)
            )  # git sorts folders as if their names ended in a slash
        return self._write(b"tree", b"".join(line for _, line in sorted(lines)))

    def keep(self, name: str, tree: str, message: str) -> None:
        """Create the ref `refs/rearview/<name>` to a commit of `tree`, which has this message and no parent."""
        author = f"rearview <rearview@localhost> {int(time.time())} +0000"
        text = f"tree {tree}\nauthor {author}\ncommitter {author}\n\n{message}"
        file = self.git_dir / REFS / name
        commit = self._write(b"commit", text.encode())
        make_folder(file.parent)
        publish(file, commit.encode() + b"\n", durable=False)

    def drop(self, name: str) -> None:
        """Delete `refs/rearview/<name>`."""
        (self.git_dir / REFS / name).unlink(missing_ok=True)

    def trees_by_ref(self) -> dict[str, str]:
        """Return a mapping from the name of each ref below `refs/rearview/` to its tree."""
        out = {}
        for name, commit in self.refs().items():
            with contextlib.suppress(VersionError):  # `verify` reports a damaged commit
                out[name] = tree_of(self._read(commit, b"commit"))
        return out

    def messages_by_ref(self, below: str) -> dict[str, str]:
        """Return a mapping from the name of each ref below `refs/rearview/<below>` to the message of its commit."""
        out = {}
        for name, commit in self.refs().items():
            if name.startswith(below):
                with contextlib.suppress(VersionError):  # `verify` reports a damaged commit
                    text = self._read(commit, b"commit").partition(b"\n\n")[2]
                    out[name] = text.decode("utf-8", "replace")
        return out

    def refs(self) -> dict[str, str]:
        """Return a mapping from the name of each ref below `refs/rearview/` to its commit, which may be damaged."""
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
        """Return a mapping from the path of each file of the git tree `tree` to (mode, object name)."""
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
        """Yield the bytes of the git blobs with these object `names`, in order; raise if one is missing."""
        for name in names:
            yield self._read(name, b"blob")

    def diff(self, a: str, b: str) -> str:
        """Return the unified diff from the git tree `a` to the git tree `b`."""
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
        """Yield (False, path in the work tree) for each file; False means that git does not track the file.

        If git is installed, files that its rules ignore are left out.
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
        """Return False: there is no git repository around the work tree that could ignore its folder."""
        return False

    def _path(self, name: str) -> Path:
        return self.git_dir / "objects" / name[:2] / name[2:]

    def _write(self, kind: bytes, data: bytes) -> str:
        content = b"%b %d\0%b" % (kind, len(data), data)
        name = _name_of(content)
        file = self._path(name)
        if not file.exists() or self._object_file_content(name) != content:
            if not (self.git_dir / "HEAD").exists():
                create_bare_repository(self.git_dir)
            make_folder(file.parent)
            publish(file, zlib.compress(content, 1), durable=False)
        return name

    def raw(self, names: Iterable[str]) -> Iterator[tuple[str, bytes] | None]:
        """Yield (type, bytes) of each git object in order, or None if it cannot be read; the hash is not checked."""
        for name in names:
            content = self._object_file_content(name) if _NAME.fullmatch(name) else None
            content = self._read_from_pack(name) if content is None else content
            kind, _, data = content.partition(b"\0") if content else (b"", b"", b"")
            yield (kind.split()[0].decode("ascii", "replace"), data) if kind.strip() else None

    def _read(self, name: str, kind: bytes) -> bytes:
        if not _NAME.fullmatch(name):
            raise self._missing(name, kind)
        content = self._object_file_content(name) or self._read_from_pack(name)
        if content is None:
            raise self._missing(name, kind)
        head, _, data = content.partition(b"\0")
        if _name_of(content) != name or head.split()[:1] != [kind]:
            raise VersionError(
                f"{kind.decode().capitalize()} {name[:12]} in {self.place} is damaged: its content "
                "has another hash. `rearview verify --repair` moves it away and lists the versions "
                "that are lost with it.",
                slug="version-damaged",
            )
        return data

    def _object_file_content(self, name: str) -> bytes | None:
        """Return the decompressed bytes of the file of the git object `name`, with git's header.

        The hash is not checked. Return b"" if the file cannot be decompressed, and None if there is no file.
        """
        with contextlib.suppress(OSError, zlib.error):
            unpack = zlib.decompressobj()
            data = unpack.decompress(self._path(name).read_bytes(), LARGEST)
            return data if unpack.eof else b""
        return b"" if self._path(name).exists() else None

    def _read_from_pack(self, name: str) -> bytes | None:
        """Return the bytes of the git object `name`, with git's header, as git reads them from a pack.

        Return None if no pack holds the object, or git is not installed.
        """
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


def _name_of(content: bytes) -> str:
    """Return the object name (SHA-1) of a git object, given its bytes with git's header."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def tree_of(commit: bytes) -> str:
    """Return the object name of the tree of a commit, given the bytes of the commit."""
    return commit.split(b"\n", 1)[0].removeprefix(b"tree ").decode("ascii", "replace")


def rows_of(tree: bytes, size: int = 20) -> Iterator[tuple[str, bytes, str]]:
    """Yield (mode, file name, object name) of each entry of a git tree, given its bytes; a hash has `size` bytes."""
    at = 0
    while at < len(tree):
        end = tree.find(b"\0", at)
        if end < 0:
            return
        mode, _, name = tree[at:end].partition(b" ")
        yield mode.decode("ascii", "replace"), name, tree[end + 1 : end + 1 + size].hex()
        at = end + 1 + size
