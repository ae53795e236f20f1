"""The tables of docs/schema.md, filled from what a project holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rearview.model import Checkpoint
from rearview.model.proof import ORIGINS
from rearview.store.tables import schema
from rearview.store.tables.duck import Duck, fold
from rearview.store.tables.kinds import TYPES, encode, unify
from rearview.store.tables.parts import Shelf
from rearview.store.tables.pivot import ORIGIN
from rearview.store.tables.points import long
from rearview.store.values import convert
from rearview.store.versions import Versions


def load_runs(duck: Duck, shelf: Shelf) -> None:
    """Make the tables that every question needs: `own.runs`, `own.args`, `own.replays`."""
    runs = [
        {"ord": k, "run": run.id, **{c: getattr(run, c) for c in _columns("runs") if c != "run"}}
        for k, run in enumerate(shelf.runs)
    ]
    duck.load("own.runs", {"ord": "BIGINT", **_columns("runs")}, runs)
    values = _arguments(shelf)
    kinds: dict[str, set[str]] = {}
    for found in values.values():
        for name, (kind, _) in found.items():
            kinds.setdefault(name, set()).add(kind)
    columns = {fold(f"a:{name}"): TYPES[unify(found)] for name, found in kinds.items()}
    rows = (
        {"run": run, **{fold(f"a:{name}"): text for name, (_, text) in found.items()}}
        for run, found in values.items()
    )
    duck.load("own.args", {"run": "VARCHAR", **columns}, rows)
    ranks = {verdict: k for k, verdict in enumerate(ORIGINS)}
    replays = [
        {"replay": r.id, "run": r.run, "version": r.version, "started": r.started,
         "ended": r.ended, "proved": r.proved, "names": list(r.names), "ord": k,
         "verdict": r.proof.verdict, "why": r.proof.why, "redoes": r.redoes or None,
         "origin": r.proof.origin, "rank": ranks[r.proof.verdict]}
        for found in shelf.replays.values()
        for k, r in enumerate(found)
    ]  # fmt: skip
    own = {"ord": "BIGINT", "origin": "VARCHAR", "rank": "BIGINT"}
    duck.load("own.replays", {**own, **_columns("replays")}, replays)


def load_views(duck: Duck, shelf: Shelf) -> None:
    """Make the tables of docs/schema.md; those that cost something are empty until asked for."""
    numeric = {"float", "int", "long", "bool"}
    rows = (
        {"run": run, "name": name, "kind": kind, "text": text,
         "number": _number(text) if kind in numeric else None}
        for run, found in _arguments(shelf).items()
        for name, (kind, text) in found.items()
    )  # fmt: skip
    duck.load("arguments", _columns("arguments"), rows)
    for name in ("versions", "files", "checkpoints"):
        duck.load(name, _columns(name), [])
    shown = ", ".join(_columns("runs"))
    duck.execute(f"CREATE VIEW runs AS SELECT {shown} FROM own.runs ORDER BY ord")
    duck.execute(f"CREATE VIEW replays AS SELECT {', '.join(_columns('replays'))} FROM own.replays")
    parts = [part for found in shelf.parts.values() for part in found]
    made = {"origin": "", "replay": "CASE WHEN NOT starts_with(l.replay, '$') THEN l.replay END AS replay"}
    columns = ", ".join(filter(None, (made.get(c, f"l.{c}") for c in _columns("records"))))
    order = ", ".join(_columns("records"))
    duck.execute(
        f"CREATE VIEW records AS SELECT {order} FROM (SELECT {columns}, {ORIGIN} AS origin FROM "
        f"({long(parts)}) l LEFT JOIN own.replays r ON l.run = r.run AND l.replay = r.replay)"
    )
    for macro, (about, _) in schema.FUNCTIONS.items():
        duck.execute(f"CREATE MACRO {macro}(value) AS {about}")
    duck.execute(
        "CREATE VIEW points AS SELECT run, path, indices, any_value(labels) AS labels, count(*) AS "
        "records FROM records GROUP BY run, path, indices"
    )
    duck.execute(
        "CREATE VIEW loops AS SELECT run, array_to_string(parts[1:depth], '/') AS path, "
        "parts[depth] AS loop, depth, max(indices[depth]) + 1 AS iterations FROM (SELECT run, "
        "indices, string_split(path, '/') AS parts, unnest(range(1, len(indices) + 1)) AS depth "
        "FROM (SELECT DISTINCT run, path, indices FROM records)) GROUP BY ALL"
    )


def _arguments(shelf: Shelf) -> dict[str, dict[str, tuple[str, str | None]]]:
    return {
        run.id: {name: encode(convert(value)) for name, value in run.args.items()}
        for run in shelf.runs
    }


def load_versions(duck: Duck, versions: Versions | None, *, with_files: bool) -> None:
    """Fill the tables of versions and, if asked, of their files."""
    names = versions.names() if versions is not None else {}
    rows = [
        {"version": tree, "run": name.removeprefix("runs/") if name.startswith("runs/") else None}
        for name, tree in names.items()
    ]
    duck.load("versions", _columns("versions"), rows)
    found = []
    if with_files and versions is not None:
        for tree in sorted(set(names.values())):
            for path, oid in versions.hashes(tree).items():
                found.append({"version": tree, "path": path, "hash": oid})
    duck.load("files", _columns("files"), found)


def load_checkpoints(duck: Duck, checkpoints: Callable[[], Iterable[Checkpoint]] | None) -> None:
    """Fill the table of checkpoints."""
    rows = (
        {"checkpoint": c.id, "run": c.run, "seq": c.seq, "point": str(c.point), "edge": c.edge,
         "complete": c.complete, "missing": list(c.missing), "bytes": c.nbytes, "time": c.time}
        for c in (checkpoints() if checkpoints is not None else ())
    )  # fmt: skip
    duck.load("checkpoints", _columns("checkpoints"), rows)


def _columns(table: str) -> dict[str, str]:
    return {name: kind for name, (kind, _) in schema.TABLES[table][1].items()}


def _number(text: str | None) -> float | None:
    return None if text is None else float({"true": 1, "false": 0}.get(text, text))
