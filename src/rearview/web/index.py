"""Facts, arguments and a summary of every logged name of all runs, kept up to date for the page.

A question of the command line reads every run folder again. A page asks several times a second, so
this index looks at the modification times of the run folders and reads only what changed. What it
knows is kept in `.rearview/cache/page`, so that a large project opens at once the next time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import RearviewError, UsageError
from rearview.model import Run, RunEnd, RunStart, Status
from rearview.model.proof import TRUSTED, WITHHELD
from rearview.store.files import make_folder, publish
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.tables.connection import Duck, files, quoted
from rearview.store.tables.pivot import PLAIN, WINNERS, encode
from rearview.store.tables.record_files import LONG, RecordPart, Shelf, gather_records, long, plain
from rearview.store.tables.schema import load_runs
from rearview.store.tables.seal import Summary
from rearview.store.values import convert

FORMAT = 1
"""Number of the cache files; files of another number are made again."""
BATCH = 400
"""Runs whose records are summarized in one query."""
AT_ONCE = 2000
"""Changed runs that one refresh reads; the rest is left to the next, so that the page shows some."""
PATIENCE = 10.0
"""Seconds after which a query is interrupted."""
RUNS = {
    "ord": "BIGINT",
    "run": "VARCHAR",
    "name": "VARCHAR",
    "status": "VARCHAR",
    "started": "DOUBLE",
    "ended": "DOUBLE",
    "seconds": "DOUBLE",
    "script": "VARCHAR",
    "command": "VARCHAR",
    "version": "VARCHAR",
    "host": "VARCHAR",
    "exit_code": "BIGINT",
    "parent": "VARCHAR",
    "tags": "VARCHAR[]",
    "note": "VARCHAR",
    "replays": "BIGINT",
}
"""Columns of the table `page.runs`: facts of runs that the page can show, filter and sort by."""
STATS = (
    "run VARCHAR, name VARCHAR, path VARCHAR, n BIGINT, last DOUBLE, low DOUBLE, high DOUBLE, "
    "mean DOUBLE, kind VARCHAR, text VARCHAR, unproved BOOLEAN"
)
"""Columns of the table `page.stats`: one row per run and logged name."""
ARGS = {"run": "VARCHAR", "name": "VARCHAR", "number": "DOUBLE", "text": "VARCHAR"}
_NUMBERS = {"float", "int", "long", "bool"}

Signature = list[int]


@dataclass(slots=True)
class Entry:
    """What is known of one run, and the state of its files at that time."""

    signature: Signature
    run: Run
    revision: int = 0
    """Number of the refresh that read it last."""
    live: bool = False
    """It is running, or a file of its records is still written to."""


class _Kept(msgspec.Struct):
    """One run in the cache file."""

    signature: list[int]
    run: dict[str, Any]
    summaries: dict[str, tuple[int, int, Summary]]
    """By file name: size and modification time of a sealed file, and its checked summary."""


class _Cache(msgspec.Struct):
    format: int
    runs: dict[str, _Kept]


@dataclass
class Index:
    """All runs of a project as DuckDB tables, refreshed by reading only what changed."""

    project: Project
    revision: int = 0
    """Grows whenever something changed."""
    scanned: float = 0.0
    """Seconds that the last look at the run folders took."""
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    pending: int = 0
    """Changed runs that the next refresh will read."""

    def __post_init__(self) -> None:
        self.duck = Duck(self.project.store)
        self.shelf = Shelf()
        self._runs = Runs(self.project)
        self.lock = threading.RLock()
        self.stale = True
        self._unsaved = 0
        self._unread: dict[str, Signature] = {}
        self._summaries: dict[str, dict[str, tuple[int, int, Summary]]] = {}
        columns = ", ".join(f"{name} {kind}" for name, kind in RUNS.items())
        args = ", ".join(f"{name} {kind}" for name, kind in ARGS.items())
        self.duck.execute(
            f"CREATE TABLE own.live ({LONG}); CREATE SCHEMA page; "
            f"CREATE TABLE page.runs ({columns}); CREATE TABLE page.stats ({STATS}); "
            f"CREATE TABLE page.args ({args})"
        )

    def close(self) -> None:
        """Give memory and temporary files back."""
        with self.lock:
            if self._unsaved:
                self._save()
            self.duck.close()

    def refresh(self) -> list[str]:
        """Read what changed since the last time, the newest runs first; return the runs that did.

        At most `AT_ONCE` are read; `pending` says how many are left.
        """
        with self.lock:
            begun = time.monotonic()
            first = not self.revision
            if first:
                self._load()
            gone: set[str] = set()
            if not self._unread:
                seen = self._look()
                gone = self.entries.keys() - seen.keys()
                self._unread = {
                    run: signature
                    for run, signature in sorted(seen.items())
                    if (known := self.entries.get(run)) is None
                    or known.signature != signature
                    or (known.live and self._moved(known))
                }
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

    def _look(self) -> dict[str, Signature]:
        """Return the state of the files of every run, by `stat` alone."""
        found: dict[str, Signature] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.project.runs) as folders:
            for folder in folders:
                with contextlib.suppress(OSError):
                    signature = [
                        folder.stat().st_mtime_ns,
                        _stamp(f"{folder.path}/events.jsonl"),
                        _stamp(f"{folder.path}/replays.jsonl"),
                    ]
                    entry = self.entries.get(folder.name)
                    if entry is None and not _stamp(f"{folder.path}/run.json"):
                        continue
                    if entry is not None and entry.live:
                        signature += sorted(_records(folder.path))
                    found[folder.name] = signature
        return found

    def _moved(self, entry: Entry) -> bool:
        """Return True if a run that was running is not any more."""
        try:
            return self._runs.get(entry.run.id).status is not entry.run.status
        except RearviewError:
            return True

    def _apply(
        self, changed: Sequence[str], seen: dict[str, Signature], gone: Iterable[str]
    ) -> None:
        """Read the changed runs into the tables and forget those that are gone."""
        revision = self.revision + 1
        dropped = [*gone, *(run for run in changed if run in self.entries)]
        for run in gone:
            self.entries.pop(run)
            self.shelf.parts.pop(run, None)
        if dropped:
            chosen = ", ".join(map(quoted, dropped))
            for table in ("own.live", "page.runs", "page.stats", "page.args"):
                self.duck.execute(f"DELETE FROM {table} WHERE run IN ({chosen})")
        for run in changed:
            self.entries[run] = Entry(seen[run], self._read(run), revision)
        self.shelf.problems.clear()
        for group in _batches(changed):
            gather_records(self.project, self.duck, self.shelf, group, self._known)
            for run in group:
                parts = self.shelf.parts[run]
                entry = self.entries[run]
                growing = any(part.file is None for part in parts)
                entry.live = growing or entry.run.status is Status.RUNNING
                if not entry.live:  # sealing changed the folder
                    entry.signature = [_stamp(str(self._runs.folder(run))), *entry.signature[1:3]]
                self._remember(run, parts)
            self._summarize(group)
        self.problems = list(self.shelf.problems)
        self._insert(changed)
        self.stale = True

    def _read(self, run: str) -> Run:
        try:
            found = self._runs.get(run)
        except RearviewError as exc:  # damaged, or removed just now
            return Run(run, "", "", (), 0.0, Status.DEAD, damaged=str(exc))
        # of tens of thousands of runs only what the screens of many runs need stays in memory
        return replace(found, facts=RunStart(), end=RunEnd(loops=found.end.loops))

    def _insert(self, changed: Sequence[str]) -> None:
        """Write the facts and arguments of the changed runs into their tables."""
        order = sorted(self.entries, key=lambda run: (self.entries[run].run.started, run))
        place = {run: k for k, run in enumerate(order)}
        rows: list[dict[str, Any]] = []
        args: list[dict[str, Any]] = []
        for run in changed:
            one = self.entries[run].run
            took = None if one.ended is None else one.ended - one.started
            facts = {name: getattr(one, name) for name in RUNS if hasattr(one, name)}
            facts |= {"ord": place[run], "run": run, "seconds": took, "status": one.status.value}
            facts |= {"command": " ".join((one.script, *one.argv)), "tags": list(one.tags)}
            facts["replays"] = len(self.shelf.replays.get(run, ()))
            rows.append(facts)
            args += _arguments(one)
        if not rows:
            return
        self.duck.load("page.more", RUNS, rows)
        self.duck.execute("INSERT INTO page.runs SELECT * FROM page.more; DROP TABLE page.more")
        if args:
            self.duck.load("page.more", ARGS, args)
            self.duck.execute(
                "INSERT INTO page.args SELECT * FROM page.more ORDER BY name; DROP TABLE page.more"
            )
        if len(rows) < len(self.entries):  # earlier runs may have moved
            self.duck.load(
                "page.more",
                {"run": "VARCHAR", "ord": "BIGINT"},
                [{"run": run, "ord": k} for run, k in place.items()],
            )
            self.duck.execute(
                "UPDATE page.runs SET ord = more.ord FROM page.more WHERE more.run = runs.run AND "
                "runs.ord <> more.ord; DROP TABLE page.more"
            )

    def _summarize(self, runs: Sequence[str]) -> None:
        """Write the last, lowest, highest and mean value of each name of some runs into `page.stats`."""
        load_replays(self.duck, self.shelf, runs)
        simple: list[RecordPart] = []
        ranked: list[RecordPart] = []
        for run in runs:
            parts = self.given_out(run)
            (simple if plain(parts) else ranked).extend(parts)
        for parts, form, order in (
            (simple, PLAIN, "seq"),
            (ranked, WINNERS, "indices, process, seq"),
        ):
            if parts:
                source = form.format(source=long(parts))
                self.duck.execute(f"INSERT INTO page.stats {_stats(source, order)}")

    def given_out(self, run: str) -> list[RecordPart]:
        """Return the parts of a run's records that tables may show: all but those not exact."""
        origins = {replay.id: replay.proof.origin for replay in self.shelf.replays.get(run, ())}
        return [
            part
            for part in self.shelf.parts.get(run, ())
            if part.summary.replay is None or origins.get(part.summary.replay) not in WITHHELD
        ]

    def _known(self, file: Path) -> Summary | None:
        found = self._summaries.get(file.parent.name, {}).get(file.name)
        if found is None:
            return None
        about = file.stat()
        return found[2] if found[:2] == (about.st_size, about.st_mtime_ns) else None

    def _remember(self, run: str, parts: Sequence[RecordPart]) -> None:
        kept = {}
        for part in parts:
            if part.file is not None:
                about = part.file.stat()
                kept[part.file.name] = (about.st_size, about.st_mtime_ns, part.summary)
        self._summaries[run] = kept

    @property
    def _folder(self) -> Path:
        return self.project.cache / "page"

    def _save(self) -> None:
        """Write what is known of runs that have ended to the cache; a store may be read-only."""
        kept = {
            run: _Kept(entry.signature, msgspec.to_builtins(entry.run), self._summaries[run])
            for run, entry in self.entries.items()
            if not entry.live
        }
        with contextlib.suppress(OSError):
            make_folder(self._folder)
            # the table first: an index that names runs without their rows would hide values
            stats = self._folder / f".stats.{os.getpid()}.parquet"
            self.duck.execute(
                f"COPY (SELECT * FROM page.stats ORDER BY name, run) TO {quoted(stats)} "
                "(FORMAT parquet, COMPRESSION zstd)"
            )
            stats.replace(self._folder / "stats.parquet")
            stamp = _stamp(str(self._folder / "stats.parquet"))
            data = msgspec.msgpack.encode({"stamp": stamp, "cache": _Cache(FORMAT, kept)})
            publish(self._folder / "runs.msgpack", data, durable=False)

    def _load(self) -> None:
        """Take what the cache knows; what is not there or damaged is read again."""
        try:
            data = (self._folder / "runs.msgpack").read_bytes()
            found = msgspec.msgpack.decode(data, type=_File)
            stats = self._folder / "stats.parquet"
            if found.cache.format != FORMAT or found.stamp != _stamp(str(stats)):
                return
            self.duck.execute(
                f"INSERT INTO page.stats SELECT * FROM read_parquet({files([stats])})"
            )
            entries = {
                run: Entry(kept.signature, msgspec.convert(kept.run, Run))
                for run, kept in found.cache.runs.items()
            }
        except Exception:  # a cache of any sort of damage is made again
            self.duck.execute("DELETE FROM page.stats")
            return
        for run, kept in found.cache.runs.items():
            self._summaries[run] = kept.summaries
            folder = self._runs.folder(run)
            self.shelf.parts[run] = [
                RecordPart(folder / name, summary, size)
                for name, (size, _, summary) in kept.summaries.items()
            ]
            replayed = any(part.summary.replay for part in self.shelf.parts[run])
            self.shelf.replays[run] = self._runs.replays(run) if replayed else []
        known = set(entries)
        self.duck.load("page.more", {"run": "VARCHAR"}, [{"run": run} for run in known])
        self.duck.execute(
            "DELETE FROM page.stats WHERE run NOT IN (SELECT run FROM page.more); "
            "DROP TABLE page.more"
        )
        self.entries = entries
        self._insert(list(entries))

    def relations(self) -> None:
        """Make sure that `own.runs`, `own.args` and `own.replays` hold what the entries do."""
        with self.lock:
            if self.stale:
                self.shelf.runs = self.runs()
                load_runs(self.duck, self.shelf)
                self.stale = False

    def runs(self) -> list[Run]:
        """Return all runs in the order they started."""
        found = (entry.run for entry in self.entries.values())
        return sorted(found, key=lambda run: (run.started, run.id))

    def ask(self, sql: str, *, patience: float | None = None) -> Any:
        """Run one question on a cursor of its own; it is interrupted if it takes too long."""
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
            said = str(exc).strip().partition("\n")[0]
            raise UsageError(f"The question cannot be answered: {said}", slug="sql") from exc
        finally:
            timer.cancel()


