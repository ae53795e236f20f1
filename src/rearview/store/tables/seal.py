"""Sealing: records files that nobody writes to any more become Parquet.

This is done by whoever reads, never by the training process. A sealed file holds exactly what
the lines held; they are removed only after the Parquet file was read back and found equal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rearview.errors import DamagedError
from rearview.store.records import Header, Line, scan
from rearview.store.tables.duck import Duck, quoted

FORMAT = 1
MARK = "rearview"
"""Key under which a Parquet file carries its `Summary`."""
_EXACT = 2**53

# what stands in a line, as DuckDB reads it
_LINE = (
    "{'l': 'VARCHAR[]', 'i': 'BIGINT[]', 'x': 'JSON[]', 's': 'BIGINT', 't': 'DOUBLE', "
    "'n': 'VARCHAR[]', 'v': 'JSON[]'}"
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
  SELECT run, process, attempt, replay, seq, time, path, indices, labels, name, kind,
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
         WHEN 'object' THEN CAST(v AS VARCHAR) END AS "text"
  FROM (SELECT *, {kind} AS kind FROM (
    SELECT $run AS run, $process AS process, CAST($attempt AS INTEGER) AS attempt,
      CAST($replay AS VARCHAR) AS replay, s + generate_subscripts(n, 1) - 1 AS seq, t AS time,
      coalesce(array_to_string(l, '/'), '') AS path, coalesce(i, []) AS indices,
      CAST(to_json(x) AS VARCHAR) AS labels, unnest(n) AS name, unnest(v) AS v
    FROM read_json($file, format = 'newline_delimited', columns = {line},
      maximum_object_size = {most})))"""


class Name(msgspec.Struct, frozen=True):
    """What one name holds at one depth of one file."""

    path: str
    name: str
    kinds: dict[str, int]


class Summary(msgspec.Struct, frozen=True):
    """What a sealed file says about itself, so that it need not be scanned to be known."""

    format: int
    run: str
    process: str
    attempt: int
    replay: str | None
    rows: int
    unique: bool
    """No name was logged twice at one point."""
    damaged: int
    """Lines that could not be read."""
    names: list[Name]
    since: int = 0
    """Where in the earlier attempts this one began."""
    labels: dict[str, list[str]] = {}
    """By path, what the values of its loops are where they differ from the iteration number."""


