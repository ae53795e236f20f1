"""The result of a query: rows that are computed when fetched, as Python values, pandas, polars, Arrow or Parquet."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from rearview.errors import RearviewError, UsageError
from rearview.model.wording import plural
from rearview.store.stored_arrays_and_media import (
    Get,
    StoredValue,
    histogram_svg,
    is_png,
    stored_value,
    value_in_text,
)
from rearview.store.tables.duckdb_connection import Duck, quoted
from rearview.store.tables.pivot import decode

PREVIEW = 20
"""Most rows of a table that `repr` and a notebook show."""
THUMBNAILS = 4 << 20
"""Most bytes of images that one notebook table shows; further images are described in words."""
_SAME = 16
"""Number of loaded arrays that are cached while rows are read, because values of outer loops are repeated on inner rows."""

Stored = Callable[[dict[str, Any]], Any]


class Table:
    """Rows of a query, which are computed when they are fetched.

    `columns` are the names of the columns in order; `kinds` has the kind of each column with recorded values.
    """

    def __init__(
        self,
        duck: Duck,
        sql: str,
        kinds: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        *,
        mark: str = "",
        interpolated: str = "",
        unproved: Sequence[str] = (),
        get: Get | None = None,
    ) -> None:
        """Create a table with the rows of the query `sql`.

        `get` reads the bytes of arrays and images. If `get` is None, the table shows their descriptions. `labels` are
        the names of the columns, if they differ from those in SQL. The other arguments are the attributes below.
        """
        self._duck = duck
        self._get = get
        self.sql = sql
        self.kinds = dict(kinds or {})
        self.mark = mark
        """Column that lists the unproved values of each row; empty if there is no such column."""
        self.interpolated = interpolated
        """Column that lists the interpolated values of each row; empty if there is no such column."""
        self.unproved = list(unproved)
        """Names of which some values in the rows may be unproved."""
        described = self._run(f"SELECT * FROM ({sql}\n) LIMIT 0").description
        self.columns = list(labels) or [column[0] for column in described]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dictionary of Python values; arrays and tensors are loaded from the store.

        If nearby rows hold the same stored array, it is loaded once.
        """
        return self._each(self._loading())

    def described(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dictionary with a `StoredValue` for each array, tensor, image or histogram.

        A `StoredValue` has dtype and shape, and reads its bytes only when `load()` is called.
        """
        return self._each(None if self._get is None else self._describe)

    def _each(self, stored: Stored | None) -> Iterator[dict[str, Any]]:
        result = self._run(self.sql)
        kinds = self._column_kinds(result)
        converted_columns = [k for k, kind in enumerate(kinds) if kind not in _SIMPLE]
        while batch := result.fetchmany(10_000):
            for row in batch:
                out = dict(zip(self.columns, row, strict=True))
                for k in converted_columns:
                    out[self.columns[k]] = self._value(row[k], kinds[k], stored)
                yield out

    def _column_kinds(self, result: Any) -> list[str]:
        """Return the kind of each column of `result`.

        In the answer to an SQL query, columns of texts have the kind `_TEXT`: a text may describe a stored value.
        """
        kinds = [self.kinds.get(column, "") for column in self.columns]
        if self.kinds or self._get is None:
            return kinds
        return [
            _TEXT if str(description[1]) == "VARCHAR" else "" for description in result.description
        ]

    def _value(self, cell: Any, kind: str, stored: Stored | None) -> Any:
        if kind != _TEXT:
            return decode(cell, kind, stored)
        stored_in_text = value_in_text(cell, self._get)
        return (
            cell if stored_in_text is None or stored is None else stored(dict(stored_in_text.facts))
        )

    def _describe(self, facts: dict[str, Any]) -> Any:
        value = stored_value(facts, self._get)
        return facts if value is None else value

    def _loading(self) -> Stored | None:
        """Return a function that loads the stored value of a description, or None if there is no `get` to read bytes.

        The function has a cache, for one pass over the rows.
        """
        if self._get is None:
            return None
        read = lru_cache(_SAME)(lambda value: value.load())

        def load(facts: dict[str, Any]) -> Any:
            described = self._describe(facts)
            return read(_LoadOnce(described)) if isinstance(described, StoredValue) else described

        return load

    def __repr__(self) -> str:
        """Return the first rows as text, for an interactive prompt."""
        shown, more_rows = self._preview()
        cells = [self.columns, *([_cell(row[name]) for name in self.columns] for row in shown)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        return "\n".join(
            [*lines, *([f"… and {plural(more_rows, 'more row')}"] if more_rows else [])]
        )

    def _repr_html_(self) -> str:
        """Return the first rows as HTML, for a notebook."""
        shown, more_rows = self._preview()
        draw = _Drawing(THUMBNAILS)
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{draw(row[name])}</td>' for name in self.columns)}</tr>"
            for row in shown
        )
        more_text = f"<p>… and {plural(more_rows, 'more row')}</p>" if more_rows else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more_text}"

    def _preview(self) -> tuple[list[dict[str, Any]], int]:
        """Return (first rows, number of further rows)."""
        shown = list(islice(self.described(), PREVIEW))
        return shown, max(0, self.count() - len(shown)) if len(shown) == PREVIEW else 0

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows as dictionaries of Python values; arrays and tensors are loaded from the store."""
        return list(self)

    def count(self) -> int:
        """Return the number of rows, without fetching the rows."""
        return int(self._run(f"SELECT count(*) FROM ({self.sql}\n)").fetchone()[0])

    def pandas(self) -> Any:
        """Return the rows as a pandas DataFrame; values without a pandas type are Python objects."""
        _needs("pandas")
        import pandas as pd

        frame = self._fetch("df").set_axis(self.columns, axis="columns")
        kinds = self._column_kinds(self._run(f"SELECT * FROM ({self.sql}\n) LIMIT 0"))
        load = self._loading()
        for k, kind in enumerate(kinds):
            if kind == _TEXT and not any(value_in_text(cell) for cell in frame.iloc[:, k]):
                continue
            if kind not in _SIMPLE:
                values = self._decoded(frame.iloc[:, k], kind, load)
                frame.isetitem(k, pd.Series(values, index=frame.index, dtype="object"))
        return frame

    def polars(self) -> Any:
        """Return the rows as a polars DataFrame; arrays, and columns with values of several types, are Python objects."""
        _needs("polars")
        _needs("pyarrow")
        import polars as pl

        frame = pl.from_arrow(self.arrow())
        load = self._loading()
        return frame.with_columns(
            pl.Series(column, self._decoded(frame[column], kind, load), dtype=pl.Object)
            for column, kind in self.kinds.items()
            if column in self.columns and kind in {"mixed", "object"}
        )

    def arrow(self) -> Any:
        """Return the rows as an Arrow table; a column with values of several types holds their JSON texts."""
        _needs("pyarrow")
        return self._fetch("to_arrow_table").rename_columns(self.columns)

    def _decoded(self, cells: Iterable[Any], kind: str, load: Stored | None) -> list[Any]:
        """Return the Python values of a column's `cells`; null values of pandas or polars become None."""
        cell_types = (str, bytes, bytearray)
        return [self._value(c, kind, load) if isinstance(c, cell_types) else None for c in cells]

    def parquet(self, file: Path) -> None:
        """Write the rows to a Parquet file; a column with values of several types holds their JSON texts."""
        written = (
            self._duck.folder / f"{file.name}.parquet"
        )  # the only folder that DuckDB may write to
        try:
            self._run(f"COPY ({self.sql}\n) TO {quoted(written)} (FORMAT parquet)")
            shutil.copyfile(written, file)
        finally:
            written.unlink(missing_ok=True)

    def _fetch(self, form: str) -> Any:
        import duckdb

        try:
            cursor = (
                self._duck.con.cursor()
            )  # a variable, because the cursor must exist until all rows are fetched
            return getattr(cursor.sql(self.sql), form)()
        except duckdb.Error as exc:
            raise refused(exc) from exc

    def _run(self, sql: str) -> Any:
        import duckdb

        try:
            return self._duck.con.cursor().execute(sql)
        except duckdb.Error as exc:
            raise refused(exc) from exc


class _LoadOnce:
    """A stored value as a cache key: two keys are equal if their object, kind, dtype and shape are equal."""

    def __init__(self, value: StoredValue) -> None:
        self._value = value
        self._key = (value.oid, value.kind, value.dtype, value.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LoadOnce) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def load(self) -> Any:
        return self._value.load()


class _Drawing:
    """Draws the cells of a notebook table: images and other media as HTML, all other values as text.

    `room` is the number of bytes of images that may be drawn.
    """

    def __init__(self, room: int) -> None:
        self._room = room

    def __call__(self, value: Any) -> str:
        text = escape(_cell(value))
        if not isinstance(value, StoredValue) or value.kind in {"array", "tensor"}:
            return text
        if value.nbytes > self._room:
            return text
        self._room -= value.nbytes
        try:
            if value.kind == "histogram":
                return f'<span title="{text}">{histogram_svg(value.histogram()[0])}</span>'
            if value.kind != "image":
                loaded = value.load()
                return text if loaded is value else str(loaded._repr_html_())
            data = value.raw()
        except (RearviewError, OSError):  # `rows()` will raise this error
            return text
        if not is_png(data):
            return text
        source = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
        return f'<img src="{source}" alt="{text}" title="{text}" style="max-height: 96px">'


def _cell(value: Any) -> str:
    """Return a value as a text of at most 40 characters, without control characters."""
    text = "" if value is None else f"{value:.6g}" if type(value) is float else str(value)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= 40 else text[:39] + "…"


_SIMPLE = {"", "float", "int", "bool", "str"}
_TEXT = "text"
"""Kind of an SQL column of texts, some of which may describe stored values."""


def refused(exc: Exception) -> UsageError:
    """Return a UsageError that explains `exc`, an error that DuckDB raised about a query."""
    return UsageError(
        f"The question cannot be answered: {str(exc).strip()}\nThe tables to ask are full_pivot (one row "
        'per point, one column per name), pivot, records, runs and more: `rearview sql "SHOW TABLES"` '
        "lists them.",
        slug="sql",
    )


def _needs(library: str) -> None:
    """Raise if the Python library `library` is not installed."""
    import importlib.util

    if importlib.util.find_spec(library) is None:
        raise UsageError(
            f"{library} is not installed, so there is no {library} table. Install it with "
            f"`pip install {library}`, or take `rows()`.",
            slug="missing-library",
        )
