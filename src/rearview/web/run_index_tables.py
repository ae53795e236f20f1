"""The tables of the page's index: their columns, and their copy on disk.

The copy is one Parquet file per table, and one file with the state of each run when it was read.

The index can be made again from the store, so a damaged or incomplete cache is ignored.
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
from rearview.store.tables.connection import Duck, files, quoted
from rearview.store.tables.convert_to_parquet import Summary

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
"""Facts of runs that the page can show, filter and sort by: columns of the table `page.runs`."""
INDEXED_RUNS = {"id": "INTEGER", **RUNS, "words": "VARCHAR"}
"""`RUNS` with the number of the run, and all of its texts in lower case, for the search."""
GIVEN = {"id": "INTEGER", "name": "VARCHAR", "number": "DOUBLE", "text": "VARCHAR"}
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
"""Columns of the table `page.summaries`: one row per run and logged name."""
COLUMNS = {
    table: ", ".join(columns)
    for table, columns in (("runs", INDEXED_RUNS), ("given", GIVEN), ("summaries", SUMMARIES))
}
Signature = tuple[int, ...]
"""Modification times and sizes that show whether the files of a run changed."""
FORMAT = 3
"""Number of the cache files; files of another number are made again."""
TABLES = {"runs": "started, run", "given": "name, id", "summaries": "name, id"}
"""Tables that the cache keeps, and the order of their rows: readers look for one name at a time."""

Summaries = dict[str, tuple[int, int, Summary]]
"""By name of a sealed file: its size, modification time and checked summary."""


class KeptRun(msgspec.Struct, array_like=True):
    """One run in the cache. Its parts stay encoded until a page shows the run: few of many are shown."""

    id: int
    signature: tuple[int, ...]
    run: msgspec.Raw
    summaries: msgspec.Raw


class _Index(msgspec.Struct):
    format: int
    folder: str
    """Name of the folder with the tables that belong to `runs`."""
    runs: dict[str, KeptRun]


@dataclass(frozen=True, slots=True)
class IndexCache:
    """The cache in one folder, for any number of readers and writers."""

    folder: Path

    @property
    def _index(self) -> Path:
        return self.folder / "index.msgpack"

    def save(self, duck: Duck, columns: Mapping[str, str], runs: dict[str, KeptRun]) -> None:
        """Write the tables, then the file that names them; do nothing if the store is not writable.

        `columns` has the columns of each table as SQL.
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
            for old in self.folder.iterdir():
                if old not in {tables, self._index}:
                    shutil.rmtree(old, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        old.unlink(missing_ok=True)

    def load(self, duck: Duck, columns: Mapping[str, str]) -> dict[str, KeptRun]:
        """Fill the tables of the index and return their runs; return none if there is no intact cache."""
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
        except Exception:  # the cache is damaged: make it again
            for table in TABLES:
                duck.execute(f"DELETE FROM page.{table}")
            return {}
        return index.runs


@dataclass(slots=True)
class Entry:
    """The facts and summaries of one run, and the state of its files when they were read."""

    id: int
    signature: Signature
    about: Run | msgspec.Raw
    summaries: Summaries | msgspec.Raw = field(default_factory=dict)
    revision: int = 0
    """Number of the refresh that last read this run."""
    live: bool = False
    """The run is running, or a process still writes to a file of its records."""

    @property
    def run(self) -> Run:
        """The facts of the run that screens of many runs need."""
        if isinstance(self.about, msgspec.Raw):
            self.about = msgspec.msgpack.decode(self.about, type=Run)
        return self.about

    def sealed(self) -> Summaries:
        """Return the summaries of its sealed record files."""
        if isinstance(self.summaries, msgspec.Raw):
            self.summaries = msgspec.msgpack.decode(self.summaries, type=Summaries)
        return self.summaries

    def kept(self) -> KeptRun:
        """Return the entry encoded for the cache."""
        raw = [
            part if isinstance(part, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(part))
            for part in (self.about, self.summaries)
        ]
        return KeptRun(self.id, self.signature, *raw)
