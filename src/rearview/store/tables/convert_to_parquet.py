"""Convert ("seal") finished record files from JSON lines to Parquet, with a summary of their content.

Processes that query records do this, never the training process. A sealed file has exactly the content of the
lines. The lines are removed only after the Parquet file was read back and compared.

The summary (`Summary`) is in the metadata of the Parquet file. It ends in `"check":"…"`: the XXH3 hash of the
whole file, computed with zeros in place of these 32 digits. Summaries of format 1 have no hash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rearview.durable_files import publish_file
from rearview.errors import DamagedError
from rearview.store.create_files import set_store_mode
from rearview.store.json_files import CHECKED
from rearview.store.records import RecordLine, scan
from rearview.store.tables.duckdb_connection import Duck, files, quoted

FORMAT = 3
"""Format of a summary. From format 2 on, it ends in the checksum of the file. From 3 on, records have `source` and `line`."""
PLACED = 3
"""First format of summaries whose files have the columns `source` and `line`."""
MARK = "rearview"
"""Key of the summary in the metadata of the Parquet file."""
NO_CHECK = "0" * 32
"""Placeholder in the summary for the checksum, until the checksum is computed."""
_KEY = b'"check":"'
_TAIL = struct.Struct("<I4s")
"""Last bytes of a Parquet file: the length of the metadata before them, and the magic number of Parquet."""
_ENTRY = b"\x18" + bytes([len(MARK)]) + MARK.encode() + b"\x18"
"""First bytes of the metadata entry that holds the summary; the length of the summary follows."""


class NameSummary(msgspec.Struct, frozen=True):
    """How many values one name has at one loop path in one file of records."""

    path: str
    """Names of the loops, joined by slashes; empty outside of loops."""
    name: str
    kinds: dict[str, int]
    """Kind, as in the SQL column `records.kind` -> number of values of this kind."""


class Summary(msgspec.Struct, frozen=True):
    """Summary of a sealed (Parquet) file of records, from which a table can be planned without reading the records."""

    format: int
    run: str
    process: str
    attempt: int
    replay: str | None
    rows: int
    unique: bool
    """Whether no name was logged twice at one point."""
    damaged: int
    """Number of records that were lost before the file was sealed; in files of format 1, the number of lines."""
    names: list[NameSummary]
    since: int = 0
    """Records of earlier attempts are ignored from this number on, because this attempt logged them again."""
    labels: dict[str, list[str]] = {}
    """Loop path -> kind of the values of each loop, "" if these are the iteration numbers."""
    check: str = NO_CHECK
    """Hash of the whole file, computed with `NO_CHECK` in its place; it must be the last field."""


def summaries(
    con: Duck, headers: Sequence[Mapping[str, Any]], rows: Sequence[int], damaged: Sequence[int]
) -> list[Summary]:
    """Return the summary of each file whose records are in the table `own.loaded`.

    `headers`, `rows` (number of records) and `damaged` have one item per file.
    """
    names: list[dict[tuple[str, str], dict[str, int]]] = [{} for _ in headers]
    sql = "SELECT file, path, name, kind, count(*) FROM own.loaded GROUP BY ALL ORDER BY min(seq), kind"
    for file, path, name, kind, number in con.execute(sql).fetchall():
        names[file].setdefault((path, name), {})[kind] = number
    distinct = (
        "SELECT file, count(DISTINCT hash(path, indices, name)) FROM own.loaded GROUP BY file"
    )
    unique = dict(con.execute(distinct).fetchall())
    labels = _labels(con)
    return [
        Summary(
            format=FORMAT,
            run=header["run"],
            process=header["process"],
            attempt=header["attempt"],
            replay=header["replay"],
            rows=rows[k],
            unique=unique.get(k, 0) == rows[k],
            damaged=damaged[k],
            names=[NameSummary(at, name, kinds) for (at, name), kinds in names[k].items()],
            labels=labels.get(k, {}),
        )
        for k, header in enumerate(headers)
    ]


def _labels(con: Duck) -> dict[int, dict[str, list[str]]]:
    """Return the kinds of loop values in `own.loaded` as a mapping: number of the file -> loop path -> kind per loop.

    A kind is `int`, `float` or `str`, or "" if the loop values are the iteration numbers.
    """
    out: dict[int, dict[str, list[str]]] = {}
    sql = """SELECT file, path, k, list(DISTINCT json_type(labels, '/' || k)) FROM (
      SELECT file, path, labels, unnest(range(len(indices))) AS k FROM own.loaded
      WHERE labels IS NOT NULL) GROUP BY ALL ORDER BY k"""
    for file, path, _, types in con.execute(sql).fetchall():
        present = set(types) - {None, "NULL"}
        are_integers = present <= {"UBIGINT", "BIGINT"}
        are_numbers = present <= {"UBIGINT", "BIGINT", "DOUBLE"}
        kind = ("int" if are_integers else "float" if are_numbers else "str") if present else ""
        out.setdefault(file, {}).setdefault(path, []).append(kind)
    return out


_EXACT = 2**53
_BIG = 16 << 20
"""Bytes of the buffer into which DuckDB reads one line; for longer lines, the buffer is made larger."""
_HEADERS = {
    "filename": "VARCHAR",
    "k": "INTEGER",
    "run": "VARCHAR",
    "process": "VARCHAR",
    "attempt": "INTEGER",
    "replay": "VARCHAR",
}

# the fields of a line, with their types in DuckDB
_LINE = (
    "{'l': 'VARCHAR[]', 'i': 'BIGINT[]', 'x': 'JSON[]', 's': 'BIGINT', 't': 'DOUBLE', "
    "'n': 'VARCHAR[]', 'v': 'JSON[]', 'f': 'VARCHAR', 'y': 'INTEGER'}"
)
_KIND = f"""CASE json_type(v)
    WHEN 'DOUBLE' THEN 'float'
    WHEN 'VARCHAR' THEN 'str'
    WHEN 'BOOLEAN' THEN 'bool'
    WHEN 'OBJECT' THEN CASE json_keys(v)[1]
      WHEN '$float' THEN 'float' WHEN '$int' THEN 'bigint' WHEN '$str' THEN 'str64'
      WHEN '$bytes' THEN 'bytes' WHEN '$repr' THEN 'repr' WHEN '$object' THEN 'object'
      ELSE 'json' END
    WHEN 'UBIGINT' THEN CASE WHEN CAST(v AS UBIGINT) <= {_EXACT} THEN 'int' ELSE 'long' END
    WHEN 'BIGINT' THEN CASE WHEN CAST(v AS BIGINT) >= -{_EXACT} THEN 'int' ELSE 'long' END
    ELSE 'null' END"""
_LONG = """
  SELECT file, run, process, attempt, replay, seq, time, path, indices, labels, name, kind,
    CASE kind WHEN 'float' THEN coalesce(TRY_CAST(v AS DOUBLE),
           CAST(json_extract_string(v, '/$float') AS DOUBLE))
         WHEN 'int' THEN CAST(v AS DOUBLE) WHEN 'long' THEN CAST(v AS DOUBLE)
         WHEN 'bool' THEN CASE WHEN v = 'true' THEN 1.0 ELSE 0.0 END END AS number,
    CASE WHEN kind IN ('int', 'long') THEN CAST(v AS BIGINT) END AS whole,
    CASE kind WHEN 'str' THEN json_extract_string(v, '$')
         WHEN 'bigint' THEN json_extract_string(v, '/$int')
         WHEN 'str64' THEN json_extract_string(v, '/$str')
         WHEN 'bytes' THEN json_extract_string(v, '/$bytes')
         WHEN 'repr' THEN json_extract_string(v, '/$repr')
         WHEN 'json' THEN CAST(json_extract(v, '/$json') AS VARCHAR)
         WHEN 'object' THEN CAST(v AS VARCHAR) END AS "text", source, line
  FROM (SELECT *, {kind} AS kind FROM (
    SELECT k AS file, h.run AS run, h.process AS process, h.attempt AS attempt,
      h.replay AS replay, s + generate_subscripts(n, 1) - 1 AS seq, t AS time,
      coalesce(array_to_string(l, '/'), '') AS path, coalesce(i, []) AS indices,
      CAST(to_json(x) AS VARCHAR) AS labels, unnest(n) AS name, unnest(v) AS v,
      f AS source, y AS line
    FROM read_json({files}, format = 'newline_delimited', columns = {line}, filename = true,
      maximum_object_size = {most}) JOIN own.headers h USING (filename)))"""


@dataclass(frozen=True, slots=True)
class LoadedRecords:
    """A record file that was loaded into DuckDB; its records are the rows of `own.loaded` with `file = number`."""

    file: Path
    number: int
    summary: Summary
    lost: int = 0
    """Number of damaged records; if there are any, the file is not sealed."""


def load(
    con: Duck, paths: Sequence[Path], *, growing: bool = False, clean: bool = False
) -> list[LoadedRecords]:
    """Load the record files `paths` into the SQL table `own.loaded`; an incomplete last line is ignored.

    With `growing`, other processes may be appending to the files. Lines with wrong checksums are left out and counted.
    If a line without a checksum cannot be read, this function raises or, with `clean`, leaves the line out.
    """
    import duckdb

    headers, rows, damaged, lost, since, longest = [], [], [], [], [], 0
    with tempfile.TemporaryDirectory(dir=con.folder) as folder:
        for k, path in enumerate(paths):
            scanned = scan(path)
            header, data, damaged_count = scanned.header, scanned.lines, scanned.repaired
            lacks_checksums = header.format < CHECKED
            if clean and lacks_checksums:
                data, damaged_count = _readable_lines(data)
            source = path
            if growing or clean or not lacks_checksums or not _ends_in_line_end(path):
                source = Path(folder, f"{k}.jsonl")
                source.write_bytes(data)
            if len(data) > _BIG:
                longest = max(longest, *map(len, data.split(b"\n")))
            rows.append(_expected(data) if lacks_checksums and not clean else _count_records(data))
            damaged.append(damaged_count)
            lost.append(scanned.lost)
            origin = None if header.origin == "recorded" else header.origin
            headers.append({"filename": str(source), "k": k, "run": header.run, "replay": origin,
                            "process": header.process, "attempt": header.attempt})  # fmt: skip
            since.append(header.since)
        con.load("own.headers", _HEADERS, headers)
        sql = _LONG.format(
            kind=_KIND,
            line=_LINE,
            most=max(_BIG, longest + 1024),
            files=files(str(row["filename"]) for row in headers),
        )
        try:
            con.execute(f"CREATE OR REPLACE TABLE own.loaded AS {sql}")
        except duckdb.Error as exc:
            raise _unreadable_error(paths, str(exc)) from exc
    counts = dict(con.execute("SELECT file, count(*) FROM own.loaded GROUP BY file").fetchall())
    if [counts.get(k, 0) for k in range(len(paths))] != rows:
        raise _unreadable_error(paths, f"it has {list(counts.values())} records, not {rows}")
    file_summaries = summaries(con, headers, rows, damaged)
    return [
        LoadedRecords(path, k, msgspec.structs.replace(file_summaries[k], since=since[k]), lost[k])
        for k, path in enumerate(paths)
    ]


def _unreadable_error(paths: Sequence[Path], why: str) -> DamagedError:
    return DamagedError(
        f"The records in {', '.join(map(str, paths[:3]))} cannot be read: {why}. They are unchanged; "
        "`rearview verify` lists all damage.",
        slug="records-damaged",
    )


def seal(con: Duck, loaded: Sequence[LoadedRecords]) -> list[Path]:
    """Write loaded files, which must be complete, as Parquet files next to them; return the Parquet files.

    The JSON lines are removed after the Parquet files were read back and compared.
    """
    temporary_files: dict[Path, Path] = {}
    hash_sql = "count(*), bit_xor(hash(COLUMNS(* EXCLUDE ({0})))) FROM {1} GROUP BY {0}"
    try:
        for records in loaded:
            temporary = records.file.with_name(
                f".{records.file.stem}.{os.getpid()}.{os.urandom(4).hex()}.parquet"
            )
            temporary_files[records.file] = temporary
            summary_text = quoted(msgspec.json.encode(records.summary).decode())
            con.execute(
                f"COPY (SELECT * EXCLUDE (file) FROM own.loaded WHERE file = {records.number} ORDER BY "
                f"path, name, seq) TO {quoted(temporary)} (FORMAT parquet, COMPRESSION zstd, "
                f"PARQUET_VERSION v2, KV_METADATA {{{MARK}: {summary_text}}})"
            )
            write_check(temporary)
        expected_hashes = con.execute(
            "SELECT file, " + hash_sql.format("file", "own.loaded")
        ).fetchall()
        source = f"read_parquet({files(temporary_files.values())}, filename = true)"
        read_hashes = con.execute(
            "SELECT filename, " + hash_sql.format("filename", source)
        ).fetchall()
        read_back = {row[0]: row[1:] for row in read_hashes}
        expected = {row[0]: row[1:] for row in expected_hashes}
        for records in loaded:
            name = str(temporary_files[records.file])
            if records.summary.rows and read_back.get(name) != expected.get(records.number):
                raise _unreadable_error(
                    [records.file], f"{name} does not hold what was written; check the disk"
                )
            set_store_mode(temporary_files[records.file])
            publish_file(temporary_files[records.file], records.file.with_suffix(".parquet"))
            if records.summary.damaged:
                shutil.copy(records.file, records.file.with_suffix(".damaged"))
            records.file.unlink(missing_ok=True)
    finally:
        for temporary in temporary_files.values():
            temporary.unlink(missing_ok=True)
    return [records.file.with_suffix(".parquet") for records in loaded]


def _ends_in_line_end(file: Path) -> bool:
    with file.open("rb") as lines:
        lines.seek(-1, os.SEEK_END)
        return lines.read(1) == b"\n"


_decode = msgspec.json.Decoder(RecordLine).decode


def _expected(data: bytes) -> int:
    """Return how many records the lines `data` hold, according to the numbers in the first and last line.

    Return -1 if the first or last line cannot be read.
    """
    lines = data.strip(b"\n")
    if not lines:
        return 0
    try:
        first = _decode(lines[: lines.find(b"\n")] if b"\n" in lines else lines)
        last = _decode(lines[lines.rfind(b"\n") + 1 :])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return -1
    return last.s + len(last.n) - first.s


def unreadable_lines(data: bytes) -> int:
    """Return how many of the lines `data`, of a file of records without checksums, cannot be read."""
    return _readable_lines(data)[1]


def _readable_lines(data: bytes) -> tuple[bytes, int]:
    """Return (lines of `data` that can be read, number of lines that cannot be read)."""
    readable, unreadable = [], 0
    for raw in data.split(b"\n"):
        if raw:
            try:
                line = _decode(raw)
                unreadable += len(line.n) != len(line.v)
                readable.append(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                unreadable += 1
    return b"\n".join(readable) + b"\n", unreadable


def _count_records(data: bytes) -> int:
    return sum(len(_decode(raw).n) for raw in data.split(b"\n") if raw)


def read_summary(file: Path) -> dict[str, Any]:
    """Return the fields of the summary of a sealed file, without checking the file for damage.

    The summary is read without DuckDB, because loading DuckDB takes longer than many replays take to start. Most
    files of a run with many backfills hold records of replays, which need not be read.
    """
    with _mapped(file) as data:
        return _decoded(file, _summary(file, data)[0])


def checked_summary(file: Path) -> dict[str, Any]:
    """Return the fields of the summary of a sealed file; raise if any byte of the file is damaged.

    An old file without a checksum is not checked; its summary has no field `check`.
    """
    with _mapped(file) as data:
        text, offset = _summary(file, data)
        facts = _decoded(file, text)
        key_position = text.rfind(_KEY)
        if key_position >= 0 and _hash(data, offset + key_position + len(_KEY)) != facts.get(
            "check"
        ):
            raise _damaged(file, "its checksum does not match")
    if key_position < 0 and facts.get("format") != 1:
        raise _damaged(file, "it has no checksum")
    return facts


def write_check(file: Path) -> None:
    """Compute the checksum of a new Parquet file, and write it into the summary of the file."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as data:
        text, at = _summary(file, data)
        start = at + text.rindex(_KEY) + len(_KEY)
        data[start : start + len(NO_CHECK)] = _hash(data, start).encode()
        data.flush()


