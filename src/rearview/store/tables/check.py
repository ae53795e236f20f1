"""Look at every byte of the records of runs, and say what is not as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rearview.errors import DamagedError, RearviewError
from rearview.store.lines import CHECKED
from rearview.store.project import Project
from rearview.store.records import scan
from rearview.store.runs import Runs
from rearview.store.tables.duck import Duck
from rearview.store.tables.parts import summary_of
from rearview.store.tables.seal import unreadable


class Look(NamedTuple):
    """What was found in one file of records."""

    file: Path
    what: str = ""
    """What is wrong with it; empty if nothing is."""
    checked: bool = True
    """False for a file without checksums: that it can be read is all that is known."""


def check_records(project: Project) -> Iterator[str]:
    """Yield one sentence for every run or records file that is damaged; nothing if all is well."""
    runs, duck = Runs(project), Duck(project.store)
    try:
        for run in runs.ids():
            try:
                damage = runs.get(run).facts.get("damaged")
                if damage:
                    yield str(damage)
                runs.replays(run)
            except RearviewError as exc:
                yield str(exc)
            for look in look_at(duck, runs.folder(run)):
                if look.what:
                    yield f"{look.file} {look.what}"
    finally:
        duck.close()


def look_at(duck: Duck, folder: Path) -> Iterator[Look]:
    """Yield what is found in each file of records in a run's folder."""
    for file in sorted(folder.glob("records-*")):
        try:
            if file.suffix == ".jsonl":
                yield _lines(file)
            elif file.suffix == ".parquet":
                yield Look(file, checked=bool(summary_of(duck, file).check))
        except FileNotFoundError:
            continue  # sealed by a reader meanwhile
        except DamagedError as exc:
            yield Look(file, f"is damaged: {exc}")
        except OSError as exc:
            yield Look(file, f"cannot be read: {exc.strerror or exc}")


def _lines(file: Path) -> Look:
    found = scan(file)
    if found.header.format >= CHECKED:
        return Look(file, f"has lost at least {found.lost} records" if found.lost else "")
    bad = unreadable(found.lines)
    what = f"has {bad} lines that cannot be read; all others can." if bad else ""
    return Look(file, what, checked=False)
