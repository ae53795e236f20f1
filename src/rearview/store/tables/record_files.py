"""Files of records, sealed in Parquet or still JSON lines: for DuckDB, with the pivot cache, and for a replay.

`gather` finds the records of all runs, seals files that are complete and loads the others into memory.
`points` pivots a long run once, into one Parquet file per depth, so that a table of it is a scan without
grouping. That is a cache: it is created when a run is first queried, and may be removed at any time.
`recorded` reads all values that one run logged itself, for a replay to compare with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rearview.config import Settings
from rearview.durable_files import add_check, is_intact
from rearview.errors import DamagedError, RearviewError
from rearview.model import Origin, Run
from rearview.model.wording import plural
from rearview.store.create_files import make_folder, publish
from rearview.store.json_files import check_format
from rearview.store.machine import is_certainly_dead
from rearview.store.printed_lines import printed_records
from rearview.store.project import Project
from rearview.store.records import has_end, line_of, scan
from rearview.store.runs import Replay, Runs
from rearview.store.tables.connection import Duck, files, quoted
from rearview.store.tables.convert_to_parquet import (
    FORMAT,
    PLACED,
    LoadedRecords,
    NameSummary,
    Summary,
    checked_summary,
    load,
    read_summary,
    seal,
)
from rearview.store.tables.pivot import RANKED, UNRANKED, cell, common_kind, depth, wide

_TAIL = 256
"""Bytes at the end of a file that hold its last line, if that is the end line."""
_COLUMNS = {
    "run": "VARCHAR", "process": "VARCHAR", "attempt": "INTEGER", "replay": "VARCHAR",
    "seq": "BIGINT", "time": "DOUBLE", "path": "VARCHAR", "indices": "BIGINT[]",
    "labels": "VARCHAR", "name": "VARCHAR", "kind": "VARCHAR", "number": "DOUBLE",
    "whole": "BIGINT", "text": "VARCHAR",
}  # fmt: skip
_PLACE = {"source": "VARCHAR", "line": "INTEGER"}
"""Columns that sealed files of older formats lack."""
LONG = ", ".join(f"{name} {kind}" for name, kind in {**_COLUMNS, **_PLACE}.items())


@dataclass(frozen=True, slots=True)
class RecordPart:
    """One file of records and its summary; `file` is None for the live table."""

    file: Path | None
    summary: Summary
    size: int = 0
    hidden: frozenset[tuple[str, str]] = frozenset()
    """(path, name) of captured records that tables leave out, because the run has better ones."""

    def shown(self) -> Iterator[NameSummary]:
        """Yield the summaries of the names that tables show."""
        for logged in self.summary.names:
            if (logged.path, logged.name) not in self.hidden:
                yield logged


@dataclass(slots=True)
class RunRecords:
    """All runs with their replays and record files. The table `own.live` holds files still written to."""

    runs: list[Run] = field(default_factory=list)
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    parts: dict[str, list[RecordPart]] = field(default_factory=dict)
    pivoted: dict[tuple[str, bool], Any] = field(default_factory=dict)
    """Pivot cache of each run that was queried."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, one sentence each."""


def gather(project: Project, con: Duck) -> RunRecords:
    """Find all records; seal complete files, load the others into the table `own.live`."""
    run_records = RunRecords(Runs(project).all())
    run_records.problems += [run.damaged for run in run_records.runs if run.damaged]
    con.execute(f"CREATE OR REPLACE TABLE own.live ({LONG})")
    gather_records(project, con, run_records, [run.id for run in run_records.runs])
    return run_records


