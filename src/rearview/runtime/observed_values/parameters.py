"""Record hyper-parameters that a program reads: from its command line, from configuration files, from dataclasses.

Command lines: argparse, click, fire and absl. Configuration: YAML, TOML and JSON files, OmegaConf and Hydra,
dataclasses and pydantic models that exist when a loop begins. Nested settings get names such as `outer.inner`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

from rearview.runtime.observed_values.assigned_scalars import is_copy
from rearview.runtime.recorder import Recorder
from rearview.runtime.sandbox.entropy import after_import

MOST_AT_ONCE = 200
"""Largest number of parameters that are recorded from one command line, file or object."""
MOST_PER_RUN = 500
"""Largest number of parameters that are recorded for a run."""
LONGEST = 1000
"""Length in characters to which the text of a value is cut."""
DEEPEST = 6
"""Number of levels of nested mappings below the outermost one whose values become parameters."""
_WITH_PARSERS = frozenset({"absl", "fire", "hydra"})
"""Libraries that call argparse themselves; those calls are not recorded."""
LARGEST_CONFIG = 64
"""Largest number of values in a configuration file; a file with more values is considered data."""
_KEY = re.compile(r"[A-Za-z_][\w.\-/ ]{0,99}")
_READERS = {
    "yaml": ("load", "safe_load", "full_load", "unsafe_load"),
    "tomllib": ("load", "loads"),
    "tomli": ("load", "loads"),
    "toml": ("load", "loads"),
    "json": ("load",),
}
"""Module -> names of its functions that read a configuration file."""
_REFERENCE = re.compile(r"\$\{([^:${}]+)\}")
"""Matches OmegaConf's reference to another value, `${name}`, and not `${name:…}`, which calls a resolver."""
UNKNOWN = object()
"""Returned in place of a value that cannot be a parameter."""


class Parameters:
    """Records the parameters of one run, each with its source: the library that read it."""

    def __init__(self, session: Recorder) -> None:
        self._session = session
        self._recorded: dict[str, Any] = {}

    def record(
        self,
        values: Mapping[Any, Any],
        source: str,
        *,
        texts: bool = False,
        new_only: bool = False,
    ) -> None:
        """Record `values` as parameters; a new value replaces the earlier value of a name, unless `new_only` is True.

        With `texts`, a value that is not plain data is recorded as text, else it is left out.
        """
        session = self._session
        if session.finished or session.pending or session.pid != os.getpid():
            return
        new_values = {
            name: value
            for name, value in flat(values, texts=texts).items()
            if (name not in self._recorded or not (new_only or _same(self._recorded[name], value)))
            and (name in self._recorded or len(self._recorded) < MOST_PER_RUN)
        }
        if new_values:
            self._recorded |= new_values
            session.record_arguments(new_values, source)

    def is_early(self) -> bool:
        """Return True if no loop that Rearview watches has started yet."""
        return not self._session.timeline.nests

    def is_project_file(self, file: str) -> bool:
        """Return True if the source file with the path `file` belongs to the project."""
        return self._session.belongs(file)

    def is_project_frame(self, frame: FrameType) -> bool:
        """Return True if a frame runs code of the project."""
        return self._session.belongs(frame.f_code.co_filename)

    def is_project_class(self, kind: type) -> bool:
        """Return True if a class is defined in a module of the project."""
        return self._session.is_project_module(kind.__module__)

    def failed(self, source: str, exc: Exception) -> None:
        """Record that reading parameters from `source` raised `exc`."""
        if self._session.captured is not None:
            self._session.captured.problems[source] = f"{type(exc).__name__}: {exc}"

    def is_project_function(self, function: Any) -> bool:
        """Return True if a function is defined in a file of the project."""
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None) or getattr(
            getattr(function, "__init__", None), "__code__", None
        )
        return code is not None and self._session.belongs(code.co_filename)


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first == second or first != first)  # noqa: PLR0124 - nan


