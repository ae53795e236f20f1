"""The page's index of all runs: their facts, arguments, and a summary of every logged name, kept up to date.

A command may read every run folder each time. But a page asks several times a second, so the index looks at the
modification times of the run folders and reads only the runs that changed. A cache of the index is in
`.rearview/cache/page`, so that the page of a large project opens at once the next time.

In the tables, each run has a number, `id`: a join of a hundred thousand runs by number is several times faster
than by the text id of the run. An argument or logged name by which a page filtered, sorted or grouped stays a
column of `page.runs`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rearview.errors import RearviewError, UsageError
from rearview.model import Run, RunEnd, RunStart, Status
from rearview.model.proof import TRUSTED, WITHHELD
from rearview.model.run import UNASKED
from rearview.store.project import Project
from rearview.store.runs import Replay, Runs
from rearview.store.tables.convert_to_parquet import Summary
from rearview.store.tables.duckdb_connection import Duck, quoted
from rearview.store.tables.pivot import RANKED, UNRANKED, encode
from rearview.store.tables.read_record_files import (
    LONG,
    RecordPart,
    RunRecords,
    gather_records,
    long_sql,
    needs_no_ranking,
)
from rearview.store.tables.schema import load_runs
from rearview.store.values_as_json import convert
from rearview.web.run_index_cache import (
    ARGUMENTS,
    COLUMNS,
    INDEXED_RUNS,
    RUNS,
    SUMMARIES,
    Entry,
    IndexCache,
    Signature,
    Summaries,
)

BATCH = 400
"""Number of runs whose records are summarized in one query."""
AT_ONCE = 2000
"""Maximum number of changed runs that one refresh reads. The page shows them while later refreshes read more."""
PATIENCE = 10.0
"""Default number of seconds after which a query is interrupted."""
SLICE = 8_000
"""Maximum number of ended runs whose folders one refresh checks; if there are more, refreshes take turns."""
SETTLED = 2_000_000_000
"""Nanoseconds: a folder changed more recently may change again without a new modification time."""
MOST_COLUMNS = 160
"""Maximum number of columns of arguments and logged names that `page.runs` has at once."""
_SEARCHED = ("run", "name", "command", "note", "status", "version", "host")
_NUMBERS = {"float", "int", "long", "bool"}

Column = tuple[str, str, str]
"""Source of a column of `page.runs`: table, name of the argument or logged name, column of this table.