def gather_records(
    project: Project,
    con: Duck,
    run_records: RunRecords,
    chosen: Sequence[str],
    known: Callable[[Path], Summary | None] | None = None,
) -> None:
    """Find the records of the chosen runs again, and add them to `run_records`.

    `known` may return the summary of a sealed file that was checked before, which is not read then.
    """
    runs = Runs(project)
    by_id = {run.id: run for run in run_records.runs}
    reads_lines = Settings.read(project.store).captures("printed")
    sealed: list[Path] = []
    complete: list[Path] = []
    growing: list[Path] = []
    for run in chosen:
        folder = runs.folder(run)
        run_records.replays[run] = runs.replays(run) if (folder / "replays.jsonl").exists() else []
        run_records.parts[run] = []
        files_by_name = {file.name: file for file in folder.glob("records-*")}
        for file in files_by_name.values():
            if file.suffix == ".parquet":
                sealed.append(file)
            elif file.suffix == ".jsonl" and f"{file.stem}.parquet" in files_by_name:
                # a reader died between sealing and removing the lines
                _remove_sealed(file, complete)
            elif file.suffix == ".jsonl":
                try:
                    (complete if _complete(file) else growing).append(file)
                except FileNotFoundError:  # another reader has just sealed it
                    sealed.append(file.with_suffix(".parquet"))
        record = by_id.get(run) if reads_lines else None
        numbers = printed_records(project, record, folder) if record is not None else None
        if numbers is not None:
            (sealed if numbers.suffix == ".parquet" else complete).append(numbers)
    for batch in _batches(complete):
        sealed += _load_batch(con, run_records, batch, growing=False)
    for batch in _batches(growing):
        sealed += _load_batch(con, run_records, batch, growing=True)
    unknown: list[Path] = []
    for file in dict.fromkeys(sealed):
        summary = known(file) if known is not None else None
        if summary is None:
            unknown.append(file)
        else:
            run_records.parts[file.parent.name].append(
                RecordPart(file, summary, file.stat().st_size)
            )
    for file, summary in _summaries(con, run_records, unknown):
        run_records.parts[file.parent.name].append(RecordPart(file, summary, file.stat().st_size))
    for run in chosen:
        run_records.parts[run].sort(key=lambda part: (part.summary.process, str(part.file)))


