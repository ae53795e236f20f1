"""Which runs a condition selects and in which order, as SQL over facts, arguments and last values of runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from rearview.errors import UsageError
from rearview.store.tables import schema
from rearview.store.tables.catalogue import Sources
from rearview.store.tables.connection import ident, key
from rearview.store.tables.query import WORD, TableQuery
from rearview.store.tables.row_order import order_keys, order_sql

_FACTS = [column for column in schema.TABLES["runs"][1] if column != "tags"]
_TAKEN = {*_FACTS, "tags", "tag", "seconds", "run"}


def last_value_sql(sources: Sources, name: str) -> tuple[str, str]:
    """Return SQL of the last value of `name` per run (`run`, `v`), and its kind.

    Last in the order of execution; values of replays that were not exact do not count.
    """
    table_query = TableQuery(sources, [name], origins=False)
    text = table_query.sql(None)
    at = len(table_query.labels) - (2 if table_query.mark else 1)  # after the run and its loops
    columns = ", ".join(f"c{k}" for k in range(len(table_query.labels)))
    numbered = f"SELECT *, row_number() OVER () AS n FROM ({text}) AS q({columns})"
    last = f"SELECT c0 AS run, arg_max(c{at}, n) AS v FROM ({numbered}) GROUP BY c0"
    return last, table_query.kinds.get(table_query.labels[at], "")


def matching_sql(
    sources: Sources, where: str | None, order: str | Iterable[str] | None = None
) -> str:
    """Return SQL of the runs for which `where` holds, in the order asked for or that they started in.

    Both may mention every column of `runs`, `tag` (each tag of a run in turn), `seconds`, arguments, and
    the last value of every logged name. If two have the same name, the fact of the run wins; the others
    are `name_arg` and `name_logged`.
    """
    taken = set(_TAKEN)
    logged = list(_labelled(sources.catalogue.names, taken, "_logged"))
    args = list(_labelled(sources.args, taken, "_arg"))
    known = {label.lower(): label for label in (*_TAKEN, *(each for _, each in (*logged, *args)))}
    keys = order_keys(order, lambda text: text.lower() in known)
    for each in keys:
        if each.column.lower() not in known or each.column.lower() == "tag":
            raise _unknown(each.column, known.values())
    words = {(match[1] or match[2] or "").lower() for match in WORD.finditer(where or "")}
    words |= {each.column.lower() for each in keys}
    kinds: dict[str, str] = {"seconds": "float"}
    cells = [f"r.{ident(fact)}" for fact in _FACTS]
    cells += ["r.tags", "r.ended - r.started AS seconds", 'r.ord AS "$ord"']
    cells += ["unnest(CASE WHEN len(r.tags) = 0 THEN [NULL] ELSE r.tags END) AS tag"]
    joins = ["own.runs r LEFT JOIN own.args a ON a.run = r.run"]
    for k, (name, label) in enumerate(logged):
        if label.lower() in words:
            text, kinds[label] = last_value_sql(sources, name)
            joins.append(f"({text}) l{k} ON l{k}.run = r.run")
            cells.append(f"l{k}.v AS {ident(label)}")
    for name, label in args:
        kinds[label] = sources.args[name]
        cells.append(f"a.{key('a', name)} AS {ident(label)}")
    rows = f"SELECT {', '.join(cells)} FROM {' LEFT JOIN '.join(joins)}"
    chosen = f"SELECT * FROM ({rows}) WHERE (\n{where or 'true'}\n)"
    once = f"SELECT * FROM ({chosen}) QUALIFY row_number() OVER (PARTITION BY run) = 1"
    terms = [
        term
        for each in keys
        for label in [known[each.column.lower()]]
        for term in order_sql(
            "$ord" if label == "run" else label, kinds.get(label, ""), descending=each.descending
        )
    ]
    return f"""SELECT run FROM ({once}) ORDER BY {", ".join([*terms, '"$ord"'])}"""


def _unknown(column: str, known: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(column, [name for name in known if name != "tag"], n=3)
    hint = f"The nearest known are {', '.join(near)}" if near else f"Known are {', '.join(_FACTS)}"
    return UsageError(f"Runs cannot be ordered by {column!r}. {hint}.", slug="order")


def known_columns(sources: Sources) -> str:
    """Return in words what a condition may mention."""
    taken = set(_TAKEN)
    logged = [label for _, label in _labelled(sources.catalogue.names, taken, "_logged")]
    args = [label for _, label in _labelled(sources.args, taken, "_arg")]
    some = [("arguments", args), ("last values of logged names", logged)]
    text = "".join(f"; {what}: {', '.join(names[:12])}" for what, names in some if names)
    return f"facts of runs: tag, {', '.join(_FACTS)}, seconds{text}"


def _labelled(names: Iterable[str], taken: set[str], suffix: str) -> Iterator[tuple[str, str]]:
    """Yield each name with a column name that is not taken yet, whatever the case of letters."""
    for name in names:
        label = name
        while label.lower() in taken:
            label += suffix
        taken.add(label.lower())
        yield name, label