For example `("summaries", "loss", "last")`.
"""


@dataclass
class Index:
    """All runs of a project as DuckDB tables; a refresh reads only the runs that changed."""

    project: Project
    revision: int = 0
    """Number that each refresh which finds changes increases by one."""
    scanned: float = 0.0
    """Seconds that the last refresh took."""
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    pending: int = 0
    """Number of changed runs that were not read yet and that later refreshes will read."""

    def __post_init__(self) -> None:
        self.duck = Duck(self.project.store)
        self.run_records = RunRecords()
        self._runs = Runs(self.project)
        self.lock = threading.RLock()
        """Lock to hold while the store is read, and while tables `own.…` are used, which hold only some runs."""
        self._changing = threading.Lock()
        """Lock to hold while the tables `page.…` are changed, which takes milliseconds."""
        self._cache = IndexCache(self.project.cache / "page")
        self._unsaved = 0
        self._loaded = False
        self._unread_signatures: dict[str, Signature] = {}
        self._next_id = self._columns_added = self._slice = 0
        self._columns: dict[Column, str] = {}
        for table, columns in (
            ("runs", INDEXED_RUNS),
            ("given", ARGUMENTS),
            ("summaries", SUMMARIES),
        ):
            shape = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            self.duck.execute(
                f"CREATE SCHEMA IF NOT EXISTS page; CREATE TABLE page.{table} ({shape})"
            )
        self.duck.execute(
            f"CREATE TABLE own.live ({LONG}); CREATE TABLE page.names (name VARCHAR, kind VARCHAR, "
            "path VARCHAR, runs BIGINT, unproved BIGINT, asked BIGINT, text VARCHAR); "
            "CREATE VIEW page.args AS SELECT r.run, g.* EXCLUDE (id) FROM page.given g JOIN "
            "(SELECT id, run FROM page.runs) r USING (id); "
            "CREATE VIEW page.stats AS SELECT r.run, s.* EXCLUDE (id) FROM page.summaries s JOIN "
            "(SELECT id, run FROM page.runs) r USING (id)"
        )

    def close(self) -> None:
        """Write the cache if runs were read since it was written; release memory and temporary files."""
        with self.lock:
            if self._unsaved:
                self._save()
            self.duck.close()

    def refresh(self, runs_to_check: Collection[str] = ()) -> list[str]:
        """Read the runs that changed since the last refresh; return the ids of changed and removed runs.

        A refresh reads at most `AT_ONCE` runs, the newest; `pending` is the number of runs still to read. Each
        refresh checks new runs, running runs and `runs_to_check`, and all ended runs or, if there are more than
        `SLICE`, a part of them.
        """
        with self.lock:
            began = time.monotonic()
            is_first_refresh = not self.revision
            if not self._loaded:
                self._load()
                self._loaded = True
            removed_runs: set[str] = set()
            if not self._unread_signatures:
                signatures = self._read_signatures(runs_to_check)
                removed_runs = self.entries.keys() - signatures.keys()
                unread_signatures = [
                    (run, signature)
                    for run, signature in signatures.items()
                    if (entry := self.entries.get(run)) is None
                    or entry.signature != signature
                    or (entry.live and self._status_changed(entry))
                ]
                self._unread_signatures = dict(sorted(unread_signatures))
            changed_runs = list(self._unread_signatures)[-AT_ONCE:]
            signatures = {run: self._unread_signatures.pop(run) for run in changed_runs}
            self.pending = len(self._unread_signatures)
            if changed_runs or removed_runs or is_first_refresh:
                self._apply(changed_runs, signatures, removed_runs)
                self.revision += 1
                self._unsaved += len(changed_runs)
                if not self.pending and self._unsaved > BATCH:
                    self._save()
                    self._unsaved = 0
            self.scanned = time.monotonic() - began
            return [*changed_runs, *removed_runs]

    def _read_signatures(self, runs_to_check: Collection[str] = ()) -> dict[str, Signature]:
        """Return run -> signature of its files (see `Signature`) for every run, without reading a file.

        For ended runs that this refresh does not check, this is the old signature.
        """
        signatures: dict[str, Signature] = {}
        settled_before = time.time_ns() - SETTLED
        parts = max(1, -(-len(self.entries) // SLICE))
        self._slice = (self._slice + 1) % parts
        root = str(self.project.runs)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(root)  # noqa: PTH208 - many thousand names, and few paths are needed
        for name in names:
            entry = self.entries.get(name)
            path = f"{root}/{name}"
            if entry is None:
                if _stamp(f"{path}/run.json"):
                    signatures[name] = _signature(path)
                continue
            old_signature = entry.signature
            if not entry.live and entry.id % parts != self._slice and name not in runs_to_check:
                signatures[name] = old_signature
                continue
            modified = _stamp(path)
            if not modified:
                continue  # the folder was removed after `os.listdir`
            if not entry.live and old_signature[0] == modified < settled_before:
                # no file was added to the folder: only check the two files that may have been appended to
                events = _stamp(f"{path}/events.jsonl") if old_signature[1] else 0
                replays = _stamp(f"{path}/replays.jsonl") if old_signature[2] else 0
                signatures[name] = (modified, events, replays)
                continue
            live = sorted(_records(path)) if entry.live else ()
            signatures[name] = (*_signature(path), *live)
        return signatures

    def _status_changed(self, entry: Entry) -> bool:
        """Return True if the status of the run differs from the one in `entry`, or if it cannot be read."""
        try:
            return self._runs.get(entry.run.id).status is not entry.run.status
        except RearviewError:
            return True

    def _apply(
        self,
        changed_runs: Sequence[str],
        signatures: dict[str, Signature],
        removed_runs: Iterable[str],
    ) -> None:
        """Read `changed_runs` into the tables and `self.entries`, and delete `removed_runs` from both."""
        revision = self.revision + 1
        old_ids = [
            self.entries[run].id for run in (*removed_runs, *changed_runs) if run in self.entries
        ]
        old_runs = [run for run in (*removed_runs, *changed_runs) if run in self.entries]
        if old_runs:
            run_list = ", ".join(map(quoted, old_runs))
            self.duck.execute(f"DELETE FROM own.live WHERE run IN ({run_list})")
        new_entries: dict[str, Entry] = {}
        for run in changed_runs:
            old_entry = self.entries.get(run)
            if old_entry is None:
                self._next_id += 1
            new_entries[run] = Entry(
                old_entry.id if old_entry is not None else self._next_id,
                signatures[run],
                self._read(run),
                old_entry.sealed() if old_entry is not None else {},
                revision,
            )
        self.run_records.problems.clear()
        self.duck.execute(
            f"CREATE OR REPLACE TABLE own.summarized ({', '.join(f'{n} {k}' for n, k in SUMMARIES.items())})"
        )
        for group in _batches(changed_runs):
            # one group at a time, so that the records of tens of thousands of runs are not in memory together
            self.run_records.runs = [new_entries[run].run for run in group]
            gather_records(
                self.project,
                self.duck,
                self.run_records,
                group,
                lambda file: self._unchanged_summary(new_entries, file),
            )
            for run in group:
                self._record_sealed_files(run, new_entries[run])
            self._summarize(group, new_entries)
        self.problems = list(self.run_records.problems)
        rows, args = self._facts(new_entries)
        with self._changing:
            self._replace_rows(old_ids, rows, args)
        for run in removed_runs:
            self.entries.pop(run)
            self.run_records.parts.pop(run, None)
            self.run_records.replays.pop(run, None)
        for run, entry in new_entries.items():
            run_facts = entry.run
            # to save memory, keep only those facts of a run that screens with many runs need
            entry.stored_run = replace(
                run_facts, facts=RunStart(), end=RunEnd(loops=run_facts.end.loops)
            )
            self.entries[run] = entry
        self.run_records.runs = []
        for run in [run for run, entry in new_entries.items() if not entry.live][:-BATCH]:
            self.run_records.parts.pop(run, None)
            encoded = new_entries[run].encoded()  # encoded, an entry takes a tenth of the memory
            new_entries[run].stored_run, new_entries[run].summaries = encoded.run, encoded.summaries

    def _record_sealed_files(self, run: str, entry: Entry) -> None:
        """Store in `entry` the summaries of a run's sealed record files, and whether the run is live.

        Reading a run may seal files, which changes its folder; so the signature of an ended run is updated.
        """
        parts = self.run_records.parts[run]
        entry.live = any(part.file is None for part in parts) or (
            entry.run.status is Status.RUNNING
        )
        if not entry.live:
            entry.signature = (_stamp(str(self._runs.folder(run))), *entry.signature[1:3])
        sealed: Summaries = {}
        for part in parts:
            if part.file is not None:
                file_stat = part.file.stat()
                file_key = self._file_key(part.file)
                sealed[file_key] = (file_stat.st_size, file_stat.st_mtime_ns, part.summary)
        entry.summaries = sealed

    def _file_key(self, file: Path) -> str:
        """Return the name of a record file in its run folder; for a file outside, its path relative to the store.

        Record files of numbers that were read from printed lines are outside, in the folder `cache`.
        """
        inside = file.parent.parent == self.project.runs
        return file.name if inside else str(file.relative_to(self.project.store))

    def _unchanged_summary(self, new_entries: dict[str, Entry], file: Path) -> Summary | None:
        """Return the summary of the sealed record file `file`, or None if it is new or changed since it was read."""
        sealed_file = new_entries[file.parent.name].sealed().get(self._file_key(file))
        if sealed_file is None:
            return None
        file_stat = file.stat()
        return (
            sealed_file[2]
            if tuple(sealed_file[:2]) == (file_stat.st_size, file_stat.st_mtime_ns)
            else None
        )

    def _read(self, run: str) -> Run:
        try:
            return self._runs.get(run)
        except RearviewError as exc:  # the run is damaged, or was removed a moment ago
            return Run(run, "", "", (), 0.0, Status.DEAD, damaged=str(exc))

    def _facts(
        self, new_entries: dict[str, Entry]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return (rows for the table of runs, rows for the table of arguments) of `new_entries`."""
        rows: list[dict[str, Any]] = []
        args: list[dict[str, Any]] = []
        for run, entry in new_entries.items():
            run_facts = entry.run
            seconds = None if run_facts.ended is None else run_facts.ended - run_facts.started
            facts = {name: getattr(run_facts, name) for name in RUNS if hasattr(run_facts, name)}
            facts |= {
                "id": entry.id,
                "run": run,
                "seconds": seconds,
                "status": run_facts.status.value,
            }
            facts |= {
                "command": " ".join((run_facts.script, *run_facts.argv)),
                "tags": list(run_facts.tags),
            }
            facts["replays"] = len(self.run_records.replays.get(run, ()))
            texts = [str(facts[name] or "") for name in _SEARCHED]
            facts["words"] = "\n".join((*texts, *run_facts.tags)).lower()
            rows.append(facts)
            args += ({"id": entry.id, **arg} for arg in _arguments(run_facts))
        return rows, args

    def _replace_rows(
        self, old_ids: Sequence[int], rows: Sequence[dict[str, Any]], args: Sequence[dict[str, Any]]
    ) -> None:
        """Delete the rows of the runs with `old_ids` from all tables, and insert `rows`, `args` and summaries.

        The summaries are those in `own.summarized`. All this is one transaction.
        """
        self.duck.load("own.more_runs", INDEXED_RUNS, rows)
        self.duck.load("own.more_given", ARGUMENTS, args)
        cells, joins = _joined(
            self._columns, {"given": "own.more_given", "summaries": "own.summarized"}
        )
        names = ", ".join([*INDEXED_RUNS, *self._columns.values()])
        base = ", ".join(f"r.{name}" for name in INDEXED_RUNS)
        self.duck.execute("BEGIN TRANSACTION")
        try:
            if old_ids:
                id_list = ", ".join(map(str, old_ids))
                self._add_to_counts(f"page.summaries WHERE id IN ({id_list})", sign="-")
                for table in COLUMNS:
                    self.duck.execute(f"DELETE FROM page.{table} WHERE id IN ({id_list})")
            self._add_to_counts("own.summarized")
            self.duck.execute(
                f"INSERT INTO page.runs ({names}) SELECT {base}{cells} FROM own.more_runs r {joins}"
            )
            self.duck.execute(
                "INSERT INTO page.given SELECT * FROM own.more_given ORDER BY name, id"
            )
            self.duck.execute(
                "INSERT INTO page.summaries SELECT * FROM own.summarized ORDER BY name, id"
            )
            self.duck.execute("COMMIT")
        except BaseException:
            self.duck.execute("ROLLBACK")
            raise

    def _add_to_counts(self, rows: str, *, sign: str = "") -> None:
        """Count the runs of each logged name in `rows`, the SQL of rows of summaries, and add this to `page.names`.

        If `sign` is "-", subtract it.
        """
        self.duck.execute(
            f"INSERT INTO page.names SELECT name, kind, path, {sign}count(*), {sign}sum(CAST(unproved "
            f"AS BIGINT)), {sign}sum(CAST(asked AS BIGINT)), CASE WHEN kind = 'object' THEN any_value(text) END "
            f"FROM {rows} GROUP BY name, kind, path"
        )

    def columns(self, requested: Iterable[Column]) -> dict[Column, str]:
        """Return source -> name of the column in `page.runs`; add the columns that `page.runs` does not have."""
        requested = list(dict.fromkeys(requested))
        with self._changing:
            missing_columns = [column for column in requested if column not in self._columns]
            if missing_columns:
                self._add_columns(missing_columns, keep=requested)
            return {column: self._columns[column] for column in requested}

    def _add_columns(self, columns: Sequence[Column], keep: Sequence[Column]) -> None:
        """Add columns to `page.runs`; if it would have more than `MOST_COLUMNS`, first drop those not in `keep`."""
        cursor = self.duck.con.cursor()
        cursor.execute("BEGIN TRANSACTION")
        columns_by_key = dict(self._columns)
        try:
            if len(columns_by_key) + len(columns) > MOST_COLUMNS:
                for unused_column in [
                    unused_column for unused_column in columns_by_key if unused_column not in keep
                ]:
                    cursor.execute(
                        f"ALTER TABLE page.runs DROP COLUMN {columns_by_key.pop(unused_column)}"
                    )
            for table, name, value in columns:
                self._columns_added += 1
                column = columns_by_key[table, name, value] = f"k{self._columns_added}"
                kind = "VARCHAR" if value == "text" else "DOUBLE"
                cursor.execute(
                    f"ALTER TABLE page.runs ADD COLUMN {column} {kind}; UPDATE page.runs SET "
                    f"{column} = f.{value} FROM page.{table} f WHERE f.name = {quoted(name)} AND "
                    "f.id = runs.id"
                )
            cursor.execute("COMMIT")
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        self._columns = columns_by_key

    def _summarize(self, runs: Sequence[str], new_entries: dict[str, Entry]) -> None:
        """Compute the last, lowest, highest and mean value of each name in `runs`; insert them in `own.summarized`."""
        load_replays(self.duck, self.run_records, runs)
        self.duck.load(
            "own.numbers",
            {"run": "VARCHAR", "id": "INTEGER"},
            [{"run": run, "id": new_entries[run].id} for run in runs],
        )
        simple: list[RecordPart] = []
        ranked: list[RecordPart] = []
        for run in runs:
            parts = self._shown_parts(run)
            (simple if needs_no_ranking(parts) else ranked).extend(parts)
        for parts, form, order in (
            (simple, UNRANKED, "seq"),
            (ranked, RANKED, "indices, process, seq"),
        ):
            if parts:
                source = form.format(source=long_sql(parts))
                self.duck.execute(f"INSERT INTO own.summarized {_stats(source, order)}")

    def parts(self, run: str) -> list[RecordPart]:
        """Return the record files of a run, each with a summary of its names."""
        if run not in self.run_records.parts and run in self.entries:
            folder, store = self._runs.folder(run), self.project.store
            self.run_records.parts[run] = [
                RecordPart(
                    store / file_key if "/" in file_key else folder / file_key, summary, size
                )
                for file_key, (size, _, summary) in self.entries[run].sealed().items()
            ]
        return self.run_records.parts.get(run, [])

    def replays(self, run: str) -> list[Replay]:
        """Return the replays of a run, read from its folder on first use."""
        if run not in self.run_records.replays:
            self.run_records.replays[run] = self._runs.replays(run)
        return self.run_records.replays[run]

    def shown_parts(self, run: str) -> list[RecordPart]:
        """Return the record files of a run, without files of replays that were not exact or that ran again."""
        if any(part.summary.replay is not None for part in self.parts(run)):
            self.replays(run)
        return self._shown_parts(run)

    def _shown_parts(self, run: str) -> list[RecordPart]:
        origins = {
            replay.id: replay.proof.origin for replay in self.run_records.replays.get(run, ())
        }
        return [
            part
            for part in self.run_records.parts.get(run, ())
            if part.summary.replay is None or origins.get(part.summary.replay) not in WITHHELD
        ]

    def _save(self) -> None:
        """Write the entries of ended runs, and the tables, to the cache."""
        cached_runs = {
            run: entry.encoded() for run, entry in self.entries.items() if not entry.live
        }
        self._cache.save(self.duck, COLUMNS, cached_runs)

    def _load(self) -> None:
        """Fill the tables and `self.entries` from the cache; `refresh` reads the runs that the cache does not have."""
        cached_runs = self._cache.load(self.duck, COLUMNS)
        if not cached_runs:
            return
        cached_ids = {cached_run.id for cached_run in cached_runs.values()}
        in_tables = {row[0] for row in self.duck.execute("SELECT id FROM page.runs").fetchall()}
        # the tables also have runs without an entry, which were running when the cache was written
        extra_ids = in_tables - cached_ids
        if extra_ids:
            id_list = ", ".join(map(str, extra_ids))
            for table in COLUMNS:
                self.duck.execute(f"DELETE FROM page.{table} WHERE id IN ({id_list})")
        self._add_to_counts("page.summaries")
        self._next_id = max(in_tables, default=0)
        self.entries = {
            run: Entry(cached_run.id, cached_run.signature, cached_run.run, cached_run.summaries)
            for run, cached_run in cached_runs.items()
            if cached_run.id in in_tables
        }

    @contextlib.contextmanager
    def relations(self, runs: Sequence[str]) -> Iterator[list[Run]]:
        """Lock the index while the body runs, with `runs` in `own.runs`, `own.args` and `own.replays`.

        Yield those of `runs` that exist.
        """
        with self.lock:
            existing_runs = [self.entries[run].run for run in runs if run in self.entries]
            for run in existing_runs:
                self.shown_parts(run.id)
            self.run_records.runs = existing_runs
            load_runs(
                self.duck,
                RunRecords(existing_runs, {run.id: self.replays(run.id) for run in existing_runs}),
            )
            yield existing_runs

    def runs(self) -> list[Run]:
        """Return all runs, oldest first; slow if there are many thousands."""
        all_runs = (entry.run for entry in self.entries.values())
        return sorted(all_runs, key=lambda run: (run.started, run.id))

    def whole_run(self, run: str) -> Run:
        """Return the run with all its facts, read from its folder; `entries` has only some of the facts."""
        return self._runs.get(run)

    def matching_runs(self, condition: str, *, limit: int | None = None) -> list[Run]:
        """Return the runs that meet an SQL condition over `page.runs`, oldest first; with `limit`, the newest ones."""
        last = f" LIMIT {limit}" if limit is not None else ""
        answer = self.ask(
            f"SELECT run FROM page.runs WHERE {condition} ORDER BY started DESC, run DESC{last}"
        ).fetchall()
        return [self.entries[run].run for (run,) in reversed(answer) if run in self.entries]

    def ask(self, sql: str, *, patience: float | None = None) -> Any:
        """Run one query and return a DuckDB cursor with the result; raise if it takes `patience` seconds or fails."""
        import duckdb

        cursor = self.duck.con.cursor()
        patience = PATIENCE if patience is None else patience
        timer = threading.Timer(patience, cursor.interrupt)
        timer.start()
        try:
            return cursor.execute(sql)
        except duckdb.InterruptException as exc:
            raise UsageError(
                f"The question took longer than {patience:g} seconds and was stopped. Ask for "
                "fewer runs or columns.",
                slug="sql",
            ) from exc
        except duckdb.Error as exc:
            message = str(exc).strip().partition("\n")[0]
            raise UsageError(f"The question cannot be answered: {message}", slug="sql") from exc
        finally:
            timer.cancel()


