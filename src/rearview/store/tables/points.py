"""Long runs, pivoted once: one Parquet file per depth, so that a table is a scan and no grouping.

A cache: made from the sealed records when a run is first asked about, removable at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from rearview.model.checksum import add_check, is_intact
from rearview.store.private import make_folder
from rearview.store.project import Project, publish
from rearview.store.runs import Replay
from rearview.store.tables.duck import Duck, files, quoted
from rearview.store.tables.kinds import unify
from rearview.store.tables.parts import Part
from rearview.store.tables.pivot import PLAIN, WINNERS, depth, wide

FORMAT = 2
"""From 2 on, rows stand in the order of logging, and the index and the files carry checksums."""
ENOUGH = 5_000
"""Records from which on a run is worth pivoting once."""


class Depth(msgspec.Struct, frozen=True):
    """The points of one run at one depth."""

    path: str
    file: str
    kinds: dict[str, str]
    """Kind of the column by name."""
    origins: list[str]
    """Names that have a column of origins: there, a null was logged or a value replayed."""
    check: str = ""
    """Hash of the file."""


class Points(msgspec.Struct, frozen=True):
    """A pivoted run."""

    format: int
    depths: list[Depth]


def points(
    project: Project, con: Duck, run: str, parts: Sequence[Part], replays: Sequence[Replay]
) -> dict[str, tuple[Path, Depth]] | None:
    """Return what there is by path, made now if need be; None where that is not worth it.

    A run that is still written to, or of which a replay is, is not pivoted.
    """
    if sum(part.summary.rows for part in parts) < ENOUGH or any(p.file is None for p in parts):
        return None
    if any(replay.ended is None for replay in replays):
        return None
    folder = project.cache / "points" / run / _fingerprint(parts, replays)
    try:
        found = _opened(folder)
        if found is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged: it is made again
            _make(folder, con, parts)
            found = _opened(folder)
    except OSError:  # a read-only or full store: group as we go
        return None
    if found is None:
        return None
    return {one.path: (folder / Path(one.file).name, one) for one in found.depths}


def _opened(folder: Path) -> Points | None:
    """Return what stands in a folder; None if it is not there or not as it was written."""
    try:
        text = (folder / "points.json").read_bytes()
        found = msgspec.json.decode(text, type=Points) if is_intact(text) else None
        if found is None or found.format != FORMAT:
            return None
        same = all(_hash(folder / Path(one.file).name) == one.check for one in found.depths)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if same else None


def _hash(file: Path) -> str:
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def long(parts: Sequence[Part]) -> str:
    """Return the SQL of the records of these parts."""
    sealed = [part.file for part in parts if part.file is not None and not part.hidden]
    texts = [f"SELECT * FROM read_parquet({files(sealed)})"] if sealed else []
    texts += [
        f"SELECT * FROM read_parquet({files([part.file])}) WHERE NOT ({_hidden(part)})"
        for part in parts
        if part.file is not None and part.hidden
    ]
    runs = sorted({part.summary.run for part in parts if part.file is None})
    if runs or not texts:
        left_out = "".join(
            f" AND NOT (run = {quoted(part.summary.run)} AND replay IS NOT DISTINCT FROM "
            f"{quoted(part.summary.replay or '')} AND ({_hidden(part)}))"
            for part in parts
            if part.file is None and part.hidden
        )
        texts.append(
            f"SELECT * FROM own.live WHERE run IN ({', '.join(map(quoted, runs)) or 'NULL'})"
            f"{left_out}"
        )
    return " UNION ALL ".join(texts)


def _hidden(part: Part) -> str:
    """Return the condition that holds for the records of a part that tables leave out."""
    by_path: dict[str, list[str]] = {}
    for path, name in sorted(part.hidden):
        by_path.setdefault(path, []).append(name)
    return " OR ".join(
        f"(path = {quoted(path)} AND name IN ({', '.join(map(quoted, names))}))"
        for path, names in by_path.items()
    )


def plain(parts: Sequence[Part]) -> bool:
    """Say whether nothing competes in a run: one file, of the run itself, each name once a point."""
    return len(parts) == 1 and parts[0].summary.unique and parts[0].summary.replay is None


def _make(folder: Path, con: Duck, parts: Sequence[Part]) -> None:
    import duckdb

    source = (PLAIN if plain(parts) else WINNERS).format(source=long(parts))
    if not plain(parts) and all(part.summary.replay is None for part in parts):
        distinct = (
            f"SELECT count(*) = count(DISTINCT hash(path, indices, name)) FROM ({long(parts)})"
        )
        if con.execute(distinct).fetchone()[0]:  # several files, yet nothing twice: no need to rank
            source = PLAIN.format(source=long(parts))
    names: dict[str, dict[str, set[str]]] = {}
    for part in parts:
        for found in part.shown():
            if not found.name.startswith("$"):
                kinds = names.setdefault(found.path, {}).setdefault(found.name, set())
                kinds.update(found.kinds)
    replayed = any(part.summary.replay is not None for part in parts)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    make_folder(aside)
    try:
        depths = []
        for k, (path, columns) in enumerate(names.items()):
            kinds_of = {name: unify(kinds) for name, kinds in columns.items()}
            origins = [name for name in columns if replayed or "null" in columns[name]]
            sql = wide(source, path, kinds_of, origins, numbered=True)
            keys = ", ".join([*(f"i{n}" for n in range(1, depth(path) + 1)), "occ"])
            con.execute(
                f"COPY ({sql} ORDER BY {keys}) TO {quoted(aside / f'{k}.parquet')} (FORMAT parquet, "
                "COMPRESSION zstd, PARQUET_VERSION v2)"
            )
            check = _hash(aside / f"{k}.parquet")
            depths.append(Depth(path, f"{k}.parquet", kinds_of, origins, check))
        index = add_check(msgspec.json.encode(Points(FORMAT, depths)))
        publish(aside / "points.json", index, durable=False)
        for old in folder.parent.iterdir():
            # another reader may still be asking what it found a while ago
            if old not in (aside, folder) and time.time() - old.stat().st_mtime > 600:
                shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):  # another reader was first
            aside.rename(folder)
    except duckdb.Error as exc:
        raise OSError(str(exc)) from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fingerprint(parts: Sequence[Part], replays: Sequence[Replay]) -> str:
    facts = [
        FORMAT,
        sorted(
            (part.file.name, part.size, part.summary.check)
            for part in parts
            if part.file is not None
        ),
        [(replay.id, replay.proof.verdict) for replay in replays],
    ]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
