"""Claim: a table over 10^7 (10^8) records opens in seconds.

    PYTHONPATH=src python benchmarks/tables/run.py [records] [runs] [--sealed] [--peer]

Records are written as training writes them (five scalars a step, one an epoch), sealed once, then
asked for in a fresh `Tables` each time. With --sealed they are made by DuckDB as sealed files at
once, which is how 10^8 of them come to be in less than an hour. With --peer, the same records in one SQLite table are
pivoted by SQLite for comparison.
"""

import os
import platform
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rearview.model import Point, Step
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point
from rearview.store.runs import Runs
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.convert_to_parquet import LoadedRecords, seal, summaries
from rearview.store.tables.duckdb_connection import Duck

ARGS = [int(float(a)) for a in sys.argv[1:] if not a.startswith("-")]
RECORDS = ARGS[0] if ARGS else 10_000_000
RUNS = ARGS[1] if len(ARGS) > 1 else 10
NAMES = ("loss", "lr", "grad_norm", "tokens", "speed")
STEPS = 1_000


def record(project: Project) -> None:
    runs, dice = Runs(project), random.Random(0)
    calls = RECORDS // RUNS // len(NAMES)
    for k in range(RUNS):
        run = runs.reserve()
        folder = runs.start(run, {"script": "train.py", "args": {"lr": 0.1 * k}})
        out = RecordFile(folder, run)
        for i in range(calls):
            epoch, step = divmod(i, STEPS)
            at = encode_point(Point((Step("epoch", epoch), Step("step", step))))
            values = (dice.random(), 1e-3, dice.gauss(0, 1), i, dice.random())
            out.append(at, list(zip(NAMES, values, strict=True)))
            if step == STEPS - 1:
                out.append(encode_point(Point((Step("epoch", epoch),))), [("acc", dice.random())])
        out.close()
        runs.end(run, 0)


def record_sealed(project: Project) -> None:
    runs, duck = Runs(project), Duck(project.store)
    calls, part = RECORDS // RUNS // len(NAMES), 400_000
    for k in range(RUNS):
        run = runs.reserve()
        folder = runs.start(run, {"script": "train.py", "args": {"lr": 0.1 * k}})
        for n, begin in enumerate(range(0, calls, part)):
            end = min(calls, begin + part)
            duck.execute(f"""CREATE OR REPLACE TABLE own.loaded AS
                SELECT 0 AS file, '{run}' AS run, '{k:020d}-1' AS process, 0 AS attempt,
                  NULL::VARCHAR AS replay, i * 5 + j AS seq, 1.7e9 + i AS time, 'epoch/step' AS path,
                  [i // {STEPS}, i % {STEPS}] AS indices, NULL::VARCHAR AS labels, name,
                  CASE name WHEN 'tokens' THEN 'int' ELSE 'float' END AS kind,
                  CASE name WHEN 'tokens' THEN i WHEN 'lr' THEN 1e-3 ELSE random() END AS number,
                  CASE name WHEN 'tokens' THEN i END AS whole, NULL::VARCHAR AS "text"
                FROM range({begin}, {end}) t(i), (SELECT unnest({list(NAMES)}) AS name,
                  unnest(range({len(NAMES)})) AS j)
                UNION ALL BY NAME SELECT 0 AS file, '{run}' AS run, '{k:020d}-1' AS process,
                  0 AS attempt, NULL AS replay, i AS seq, 1.7e9 AS time, 'epoch' AS path,
                  [i // {STEPS}] AS indices, 'acc' AS name, 'float' AS kind, random() AS number,
                FROM range({begin}, {end}, {STEPS}) t(i)""")
            rows = (end - begin) * len(NAMES) + len(range(begin, end, STEPS))
            header = {"run": run, "process": f"{k:020d}-1", "attempt": 0, "replay": None}
            (summary,) = summaries(duck, [header], [rows], [0])
            seal(duck, [LoadedRecords(folder / f"records-1-{n}.jsonl", 0, summary)])
        runs.end(run, 0)


def timed(what: str, act, rounds: int = 5) -> None:
    times, works = [], []
    for _ in range(rounds):
        begun, worked = time.perf_counter(), time.process_time()
        found = act()
        times.append(time.perf_counter() - begun)
        works.append(time.process_time() - worked)
    work = statistics.median(works)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"| {what:58} | {statistics.median(times):8.2f} | {work:8.2f} | {found!s:>10} | {peak:6} |",
        flush=True,
    )


def peer(project: Project, folder: Path) -> None:
    source = sqlite3.connect(folder / "peer.db")
    source.execute("CREATE TABLE r (run, epoch INT, step INT, name TEXT, value REAL)")
    rows = Tables(project).sql(
        "SELECT run, indices[1] e, indices[2] s, name, number FROM records WHERE path = 'epoch/step'"
    )
    source.executemany("INSERT INTO r VALUES (?, ?, ?, ?, ?)", (tuple(r.values()) for r in rows))
    source.commit()
    cells = ", ".join(f"max(value) FILTER (WHERE name = '{name}')" for name in NAMES)
    timed(
        "SQLite: the same pivot, first 50 rows",
        lambda: len(
            source.execute(
                f"SELECT run, epoch, step, {cells} FROM r GROUP BY 1, 2, 3 LIMIT 50"
            ).fetchall()
        ),
        1,
    )


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as name:
        project = Project.create(Path(name))
        print(f"{RECORDS:.0e} records in {RUNS} runs; {platform.machine()}, {os.cpu_count()} cores")
        print(f"| {'what':58} | {'seconds':>8} | {'of CPU':>8} | {'rows':>10} | peak MB |")
        made = record_sealed if "--sealed" in sys.argv else record
        timed("record", lambda: made(project), 1)
        lines = sum(file.stat().st_size for file in project.runs.rglob("*.jsonl"))
        timed("first question: seal", lambda: Tables(project).refresh(), 1)
        sealed = sum(file.stat().st_size for file in project.runs.rglob("*.parquet"))
        print(f"lines {lines >> 20} MB, sealed {sealed >> 20} MB")
        timed("first table: pivot once", lambda: len(_first(project)), 1)
        kept = sum(file.stat().st_size for file in project.cache.rglob("*.parquet"))
        print(f"pivoted {kept >> 20} MB")
        timed("open: first 50 rows of all columns", lambda: len(_first(project)))
        timed(
            "first 50 rows where loss < 0.001 and epoch > 10",
            lambda: len(
                Tables(project).table(limit=50, where="loss < 0.001 AND epoch > 10").rows()
            ),
        )
        timed(
            "50 rows with the highest grad_norm",
            lambda: len(Tables(project).table(order=["-grad_norm"], limit=50).rows()),
        )
        timed("count rows", lambda: Tables(project).table().count())
        timed(
            "mean loss per run and epoch, by SQL",
            lambda: (
                Tables(project)
                .sql("SELECT run, epoch, avg(loss) FROM full_pivot GROUP BY ALL")
                .count()
            ),
        )
        timed("one name of the first run as arrow", lambda: _arrow(project), 3)
        if "--peer" in sys.argv:
            peer(project, Path(name))


def _first(project: Project) -> list:
    return Tables(project).table(limit=50).rows()


def _arrow(project: Project) -> int:
    first = Runs(project).ids()[0]
    return Tables(project).table(["loss"], runs=[first]).arrow().num_rows


if __name__ == "__main__":
    main()
