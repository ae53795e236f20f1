"""Settings of a project: defaults, `.rearview/config.toml`, environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from rearview.errors import UsageError

ENV_PREFIX = "REARVIEW_"
SOURCES = (
    *("parameters", "assigned", "printed", "logging", "tensorboard", "wandb", "mlflow"),
    *("lightning", "transformers", "keras"),
)
"""Sources from which values can be captured."""
ON_REQUEST = frozenset({"logging"})
"""Sources that "all" does not include."""


_NOTEBOOK = 0.02
"""Default of `epsilon` for a notebook: all costs of recording together should stay below 3 %."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a user: `[rearview]` in `.rearview/config.toml`, or `REARVIEW_<NAME>`.

    The environment wins over the file, the file over the default.
    """

    epsilon: float = 0.0667
    """Share of training time that recording may cost, by default 0.02 for a notebook; with 0 no checkpoints
    are saved."""
    every: bool = False
    """Checkpoint at every boundary of the outermost loop, without regard to its cost."""
    staging: int = 0
    """Most bytes of staging memory; 0 is as much as the changed bytes of one checkpoint, at least 16 MB."""
    budget: int = 0
    """Most bytes that the checkpoints of a project may take; 0 is no bound."""
    max_source: int = 1_000_000
    """Files larger than this many bytes are not part of a version."""
    shared: Literal["never", "group"] = "never"
    """Who may read and write the store: only its owner (`never`), or also the `group` of its folder."""
    autolog: bool = False
    """Log every scalar that is assigned in a loop."""
    capture: str = "all"
    """What is captured from programs in addition to their log calls: "all", "none", a list such as
    "parameters,wandb", or what to leave out: "-assigned,-printed"; see capture.md."""
    closing_lines: Literal["auto", "always", "never"] = "auto"
    """Whether `rearview run` ends with lines about what was recorded: "auto" where standard error is a
    terminal, "always" or "never"."""
    heartbeat: float = 10.0
    """Seconds between signs of life of a run."""
    workers: int = 0
    """Replay processes; 0 is one per core."""
    gpus: float = 0.0
    """Accelerators that each segment gets on a Ray cluster; 0.5 is half of one."""
    huge_pages: bool = True
    """Give recorded programs huge memory pages, if the system has them."""
    shared_start: bool = True
    """Fork local replays that start with the same imports, or the same set-up, from one process that has done them."""
    rerun: bool = True
    """Run again from the start, in one process, where restoring checkpoints would not be noticeably faster."""
    grid: str = "energy-charts:de"
    """Service that reports the power in the grid, and the place it reports on; see green.md."""
    compress: Literal["auto", "never"] = "auto"
    """Compress large parts of state if that pays (`auto`), or `never`."""
    propagation: float = 0.7
    """Least certainty, from 0 to 1, of a statement's place in a past version; below it Rearview refuses."""
    background_memory: int = 256 << 20
    """Bytes that calls waiting for a background writer may take; a call waits while there is no room."""
    trust: Literal["auto", "yes", "no"] = "auto"
    """Run and unpickle what is in the store: `auto` if it was made here or trusted by `rearview trust`,
    `yes` (only in the environment), or `no`."""

    @classmethod
    def read(cls, folder: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of the project whose store is `folder`."""
        values: dict[str, Any] = {}
        file = folder / "config.toml" if folder else None
        if file is not None and file.is_file():
            import tomllib  # few projects have settings

            try:
                table = tomllib.loads(file.read_text("utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
                raise UsageError(
                    f"{file} is not valid TOML: {exc}. Correct it or remove it.", slug="config"
                ) from exc
            values.update(table.get("rearview", table))
            if _yes_or_no(values.get("trust")) != "no":
                values.pop("trust", None)  # a store must not declare itself trusted
        for field in fields(cls):
            text = (os.environ if env is None else env).get(ENV_PREFIX + field.name.upper())
            if text is not None:
                values[field.name] = text
        return cls().changed(values)

    def captures(self, source: str) -> bool:
        """Return True if values of a source, such as "printed" or "wandb", are to be captured.

        >>> Settings(capture="-printed").captures("printed"), Settings(capture="-printed").captures("keras")
        (False, True)
        >>> Settings(capture="keras").captures("wandb"), Settings(capture="all,logging").captures("logging")
        (False, True)
        """
        words = set(self.capture.replace(",", " ").lower().split())
        if source in words:
            return True
        plain = source not in ON_REQUEST and f"-{source}" not in words
        return plain and ("all" in words or all(word.startswith("-") for word in words))

    def for_notebook(self) -> Settings:
        """Return these settings with the default of `epsilon` that notebooks have.

        >>> Settings().for_notebook().epsilon, Settings(epsilon=0.1).for_notebook().epsilon
        (0.02, 0.1)
        """
        return replace(self, epsilon=_NOTEBOOK) if self.epsilon == Settings().epsilon else self

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with `values` replaced, each converted to its type.

        >>> Settings().changed({"epsilon": "0.1"}).epsilon
        0.1
        """
        kinds = get_type_hints(type(self))
        converted: dict[str, Any] = {}
        for name, value in values.items():
            if name not in kinds:
                raise UsageError(
                    f"There is no setting {name!r}. The settings are: {', '.join(kinds)}.",
                    slug="config",
                )
            converted[name] = _convert(name, value, kinds[name])
        _check_sources(converted.get("capture", ""))
        return replace(self, **converted)


def _check_sources(text: str) -> None:
    """Raise if the setting `capture` names a source that does not exist."""
    for word in text.replace(",", " ").lower().split():
        if word not in {"all", "none"} and word.removeprefix("-") not in SOURCES:
            raise UsageError(
                f"Setting capture names {word!r}. It may name all, none, {', '.join(SOURCES)}, "
                'each with a "-" in front to leave it out.',
                slug="config",
            )


def _yes_or_no(value: Any) -> Any:
    """Return `"yes"` or `"no"` for a truth value of TOML or a shell; other values as they are.

    >>> _yes_or_no(False), _yes_or_no("1"), _yes_or_no("auto")
    ('no', 'yes', 'auto')
    """
    words = {"1": "yes", "true": "yes", "0": "no", "false": "no"}
    return words.get(str(value).lower(), value)


def _convert(name: str, value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if "yes" in choices:
        value = _yes_or_no(value)
    elif kind is bool and str(value).lower() in {"yes", "no"}:
        value = str(value).lower() == "yes"
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as exc:
        if choices:
            fault, remedy = "", f"It may be {' or '.join(choices)}."
        else:
            fault, remedy = f", which is not a {kind.__name__}", "Give it another value."
        raise UsageError(f"Setting {name} is {value!r}{fault}. {remedy}", slug="config") from exc
