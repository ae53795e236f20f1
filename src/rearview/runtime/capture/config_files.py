"""Capture parameters from configuration: YAML, TOML and JSON files, OmegaConf and Hydra, dataclasses."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

from rearview.runtime.capture.parameters import UNKNOWN, Parameters, flat, plain
from rearview.runtime.sandbox.entropy import after_import

LARGEST = 64
"""A file with more values than this is data, not a configuration."""
_KEY = re.compile(r"[A-Za-z_][\w.\-/ ]{0,99}")
_READERS = {
    "yaml": ("load", "safe_load", "full_load", "unsafe_load"),
    "tomllib": ("load", "loads"),
    "tomli": ("load", "loads"),
    "toml": ("load", "loads"),
    "json": ("load",),
}
"""Functions of parsers that return the content of a file."""
_REFERENCE = re.compile(r"\$\{([^:${}]+)\}")
"""A reference of OmegaConf to another value; one with a colon would call a resolver."""


def capture_config_files(parameters: Parameters) -> None:
    """Record small configurations that code of the project reads before its first loop."""
    for name, functions in _READERS.items():
        after_import(name, functools.partial(_watch, functions=functions, parameters=parameters))
    after_import("ruamel.yaml.main", lambda module: _watch(module.YAML, ("load",), parameters))
    after_import("omegaconf.omegaconf", lambda module: _watch_omegaconf(module, parameters))
    after_import("hydra.core.utils", lambda module: _watch_hydra(module, parameters))


def _watch(owner: Any, functions: tuple[str, ...], parameters: Parameters) -> None:
    source = "yaml" if isinstance(owner, type) else str(owner.__name__).removesuffix("lib")
    for name in functions:
        real = vars(owner).get(name)
        if real is not None:
            wrapped = _reading(real, source.removesuffix("li"), parameters)
            setattr(owner, name, wrapped)


def _reading(real: Callable[..., Any], source: str, parameters: Parameters) -> Callable[..., Any]:
    @functools.wraps(real)
    def read(*args: Any, **kwargs: Any) -> Any:
        content = real(*args, **kwargs)
        if type(content) is dict:
            try:
                if parameters.is_early() and parameters.is_project_frame(sys._getframe(1)):
                    values = flat(content)
                    if 0 < len(values) <= LARGEST and all(map(_KEY.fullmatch, values)):
                        parameters.keep(values, source)
            except Exception as exc:
                parameters.failed(source, exc)
        return content

    return read


def _watch_omegaconf(module: ModuleType, parameters: Parameters) -> None:
    """Keep configurations that the project loads, merges or reads from its command line."""
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
                    keep_omegaconf(loaded, parameters, "omegaconf")
            except Exception as exc:
                parameters.failed("omegaconf", exc)
            return loaded

        setattr(config, name, staticmethod(functools.wraps(real)(watched)))


def _watch_hydra(module: ModuleType, parameters: Parameters) -> None:
    """Keep the configuration with which Hydra calls the program's function, before it runs."""
    real = module.run_job

    @functools.wraps(real)
    def run_job(task_function: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(task_function)
        def task(cfg: Any) -> Any:
            try:
                keep_omegaconf(cfg, parameters, "hydra")
            except Exception as exc:
                parameters.failed("hydra", exc)
            return task_function(cfg)

        return real(task, *args, **kwargs)

    vars(module)["run_job"] = run_job
    for user in ("hydra._internal.core_plugins.basic_launcher", "hydra._internal.hydra"):

        def exchange(other: ModuleType) -> None:
            if vars(other).get("run_job") is real:
                vars(other)["run_job"] = run_job

        after_import(user, exchange)


def keep_omegaconf(config: Any, parameters: Parameters, source: str) -> None:
    """Keep a configuration of OmegaConf, its references to other values resolved.

    Resolvers may be functions of the program, so they are not called: their references stay as text.
    """
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(config, resolve=False)
    if isinstance(raw, dict):
        values = flat(raw)
        parameters.keep({name: _resolved(value, values) for name, value in values.items()}, source)


def _resolved(value: Any, values: Mapping[str, Any], depth: int = 8) -> Any:
    """Return a value with references to other ones replaced.

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


def keep_dataclasses(frame: FrameType | None, parameters: Parameters) -> None:
    """Record the fields of configuration objects that exist when a loop begins.

    These are instances of the project's dataclasses and pydantic models with mostly plain fields, in
    local variables of its functions or in globals of its modules. Only stored values are read, so no
    code of the program runs.
    """
    seen: set[int] = set()
    while frame is not None:
        if parameters.is_project_frame(frame):
            spaces = [frame.f_globals]
            if frame.f_code.co_name != "<module>":
                local = frame.f_locals
                spaces.insert(0, dict(local))
                if parameters.is_copy(frame):
                    local.clear()
            for space in spaces:
                for value in list(space.values()):
                    if id(value) not in seen:
                        seen.add(id(value))
                        fields = config_fields(value, parameters)
                        if fields:
                            parameters.keep(fields, "dataclass", new_only=True)
        frame = frame.f_back


def config_fields(value: Any, parameters: Parameters, depth: int = 3) -> dict[str, Any]:
    """Return the fields of a configuration object; empty for any other object."""
    kind = type(value)
    names = getattr(kind, "__dataclass_fields__", None) or getattr(
        kind, "__pydantic_fields__", None
    )
    if not isinstance(names, dict) or not parameters.is_project_class(kind):
        return {}
    stored = getattr(value, "__dict__", None)
    out: dict[str, Any] = {}
    plain_ones = 0
    for name in names:
        stored_value = (
            stored.get(name, UNKNOWN) if isinstance(stored, dict) else _slot(value, kind, name)
        )
        inner = config_fields(stored_value, parameters, depth - 1) if depth else {}
        field_value = inner or plain(stored_value)
        if inner or field_value is not UNKNOWN or type(stored_value) is dict:
            out[name] = inner or (stored_value if type(stored_value) is dict else field_value)
            plain_ones += 1
    return out if 2 * plain_ones > len(names) else {}


def _slot(value: Any, kind: type, name: str) -> Any:
    descriptor: Any = kind.__dict__.get(name)
    if type(descriptor).__name__ != "member_descriptor":
        return UNKNOWN
    try:
        return descriptor.__get__(value, kind)
    except AttributeError:
        return UNKNOWN