def seal(file: Path, con: Duck) -> Path:
    """Turn a records file that is complete into Parquet beside it; return the new file."""
    target = file.with_suffix(".parquet")
    with loaded(con, file, "sealing") as summary:
        aside = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
        about = quoted(msgspec.json.encode(summary).decode())
        try:
            con.execute(
                f"COPY (SELECT * FROM sealing ORDER BY path, name, seq) TO {quoted(aside)} (FORMAT "
                f"parquet, COMPRESSION zstd, PARQUET_VERSION v2, KV_METADATA {{{MARK}: {about}}})"
            )
            check = "SELECT count(*), bit_xor(hash(COLUMNS(*))) FROM "
            wanted = con.execute(f"{check} sealing").fetchall()
            found = con.execute(f"{check} read_parquet({quoted(aside)})").fetchall()
            if wanted != found:
                raise DamagedError(
                    f"{aside} does not hold what was written to it. The records stay in {file}; "
                    "check the disk.",
                    slug="records-damaged",
                )
            with aside.open("rb") as written:
                os.fsync(written.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    if summary.damaged:
        file.rename(file.with_suffix(".damaged"))
    else:
        file.unlink()
    return target


@contextlib.contextmanager
def loaded(con: Duck, file: Path, table: str) -> Iterator[Summary]:
    """Hold the records of one file as a table in DuckDB; a torn end is left out."""
    header, data = scan(file)
    damaged = 0
    rows = _load(con, header, data, table)
    if rows is None:
        data, damaged = _clean(data)
        rows = _load(con, header, data, table, count=_count(data))
    if rows is None:
        raise DamagedError(
            f"The records of {file} cannot be read by DuckDB as they stand. They are untouched; "
            "`rearview verify` says more.",
            slug="records-damaged",
        )
    try:
        yield _summary(con, header, table, rows, damaged)
    finally:
        con.execute(f"DROP TABLE IF EXISTS {table}")


def _load(
    con: Duck, header: Header, data: bytes, table: str, count: int | None = None
) -> int | None:
    """Fill the table; return its rows, or None if they are not those that were written."""
    import duckdb

    count = _expected(data) if count is None else count
    with con.text_file() as lines:
        lines.write(data)
        lines.flush()
        most = 16 << 20
        if len(data) > most:
            most = max(most, *map(len, data.split(b"\n"))) + 1024
        sql = _LONG.format(kind=_KIND, line=_LINE, most=most)
        values = {
            "run": header.run,
            "process": header.process,
            "attempt": header.attempt,
            "replay": None if header.origin == "recorded" else header.origin,
            "file": lines.name,
        }
        try:
            con.execute(f"CREATE OR REPLACE TEMP TABLE {table} AS {sql}", values)
        except duckdb.Error:
            return None
    (rows,) = con.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(rows) if rows == count else None


def _summary(con: Duck, header: Header, table: str, rows: int, damaged: int) -> Summary:
    names: dict[tuple[str, str], dict[str, int]] = {}
    sql = f"SELECT path, name, kind, count(*) FROM {table} GROUP BY ALL ORDER BY min(seq), kind"
    for path, name, kind, number in con.execute(sql).fetchall():
        names.setdefault((path, name), {})[kind] = number
    distinct = f"SELECT count(DISTINCT hash(path, indices, name)) FROM {table}"
    return Summary(
        format=FORMAT,
        run=header.run,
        process=header.process,
        attempt=header.attempt,
        since=header.since,
        replay=None if header.origin == "recorded" else header.origin,
        rows=rows,
        unique=con.execute(distinct).fetchone()[0] == rows,
        damaged=damaged,
        names=[Name(path, name, kinds) for (path, name), kinds in names.items()],
        labels=_labels(con, table),
    )


def _labels(con: Duck, table: str) -> dict[str, list[str]]:
    """Return per path and loop: empty, `int`, `float` or `str`."""
    out: dict[str, list[str]] = {}
    sql = f"SELECT DISTINCT path FROM {table} WHERE labels IS NOT NULL"
    for (path,) in con.execute(sql).fetchall():
        types = f"SELECT DISTINCT json_type(labels, ?) FROM {table} WHERE path = ?"
        out[path] = []
        for k in range(path.count("/") + 1):
            found = {row[0] for row in con.execute(types, [f"/{k}", path]).fetchall()}
            found -= {None, "NULL"}
            whole = found <= {"UBIGINT", "BIGINT"}
            number = found <= {"UBIGINT", "BIGINT", "DOUBLE"}
            out[path].append(("int" if whole else "float" if number else "str") if found else "")
    return out


_decode = msgspec.json.Decoder(Line).decode


def _expected(data: bytes) -> int:
    """Return how many records the lines hold by the numbers of the first and the last."""
    lines = data.strip(b"\n")
    if not lines:
        return 0
    try:
        first = _decode(lines[: lines.find(b"\n")] if b"\n" in lines else lines)
        last = _decode(lines[lines.rfind(b"\n") + 1 :])
    except msgspec.MsgspecError:
        return -1
    return last.s + len(last.n) - first.s


def _clean(data: bytes) -> tuple[bytes, int]:
    """Return the lines that can be read, and how many cannot."""
    good, bad = [], 0
    for raw in data.split(b"\n"):
        if raw:
            try:
                line = _decode(raw)
                bad += len(line.n) != len(line.v)
                good.append(raw)
            except msgspec.MsgspecError:
                bad += 1
    return b"\n".join(good) + b"\n", bad


def _count(data: bytes) -> int:
    return sum(len(_decode(raw).n) for raw in data.split(b"\n") if raw)
