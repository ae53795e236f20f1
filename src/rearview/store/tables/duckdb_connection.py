"""A connection to a DuckDB in memory, which downloads nothing; and functions that quote text for SQL."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rearview.store.create_files import make_folder
from rearview.store.values_as_json import encodable


class Duck:
    """A DuckDB in memory that downloads nothing, and reads only files in `store` and in its temporary folder.

    >>> Duck().execute("SELECT 40 + 2").fetchall()
    [(42,)]
    """

    def __init__(self, store: Path | None = None) -> None:
        import duckdb

        config: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        self.con = duckdb.connect(":memory:", config=config)
        self.folder = Path(tempfile.mkdtemp(prefix="rearview-"))
        """Folder of temporary files of this connection."""
        spill = self.folder
        if (
            store is not None
        ):  # to sort many records, DuckDB needs disk space: use the disk of the store, which has room
            with contextlib.suppress(OSError):
                make_folder(store / "cache")
                spill = Path(tempfile.mkdtemp(prefix="spill-", dir=store / "cache"))
        self._finish = weakref.finalize(self, _remove, self.folder, spill)
        with contextlib.suppress(
            duckdb.Error
        ):  # in a notebook without ipywidgets there is no progress bar
            self.con.execute("SET enable_progress_bar = false")
        allowed_folders = files(
            f"{folder}/" for folder in (self.folder, store) if folder is not None
        )
        self.con.execute(
            f"SET memory_limit = '{_memory()}MB'; "
            f"SET TimeZone = 'UTC'; SET temp_directory = {quoted(spill)}; "
            f"SET allowed_directories = {allowed_folders}; SET enable_external_access = false; "
            "SET lock_configuration = true; CREATE SCHEMA own"
        )

    def execute(self, sql: str, values: Any = None) -> Any:
        """Run an SQL statement that Rearview wrote, never one of the user, with `values` for its `?`; return the cursor."""
        return self.con.execute(sql, values) if values is not None else self.con.execute(sql)

    def text_file(self) -> Any:
        """Return a new open temporary file, which SQL statements of this connection may read."""
        return tempfile.NamedTemporaryFile(dir=self.folder, suffix=".jsonl")

    def load(
        self, table: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """Create or replace the SQL table `table` with `rows`; `columns` has the SQL type of each column by name.

        Values are passed to DuckDB as text and converted there, so that floats remain exact. Lists are passed
        as JSON.
        """
        lines = [
            json.dumps({f"c{k}": _cell(row.get(name)) for k, name in enumerate(columns)})
            for row in rows
        ]
        if not lines:
            types = ", ".join(f"{ident(name)} {kind}" for name, kind in columns.items())
            self.execute(f"CREATE OR REPLACE TABLE {table} ({types})")
            return
        with self.text_file() as file:
            file.write("\n".join(lines).encode() + b"\n")
            file.flush()
            texts = ", ".join(f"'c{k}': 'VARCHAR'" for k in range(len(columns)))
            casts = ", ".join(
                f"CAST({f'CAST(c{k} AS JSON)' if kind.endswith('[]') else f'c{k}'} AS {kind}) "
                f"AS {ident(name)}"
                for k, (name, kind) in enumerate(columns.items())
            )
            self.execute(
                f"CREATE OR REPLACE TABLE {table} AS SELECT {casts} FROM read_json("
                f"{quoted(file.name)}, format = 'newline_delimited', columns = {{{texts}}})"
            )

    def close(self) -> None:
        """Close the connection, and free its memory and temporary files."""
        self.con.close()
        self._finish()


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _memory() -> int:
    """Return the megabytes of memory that a query may use: a quarter of the machine's, at least 512, at most 4096."""
    try:
        megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        megabytes = 8192
    return max(512, min(4096, megabytes // 4))


def quoted(text: str | Path) -> str:
    """Return `text` as an SQL literal in single quotes.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + str(text).replace("'", "''") + "'"


def ident(name: str) -> str:
    """Return `name` as an SQL identifier in double quotes."""
    return '"' + name.replace('"', '""') + '"'


def fold(name: str) -> str:
    """Return `name` in lower case, encoded so that names that differ only in case remain different.

    >>> fold("Loss"), fold("loss")
    ('^loss', 'loss')
    """
    return re.sub("[A-Z^]", lambda match: "^" + match[0].lower(), name)


def key(letter: str, name: str) -> str:
    """Return the SQL identifier of an internal column for a logged name or loop.

    `letter` says what the column holds, for example `n` values of the name, `o` their origins, `l` values of the loop.
    """
    return ident(f"{letter}:{fold(name)}")


def files(paths: Iterable[str | Path]) -> str:
    """Return file paths as the SQL text of a list."""
    return "[" + ", ".join(quoted(path) for path in paths) + "]"


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else encodable(value)
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)
