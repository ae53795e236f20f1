"""One question as SQL: the columns of a table, the runs that a condition selects, EXPLAIN and DESCRIBE."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rearview.errors import UsageError
from rearview.model.proof import TRUSTED
from rearview.store.tables import schema
from rearview.store.tables.catalogue import Sources
from rearview.store.tables.connection import Duck, ident, key, quoted
from rearview.store.tables.pivot import (
    Catalogue,
    Rows,
    branches,
    depth,
    hidden,
    inside,
    loop_columns,
    rows_of,
)
from rearview.store.tables.result_table import Table, refused

RUN_COLUMNS = (
    *("status", "script", "version", "started", "ended", "exit_code", "host", "parent"),
    *("name", "tags", "note"),
)
"""Facts of runs that can be columns."""
MARK = "unproved"
"""Name of the column that lists the unproved values of each row."""
WORD = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")+)"|([^\W\d]\w*)""")
_NEVER = frozenset(
    ("and", "or", "not", "in", "is", "null", "like", "between", "true", "false", "case", "when")
) | {"then", "else", "end"}


class Ask:
    """The columns of a table, and the SQL that selects them.

    With `level`, only values that were logged that many loops deep. With `every`, a question without names
    is one for all names, also for captured ones that a table leaves out.
    """

    def __init__(
        self,
        sources: Sources,
        names: Iterable[str],
        *,
        origins: bool,
        level: int | None = None,
        every: bool = False,
    ) -> None:
        self._sources = sources
        self._shows_origins = origins
        self._cat = sources.catalogue if level is None else at_level(sources.catalogue, level)
        self._all_loops = self._cat.loops(self._cat.rank)
        self._logged: list[str] = []
        self._facts: list[str] = []
        wanted = list(names)
        if not wanted:
            self._logged = list(self._cat.names) if every else sources.names_by_default()
            self._facts = [f"a:{name}" for name in sources.args]
        for text in wanted:
            # a name means the logged value rather than a loop of the same name
            self._add(f"n:{text}" if text in self._cat.names else self.column_of(text))
        self.mark = ""
        """Column that lists the unproved values of each row; empty if there is none."""
        self.kinds: dict[str, str] = {}
        """Kind of every recorded column, by its label."""
        self.labels: list[str] = []
        """The columns of the answer, each as it was logged."""

    @property
    def unproved(self) -> list[str]:
        """The columns of the answer that may hold unproved values."""
        return [name for name in self._logged if name in self._sources.unproved]

    @property
    def _origins(self) -> Collection[str]:
        """Names whose origins are needed."""
        return self._logged if self._shows_origins else self.unproved

    @property
    def bare(self) -> bool:
        """Whether no column holds logged values."""
        return not self._logged

    def _add(self, column: str) -> None:
        if column.startswith("l:"):
            return  # loops have their columns anyway
        into = self._logged if column.startswith("n:") else self._facts
        column = column.removeprefix("n:")
        if column not in into:
            into.append(column)

    def column_of(self, text: str) -> str:
        """Return the column that a text names: `n:` logged, `a:` argument, `l:` loop, `r:` fact."""
        found = self._find(text)
        if found is None:
            raise UsageError(
                f"Nothing is known by the name {text!r}. {self._nearest(text)}", slug="unknown-name"
            )
        return found

    def _find(self, text: str) -> str | None:
        names, args = self._cat.names, self._sources.args
        short = text.removesuffix("_logged").removesuffix("_arg")
        for column, holds in (
            (f"l:{text}", text in self._all_loops),
            (f"n:{text}", text in names),
            (f"a:{text}", text in args),
            (f"r:{text}", text in RUN_COLUMNS),
            (f"n:{short}", text.endswith("_logged") and short in names),
            (f"a:{short}", text.endswith("_arg") and short in args),
        ):
            if holds:
                return column
        return None

    def _nearest(self, text: str) -> str:
        columns = [*self._cat.names, *self._sources.args, *self._all_loops]
        if not self._cat.names and not self._sources.args:
            return "No run has logged anything yet."
        word = text.lower()
        near = [name for name in columns if _contains(name.lower(), word)]
        for names, cutoff in ((columns, 0.6), (RUN_COLUMNS, 0.75)):
            lower = {name.lower(): name for name in reversed(names)}
            near += [lower[n] for n in difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)]
        if near:
            return f"Did you mean {' or '.join(list(dict.fromkeys(near))[:5])}?"
        known = ", ".join(columns[:8])
        return f"Known are: {known}. To have it, log it: `rearview.log({text!r}, ...)`."

    def explain(self, message: str) -> UsageError | None:
        """Return a better error for a column that DuckDB did not find."""
        found = re.search(r'[Cc]olumn "([^"]+)" (?:not found|does not exist)', message)
        if found is None:
            return None
        return UsageError(
            f"Nothing is known by the name {found[1]!r}. {self._nearest(found[1])} If it is a text, put it "
            f"in single quotes inside the condition: \"name = '{found[1]}'\".",
            slug="unknown-name",
        )

    def sql(
        self,
        where: str | None,
        order: Iterable[str] | None = None,
        limit: int | None = None,
        *,
        keys: bool = False,
    ) -> str:
        """Return the SELECT; with `keys` it returns run, path and iterations only."""
        order = [order] if isinstance(order, str) else list(order or ())
        extra = list(self._mentioned(where or "")) + [self.column_of(t.lstrip("-")) for t in order]
        inline: list[str] = []
        apart: list[str] = []
        rows = self._rows(self._logged)
        for column in dict.fromkeys(extra):
            name = column.removeprefix("n:")
            if column.startswith("n:") and name not in self._logged:
                fits = all(any(inside(q, p) for q in rows.paths) for p in self._cat.names[name])
                (inline if fits else apart).append(name)
        for text in order:
            if self.column_of(text.lstrip("-")).removeprefix("n:") in apart:
                raise UsageError(
                    f"Rows cannot be ordered by {text.lstrip('-')!r}: it has several values in each "
                    "of them, as it is logged in a loop inside. Add it to the names.",
                    slug="order",
                )
        facts = [*self._facts, *(c for c in extra if c[:2] in ("a:", "r:"))]
        deepest = max((depth(path) for path in rows.paths), default=0)
        place = [f"$r{k}" for k in range(1, deepest + 1)], [f"$i{k}" for k in range(1, deepest + 1)]
        speaks = any(MARK in match.groups() for match in WORD.finditer(where or ""))
        self.mark = ""
        if speaks or (self.unproved and not self._shows_origins):
            self.mark = self._free_label(rows)
        columns = dict(self._visible(rows))
        names = _distinct(columns)
        self.labels = list(columns)
        self.kinds = {label: kind for label, (_, kind) in columns.items() if kind}
        beside = {path for name in inline for path in self._cat.names[name]} - set(rows.paths)
        rows = replace(rows, joined=frozenset(beside))
        sources = self._sources
        if limit is not None and not where and not order:
            sources = self._near(rows, limit)
        text = self._rows_sql([*self._logged, *inline], rows, facts, sources)
        if where and not apart:
            text = f"SELECT * FROM ({text}) WHERE (\n{where}\n)"
        elif where:
            text = self._selected(text, rows, [*self._logged, *inline, *apart], facts, where)
        if keys:
            shown = ", ".join(map(ident, ["run", *hidden(deepest)]))
        else:
            shown = ", ".join(ident(name) for name in names.values())
        ranked = [
            f"{ident(names.get(t.lstrip('-'), t.lstrip('-')))} {'DESC' if t[0] == '-' else 'ASC'}"
            for t in order
        ]
        steps = [ident(c) for pair in zip(*place, strict=True) for c in pair]
        by = ", ".join([*ranked, ident("$ord"), *_in_order([*steps, ident("$occ")])])
        end = f" LIMIT {int(limit)}" if limit is not None else ""
        return f"SELECT {shown} FROM ({text}) ORDER BY {by}{end}"

    def _near(self, rows: Rows, limit: int) -> Sources:
        """Return sources that hold the first rows and little more."""
        if not self._logged:
            return self._sources
        sources = self._sources.first(limit, self._logged)
        if len({path.split("/")[0] for path in rows.paths if path}) != 1 or not sources.plain:
            return sources
        leaf = max(rows.paths, key=depth)
        here = {n: self._cat.kind(n) for n in self._logged if leaf in self._cat.names[n]}
        return sources.until(leaf, limit, here)

    def _rows(self, names: Iterable[str]) -> Rows:
        found = {name: self._cat.names[name] for name in names}
        virtual = {(n, path) for n, at in found.items() for path, kinds in at.items() if not kinds}
        rows = rows_of(found, virtual)
        if not rows.paths:
            return Rows(("",), frozenset({""}))
        if virtual and "" not in rows.paths:  # runs without a known point still have a row
            return Rows(("", *rows.paths), rows.kept)
        return rows

    def _visible(self, rows: Rows) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield label, SQL and kind of every column of the answer."""
        loops = self._cat.loops(rows.paths)
        yield "run", ("b.run", "")
        for loop in loops:
            yield loop, (f"b.{key('l', loop)}", "")
        for name in self._logged:
            label = self._label(name, loops)
            yield label, (f"b.{key('n', name)}", self._cat.kind(name))
            if self._shows_origins:
                yield f"{label}.origin", (f"b.{key('o', name)}", "")
        for column in self._facts:
            yield self._fact(column, loops)
        if self.mark:
            yield self.mark, (self._marks(loops), "")

    def _marks(self, loops: Iterable[str]) -> str:
        """Return the SQL of the names of the unproved values of a row; null if it has none."""
        trusted = ", ".join(map(quoted, sorted(TRUSTED)))
        found = [
            f"CASE WHEN b.{key('o', name)} NOT IN ({trusted}) "
            f"THEN {quoted(self._label(name, loops))} END"
            for name in self.unproved
        ]
        return f"nullif(concat_ws(', ', {', '.join(found)}), '')" if found else "NULL::VARCHAR"

    def _free_label(self, rows: Rows) -> str:
        """Return a name for the column of marks that no other column has."""
        taken = {label.lower() for label, _ in self._visible(rows)}
        return next(label for k in range(len(taken) + 1) if (label := MARK + "_" * k) not in taken)

    def _label(self, name: str, loops: Iterable[str]) -> str:
        return f"{name}_logged" if name in loops or name == "run" else name

    def _fact(self, column: str, loops: Iterable[str]) -> tuple[str, tuple[str, str]]:
        name = column[2:]
        if column.startswith("r:"):
            return name, (f"r.{ident(name)}", "")
        taken = name in self._logged or name in loops or name == "run"
        label = f"{name}_arg" if taken else name
        return label, (f"a.{key('a', name)}", self._sources.args[name])

    def _rows_sql(self, names: list[str], rows: Rows, facts: list[str], sources: Sources) -> str:
        """Return all rows with everything that a condition or an order may mention."""
        kinds = {name: self._cat.kind(name) for name in names}
        columns = {name: dict.fromkeys(self._cat.names[name], kinds[name]) for name in names}

        def source(path: str) -> str:
            here = {name: kinds[name] for name in names if path in columns[name]}
            return sources.wide(path, here, origins=self._origins)

        text = branches(self._cat, columns, rows, source, origins=self._origins)
        loops = self._cat.loops(rows.paths)
        shown = dict(self._visible(rows))
        for name in names:
            shown.setdefault(self._label(name, loops), (f"b.{key('n', name)}", ""))
        for column in facts:
            label, found = self._fact(column, loops)
            shown.setdefault(label, found)
        labels = _distinct(shown)
        cells = ", ".join(f"{sql} AS {ident(labels[label])}" for label, (sql, _) in shown.items())
        deepest = max((depth(path) for path in rows.paths), default=0)
        place = ", ".join(f"b.{ident(column)}" for column in hidden(deepest))
        return (
            f"SELECT {cells}, {place}, b.{ident('$s')}, r.ord AS {ident('$ord')} FROM ({text}) b "
            "JOIN own.runs r ON r.run = b.run LEFT JOIN own.args a ON a.run = b.run"
        )

    def _selected(
        self, text: str, rows: Rows, names: list[str], facts: list[str], where: str
    ) -> str:
        """Return the rows in which, or inside which, the condition holds somewhere."""
        deeper = self._rows(names)
        inner = self._rows_sql(names, deeper, facts, self._sources)
        shared = min(
            _common(p, q)
            for p in rows.paths
            for name in names
            for q in self._cat.names[name]
            if q not in rows.paths
        )
        keys = [ident("run"), *(ident(f"${c}{k}") for k in range(1, shared + 1) for c in "ri")]
        on = " AND ".join(f"o.{key} = s.{key}" for key in keys)
        chosen = f"SELECT {', '.join(keys)} FROM ({inner}) WHERE (\n{where}\n)"
        return f"SELECT o.* FROM ({text}) o SEMI JOIN ({chosen}) s ON {on}"

    def _mentioned(self, where: str) -> Iterator[str]:
        """Yield the columns that a condition mentions."""
        for match in WORD.finditer(where):
            word = match[1].replace('""', '"') if match[1] else match[2]
            if word and not (match[2] and word.lower() in _NEVER):
                every = (*self._cat.names, *self._sources.args)
                same = [word, *(name for name in every if name.lower() == word.lower())]
                found = next(filter(None, map(self._find, same)), None)
                if found is not None:
                    yield found


def _contains(name: str, word: str) -> bool:
    """Return True if one of two names is a part of the other: `loss` of `train_loss`."""
    short, long = sorted((name, word), key=len)
    return (len(short) > 2 and short in long) or long.endswith((f".{short}", f"/{short}"))


def _in_order(steps: list[str]) -> list[str]:
    """Return the SQL that orders the rows of one run by the time of logging.

    A row of a replay follows the last row that the run itself logged before that point in the same
    outermost loop, by iterations; if the run logged nothing there, it follows all rows of the run.
    """
    own, outermost = ident("$s"), steps[0] if len(steps) > 1 else "NULL"
    near = (
        f"last_value({own} IGNORE NULLS) OVER (PARTITION BY {ident('$ord')}, {outermost} ORDER BY "
        f"{', '.join(steps)} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )
    first = f"min({own}) OVER (PARTITION BY {ident('$ord')}, {outermost})"
    return [f"coalesce({own}, {near}, {first} - 1) NULLS LAST", f"{own} IS NULL", *steps]


def at_level(catalogue: Catalogue, level: int) -> Catalogue:
    """Return the catalogue of values that were logged exactly that many loops deep."""
    out = Catalogue()
    for path in sorted(catalogue.rank, key=lambda path: catalogue.rank[path]):
        if depth(path) == level:
            out.see(path)
            out.labels[path] = catalogue.labels.get(path, out.labels[path])
    for name, paths in catalogue.names.items():
        for path, kinds in paths.items():
            if depth(path) == level:
                out.add(path, name, kinds)
    return out


def _distinct(labels: Iterable[str]) -> dict[str, str]:
    """Return a unique name for each label, because SQL does not distinguish `Loss` from `loss`.

    >>> _distinct(["loss", "Loss"])
    {'loss': 'loss', 'Loss': 'Loss_2'}
    """
    out: dict[str, str] = {}
    taken: set[str] = set()
    for label in labels:
        n, name = 1, label
        while name.lower() in taken:
            n += 1
            name = f"{label}_{n}"
        taken.add(name.lower())
        out[label] = name
    return out


def _common(a: str, b: str) -> int:
    one, two = loop_columns(a), loop_columns(b)
    return next(
        (k for k, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
        min(len(one), len(two)),
    )


_SPACE = r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
_EXPLAIN = re.compile(
    rf"{_SPACE}(EXPLAIN\b{_SPACE}(?:ANALYZE\b|\([^()]*\))?)(.*)", re.IGNORECASE | re.DOTALL
)
_PRAGMA = re.compile(rf"{_SPACE}PRAGMA\s+(\w+)\s*(\([^()]*\))?\s*;?\s*", re.IGNORECASE | re.DOTALL)
_TELLS = frozenset(
    ("table_info", "storage_info", "database_list", "database_size", "collations", "platform")
) | {"user_agent", "version"}
"""Pragmas that only read."""
_SHOWS = {"show_tables": "SHOW TABLES", "show_tables_expanded": "SHOW ALL TABLES"}


def parse_question(query: str) -> tuple[str, str]:
    """Return the EXPLAIN or DESCRIBE in front of a question, or empty, and the question as a SELECT.

    >>> parse_question("EXPLAIN ANALYZE SELECT 1")
    ('EXPLAIN ANALYZE', ' SELECT 1')
    >>> parse_question("PRAGMA table_info('runs')")
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
    """Raise if a condition is not valid SQL, with a message about the condition alone."""
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


