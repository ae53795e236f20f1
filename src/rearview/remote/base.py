"""What a remote is, and how one is chosen from what the user wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rearview.errors import UsageError

HIDDEN = ".rv-"
"""Names that begin so are transfers under way; no listing shows them and no key may use them."""

MODES = ("shared", "xrootd", "htcondor", "manual", "fsspec")


@dataclass(frozen=True, slots=True)
class Stat:
    """One object at a remote."""

    key: str
    size: int
    checksum: str = ""
    """`kind:hex` as the far end states it (or as verified by `put` and `get`), or empty."""


@runtime_checkable
class Remote(Protocol):
    """Another place for bytes. Keys are relative paths with `/`.

    What every implementation promises:

    - after `put` returns, the far end holds exactly the bytes of `local`: size and checksum
      were compared there; before that, `key` still holds what it held;
    - `get` leaves `local` as it was unless the whole object arrived;
    - both try again with growing pauses before they raise `RemoteError`.
    """

    def put(self, local: Path, key: str) -> Stat:
        """Bring the file `local` to `key`, replacing in one step what was there."""

    def get(self, key: str, local: Path) -> Stat:
        """Bring `key` to the file `local`, replacing in one step what was there."""

    def stat(self, key: str) -> Stat | None:
        """Return what is known of `key`, or None if it is not there."""

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`; one that is not there is no error."""


def check_key(key: str) -> str:
    """Return `key` if it is one; refuse what would leave the remote's folder or hide in it.

    >>> check_key("objects/ab/cd")
    'objects/ab/cd'
    """
    parts = key.split("/")
    if not key or any(part in {"", ".", ".."} or part.startswith(HIDDEN) for part in parts):
        raise UsageError(
            f"{key!r} is no key of a remote. A key is a relative path such as 'saves/12/model.pt', "
            f"without empty parts, '.', '..' or names that begin with {HIDDEN!r}.",
            slug="remote-key",
        )
    return key


def scheme_of(target: str) -> str:
    """Return the scheme of a URL, or nothing for a plain path.

    >>> scheme_of("s3://bucket/x"), scheme_of("/data/x")
    ('s3', '')
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(?:\+[a-z0-9]+)?://|([a-z0-9]+)::", target)
    return (found.group(1) or found.group(2)).lower() if found else ""


def open_remote(
    target: Remote | Callable[..., Any] | str | os.PathLike[str] | None,
    mode: str | None = None,
    **options: Any,
) -> Remote:
    """Return the remote that `target` names.

    A path or `file://` is a shared folder, `root://` the XRootD client, `htcondor:` the job's own
    file transfer, any other URL whatever fsspec opens; an object with the five methods is used as
    it is, and a function is called as `copy(source, destination)`. `mode` says it outright.
    `retry` among the options sets how often to try; the others go to the implementation.
    """
    if mode is not None and mode not in MODES:
        raise UsageError(
            f"There is no kind of remote {mode!r}. Choose one of: {', '.join(MODES)}.",
            slug="remote-mode",
        )
    if not isinstance(target, str | os.PathLike) and isinstance(target, Remote):
        return target
    if mode == "manual" or callable(target):
        from rearview.remote.function import FunctionRemote

        copy = options.pop("copy", None) or target
        if not callable(copy):
            raise UsageError(
                "A manual transfer needs a function copy(source, destination); none was given. "
                "Pass checkpoint_transfer_callback=.",
                slug="remote-function",
            )
        return FunctionRemote(copy, options.pop("at", None) or "checkpoint", **options)
    text = os.fspath(target) if target is not None else ""
    scheme = scheme_of(text)
    if mode == "htcondor" or text.startswith("htcondor:"):
        from rearview.remote.htcondor import CondorRemote

        return CondorRemote(text.removeprefix("htcondor:") or None, **options)
    if not text:
        raise UsageError(
            "The remote has no target. Give a folder, a URL such as s3://bucket/path, or a "
            "function.",
            slug="remote-target",
        )
    if mode == "xrootd" or scheme in {"root", "roots", "xroot", "xroots"}:
        from rearview.remote.xrootd import XrootdRemote

        return XrootdRemote(text, **options)
    if mode == "fsspec" or (mode != "shared" and scheme not in {"", "file"}):
        from rearview.remote.fsspec import FsspecRemote

        return FsspecRemote(text, **options)
    from rearview.remote.folder import FolderRemote

    return FolderRemote(Path(text.removeprefix("file://")), **options)
