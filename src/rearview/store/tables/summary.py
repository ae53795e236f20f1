"""What a sealed file says about itself, so that it need not be scanned to be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rearview.store.sealed import NO_CHECK
from rearview.store.tables.duck import Duck

FORMAT = 2
"""From 2 on, a summary ends in the checksum of the whole file."""


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
    """Records, or in files of format 1 lines, that were lost before it was sealed."""
    names: list[Name]
    since: int = 0
    """Where in the earlier attempts this one began."""
    labels: dict[str, list[str]] = {}
    """By path, what the values of its loops are where they differ from the iteration number."""
    check: str = NO_CHECK
    """Hash of the file, as `store.sealed` takes it; the last field."""


def summaries(
    con: Duck, headers: Sequence[Mapping[str, Any]], rows: Sequence[int], damaged: Sequence[int]
) -> list[Summary]:
    """Return what each file that is in `own.loaded` holds."""
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
            names=[Name(at, name, kinds) for (at, name), kinds in names[k].items()],
            labels=labels.get(k, {}),
        )
        for k, header in enumerate(headers)
    ]


def _labels(con: Duck) -> dict[int, dict[str, list[str]]]:
    """Return per file, path and loop: empty, `int`, `float` or `str`."""
    out: dict[int, dict[str, list[str]]] = {}
    sql = """SELECT file, path, k, list(DISTINCT json_type(labels, '/' || k)) FROM (
      SELECT file, path, labels, unnest(range(len(indices))) AS k FROM own.loaded
      WHERE labels IS NOT NULL) GROUP BY ALL ORDER BY k"""
    for file, path, _, types in con.execute(sql).fetchall():
        found = set(types) - {None, "NULL"}
        whole = found <= {"UBIGINT", "BIGINT"}
        number = found <= {"UBIGINT", "BIGINT", "DOUBLE"}
        kind = ("int" if whole else "float" if number else "str") if found else ""
        out.setdefault(file, {}).setdefault(path, []).append(kind)
    return out