def flat(values: Mapping[Any, Any], *, texts: bool = False) -> dict[str, Any]:
    """Return nested settings as one mapping of plain values, with names such as `outer.inner`.

    With `texts`, a value that is not plain data becomes text, else it is left out.

    >>> flat({"optim": {"lr": 0.1, "betas": (0.9, 0.99)}, "seed": 1, 3: None})
    {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'seed': 1, '3': None}
    """
    out: dict[str, Any] = {}
    _add(out, "", values, DEEPEST, texts=texts)
    return out


def _add(
    out: dict[str, Any], prefix: str, values: Mapping[Any, Any], levels: int, *, texts: bool
) -> None:
    for key, value in values.items():
        if len(out) >= MOST_AT_ONCE:
            return
        name = f"{prefix}{key}" if type(key) in (str, int, float, bool) else ""
        if not name or name.startswith("$"):
            continue
        if type(value) is dict and value and levels:
            _add(out, f"{name}.", value, levels - 1, texts=texts)
        elif (plain_value := plain(value)) is not UNKNOWN:
            out[name] = plain_value
        elif texts:
            out[name] = str(value)[:LONGEST]


def plain(value: Any) -> Any:
    """Return a value as plain JSON data, or `UNKNOWN` if it is not plain data."""
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        return value[:LONGEST]
    if type(value) in (list, tuple):
        items = [plain(item) for item in value[:100]]
        return items if not any(item is UNKNOWN for item in items) else UNKNOWN
    if isinstance(value, os.PathLike) and type(value).__module__.startswith("pathlib"):
        return str(value)
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        return value.item()
    if isinstance(value, bool | int | float | str):  # an instance of a subclass, such as an enum
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    return UNKNOWN


def observe_command_lines(parameters: Parameters) -> None:
    """Record the parameters that argparse, click, fire and absl read from now on."""
    after_import("argparse", lambda module: _watch_argparse(module, parameters))
    after_import("click.core", lambda module: _watch_click(module, parameters))
    after_import("fire.core", lambda module: _watch_fire(module, parameters))
    after_import("absl.flags._flagvalues", lambda module: _watch_absl(module, parameters))


def _watch_argparse(module: ModuleType, parameters: Parameters) -> None:
    real = module.ArgumentParser.parse_known_args

    @functools.wraps(real)
    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = real(self, *args, **kwargs)
        try:
            in_magic = type(self).__module__.startswith("IPython.")
            if not in_magic and _package_that_parses(sys._getframe(1)) not in _WITH_PARSERS:
                parameters.record(vars(parsed[0]), "argparse", texts=True)
        except Exception as exc:
            parameters.failed("argparse", exc)
        return parsed

    module.ArgumentParser.parse_known_args = parse


