"""The index of the page on disk: tables as Parquet files, and one file that says what each run was when it was read.

Everything here can be made again from the store. A cache that cannot be read, or was written in part, counts as none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rearview.store.files import make_folder, publish
from rearview.store.tables.connection import Duck, files, quoted
from rearview.store.tables.seal import Summary

FORMAT = 3
"""Number of the cache files; files of another number are made again."""
TABLES = {"runs": "started, run", "given": "name, id", "summaries": "name, id"}
"""Tables of the index that are kept, and the order of their rows: readers look for one name at a time."""

Summaries = dict[str, tuple[int, int, Summary]]
"""By file name: size and modification time of a sealed file, and its checked summary."""


class KeptRun(msgspec.Struct, array_like=True):
    """One run in the cache: read as raw bytes, since of many thousand runs a page looks at a few."""

    id: int
    signature: tuple[int, ...]
    run: msgspec.Raw
    summaries: msgspec.Raw


class _Index(msgspec.Struct):
    format: int
    folder: str
    """Folder that holds the tables as they were at that time."""
    runs: dict[str, KeptRun]


@dataclass(frozen=True, slots=True)
class IndexCache:
    """The cache in one folder, for any number of readers and writers."""

    folder: Path

    @property
    def _index(self) -> Path:
        return self.folder / "index.msgpack"

    def save(self, duck: Duck, columns: Mapping[str, str], runs: dict[str, KeptRun]) -> None:
        """Write the tables, then the file that names them. A store that cannot be written to has no cache.

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
        """Fill the tables of the index; return the runs that are in them, none if there is no intact cache."""
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
        except Exception:  # damage of any sort: the cache is made again
            for table in TABLES:
                duck.execute(f"DELETE FROM page.{table}")
            return {}
        return index.runs
