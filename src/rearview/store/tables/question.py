"""Questions that are no SELECT and yet only read: how one is answered, and what a table is like."""

from __future__ import annotations

import re
from typing import Any

from rearview.errors import UsageError
from rearview.store.tables.duck import Duck, ident, quoted
from rearview.store.tables.table import Table, refused

_SPACE = r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
_EXPLAIN = re.compile(
    rf"{_SPACE}(EXPLAIN\b{_SPACE}(?:ANALYZE\b|\([^()]*\))?)(.*)", re.IGNORECASE | re.DOTALL
)
_PRAGMA = re.compile(rf"{_SPACE}PRAGMA\s+(\w+)\s*(\([^()]*\))?\s*;?\s*", re.IGNORECASE | re.DOTALL)
_TELLS = frozenset(
    ("table_info", "storage_info", "database_list", "database_size", "collations", "platform")
) | {"user_agent", "version"}
"""Pragmas that are functions, which change nothing."""
_SHOWS = {"show_tables": "SHOW TABLES", "show_tables_expanded": "SHOW ALL TABLES"}


def asked(query: str) -> tuple[str, str]:
    """Return how a question is to be explained, if it is, and the question itself.

    >>> asked("EXPLAIN ANALYZE SELECT 1")
    ('EXPLAIN ANALYZE', ' SELECT 1')
    >>> asked("PRAGMA table_info('runs')")
    ('', "SELECT * FROM pragma_table_info('runs')")
    """
    explain = _EXPLAIN.fullmatch(query)
    if explain is not None:
        return explain[1], explain[2]
    pragma = _PRAGMA.fullmatch(query)
    if pragma is not None:
        name = pragma[1].lower()
        if name in _SHOWS:
            return "", _SHOWS[name]
        if name in _TELLS:
            return "", f"SELECT * FROM pragma_{name}{pragma[2] or '()'}"
    return "", query


def check_condition(con: Any, where: str) -> None:
    """Refuse a condition that is none, in its own words and not in those of our SQL."""
    import duckdb

    said = "it is more than one"
    try:
        for text in (f"SELECT 1 WHERE {where}", f"SELECT ({where}\n)"):
            if len(con.extract_statements(text)) != 1:
                break
        else:
            return
    except duckdb.Error as exc:
        said = str(exc).strip().partition("\n")[0]
    raise UsageError(
        f"The condition {where!r} cannot be read: {said}. Write SQL over names, loops and "
        "arguments, such as 'acc < 0.9 and epoch > 10'.",
        slug="sql",
    )


def explained(duck: Duck, how: str, question: str) -> Table:
    """Return how DuckDB answers a question that was found to be a single SELECT."""
    import duckdb

    try:
        # as a part of another it cannot hold what writes; that is allowed only at the top
        result = duck.con.cursor().execute(f"{how} SELECT * FROM ({question}\n)")
        columns = ", ".join(ident(column[0]) for column in result.description)
        rows = result.fetchall()
    except duckdb.Error as exc:
        raise refused(exc) from exc
    cells = ", ".join(f"({', '.join(quoted(str(cell)) for cell in row)})" for row in rows)
    return Table(duck, f"SELECT * FROM (VALUES {cells}) AS told ({columns})")