def _batches(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files in groups that fit into memory together."""
    batch: list[Path] = []
    size = 0
    for file in sorted(files):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
        batch.append(file)
        if size > 32 << 20 or len(batch) == 200:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load_batch(
    con: Duck, run_records: RunRecords, batch: list[Path], *, growing: bool
) -> list[Path]:
    """Seal a batch of files, or load files that cannot be sealed into memory; return the sealed files."""
    try:
        return _seal_or_keep(con, run_records, load(con, batch, growing=growing), growing=growing)
    except (RearviewError, OSError):
        pass  # one is damaged, or another reader has just sealed it: load them one by one
    out: list[Path] = []
    for file in batch:
        try:
            out += _seal_or_keep(
                con, run_records, load(con, [file], growing=growing, clean=True), growing=growing
            )
        except FileNotFoundError:
            out += [target] if (target := file.with_suffix(".parquet")).exists() else []
        except RearviewError as exc:
            if exc.slug == "store-newer":
                raise  # a partial table would mislead: fail instead
            run_records.problems.append(str(exc))
    return out


def _seal_or_keep(
    con: Duck, run_records: RunRecords, loaded: list[LoadedRecords], *, growing: bool
) -> list[Path]:
    # damaged files are not sealed, so that they can be repaired
    whole = [records for records in loaded if not growing and not records.lost]
    run_records.problems += [
        f"{records.file} has lost at least {records.lost} of its records: they are damaged. The others are "
        "shown; `rearview verify` lists all damage."
        for records in loaded
        if records.lost
    ]
    sealed: list[Path] = []
    try:
        sealed = seal(con, whole) if whole else []
    except Exception as exc:  # a store that cannot be written to can still be read
        run_records.problems.append(f"Records could not be sealed: {exc}")
        whole = []
    for records in loaded:
        if records not in whole:
            live = f"SELECT * EXCLUDE (file) FROM own.loaded WHERE file = {records.number}"
            con.execute(f"INSERT INTO own.live {live}")
            run_records.parts[records.file.parent.name].append(RecordPart(None, records.summary))
    return sealed


def _remove_sealed(file: Path, complete: list[Path]) -> None:
    """Remove lines that are sealed already; if the sealed file is damaged, seal them again."""
    try:
        checked_summary(file.with_suffix(".parquet"))
        file.unlink()
    except DamagedError:
        complete.append(file)
    except OSError:
        pass  # a store that cannot be written to


def _complete(file: Path) -> bool:
    """Return True if no process writes to a file any more: it was finished, or its writer is dead."""
    with file.open("rb") as lines:
        first = lines.readline()
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - _TAIL))
        if has_end(lines.read()):
            return True
    try:
        writer = msgspec.json.decode(first).get("writer") or {}
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return False
    return is_certainly_dead(writer, file.with_name("heartbeat"))


def _summaries(
    con: Duck, run_records: RunRecords, sealed: Iterable[Path]
) -> list[tuple[Path, Summary]]:
    """Return the intact sealed files; note a problem for each of the others."""
    out = []
    for file in sealed:
        try:
            out.append((file, summary_of(con, file)))
        except FileNotFoundError:
            continue  # a repair has just moved it aside
        except DamagedError as exc:
            run_records.problems.append(str(exc))
    return out


def summary_of(con: Duck, file: Path) -> Summary:
    """Return the summary of a sealed file; raise if any byte of the file is damaged."""
    import duckdb

    facts = checked_summary(file)
    check_format(facts, FORMAT, file)
    try:
        summary = msgspec.convert({"check": "", **facts}, Summary)
        if not summary.check:  # without a checksum, only reading it shows damage
            whole = f"SELECT count(*), bit_xor(hash(COLUMNS(*))) FROM read_parquet({quoted(file)})"
            rows = con.execute(whole).fetchone()[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, duckdb.Error) as exc:
        raise _unreadable(file, str(exc).splitlines()[0]) from exc
    if not summary.check and rows != summary.rows:
        raise _unreadable(file, f"it has {plural(rows, 'record')}, not {summary.rows}")
    return summary


def _unreadable(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{file} cannot be read: {why}. `rearview verify --repair` moves it away and lists what is "
        "lost.",
        slug="records-damaged",
    )


POINTS_FORMAT = 2
"""From 2 on, rows are in the order of logging, and the index and the files have checksums."""
ENOUGH = 5_000
"""Runs with at least this many records are pivoted once."""


class Depth(msgspec.Struct, frozen=True):
    """The points of one run at one depth."""

    path: str
    file: str
    kinds: dict[str, str]
    """Kind of the column by name."""
    origins: list[str]
    """Names with a column of origins: a null was logged, or a value replayed."""
    check: str = ""
    """Hash of the file."""


class PivotCacheIndex(msgspec.Struct, frozen=True):
    """The JSON file `points.json` of a pivot cache: one entry per depth of the loops."""

    format: int
    depths: list[Depth]


def pivot_cache(
    project: Project, con: Duck, run: str, parts: Sequence[RecordPart], replays: Sequence[Replay]
) -> dict[str, tuple[Path, Depth]] | None:
    """Return the pivot cache of a run, created if needed; None if the run is too short.

    A run that is still recording or being replayed is not pivoted.
    """
    if sum(part.summary.rows for part in parts) < ENOUGH or any(p.file is None for p in parts):
        return None
    if any(replay.ended is None for replay in replays):
        return None
    folder = project.cache / "points" / run / _fingerprint(parts, replays)
    try:
        index = _opened(folder)
        if index is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged: it is made again
            _make(folder, con, parts)
            index = _opened(folder)
    except OSError:  # a read-only or full store: pivot in the query
        return None
    if index is None:
        return None
    return {depth.path: (folder / Path(depth.file).name, depth) for depth in index.depths}


def _opened(folder: Path) -> PivotCacheIndex | None:
    """Return the pivot cache in a folder; None if there is none or it is damaged."""
    try:
        text = (folder / "points.json").read_bytes()
        index = msgspec.json.decode(text, type=PivotCacheIndex) if is_intact(text) else None
        if index is None or index.format != POINTS_FORMAT:
            return None
        same = all(_hash(folder / Path(depth.file).name) == depth.check for depth in index.depths)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return index if same else None


def _hash(file: Path) -> str:
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def long_sql(parts: Sequence[RecordPart], *, places: bool = False) -> str:
    """Return the SQL of the records of these parts; with `places`, also of their source and line."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for part in parts:
        if part.file is not None:
            where = f" WHERE NOT ({_hidden(part)})" if part.hidden else ""
            placed = places and part.summary.format >= PLACED
            shown = _shown(placed=placed, places=places)
            groups.setdefault((shown, where), []).append(part.file)
    texts = [
        f"SELECT {shown} FROM read_parquet({files(paths)}){where}"
        for (shown, where), paths in groups.items()
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
            f"SELECT {_shown(placed=places, places=places)} FROM own.live "
            f"WHERE run IN ({', '.join(map(quoted, runs)) or 'NULL'}){left_out}"
        )
    return " UNION ALL ".join(texts)


def _shown(*, placed: bool, places: bool) -> str:
    """Return the columns of a scan of records; nulls for a place that the file does not have."""
    columns = list(_COLUMNS)
    if places:
        columns += [n if placed else f"NULL::{kind} AS {n}" for n, kind in _PLACE.items()]
    return ", ".join(columns)


def _hidden(part: RecordPart) -> str:
    """Return the condition that holds for the records of a part that tables leave out."""
    by_path: dict[str, list[str]] = {}
    for path, name in sorted(part.hidden):
        by_path.setdefault(path, []).append(name)
    return " OR ".join(
        f"(path = {quoted(path)} AND name IN ({', '.join(map(quoted, names))}))"
        for path, names in by_path.items()
    )


def needs_no_ranking(parts: Sequence[RecordPart]) -> bool:
    """Return True if a run has one file, of the run itself, with each name once per point."""
    return len(parts) == 1 and parts[0].summary.unique and parts[0].summary.replay is None


def _make(folder: Path, con: Duck, parts: Sequence[RecordPart]) -> None:
    import duckdb

    source = (UNRANKED if needs_no_ranking(parts) else RANKED).format(source=long_sql(parts))
    if not needs_no_ranking(parts) and all(part.summary.replay is None for part in parts):
        distinct = (
            f"SELECT count(*) = count(DISTINCT hash(path, indices, name)) FROM ({long_sql(parts)})"
        )
        (is_distinct,) = con.execute(distinct).fetchone()
        if is_distinct:  # several files, but no name twice at a point: no ranking
            source = UNRANKED.format(source=long_sql(parts))
    names: dict[str, dict[str, set[str]]] = {}
    for part in parts:
        for logged in part.shown():
            if not logged.name.startswith("$"):
                kinds = names.setdefault(logged.path, {}).setdefault(logged.name, set())
                kinds.update(logged.kinds)
    replayed = any(part.summary.replay is not None for part in parts)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    make_folder(aside)
    try:
        depths = []
        for k, (path, columns) in enumerate(names.items()):
            kinds_of = {name: common_kind(kinds) for name, kinds in columns.items()}
            origins = [name for name in columns if replayed or "null" in columns[name]]
            sql = wide(source, path, kinds_of, origins, numbered=True)
            keys = ", ".join([*(f"i{n}" for n in range(1, depth(path) + 1)), "occ"])
            con.execute(
                f"COPY ({sql} ORDER BY {keys}) TO {quoted(aside / f'{k}.parquet')} (FORMAT parquet, "
                "COMPRESSION zstd, PARQUET_VERSION v2)"
            )
            check = _hash(aside / f"{k}.parquet")
            depths.append(Depth(path, f"{k}.parquet", kinds_of, origins, check))
        index = add_check(msgspec.json.encode(PivotCacheIndex(POINTS_FORMAT, depths)))
        publish(aside / "points.json", index, durable=False)
        for old in folder.parent.iterdir():
            # another reader may still use an older cache
            if old not in (aside, folder) and time.time() - old.stat().st_mtime > 600:
                shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):  # another reader was first
            aside.rename(folder)
    except duckdb.Error as exc:
        raise OSError(str(exc)) from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fingerprint(parts: Sequence[RecordPart], replays: Sequence[Replay]) -> str:
    facts = [
        POINTS_FORMAT,
        sorted(
            (part.file.name, part.size, part.summary.check)
            for part in parts
            if part.file is not None
        ),
        [(replay.id, replay.proof.verdict) for replay in replays],
    ]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


