"""A table that has been asked for: rows when somebody wants them, in the form they want."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """Return a pandas DataFrame."""
        _needs("pandas")
        return self._fetch("df").set_axis(self.columns, axis="columns")

    def polars(self) -> Any:
        """Return a polars DataFrame."""
        _needs("polars")
        _needs("pyarrow")
        import polars as pl

        return pl.from_arrow(self.arrow())

    def arrow(self) -> Any:
        """Return an Arrow table."""
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
