"""The rows of the page's table of runs: columns, filter, search, sort and groups, as queries to DuckDB.

The key of a column has a form and a name: `fact:status`, `arg:lr` or, for a logged name, `last:acc`, `min:acc`,
`max:acc`, `mean:acc`, `count:acc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from rearview.errors import UsageError
from rearview.store.tables.answer_queries import check_condition
from rearview.store.tables.duckdb_connection import ident, quoted
from rearview.store.tables.select_records import SelectedRecords
from rearview.store.tables.table_sql import WORD, TableQuery
from rearview.web.run_index import Column, Index
from rearview.web.run_index_cache import RUNS

FORMS = {"last": "last", "min": "low", "max": "high", "mean": "mean", "count": "n"}
"""Form in the key of a logged name's column -> column of the tables `page.stats` and `page.summaries`."""
MOST_ROWS = 500
"""Maximum number of rows in one answer."""
MOST_POINTS = 20_000
"""Maximum number of runs in one answer for a chart over runs."""
MOST_COLUMNS = 200


class Sort(msgspec.Struct, forbid_unknown_fields=True):
    """One column to sort by; `desc` sorts large values first."""

    key: str
    desc: bool = False


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the page for rows of the table of runs: which runs, which columns (keys), in which order."""

    columns: list[str] = []
    where: str = ""
    search: str = ""
    sort: list[Sort] = []
    group: list[str] = []
    within: dict[str, Any] = {}
    """Key of a column in `group` -> value. If not empty, the runs with these values are returned, not the groups."""
    runs: list[str] | None = None
    """If not None, only runs with these ids are returned."""
    ranges: bool = False
    """Whether to return the lowest and highest value of each numeric column too, which takes longer."""
    offset: int = 0
    limit: int = 100


@dataclass
class Columns:
    """All columns that a page can show: facts of runs, arguments, and logged names."""

    args: dict[str, bool] = field(default_factory=dict)
    """Argument -> whether all of its values are numbers."""
    distinct: dict[str, int] = field(default_factory=dict)
    """Argument -> number of its different values."""
    names: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Logged name -> facts: `kind` of its values, `path` (loops around its log call), number of `runs` and others."""

    @classmethod
    def of(cls, index: Index) -> Columns:
        """Return the columns that the runs in `index` have."""
        args = index.ask(
            "SELECT name, bool_and(number IS NOT NULL OR text IS NULL), "
            "count(DISTINCT text) FROM page.given GROUP BY name ORDER BY name"
        )
        names = index.ask(
            "SELECT name, kind, path, sum(runs)::BIGINT AS n, sum(unproved) > 0, sum(asked) > 0, last(text) FROM page.names "
            "GROUP BY name, kind, path HAVING n > 0 ORDER BY name, n"
        )
        columns = cls()
        for name, numeric, distinct in args.fetchall():
            columns.args[name], columns.distinct[name] = bool(numeric), distinct
        for name, kind, path, runs, unproved, explicit, text in names.fetchall():
            # a name may have several rows, the one with the most runs last: its kind and path are kept
            earlier = columns.names.get(name, {"runs": 0, "unproved": False, "asked": False})
            columns.names[name] = {
                "kind": (_stored_kind(text) if kind == "object" else None) or kind,
                "path": path,
                "runs": earlier["runs"] + runs,
                "unproved": earlier["unproved"] or bool(unproved),
                "asked": earlier["asked"] or bool(explicit),
            }
        return columns

    def numeric(self, key: str) -> bool:
        """Return True if the values of the column with this key are numbers."""
        form, _, name = key.partition(":")
        if form == "arg":
            return self.args.get(name, False)
        if form == "fact":
            return RUNS.get(name) in {"DOUBLE", "BIGINT"}
        return form != "last" or self.names.get(name, {}).get("kind") in _NUMERIC

    def key_of(self, word: str) -> str | None:
        """Return the key of the column that `word` in a filter names, or None if it names no column.

        As in SQL, upper and lower case are not distinguished.
        """
        return self.labels.get(word) or self._lower.get(word.lower())

    @cached_property
    def _lower(self) -> dict[str, str]:
        return {label.lower(): key for label, key in reversed(self.labels.items())}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Name of a column in a filter -> key of the column.

        If a fact, a logged name and an argument have the same name, it means the fact (or, if there is no such fact,
        the logged name). Then `name_logged` means the logged name and `name_arg` the argument, as in
        `rearview runs --where`.
        """
        keys = {name: f"fact:{name}" for name in RUNS if name != "run"}
        keys["tag"] = "fact:tag"
        for form, suffix, names in (
            ("last", "_logged", list(self.names)),
            ("arg", "_arg", list(self.args)),
        ):
            used_labels = {label.lower() for label in keys}
            for name in names:
                label = name
                while label.lower() in used_labels:
                    label += suffix
                keys[label] = f"{form}:{name}"
        for name, facts in self.names.items():
            if facts["kind"] in _NUMERIC:
                for form in ("min", "max", "mean"):
                    keys.setdefault(f"{name}.{form}", f"{form}:{name}")
        return keys


_NUMERIC = {"float", "int", "long", "bool"}


def _stored_kind(text: str | None) -> str | None:
    """Return the kind ("image", …) in `text`, the JSON description of a stored value, or None if it has none.

    `text` may be cut off at the end.
    """
    match = re.search(r'"kind":\s*"(\w+)"', text or "")
    return match[1] if match else None


class Rows:
    """Answers one `Query` of the page over the runs in `index`."""

    def __init__(self, index: Index, columns: Columns, query: Query) -> None:
        if len(query.columns) > MOST_COLUMNS:
            raise UsageError(
                f"{len(query.columns)} columns were requested; {MOST_COLUMNS} is the limit. Choose "
                "fewer.",
                slug="page-question",
            )
        self._index, self._columns, self._query = index, columns, query
        self._aliases: dict[str, str] = {}

    def answer(self) -> dict[str, Any]:
        """Return the requested rows, or groups if the query has `group` columns, and the total number of rows."""
        if self._query.group and not self._query.within:
            return self._groups()
        query = self._query
        source = self._source([term.key for term in query.sort])
        limit = max(0, min(query.limit, MOST_ROWS))
        answer = self._index.ask(
            f"SELECT id FROM ({source}) ORDER BY {self._order()} "
            f"LIMIT {limit} OFFSET {max(0, query.offset)}"
        )
        runs = [row[0] for row in answer.fetchall()]
        total = self._index.ask(f"SELECT count(*) FROM ({source})").fetchone()[0]
        ranges = self._ranges(self._source(query.columns))[1] if query.ranges else {}
        rows, facts = self._cells(runs)
        return {"total": total, "rows": rows, "ranges": ranges, **facts}

    def _order(self) -> str:
        """Return the SQL text for ORDER BY: the columns to sort by, then the newest run first."""
        order = "".join(
            f"{self._alias(term.key)} {'DESC' if term.desc else 'ASC'} NULLS LAST, "
            for term in self._query.sort
        )
        return f"{order}started DESC, run DESC"

    def _cells(self, ids: Sequence[int]) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return (rows, facts) of the runs with the numbers `ids`.

        A row has the run's id and its cells; `facts` has names and statuses by run id.
        """
        if not ids:
            return [], {"called": {}, "status": {}}
        keys = self._query.columns
        expressions = self._expressions(keys)
        cells = "".join(f", {expressions[key]}" for key in keys)
        id_list = ", ".join(map(str, ids))
        answer = self._index.ask(
            f"SELECT id, run, name, status{cells} FROM page.runs r WHERE id IN ({id_list})"
        ).fetchall()
        by_id = {row[0]: row[1:] for row in answer}
        rows = [by_id[row_id] for row_id in ids if row_id in by_id]
        return [[row[0], *map(plain, row[3:])] for row in rows], {
            "called": {row[0]: row[1] for row in rows if row[1]},
            "status": {row[0]: row[2] for row in rows},
        }

    def points(self) -> dict[str, Any]:
        """Return a row with id and cells for each run that matches the query, oldest first, for a chart over runs.

        At most `MOST_POINTS` rows are returned.
        """
        source = self._source(self._query.columns)
        cells = ", ".join(["run", *(self._alias(key) for key in self._query.columns)])
        answer = self._index.ask(
            f"SELECT {cells} FROM ({source}) ORDER BY started, run LIMIT {MOST_POINTS}"
        )
        return {"rows": [[*map(plain, row)] for row in answer.fetchall()]}

    def matching_ids(self, limit: int) -> list[str]:
        """Return the ids of the first `limit` runs that match the query, in the order that it asks for."""
        query = self._query
        source = self._source([term.key for term in query.sort])
        answer = self._index.ask(
            f"SELECT run FROM ({source}) ORDER BY {self._order()} LIMIT {limit}"
        )
        return [row[0] for row in answer.fetchall()]

    def _groups(self) -> dict[str, Any]:
        """Return the groups of runs that have equal values in the `group` columns.

        A group has these values, its number of runs, and the mean and standard deviation of each column. For a column
        of texts, the text is returned if all runs of the group have the same.
        """
        query = self._query
        source = self._source([*query.group, *query.columns, *(term.key for term in query.sort)])
        by = [self._alias(key) for key in query.group]
        clean, cells = list(by), [*by, "count(*) AS runs"]
        for k, key in enumerate(query.columns):
            alias = self._alias(key)
            if self._columns.numeric(key):
                clean.append(f"CASE WHEN isfinite({alias}) THEN {alias} END AS v{k}")
                cells.append(f"avg(v{k}) AS m{k}, stddev_pop(v{k}) AS d{k}")
                cells.append(f"min(v{k}) AS l{k}, max(v{k}) AS h{k}")
            else:
                clean.append(f"{alias} AS v{k}")
                cells.append(f"CASE WHEN min(v{k}) = max(v{k}) THEN min(v{k}) END AS m{k}")
                cells.append(f"NULL AS d{k}, NULL AS l{k}, NULL AS h{k}")
        source = f"SELECT {', '.join(clean)} FROM ({source})"
        order = []
        for term in query.sort:
            direction = f"{'DESC' if term.desc else 'ASC'} NULLS LAST"
            if term.key in query.group:
                order.append(f"{self._alias(term.key)} {direction}")
            elif term.key in query.columns:
                order.append(f"m{query.columns.index(term.key)} {direction}")
        order += [f"{alias} ASC NULLS LAST" for alias in by]
        totals = ["count(*) OVER ()", "sum(runs) OVER ()"]
        numeric = [k for k, key in enumerate(query.columns) if self._columns.numeric(key)]
        totals += [f"min(l{k}) OVER (), max(h{k}) OVER ()" for k in numeric]
        shown = [*by, "runs", *(f"m{k}, d{k}" for k in range(len(query.columns)))]
        limit = max(0, min(query.limit, MOST_ROWS))
        answer = self._index.ask(
            f"SELECT {', '.join([*shown, *totals])} FROM (SELECT {', '.join(cells)} FROM ({source}) "
            f"GROUP BY {', '.join(by)}) ORDER BY {', '.join(order)} "
            f"LIMIT {limit} OFFSET {max(0, query.offset)}"
        ).fetchall()
        width, end = len(query.group), len(query.group) + 1 + 2 * len(query.columns)
        groups = [
            {
                "values": [plain(cell) for cell in row[:width]],
                "runs": row[width],
                "cells": [
                    [plain(row[width + 1 + 2 * k]), plain(row[width + 2 + 2 * k])]
                    for k in range(len(query.columns))
                ],
            }
            for row in answer
        ]
        total, runs, *ends = answer[0][end:] if answer else (0, 0, *(None for _ in 2 * numeric))
        ranges = {
            query.columns[k]: [ends[2 * position], ends[2 * position + 1]]
            for position, k in enumerate(numeric)
        }
        return {"total": total, "runs": int(runs or 0), "groups": groups, "ranges": ranges}

    def _ranges(self, source: str) -> tuple[int, dict[str, list[float | None]]]:
        """Return the number of runs in the SQL query `source`, and key -> [lowest, highest] of each numeric column."""
        numeric = [key for key in self._query.columns if self._columns.numeric(key)]
        cells = ["count(*)"]
        for key in numeric:
            alias = self._alias(key)
            finite = f"FILTER (isfinite({alias}))"
            cells += [f"min({alias}) {finite}", f"max({alias}) {finite}"]
        row = self._index.ask(f"SELECT {', '.join(cells)} FROM ({source})").fetchone()
        ranges = {key: [row[1 + 2 * k], row[2 + 2 * k]] for k, key in enumerate(numeric)}
        return row[0], ranges

    def _alias(self, key: str) -> str:
        """Return a numbered name for the column `key` in SQL, because SQL does not distinguish `Loss` and `loss`."""
        return self._aliases.setdefault(key, f'"$k{len(self._aliases)}"')

    def _source(self, keys: Iterable[str]) -> str:
        """Return the SQL query for the runs that match `self._query`, with the columns of `keys`."""
        query = self._query
        filter_keys = self._filter_keys(query.where)
        shown_keys = dict.fromkeys([*keys, *query.group, *filter_keys.values()])
        expressions = self._expressions(shown_keys)
        cells = "".join(f", {expressions[key]} AS {self._alias(key)}" for key in shown_keys)
        text = f"SELECT r.id, r.run, r.started{cells} FROM page.runs r"
        conditions = []
        if query.runs is not None:
            run_list = ", ".join(map(quoted, query.runs[:MOST_POINTS])) or "NULL"
            conditions.append(f"r.run IN ({run_list})")
        if query.search.strip():
            conditions += [self._searched(word) for word in query.search.split()[:8]]
        if conditions:
            text += f" WHERE {' AND '.join(conditions)}"
        group_conditions = [
            f"{self._alias(key)} IS NOT DISTINCT FROM {_literal(value)}"
            for key, value in query.within.items()
            if key in shown_keys
        ]
        if group_conditions:
            text = f"SELECT * FROM ({text}) WHERE {' AND '.join(group_conditions)}"
        if query.where.strip():
            check_condition(self._index.duck.con, query.where)
            names = ", ".join(
                f"{self._alias(key)} AS {ident(word)}" for word, key in filter_keys.items()
            )
            shown = f"*, {names}" if names else "*"
            if "tag" in filter_keys:
                text = f"SELECT {shown} FROM ({text})"
                text = f"SELECT DISTINCT ON (run) * FROM ({text}) WHERE (\n{query.where}\n)"
            else:
                text = f"SELECT * FROM (SELECT {shown} FROM ({text})) WHERE (\n{query.where}\n)"
        return text

    def _filter_keys(self, where: str) -> dict[str, str]:
        """Return word -> key for each word in the filter `where` that names a column."""
        out: dict[str, str] = {}
        for match in WORD.finditer(where):
            word = match[1].replace('""', '"') if match[1] else match[2]
            if word and word.lower() not in {earlier.lower() for earlier in out}:
                key = self._columns.key_of(word)
                if key is not None:
                    out[word] = key
        return out

    def _expressions(self, keys: Iterable[str]) -> dict[str, str]:
        """Return key -> SQL expression for the column, in a query over `page.runs r`; raise for an unknown key."""
        out: dict[str, str] = {}
        stored: dict[str, Column] = {}
        for key in keys:
            form, _, name = key.partition(":")
            if form == "fact" and name == "tag":
                out[key] = "unnest(CASE WHEN len(r.tags) = 0 THEN [NULL] ELSE r.tags END)"
            elif form == "fact" and name in RUNS:
                out[key] = f"r.{ident(name)}"
            elif form == "arg":
                stored[key] = ("given", name, "number" if self._columns.args.get(name) else "text")
            elif form in FORMS:
                text = form == "last" and not self._columns.numeric(key)
                stored[key] = ("summaries", name, "text" if text else FORMS[form])
            else:
                raise UsageError(
                    f"There is no column {key!r}. A column is fact:NAME, arg:NAME, or last:, min:, "
                    "max:, mean: or count: and a logged name.",
                    slug="page-question",
                )
        columns = self._index.columns(stored.values())
        return {**out, **{key: f"r.{columns[column]}" for key, column in stored.items()}}

    def _searched(self, word: str) -> str:
        return f"contains(r.words, {quoted(word.lower())})"


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, (int, float)):
        return repr(float(value)) if math.isfinite(value) else f"'{value}'::DOUBLE"
    return quoted(str(value))


