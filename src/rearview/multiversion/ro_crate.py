"""RO-Crate metadata: what a package contains, in the exchange format for research data."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rearview.errors import SourceError
from rearview.model.wording import plural
from rearview.multiversion.package_manifest import Manifest
from rearview.multiversion.study import Study, from_files

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
PROFILE = "https://w3id.org/ro/crate/1.1"
_PROGRAMS = {"SoftwareSourceCode", "ComputationalWorkflow", "SoftwareApplication"}


def crate_of(manifest: Manifest) -> dict[str, Any]:
    """Return the RO-Crate 1.1 description of a package."""
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


def from_crate(folder: Path) -> tuple[Study, str]:
    """Return the study and title of an RO-Crate folder; its programs are the versions."""
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
        inside = path.is_relative_to(folder.resolve())
        if kinds & _PROGRAMS and "File" in kinds and inside and path.is_file():
            if path.suffix in {".py", ".ipynb"}:
                programs.append(path)
    if not programs:
        raise SourceError(
            f"{file} names no Python script or notebook in this folder as SoftwareSourceCode.",
            slug="ro-crate",
        )
    return from_files(programs), str(entities.get("./", {}).get("name", ""))
