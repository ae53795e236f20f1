"""The tables of the page's index of runs: their columns, and a cache of the tables on disk.

The cache has one Parquet file per table, and one file with the facts of all runs and the signatures of their files
when these were read. A damaged or incomplete cache is ignored, because the index can be made again from the store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rearview.model import Run
from rearview.store.create_files import make_folder, publish
from rearview.store.tables.convert_to_parquet import Summary
from rearview.store.tables.duckdb_connection import Duck, files, quoted

RUNS = {
    "run": "VARCHAR",
    "name": "VARCHAR",
    "status": "VARCHAR",
    "started": "DOUBLE",
    "ended": "DOUBLE",
    "seconds": "DOUBLE",
    "script": "VARCHAR",
    "command": "VARCHAR",
    "version": "VARCHAR",
    "host": "VARCHAR",
    "exit_code": "BIGINT",
    "parent": "VARCHAR",
    "tags": "VARCHAR[]",
    "note": "VARCHAR",
    "replays": "BIGINT",
}
"""Columns of the table `page.runs`: facts of runs that the page can show, filter and sort by."""
INDEXED_RUNS = {"id": "INTEGER", **RUNS, "words": "VARCHAR"}
"""Columns of `page.runs` in the index: `RUNS`, the number `id` of each run, and its texts in lower case, for search."""
ARGUMENTS = {"id": "INTEGER", "name": "VARCHAR", "number": "DOUBLE", "text": "VARCHAR"}
"""Columns of the table `page.given`: one row per run and argument."""
SUMMARIES = {
    "id": "INTEGER",
    "name": "VARCHAR",
    "path": "VARCHAR",
    "n": "BIGINT",
    "last": "DOUBLE",
    "low": "DOUBLE",
    "high": "DOUBLE",
    "mean": "DOUBLE",
    "kind": "VARCHAR",
    "text": "VARCHAR",
    "unproved": "BOOLEAN",
    "asked": "BOOLEAN",
}
"""Columns of the table `page.summaries`: one row per run and logged name, with a summary of its values."""
COLUMNS = {
    table: ", ".join(columns)
    for table, columns in (("runs", INDEXED_RUNS), ("given", ARGUMENTS), ("summaries", SUMMARIES))
}
Signature = tuple[int, ...]
"""Modification times of a run's folder and of its `events.jsonl` and `replays.jsonl`; a difference means a change.

While the run is live, a number for each record file follows, made of its modification time and size.
"""
FORMAT = 3
"""Number of the cache's format; a cache of another format is made again."""
TABLES = {"runs": "started, run", "given": "name, id", "summaries": "name, id"}
"""Table in the cache -> order of its rows; by name if queries look for one name at a time."""

Summaries = dict[str, tuple[int, int, Summary]]
"""Name of a sealed record file -> its size, modification time and summary."""


class CachedRun(msgspec.Struct, array_like=True):
    """One run in the cache. `run` and `summaries` stay encoded until a page shows the run, because few are shown."""

    id: int
    signature: tuple[int, ...]
    run: msgspec.Raw
    summaries: msgspec.Raw


class _Index(msgspec.Struct):
    format: int
    folder: str
    """Name of the folder with the tables that were written together with `runs`."""
    runs: dict[str, CachedRun]


@dataclass(frozen=True, slots=True)
class IndexCache:
    """The cache of the index in `folder`; several processes may read and write the cache at the same time."""

    folder: Path

    @property
    def _index(self) -> Path:
        return self.folder / "index.msgpack"

    def save(self, duck: Duck, columns: Mapping[str, str], runs: dict[str, CachedRun]) -> None:
        """Write the tables, and then the file with `runs`, which names their folder.

        Do nothing if the store is not writable. `columns` has the columns of each table as SQL.
        """
        with contextlib.suppress(OSError):
            make_folder(self.folder)
            tables = self.folder / f"tables-{os.getpid()}-{os.urandom(4).hex()}"
            make_folder(tables)
            for table, order in TABLES.items():
                duck.execute(
                    f"COPY (SELECT {columns[table]} FROM page.{table} ORDER BY {order}) TO "
                    f"{quoted(tables / f'{table}.parquet')} (FORMAT parquet, COMPRESSION zstd)"
                )
            data = msgspec.msgpack.encode(_Index(FORMAT, tables.name, runs))
            publish(self._index, data, durable=False)
            for old_file in self.folder.iterdir():
                if old_file not in {tables, self._index}:
                    shutil.rmtree(old_file, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        old_file.unlink(missing_ok=True)

    def load(self, duck: Duck, columns: Mapping[str, str]) -> dict[str, CachedRun]:
        """Fill the tables `page.…` from the cache and return its runs by id, or {} if there is no intact cache."""
        try:
            index = msgspec.msgpack.decode(self._index.read_bytes(), type=_Index)
            if index.format != FORMAT:
                return {}
            for table in TABLES:
                file = self.folder / Path(index.folder).name / f"{table}.parquet"
                duck.execute(
                    f"INSERT INTO page.{table} BY NAME SELECT {columns[table]} FROM "
                    f"read_parquet({files([file])})"
                )
        except Exception:  # the cache is missing or damaged: the index is made again
            for table in TABLES:
                duck.execute(f"DELETE FROM page.{table}")
            return {}
        return index.runs


@dataclass(slots=True)
class Entry:
    """The facts and summaries of one run, and the signature of the run's files when they were read."""

    id: int
    signature: Signature
    stored_run: Run | msgspec.Raw
    summaries: Summaries | msgspec.Raw = field(default_factory=dict)
    revision: int = 0
    """Number of the refresh that last read this run."""
    live: bool = False
    """Whether the run is running, or a process (such as a replay) still writes to one of its record files."""

    @property
    def run(self) -> Run:
        """The run, with only those facts that screens with many runs need; decoded on first use."""
        if isinstance(self.stored_run, msgspec.Raw):
            self.stored_run = msgspec.msgpack.decode(self.stored_run, type=Run)
        return self.stored_run

    def sealed(self) -> Summaries:
        """Return the summaries of the run's sealed record files; decoded on first use."""
        if isinstance(self.summaries, msgspec.Raw):
            self.summaries = msgspec.msgpack.decode(self.summaries, type=Summaries)
        return self.summaries

    def encoded(self) -> CachedRun:
        """Return this entry in the encoded form that the cache stores."""
        raw = [
            part if isinstance(part, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(part))
            for part in (self.stored_run, self.summaries)
        ]
        return CachedRun(self.id, self.signature, *raw)
