"""The records of all runs as DuckDB can read them: sealed files, and what is still written to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import RearviewError
from rearview.model import Run, Status
from rearview.store.lines import check_format
from rearview.store.project import Project
from rearview.store.runs import Replay, Runs
from rearview.store.tables.duck import Duck, files
from rearview.store.tables.seal import FORMAT, MARK, Summary, loaded, seal

LONG = (
    "run VARCHAR, process VARCHAR, attempt INTEGER, replay VARCHAR, seq BIGINT, time DOUBLE, "
    "path VARCHAR, indices BIGINT[], labels VARCHAR, name VARCHAR, kind VARCHAR, number DOUBLE, "
    "whole BIGINT, text VARCHAR"
)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of records and what it says about itself; `file` is None for the live table."""

    file: Path | None
    summary: Summary
    size: int = 0


@dataclass(slots=True)
class Shelf:
    """What there is to ask: runs, their replays, their parts. The table `own.live` holds open parts."""

    runs: list[Run] = field(default_factory=list)
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    pivoted: dict[str, Any] = field(default_factory=dict)
    """What `store.points` has of each run that was asked about."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, one sentence each."""


def gather(project: Project, con: Duck) -> Shelf:
    """Find all records, sealing what is complete; open files go into the table `own.live`."""
    runs = Runs(project)
    shelf = Shelf(runs.all())
    con.execute(f"CREATE OR REPLACE TABLE own.live ({LONG})")
    sealed: dict[Path, str] = {}
    for run in shelf.runs:
        folder = runs.folder(run.id)
        shelf.replays[run.id] = runs.replays(run.id) if (folder / "replays.jsonl").exists() else []
        shelf.parts[run.id] = []
        over = {replay.id for replay in shelf.replays[run.id] if replay.ended is not None}
        for file in sorted(folder.glob("records-*")):
            if file.suffix == ".parquet":
                sealed[file] = run.id
        for file in sorted(folder.glob("records-*.jsonl")):
            target = file.with_suffix(".parquet")
            if target in sealed:
                continue  # sealed, and then we died before the lines were removed
            try:
                if _complete(file, run, over):
                    # a store that cannot be written to can still be read
                    with contextlib.suppress(Exception):
                        sealed[seal(file, con)] = run.id
                        continue
                shelf.parts[run.id].append(_live(con, file))
            except FileNotFoundError:  # another reader has sealed it meanwhile
                if target.exists():
                    sealed[target] = run.id
            except RearviewError as exc:
                shelf.problems.append(str(exc))
    for file, summary in _summaries(con, sealed):
        shelf.parts[sealed[file]].append(Part(file, summary, file.stat().st_size))
    return shelf


def _complete(file: Path, run: Run, over: set[str]) -> bool:
    """Say whether nobody writes to a file any more."""
    pid, _, n = file.stem.removeprefix("records-").rpartition("-")
    if any(
        int(other.stem.rpartition("-")[2]) > int(n)
        for other in file.parent.glob(f"records-{pid}-*")
    ):
        return True  # its process went on in the next one
    with file.open("rb") as lines:
        origin = msgspec.json.decode(lines.readline() or b"{}").get("origin")
    return run.status is not Status.RUNNING if origin == "recorded" else origin in over


def _live(con: Duck, file: Path) -> Part:
    with loaded(con, file, "loading") as summary:
        con.execute("INSERT INTO own.live SELECT * FROM loading")
    return Part(None, summary)


def _summaries(con: Duck, sealed: Iterable[Path]) -> list[tuple[Path, Summary]]:
    out = []
    known = {str(file): file for file in sealed}
    if known:
        sql = f"SELECT file_name, value FROM parquet_kv_metadata({files(known)}) WHERE key = ?"
        for name, value in con.execute(sql, [MARK.encode()]).fetchall():
            check_format(msgspec.json.decode(value), FORMAT, known[name])
            out.append((known[name], msgspec.json.decode(value, type=Summary)))
    return sorted(out, key=lambda item: (item[1].process, item[0]))
