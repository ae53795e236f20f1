"""Answer queries over the records of all runs: SQL, pivoted tables, and the runs for which a condition is true."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rearview.errors import UsageError
from rearview.model import Checkpoint, Origin
from rearview.store.checkpoints.objects import Objects
from rearview.store.project import Project
from rearview.store.tables import schema
from rearview.store.tables.duckdb_connection import Duck, ident, key, quoted
from rearview.store.tables.pivot import (
    depth,
)
from rearview.store.tables.read_record_files import RunRecords, gather
from rearview.store.tables.result_table import Table, refused
from rearview.store.tables.schema import (
    FileColumns,
    load_checkpoints,
    load_project,
    load_runs,
    load_versions,
    load_views,
)
from rearview.store.tables.select_records import FillableNames, SelectedRecords
from rearview.store.tables.table_sql import WORD, TableQuery, order_keys, order_sql
from rearview.store.trust import store_id
from rearview.store.versions.versions import Versions

_FACTS = [column for column in schema.TABLES["runs"][1] if column != "tags"]
_RESERVED = {*_FACTS, "tags", "tag", "seconds", "run"}


def last_value_sql(selected: SelectedRecords, name: str) -> tuple[str, str]:
    """Return (SQL for the last value of `name` in each run, kind of the values); the SQL columns are `run` and `v`.

    The last value is last in the order of execution. Values of replays that were not exact are ignored.
    """
    table_query = TableQuery(selected, [name], origins=False)
    text = table_query.sql(None)
    # the column of the values is the last one, except for the column of unproved values
    at = len(table_query.labels) - (2 if table_query.mark else 1)
    columns = ", ".join(f"c{k}" for k in range(len(table_query.labels)))
    numbered = f"SELECT *, row_number() OVER () AS n FROM ({text}) AS q({columns})"
    last = f"SELECT c0 AS run, arg_max(c{at}, n) AS v FROM ({numbered}) GROUP BY c0"
    return last, table_query.kinds.get(table_query.labels[at], "")


def matching_sql(
    selected: SelectedRecords, where: str | None, order: str | Iterable[str] | None = None
) -> str:
    """Return SQL for the runs for which `where` is true, ordered by `order`, or by their start if `order` is None.

    `where` and `order` may mention every column of the SQL table `runs`, `seconds` (duration of the run), arguments,
    and the last value of every logged name. `where` may also mention `tag`: a run is selected if the condition is true
    for one of its tags. If an argument or logged name is also a column of `runs`, it is `name_arg` or `name_logged`.
    """
    taken_labels = set(_RESERVED)
    logged = list(_labelled(selected.catalogue.names, taken_labels, "_logged"))
    args = list(_labelled(selected.args, taken_labels, "_arg"))
    column_names = {
        label.lower(): label for label in (*_RESERVED, *(each for _, each in (*logged, *args)))
    }
    keys = order_keys(order, lambda text: text.lower() in column_names)
    for each in keys:
        if each.column.lower() not in column_names or each.column.lower() == "tag":
            raise _unknown_column(each.column, column_names.values())
    words = {(match[1] or match[2] or "").lower() for match in WORD.finditer(where or "")}
    words |= {each.column.lower() for each in keys}
    kinds: dict[str, str] = {"seconds": "float"}
    cells = [f"r.{ident(fact)}" for fact in _FACTS]
    cells += ["r.tags", "r.ended - r.started AS seconds", 'r.ord AS "$ord"']
    cells += ["unnest(CASE WHEN len(r.tags) = 0 THEN [NULL] ELSE r.tags END) AS tag"]
    joins = ["own.runs r LEFT JOIN own.args a ON a.run = r.run"]
    for k, (name, label) in enumerate(logged):
        if label.lower() in words:
            text, kinds[label] = last_value_sql(selected, name)
            joins.append(f"({text}) l{k} ON l{k}.run = r.run")
            cells.append(f"l{k}.v AS {ident(label)}")
    for name, label in args:
        kinds[label] = selected.args[name]
        cells.append(f"a.{key('a', name)} AS {ident(label)}")
    rows = f"SELECT {', '.join(cells)} FROM {' LEFT JOIN '.join(joins)}"
    matching_rows = f"SELECT * FROM ({rows}) WHERE (\n{where or 'true'}\n)"
    one_row_per_run = (
        f"SELECT * FROM ({matching_rows}) QUALIFY row_number() OVER (PARTITION BY run) = 1"
    )
    terms = [
        term
        for each in keys
        for label in [column_names[each.column.lower()]]
        for term in order_sql(
            "$ord" if label == "run" else label, kinds.get(label, ""), descending=each.descending
        )
    ]
    return f"""SELECT run FROM ({one_row_per_run}) ORDER BY {", ".join([*terms, '"$ord"'])}"""


def _unknown_column(column: str, column_names: Iterable[str]) -> UsageError:
    similar = difflib.get_close_matches(
        column, [name for name in column_names if name != "tag"], n=3
    )
    hint = (
        f"The nearest known are {', '.join(similar)}"
        if similar
        else f"Known are {', '.join(_FACTS)}"
    )
    return UsageError(f"Runs cannot be ordered by {column!r}. {hint}.", slug="order")


def known_columns(selected: SelectedRecords) -> str:
    """Return a text that lists the columns which a condition over runs may mention."""
    taken_labels = set(_RESERVED)
    logged = [label for _, label in _labelled(selected.catalogue.names, taken_labels, "_logged")]
    args = [label for _, label in _labelled(selected.args, taken_labels, "_arg")]
    groups = [("arguments", args), ("last values of logged names", logged)]
    text = "".join(f"; {group}: {', '.join(names[:12])}" for group, names in groups if names)
    return f"facts of runs: tag, {', '.join(_FACTS)}, seconds{text}"


def _labelled(
    names: Iterable[str], taken_labels: set[str], suffix: str
) -> Iterator[tuple[str, str]]:
    """Yield (name, label of its column) for each of the `names`, and add the label to `taken_labels`.

    The label is the name, with `suffix` added if the label is taken; upper and lower case count as equal.
    """
    for name in names:
        label = name
        while label.lower() in taken_labels:
            label += suffix
        taken_labels.add(label.lower())
        yield name, label


_LISTING = frozenset(
    ("tables", "views", "information_schema", "duckdb_tables", "duckdb_views", "duckdb_columns")
)
"""Words in a query from which Rearview recognizes that the query lists the tables."""
_LEVELS = {"setup_pivot": 0, "outer_pivot": 1, "inner_pivot": 2}


class IterationRange(NamedTuple):
    """Iterations of one run in which a condition is true."""

    run: str
    loops: tuple[str, ...] = ()
    outer: int = 0
    """Iteration of the outermost loop that contains the range."""
    first: int = 0
    """First iteration of the inner loop in the range, if there is an inner loop."""
    last: int | None = None
    """Iteration after the last iteration of the range; None if the range extends to the end of the loop."""


class Tables:
    """The records of the runs of a project, as tables that can be queried.

    Answers show the records at the time of the first query, or of the last `refresh`.
    """

    def __init__(
        self,
        project: Project,
        *,
        checkpoints: Callable[[], Iterable[Checkpoint]] | None = None,
        versions: Versions | None = None,
    ) -> None:
        self._project = project
        self._objects = Objects(project)
        self._checkpoints = checkpoints
        self._versions = versions
        self._opened: Duck | None = None
        self._described = False
        self._run_records = RunRecords()

    def refresh(self) -> None:
        """Read all records again; rows of tables that were returned before can no longer be fetched."""
        self.close()
        self._opened = Duck(self._project.store)
        self._run_records = gather(self._project, self._opened)
        load_runs(self._opened, self._run_records, store_id(self._project.store))

    def close(self) -> None:
        """Free memory and temporary files."""
        if self._opened is not None:
            self._opened.close()
            self._opened, self._described = None, False

    @property
    def problems(self) -> list[str]:
        """One sentence for each file of records that could not be read."""
        self._duck()
        return list(self._run_records.problems)

    def loops_by_name(self, runs: Iterable[str] | None = None) -> dict[str, set[tuple[str, ...]]]:
        """Return a mapping: logged name -> loop paths at which it was logged, each as a tuple of loop names.

        If `runs` is None, these are the names of all runs. Printed lines are left out.
        """
        paths_by_name = self._select(runs, ()).catalogue.names
        return {
            name: {tuple(path.split("/")) if path else () for path in paths}
            for name, paths in paths_by_name.items()
        }

    def captured(self, runs: Iterable[str] | None = None) -> dict[str, Origin]:
        """Return a mapping: name -> the origin, such as a logger, from which its values were captured.

        Names that a run logged with Rearview are left out. If `runs` is None, all runs are meant.
        """
        return self._select(runs, ()).captured

    def table(
        self,
        names: Iterable[str] = (),
        *,
        where: str | None = None,
        runs: Iterable[str] | None = None,
        order: str | Iterable[str] | None = None,
        limit: int | None = None,
        fillable: FillableNames = (),
        origins: bool = False,
        unproved: bool = False,
        interpolate: bool = False,
    ) -> Table:
        """Return a table with one row per point and `names` as columns, in order of execution.

        Without `names`, the columns are the arguments of the runs, and the names that `SelectedRecords.names_by_default`
        returns. `where` is SQL over names, loops, arguments and columns of the table `runs`;
        `order` names columns, as in "acc desc, epoch" or ["-acc", "epoch"]; rows without a value come last. A
        name in `fillable` has a column of nulls if it has no values. `origins` adds a column `<name>.origin` for
        every logged name. Values of replays that were not exact are left out, unless `unproved` is True. If some
        of the other values may be unproved, a last column, `unproved`, holds for each row the names of its
        unproved values. With `interpolate`, missing numbers between two known numbers of a loop are filled, and
        the column `interpolated` holds the names of filled values; `where` and `order` see these values.
        """
        self._check_condition(where)
        selected = self._select(runs, fillable, withheld=unproved)
        table_query = TableQuery(selected, names, origins=origins, interpolate=interpolate)
        sql = table_query.sql(where, order, limit)
        return self._answer(table_query, sql, table_query.labels, marked=True)

    def matching(self, where: str | None, order: str | Iterable[str] | None = None) -> list[str]:
        """Return the ids of the runs for which the condition `where` is true, ordered by `order` or as they started."""
        self._check_condition(where)
        selected = self._select(None, ())
        sql = matching_sql(selected, where, order)
        self._check_query(sql)
        try:
            return [row["run"] for row in Table(self._duck(), sql)]
        except UsageError as exc:
            reason = (
                str(exc)
                .removeprefix("The question cannot be answered: ")
                .partition("\n")[0]
                .rstrip("!.")
            )
            raise UsageError(
                f"The condition {where!r} cannot be used: {reason}. It may use "
                f"{known_columns(selected)}.",
                slug="sql",
            ) from exc

    def last_values(self, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the last values that `runs` logged, as a mapping: name -> run id -> value; nulls are left out."""
        selected = self._select(runs, ())
        out: dict[str, dict[str, Any]] = {}
        for name in selected.catalogue.names:
            sql, kind = last_value_sql(selected, name)
            rows = Table(self._duck(), sql, {"v": kind})
            out[name] = {row["run"]: row["v"] for row in rows if row["v"] is not None}
        return out

    def iteration_ranges(
        self, where: str, runs: Iterable[str], *, skip: int = 0
    ) -> list[IterationRange]:
        """Return the iterations of `runs` in which the condition `where` is true: one range per outermost iteration.

        The first `skip` steps of each point are not loops: points of notebooks begin with the cell.

        A range of inner iterations extends in both directions to the next row for which the condition is not
        true, because it is unknown whether the condition is true in iterations without records.
        """
        self._check_condition(where)
        table_query = TableQuery(self._select(runs, ()), (), origins=False)
        holds, fails = (
            table_query.sql(text, keys=True)
            for text in (where, f"NOT coalesce((\n{where}\n), false)")
        )
        columns = set(self._answer(table_query, holds).columns)
        names = (f"i{1 + skip}", f"i{2 + skip}")
        outer, inner = (f'"${name}"' if f"${name}" in columns else "NULL" for name in names)
        key = f'run, "$path" AS path, {outer} AS k, {inner} AS i'
        rows = self._answer(
            table_query,
            f"WITH yes AS (SELECT {key} FROM ({holds})), no AS (SELECT {key} FROM ({fails})), "
            "matching AS (SELECT run, path, k, min(i) AS low, max(i) AS high FROM yes GROUP BY ALL) "
            "SELECT matching.run AS run, matching.path AS path, matching.k AS k, "
            "coalesce(max(no.i) FILTER (no.i < low) + 1, 0) AS first, "
            "min(no.i) FILTER (no.i > high) AS last FROM matching LEFT JOIN no "
            "ON no.run = matching.run AND no.path = matching.path AND no.k = matching.k "
            "GROUP BY matching.run, matching.path, matching.k, low, high",
        )
        return [
            IterationRange(row["run"], path, row["k"], row["first"], row["last"])
            if (path := tuple(row["path"].split("/") if row["path"] else ())[skip:])
            else IterationRange(row["run"])
            for row in rows
        ]

    def sql(self, query: str, *, unproved: bool = False, values: bool = False) -> Table:
        """Return the answer to one SQL query over the tables of docs/schema.md.

        With `values`, a text that describes a stored array or image is replaced by this array or image. The
        pivoted views have values of replays that were not exact only with `unproved`; the table `records` always
        has them. Queries cannot write anything, and cannot read files outside the store. `EXPLAIN`, `DESCRIBE`,
        `SHOW`, `SUMMARIZE` and pragmas that only read are allowed.
        """
        prefix, query = split_explain(query)
        self._check_query(query)
        words = {(match[1] or match[2] or "").lower() for match in WORD.finditer(query)}
        duck = self._duck()
        if not self._described:
            load_project(duck, self._project)
            load_views(duck, self._run_records)
            self._described = True
        if words & {"versions", "files"}:
            file_columns = FileColumns.NONE
            if "files" in words:
                texts = "text" in words or "*" in query
                file_columns = FileColumns.TEXT if texts else FileColumns.NAMES
            project = store_id(self._project.store)
            load_versions(duck, self._run_records, self._versions, project, file_columns)
        if "checkpoints" in words:
            load_checkpoints(duck, self._checkpoints)
        if words & _LISTING:
            deepest = max(map(depth, self._select(None, ()).catalogue.rank), default=0)
            words |= {*_LEVELS, "full_pivot", *(f"pivot_{k}" for k in range(3, deepest + 1))}
        doubtful: list[str] = []
        for word in words:
            level = _LEVELS.get(word)
            if word.startswith("pivot_") and word[6:].isdigit():
                level = int(word[6:])
            if level is not None or word == "full_pivot":
                selected = self._select(None, (), withheld=unproved)
                table_query = TableQuery(selected, (), origins=False, level=level, every=True)
                doubtful += table_query.unproved
                text = table_query.sql(None)
                if (
                    level and table_query.has_no_values
                ):  # nothing was logged in `level` nested loops: no rows
                    text = f"SELECT * FROM ({text}) WHERE false"
                duck.execute(f"CREATE OR REPLACE VIEW {word} AS {text}")
        question = query.strip().rstrip(";")
        if prefix:
            return explain(duck, prefix, question)
        mentions_unproved = "*" in question or {word.lower() for word in doubtful} & words
        unproved_names = sorted(set(doubtful)) if mentions_unproved else ()
        return Table(
            duck, question, unproved=unproved_names, get=self._objects.get if values else None
        )

    def _answer(
        self, table_query: TableQuery, sql: str, labels: Sequence[str] = (), *, marked: bool = False
    ) -> Table:
        self._check_query(sql)
        mark = table_query.mark if marked else ""
        try:
            return Table(
                *(self._duck(), sql, table_query.kinds, labels),
                mark=mark,
                interpolated=table_query.interpolated if marked else "",
                unproved=table_query.unproved,
                get=self._objects.get,
            )
        except UsageError as exc:
            raise table_query.explain(str(exc)) or exc from exc

    def _check_condition(self, where: str | None) -> None:
        """Raise if the condition `where` is not valid SQL; None is valid."""
        if where is not None:
            check_condition(self._duck().con, where)

    def _check_query(self, sql: str) -> None:
        """Raise if `sql` is not a single SELECT."""
        import duckdb

        try:
            statements = self._duck().con.extract_statements(sql)
        except duckdb.Error as exc:
            raise refused(exc) from exc
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise UsageError(
                f"{sql!r} is not a single query. Ask with one SELECT, or EXPLAIN one: records "
                "are append-only, and nothing here writes.",
                slug="sql-read-only",
            )

    def _duck(self) -> Duck:
        if self._opened is None:
            self.refresh()
        assert self._opened is not None
        return self._opened

    def _select(
        self, runs: Iterable[str] | None, fillable: FillableNames, *, withheld: bool = False
    ) -> SelectedRecords:
        duck = self._duck()
        selected = self._run_records.runs
        if runs is not None:
            requested_ids, existing_ids = set(runs), {run.id for run in selected}
            for run in sorted(requested_ids - existing_ids):
                similar = difflib.get_close_matches(run, existing_ids, n=3, cutoff=0.5)
                hint = f"The nearest are {', '.join(similar)}. " if similar else ""
                raise UsageError(
                    f"There is no run {run!r}. {hint}`rearview runs` lists them all.", slug="no-run"
                )
            selected = [run for run in selected if run.id in requested_ids]
        return SelectedRecords(
            self._project, duck, self._run_records, selected, fillable, withheld=withheld
        )


