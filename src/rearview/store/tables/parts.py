"""The records of all runs as DuckDB can read them: sealed files, and what is still written to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.config import Settings
from rearview.errors import DamagedError, RearviewError
from rearview.model import Run
from rearview.store.alive import gone
from rearview.store.lines import check_format
from rearview.store.printed_records import printed_records
from rearview.store.project import Project
from rearview.store.records import has_end
from rearview.store.runs import Replay, Runs
from rearview.store.sealed import checked
from rearview.store.tables.duck import Duck, quoted
from rearview.store.tables.seal import Loaded, load, seal
from rearview.store.tables.summary import FORMAT, Name, Summary

_TAIL = 256
"""Bytes at the end of a file that hold its last line, if that says that it is the end."""
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
    hidden: frozenset[tuple[str, str]] = frozenset()
    """(path, name) of captured records that tables leave out, as the run has better ones."""

    def shown(self) -> Iterator[Name]:
        """Yield what tables show of it."""
        for found in self.summary.names:
            if (found.path, found.name) not in self.hidden:
                yield found


@dataclass(slots=True)
class Shelf:
    """What there is to ask: runs, their replays, their parts. The table `own.live` holds open parts."""

    runs: list[Run] = field(default_factory=list)
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    pivoted: dict[tuple[str, bool], Any] = field(default_factory=dict)
    """What `store.points` has of each run that was asked about."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, one sentence each."""


def gather(project: Project, con: Duck) -> Shelf:
    """Find all records, sealing what is complete; open files go into the table `own.live`."""
    runs = Runs(project)
    reads_lines = Settings.read(project.store).captures("printed")
    shelf = Shelf(runs.all())
    shelf.problems += [str(run.facts["damaged"]) for run in shelf.runs if "damaged" in run.facts]
    con.execute(f"CREATE OR REPLACE TABLE own.live ({LONG})")
    sealed: list[Path] = []
    complete: list[Path] = []
    growing: list[Path] = []
    for run in shelf.runs:
        folder = runs.folder(run.id)
        shelf.replays[run.id] = runs.replays(run.id) if (folder / "replays.jsonl").exists() else []
        shelf.parts[run.id] = []
        found = {file.name: file for file in folder.glob("records-*")}
        for file in found.values():
            if file.suffix == ".parquet":
                sealed.append(file)
            elif file.suffix == ".jsonl" and f"{file.stem}.parquet" in found:
                # a reader died between sealing and removing the lines
                _remove_sealed(file, complete)
            elif file.suffix == ".jsonl":
                try:
                    (complete if _complete(file) else growing).append(file)
                except FileNotFoundError:  # another reader has just sealed it
                    sealed.append(file.with_suffix(".parquet"))
        if reads_lines and (file := printed_records(project, run, folder)) is not None:
            (sealed if file.suffix == ".parquet" else complete).append(file)
    for batch in _batches(complete):
        sealed += _bring(con, shelf, batch, growing=False)
    for batch in _batches(growing):
        sealed += _bring(con, shelf, batch, growing=True)
    for file, summary in _summaries(con, shelf, dict.fromkeys(sealed)):
        shelf.parts[file.parent.name].append(Part(file, summary, file.stat().st_size))
    for parts in shelf.parts.values():
        parts.sort(key=lambda part: (part.summary.process, str(part.file)))
    return shelf


def _batches(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files in groups that fit into memory together."""
    batch: list[Path] = []
    size = 0
    for file in sorted(files):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
        batch.append(file)
        if size > 32 << 20 or len(batch) == 200:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bring(con: Duck, shelf: Shelf, batch: list[Path], *, growing: bool) -> list[Path]:
    """Seal a batch, or what cannot be sealed bring into memory; return the files that are sealed."""
    try:
        return _take(con, shelf, load(con, batch, growing=growing), growing=growing)
    except (RearviewError, OSError):
        pass  # one of them is damaged, or was sealed by another reader meanwhile: one by one
    out: list[Path] = []
    for file in batch:
        try:
            out += _take(
                con, shelf, load(con, [file], growing=growing, clean=True), growing=growing
            )
        except FileNotFoundError:
            out += [target] if (target := file.with_suffix(".parquet")).exists() else []
        except RearviewError as exc:
            if exc.slug == "store-newer":
                raise  # half a table would pretend
            shelf.problems.append(str(exc))
    return out


def _take(con: Duck, shelf: Shelf, loaded: list[Loaded], *, growing: bool) -> list[Path]:
    # what is damaged stays as it is, so that it can be looked at and repaired
    whole = [one for one in loaded if not growing and not one.lost]
    shelf.problems += [
        f"{one.file} has lost at least {one.lost} of its records: they are damaged. What is left of "
        "it is given; `rearview verify` says more."
        for one in loaded
        if one.lost
    ]
    sealed: list[Path] = []
    try:
        sealed = seal(con, whole) if whole else []
    except Exception as exc:  # a store that cannot be written to can still be read
        shelf.problems.append(f"Records could not be sealed: {exc}")
        whole = []
    for one in loaded:
        if one not in whole:
            live = f"SELECT * EXCLUDE (file) FROM own.loaded WHERE file = {one.number}"
            con.execute(f"INSERT INTO own.live {live}")
            shelf.parts[one.file.parent.name].append(Part(None, one.summary))
    return sealed


def _remove_sealed(file: Path, complete: list[Path]) -> None:
    """Remove lines that stand in a sealed file too; if that is damaged, they are sealed again."""
    try:
        checked(file.with_suffix(".parquet"))
        file.unlink()
    except DamagedError:
        complete.append(file)
    except OSError:
        pass  # a store that cannot be written to


def _complete(file: Path) -> bool:
    """Say whether nobody writes to a file any more: its writer said so, or is dead beyond doubt."""
    with file.open("rb") as lines:
        first = lines.readline()
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - _TAIL))
        if has_end(lines.read()):
            return True
    try:
        writer = msgspec.json.decode(first).get("writer") or {}
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return False
    return gone(writer, file.with_name("heartbeat"))


def _summaries(con: Duck, shelf: Shelf, sealed: Iterable[Path]) -> list[tuple[Path, Summary]]:
    """Return the sealed files that are intact; of the others a sentence goes to the problems."""
    out = []
    for file in sealed:
        try:
            out.append((file, summary_of(con, file)))
        except FileNotFoundError:
            continue  # set aside by a repair meanwhile
        except DamagedError as exc:
            shelf.problems.append(str(exc))
    return out


def summary_of(con: Duck, file: Path) -> Summary:
    """Return the summary of a sealed file, every byte of which was looked at; an error if damaged."""
    import duckdb

    found = checked(file)
    check_format(found, FORMAT, file)
    try:
        summary = msgspec.convert({"check": "", **found}, Summary)
        if not summary.check:  # without a checksum, that it can be read is all that can be known
            whole = f"SELECT count(*), bit_xor(hash(COLUMNS(*))) FROM read_parquet({quoted(file)})"
            rows = con.execute(whole).fetchone()[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, duckdb.Error) as exc:
        raise _unreadable(file, str(exc).splitlines()[0]) from exc
    if not summary.check and rows != summary.rows:
        raise _unreadable(file, f"it has {rows} records, not {summary.rows}")
    return summary


def _unreadable(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{file} cannot be read: {why}. `rearview verify --repair` sets it aside and says what is "
        "lost.",
        slug="records-damaged",
    )
