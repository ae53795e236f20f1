"""Facts, arguments and a summary of every logged name of all runs, kept up to date for the page.

A command reads every run folder again. A page asks several times a second, so this index looks at the
modification times of the run folders and reads only the runs that changed. It keeps its tables in
`.rearview/cache/page`, so that a large project opens at once the next time.

Each run has a number here, `id`: a join of a hundred thousand runs by number is several times faster
than by name. A column that a page filtered, sorted or grouped by stays a column of `page.runs`.
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
from rearview.store.tables.connection import Duck, quoted
from rearview.store.tables.convert_to_parquet import Summary
from rearview.store.tables.pivot import RANKED, UNRANKED, encode
from rearview.store.tables.record_files import (
    LONG,
    RecordPart,
    RunRecords,
    gather_records,
    long_sql,
    needs_no_ranking,
)
from rearview.store.tables.schema import load_runs
from rearview.store.values_as_json import convert
from rearview.web.run_index_tables import (
    COLUMNS,
    GIVEN,
    INDEXED_RUNS,
    RUNS,
    SUMMARIES,
    Entry,
    IndexCache,
    Signature,
    Summaries,
)

BATCH = 400
"""Runs whose records are summarized in one query."""
AT_ONCE = 2000
"""Most changed runs that one refresh reads. The page shows them while later refreshes read the others."""
PATIENCE = 10.0
"""Seconds after which a query is interrupted."""
SLICE = 8_000
"""Most ended runs whose folders one refresh checks; if there are more, each refresh checks the next part."""
SETTLED = 2_000_000_000
"""Nanoseconds after a modification time from which an unchanged time proves that no file was added to the folder."""
MOST_COLUMNS = 160
"""Columns of arguments and logged names that `page.runs` holds at once."""
_SEARCHED = ("run", "name", "command", "note", "status", "version", "host")
_NUMBERS = {"float", "int", "long", "bool"}

Column = tuple[str, str, str]
"""Table, name and value of a column of `page.runs`: `("summaries", "loss", "last")`."""


@dataclass
class Index:
    """All runs of a project as DuckDB tables, refreshed by reading only what changed."""

    project: Project
    revision: int = 0
    """Grows whenever something changed."""
    scanned: float = 0.0
    """Seconds that the last refresh took."""
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    pending: int = 0
    """Changed runs that the next refresh will read."""

    def __post_init__(self) -> None:
        self.duck = Duck(self.project.store)
        self.run_records = RunRecords()
        self._runs = Runs(self.project)
        self.lock = threading.RLock()
        """Held while the store is read, and while `own` tables of some runs are used."""
        self._changing = threading.Lock()
        """Held while the tables of `page` are changed, which takes milliseconds."""
        self._cache = IndexCache(self.project.cache / "page")
        self._unsaved = 0
        self._loaded = False
        self._unread: dict[str, Signature] = {}
        self._next_id = self._added = self._part = 0
        self._columns: dict[Column, str] = {}
        for table, columns in (("runs", INDEXED_RUNS), ("given", GIVEN), ("summaries", SUMMARIES)):
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
        """Write the cache, and release memory and temporary files."""
        with self.lock:
            if self._unsaved:
                self._save()
            self.duck.close()

    def refresh(self, certain: Collection[str] = ()) -> list[str]:
        """Read the runs that changed since the last refresh, the newest first; return their ids.

        It reads at most `AT_ONCE` runs; `pending` is the number that are left. Each refresh looks at new
        runs, runs in progress and the runs in `certain`, and at a part of many thousand ended runs.
        """
        with self.lock:
            begun = time.monotonic()
            first = not self.revision
            if not self._loaded:
                self._load()
                self._loaded = True
            gone: set[str] = set()
            if not self._unread:
                seen = self._look(certain)
                gone = self.entries.keys() - seen.keys()
                changes = [
                    (run, signature)
                    for run, signature in seen.items()
                    if (known := self.entries.get(run)) is None
                    or known.signature != signature
                    or (known.live and self._moved(known))
                ]
                self._unread = dict(sorted(changes))
            changed = list(self._unread)[-AT_ONCE:]
            seen = {run: self._unread.pop(run) for run in changed}
            self.pending = len(self._unread)
            if changed or gone or first:
                self._apply(changed, seen, gone)
                self.revision += 1
                self._unsaved += len(changed)
                if not self.pending and self._unsaved > BATCH:
                    self._save()
                    self._unsaved = 0
            self.scanned = time.monotonic() - begun
            return [*changed, *gone]

    def _look(self, certain: Collection[str] = ()) -> dict[str, Signature]:
        """Return the state of the files of every run, by `stat` alone."""
        signatures: dict[str, Signature] = {}
        settled = time.time_ns() - SETTLED
        parts = max(1, -(-len(self.entries) // SLICE))
        self._part = (self._part + 1) % parts
        root = str(self.project.runs)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(root)  # noqa: PTH208 - many thousand names, and no path is needed of most
        for name in names:
            entry = self.entries.get(name)
            path = f"{root}/{name}"
            if entry is None:
                if _stamp(f"{path}/run.json"):
                    signatures[name] = _signature(path)
                continue
            known = entry.signature
            if not entry.live and entry.id % parts != self._part and name not in certain:
                signatures[name] = known
                continue
            at = _stamp(path)
            if not at:
                continue  # removed just now
            if not entry.live and known[0] == at < settled:
                # no file was added, so a file that did not exist does not exist now
                events = _stamp(f"{path}/events.jsonl") if known[1] else 0
                replays = _stamp(f"{path}/replays.jsonl") if known[2] else 0
                signatures[name] = (at, events, replays)
                continue
            live = sorted(_records(path)) if entry.live else ()
            signatures[name] = (*_signature(path), *live)
        return signatures

    def _moved(self, entry: Entry) -> bool:
        """Return True if the status of a running run has changed."""
        try:
            return self._runs.get(entry.run.id).status is not entry.run.status
        except RearviewError:
            return True

    def _apply(
        self, changed: Sequence[str], seen: dict[str, Signature], gone: Iterable[str]
    ) -> None:
        """Read the changed runs into the tables, and remove the runs that are gone."""
        revision = self.revision + 1
        dropped = [self.entries[run].id for run in (*gone, *changed) if run in self.entries]
        again = [run for run in (*gone, *changed) if run in self.entries]
        if again:
            chosen = ", ".join(map(quoted, again))
            self.duck.execute(f"DELETE FROM own.live WHERE run IN ({chosen})")
        fresh: dict[str, Entry] = {}
        for run in changed:
            known = self.entries.get(run)
            if known is None:
                self._next_id += 1
            fresh[run] = Entry(
                known.id if known is not None else self._next_id,
                seen[run],
                self._read(run),
                known.sealed() if known is not None else {},
                revision,
            )
        self.run_records.problems.clear()
        self.duck.execute(
            f"CREATE OR REPLACE TABLE own.summarized ({', '.join(f'{n} {k}' for n, k in SUMMARIES.items())})"
        )
        for group in _batches(changed):
            # with tens of thousands of runs, only those on a screen keep their records
            self.run_records.runs = [fresh[run].run for run in group]
            gather_records(
                self.project,
                self.duck,
                self.run_records,
                group,
                lambda file: self._known(fresh, file),
            )
            for run in group:
                self._look_again(run, fresh[run])
            self._summarize(group, fresh)
        self.problems = list(self.run_records.problems)
        rows, args = self._facts(fresh)
        with self._changing:
            self._exchange(dropped, rows, args)
        for run in gone:
            self.entries.pop(run)
            self.run_records.parts.pop(run, None)
            self.run_records.replays.pop(run, None)
        for run, entry in fresh.items():
            about = entry.run
            # only the facts that screens of many runs need stay in memory
            entry.about = replace(about, facts=RunStart(), end=RunEnd(loops=about.end.loops))
            self.entries[run] = entry
        self.run_records.runs = []
        for run in [run for run, entry in fresh.items() if not entry.live][:-BATCH]:
            self.run_records.parts.pop(run, None)
            kept = fresh[run].kept()  # encoded, they take a tenth of the memory
            fresh[run].about, fresh[run].summaries = kept.run, kept.summaries

    def _look_again(self, run: str, entry: Entry) -> None:
        """Note the sealed files of a run that was just read, and the folder's time after the sealing."""
        parts = self.run_records.parts[run]
        entry.live = any(part.file is None for part in parts) or (
            entry.run.status is Status.RUNNING
        )
        if not entry.live:
            entry.signature = (_stamp(str(self._runs.folder(run))), *entry.signature[1:3])
        sealed: Summaries = {}
        for part in parts:
            if part.file is not None:
                about = part.file.stat()
                place = self._place(part.file)
                sealed[place] = (about.st_size, about.st_mtime_ns, part.summary)
        entry.summaries = sealed

    def _place(self, file: Path) -> str:
        """Return the name of a record file in its run folder; for any other file, its path in the store.

        Numbers that were read from printed lines have record files in the cache.
        """
        inside = file.parent.parent == self.project.runs
        return file.name if inside else str(file.relative_to(self.project.store))

    def _known(self, fresh: dict[str, Entry], file: Path) -> Summary | None:
        """Return the summary of a sealed file that has not changed since it was read."""
        sealed = fresh[file.parent.name].sealed().get(self._place(file))
        if sealed is None:
            return None
        about = file.stat()
        return sealed[2] if tuple(sealed[:2]) == (about.st_size, about.st_mtime_ns) else None

    def _read(self, run: str) -> Run:
        try:
            return self._runs.get(run)
        except RearviewError as exc:  # damaged, or removed just now
            return Run(run, "", "", (), 0.0, Status.DEAD, damaged=str(exc))

    def _facts(self, fresh: dict[str, Entry]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of the tables of runs and arguments."""
        rows: list[dict[str, Any]] = []
        args: list[dict[str, Any]] = []
        for run, entry in fresh.items():
            known_run = entry.run
            took = None if known_run.ended is None else known_run.ended - known_run.started
            facts = {name: getattr(known_run, name) for name in RUNS if hasattr(known_run, name)}
            facts |= {"id": entry.id, "run": run, "seconds": took, "status": known_run.status.value}
            facts |= {
                "command": " ".join((known_run.script, *known_run.argv)),
                "tags": list(known_run.tags),
            }
            facts["replays"] = len(self.run_records.replays.get(run, ()))
            texts = [str(facts[name] or "") for name in _SEARCHED]
            facts["words"] = "\n".join((*texts, *known_run.tags)).lower()
            rows.append(facts)
            args += ({"id": entry.id, **arg} for arg in _arguments(known_run))
        return rows, args

    def _exchange(
        self, dropped: Sequence[int], rows: Sequence[dict[str, Any]], args: Sequence[dict[str, Any]]
    ) -> None:
        """Replace the rows of the dropped runs by new ones, for all readers at the same moment."""
        self.duck.load("own.more_runs", INDEXED_RUNS, rows)
        self.duck.load("own.more_given", GIVEN, args)
        cells, joins = _joined(
            self._columns, {"given": "own.more_given", "summaries": "own.summarized"}
        )
        names = ", ".join([*INDEXED_RUNS, *self._columns.values()])
        base = ", ".join(f"r.{name}" for name in INDEXED_RUNS)
        self.duck.execute("BEGIN TRANSACTION")
        try:
            if dropped:
                chosen = ", ".join(map(str, dropped))
                self._count(f"page.summaries WHERE id IN ({chosen})", sign="-")
                for table in COLUMNS:
                    self.duck.execute(f"DELETE FROM page.{table} WHERE id IN ({chosen})")
            self._count("own.summarized")
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

    def _count(self, rows: str, *, sign: str = "") -> None:
        """Add `rows` of `page.summaries` to the counts in `page.names`, or subtract them."""
        self.duck.execute(
            f"INSERT INTO page.names SELECT name, kind, path, {sign}count(*), {sign}sum(CAST(unproved "
            f"AS BIGINT)), {sign}sum(CAST(asked AS BIGINT)), CASE WHEN kind = 'object' THEN any_value(text) END "
            f"FROM {rows} GROUP BY name, kind, path"
        )

    def columns(self, requested: Iterable[Column]) -> dict[Column, str]:
        """Return the columns of `page.runs` that hold these values; add the missing ones."""
        requested = list(dict.fromkeys(requested))
        with self._changing:
            missing = [column for column in requested if column not in self._columns]
            if missing:
                self._add(missing, keep=requested)
            return {column: self._columns[column] for column in requested}

    def _add(self, columns: Sequence[Column], keep: Sequence[Column]) -> None:
        """Add columns to `page.runs`; if there are too many, drop those that are not in `keep`."""
        cursor = self.duck.con.cursor()
        cursor.execute("BEGIN TRANSACTION")
        known = dict(self._columns)
        try:
            if len(known) + len(columns) > MOST_COLUMNS:
                for dropped in [dropped for dropped in known if dropped not in keep]:
                    cursor.execute(f"ALTER TABLE page.runs DROP COLUMN {known.pop(dropped)}")
            for table, name, value in columns:
                self._added += 1
                column = known[table, name, value] = f"k{self._added}"
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
        self._columns = known

    def _summarize(self, runs: Sequence[str], fresh: dict[str, Entry]) -> None:
        """Write the last, lowest, highest and mean value of each name of some runs into `own.summarized`."""
        load_replays(self.duck, self.run_records, runs)
        self.duck.load(
            "own.numbers",
            {"run": "VARCHAR", "id": "INTEGER"},
            [{"run": run, "id": fresh[run].id} for run in runs],
        )
        simple: list[RecordPart] = []
        ranked: list[RecordPart] = []
        for run in runs:
            parts = self._given_out(run)
            (simple if needs_no_ranking(parts) else ranked).extend(parts)
        for parts, form, order in (
            (simple, UNRANKED, "seq"),
            (ranked, RANKED, "indices, process, seq"),
        ):
            if parts:
                source = form.format(source=long_sql(parts))
                self.duck.execute(f"INSERT INTO own.summarized {_stats(source, order)}")

    def parts(self, run: str) -> list[RecordPart]:
        """Return the files of a run's records."""
        if run not in self.run_records.parts and run in self.entries:
            folder, store = self._runs.folder(run), self.project.store
            self.run_records.parts[run] = [
                RecordPart(store / place if "/" in place else folder / place, summary, size)
                for place, (size, _, summary) in self.entries[run].sealed().items()
            ]
        return self.run_records.parts.get(run, [])

    def replays(self, run: str) -> list[Replay]:
        """Return the replays of a run."""
        if run not in self.run_records.replays:
            self.run_records.replays[run] = self._runs.replays(run)
        return self.run_records.replays[run]

    def given_out(self, run: str) -> list[RecordPart]:
        """Return the parts of a run's records that tables may show: all except those of inexact replays."""
        if any(part.summary.replay is not None for part in self.parts(run)):
            self.replays(run)
        return self._given_out(run)

    def _given_out(self, run: str) -> list[RecordPart]:
        origins = {
            replay.id: replay.proof.origin for replay in self.run_records.replays.get(run, ())
        }
        return [
            part
            for part in self.run_records.parts.get(run, ())
            if part.summary.replay is None or origins.get(part.summary.replay) not in WITHHELD
        ]

    def _save(self) -> None:
        """Write the entries and tables of ended runs to the cache."""
        kept = {run: entry.kept() for run, entry in self.entries.items() if not entry.live}
        self._cache.save(self.duck, COLUMNS, kept)

    def _load(self) -> None:
        """Fill the tables from the cache. A refresh reads the runs that the cache does not have."""
        kept_runs = self._cache.load(self.duck, COLUMNS)
        if not kept_runs:
            return
        kept_ids = {kept.id for kept in kept_runs.values()}
        in_tables = {row[0] for row in self.duck.execute("SELECT id FROM page.runs").fetchall()}
        extra = in_tables - kept_ids  # such as runs that were running when the cache was written
        if extra:
            chosen = ", ".join(map(str, extra))
            for table in COLUMNS:
                self.duck.execute(f"DELETE FROM page.{table} WHERE id IN ({chosen})")
        self._count("page.summaries")
        self._next_id = max(in_tables, default=0)
        self.entries = {
            run: Entry(kept.id, kept.signature, kept.run, kept.summaries)
            for run, kept in kept_runs.items()
            if kept.id in in_tables
        }

    @contextlib.contextmanager
    def relations(self, runs: Sequence[str]) -> Iterator[list[Run]]:
        """Fill `own.runs`, `own.args` and `own.replays` with `runs` and hold them; yield the runs that exist."""
        with self.lock:
            chosen = [self.entries[run].run for run in runs if run in self.entries]
            for run in chosen:
                self.given_out(run.id)
            self.run_records.runs = chosen
            load_runs(
                self.duck, RunRecords(chosen, {run.id: self.replays(run.id) for run in chosen})
            )
            yield chosen

    def runs(self) -> list[Run]:
        """Return all runs in the order they started; slow for many thousands of them."""
        all_runs = (entry.run for entry in self.entries.values())
        return sorted(all_runs, key=lambda run: (run.started, run.id))

    def whole_run(self, run: str) -> Run:
        """Return all facts of a run, read from its folder."""
        return self._runs.get(run)

    def chosen(self, condition: str, *, limit: int | None = None) -> list[Run]:
        """Return the runs that fit a condition over `page.runs`, in the order they started."""
        last = f" LIMIT {limit}" if limit is not None else ""
        answer = self.ask(
            f"SELECT run FROM page.runs WHERE {condition} ORDER BY started DESC, run DESC{last}"
        ).fetchall()
        return [self.entries[run].run for (run,) in reversed(answer) if run in self.entries]

    def ask(self, sql: str, *, patience: float | None = None) -> Any:
        """Run one query on a separate cursor; interrupt it after `patience` seconds."""
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
    """Return the cells and the joins that add these columns to a table `r` of runs, as SQL."""
    cells, joins = [], []
    for k, ((table, name, value), column) in enumerate(columns.items()):
        cells.append(f", c{k}.v AS {column}")
        joins.append(
            f"LEFT JOIN (SELECT id, {value} AS v FROM {tables[table]} WHERE name = {quoted(name)}) "
            f"c{k} ON c{k}.id = r.id"
        )
    return "".join(cells), " ".join(joins)


def load_replays(duck: Duck, run_records: RunRecords, runs: Sequence[str]) -> None:
    """Fill `own.replays` with the replays of `runs`; queries use it to choose among several values of one point."""
    load_runs(duck, RunRecords(replays={run: run_records.replays.get(run, []) for run in runs}))


def _stats(source: str, order: str) -> str:
    """Return the SQL of one row per run and name; `source` has at most one record of each point."""
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
        about = os.stat(path)  # noqa: PTH116 - a hundred thousand times a look
    except OSError:
        return 0
    return about.st_mtime_ns


def _records(folder: str) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for file in entries:
            if file.name.startswith("records-"):
                about = file.stat()
                yield about.st_mtime_ns ^ about.st_size