_SPACE = r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
_EXPLAIN = re.compile(
    rf"{_SPACE}(EXPLAIN\b{_SPACE}(?:ANALYZE\b|\([^()]*\))?)(.*)", re.IGNORECASE | re.DOTALL
)
_PRAGMA = re.compile(rf"{_SPACE}PRAGMA\s+(\w+)\s*(\([^()]*\))?\s*;?\s*", re.IGNORECASE | re.DOTALL)
_READING_PRAGMAS = frozenset(
    ("table_info", "storage_info", "database_list", "database_size", "collations", "platform")
) | {"user_agent", "version"}
"""Names of DuckDB pragmas that only read."""
_SHOW_PRAGMAS = {"show_tables": "SHOW TABLES", "show_tables_expanded": "SHOW ALL TABLES"}


def split_explain(query: str) -> tuple[str, str]:
    """Return (the EXPLAIN at the start of `query`, or "", the remaining query).

    A pragma that only reads is rewritten as a SELECT or SHOW.

    >>> split_explain("EXPLAIN ANALYZE SELECT 1")
    ('EXPLAIN ANALYZE', ' SELECT 1')
    >>> split_explain("PRAGMA table_info('runs')")
    ('', "SELECT * FROM pragma_table_info('runs')")
    """
    explain = _EXPLAIN.fullmatch(query)
    if explain is not None:
        return explain[1], explain[2]
    pragma = _PRAGMA.fullmatch(query)
    if pragma is not None:
        name = pragma[1].lower()
        if name in _SHOW_PRAGMAS:
            return "", _SHOW_PRAGMAS[name]
        if name in _READING_PRAGMAS:
            return "", f"SELECT * FROM pragma_{name}{pragma[2] or '()'}"
    return "", query


