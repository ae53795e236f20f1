"""Where a Checkpointer's saves go: from the published parameters to a mirror."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.errors import UsageError
from rearview.remote.base import Remote, open_remote, scheme_of
from rearview.remote.condor import JobAd
from rearview.runtime.saving.mirror import Mirror
from rearview.runtime.saving.saves import SaveFolder

MODES = (None, "None", "shared", "xrootd", "htcondor", "manual")


@dataclass(frozen=True, slots=True)
class Destination:
    """A mirror (or none), and what else follows from the parameters."""

    mirror: Mirror | None = None
    foreign_key: str | None = None
    """Where the published class would have put its one file."""
    condor: JobAd | None = None


def destination(
    folder: SaveFolder,
    *,
    mode: str | None,
    target: str | os.PathLike[str] | Remote | None,
    server: str | None,
    callback: Callable[..., Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Destination:
    """Return where saves go.

    Below a target `t` they are at `t.saves/…`; a target that is a folder (it exists as one, or
    ends in a slash) holds them under the checkpoint file's own name.
    """
    if mode not in MODES:
        raise UsageError(
            f"checkpoint_transfer_mode={mode!r} is unknown. Choose one of: "
            f"{', '.join(str(one) for one in MODES)}; a URL as checkpoint_transfer_target needs "
            "none.",
            slug="checkpointer-mode",
        )
    if mode == "None" or (mode is None and target is None):
        return Destination()
    if mode == "htcondor":
        return Destination(condor=_job(folder))
    if mode == "manual":
        at = target if isinstance(target, str | os.PathLike) else folder.file.name
        remote = open_remote(None, "manual", copy=callback, at=at, kwargs=kwargs, **options)
        return Destination(Mirror(remote, "saves"))
    if target is None:
        raise UsageError(
            f"checkpoint_transfer_mode={mode!r} needs checkpoint_transfer_target: where to.",
            slug="checkpointer-target",
        )
    if not isinstance(target, str | os.PathLike):
        return Destination(Mirror(open_remote(target, **options), f"{folder.file.name}.saves"))
    text = os.fspath(target)
    if mode == "xrootd" and not scheme_of(text):
        text = f"{_server(server)}//{text.lstrip('/')}"
    base, name = _split(text, folder.file.name)
    remote = open_remote(base, mode if mode == "shared" else None, **options)
    return Destination(Mirror(remote, f"{name}.saves"), foreign_key=name)


def _split(text: str, file: str) -> tuple[str, str]:
    """Return the folder to open and the name to use in it.

    >>> _split("s3://bucket/runs/", "model.pt"), _split("/data/run.pt", "model.pt")
    (('s3://bucket/runs', 'model.pt'), ('/data', 'run.pt'))
    """
    plain = not scheme_of(text)
    if text.endswith("/") or (plain and Path(text).is_dir()):
        return text.rstrip("/") or "/", file
    if plain:
        text = os.path.abspath(text)  # noqa: PTH100  a link must stay the link
    base, _, name = text.rpartition("/")
    if base.endswith(":/") or (not plain and base.count("/") < 3 and base.endswith("/")):
        return text, file  # s3://bucket
    return base or "/", name


def _server(server: str | None) -> str:
    if not server:
        raise UsageError(
            "xrootd mode needs xrootd_server_name, for instance root://eos.example.org:1094.",
            slug="checkpointer-server",
        )
    name = server if scheme_of(server) else f"root://{server}"
    return name.rstrip("/")


def _job(folder: SaveFolder) -> JobAd:
    ad = JobAd.read()
    if ad is None:
        raise UsageError(
            "checkpoint_transfer_mode='htcondor' outside HTCondor: _CONDOR_SCRATCH_DIR and "
            "_CONDOR_JOB_AD are not set. Leave the mode out, or submit the job.",
            slug="condor-none",
        )
    if not ad.covers(folder.folder) and not ad.covers(folder.file):
        names = ", ".join((*ad.files, folder.folder.name))
        raise UsageError(
            f"HTCondor would not carry {folder.file}: transfer_checkpoint_files is "
            f"{', '.join(ad.files) or 'not set'}. Write into the submit file: "
            f"transfer_checkpoint_files = {names} and checkpoint_exit_code = 85, and let "
            "local_checkpoint_file be in the job's folder.",
            slug="condor-files",
        )
    return ad