class _File(msgspec.Struct):
    stamp: int
    cache: _Cache


def load_replays(duck: Duck, shelf: Shelf, runs: Sequence[str]) -> None:
    """Make `own.replays` for some runs: what decides between several values of one point."""
    some = Shelf(replays={run: shelf.replays.get(run, []) for run in runs})
    load_runs(duck, some)


def _stats(source: str, order: str) -> str:
    """Return the SQL of one row per run and name over records of which none compete."""
    finite = "FILTER (isfinite(number))"
    trusted = ", ".join(map(quoted, sorted(TRUSTED)))
    paths = f"""SELECT run, name, path, count(*) AS n, last(number ORDER BY {order}) AS last,
      min(number) {finite} AS low, max(number) {finite} AS high, sum(number) {finite} AS total,
      count(number) {finite} AS counted, last(kind ORDER BY {order}) AS kind,
      left(last(text ORDER BY {order}), 400) AS text, bool_or(origin NOT IN ({trusted})) AS unproved
      FROM ({source}) WHERE name[1] <> '$' GROUP BY run, name, path"""
    return f"""SELECT run, name, arg_max(path, n) AS path, sum(n) AS n, arg_max(last, n) AS last,
      min(low) AS low, max(high) AS high, sum(total) / nullif(sum(counted), 0) AS mean,
      arg_max(kind, n) AS kind, arg_max(text, n) AS text, bool_or(unproved) AS unproved
      FROM ({paths}) GROUP BY run, name ORDER BY name, run"""


def _arguments(run: Run) -> Iterator[dict[str, Any]]:
    for name, value in run.args.items():
        kind, text = encode(convert(value))
        number = None
        if kind in _NUMBERS and text is not None:
            number = float({"true": 1, "false": 0}.get(text, text))
        yield {"run": run.id, "name": name, "number": number, "text": text}


def _batches(runs: Sequence[str]) -> Iterator[list[str]]:
    for k in range(0, len(runs), BATCH):
        yield list(runs[k : k + BATCH])


def _stamp(path: str) -> int:
    try:
        about = os.stat(path)  # noqa: PTH116 - two hundred thousand times a look
    except OSError:
        return 0
    return about.st_mtime_ns


def _records(folder: str) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for file in found:
            if file.name.startswith("records-"):
                about = file.stat()
                yield about.st_mtime_ns ^ about.st_size
