"""What a package says of itself, and the environment it needs: what is here, and a fresh one like it."""

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
"""What cell processes need besides the study's own packages."""


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
    """What the author's side measured for one cell."""

    code: str
    seconds: float | None = None
    size: int | None = None
    reads: tuple[str, ...] | None = None
    outputs: tuple[dict[str, Any], ...] | None = None
    """Of a script, which does not store its outputs; a notebook has them itself."""


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
    """What a package holds."""

    format: int
    created: float
    versions: tuple[PackedVersion, ...]
    environment: PackageEnvironment
    tree: dict[str, Any] = {}
    title: str = ""


def describe_environment(texts: Iterable[str]) -> PackageEnvironment:
    """Return the environment here, with the packages that program texts import."""
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


def differences(wanted: PackageEnvironment) -> list[str]:
    """Return how the environment here differs, a phrase each."""
    found = []
    if platform.python_version_tuple()[:2] != tuple(wanted.python.split(".")[:2]):
        found.append(f"Python is {platform.python_version()} here, {wanted.python} there")
    for name, version in sorted(wanted.packages.items()):
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} {version} is not installed here")
            continue
        if here.partition("+")[0] != version.partition("+")[0]:
            found.append(f"{name} is {here} here, {version} there")
    return found


def requirements(wanted: PackageEnvironment) -> list[str]:
    """Return pinned requirements; a name or version that is not plain is refused.

    >>> requirements(PackageEnvironment("3.12", "", {"numpy": "2.1.0+cpu"}))
    ['numpy==2.1.0']
    """
    lines = []
    for name, version in sorted(wanted.packages.items()):
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
    folder: Path, wanted: PackageEnvironment, *, notebook: bool, log: Path
) -> str:
    """Make a virtual environment with the packages of a study; return its interpreter.

    Only wheels are installed: building a source distribution would run its code.
    """
    short = ".".join(wanted.python.split(".")[:2])
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
            *requirements(wanted),
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
