"""A git object database, used through plumbing commands only: HEAD, index and files of the user stay as they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rearview.errors import VersionError
from rearview.store.files import folder_mode, make_folder, publish

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
"""Overrides of user configuration that would start programs, write files or change bytes."""
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
"""Environment in which git reads only this database and starts no other program."""


class GitDatabase:
    """Blobs, trees and Rearview's refs in one git directory, of the user or of the store.

    `git_dir` holds refs and objects; `work_tree` holds the files to list and hash; `own` is True if the
    database belongs to Rearview and not to the repository of the files.
    """

    def __init__(self, git_dir: Path, work_tree: Path, scratch: Path, *, own: bool) -> None:
        self.git_dir = git_dir
        self.own = own
        self.work_tree = work_tree
        self._scratch = scratch

    @property
    def place(self) -> str:
        """Where the database is, for messages and as a cache key."""
        return str(self.git_dir)

    def has(self, tree: str) -> bool:
        """Return True if the database has the tree."""
        return self._git("cat-file", "-t", tree, check=False).strip() == b"tree"

    def put_files(self, paths: Sequence[bytes]) -> list[str]:
        """Store the raw bytes of files of the work tree; return their names in order."""
        root = os.fsencode(self.work_tree)
        # absolute paths, one per line: git resolves relative ones from the top of the repository
        whole = [root + b"/" + path for path in paths]
        plain = [path for path in whole if b"\n" not in path]
        names: dict[bytes, str] = {}
        if plain:
            lines = b"\n".join(plain) + b"\n"
            out = self._git("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=lines)
            names = dict(zip(plain, out.decode().split(), strict=True))
        for path in whole:
            if path not in names:
                names[path] = self.put(Path(os.fsdecode(path)).read_bytes())
        return [names[path] for path in whole]

    def put(self, data: bytes) -> str:
        """Store bytes; return their name."""
        out = self._git("hash-object", "-w", "--no-filters", "--stdin", stdin=data)
        return out.decode().strip()

    def tree(self, base: str | None, changes: Mapping[bytes, Entry | None]) -> str:
        """Return the tree `base` (None: empty) with entries added, replaced or, if None, removed.

        It uses an index of its own, so the user's index is neither read nor locked.
        """
        make_folder(self._scratch)
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix="index-") as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self._git("read-tree", base or "--empty", env=env)
            if changes:
                gone = "0" * len(base or "")
                lines = [
                    b"%b %b\t%b\0"
                    % ((b"0", gone.encode(), path) if entry is None else _line(entry, path))
                    for path, entry in changes.items()
                ]
                self._git("update-index", "-z", "--index-info", stdin=b"".join(lines), env=env)
            return self._git("write-tree", env=env).decode().strip()

    def keep(self, name: str, tree: str, message: str) -> None:
        """Keep a tree under `refs/rearview/<name>`, in a commit without a parent."""
        commit = self._git("commit-tree", tree, "-F", "-", stdin=message.encode()).decode().strip()
        self._git("update-ref", REFS + name, commit)

    def drop(self, name: str) -> None:
        """Delete `refs/rearview/<name>`."""
        self._git("update-ref", "-d", REFS + name)

    def names(self) -> dict[str, str]:
        """Return the trees below `refs/rearview/`, by name."""
        out = self._git("for-each-ref", "--format=%(refname)%00%(tree)", REFS)
        pairs = (line.split("\0") for line in out.decode().splitlines())
        return {ref.removeprefix(REFS): tree for ref, tree in pairs}

    def messages(self, below: str) -> dict[str, str]:
        """Return the message of the commit of each ref below `refs/rearview/<below>`, by name."""
        out = self._git("for-each-ref", "--format=%(refname)%00%(contents:subject)", REFS + below)
        pairs = (line.split("\0") for line in out.decode().splitlines())
        return {ref.removeprefix(REFS): message for ref, message in pairs}

    def entries(self, tree: str) -> dict[bytes, Entry]:
        """Return the files of a tree by path."""
        out: dict[bytes, Entry] = {}
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0"):
            if line:
                facts, _, path = line.partition(b"\t")
                mode, _, name = facts.decode().split()
                out[path] = (mode, name)
        return out

    def blobs(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the bytes of each blob in order."""
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
        """Yield kind and bytes of each object in order, None for a missing one."""
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
        """Return the unified diff of two trees."""
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
        """Yield (tracked?, path below the work tree) of all files that are not ignored.

        The user's index says what is tracked; a database of Rearview tracks nothing. A folder that is a
        repository of its own (a submodule, a nested clone) is listed with a trailing `/`.
        """
        env = {"GIT_INDEX_FILE": str(self._scratch / "none")} if self.own else {}
        out = self._git("ls-files", "-z", "-t", "-c", "-o", "--exclude-standard", env=env)
        listed_paths = set()
        for line in out.split(b"\0"):
            path = line[2:]
            if path and path not in listed_paths:
                listed_paths.add(path)  # an unmerged file is listed once per stage
                yield line[:1] != b"?", path

    def ignores_all(self) -> bool:
        """Return True if the repository around the work tree ignores its folder."""
        done = run_git(["check-ignore", "-q", "--", "."], cwd=self.work_tree)
        return done.returncode == 0

    def _git(
        self,
        *args: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> bytes:
        extra = dict(env or {})
        if (
            self.own
        ):  # otherwise git finds the repository, so that subfolders and linked work trees work
            extra |= {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(self.work_tree)}
        umask = _umask_of(self.git_dir) if self.own else -1
        done = run_git(list(args), cwd=self.work_tree, stdin=stdin, env=extra, umask=umask)
        if check and done.returncode:
            message = done.stderr.decode("utf-8", "replace").strip()
            raise VersionError(
                f"`git {args[0]}` failed in {self.place}: {message or f'code {done.returncode}'}. "
                "`git fsck` there says more; the run is recorded without its source.",
                slug="version-git",
            )
        return done.stdout


def _umask_of(git_dir: Path) -> int:
    """Return the umask with which git writes into a database of Rearview."""
    return 0o777 & ~folder_mode(git_dir.parent)


def run_git(
    args: Sequence[str],
    *,
    cwd: Path,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[bytes]:
    """Run one git command that starts no other program: no hook, filter, pager or transport.

    The environment has no effect on it, and the configuration of the repository starts nothing.
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
    """Provide a temporary bare repository over a folder of `files`, with our configuration only."""
    with tempfile.TemporaryDirectory(prefix="rearview-git-") as folder:
        place = Path(folder)
        begin_bare(place)
        yield GitDatabase(place, files, place, own=True)


def begin_bare(place: Path) -> None:
    """Create an empty bare repository in a folder."""
    for folder in ("objects", "refs/heads"):
        make_folder(place / folder)
    config = b"[core]\n\trepositoryformatversion = 0\n\tbare = true\n"
    publish(place / "config", config, durable=False)
    publish(place / "HEAD", b"ref: refs/heads/none\n", durable=False)


def has_git(cwd: Path) -> bool:
    """Return True if git can be called."""
    try:
        return run_git(["--version"], cwd=cwd).returncode == 0
    except VersionError:
        return False


def repository(root: Path) -> Path | None:
    """Return the git directory of the repository around `root`, or None.

    Also None if git is missing, refuses the folder, or its database is read-only.
    """
    with contextlib.suppress(VersionError, OSError):
        options = ["--is-inside-work-tree", "--git-common-dir", "--show-toplevel"]
        done = run_git(["rev-parse", *options], cwd=root)
        lines = done.stdout.split(b"\n")
        if done.returncode == 0 and lines[0] == b"true":
            common = Path(root, os.fsdecode(lines[1])).resolve()
            # a repository may be configured with another work tree, which is not the project
            top, project_root = Path(os.fsdecode(lines[2])).resolve(), root.resolve()
            if top != project_root and top not in project_root.parents:
                return None
            if os.access(common, os.W_OK) and os.access(common / "objects", os.W_OK):
                return common
    return None


def _line(entry: Entry, path: bytes) -> tuple[bytes, bytes, bytes]:
    return entry[0].encode(), entry[1].encode(), path
