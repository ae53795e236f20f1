"""Find runs by a condition over their facts, tags, arguments and the last values that they logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rearview.store.tables import schema
from rearview.store.tables.ask import WORD, Ask
from rearview.store.tables.catalogue import Sources
from rearview.store.tables.duck import ident, key

_FACTS = [column for column in schema.TABLES["runs"][1] if column != "tags"]


def last_value_sql(sources: Sources, name: str) -> tuple[str, str]:
    """Return SQL that gives the last value of `name` per run (`run`, `v`), and its kind.

    The order is that of execution; values of replays that were not exact do not count.
    """
    ask = Ask(sources, [name], origins=False)
    text = ask.sql(None)
    at = len(ask.labels) - (2 if ask.mark else 1)  # after the run and its loops
    columns = ", ".join(f"c{k}" for k in range(len(ask.labels)))
    numbered = f"SELECT *, row_number() OVER () AS n FROM ({text}) AS q({columns})"
    last = f"SELECT c0 AS run, arg_max(c{at}, n) AS v FROM ({numbered}) GROUP BY c0"
    return last, ask.kinds.get(ask.labels[at], "")


def matching_sql(sources: Sources, where: str) -> str:
    """Return SQL that gives the runs for which `where` holds, in the order they started.

    It may speak of every column of `runs`, of `tag` (each tag of a run in turn), of `seconds`, of
    arguments, and of the last value of every logged name. Where two have the same name, the fact of
    the run wins; the others are `name_arg` and `name_logged`.
    """
    words = {(match[1] or match[2] or "").lower() for match in WORD.finditer(where)}
    taken = {*_FACTS, "tags", "tag", "seconds", "run"}
    cells = [f"r.{ident(fact)}" for fact in _FACTS]
    cells += ["r.tags", "r.ended - r.started AS seconds", 'r.ord AS "$ord"']
    cells += ["unnest(CASE WHEN len(r.tags) = 0 THEN [NULL] ELSE r.tags END) AS tag"]
    joins = ["own.runs r LEFT JOIN own.args a ON a.run = r.run"]
    logged = sources.catalogue.names
    for k, (name, label) in enumerate(_labelled(logged, taken, "_logged")):
        if label.lower() in words:
            text, _ = last_value_sql(sources, name)
            joins.append(f"({text}) l{k} ON l{k}.run = r.run")
            cells.append(f"l{k}.v AS {ident(label)}")
    for name, label in _labelled(sources.args, taken, "_arg"):
        cells.append(f"a.{key('a', name)} AS {ident(label)}")
    rows = f"SELECT {', '.join(cells)} FROM {' LEFT JOIN '.join(joins)}"
    return f'SELECT DISTINCT run, "$ord" FROM ({rows}) WHERE (\n{where}\n) ORDER BY "$ord"'


def known_columns(sources: Sources) -> str:
    """Return in words what a condition may speak of."""
    taken = {*_FACTS, "tags", "tag", "seconds", "run"}
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
