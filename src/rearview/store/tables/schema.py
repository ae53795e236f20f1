"""The SQL tables: the meaning of each column, from which docs/schema.md is made, and functions that fill them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum

from rearview.model import Checkpoint
from rearview.model.proof import ORIGINS
from rearview.store.project import Project
from rearview.store.tables.duckdb_connection import Duck, fold, quoted
from rearview.store.tables.pivot import ORIGIN, TYPES, common_kind, encode
from rearview.store.tables.read_record_files import RunRecords, long_sql
from rearview.store.trust import store_id
from rearview.store.values_as_json import convert
from rearview.store.versions.versions import Versions

_KINDS = (
    "null, bool, int, long (beyond 2^53), bigint (beyond 64 bits), float, str, str64 (text with "
    "lone surrogates, in base64), bytes (in base64), json, object, repr"
)
_ASK = (
    "Made from `rearview.store.tables.schema`; `python -m rearview.store.tables.schema` prints it. Query the "
    "tables with `rearview sql` or `rearview.history().sql(...)`. A query cannot write anything and cannot "
    "read other files. The dialect is that of DuckDB.\n"
)
_PIVOTED = (
    "Each view has the column `run`, one column per loop, one per logged name and one per argument. Rows "
    "are ordered by run, and in a run by the first log call that gave the row a value (`records.seq`). A row "
    "that only replays logged comes after the last row that the run itself logged up to this iteration of "
    "the outermost loop; if the run logged nothing in this loop, it comes after all rows of the run. If a "
    "name was logged several times at one point, each value has a row. If a value was recorded and also "
    "replayed, the recorded value is shown; if it was replayed several times, the value with the best "
    "verdict. Values of replays that were not exact are left out, except with `--unproved` or "
    "`unproved=True`. If some values may be unproved, a last column, `unproved`, holds for each row the "
    "names of its unproved values, separated by commas, or null. A logged name that is also the name of a "
    "loop is shown as `name_logged`, an argument that is also a logged name as `name_arg`.\n"
)
TABLES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "projects": (
        "One row: the project.",
        {
            "project": ("VARCHAR", "id of its store, kept when the folder is moved or copied"),
            "name": ("VARCHAR", "name of its folder"),
            "root": ("VARCHAR", "its folder"),
        },
    ),
    "runs": (
        "One row per run, in the order they started.",
        {
            "run": ("VARCHAR", "id"),
            "project": ("VARCHAR", "`projects.project`"),
            "version": ("VARCHAR", "the version that it ran; `versions.version`"),
            "script": ("VARCHAR", "path in the project, or `-m module`"),
            "argv": ("VARCHAR[]", "command line after the script"),
            "status": ("VARCHAR", "running, finished, failed, paused or dead"),
            "exit_code": ("INTEGER", "null while the run is running, and if it died"),
            "started": ("DOUBLE", "seconds since 1970"),
            "ended": ("DOUBLE", "seconds since 1970"),
            "host": ("VARCHAR", "machine"),
            "pid": ("BIGINT", "process"),
            "cwd": ("VARCHAR", "folder in which it was started"),
            "parent": ("VARCHAR", "the run from which it was started, if any"),
            "name": ("VARCHAR", "name that the user gave to it; empty if none"),
            "tags": ("VARCHAR[]", "tags that the user gave to it: `where 'baseline' in tags`"),
            "note": ("VARCHAR", "the user's note about it; empty if none"),
        },
    ),
    "versions": (
        "One row per version of a run, and per derived version.",
        {
            "version": ("VARCHAR", "hash of the source tree"),
            "run": ("VARCHAR", "run that executed it; null for a derived version"),
            "parent": (
                "VARCHAR",
                (
                    "the version of the last earlier run that has another version; of a derived version, the "
                    "version to which probes were added"
                ),
            ),
            "project": ("VARCHAR", "`projects.project`"),
        },
    ),
    "files": (
        "One row per source file of every version.",
        {
            "version": ("VARCHAR", "`versions.version`"),
            "path": ("VARCHAR", "path in the project"),
            "hash": ("VARCHAR", "git's hash of the content: equal content, equal hash"),
            "text": ("VARCHAR", "the source text; null if it is not UTF-8, or a link"),
        },
    ),
    "arguments": (
        "One row per hyper-parameter of every run.",
        {
            "run": ("VARCHAR", "`runs.run`"),
            "name": ("VARCHAR", "name"),
            "kind": ("VARCHAR", "as in `records.kind`"),
            "number": ("DOUBLE", "value, if it is a number or a truth value"),
            "text": ("VARCHAR", "value as text"),
            "origin": ("VARCHAR", "library with which the program read it; see capture.md"),
        },
    ),
    "loops": (
        "One row per loop of every run in which something was logged.",
        {
            "run": ("VARCHAR", "`runs.run`"),
            "path": ("VARCHAR", "names of the loops around it and its own: `epoch/step`"),
            "loop": ("VARCHAR", "its name"),
            "depth": ("BIGINT", "1 for an outermost loop"),
            "iterations": ("BIGINT", "the highest iteration number plus one"),
        },
    ),
    "points": (
        "One row per point that holds records.",
        {
            "run": ("VARCHAR", "`runs.run`"),
            "path": ("VARCHAR", "names of the loops: `epoch/step`; empty outside of loops"),
            "indices": ("BIGINT[]", "iteration numbers, outermost first"),
            "labels": ("VARCHAR", "values of the loops where they are not the numbers, as JSON"),
            "records": ("BIGINT", "number of records at the point"),
        },
    ),
    "records": (
        "One row per logged value, of runs and of replays. No value is left out.",
        {
            "run": ("VARCHAR", "`runs.run`"),
            "path": ("VARCHAR", "names of the loops of its point"),
            "indices": ("BIGINT[]", "iteration numbers of its point"),
            "labels": ("VARCHAR", "values of the loops where they are not the numbers, as JSON"),
            "name": ("VARCHAR", "the logged name; `$stdout` for printed lines"),
            "kind": (
                "VARCHAR",
                _KINDS,
            ),
            "number": ("DOUBLE", "the value, if its kind is float, int, long or bool"),
            "whole": ("BIGINT", "the exact value, if its kind is int or long"),
            "text": ("VARCHAR", "the value, if it is of another kind"),
            "origin": (
                "VARCHAR",
                (
                    "recorded; replayed (proved exact), unproved, redone (a first try) or not exact; or what "
                    "it was captured from, as capture.md says: wandb, mlflow, tensorboard, lightning, "
                    "transformers, keras, assigned, printed, logging, inner"
                ),
            ),
            "replay": ("VARCHAR", "`replays.replay`; null if recorded"),
            "attempt": ("INTEGER", "how often the run had been resumed before"),
            "process": ("VARCHAR", "start time and number of the process; sorts processes by time"),
            "seq": ("BIGINT", "order within the process"),
            "time": ("DOUBLE", "seconds since 1970"),
            "level": ("VARCHAR", "setup (outside all loops), outer or inner (any depth below)"),
            "version": (
                "VARCHAR",
                (
                    "the version that logged it: of the run or of the replay, with its probes; null if the run "
                    "had continued with another version by then"
                ),
            ),
            "source": ("VARCHAR", "file of the statement that logged it; `files.path`"),
            "line": ("INTEGER", "line of that statement, from 1 on"),
        },
    ),
    "checkpoints": (
        "One row per checkpoint.",
        {
            "checkpoint": ("VARCHAR", "id"),
            "run": ("VARCHAR", "`runs.run`"),
            "seq": ("BIGINT", "order within the run"),
            "point": ("VARCHAR", "point at which it was saved: `epoch=3`"),
            "edge": ("VARCHAR", "start or end of the iteration"),
            "complete": ("BOOLEAN", "whether a replay can start from it"),
            "missing": ("VARCHAR[]", "parts of the state that it lacks, each with the reason"),
            "bytes": ("BIGINT", "logical size"),
            "time": ("DOUBLE", "seconds since 1970"),
        },
    ),
    "replays": (
        "One row per replay of a part of a run.",
        {
            "replay": ("VARCHAR", "id"),
            "run": ("VARCHAR", "`runs.run`"),
            "version": ("VARCHAR", "the version that it ran, with its probes"),
            "started": ("DOUBLE", "seconds since 1970"),
            "ended": ("DOUBLE", "seconds since 1970; null while the replay is running"),
            "proved": ("BOOLEAN", "whether all compared values were equal to those of the run"),
            "verdict": ("VARCHAR", "exact, unproved, incomplete, not exact or redone"),
            "why": ("VARCHAR", "how many values were compared, or the first difference"),
            "redoes": ("VARCHAR", "the replay that it replaces, if there is one"),
            "names": ("VARCHAR[]", "the requested names"),
        },
    ),
}

EXAMPLES = {
    "projects": "select p.name, root, count(*) as runs from projects p join runs using (project) group by all",
    "runs": "select run, script, argv, ended - started as seconds from runs where status = 'finished'",
    "versions": "select run, version, parent from versions where run is not null order by run",
    "files": (
        "select version, count(*) as files, sum(length(text)) as characters, "
        "count(*) filter (text like '%rearview.log%') as files_that_log from files group by version"
    ),
    "arguments": "select name, text, origin, count(*) as runs from arguments group by all order by name",
    "loops": "select run, path, iterations from loops where depth = 1",
    "points": "select run, indices[1] as epoch, indices[2] as step, records from points where path = 'epoch/step'",
    "records": (
        "select r.name, r.level, r.source, r.line, "
        "trim(string_split(f.text, chr(10))[r.line]) as statement, count(*) as records "
        "from records r join files f on f.version = r.version and f.path = r.source "
        "group by all order by r.source, r.line"
    ),
    "checkpoints": "select run, count(*) as checkpoints, max(bytes) as largest from checkpoints group by run",
    "replays": "select names, verdict, count(*) as replays, sum(ended - started) as seconds from replays group by all",
    "setup_pivot": "select * from setup_pivot",
    "outer_pivot": "select run, max(epoch) as last_epoch from outer_pivot group by run",
    "inner_pivot": "select run, epoch, max(step) as last_step from inner_pivot group by all order by all",
    "full_pivot": (
        "select r.version, p.* from full_pivot p join runs r using (run) order by r.started, epoch, step"
    ),
}
"""An example query for each table and view, which docs/schema.md shows and a test runs."""

PAPER = {
    "ProjectID": ("runs.project, versions.project", "and `projects`"),
    "VersionID, its parent": ("versions.version, versions.parent", "a run is `runs.run`"),
    "Filename": ("files.path, records.source", ""),
    "Text": ("files.text", ""),
    "Args": ("runs.argv, arguments.text", "as typed, and as the program read them"),
    "LineNo": ("records.line", "in the text of `records.version`"),
    "Iteration": (
        "records.seq",
        "order of calls; the i-th of a name is `row_number() over (partition by run, name order by process, seq)`",
    ),
    "LogLevel": ("records.level", ""),
    "Epoch": ("records.indices", "`indices[1]`; loops may have any name, which is in `path`"),
    "Step": ("records.indices", "`indices[2]`, and so on for deeper loops"),
    "Type": ("records.kind", "of a stored value `value_kind(text)` and `value_dtype(text)`"),
    "Blob": ("records.text", "`value_oid(text)` names the object that holds the bytes"),
    "Name": ("records.name", ""),
    "Val": ("records.number, records.whole, records.text", ""),
}
"""Symbol in table 1 of FlorDB's paper -> (columns of Rearview's tables that hold it, note)."""

PIVOTS = {
    "setup_pivot": "One row per run: values that were logged outside all loops.",
    "outer_pivot": "One row per iteration of the outermost loops.",
    "inner_pivot": "One row per iteration of the loops inside those.",
    "pivot_N": "The same for loops N deep, for any N: `pivot_3`.",
    "full_pivot": "One row per point at any depth; outer values are repeated on inner rows.",
}

FUNCTIONS = {
    name: (f"CASE WHEN starts_with(value, '{{\"$object\":') THEN {sql} END", about)
    for name, sql, about in (
        ("value_kind", "json_extract_string(value, '$.kind')", "array, tensor, image or histogram"),
        (
            "value_dtype",
            "json_extract_string(value, '$.dtype')",
            "`float32` (tensor), `<f4` (array)",
        ),
        (
            "value_shape",
            "CAST(json_extract(value, '$.shape') AS BIGINT[])",
            "sizes, outermost first; of an image height and width; of a histogram its bins",
        ),
        ("value_bytes", "CAST(json_extract(value, '$.nbytes') AS BIGINT)", "bytes in the store"),
        (
            "value_oid",
            """json_extract_string(value, '$."$object"')""",
            "oid of the object that holds the bytes: equal content, equal oid",
        ),
    )
}
"""Name of an SQL function, whose argument is the text of a stored value -> (its SQL, its meaning)."""

_PAPER = """\
Everything that the relational model of FlorDB's paper (table 1) names can be asked for, joined as the picture shows.
"""

_FUNCTIONS = """\
A tensor, array, image, figure or histogram is a text in SQL, which describes the value and names the object \
of the store that holds it. These functions read the text, from a column of a pivoted view or from \
`records.text`; for any other text they return null: `SELECT epoch, value_shape(w), value_dtype(w) FROM full_pivot`.
"""

_PICTURE = """\
```mermaid
erDiagram
    projects ||--o{ runs : "project"
    projects ||--o{ versions : "project"
    versions |o--o{ versions : "parent"
    versions ||--o{ files : "version"
    versions ||--o{ runs : "version"
    runs ||--o{ arguments : "run"
    runs ||--o{ loops : "run"
    runs ||--o{ points : "run"
    points ||--o{ records : "run, path, indices"
    runs ||--o{ checkpoints : "run"
    runs ||--o{ replays : "run"
    replays |o--o{ records : "replay"
```
"""


_TYPED = """\
Columns of numbers, texts, truth values and bytes have these types. A list or dictionary is JSON text, and a \
whole number beyond 64 bits its digits. A name that was logged with values of several types (`1`, then \
`"abc"`) has a column of JSON text: `1`, `"abc"` with its quotes, so that no value is taken for another; what \
JSON cannot say has a marker, `{"$float": "nan"}`.

