"""Open the remote for a path, a URL or a copy function."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rearview.errors import UsageError
from rearview.remote.base import Remote, scheme_of
from rearview.remote.folder import FolderRemote
from rearview.remote.fsspec import FsspecRemote
from rearview.remote.htcondor_folder import CondorRemote
from rearview.remote.user_copy_function import FunctionRemote
from rearview.remote.xrootd import XrootdRemote

MODES = ("shared", "xrootd", "htcondor", "manual", "fsspec")


def open_remote(
    target: Remote | Callable[..., Any] | str | os.PathLike[str] | None,
    mode: str | None = None,
    **options: Any,
) -> Remote:
    """Return the remote for `target`.

    A path or `file://` is a shared folder, `root://` uses the XRootD client, `htcondor:` uses HTCondor's transfer
    of the files of this job, and fsspec opens any other URL. An object with the five methods of `Remote` is
    returned unchanged. A function gives a remote that calls it as `copy(source, destination)`. If `mode` is given,
    it decides the class of the remote, whatever the form of the target. `options` go to the class of the remote;
    `retry` says how often to try.
    """
    if mode is not None and mode not in MODES:
        raise UsageError(
            f"There is no kind of remote {mode!r}. Choose one of: {', '.join(MODES)}.",
            slug="remote-mode",
        )
    if not isinstance(target, str | os.PathLike) and isinstance(target, Remote):
        return target
    if mode == "manual" or callable(target):
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
        return CondorRemote(text.removeprefix("htcondor:") or None, **options)
    if not text:
        raise UsageError(
            "The remote has no target. Give a folder, a URL such as s3://bucket/path, or a "
            "function.",
            slug="remote-target",
        )
    if mode == "xrootd" or scheme in {"root", "roots", "xroot", "xroots"}:
        return XrootdRemote(text, **options)
    if mode == "fsspec" or (mode != "shared" and scheme not in {"", "file"}):
        return FsspecRemote(text, **options)
    return FolderRemote(Path(text.removeprefix("file://")), **options)
