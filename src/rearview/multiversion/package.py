"""Write a study into a study package, and read study packages.

A study package ("package" in this module) is one file with which another person can replay the study; it
contains no checkpoints. It is an `.rvz` file: a ZIP archive with `manifest.json`, `ro-crate-metadata.json` and `objects/<sha256>`, where
files with equal content are stored once. A package may come from anyone: its names, sizes and hashes are
checked while it is read; nothing in it is unpickled, linked or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rearview.errors import RearviewError, StoreError, UsageError
from rearview.multiversion.execution_tree import (
    CellFacts,
    Measurements,
    build_tree,
    cells_as_written,
    tree_to_json,
)
from rearview.multiversion.package_metadata import (
    Manifest,
    PackedCell,
    PackedFile,
    PackedVersion,
    crate_of,
    describe_environment,
)
from rearview.multiversion.study import (
    FileRef,
    Study,
    StudyCell,
    StudyVersion,
    digest_of,
    program_cells,
    split_loops,
)
from rearview.multiversion.study_sources import MACHINE_VARIABLES

FORMAT = 1
MANIFEST = "manifest.json"
CRATE = "ro-crate-metadata.json"
EMBED_LIMIT = 200 << 20
"""Size in bytes up to which a file is stored in a study package; a larger file is listed with name and hash."""
MOST_ENTRIES = 100_000
MOST_MANIFEST = 64 << 20
"""Size of `manifest.json`, in bytes, above which a study package is refused."""
MOST_BYTES = 50 << 30
"""Size of the unpacked contents, in bytes, above which a study package is refused."""
MOST_DIRECTORY = 32 << 20
"""Size of the archive's table of contents, in bytes, above which a study package is refused."""
MOST_SECONDS, MOST_SIZE = 1e9, 1 << 60
"""Upper limits for the seconds and bytes of a cell that a study package states; larger values are replaced."""
MOST_RATIO = 300
"""Ratio of unpacked to packed size of a file above which a study package is refused; `pack` stays below it."""
_OBJECT = re.compile(r"objects/([0-9a-f]{64})")
_CHUNK = 1 << 20
Measured = list[tuple[CellFacts | None, tuple[dict[str, Any], ...] | None]]


@dataclass(frozen=True, slots=True)
class PackResult:
    """Counts and sizes of a study package that `pack` wrote."""

    file: Path
    versions: int
    files: int
    embedded: int
    """Size of the contents before compression, in bytes."""
    referenced: tuple[str, ...]
    """Names of files whose hash is in the package and whose content is not."""
    size: int


def pack(
    file: Path,
    study: Study,
    *,
    programs: Mapping[str, bytes],
    measurements: Measurements,
    embed: int = EMBED_LIMIT,
    title: str = "",
) -> PackResult:
    """Write `study` into the study package `file`, which appears only when it is complete.

    Files larger than `embed` bytes are listed with name and hash only.
    """
    tree = build_tree(study, measurements)
    contents: dict[str, Path | bytes] = {}
    referenced: dict[str, None] = {}
    digests: dict[Path, str] = {}
    versions = []
    for version, split_version in zip(study.versions, split_loops(study).versions, strict=True):
        measured = cells_as_written(split_version, measurements)
        program = programs[version.name]
        source = hashlib.sha256(program).hexdigest()
        contents[source] = program
        files: dict[str, PackedFile] = {}
        for name, ref in _needed_files(version, measured).items():
            if ref.file is None:
                files[name] = PackedFile(ref.digest[:64], ref.size, embedded=False)
                referenced[name] = None
                continue
            digest = digests.get(ref.file) or digest_of(ref.file)
            digests[ref.file] = digest
            embedded = ref.size <= embed
            files[name] = PackedFile(digest, ref.size, embedded)
            if embedded:
                contents[digest] = ref.file
            else:
                referenced[name] = None
        outputs = _outputs_of_run(version, program)
        digest = hashlib.sha256(outputs).hexdigest() if outputs else ""
        if outputs:
            contents[digest] = outputs
        versions.append(_packed_version(version, source, files, measured, digest))
    environment = describe_environment([cell.text for v in study.versions for cell in v.cells])
    manifest = Manifest(
        FORMAT, round(time.time(), 3), tuple(versions), environment, tree_to_json(tree), title
    )
    total = _write(file, manifest, contents)
    return PackResult(
        file, len(versions), len(contents), total, tuple(referenced), file.stat().st_size
    )