`history().table(...)` gives such values back as they were: in its rows, in `.pandas()` as a column of \
Python objects, and in `.polars()`, for columns of several types, as one of `pl.Object`. An Arrow column has \
one type, so `.arrow()` keeps the text; so does `history().sql(...)`, because the type of a computed \
column is not known. Arrays, tensors, images and histograms come back as what they were from both \
([values.md](values.md)).
"""


def markdown() -> str:
    """Return the text of docs/schema.md, which describes the tables."""
    out = [
        "# What SQL sees\n",
        _ASK,
        _PICTURE,
    ]
    for name, (about, columns) in TABLES.items():
        out += [f"## {name}\n", f"{about}\n", "| column | type | meaning |\n|---|---|---|"]
        out += [f"| {column} | {kind} | {text} |" for column, (kind, text) in columns.items()]
        out += ["", *_example(name)]
    out += [
        "## Pivoted views\n",
        _PIVOTED,
        "| view | rows |\n|---|---|",
    ]
    out += [f"| {name} | {about} |" for name, about in PIVOTS.items()]
    out += ["", *(line for name in PIVOTS if name in EXAMPLES for line in _example(name))]
    out += ["## FlorDB's relational model\n", _PAPER, "| in the paper | here | |\n|---|---|---|"]
    for symbol, (where, note) in PAPER.items():
        columns_here = ", ".join(f"`{column}`" for column in where.split(", "))
        out.append(f"| {symbol} | {columns_here} | {note} |")
    out += ["\n## Types\n", _TYPED]
    out += ["## Functions\n", _FUNCTIONS, "| function | returns |\n|---|---|"]
    out += [f"| {name}(value) | {about} |" for name, (_, about) in FUNCTIONS.items()]
    return "\n".join(out) + "\n"


def _example(name: str) -> list[str]:
    return ["```sql", _wrapped(EXAMPLES[name]), "```", ""]


def _wrapped(sql: str) -> str:
    """Return the query `sql` with a line break before each clause."""
    return re.sub(r" (?=(?:join|from|where|group by|order by) )", "\n", sql)


def load_runs(duck: Duck, run_records: RunRecords, project: str = "") -> None:
    """Create the SQL tables that every query needs: `own.runs`, `own.args`, `own.replays`.

    `project` is the id of the project's store.
    """
    facts = [column for column in _columns("runs") if column not in {"run", "project"}]
    runs = [
        {"ord": k, "run": run.id, "project": project, **{c: getattr(run, c) for c in facts}}
        for k, run in enumerate(run_records.runs)
    ]
    duck.load("own.runs", {"ord": "BIGINT", **_columns("runs")}, runs)
    values = _arguments(run_records)
    kinds: dict[str, set[str]] = {}
    for run_args in values.values():
        for name, (kind, _) in run_args.items():
            kinds.setdefault(name, set()).add(kind)
    columns = {
        fold(f"a:{name}"): TYPES[common_kind(arg_kinds)] for name, arg_kinds in kinds.items()
    }
    rows = (
        {"run": run, **{fold(f"a:{name}"): text for name, (_, text) in run_args.items()}}
        for run, run_args in values.items()
    )
    duck.load("own.args", {"run": "VARCHAR", **columns}, rows)
    ranks = {verdict: k for k, verdict in enumerate(ORIGINS)}
    replays = [
        {"replay": r.id, "run": r.run, "version": r.version, "started": r.started,
         "ended": r.ended, "proved": r.proved, "names": list(r.names), "ord": k,
         "verdict": r.proof.verdict, "why": r.proof.why, "redoes": r.redoes or None,
         "origin": r.proof.origin, "rank": ranks[r.proof.verdict]}
        for run_replays in run_records.replays.values()
        for k, r in enumerate(run_replays)
    ]  # fmt: skip
    internal_columns = {"ord": "BIGINT", "origin": "VARCHAR", "rank": "BIGINT"}
    duck.load("own.replays", {**internal_columns, **_columns("replays")}, replays)


def load_views(duck: Duck, run_records: RunRecords) -> None:
    """Create the SQL tables of docs/schema.md, except `projects`.

    `versions`, `files` and `checkpoints` are empty: they are filled when a query needs them.
    """
    numeric = {"float", "int", "long", "bool"}
    origins = {run.id: run.arg_origins for run in run_records.runs}
    rows = (
        {"run": run, "name": name, "kind": kind, "text": text,
         "origin": origins[run].get(name, ""),
         "number": _number(text) if kind in numeric else None}
        for run, run_args in _arguments(run_records).items()
        for name, (kind, text) in run_args.items()
    )  # fmt: skip
    duck.load("arguments", _columns("arguments"), rows)
    for name in ("versions", "files", "checkpoints"):
        duck.load(name, _columns(name), [])
    shown = ", ".join(_columns("runs"))
    duck.execute(f"CREATE VIEW runs AS SELECT {shown} FROM own.runs ORDER BY ord")
    duck.execute(f"CREATE VIEW replays AS SELECT {', '.join(_columns('replays'))} FROM own.replays")
    parts = [part for run_parts in run_records.parts.values() for part in run_parts]
    resumed = ", ".join(quoted(run.id) for run in run_records.runs if run.continued) or "NULL"
    computed = {
        "origin": ORIGIN,
        "replay": "CASE WHEN NOT starts_with(l.replay, '$') THEN l.replay END",
        "level": "CASE len(l.indices) WHEN 0 THEN 'setup' WHEN 1 THEN 'outer' ELSE 'inner' END",
        "version": "CASE WHEN r.replay IS NOT NULL THEN r.version "
        f"WHEN l.attempt = 0 OR l.run NOT IN ({resumed}) THEN o.version END",
    }
    columns = ", ".join(f"{computed.get(c, f'l.{c}')} AS {c}" for c in _columns("records"))
    duck.execute(
        f"CREATE VIEW records AS SELECT {columns} FROM ({long_sql(parts, with_source=True)}) l "
        "LEFT JOIN own.replays r ON l.run = r.run AND l.replay = r.replay "
        "LEFT JOIN own.runs o ON l.run = o.run"
    )
    for macro, (sql, _) in FUNCTIONS.items():
        duck.execute(f"CREATE MACRO {macro}(value) AS {sql}")
    duck.execute(
        "CREATE VIEW points AS SELECT run, path, indices, any_value(labels) AS labels, count(*) AS "
        "records FROM records GROUP BY run, path, indices"
    )
    duck.execute(
        "CREATE VIEW loops AS SELECT run, array_to_string(parts[1:depth], '/') AS path, "
        "parts[depth] AS loop, depth, max(indices[depth]) + 1 AS iterations FROM (SELECT run, "
        "indices, string_split(path, '/') AS parts, unnest(range(1, len(indices) + 1)) AS depth "
        "FROM (SELECT DISTINCT run, path, indices FROM records)) GROUP BY ALL"
    )


def _arguments(run_records: RunRecords) -> dict[str, dict[str, tuple[str, str | None]]]:
    return {
        run.id: {name: encode(convert(value)) for name, value in run.args.items()}
        for run in run_records.runs
    }


def load_project(duck: Duck, project: Project) -> None:
    """Create the SQL table `projects`, with one row for `project`."""
    row = {"project": store_id(project.store), "name": project.root.name, "root": str(project.root)}
    duck.load("projects", _columns("projects"), [row])


def load_versions(
    duck: Duck, run_records: RunRecords, versions: Versions | None, project: str, files: FileColumns
) -> None:
    """Fill the SQL table `versions` and, as far as `files` says, the SQL table `files`.

    `project` is the id of the project's store.
    """
    tree_by_ref = versions.versions_by_ref() if versions is not None else {}
    parents = versions.parents() if versions is not None else {}
    previous_versions = _versions_before(run_records)
    rows = []
    for ref, tree in tree_by_ref.items():
        run = ref.removeprefix("runs/") if ref.startswith("runs/") else None
        parent = previous_versions.get(run) if run is not None else parents.get(tree)
        rows.append({"version": tree, "run": run, "parent": parent, "project": project})
    duck.load("versions", _columns("versions"), rows)
    file_rows = []
    if files is not FileColumns.NONE and versions is not None:
        for tree in sorted(set(tree_by_ref.values())):
            texts = versions.files(tree) if files is FileColumns.TEXT else {}
            for path, oid in versions.hashes(tree).items():
                text = _text(texts.get(path))
                file_rows.append({"version": tree, "path": path, "hash": oid, "text": text})
    duck.load("files", _columns("files"), file_rows)


class FileColumns(Enum):
    """How much of the SQL table `files` a query needs: nothing, all columns but the texts, or all columns."""

    NONE = 0
    NAMES = 1
    TEXT = 2


def _versions_before(run_records: RunRecords) -> dict[str, str | None]:
    """Return a mapping: run id -> version of the last earlier run with another version, or None if there is none."""
    out: dict[str, str | None] = {}
    current_version: str | None = None
    previous_version: str | None = None
    for run in run_records.runs:
        if run.version and run.version != current_version:
            current_version, previous_version = run.version, current_version
        out[run.id] = previous_version if run.version else None
    return out


def _text(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def load_checkpoints(duck: Duck, checkpoints: Callable[[], Iterable[Checkpoint]] | None) -> None:
    """Fill the SQL table `checkpoints` with the checkpoints that the function `checkpoints` returns."""
    rows = (
        {"checkpoint": c.id, "run": c.run, "seq": c.seq, "point": str(c.point), "edge": c.edge,
         "complete": c.complete, "missing": [str(part) for part in c.missing], "bytes": c.nbytes, "time": c.time}
        for c in (checkpoints() if checkpoints is not None else ())
    )  # fmt: skip
    duck.load("checkpoints", _columns("checkpoints"), rows)


def _columns(table: str) -> dict[str, str]:
    return {name: kind for name, (kind, _) in TABLES[table][1].items()}


def _number(text: str | None) -> float | None:
    return None if text is None else float({"true": 1, "false": 0}.get(text, text))


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
