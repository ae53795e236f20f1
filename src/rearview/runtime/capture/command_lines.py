"""Capture parameters that a program reads from its command line: argparse, click, fire and absl."""

from __future__ import annotations

import functools
import inspect
import sys
from types import FrameType, ModuleType
from typing import Any

from rearview.runtime.capture.parameters import Parameters
from rearview.runtime.sandbox.entropy import after_import

_WITH_PARSERS = frozenset({"absl", "fire", "hydra"})
"""Libraries that use argparse for options of their own."""


def capture_command_lines(parameters: Parameters) -> None:
    """Record the parameters that command-line parsers return from now on."""
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
            of_a_magic = type(self).__module__.startswith("IPython.")
            if not of_a_magic and _caller(sys._getframe(1)) not in _WITH_PARSERS:
                parameters.keep(vars(parsed[0]), "argparse", texts=True)
        except Exception as exc:
            parameters.failed("argparse", exc)
        return parsed

    module.ArgumentParser.parse_known_args = parse


def _caller(frame: FrameType | None) -> str:
    """Return the package that asked argparse to parse."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in {"argparse", "rearview"}:
            return name
        frame = frame.f_back
    return ""


def _watch_click(module: ModuleType, parameters: Parameters) -> None:
    """Keep the parameters of commands that the project defines, before their function runs."""
    real = module.Command.invoke

    @functools.wraps(real)
    def invoke(self: Any, ctx: Any) -> Any:
        try:
            if parameters.is_project(self.callback):
                parameters.keep(ctx.params, "click")
        except Exception as exc:
            parameters.failed("click", exc)
        return real(self, ctx)

    module.Command.invoke = invoke


def _watch_fire(module: ModuleType, parameters: Parameters) -> None:
    """Keep the arguments with which fire calls functions of the project, defaults included."""
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
                if parameters.is_project(fn):
                    positional, named = parsed[0]
                    bound = inspect.signature(fn).bind_partial(*positional, **named)
                    bound.apply_defaults()
                    parameters.keep(bound.arguments, "fire")
            except Exception as exc:
                parameters.failed("fire", exc)
            return parsed

        return parse_arguments

    vars(module)["_MakeParseFn"] = make


def _watch_absl(module: ModuleType, parameters: Parameters) -> None:
    """Keep the flags that modules of the project define, once they are parsed."""
    real = module.FlagValues.__call__

    @functools.wraps(real)
    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        remaining = real(self, *args, **kwargs)
        try:
            parameters.keep(
                {
                    flag.name: flag.value
                    for name, flags in self.flags_by_module_dict().items()
                    if _defines(name, parameters)
                    for flag in flags
                },
                "absl",
            )
        except Exception as exc:
            parameters.failed("absl", exc)
        return remaining

    module.FlagValues.__call__ = parse


def _defines(name: str, parameters: Parameters) -> bool:
    """Return True if the module that defines flags is the project's; a script goes by its path."""
    module = sys.modules.get("__main__" if name == sys.argv[0] else name)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and parameters.is_project_file(file)