def _needed_files(version: StudyVersion, measured: Measured) -> dict[str, FileRef]:
    """Return file path -> file for the files that a version may need.

    These are the files that its cells read, all Python files, and all files that a library may have read in C. If it
    is unknown which files a cell read, all files of the version are returned.
    """
    reads: set[str] = set()
    for cell, (facts, _) in zip(version.cells, measured, strict=True):
        cell_reads = facts.reads if facts else cell.reads
        if cell_reads is None:
            return dict(version.files)
        reads.update(cell_reads)
    folders = tuple(name for name in reads if name.endswith("/") and name != "/")
    return {
        name: ref
        for name, ref in version.files.items()
        if name in reads
        or name.endswith(".py")
        or (folders and name.startswith(folders))
        or (version.inputs is not None and name in version.inputs)
        or Path(name).name in {"LICENSE", "README.md", "requirements.txt"}
        # a data file: a library may have read it in C, which is not recorded
        or not name.endswith((".py", ".ipynb", ".md", ".txt", ".log"))
    }


def _packed_version(
    version: StudyVersion,
    source: str,
    files: dict[str, PackedFile],
    measured: Measured,
    outputs_of_run: str,
) -> PackedVersion:
    cells = [
        PackedCell(
            cell.code,
            facts.seconds if facts else cell.seconds,
            facts.size if facts else cell.size,
            facts.reads if facts else cell.reads,
            None if version.notebook else outputs,
        )
        for cell, (facts, outputs) in zip(version.cells, measured, strict=True)
    ]
    return PackedVersion(
        version.name,
        version.program,
        source,
        version.notebook,
        version.cwd,
        version.argv,
        dict(version.environment),
        files,
        None if version.inputs is None else tuple(sorted(version.inputs)),
        version.printed,
        version.run,
        tuple(cells),
        outputs_of_run,
    )


def _outputs_of_run(version: StudyVersion, program: bytes) -> bytes:
    """Return the outputs of a notebook's cells in JSON; b"" for a script, or if `program` contains these outputs."""
    if not version.notebook:
        return b""
    outputs = [cell.outputs for cell in version.cells]
    if outputs == [cell.outputs for cell in program_cells(program, version.program)]:
        return b""
    return msgspec.json.encode(outputs)