def _joined(columns: Mapping[Column, str], tables: Mapping[str, str]) -> tuple[str, str]:
    """Return two SQL texts that add `columns` to a query over a table `r` of runs: its cells, and its joins.

    `tables` has the name of the SQL table to use for each table named in `columns`.
    """
    cells, joins = [], []
    for k, ((table, name, value), column) in enumerate(columns.items()):
        cells.append(f", c{k}.v AS {column}")
        joins.append(
            f"LEFT JOIN (SELECT id, {value} AS v FROM {tables[table]} WHERE name = {quoted(name)}) "
            f"c{k} ON c{k}.id = r.id"
        )
    return "".join(cells), " ".join(joins)


def load_replays(duck: Duck, run_records: RunRecords, runs: Sequence[str]) -> None:
    """Fill the table `own.replays` with the replays of `runs`, for queries that must choose a value for a point.

    A point has several values if both the run and replays, or several replays, logged the name there.
    """
    load_runs(duck, RunRecords(replays={run: run_records.replays.get(run, []) for run in runs}))


def _stats(source: str, order: str) -> str:
    """Return the SQL query for the rows of `SUMMARIES`, one per run and logged name.

    `source` is the SQL of records, with at most one record per name and point; `order` sorts the records.
    """
    finite = "FILTER (isfinite(number))"
    trusted = ", ".join(map(quoted, sorted(TRUSTED)))
    unasked = ", ".join(map(quoted, sorted(UNASKED)))
    paths = f"""SELECT run, name, path, count(*) AS n, last(number ORDER BY {order}) AS last,
      min(number) {finite} AS low, max(number) {finite} AS high, sum(number) {finite} AS total,
      count(number) {finite} AS counted, last(kind ORDER BY {order}) AS kind,
      left(last(text ORDER BY {order}), 400) AS text, bool_or(origin NOT IN ({trusted})) AS unproved,
      bool_or(origin NOT IN ({unasked})) AS asked
      FROM ({source}) WHERE name[1] <> '$' GROUP BY run, name, path"""
    return f"""SELECT any_value(id) AS id, name, arg_max(path, n) AS path, sum(n) AS n,
      arg_max(last, n) AS last,
      min(low) AS low, max(high) AS high, sum(total) / nullif(sum(counted), 0) AS mean,
      arg_max(kind, n) AS kind, arg_max(text, n) AS text, bool_or(unproved) AS unproved,
      bool_or(asked) AS asked
      FROM ({paths}) p JOIN own.numbers USING (run) GROUP BY run, name"""


def _arguments(run: Run) -> Iterator[dict[str, Any]]:
    for name, value in run.args.items():
        kind, text = encode(convert(value))
        number = None
        if kind in _NUMBERS and text is not None:
            number = float({"true": 1, "false": 0}.get(text, text))
        yield {"name": name, "number": number, "text": text}


def _batches(runs: Sequence[str]) -> Iterator[list[str]]:
    for k in range(0, len(runs), BATCH):
        yield list(runs[k : k + BATCH])


def _signature(folder: str) -> Signature:
    return (_stamp(folder), *(_stamp(f"{folder}/{name}.jsonl") for name in ("events", "replays")))


def _stamp(path: str) -> int:
    try:
        file_stat = os.stat(path)  # noqa: PTH116 - called a hundred thousand times
    except OSError:
        return 0
    return file_stat.st_mtime_ns


def _records(folder: str) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for file in entries:
            if file.name.startswith("records-"):
                file_stat = file.stat()
                yield file_stat.st_mtime_ns ^ file_stat.st_size