def check_condition(con: Any, where: str) -> None:
    """Raise if the condition `where` is not valid SQL; the message quotes only the condition, not a whole query."""
    import duckdb

    reason = "it is more than one condition"
    try:
        for text in (f"SELECT 1 WHERE {where}", f"SELECT ({where}\n)"):
            if len(con.extract_statements(text)) != 1:
                break
        else:
            return
    except duckdb.Error as exc:
        reason = str(exc).strip().partition("\n")[0]
    raise UsageError(
        f"The condition {where!r} cannot be read: {reason}. Write SQL over names, loops and "
        "arguments, such as 'acc < 0.9 and epoch > 10'.",
        slug="sql",
    )


def explain(duck: Duck, prefix: str, query: str) -> Table:
    """Return the answer to an EXPLAIN of `query`, a single SELECT; `prefix` is the EXPLAIN with its options."""
    import duckdb

    try:
        # as a subquery the statement cannot write: DuckDB allows writing only at the top level
        result = duck.con.cursor().execute(f"{prefix} SELECT * FROM ({query}\n)")
        columns = ", ".join(ident(column[0]) for column in result.description)
        rows = result.fetchall()
    except duckdb.Error as exc:
        raise refused(exc) from exc
    cells = ", ".join(f"({', '.join(quoted(str(cell)) for cell in row)})" for row in rows)
    return Table(duck, f"SELECT * FROM (VALUES {cells}) AS explained ({columns})")
