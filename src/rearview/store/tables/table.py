"""A table that has been asked for: rows when somebody wants them, in the form they want."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rearview.errors import UsageError
from rearview.store.tables.duck import Duck
from rearview.store.tables.kinds import decode


class Table:
    """Rows that are computed when they are fetched.

    `columns` are the names in order; `kinds` says of the recorded ones what they hold.
    """

    def __init__(
        self,
        duck: Duck,
        sql: str,
        kinds: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self._duck = duck
        self.sql = sql
        self.kinds = dict(kinds or {})
        described = self._run(f"SELECT * FROM ({sql}\n) LIMIT 0").description
        self.columns = list(labels) or [column[0] for column in described]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dictionary of plain Python values."""
        kinds = [self.kinds.get(column, "") for column in self.columns]
        odd = [k for k, kind in enumerate(kinds) if kind not in _SIMPLE]
        result = self._run(self.sql)
        while batch := result.fetchmany(10_000):
            for row in batch:
                out = dict(zip(self.columns, row, strict=True))
                for k in odd:
                    out[self.columns[k]] = decode(row[k], kinds[k])
                yield out

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows as dictionaries of plain Python values."""
        return list(self)

    def count(self) -> int:
        """Return how many rows there are, without fetching them."""
        return int(self._run(f"SELECT count(*) FROM ({self.sql}\n)").fetchone()[0])

    def pandas(self) -> Any:
        """Return a pandas DataFrame; what no type of pandas holds comes as Python objects."""
        _needs("pandas")
        import pandas as pd

        frame = self._fetch("df").set_axis(self.columns, axis="columns")
        for k, column in enumerate(self.columns):
            kind = self.kinds.get(column, "")
            if kind not in _SIMPLE:
                values = _decoded(frame.iloc[:, k], kind)
                frame.isetitem(k, pd.Series(values, index=frame.index, dtype="object"))
        return frame

    def polars(self) -> Any:
        """Return a polars DataFrame; values of several types come as Python objects."""
        _needs("polars")
        _needs("pyarrow")
        import polars as pl

        frame = pl.from_arrow(self.arrow())
        mixed = [column for column in self.columns if self.kinds.get(column) == "mixed"]
        return frame.with_columns(
            pl.Series(column, _decoded(frame[column], "mixed"), dtype=pl.Object) for column in mixed
        )

    def arrow(self) -> Any:
        """Return an Arrow table; values of several types come as the JSON text of each."""
        _needs("pyarrow")
        return self._fetch("to_arrow_table").rename_columns(self.columns)

    def _fetch(self, form: str) -> Any:
        import duckdb

        try:
            cursor = self._duck.con.cursor()  # held until all is fetched
            return getattr(cursor.sql(self.sql), form)()
        except duckdb.Error as exc:
            raise refused(exc) from exc

    def _run(self, sql: str) -> Any:
        import duckdb

        try:
            return self._duck.con.cursor().execute(sql)
        except duckdb.Error as exc:
            raise refused(exc) from exc


_SIMPLE = {"", "float", "int", "bool", "str"}


def _decoded(cells: Iterable[Any], kind: str) -> list[Any]:
    """Return the Python values of a column, whatever stands for null in it."""
    held = (str, bytes, bytearray)
    return [decode(cell, kind) if isinstance(cell, held) else None for cell in cells]


def refused(exc: Exception) -> UsageError:
    """Return what DuckDB said about a question, as an error of ours."""
    return UsageError(
        f'The question cannot be answered: {str(exc).strip()} `rearview sql "SHOW TABLES"` lists '
        "the tables; docs/schema.md describes them.",
        slug="sql",
    )


def _needs(library: str) -> None:
    import importlib.util

    if importlib.util.find_spec(library) is None:
        raise UsageError(
            f"{library} is not installed, so there is no {library} table. Install it with "
            f"`pip install {library}`, or take `rows()`.",
            slug="missing-library",
        )
