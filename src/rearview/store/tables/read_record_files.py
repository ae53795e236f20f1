"""Find the files of records of all runs, and read them: into DuckDB, into a pivot cache, or for a replay.

`gather` finds the files, converts complete files to Parquet ("seals" them), and loads the other files into memory.
`pivot_cache` pivots a long run once, into one Parquet file per loop path, so that a table of the run can be read
without grouping. The cache is created when a run is first queried, and may be removed at any time.
`own_values` reads all values that one run logged itself, so that a replay can compare with them.
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
from rearview.store.machine_and_process import is_certainly_dead
from rearview.store.printed_lines import printed_records
from rearview.store.project import Project
from rearview.store.records import has_end, line_of, scan
from rearview.store.runs import Replay, Runs
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
from rearview.store.tables.duckdb_connection import Duck, files, quoted
from rearview.store.tables.pivot import RANKED, UNRANKED, cell_sql, common_kind, depth, wide_sql

_TAIL = 256
"""Bytes that are read at the end of a file of records; the line that ends a finished file is shorter."""
_COLUMNS = {
    "run": "VARCHAR", "process": "VARCHAR", "attempt": "INTEGER", "replay": "VARCHAR",
    "seq": "BIGINT", "time": "DOUBLE", "path": "VARCHAR", "indices": "BIGINT[]",
    "labels": "VARCHAR", "name": "VARCHAR", "kind": "VARCHAR", "number": "DOUBLE",
    "whole": "BIGINT", "text": "VARCHAR",
}  # fmt: skip
_PLACE = {"source": "VARCHAR", "line": "INTEGER"}
"""Columns with the position of the log call in the source, which sealed files of older formats do not have."""
LONG = ", ".join(f"{name} {kind}" for name, kind in {**_COLUMNS, **_PLACE}.items())
"""SQL text for the columns of a table with one row per record."""


@dataclass(frozen=True, slots=True)
class RecordPart:
    """One file of records of a run, and the summary of the file."""

    file: Path | None
    """The sealed (Parquet) file, or None if the records were loaded into the SQL table `own.live`."""
    summary: Summary
    size: int = 0
    hidden: frozenset[tuple[str, str]] = frozenset()
    """(loop path, name) of captured records that tables leave out, because the run has more reliable records."""

    def shown(self) -> Iterator[NameSummary]:
        """Yield the summary of each name and loop path in the file that tables show, as they are not `hidden`."""
        for logged in self.summary.names:
            if (logged.path, logged.name) not in self.hidden:
                yield logged


@dataclass(slots=True)
class RunRecords:
    """All runs with their replays and files of records. Records that are not in Parquet files are in `own.live`."""

    runs: list[Run] = field(default_factory=list)
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    parts: dict[str, list[RecordPart]] = field(default_factory=dict)
    pivoted: dict[tuple[str, bool], Any] = field(default_factory=dict)
    """(run id, whether values of replays that were not exact are included) -> pivot cache of the run, or None."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each file that could not be read."""


def gather(project: Project, con: Duck) -> RunRecords:
    """Return the records of all runs; complete files are converted to Parquet, others loaded into the SQL table `own.live`."""
    run_records = RunRecords(Runs(project).all())
    run_records.problems += [run.damaged for run in run_records.runs if run.damaged]
    con.execute(f"CREATE OR REPLACE TABLE own.live ({LONG})")
    gather_records(project, con, run_records, [run.id for run in run_records.runs])
    return run_records


def gather_records(
    project: Project,
    con: Duck,
    run_records: RunRecords,
    run_ids: Sequence[str],
    cached_summary: Callable[[Path], Summary | None] | None = None,
) -> None:
    """Find the files of records of the runs `run_ids` again, and put them into `run_records`.

    Complete files are converted to Parquet, and other files are loaded into the SQL table `own.live`. `cached_summary`
    may return the summary of a Parquet file that was checked before; then the file is not read.
    """
    runs = Runs(project)
    by_id = {run.id: run for run in run_records.runs}
    captures_printed = Settings.read(project.store).captures("printed")
    sealed: list[Path] = []
    complete: list[Path] = []
    growing: list[Path] = []
    for run in run_ids:
        folder = runs.folder(run)
        run_records.replays[run] = runs.replays(run) if (folder / "replays.jsonl").exists() else []
        run_records.parts[run] = []
        files_by_name = {file.name: file for file in folder.glob("records-*")}
        for file in files_by_name.values():
            if file.suffix == ".parquet":
                sealed.append(file)
            elif file.suffix == ".jsonl" and f"{file.stem}.parquet" in files_by_name:
                # a process died after it converted the lines to Parquet and before it removed them
                _remove_sealed(file, complete)
            elif file.suffix == ".jsonl":
                try:
                    (complete if _is_complete(file) else growing).append(file)
                except FileNotFoundError:  # another process has just converted the file to Parquet
                    sealed.append(file.with_suffix(".parquet"))
        record = by_id.get(run) if captures_printed else None
        printed_numbers = printed_records(project, record, folder) if record is not None else None
        if printed_numbers is not None:
            (sealed if printed_numbers.suffix == ".parquet" else complete).append(printed_numbers)
    for batch in _batches(complete):
        sealed += _load_batch(con, run_records, batch, growing=False)
    for batch in _batches(growing):
        sealed += _load_batch(con, run_records, batch, growing=True)
    unchecked: list[Path] = []
    for file in dict.fromkeys(sealed):
        summary = cached_summary(file) if cached_summary is not None else None
        if summary is None:
            unchecked.append(file)
        else:
            run_records.parts[file.parent.name].append(
                RecordPart(file, summary, file.stat().st_size)
            )
    for file, summary in _summaries(con, run_records, unchecked):
        run_records.parts[file.parent.name].append(RecordPart(file, summary, file.stat().st_size))
    for run in run_ids:
        run_records.parts[run].sort(key=lambda part: (part.summary.process, str(part.file)))


