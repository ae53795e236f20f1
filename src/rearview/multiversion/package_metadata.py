"""The metadata of a study package: manifest, RO-Crate description, and environment, which can be recreated.

RO-Crate is an exchange format for research data. A study package contains RO-Crate metadata about itself, and a
folder with RO-Crate metadata can be opened as a study.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import ReplayError, SourceError
from rearview.model.wording import plural
from rearview.multiversion.study import Study, study_from_files
from rearview.source.cells import imported_modules

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!_-]{0,60}")
TOOLS, NOTEBOOK_TOOLS = ("cloudpickle",), ("ipython", "matplotlib-inline")
"""Distributions that cell processes need in addition to those of the study: always, and only for notebooks."""


class PackageEnvironment(msgspec.Struct, frozen=True):
    """The interpreter, system and installed packages with which a study ran."""

    python: str
    system: str = ""
    packages: dict[str, str] = {}
    """Name of an installed distribution -> its version."""


class PackedFile(msgspec.Struct, frozen=True):
    """A file of a version, as `manifest.json` lists it; `embedded` says whether the package contains its content."""

    sha256: str
    size: int
    embedded: bool


class PackedCell(msgspec.Struct, frozen=True):
    """A cell, as `manifest.json` lists it, with its measurements on the author's machine."""

    code: str
    seconds: float | None = None
    size: int | None = None
    reads: tuple[str, ...] | None = None
    outputs: tuple[dict[str, Any], ...] | None = None
    """Outputs of a script's cell; None for a cell of a notebook, whose file contains the outputs."""


class PackedVersion(msgspec.Struct, frozen=True):
    """A version of the study, as `manifest.json` lists it."""

    name: str
    program: str
    source: str
    """sha256 of the program's content."""
    notebook: bool = False
    cwd: str = ""
    argv: tuple[str, ...] = ()
    environment: dict[str, str | None] = {}
    files: dict[str, PackedFile] = {}
    inputs: tuple[str, ...] | None = None
    printed: str | None = None
    run: str = ""
    cells: tuple[PackedCell, ...] = ()
    outputs: str = ""
    """sha256 of the JSON with the outputs of a notebook's recorded run; empty for a script, or if the notebook
    file contains these outputs."""


class Manifest(msgspec.Struct, frozen=True):
    """The content of `manifest.json`."""

    format: int
    created: float
    versions: tuple[PackedVersion, ...]
    environment: PackageEnvironment
    tree: dict[str, Any] = {}
    title: str = ""


def describe_environment(texts: Iterable[str]) -> PackageEnvironment:
    """Return interpreter and system of this process, and the packages that the Python sources `texts` import."""
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
    """Return a phrase for each difference between `environment` and the environment of this process."""
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
    """Return the packages of an environment as lines `name==version`; raise if one of them has an unusual form.

    >>> requirements(PackageEnvironment("3.12", "", {"numpy": "2.1.0+cpu"}))
    ['numpy==2.1.0']
    """
    lines = []
    for name, version in sorted(environment.packages.items()):
        public_version = version.partition("+")[0]
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(public_version):
            raise ReplayError(
                f"The package asks for {name[:60]!r} {version[:60]!r}, which is not a plain name and "
                "version. Nothing was installed.",
                slug="requirement",
            )
        lines.append(f"{name}=={public_version}")
    return lines


def own_requirements() -> list[str]:
    """Return the distributions that Rearview requires: a new environment needs them if a program imports Rearview."""
    try:
        lines = metadata.requires("rearview") or ()
    except metadata.PackageNotFoundError:
        return []
    return [line for line in lines if "extra ==" not in line]