def explain(duck: Duck, how: str, question: str) -> Table:
    """Return the answer to an EXPLAIN or DESCRIBE of a single SELECT."""
    import duckdb

    try:
        # as a subquery it cannot write; DuckDB allows that only at the top level
        result = duck.con.cursor().execute(f"{how} SELECT * FROM ({question}\n)")
        columns = ", ".join(ident(column[0]) for column in result.description)
        rows = result.fetchall()
    except duckdb.Error as exc:
        raise refused(exc) from exc
    cells = ", ".join(f"({', '.join(quoted(str(cell)) for cell in row)})" for row in rows)
    return Table(duck, f"SELECT * FROM (VALUES {cells}) AS told ({columns})")


_FACTS = [column for column in schema.TABLES["runs"][1] if column != "tags"]


def last_value_sql(sources: Sources, name: str) -> tuple[str, str]:
    """Return SQL of the last value of `name` per run (`run`, `v`), and its kind.

    Last in the order of execution; values of replays that were not exact do not count.
    """
    ask = Ask(sources, [name], origins=False)
    text = ask.sql(None)
    at = len(ask.labels) - (2 if ask.mark else 1)  # after the run and its loops
    columns = ", ".join(f"c{k}" for k in range(len(ask.labels)))
    numbered = f"SELECT *, row_number() OVER () AS n FROM ({text}) AS q({columns})"
    last = f"SELECT c0 AS run, arg_max(c{at}, n) AS v FROM ({numbered}) GROUP BY c0"
    return last, ask.kinds.get(ask.labels[at], "")


def matching_sql(sources: Sources, where: str) -> str:
    """Return SQL of the runs for which `where` holds, in the order they started.

    It may mention every column of `runs`, `tag` (each tag of a run in turn), `seconds`, arguments, and the
    last value of every logged name. If two have the same name, the fact of the run wins; the others are `name_arg` and `name_logged`.
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
    """Return in words what a condition may mention."""
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
