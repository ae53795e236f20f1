"""The manifest of a package, and its environment: how it differs from this one, how to make it again."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import ReplayError
from rearview.source.cells import imported_modules

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!_-]{0,60}")
TOOLS = ("ipython", "matplotlib-inline", "cloudpickle")
"""Packages that cell processes need besides those of the study."""


class PackageEnvironment(msgspec.Struct, frozen=True):
    """Interpreter, system and packages that a study ran with."""

    python: str
    system: str = ""
    packages: dict[str, str] = {}
    """Distribution -> version."""


class PackedFile(msgspec.Struct, frozen=True):
    """One file of one version."""

    sha256: str
    size: int
    embedded: bool


class PackedCell(msgspec.Struct, frozen=True):
    """What was measured for one cell on the author's machine."""

    code: str
    seconds: float | None = None
    size: int | None = None
    reads: tuple[str, ...] | None = None
    outputs: tuple[dict[str, Any], ...] | None = None
    """Outputs of a script, which does not store them itself; a notebook does."""


class PackedVersion(msgspec.Struct, frozen=True):
    """One version."""

    name: str
    program: str
    source: str
    """sha256 of the program."""
    notebook: bool = False
    cwd: str = ""
    argv: tuple[str, ...] = ()
    environment: dict[str, str | None] = {}
    files: dict[str, PackedFile] = {}
    inputs: tuple[str, ...] | None = None
    printed: str | None = None
    run: str = ""
    cells: tuple[PackedCell, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The content of `manifest.json`."""

    format: int
    created: float
    versions: tuple[PackedVersion, ...]
    environment: PackageEnvironment
    tree: dict[str, Any] = {}
    title: str = ""


def describe_environment(texts: Iterable[str]) -> PackageEnvironment:
    """Return the environment here, with the packages that programs import."""
    providers = metadata.packages_distributions()
    packages: dict[str, str] = {}
    for module in sorted({name for text in texts for name in imported_modules(text)}):
        for distribution in providers.get(module, ()):
            try:
                packages[distribution] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    packages.pop("rearview", None)
    return PackageEnvironment(platform.python_version(), platform.platform(), packages)


def differences(environment: PackageEnvironment) -> list[str]:
    """Return a phrase for each difference between an environment and the one here."""
    phrases = []
    if platform.python_version_tuple()[:2] != tuple(environment.python.split(".")[:2]):
        phrases.append(f"Python is {platform.python_version()} here, {environment.python} there")
    for name, version in sorted(environment.packages.items()):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            phrases.append(f"{name} {version} is not installed here")
            continue
        if installed.partition("+")[0] != version.partition("+")[0]:
            phrases.append(f"{name} is {installed} here, {version} there")
    return phrases


def requirements(environment: PackageEnvironment) -> list[str]:
    """Return pinned requirements; raise if a name or version has an unusual form.

    >>> requirements(PackageEnvironment("3.12", "", {"numpy": "2.1.0+cpu"}))
    ['numpy==2.1.0']
    """
    lines = []
    for name, version in sorted(environment.packages.items()):
        plain = version.partition("+")[0]
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(plain):
            raise ReplayError(
                f"The package asks for {name[:60]!r} {version[:60]!r}, which is not a plain name and "
                "version. Nothing was installed.",
                slug="requirement",
            )
        lines.append(f"{name}=={plain}")
    return lines


def fresh_environment(
    folder: Path, environment: PackageEnvironment, *, notebook: bool, log: Path
) -> str:
    """Create a virtual environment with the packages of a study; return its interpreter.

    Only wheels are installed, because building a source distribution would run its code.
    """
    short = ".".join(environment.python.split(".")[:2])
    interpreter = sys.executable
    if re.fullmatch(r"3\.\d{1,2}", short) and short != ".".join(
        platform.python_version_tuple()[:2]
    ):
        interpreter = shutil.which(f"python{short}") or sys.executable
    tools = [tool for tool in TOOLS if notebook or tool == "cloudpickle"]
    commands = [
        [interpreter, "-m", "venv", str(folder)],
        [
            *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            *("--disable-pip-version-check", "--only-binary", ":all:"),
            *requirements(environment),
            *tools,
        ],
    ]
    with log.open("ab") as stream:
        for command in commands:
            code = subprocess.run(command, stdout=stream, stderr=stream, check=False).returncode
            if code:
                last = log.read_text("utf-8", "replace").strip().splitlines()
                raise ReplayError(
                    f"The environment of the study cannot be made: {' '.join(command[1:4])} ended "
                    f"with {code}: {last[-1] if last else 'no message'}. See {log}, or replay in this "
                    "environment with --offline.",
                    slug="fresh-environment",
                )
    return str(folder / "bin" / "python")
