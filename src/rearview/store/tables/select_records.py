"""Select the records of some runs for a table: their names, loop paths and files, and the SQL that reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from rearview.model import Origin, Run
from rearview.model.proof import TRUSTED, WITHHELD
from rearview.model.run import CAPTURED, UNASKED, captured_origin
from rearview.store.project import Project
from rearview.store.tables.duckdb_connection import Duck, files, key, quoted
from rearview.store.tables.pivot import (
    RANKED,
    TYPES,
    UNRANKED,
    Catalogue,
    cast_sql,
    common_kind,
    depth,
    encode,
    inside,
    loop_value_sql,
    wide_sql,
)
from rearview.store.tables.read_record_files import (
    PivotedPath,
    RecordPart,
    RunRecords,
    long_sql,
    needs_no_ranking,
    pivot_cache,
)
from rearview.store.values_as_json import convert

FillableNames = Sequence[tuple[str, Sequence[str]]]
"""Names that the newest source logs but some runs may lack, each with the loops around its log call, outermost first."""


@dataclass(frozen=True, slots=True)
class FilesByWork:
    """Files with the records of some runs, by the work that is needed to read them."""

    simple: list[RecordPart]
    """Files in which each point has one value per name."""
    ranked: list[RecordPart]
    """Files in which several attempts, replays or log calls may have values of one name at one point, to be ranked."""
    pivoted: list[dict[str, tuple[Path, PivotedPath]]]
    """For each run with a pivot cache: loop path -> (file of the cache, description of the file)."""


class SelectedRecords:
    """The records of some runs, selected for a table.

    `fillable` are names that have a column even if no run has values, because a backfill could compute them. With
    `withheld`, values of replays that were not exact are included. A value is unproved if a replay computed it, and it
    is not proved that the replay repeated the run exactly.
    """

    def __init__(
        self,
        project: Project,
        duck: Duck,
        run_records: RunRecords,
        runs: Sequence[Run],
        fillable: FillableNames,
        *,
        withheld: bool = False,
    ) -> None:
        self.runs = [run.id for run in runs]
        self.unproved: set[str] = set()
        """Names of which some of the selected values may be unproved."""
        self.captured: dict[str, Origin] = {}
        """Names that no run logged with Rearview -> the other logger from which their values were captured."""
        self._withheld = withheld
        self._parts = {run.id: self._parts_to_show(run_records, run.id) for run in runs}
        self.catalogue = Catalogue()
        self._project, self._duck, self._run_records = project, duck, run_records
        fillable_paths = {
            (name, "/".join(loops))
            for name, loops in fillable
            if not runs
            # an argument of all runs, such as one of mlflow.log_param, is not a name to fill
            or not all(name in run.args for run in runs)
        }
        self._fillable = {
            name_and_path: self._lacking(*name_and_path) for name_and_path in fillable_paths
        }
        self._files: FilesByWork | None = None
        self._last_iteration: int | None = None
        kinds: dict[str, set[str]] = {}
        for run in runs:
            for part in self._parts[run.id]:
                for names in part.shown():
                    if not names.name.startswith("$"):
                        self.catalogue.add(names.path, names.name, names.kinds)
                for path, labels in part.summary.labels.items():
                    self.catalogue.add_path(path, labels)
            for name, value in run.args.items():
                kinds.setdefault(name, set()).add(encode(convert(value))[0])
        for (name, path), lacking_runs in sorted(self._fillable.items()):
            if lacking_runs or name not in self.catalogue.names:
                self.catalogue.add(path, name, ())
        self.args = {name: common_kind(names) for name, names in kinds.items()}
        self.captured = self._captured_only()

    def _captured_only(self) -> dict[str, Origin]:
        """Return a mapping: name whose values are all captured -> the most reliable origin of these values."""
        origins_by_name: dict[str, set[Origin | None]] = {}
        for parts in self._parts.values():
            for part in parts:
                for logged in part.shown():
                    origins_by_name.setdefault(logged.name, set()).add(
                        captured_origin(part.summary.replay)
                    )
        for name, _ in self._fillable:
            origins_by_name.setdefault(name, set()).add(None)
        return {
            name: min((origin for origin in origins if origin), key=CAPTURED.index)
            for name, origins in origins_by_name.items()
            if None not in origins
        }

    def names_by_default(self) -> list[str]:
        """Return the names that are the columns of a table if the user asks for no names.

        These are all names that were logged, with Rearview or another logger. If one of the runs logged nothing,
        names of assigned variables and printed numbers are added: those outside of loops and in outermost loops or,
        if there are none of these, those in the fewest nested loops.
        """
        unlogged = {name for name, origin in self.captured.items() if origin in UNASKED}
        logged = [name for name in self.catalogue.names if name not in unlogged]
        if all(map(self._logs_itself, self.runs)):
            return logged
        depths = {name: min(map(depth, self.catalogue.names[name])) for name in unlogged}
        deepest = max(1, min(depths.values(), default=1))
        return [name for name in self.catalogue.names if depths.get(name, 0) <= deepest]

    def _logs_itself(self, run: str) -> bool:
        """Return True if a run logged something, with Rearview or another logger."""
        return any(
            captured_origin(part.summary.replay) not in UNASKED
            and (part.summary.replay is None or part.summary.replay.startswith("$"))
            and part.summary.rows
            for part in self._parts[run]
        )

    def _parts_to_show(self, run_records: RunRecords, run: str) -> list[RecordPart]:
        """Return the files of the run's records that a table may show; add names of unproved values to `self.unproved`.

        Only here, values of replays that were not exact are left out.
        """
        origins = {replay.id: replay.proof.origin for replay in run_records.replays.get(run, [])}
        out = []
        for part in run_records.parts.get(run, []):
            replay = part.summary.replay
            origin = origins.get(replay, Origin.UNPROVED) if replay else Origin.RECORDED
            origin = captured_origin(replay) or origin
            if origin in WITHHELD and not self._withheld:
                continue
            out.append(part)
            if origin not in TRUSTED:
                self.unproved.update(logged.name for logged in part.summary.names)
        return _hide_less_reliable(out)

    def _lacking(self, name: str, path: str) -> set[str]:
        """Return the runs that may lack values of `name` at `path`, the loop path at which the source logs the name.

        For a log call in a function that is called in loops, the source shows too few loops. So if a run has values
        of the name only at other loop paths, it is not among the returned runs.
        """
        lacking_runs = set()
        for run in self.runs:
            parts = [
                part
                for part in self._parts[run]
                if captured_origin(part.summary.replay) not in UNASKED
            ]
            paths = {
                logged.path
                for part in parts
                for logged in part.summary.names
                if logged.name == name
            }
            if not paths or path in paths:
                lacking_runs.add(run)
        return lacking_runs

    def first_runs(self, rows: int, names: Iterable[str]) -> SelectedRecords:
        """Return the records of only the first runs, which are enough for `rows` rows in a table of `names`.

        If no number of runs is certainly enough, all records are returned.
        """
        name_set, count = set(names), 0
        for n, run in enumerate(self.runs[:-1], 1):
            parts = self._parts[run]
            certain_rows = [0]
            if not any(part.summary.attempt for part in parts):
                # each value that was logged at a loop path with no other of the names inside has a row
                certain_rows += [
                    sum(logged.kinds.values())
                    for part in parts
                    for logged in part.summary.names
                    if part.summary.replay is None
                    and logged.name in name_set
                    and self._deepest(logged.path, name_set)
                ]
            count += max(certain_rows)
            if count >= rows:
                out = copy(self)
                out.runs, out._files = self.runs[:n], None  # noqa: SLF001
                return out
        return self

    def _deepest(self, path: str, names: set[str]) -> bool:
        return not any(
            other_path != path and inside(other_path, path)
            for name in names
            for other_path in self.catalogue.names.get(name, ())
        )

    @property
    def plain(self) -> bool:
        """Whether the runs logged all values themselves, not replays, and each name at most once per point."""
        return all(needs_no_ranking(self._run_records.parts.get(run, [])) for run in self.runs)

    def first_iterations(self, path: str, rows: int, names: dict[str, str]) -> SelectedRecords:
        """Return the records up to that iteration of the outermost loop in which the loop path `path` gets `rows` rows.

        `names` has the kind of each column. All records are returned unless there is a single run and it has a pivot
        cache, with which this iteration is quickly found.
        """
        opened = self._files_by_work()
        if (
            len(self.runs) != 1
            or not opened.pivoted
            or self._last_iteration is not None
            or not path
        ):
            return self
        for stored in self._stored(path, names, origins=()):
            sql = f"SELECT i1 FROM ({stored}) ORDER BY i1 LIMIT 1 OFFSET {max(0, rows - 1)}"
            row = self._duck.execute(sql).fetchone()
            if row is not None:
                out = copy(self)
                out._last_iteration = int(row[0])  # noqa: SLF001
                return out
        return self

    def _files_by_work(self) -> FilesByWork:
        """Return the files of the records to read; the first call creates pivot caches."""
        if self._files is None:
            self._files = FilesByWork([], [], [])
            for run in self.runs:
                parts, cache_key = self._parts[run], (run, self._withheld)
                if cache_key not in self._run_records.pivoted:
                    replays = self._run_records.replays.get(run, [])
                    self._run_records.pivoted[cache_key] = pivot_cache(
                        self._project, self._duck, run, parts, replays
                    )
                pivoted = self._run_records.pivoted[cache_key]
                if pivoted is not None:
                    self._files.pivoted.append(pivoted)
                else:
                    (self._files.simple if needs_no_ranking(parts) else self._files.ranked).extend(
                        parts
                    )
        return self._files

    def wide_sql(self, path: str, names: dict[str, str], *, origins: Collection[str]) -> str:
        """Return SQL with one row per point and occurrence at the loop path `path`, and the values of `names` as columns.

        `names` has the kind of each column. If a run may lack values of one of the names, every known point of the run
        at `path` has a row. Names in `origins` have a column with the origins of their values as well.
        """
        scans = []
        by_work = self._files_by_work()
        for parts, form in ((by_work.simple, UNRANKED), (by_work.ranked, RANKED)):
            if parts:
                source = form.format(source=long_sql(parts))
                scans.append(wide_sql(source, path, names, origins))
        scans += self._stored(path, names, origins=origins)
        values = " UNION ALL BY NAME ".join(scans) or self._nothing(path, names, origins=origins)
        lacking = set().union(*(self._fillable.get((name, path), ()) for name in names))
        lacking = lacking & set(self.runs) if path or names else set(self.runs)
        if not lacking:
            return values
        keys = [f"i{k}" for k in range(1, depth(path) + 1)]
        labels = [f"x{k}" for k in range(1, depth(path) + 1)]
        columns = [key("n", name) for name in names]
        columns += [key("o", name) for name in names if name in origins]
        shown = ", ".join(
            ["u.run", *(f"u.{key}" for key in (*keys, *labels)), "coalesce(w.occ, 0) AS occ", "w.s"]
            + [f"w.{column}" for column in columns]
        )
        join_condition = " AND ".join(f"u.{key} = w.{key}" for key in ("run", *keys))
        row_condition = f"u.run IN ({', '.join(map(quoted, sorted(lacking)))}) OR w.run IS NOT NULL"
        return f"SELECT {shown} FROM ({self._known(path)}) u LEFT JOIN ({values}) w ON {join_condition} WHERE {row_condition}"

    def _stored(self, path: str, names: dict[str, str], *, origins: Collection[str]) -> list[str]:
        """Return SQL statements that return what `wide_sql` does, for the runs with a pivot cache.

        Runs whose caches have equal columns are read by one statement.
        """
        groups: dict[str, list[Path]] = {}
        keys = "".join(f", i{k}, x{k}" for k in range(1, depth(path) + 1))
        for run in self._files_by_work().pivoted:
            if path not in run or not run[path][1].kinds.keys() & names.keys():
                continue
            file, pivoted_path = run[path]
            cells, present = "", []
            for name, kind in names.items():
                column, origin = key("n", name), key("o", name)
                is_present, source = f"{column} IS NOT NULL", "'recorded'"
                if name in pivoted_path.origins:
                    is_present, source = f"{origin} IS NOT NULL", origin
                value = (
                    cast_sql(column, pivoted_path.kinds[name], kind)
                    if name in pivoted_path.kinds
                    else "NULL"
                )
                cells += f", CAST({value} AS {TYPES[kind]}) AS {column}"
                if name in pivoted_path.kinds:
                    present.append(is_present)
                if name in origins:
                    origin_if_present = (
                        f"CASE WHEN {is_present} THEN {source} END"
                        if name in pivoted_path.kinds
                        else "NULL"
                    )
                    cells += f", CAST({origin_if_present} AS VARCHAR) AS {origin}"
            numbers = ", ".join(key("s", name) for name in names if name in pivoted_path.kinds)
            first = f"least({numbers})"
            iteration_bound = (
                f" AND i1 <= {self._last_iteration}"
                if path and self._last_iteration is not None
                else ""
            )
            sql = f"SELECT run{keys}, occ, {first} AS s{cells} FROM {{}} WHERE ({' OR '.join(present)}){iteration_bound}"
            groups.setdefault(sql, []).append(file)
        return [
            sql.replace("{}", f"read_parquet({files(paths)})", 1) for sql, paths in groups.items()
        ]

    def _known(self, path: str) -> str:
        """Return SQL for all known points at the loop path `path`: they, or points in loops inside them, have records."""
        if not path:
            run_list = ", ".join(map(quoted, self.runs)) or "NULL"
            return f"SELECT run FROM own.runs WHERE run IN ({run_list})"
        n = range(1, depth(path) + 1)
        texts = []
        parts = [*self._files_by_work().simple, *self._files_by_work().ranked]
        if parts:
            keys = "".join(f", indices[{k}] AS i{k}" for k in n)
            labels = "".join(f", {loop_value_sql(k, 'labels')} AS x{k}" for k in n)
            texts.append(
                f"SELECT DISTINCT run{keys}{labels} FROM ({long_sql(parts)}) WHERE path = {quoted(path)} "
                f"OR starts_with(path, {quoted(path + '/')})"
            )
        keys = "".join(f", i{k}" for k in n) + "".join(f", x{k}" for k in n)
        for run in self._files_by_work().pivoted:
            texts += [
                f"SELECT DISTINCT run{keys} FROM read_parquet({quoted(file)})"
                for other_path, (file, _) in run.items()
                if inside(other_path, path)
            ]
        if not texts:
            return self._nothing(path, {}, origins=())
        merged = " UNION ALL ".join(texts)
        by = "run" + "".join(f", i{k}" for k in n)
        any_labels = "".join(f", any_value(x{k}) AS x{k}" for k in n)
        return f"SELECT {by}{any_labels} FROM ({merged}) GROUP BY {by}"

    @staticmethod
    def _nothing(path: str, names: dict[str, str], *, origins: Collection[str]) -> str:
        """Return SQL that has no rows, and the columns of the SQL that `wide_sql` returns."""
        n = range(1, depth(path) + 1)
        text = "SELECT NULL::VARCHAR AS run, 0 AS occ, NULL::BIGINT AS s" + "".join(
            f", NULL::BIGINT AS i{k}, NULL::VARCHAR AS x{k}" for k in n
        )
        for name, kind in names.items():
            text += f", NULL::{TYPES[kind]} AS {key('n', name)}"
            text += f", NULL::VARCHAR AS {key('o', name)}" if name in origins else ""
        return text + " WHERE false"


def _hide_less_reliable(parts: list[RecordPart]) -> list[RecordPart]:
    """Return the files of one run's records, `parts`, with less reliable captured records of each name hidden.

    Values of a name that the run or a replay logged hide captured values of the name at other loop paths; at the same
    loop path, the logged values are preferred when rows are built. If a name was captured from several loggers, only
    the values from the most reliable logger are shown.
    """
    sources = {id(part): captured_origin(part.summary.replay) for part in parts}
    if not any(sources.values()):
        return parts
    logged: dict[str, set[str]] = {}
    best: dict[str, int] = {}
    for part in parts:
        source = sources[id(part)]
        for summary in part.summary.names:
            if source is None:
                logged.setdefault(summary.name, set()).add(summary.path)
            else:
                rank = CAPTURED.index(source)
                best[summary.name] = min(rank, best.get(summary.name, rank))
    out = []
    for part in parts:
        source = sources[id(part)]
        hidden = frozenset(
            (summary.path, summary.name)
            for summary in (part.summary.names if source is not None else ())
            if source is not None
            and (
                best[summary.name] != CAPTURED.index(source)
                or (summary.name in logged and summary.path not in logged[summary.name])
            )
        )
        out.append(replace(part, hidden=hidden) if hidden else part)
    return sorted(out, key=lambda part: _rank(captured_origin(part.summary.replay)))


def _rank(origin: Origin | None) -> int:
    return -1 if origin is None else CAPTURED.index(origin)