_MANY_BYTES = 4 << 20
"""Bytes of unsealed lines above which they are sealed before their names are read."""
LoggedValue = tuple[tuple[str, ...], tuple[int, ...], str, Any]
"""Loops, iterations, name, and the value as `store.values_as_json` converts it."""


@dataclass(frozen=True, slots=True)
class _Part:
    attempt: int
    process: str
    since: int
    rows: Iterable[tuple[int, LoggedValue]]
    """Each with the number of the record within its process."""


def own_values(folder: Path) -> Iterator[LoggedValue]:
    """Yield all values that the run in `folder` logged itself, in order.

    Values that an attempt logged after the checkpoint from which the next attempt resumed are left out:
    the next attempt logged them again.
    """
    parts = sorted(
        (*_open(folder), *_sealed(folder)), key=lambda part: (part.attempt, part.process)
    )
    for part in parts:
        end = min((p.since for p in parts if p.attempt > part.attempt), default=None)
        for number, row in part.rows:
            if end is None or number < end:
                yield row


def recorded_names(folder: Path) -> set[str]:
    """Return the names that the run in `folder` logged itself; damaged files are left out.

    It is read from the summaries of sealed files and from lines: a question about a small project is
    answered sooner than DuckDB is loaded.
    """
    names: set[str] = set()
    for file in folder.glob("records-*"):
        try:
            names |= _names_in(file)
        except FileNotFoundError:  # another reader has just sealed it
            sealed = file.with_suffix(".parquet")
            names |= _names_in(sealed) if sealed.exists() else set()
        except DamagedError:
            continue
    return names


