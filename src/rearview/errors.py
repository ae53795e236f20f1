"""All exceptions that Rearview raises: one class per remedy. A message says what failed, why, and what to do."""


class RearviewError(Exception):
    """Base of all errors; `slug` is the name of the paragraph in docs/errors.md that explains the error.

    `general` is the message without the id of the run. If several runs have the same problem, their `general` is
    equal, so that it is shown to the user only once.
    """

    slug = "error"

    def __init__(
        self, message: str, *, slug: str | None = None, general: str | None = None
    ) -> None:
        super().__init__(message)
        self.general = message if general is None else general
        if slug is not None:
            self.slug = slug


class UsageError(RearviewError):
    """The user asked for a name, run, point or option that does not exist."""

    slug = "usage"


class StoreError(RearviewError):
    """The store cannot be read or written."""

    slug = "store"


class DamagedError(StoreError):
    """Stored bytes are not the bytes that were written."""

    slug = "damaged"


class VersionError(RearviewError):
    """The source of a version cannot be stored or read."""

    slug = "version"


class SourceError(RearviewError):
    """Program text cannot be read, matched or changed."""

    slug = "source"


class ProbeError(SourceError):
    """An edit is not a probe, because it would change the computation."""

    slug = "probe"

    def __init__(
        self, message: str, *, slug: str | None = None, path: str = "", line: int = 0
    ) -> None:
        super().__init__(message, slug=slug)
        self.path = path
        self.line = line


class StateError(RearviewError):
    """The live objects of a program cannot be captured, restored or matched with a checkpoint."""

    slug = "state"


class ReplayError(RearviewError):
    """A replay cannot be started, or did not repeat the run."""

    slug = "replay"


class PlanError(RearviewError):
    """No plan answers the question within the given bounds."""

    slug = "plan"


class RemoteError(RearviewError):
    """Bytes could not be sent to a remote or fetched from a remote."""

    slug = "remote"


class SiteError(RearviewError):
    """A batch system or executor refused or lost a job."""

    slug = "site"