def _hash(data: mmap.mmap, start: int) -> str:
    """Return the hash of the Parquet file `data`, computed as if its checksum, which begins at `start`, were zeros."""
    with memoryview(data) as view, view[:start] as before, view[start + len(NO_CHECK) :] as after:
        hashed = xxhash.xxh3_128(before)
        hashed.update(NO_CHECK.encode())
        hashed.update(after)
        return str(hashed.hexdigest())


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            raise _damaged(file, "it is empty")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _summary(file: Path, data: Any) -> tuple[bytes, int]:
    """Return (text of the summary, offset of this text) of the sealed file whose content is `data`."""
    try:
        size, _ = _TAIL.unpack(data[-_TAIL.size :])
        begin = max(0, len(data) - _TAIL.size - size)
        foot = bytes(data[begin : len(data) - _TAIL.size])
        at = foot.rindex(_ENTRY) + len(_ENTRY)
        length, shift = 0, 0
        while shift == 0 or foot[at - 1] >= 0x80:  # Thrift writes lengths with seven bits per byte
            length |= (foot[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        return foot[at : at + length], begin + at
    except (ValueError, IndexError, struct.error) as exc:
        raise _damaged(file, str(exc)) from exc


def _decoded(file: Path, text: bytes) -> dict[str, Any]:
    try:
        facts = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise _damaged(file, str(exc)) from exc
    if not isinstance(facts, dict):
        raise _damaged(file, "its summary is not a JSON object")
    return facts


def _damaged(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{file} is damaged: {why}. `rearview verify --repair` moves it away and lists what is lost.",
        slug="records-damaged",
    )
