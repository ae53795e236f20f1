"""A remote in the scratch folder of an HTCondor job, and the description of the job, which says what is transferred."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rearview.errors import RemoteError, UsageError
from rearview.model.run import EXIT_PAUSED
from rearview.remote.base import Retry, Stat, check_key
from rearview.remote.folder import FolderRemote


@dataclass(frozen=True, slots=True)
class JobAd:
    """The description (ClassAd) of the HTCondor job in which this process runs."""

    scratch: Path
    values: Mapping[str, str]
    """Lower-case name of an attribute -> its value as text; strings have no quotes."""

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> JobAd | None:
        """Return the description of this job, or None if this process does not run in an HTCondor job.

        `env` has the environment variables; the default is `os.environ`.
        """
        env = os.environ if env is None else env
        scratch, file = env.get("_CONDOR_SCRATCH_DIR"), env.get("_CONDOR_JOB_AD")
        if not scratch or not file:
            return None
        try:
            text = Path(file).read_text("utf-8", "replace")
        except OSError as exc:
            raise RemoteError(
                f"The job description {file} cannot be read: {exc.strerror}. Unset _CONDOR_JOB_AD "
                "if this is not an HTCondor job.",
                slug="condor-ad",
            ) from exc
        return cls(Path(scratch), parse(text))

    @property
    def exit_code(self) -> int:
        """The exit code that means "checkpointed, start me again"."""
        for name in ("checkpointexitcode", "successcheckpointexitcode"):
            if self.values.get(name, "").isdigit():
                return int(self.values[name])
        return EXIT_PAUSED

    @property
    def files(self) -> tuple[str, ...]:
        """Files and folders that HTCondor transfers with a checkpoint of the job; empty if none are configured."""
        text = self.values.get("transfercheckpoint", "")
        return tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())

    @property
    def grace(self) -> float | None:
        """Seconds from the signal that ends the job until HTCondor kills the job, or None if not configured."""
        text = self.values.get("jobmaxvacatetime", "")
        return float(text) if text.isdigit() else None

    def covers(self, path: Path) -> bool:
        """Return True if HTCondor transfers `path`, because `files` has the path or a folder above it."""
        try:
            relative = path.absolute().relative_to(self.scratch.absolute())
        except ValueError:
            return False
        names = {relative.as_posix(), *(p.as_posix() for p in relative.parents)}
        return any(name.removeprefix("./") in names for name in self.files)


def parse(text: str) -> dict[str, str]:
    r"""Return the attributes in `text`, a job description: lower-case name -> value.

    >>> parse('CheckpointExitCode = 85\nTransferCheckpoint = "a = b.pt,c"')["transfercheckpoint"]
    'a = b.pt,c'
    """
    attributes = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            attributes[name.strip().lower()] = value.strip().removeprefix('"').removesuffix('"')
    return attributes


class CondorRemote(FolderRemote):
    """A remote in the job's scratch folder; HTCondor transfers its files from one execution of the job to the next.

    `put` makes a file part of the job's next checkpoint. HTCondor transfers the checkpoint when the job exits
    with the checkpoint code (or is evicted), and puts the files back when the job starts again.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        retry: Retry | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        ad = JobAd.read(env)
        if ad is None:
            raise UsageError(
                "This is not an HTCondor job: _CONDOR_SCRATCH_DIR and _CONDOR_JOB_AD are not set. "
                "Choose another remote, or submit the job.",
                slug="condor-none",
            )
        self.ad = ad
        super().__init__(ad.scratch / folder if folder else ad.scratch, retry=retry)
        self.name = f"htcondor:{self.root}"

    def put(self, local: Path, key: str) -> Stat:
        """Make `local` part of the job's next checkpoint, as `key`."""
        target = self.root / check_key(key)
        if not self.ad.covers(target):
            name = target.relative_to(self.ad.scratch).parts[0]
            raise UsageError(
                f"HTCondor would not transfer {key}: transfer_checkpoint_files is "
                f"{', '.join(self.ad.files) or 'not set'}. Write into the submit file: "
                f"transfer_checkpoint_files = {', '.join((*self.ad.files, name))} and "
                f"checkpoint_exit_code = {EXIT_PAUSED}.",
                slug="condor-files",
            )
        return super().put(local, key)