def _package_that_parses(frame: FrameType | None) -> str:
    """Return the name of the top-level package whose code called argparse; empty if there is none."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in {"argparse", "rearview"}:
            return name
        frame = frame.f_back
    return ""


def _watch_click(module: ModuleType, parameters: Parameters) -> None:
    """Record the parameters of click commands that the project defines, before the function of the command runs."""
    real = module.Command.invoke

    @functools.wraps(real)
    def invoke(self: Any, ctx: Any) -> Any:
        try:
            if parameters.is_project_function(self.callback):
                parameters.record(ctx.params, "click")
        except Exception as exc:
            parameters.failed("click", exc)
        return real(self, ctx)

    module.Command.invoke = invoke


def _watch_fire(module: ModuleType, parameters: Parameters) -> None:
    """Record the arguments with which fire calls functions of the project, including defaults."""
    real = getattr(module, "_MakeParseFn", None)
    if real is None:
        return

    @functools.wraps(real)
    def make(fn: Any, metadata: Any) -> Any:
        parse = real(fn, metadata)

        @functools.wraps(parse)
        def parse_arguments(args: Any) -> Any:
            parsed = parse(args)
            try:
                if parameters.is_project_function(fn):
                    positional, named = parsed[0]
                    bound = inspect.signature(fn).bind_partial(*positional, **named)
                    bound.apply_defaults()
                    parameters.record(bound.arguments, "fire")
            except Exception as exc:
                parameters.failed("fire", exc)
            return parsed

        return parse_arguments

    vars(module)["_MakeParseFn"] = make


def _watch_absl(module: ModuleType, parameters: Parameters) -> None:
    """Record the absl flags that modules of the project define, after the flags are parsed."""
    real = module.FlagValues.__call__

    @functools.wraps(real)
    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        remaining = real(self, *args, **kwargs)
        try:
            parameters.record(
                {
                    flag.name: flag.value
                    for name, flags in self.flags_by_module_dict().items()
                    if _is_defined_by_project(name, parameters)
                    for flag in flags
                },
                "absl",
            )
        except Exception as exc:
            parameters.failed("absl", exc)
        return remaining

    module.FlagValues.__call__ = parse


def _is_defined_by_project(name: str, parameters: Parameters) -> bool:
    """Return True if the module `name` belongs to the project; absl uses the path of the script for `__main__`."""
    module = sys.modules.get("__main__" if name == sys.argv[0] else name)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and parameters.is_project_file(file)


def observe_config_files(parameters: Parameters) -> None:
    """Record small configurations that code of the project reads from files before its first loop."""
    for name, functions in _READERS.items():
        after_import(
            name, functools.partial(_watch_readers, functions=functions, parameters=parameters)
        )
    after_import(
        "ruamel.yaml.main", lambda module: _watch_readers(module.YAML, ("load",), parameters)
    )
    after_import("omegaconf.omegaconf", lambda module: _watch_omegaconf(module, parameters))
    after_import("hydra.core.utils", lambda module: _watch_hydra(module, parameters))


def _watch_readers(owner: Any, functions: tuple[str, ...], parameters: Parameters) -> None:
    source = "yaml" if isinstance(owner, type) else str(owner.__name__).removesuffix("lib")
    for name in functions:
        real = vars(owner).get(name)
        if real is not None:
            wrapped = _wrapped_reader(real, source.removesuffix("li"), parameters)
            setattr(owner, name, wrapped)


def _wrapped_reader(
    real: Callable[..., Any], source: str, parameters: Parameters
) -> Callable[..., Any]:
    """Return `real`, which reads a file, changed to record the returned dictionary if it is a small configuration."""

    @functools.wraps(real)
    def read(*args: Any, **kwargs: Any) -> Any:
        content = real(*args, **kwargs)
        if type(content) is dict:
            try:
                if parameters.is_early() and parameters.is_project_frame(sys._getframe(1)):
                    values = flat(content)
                    if 0 < len(values) <= LARGEST_CONFIG and all(map(_KEY.fullmatch, values)):
                        parameters.record(values, source)
            except Exception as exc:
                parameters.failed(source, exc)
        return content

    return read


def _watch_omegaconf(module: ModuleType, parameters: Parameters) -> None:
    """Record configurations that the project loads, merges, creates or reads from its command line with OmegaConf."""
    config: Any = module.OmegaConf
    for name in ("load", "merge", "from_cli", "structured", "create"):
        descriptor = vars(config).get(name)
        if not isinstance(descriptor, staticmethod):
            continue
        real = descriptor.__func__

        def watched(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            loaded = _real(*args, **kwargs)
            try:
                by_project = parameters.is_early() and parameters.is_project_frame(sys._getframe(1))
                if by_project and "hydra" not in sys.modules:
                    record_omegaconf(loaded, parameters, "omegaconf")
            except Exception as exc:
                parameters.failed("omegaconf", exc)
            return loaded

        setattr(config, name, staticmethod(functools.wraps(real)(watched)))


def _watch_hydra(module: ModuleType, parameters: Parameters) -> None:
    """Record the configuration that Hydra passes to the program's function, before the function runs."""
    real = module.run_job

    @functools.wraps(real)
    def run_job(task_function: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(task_function)
        def task(cfg: Any) -> Any:
            try:
                record_omegaconf(cfg, parameters, "hydra")
            except Exception as exc:
                parameters.failed("hydra", exc)
            return task_function(cfg)

        return real(task, *args, **kwargs)

    vars(module)["run_job"] = run_job
    for user in ("hydra._internal.core_plugins.basic_launcher", "hydra._internal.hydra"):

        def replace_run_job(importer: ModuleType) -> None:
            if vars(importer).get("run_job") is real:
                vars(importer)["run_job"] = run_job

        after_import(user, replace_run_job)


def record_omegaconf(config: Any, parameters: Parameters, source: str) -> None:
    """Record the OmegaConf object `config` as parameters, with references to other values replaced by these values.

    References that call a resolver remain text, because a resolver may be a function of the program.
    """
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(config, resolve=False)
    if isinstance(raw, dict):
        values = flat(raw)
        parameters.record(
            {name: _resolved(value, values) for name, value in values.items()}, source
        )


def _resolved(value: Any, values: Mapping[str, Any], depth: int = 8) -> Any:
    """Return `value` with its references to other `values`, at most `depth` levels deep, replaced by these values.

    >>> _resolved("${a.b}", {"a.b": 3}), _resolved("run-${x}", {"x": "${y}", "y": 1})
    (3, 'run-1')
    >>> _resolved("${now:%Y}", {}), _resolved("${missing}", {})
    ('${now:%Y}', '${missing}')
    """
    if type(value) is not str or "${" not in value or not depth:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _resolved(values.get(whole[1], value), values, depth - 1)
    return _REFERENCE.sub(
        lambda match: str(_resolved(values.get(match[1], match[0]), values, depth - 1)), value
    )


def record_dataclasses(frame: FrameType | None, parameters: Parameters) -> None:
    """Record the fields of configuration objects in variables of `frame` and its callers.

    Configuration objects are instances of the project's dataclasses and pydantic models with mostly plain fields. They
    are looked for in local variables of the project's functions, and in global variables of its modules. Only stored
    values are read, so no code of the program runs.
    """
    visited_ids: set[int] = set()
    while frame is not None:
        if parameters.is_project_frame(frame):
            spaces = [frame.f_globals]
            if frame.f_code.co_name != "<module>":
                local = frame.f_locals
                spaces.insert(0, dict(local))
                if is_copy(frame):
                    local.clear()
            for space in spaces:
                for value in list(space.values()):
                    if id(value) not in visited_ids:
                        visited_ids.add(id(value))
                        fields = config_fields(value, parameters)
                        if fields:
                            parameters.record(fields, "dataclass", new_only=True)
        frame = frame.f_back


def config_fields(value: Any, parameters: Parameters, depth: int = 3) -> dict[str, Any]:
    """Return name -> value of the fields of a configuration object; an empty dictionary for any other object.

    Fields that are configuration objects themselves become dictionaries, at most `depth` levels deep.
    """
    kind = type(value)
    names = getattr(kind, "__dataclass_fields__", None) or getattr(
        kind, "__pydantic_fields__", None
    )
    if not isinstance(names, dict) or not parameters.is_project_class(kind):
        return {}
    stored = getattr(value, "__dict__", None)
    out: dict[str, Any] = {}
    plain_count = 0
    for name in names:
        stored_value = (
            stored.get(name, UNKNOWN) if isinstance(stored, dict) else _slot(value, kind, name)
        )
        inner = config_fields(stored_value, parameters, depth - 1) if depth else {}
        field_value = inner or plain(stored_value)
        if inner or field_value is not UNKNOWN or type(stored_value) is dict:
            out[name] = inner or (stored_value if type(stored_value) is dict else field_value)
            plain_count += 1
    return out if 2 * plain_count > len(names) else {}


def _slot(value: Any, kind: type, name: str) -> Any:
    """Return the value in the slot `name` of an object, or `UNKNOWN` if there is no such slot or it is empty."""
    descriptor: Any = kind.__dict__.get(name)
    if type(descriptor).__name__ != "member_descriptor":
        return UNKNOWN
    try:
        return descriptor.__get__(value, kind)
    except AttributeError:
        return UNKNOWN
