"""Are all records still there? Read everything and say what is not as it was written."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rearview.errors import RearviewError
from rearview.store.project import Project
from rearview.store.records import scan
from rearview.store.runs import Runs
from rearview.store.tables.duck import Duck, quoted
from rearview.store.tables.seal import unreadable
from rearview.store.tables.summary import MARK, Summary


def check_records(project: Project) -> Iterator[str]:
    """Yield one sentence for every run or records file that is damaged; nothing if all is well."""
    import duckdb

    runs, duck = Runs(project), Duck(project.store)
    try:
        for run in runs.ids():
            try:
                runs.get(run)
                runs.replays(run)
            except RearviewError as exc:
                yield str(exc)
            for file in sorted(runs.folder(run).glob("records-*")):
                if file.suffix == ".jsonl":
                    try:
                        bad = unreadable(scan(file)[1])
                    except RearviewError as exc:
                        yield str(exc)
                        continue
                    if bad:
                        yield f"{file} has {bad} lines that cannot be read; all others can."
                elif file.suffix == ".parquet":
                    try:
                        wanted, found = _rows(duck, quoted(file))
                    except (duckdb.Error, msgspec.MsgspecError, TypeError) as exc:
                        yield f"{file} cannot be read: {str(exc).splitlines()[0]}"
                        continue
                    if wanted != found:
                        yield f"{file} holds {found} records where {wanted} were written."
    finally:
        duck.close()


def _rows(duck: Duck, file: str) -> tuple[int, int]:
    """Return how many records a sealed file should have and has, having read every byte of it."""
    sql = f"SELECT value FROM parquet_kv_metadata({file}) WHERE key = ?"
    about = msgspec.json.decode(duck.execute(sql, [MARK.encode()]).fetchone()[0], type=Summary)
    whole = f"SELECT count(*), bit_xor(hash(COLUMNS(*))) FROM read_parquet({file})"
    return about.rows, int(duck.execute(whole).fetchone()[0])
