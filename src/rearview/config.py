"""Settings, read once and passed down."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rearview.errors import UsageError

ENV_PREFIX = "REARVIEW_"
CHOICES = {
    "compress": ("auto", "never"),
    "shared": ("never", "group"),
    "trust": ("auto", "yes", "no"),
}
"""What a setting may be, where that is one of a few words."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set: `[rearview]` in `.rearview/config.toml`, or `REARVIEW_<NAME>`.

    The environment wins over the file, the file over the default.
    """

    epsilon: float = 0.0667
    """Share of training time that recording may cost; 0 takes no checkpoints."""
    every: bool = False
    """Checkpoint at every boundary of the outermost loop, whatever it costs."""
    staging: int = 0
    """Bound in bytes on staging memory; 0 means the changed bytes of one checkpoint, or 16 MB."""
    budget: int = 0
    """Size in bytes that checkpoints of a project may take; 0 is no bound."""
    max_source: int = 1_000_000
    """Files larger than this many bytes are not part of a version."""
    shared: str = "never"
    """Who besides you may read and write the store: `never` anybody, or the `group` of its folder."""
    autolog: bool = False
    """Log every scalar that is assigned in a loop."""
    heartbeat: float = 10.0
    """Seconds between signs of life of a run."""
    workers: int = 0
    """Replay processes; 0 is one per core."""
    gpus: float = 0.0
    """Accelerators that each segment gets on a Ray cluster; 0.5 is half of one."""
    huge_pages: bool = True
    """Let recorded programs have memory in huge pages, where the system offers them."""
    shared_start: bool = True
    """Let replays that begin with the same imports of libraries share them, on this machine."""
    grid: str = "energy-charts:de"
    """Who is asked about the power in the grid, and for which place; see green.md."""
    compress: str = "auto"
    """Compress large parts of state where that pays, "auto", or "never"; dense floats never are."""
    propagation: float = 0.6
    """How sure a statement's place in a past version must be, from 0 to 1; less is refused."""
    background_memory: int = 256 << 20
    """Bytes that calls waiting for a background writer may take; a call waits while there is no room."""
    trust: str = "auto"
    """Run and unpickle what is in the store: "auto" if it was made here or `rearview trust` was said,
    "yes" (only in the environment), or "no"."""

    @classmethod
    def read(cls, folder: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Return the settings that hold for the project whose store is `folder`."""
        found: dict[str, Any] = {}
        file = folder / "config.toml" if folder else None
        if file is not None and file.is_file():
            try:
                table = tomllib.loads(file.read_text("utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
                raise UsageError(
                    f"{file} is not valid TOML: {exc}. Correct it or remove it.", slug="config"
                ) from exc
            found.update(table.get("rearview", table))
            if _word(found.get("trust")) != "no":
                found.pop("trust", None)  # a store cannot vouch for itself
        for field in fields(cls):
            text = (os.environ if env is None else env).get(ENV_PREFIX + field.name.upper())
            if text is not None:
                found[field.name] = text
        return cls().changed(found)

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with `values` put in, each converted to its type.

        >>> Settings().changed({"epsilon": "0.1"}).epsilon
        0.1
        """
        known = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        out: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise UsageError(
                    f"There is no setting {name!r}. The settings are: {', '.join(known)}.",
                    slug="config",
                )
            out[name] = _convert(name, value, known[name])
        return replace(self, **out)


def _word(value: Any) -> Any:
    """Return what stands for yes or no in a setting of words.

    >>> _word(False), _word("1"), _word("auto")
    ('no', 'yes', 'auto')
    """
    words = {"1": "yes", "true": "yes", "0": "no", "false": "no"}
    return words.get(str(value).lower(), value)


def _convert(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool and isinstance(value, str):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                value.lower()
            ]
        if "yes" in CHOICES.get(name, ()):
            value = _word(value)
        if value not in CHOICES.get(name, (value,)):
            raise UsageError(
                f"Setting {name} is {value!r}. It may be {' or '.join(CHOICES[name])}.",
                slug="config",
            )
        return kind(value)
    except (KeyError, ValueError, TypeError) as exc:
        raise UsageError(
            f"Setting {name} is {value!r}, which is not a {kind.__name__}. Give it another value.",
            slug="config",
        ) from exc