def plain(value: Any) -> Any:
    """Return a cell as a value for JSON. NaN and infinities become text, because null means an empty cell."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Points(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a table with one row per point and a column per logged name, for some runs."""

    names: list[str]
    runs: list[str]
    where: str = ""
    offset: int = 0
    limit: int = 100


def point_rows(
    index: Index, query: Points, fillable_names: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, Any]:
    """Return the table that `query` requests: one row per point, with the names as columns.

    `fillable_names` has (name, loops) of the names that a backfill can fill; their empty points have rows too.
    """
    with index.relations(query.runs[:200]) as existing_runs:
        fillable = [(name, loops) for name, loops in fillable_names if name in query.names]
        selected = SelectedRecords(
            index.project, index.duck, index.run_records, existing_runs, fillable
        )
        table_query = TableQuery(selected, query.names, origins=False)
        if query.where.strip():
            check_condition(index.duck.con, query.where)
        sql = table_query.sql(query.where.strip() or None)
        total = index.ask(f"SELECT count(*) FROM ({sql}\n)").fetchone()[0]
        limit = max(0, min(query.limit, MOST_ROWS))
        answer = index.ask(f"SELECT * FROM ({sql}\n) LIMIT {limit} OFFSET {max(0, query.offset)}")
        rows = [[*map(plain, row)] for row in answer.fetchall()]
    labels = list(table_query.labels)
    return {
        "total": total,
        "columns": labels,
        "fillable": [label for label in labels if label in {name for name, _ in fillable}],
        "rows": rows,
    }