def fresh_environment(
    folder: Path, environment: PackageEnvironment, *, tools: Sequence[str], log: Path
) -> str:
    """Create a virtual environment in `folder`; return the path of its interpreter.

    It contains the packages of `environment` and the distributions `tools`. The output of pip is appended to `log`.
    Only wheels are installed, because building a source distribution would run the distribution's code.
    """
    minor_version = ".".join(environment.python.split(".")[:2])
    interpreter = sys.executable
    if re.fullmatch(r"3\.\d{1,2}", minor_version) and minor_version != ".".join(
        platform.python_version_tuple()[:2]
    ):
        interpreter = shutil.which(f"python{minor_version}") or sys.executable
    commands = [
        [interpreter, "-I", "-m", "venv", str(folder)],
        [
            *(str(folder / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet"),
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


CONTEXT = "https://w3id.org/ro/crate/1.1/context"
PROFILE = "https://w3id.org/ro/crate/1.1"
_PROGRAMS = {"SoftwareSourceCode", "ComputationalWorkflow", "SoftwareApplication"}


def crate_of(manifest: Manifest) -> dict[str, Any]:
    """Return the RO-Crate 1.1 metadata of the study package with this manifest, as a dict for JSON."""
    day = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(manifest.created))
    files: dict[str, dict[str, Any]] = {}
    actions: list[dict[str, Any]] = []
    for version in manifest.versions:
        program = f"objects/{version.source}"
        kind = "application/x-ipynb+json" if version.notebook else "text/x-python"
        files[program] = {
            "@id": program,
            "@type": ["File", "SoftwareSourceCode"],
            "name": version.program,
            "encodingFormat": kind,
            "programmingLanguage": {"@id": "#python"},
            "sha256": version.source,
        }
        inputs = []
        for name, ref in version.files.items():
            place = f"objects/{ref.sha256}" if ref.embedded else f"#file-{ref.sha256}"
            inputs.append({"@id": place})
            files.setdefault(
                place,
                {
                    "@id": place,
                    "@type": "File" if ref.embedded else "CreativeWork",
                    "name": name,
                    "contentSize": str(ref.size),
                    "sha256": ref.sha256,
                },
            )
        actions.append(
            {
                "@id": f"#version-{len(actions) + 1}",
                "@type": "CreateAction",
                "name": version.name,
                "instrument": {"@id": program},
                "object": inputs,
            }
        )
    parts = [{"@id": name} for name in files if name.startswith("objects/")]
    graph = [
        {
            "@id": "ro-crate-metadata.json",
            "@type": "CreativeWork",
            "conformsTo": {"@id": PROFILE},
            "about": {"@id": "./"},
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": manifest.title or f"{plural(len(manifest.versions), 'version')} of one study",
            "description": "Versions of a program with data and recorded outputs, to be replayed.",
            "datePublished": day,
            "license": "See the files of the study.",
            "hasPart": parts,
            "mentions": [{"@id": action["@id"]} for action in actions],
        },
        {
            "@id": "#python",
            "@type": "ComputerLanguage",
            "name": "Python",
            "version": manifest.environment.python,
        },
        *files.values(),
        *actions,
        *(
            {"@id": f"#package-{name}", "@type": "SoftwareApplication", "name": name,
             "softwareVersion": version}
            for name, version in manifest.environment.packages.items()
        ),
    ]  # fmt: skip
    return {"@context": CONTEXT, "@graph": graph}


def study_from_crate(folder: Path) -> tuple[Study, str]:
    """Return (study, title) of an RO-Crate folder; each script and notebook in its metadata becomes a version."""
    file = folder / "ro-crate-metadata.json"
    try:
        document = json.loads(file.read_text("utf-8"))
        graph = document["@graph"]
        entities: dict[str, Mapping[str, Any]] = {
            str(entity["@id"]): entity for entity in graph if isinstance(entity, dict)
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise SourceError(
            f"{file} is not RO-Crate metadata that can be read: {exc}.", slug="ro-crate"
        ) from exc
    programs = []
    for name, entity in entities.items():
        kinds = entity.get("@type", ())
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        path = (folder / name).resolve()
        is_inside = path.is_relative_to(folder.resolve())
        if kinds & _PROGRAMS and "File" in kinds and is_inside and path.is_file():
            if path.suffix in {".py", ".ipynb"}:
                programs.append(path)
    if not programs:
        raise SourceError(
            f"{file} names no Python script or notebook in this folder as SoftwareSourceCode.",
            slug="ro-crate",
        )
    return study_from_files(programs), str(entities.get("./", {}).get("name", ""))