def has_long_lines(folder: Path) -> bool:
    """Return True if sealing a run's records first is faster, because it has many unsealed ones."""
    sizes = (file.stat().st_size for file in folder.glob("records-*.jsonl"))
    return sum(sizes) > _MANY_BYTES


def _names_in(file: Path) -> set[str]:
    """Return the names in one file of records; none if they are those of a replay, or captured."""
    if file.suffix == ".parquet":
        summary = checked_summary(file)
        own = summary.get("replay") is None
        return {each["name"] for each in summary["names"]} if own else set()
    header, data, *_ = scan(file)
    if header.origin != Origin.RECORDED:
        return set()
    return {name for _, (_, _, name, _) in _lines(data)}


def _open(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.jsonl")):
        header, data, *_ = scan(file)
        if header.origin == Origin.RECORDED:
            yield _Part(header.attempt, header.process, header.since, _lines(data))


def _lines(data: bytes) -> Iterator[tuple[int, LoggedValue]]:
    for raw in data.splitlines():
        try:
            line = line_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # torn by a kill or a full disk
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield line.s + k, (tuple(line.l), tuple(line.i), name, value)


def _sealed(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.parquet")):
        summary = read_summary(file)
        if summary.get("replay") is None:
            checked_summary(file)  # a damaged value would look like a difference
            since = int(summary.get("since", 0))
            yield _Part(int(summary["attempt"]), str(summary["process"]), since, _rows(file))


def _rows(file: Path) -> Iterator[tuple[int, LoggedValue]]:
    import duckdb

    with duckdb.connect() as connection:
        cursor = connection.execute(
            f"SELECT seq, path, indices, name, {cell('mixed')} FROM read_parquet({quoted(file)}) "
            "WHERE kind != 'repr' ORDER BY seq"
        )
        while batch := cursor.fetchmany(10_000):
            for seq, path, indices, name, text in batch:
                value = msgspec.json.decode(text) if text is not None else None
                yield seq, (tuple(path.split("/")) if path else (), tuple(indices), name, value)