def _batches(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield `files` in groups that fit into memory together."""
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
    """Convert the files in `batch` to Parquet, or load them into the SQL table `own.live`; return the Parquet files.

    Files are loaded if they cannot be converted, or are `growing`: other processes may be appending to them.
    """
    try:
        return _seal_or_keep(con, run_records, load(con, batch, growing=growing), growing=growing)
    except (RearviewError, OSError):
        pass  # one file is damaged or was just sealed by another process: load the files one by one
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
                raise  # a table without the records of this file would mislead the user
            run_records.problems.append(str(exc))
    return out


def _seal_or_keep(
    con: Duck, run_records: RunRecords, loaded: list[LoadedRecords], *, growing: bool
) -> list[Path]:
    """Convert the `loaded` files to Parquet, or insert their records into `own.live`; return the Parquet files.

    Damaged files, `growing` files (other processes may be appending to them), and files of a store that cannot be
    written are not converted.
    """
    # damaged files are not sealed, so that they can still be repaired
    complete = [records for records in loaded if not growing and not records.lost]
    run_records.problems += [
        f"{records.file} has lost at least {records.lost} of its records: they are damaged. The others are "
        "shown; `rearview verify` lists all damage."
        for records in loaded
        if records.lost
    ]
    sealed: list[Path] = []
    try:
        sealed = seal(con, complete) if complete else []
    except Exception as exc:  # a store that cannot be written can still be read
        run_records.problems.append(f"Records could not be sealed: {exc}")
        complete = []
    for records in loaded:
        if records not in complete:
            live = f"SELECT * EXCLUDE (file) FROM own.loaded WHERE file = {records.number}"
            con.execute(f"INSERT INTO own.live {live}")
            run_records.parts[records.file.parent.name].append(RecordPart(None, records.summary))
    return sealed


def _remove_sealed(file: Path, complete: list[Path]) -> None:
    """Remove `file` (JSON lines) if the Parquet file made from it is intact.

    Otherwise keep `file` and add it to `complete`, so that it is converted again.
    """
    try:
        checked_summary(file.with_suffix(".parquet"))
        file.unlink()
    except DamagedError:
        complete.append(file)
    except OSError:
        pass  # the store cannot be written


def _is_complete(file: Path) -> bool:
    """Return True if no process will append to a file, because its writer has finished the file or is dead."""
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
    """Return (file, summary) for each intact file in `sealed`; add a problem to `run_records` for each damaged file."""
    out = []
    for file in sealed:
        try:
            out.append((file, summary_of(con, file)))
        except FileNotFoundError:
            continue  # a repair has just moved the file away
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
        if not summary.check:  # without a checksum, damage is only noticed if all records are read
            read_all = (
                f"SELECT count(*), bit_xor(hash(COLUMNS(*))) FROM read_parquet({quoted(file)})"
            )
            rows = con.execute(read_all).fetchone()[0]
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
"""Format of a pivot cache. From format 2 on, rows are in the order of logging, and all files have checksums."""
ENOUGH = 5_000
"""Fewest records of a run that gets a pivot cache."""


class PivotedPath(msgspec.Struct, frozen=True):
    """One file of a pivot cache: the points of one run at one loop path."""

    path: str
    file: str
    kinds: dict[str, str]
    """Name -> kind of the column with its values."""
    origins: list[str]
    """Names with a column of origins, which is needed if a null was logged or a value was replayed."""
    check: str = ""
    """XXH3 hash of the file's content."""


class PivotCacheIndex(msgspec.Struct, frozen=True):
    """The JSON file `points.json` of a pivot cache, which describes the file of each loop path."""

    format: int
    depths: list[PivotedPath]


def pivot_cache(
    project: Project, con: Duck, run: str, parts: Sequence[RecordPart], replays: Sequence[Replay]
) -> dict[str, tuple[Path, PivotedPath]] | None:
    """Return the pivot cache of a run as a mapping: loop path -> (file, description); create the cache if needed.

    Return None if the run has fewer than `ENOUGH` records, is still recording or being replayed, or the cache cannot
    be written.
    """
    if sum(part.summary.rows for part in parts) < ENOUGH or any(p.file is None for p in parts):
        return None
    if any(replay.ended is None for replay in replays):
        return None
    folder = project.cache / "points" / run / _fingerprint(parts, replays)
    try:
        index = _read_index(folder)
        if index is None:
            # the cache is missing, damaged or of an older format: create it
            shutil.rmtree(folder, ignore_errors=True)
            _create_pivot_cache(folder, con, parts)
            index = _read_index(folder)
    except OSError:  # the store is read-only or full: the query will pivot the records
        return None
    if index is None:
        return None
    return {depth.path: (folder / Path(depth.file).name, depth) for depth in index.depths}


def _read_index(folder: Path) -> PivotCacheIndex | None:
    """Return the index of the pivot cache in `folder`, or None if the cache is damaged, old or does not exist."""
    try:
        text = (folder / "points.json").read_bytes()
        index = msgspec.json.decode(text, type=PivotCacheIndex) if is_intact(text) else None
        if index is None or index.format != POINTS_FORMAT:
            return None
        files_intact = all(
            _hash(folder / Path(depth.file).name) == depth.check for depth in index.depths
        )
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return index if files_intact else None


def _hash(file: Path) -> str:
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def long_sql(parts: Sequence[RecordPart], *, with_source: bool = False) -> str:
    """Return SQL with one row per record in `parts`; with `with_source`, it has columns for source file and line."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for part in parts:
        if part.file is not None:
            where = f" WHERE NOT ({_hidden(part)})" if part.hidden else ""
            file_has_source = with_source and part.summary.format >= PLACED
            shown = _shown(file_has_source=file_has_source, with_source=with_source)
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
            f"SELECT {_shown(file_has_source=with_source, with_source=with_source)} FROM own.live "
            f"WHERE run IN ({', '.join(map(quoted, runs)) or 'NULL'}){left_out}"
        )
    return " UNION ALL ".join(texts)


def _shown(*, file_has_source: bool, with_source: bool) -> str:
    """Return SQL for the columns to read from a file of records.

    With `with_source`, these include the source file and line of the log call; they are null if the file does not
    have these columns (`file_has_source` is False).
    """
    columns = list(_COLUMNS)
    if with_source:
        columns += [n if file_has_source else f"NULL::{kind} AS {n}" for n, kind in _PLACE.items()]
    return ", ".join(columns)


def _hidden(part: RecordPart) -> str:
    """Return an SQL condition that is true for the records in `part.hidden`, which tables leave out."""
    by_path: dict[str, list[str]] = {}
    for path, name in sorted(part.hidden):
        by_path.setdefault(path, []).append(name)
    return " OR ".join(
        f"(path = {quoted(path)} AND name IN ({', '.join(map(quoted, names))}))"
        for path, names in by_path.items()
    )


def needs_no_ranking(parts: Sequence[RecordPart]) -> bool:
    """Return True if certainly no point has two values of one name in `parts`, so that values need not be ranked.

    That is certain if a run has only one file, which the run itself wrote, with each name at most once per point.
    """
    return len(parts) == 1 and parts[0].summary.unique and parts[0].summary.replay is None


def _create_pivot_cache(folder: Path, con: Duck, parts: Sequence[RecordPart]) -> None:
    """Create a pivot cache in `folder`: pivot the records in `parts` into one Parquet file per loop path."""
    import duckdb

    source = (UNRANKED if needs_no_ranking(parts) else RANKED).format(source=long_sql(parts))
    if not needs_no_ranking(parts) and all(part.summary.replay is None for part in parts):
        distinct = (
            f"SELECT count(*) = count(DISTINCT hash(path, indices, name)) FROM ({long_sql(parts)})"
        )
        (is_distinct,) = con.execute(distinct).fetchone()
        # there are several files, but each point has one value per name: no ranking is needed
        if is_distinct:
            source = UNRANKED.format(source=long_sql(parts))
    names: dict[str, dict[str, set[str]]] = {}
    for part in parts:
        for logged in part.shown():
            if not logged.name.startswith("$"):
                kinds = names.setdefault(logged.path, {}).setdefault(logged.name, set())
                kinds.update(logged.kinds)
    replayed = any(part.summary.replay is not None for part in parts)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    make_folder(temporary)
    try:
        depths = []
        for k, (path, columns) in enumerate(names.items()):
            kinds_of = {name: common_kind(kinds) for name, kinds in columns.items()}
            origins = [name for name in columns if replayed or "null" in columns[name]]
            sql = wide_sql(source, path, kinds_of, origins, numbered=True)
            keys = ", ".join([*(f"i{n}" for n in range(1, depth(path) + 1)), "occ"])
            con.execute(
                f"COPY ({sql} ORDER BY {keys}) TO {quoted(temporary / f'{k}.parquet')} (FORMAT parquet, "
                "COMPRESSION zstd, PARQUET_VERSION v2)"
            )
            check = _hash(temporary / f"{k}.parquet")
            depths.append(PivotedPath(path, f"{k}.parquet", kinds_of, origins, check))
        index = add_check(msgspec.json.encode(PivotCacheIndex(POINTS_FORMAT, depths)))
        publish(temporary / "points.json", index, durable=False)
        for older_cache in folder.parent.iterdir():
            # another process may still read an older cache
            if (
                older_cache not in (temporary, folder)
                and time.time() - older_cache.stat().st_mtime > 600
            ):
                shutil.rmtree(older_cache, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has created the same cache first
            temporary.rename(folder)
    except duckdb.Error as exc:
        raise OSError(str(exc)) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fingerprint(parts: Sequence[RecordPart], replays: Sequence[Replay]) -> str:
    """Return a hash of all that a pivot cache depends on: the files of records, and the verdicts of replays."""
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
"""If a run has more bytes of JSON lines, converting them to Parquet first is faster than reading all for their names."""
LoggedValue = tuple[tuple[str, ...], tuple[int, ...], str, Any]
"""One logged value: names of the loops, iterations, name, and the value as `values_as_json.convert` returns it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The records in one file, which the run itself wrote, not a replay."""

    attempt: int
    process: str
    since: int
    rows: Iterable[tuple[int, LoggedValue]]
    """Pairs (number of the record within its process, logged value)."""


def own_values(folder: Path) -> Iterator[LoggedValue]:
    """Yield all values that the run in `folder` logged itself, in order.

    If a run was resumed from a checkpoint, the values that it had logged after this checkpoint are left out, because
    they were logged again after the resume.
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

    DuckDB is not used, because loading it takes longer than reading the names of a small project.
    """
    names: set[str] = set()
    for file in folder.glob("records-*"):
        try:
            names |= _names_in(file)
        except FileNotFoundError:  # another process has just converted the file to Parquet
            sealed = file.with_suffix(".parquet")
            names |= _names_in(sealed) if sealed.exists() else set()
        except DamagedError:
            continue
    return names


def has_long_lines(folder: Path) -> bool:
    """Return True if the run in `folder` has so many JSON lines that converting them to Parquet before reading is faster."""
    sizes = (file.stat().st_size for file in folder.glob("records-*.jsonl"))
    return sum(sizes) > _MANY_BYTES


def _names_in(file: Path) -> set[str]:
    """Return the names in one file of records; an empty set if a replay wrote the file, or its values were captured."""
    if file.suffix == ".parquet":
        summary = checked_summary(file)
        of_run = summary.get("replay") is None
        return {each["name"] for each in summary["names"]} if of_run else set()
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
            continue  # a kill or a full disk cut off this line
        for k, (name, value) in enumerate(zip(line.n, line.v, strict=True)):
            yield line.s + k, (tuple(line.l), tuple(line.i), name, value)


def _sealed(folder: Path) -> Iterator[_Part]:
    for file in sorted(folder.glob("records-*.parquet")):
        summary = read_summary(file)
        if summary.get("replay") is None:
            checked_summary(
                file
            )  # check the file: a damaged value would look like a difference between run and replay
            since = int(summary.get("since", 0))
            yield _Part(int(summary["attempt"]), str(summary["process"]), since, _rows(file))


def _rows(file: Path) -> Iterator[tuple[int, LoggedValue]]:
    import duckdb

    with duckdb.connect() as connection:
        cursor = connection.execute(
            f"SELECT seq, path, indices, name, {cell_sql('mixed')} FROM read_parquet({quoted(file)}) "
            "WHERE kind != 'repr' ORDER BY seq"
        )
        while batch := cursor.fetchmany(10_000):
            for seq, path, indices, name, text in batch:
                value = msgspec.json.decode(text) if text is not None else None
                yield seq, (tuple(path.split("/")) if path else (), tuple(indices), name, value)
