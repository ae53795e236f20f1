"""Keep a project within its size: started beside a run that has outgrown it.

    python -P -m rearview.store.thinning ROOT BUDGET RUN

A process of its own, so that training shares neither interpreter nor memory with it. It prints the
bytes that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from rearview.errors import RearviewError
from rearview.model import Status
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.sweep import Freed, gc
from rearview.store.tables.duck import quoted
from rearview.store.views import Tables


def fit(project: Project, budget: int, run: str) -> Freed:
    """Thin checkpoints, those of `run` too, until `budget` bytes suffice.

    Other runs that are going on keep all of theirs: their processes lean on them.
    """
    going = [one.id for one in Runs(project).all() if one.status is Status.RUNNING]
    tables = Tables(project)
    try:
        return gc(
            project,
            referenced=lambda: named(tables),
            budget=budget,
            keep=[each for each in going if each != run],
        )
    finally:
        tables.close()


def named(tables: Tables, without: Collection[str] = ()) -> list[str]:
    """Return the objects that records name, alone or inside lists and dictionaries.

    Records of the runs in `without` do not count.
    """
    tables.refresh()
    besides = "".join(f" AND run <> {quoted(run)}" for run in without)
    rows = tables.sql(
        "SELECT DISTINCT text FROM records WHERE kind IN ('object', 'json') "
        f"AND contains(text, '$object'){besides}"
    )
    return [oid for row in rows for oid in _oids(json.loads(row["text"]))]


def _oids(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$object"), str):
            yield value["$object"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _oids(item)


def main() -> None:
    """Do it for the project named on the command line, when nobody else needs the processor."""
    root, budget, run = sys.argv[1:4]
    with contextlib.suppress(OSError):
        os.nice(19)
    try:
        freed = fit(Project.open(Path(root)), int(budget), run)
    except RearviewError as exc:
        sys.exit(f"rearview: {exc}")
    sys.stdout.write(f"{freed.left}\n")


if __name__ == "__main__":
    main()
