"""The settings of a project, read from `.rearview/config.toml` and from environment variables, with defaults."""

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
"""Sources from which values are captured in addition to log calls; the setting `capture` names them."""
ON_REQUEST = frozenset({"logging"})
"""Sources of captured values that the setting `capture = "all"` does not include."""


_NOTEBOOK = 0.02
"""Default of `epsilon` for a notebook: all costs of recording together should then be below 3 % of the training time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a project: the table `[rearview]` in `.rearview/config.toml`, or variables `REARVIEW_<NAME>`.

    An environment variable overrides the file, and the file overrides the default.
    """

    epsilon: float = 0.0667
    """Share of the training time that recording may cost; the default for a notebook is 0.02. With 0, no
    checkpoints are saved."""
    every: bool = False
    """Save a checkpoint after every iteration of the outermost loop, regardless of the cost."""
    staging: int = 0
    """Most bytes of memory into which states are copied before they are written to disk; 0 means the size of the
    changed bytes of one checkpoint, at least 16 MB."""
    budget: int = 0
    """Most bytes that the checkpoints of a project may take; 0 means no bound."""
    max_source: int = 1_000_000
    """Most bytes of a source file; larger files are not part of a version."""
    shared: Literal["never", "group"] = "never"
    """Who may read and write the store: only its owner (`never`), or also the `group` of its folder."""
    autolog: bool = False
    """Log every scalar that is assigned in a loop."""
    capture: str = "all"
    """Sources from which values are captured in addition to log calls: "all", "none", a list such as
    "parameters,wandb", or a list of sources to leave out, such as "-assigned,-printed"; see capture.md."""
    closing_lines: Literal["auto", "always", "never"] = "auto"
    """Whether `rearview run` prints at its end what was recorded: "always", "never", or "auto", which means if
    standard error is a terminal."""
    heartbeat: float = 10.0
    """Seconds between updates of the file by which a run shows that it is alive."""
    workers: int = 0
    """Number of replay processes; 0 means one per core."""
    gpus: float = 0.0
    """Number of accelerators that each segment gets on a Ray cluster; 0.5 means half an accelerator."""
    huge_pages: bool = True
    """Give recorded programs huge memory pages, if the system supports them."""
    shared_start: bool = True
    """If several local replays begin with equal imports, or with equal code before the main loop, run this code once,
    in one process, from which the replays are forked."""
    rerun: bool = True
    """Run a program again from its start, in one process, if restoring checkpoints would not be noticeably faster."""
    grid: str = "energy-charts:de"
    """Service that reports on the power in the grid, a colon, and the region; see green.md."""
    compress: Literal["auto", "never"] = "auto"
    """Whether to compress large parts of checkpoints: `auto` means that Rearview measures for which it pays."""
    propagation: float = 0.7
    """Least certainty, from 0 to 1, with which Rearview must know where a statement belongs in a past version.
    If it is less certain, it refuses to add the statement to this version."""
    background_memory: int = 256 << 20
    """Most bytes of log calls that wait for a background writer (`rearview.background`); further calls block the
    program."""
    trust: Literal["auto", "yes", "no"] = "auto"
    """Whether code of the store may be run and its pickles loaded: `auto` means if the store was made on this machine
    or was trusted by `rearview trust`; `yes` is only accepted from an environment variable."""

    @classmethod
    def read(cls, folder: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of the project whose store is `folder`, from its file and from the variables `env`.

        If `env` is None, the environment variables of this process are used.
        """
        values: dict[str, Any] = {}
        file = folder / "config.toml" if folder else None
        if file is not None and file.is_file():
            import tomllib  # imported here, because few projects have a file of settings

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
        included_by_all = source not in ON_REQUEST and f"-{source}" not in words
        return included_by_all and ("all" in words or all(word.startswith("-") for word in words))

    def for_notebook(self) -> Settings:
        """Return a copy of these settings in which `epsilon`, if it has its default, is the lower default for notebooks.

        >>> Settings().for_notebook().epsilon, Settings(epsilon=0.1).for_notebook().epsilon
        (0.02, 0.1)
        """
        return replace(self, epsilon=_NOTEBOOK) if self.epsilon == Settings().epsilon else self

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy of these settings with new `values` by name, each converted to the type of its setting.

        >>> Settings().changed({"epsilon": "0.1"}).epsilon
        0.1
        """
        types = get_type_hints(type(self))
        converted: dict[str, Any] = {}
        for name, value in values.items():
            if name not in types:
                raise UsageError(
                    f"There is no setting {name!r}. The settings are: {', '.join(types)}.",
                    slug="config",
                )
            converted[name] = _convert(name, value, types[name])
        _check_sources(converted.get("capture", ""))
        return replace(self, **converted)


def _check_sources(text: str) -> None:
    """Raise if `text`, the setting `capture`, names a source that does not exist."""
    for word in text.replace(",", " ").lower().split():
        if word not in {"all", "none"} and word.removeprefix("-") not in SOURCES:
            raise UsageError(
                f"Setting capture names {word!r}. It may name all, none, {', '.join(SOURCES)}, "
                'each with a "-" in front to leave it out.',
                slug="config",
            )


def _yes_or_no(value: Any) -> Any:
    """Return `"yes"` or `"no"` if `value` is a truth value of TOML or its text; return other values unchanged.

    >>> _yes_or_no(False), _yes_or_no("1"), _yes_or_no("auto")
    ('no', 'yes', 'auto')
    """
    words = {"1": "yes", "true": "yes", "0": "no", "false": "no"}
    return words.get(str(value).lower(), value)


def _convert(name: str, value: Any, type_: Any) -> Any:
    """Return `value` converted to the type of the setting `name`; raise if that is not possible."""
    choices = get_args(type_)
    if "yes" in choices:
        value = _yes_or_no(value)
    elif type_ is bool and str(value).lower() in {"yes", "no"}:
        value = str(value).lower() == "yes"
    try:
        return msgspec.convert(value, type_, strict=False)
    except msgspec.ValidationError as exc:
        if choices:
            fault, remedy = "", f"It may be {' or '.join(choices)}."
        else:
            fault, remedy = f", which is not a {type_.__name__}", "Give it another value."
        raise UsageError(f"Setting {name} is {value!r}{fault}. {remedy}", slug="config") from exc