def value_counts(index: Index, runs: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return run -> name -> the number `n` of its values, and the number `of` that it has after a backfill.

    This number is estimated: a backfill can fill a name at every point where another name of the same loops has a
    value.
    """
    if not runs or not names:
        return {}
    run_list, name_list = ", ".join(map(quoted, runs)), ", ".join(map(quoted, names))
    answer = index.ask(
        "SELECT run, name, n, most, unproved FROM (SELECT r.run, s.*, max(n) OVER (PARTITION BY s.id, "
        "path) AS most FROM page.summaries s JOIN (SELECT id, run FROM page.runs WHERE run IN "
        f"({run_list})) r USING (id)) WHERE name IN ({name_list})"
    )
    out: dict[str, Any] = {}
    for run, name, n, most, unproved in answer.fetchall():
        out.setdefault(run, {})[name] = {"n": n, "of": most, "unproved": bool(unproved)}
    return out


def completions(columns: Columns, text: str, limit: int = 12) -> list[dict[str, str]]:
    """Return at most `limit` completions of the last word of the filter `text`: names of columns, and SQL words."""
    word = _last_word(text)
    low = word.lower().strip('"')
    completions: list[dict[str, str]] = []
    for label, key in columns.labels.items():
        if low in label.lower():
            bare = re.fullmatch(r"[A-Za-z_]\w*", label) is not None
            insert = label if bare else ident(label)
            completions.append(
                {"insert": insert, "label": label, "what": _column_kind(key, columns)}
            )
    completions.sort(
        key=lambda completion: (
            not completion["label"].lower().startswith(low),
            len(completion["label"]),
        )
    )
    completions += [
        {"insert": sql, "label": sql, "what": "SQL"}
        for sql in ("AND", "OR", "NOT", "IN", "IS NULL", "IS NOT NULL", "LIKE", "BETWEEN")
        if low and sql.lower().startswith(low)
    ]
    return completions[:limit]


def _last_word(text: str) -> str:
    for k in range(len(text) - 1, -1, -1):
        if text[k] in " \t\n()<>=!,+*'":
            return text[k + 1 :]
    return text


def _column_kind(key: str, columns: Columns) -> str:
    form, _, name = key.partition(":")
    if form == "fact":
        return "fact"
    if form == "arg":
        return "parameter"
    kind = columns.names.get(name, {}).get("kind", "")
    return f"{form}, {kind}" if form != "last" else f"last value, {kind}"


def csv_lines(index: Index, columns: Columns, query: Query, most: int) -> Iterator[bytes]:
    """Yield the lines of a CSV file with a header and at most about `most` rows of a query."""
    import csv
    import io

    def line(cells: Iterable[Any]) -> bytes:
        out = io.StringIO()
        csv.writer(out, lineterminator="\r\n").writerow(cells)
        return out.getvalue().encode("utf-8", "backslashreplace")

    names = [_heading(key) for key in query.columns]
    yield line(["run", *names])
    for offset in range(0, most, MOST_ROWS):
        part = Query(
            **{**{f: getattr(query, f) for f in query.__struct_fields__}, "offset": offset}
            | {"limit": MOST_ROWS, "group": []}
        )
        rows = Rows(index, columns, part).answer()["rows"]
        for row in rows:
            yield line(", ".join(c) if isinstance(c, list) else c for c in row)
        if len(rows) < MOST_ROWS:
            return


def _heading(key: str) -> str:
    form, _, name = key.partition(":")
    return f"{name}.{form}" if form in {"min", "max", "mean", "count"} else name


def request(data: str | bytes | Mapping[str, Any], kind: type[Any]) -> Any:
    """Return a request of the page, decoded from `data` as the class `kind`; raise if `data` do not fit the class."""
    try:
        if isinstance(data, Mapping):
            return msgspec.convert(data, kind)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(f"The question cannot be read: {exc}.", slug="page-question") from exc