def _write(file: Path, manifest: Manifest, contents: Mapping[str, Path | bytes]) -> int:
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    total = 0
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            archive.writestr(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            crate = crate_of(manifest)
            archive.writestr(CRATE, msgspec.json.format(msgspec.json.encode(crate), indent=1))
            for digest, content in sorted(contents.items()):
                name = f"objects/{digest}"
                if isinstance(content, bytes):
                    archive.writestr(name, content)
                    total += len(content)
                else:
                    total += content.stat().st_size
                    archive.write(content, name, _compression(content))
        part.replace(file)
    except OSError as exc:
        raise StoreError(
            f"The package {file} cannot be written: {exc.strerror or exc}.", slug="package-write"
        ) from exc
    finally:
        part.unlink(missing_ok=True)
    return total


def _compression(file: Path) -> int:
    """Return the ZIP compression for a file.

    A file that compresses extremely well is stored uncompressed: readers would refuse it as a ZIP bomb.
    """
    with file.open("rb") as stream:
        sample = stream.read(_CHUNK)
    is_normal_ratio = len(sample) < 100 * len(zlib.compress(sample, 6))
    return zipfile.ZIP_DEFLATED if is_normal_ratio else zipfile.ZIP_STORED


# The code below reads packages, which may come from anyone.


class PackageReader:
    """An open study package whose manifest was checked; `extract` writes its contents to a folder."""

    def __init__(self, file: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.file = file
        self._max_bytes = most_bytes
        if _directory_size(file) > MOST_DIRECTORY:
            raise _refusal(file, f"its table of contents has more than {MOST_DIRECTORY >> 20} MB")
        try:
            self._archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
            raise _refusal(
                file, f"it is not a complete package ({exc})", slug="package-damaged"
            ) from exc
        self._entries = self._checked_entries()
        self.manifest = self._read_manifest()

    def close(self) -> None:
        """Close the file of the study package."""
        self._archive.close()

    def _checked_entries(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._archive.infolist()
        if len(infos) > MOST_ENTRIES:
            raise _refusal(self.file, f"it has {len(infos)} entries, more than {MOST_ENTRIES}")
        entries: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in infos:
            name = info.filename
            if name not in {MANIFEST, CRATE} and not _OBJECT.fullmatch(name):
                raise _refusal(
                    self.file, f"it has an entry {name[:80]!r}, which packages do not have"
                )
            if name in entries:
                raise _refusal(self.file, f"it has two entries {name!r}")
            mode = info.external_attr >> 16
            if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
                raise _refusal(self.file, f"its entry {name!r} is a link or a device")
            if info.flag_bits & 1:
                raise _refusal(self.file, f"its entry {name!r} is encrypted")
            if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise _refusal(self.file, f"its entry {name!r} is compressed in an unknown way")
            if info.file_size > _CHUNK and info.file_size > MOST_RATIO * max(1, info.compress_size):
                raise _refusal(
                    self.file,
                    f"its entry {name!r} grows {info.file_size // max(1, info.compress_size)} "
                    "times when unpacked",
                )
            total += info.file_size
            entries[name] = info
        if total > self._max_bytes:
            raise _refusal(
                self.file,
                f"its contents take {total / 1e9:.1f} GB, more than the {self._max_bytes / 1e9:.1f} GB "
                "allowed. Raise the limit with --max-size if you trust it",
                slug="package-too-large",
            )
        if MANIFEST not in entries:
            raise _refusal(self.file, "it has no manifest.json", slug="package-damaged")
        return entries

    def _read_manifest(self) -> Manifest:
        info = self._entries[MANIFEST]
        if info.file_size > MOST_MANIFEST:
            raise _refusal(self.file, f"its manifest has {info.file_size} bytes")
        data = b"".join(self._chunks(info))
        try:
            number = msgspec.json.decode(data, type=_Format).format
            if number > FORMAT:
                raise _refusal(
                    self.file,
                    f"it has format {number}, and this Rearview reads up to {FORMAT}: update it",
                    slug="package-format",
                )
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise _refusal(
                self.file, f"its manifest cannot be read: {exc}", slug="package-damaged"
            ) from exc
        self._check_manifest(manifest)
        return manifest

    def _check_manifest(self, manifest: Manifest) -> None:
        names = [version.name for version in manifest.versions]
        if not names:
            raise _refusal(self.file, "it has no versions", slug="package-damaged")
        if len(set(names)) != len(names):
            raise _refusal(self.file, "two of its versions have the same name")
        for version in manifest.versions:
            paths = [version.program, *version.files]
            if version.cwd:
                paths.append(version.cwd)
            for path in paths:
                self._check_path(path)
            files = set(version.files) | {version.program}
            for path in (*files, f"{version.cwd}/x" if version.cwd else ""):
                above = [str(p) for p in PurePosixPath(path).parents]
                if any(p in files for p in above):
                    raise _refusal(self.file, f"{path[:100]!r} lies below another file")
            self._check_object(version.source, None)
            if version.outputs:
                self._check_object(version.outputs, None)
            for name, packed in version.files.items():
                if packed.embedded:
                    self._check_object(packed.sha256, packed.size)
                elif not re.fullmatch(r"[0-9a-f]{64}|recorded:[0-9a-f]+", packed.sha256):
                    raise _refusal(self.file, f"the hash of {name!r} is not a hash")
            for name, value in version.environment.items():
                if not name or "=" in name or "\0" in name + (value or ""):
                    raise _refusal(self.file, f"it sets an environment variable {name!r}")
            if any("\0" in word for word in version.argv):
                raise _refusal(self.file, "an argument contains a null byte")

    def _check_path(self, path: str) -> None:
        parts = path.split("/")
        is_unsafe = (
            not path
            or len(path) > 1000
            or path.startswith("/")
            or any(part in {"", ".", ".."} for part in parts)
            or any(len(os.fsencode(part)) > 255 for part in parts)
            or any(ord(char) < 32 or char in '\\:*?"<>|\x7f' for char in path)
        )
        if is_unsafe:
            raise _refusal(
                self.file, f"it names a file {path[:100]!r}, which leads out of its folder"
            )

    def _check_object(self, digest: str, size: int | None) -> None:
        info = self._entries.get(f"objects/{digest}")
        if info is None:
            raise _refusal(self.file, f"content {digest[:12]} is missing", slug="package-damaged")
        if size is not None and info.file_size != size:
            raise _refusal(
                self.file,
                f"content {digest[:12]} has {info.file_size} bytes, not {size}",
                slug="package-damaged",
            )

    def _chunks(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield the content of the archive entry `info` in chunks; raise if the size differs from the entry's header."""
        bytes_read = 0
        try:
            with self._archive.open(info) as stream:
                while chunk := stream.read(_CHUNK):
                    bytes_read += len(chunk)
                    if bytes_read > info.file_size:
                        why = f"{info.filename!r} is larger than its header says"
                        raise _refusal(self.file, why)  # noqa: TRY301
                    yield chunk
        except (zipfile.BadZipFile, OSError, EOFError, ValueError) as exc:
            raise _refusal(
                self.file, f"{info.filename!r} is damaged ({exc})", slug="package-damaged"
            ) from exc
        except Exception as exc:  # `zlib.error` is no subclass of the classes above
            if isinstance(exc, RearviewError):
                raise
            raise _refusal(
                self.file, f"{info.filename!r} is damaged ({exc})", slug="package-damaged"
            ) from exc
        if bytes_read != info.file_size:
            raise _refusal(
                self.file,
                f"{info.filename!r} is shorter than its header says",
                slug="package-damaged",
            )

    def content(self, digest: str) -> bytes:
        """Return the content stored with the sha256 `digest`; raise if its actual hash differs."""
        data = b"".join(self._chunks(self._entries[f"objects/{digest}"]))
        if hashlib.sha256(data).hexdigest() != digest:
            raise _refusal(self.file, f"content {digest[:12]} was changed", slug="package-damaged")
        return data

    def extract(
        self, folder: Path, *, data: Sequence[Path] = (), only: Sequence[str] = ()
    ) -> tuple[Study, dict[str, bytes]]:
        """Write the contents to the empty `folder`; return (study, name of a version -> content of its program).

        `only` are the names of the versions to extract; all if it is empty. A file that the package lists without its
        content is looked up by its relative path in each of the folders `data`, and used only if its hash is the same.
        """
        folder.mkdir(parents=True, exist_ok=True)
        versions: list[StudyVersion] = []
        programs: dict[str, bytes] = {}
        found_files: dict[tuple[str, str], Path | None] = {}
        selected = [v for v in self.manifest.versions if not only or v.name in only]
        for packed in selected:
            source = self.content(packed.source)
            programs[packed.name] = source
            files = {
                name: FileRef(
                    ref.sha256, ref.size, self._file_for(name, ref, folder, data, found_files)
                )
                for name, ref in packed.files.items()
            }
            cells = program_cells(source, packed.program)
            measured = packed.cells if len(packed.cells) == len(cells) else ()
            if measured and all(m.code == c.code for m, c in zip(measured, cells, strict=True)):
                cells = tuple(
                    replace(
                        cell,
                        seconds=None if m.seconds is None else _bounded(m.seconds, MOST_SECONDS),
                        size=None if m.size is None else max(1, int(_bounded(m.size, MOST_SIZE))),
                        reads=m.reads,
                        outputs=cell.outputs if packed.notebook else m.outputs,
                    )
                    for cell, m in zip(cells, measured, strict=True)
                )
            if packed.outputs:
                cells = self._with_outputs(cells, packed.outputs)
            versions.append(
                StudyVersion(
                    packed.name,
                    packed.program,
                    cells,
                    packed.notebook,
                    packed.cwd,
                    packed.argv,
                    {
                        name: value
                        for name, value in packed.environment.items()
                        if not name.startswith(MACHINE_VARIABLES)
                    },
                    files,
                    None if packed.inputs is None else frozenset(packed.inputs),
                    packed.printed,
                    packed.run,
                )
            )
        study = Study(tuple(versions))
        return (study.select_versions(only) if only else study), programs

    def _with_outputs(self, cells: tuple[StudyCell, ...], digest: str) -> tuple[StudyCell, ...]:
        """Return `cells` with the outputs of the author's run, which the package stores with the sha256 `digest`."""
        data = self.content(digest)
        try:
            outputs = msgspec.json.decode(data, type=list[tuple[dict[str, Any], ...] | None])
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise _refusal(self.file, f"content {digest[:12]} holds no outputs ({exc})") from exc
        if len(outputs) != len(cells):
            raise _refusal(self.file, f"it has outputs of {len(outputs)} cells, not {len(cells)}")
        return tuple(
            replace(cell, outputs=cell_outputs)
            for cell, cell_outputs in zip(cells, outputs, strict=True)
        )

    def _file_for(
        self,
        name: str,
        ref: PackedFile,
        folder: Path,
        data: Sequence[Path],
        found_files: dict[tuple[str, str], Path | None],
    ) -> Path | None:
        key = (name, ref.sha256)
        if ref.embedded:
            target = folder / ref.sha256
            if not target.exists():
                self._extract_content(ref.sha256, target)
            return target
        if key not in found_files:
            places = [place / name for place in data]
            found_files[key] = next(
                (p for p in places if p.is_file() and digest_of(p) == ref.sha256), None
            )
        return found_files[key]

    def _extract_content(self, digest: str, target: Path) -> None:
        hashed = hashlib.sha256()
        part = target.with_suffix(".part")
        with part.open("xb") as stream:
            for chunk in self._chunks(self._entries[f"objects/{digest}"]):
                hashed.update(chunk)
                stream.write(chunk)
        if hashed.hexdigest() != digest:
            part.unlink()
            raise _refusal(self.file, f"content {digest[:12]} was changed", slug="package-damaged")
        part.rename(target)


def _bounded(value: float, largest: float) -> float:
    """Return `value`, limited to the range 0 to `largest`: the planner cannot work with absurd costs."""
    return min(max(0.0, value), largest)


def _directory_size(file: Path) -> int:
    """Return the size in bytes that the end record of a ZIP file states for the table of contents; 0 if unreadable.

    Python reads the whole table into memory, some hundred bytes per entry, before the entries can be counted.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - (1 << 16) - 22))
            tail = stream.read()
            end_record = tail.rfind(b"PK\5\6")
            if end_record < 0 or len(tail) < end_record + 22:
                return 0
            directory_bytes = int.from_bytes(tail[end_record + 12 : end_record + 16], "little")
            locator = tail[end_record - 20 : end_record] if end_record >= 20 else b""
            if directory_bytes == 0xFFFFFFFF and locator.startswith(b"PK\6\7"):
                stream.seek(min(size, int.from_bytes(locator[8:16], "little")))
                directory_bytes = int.from_bytes(stream.read(56)[40:48], "little")
            return directory_bytes
    except OSError:
        return 0


class _Format(msgspec.Struct):
    format: int


def is_package(file: Path) -> bool:
    """Return True if the name of `file` has the suffix of a study package (`.rvz`)."""
    return file.suffix == ".rvz"


def open_package(file: Path, *, most_bytes: int = MOST_BYTES) -> PackageReader:
    """Open the study package `file`; raise if it does not exist, is damaged or is unsafe."""
    if not file.is_file():
        raise UsageError(f"There is no package {file}.", slug="no-file")
    return PackageReader(file, most_bytes=most_bytes)


def _refusal(file: Path, why: str, *, slug: str = "") -> StoreError:
    return StoreError(
        f"{file.name} was refused: {why}. Nothing of it was run. Ask its author for a new one.",
        slug=slug or "package-refused",
    )
