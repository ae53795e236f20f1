"""A table shows every recorded value where it belongs, in the order of execution."""

import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gitrepo import versions as versions_of
from gitrepo import write
from rearview.errors import StoreError, UsageError
from rearview.model import Checkpoint, Edge, MissingPart, ObjectRef, Point, Step
from rearview.store.tables import read_record_files as points_module
from rearview.store.tables import schema
from rearview.store.tables.answer_queries import Tables
from recorded import Recorded, at, rechecked

SRC = str(Path(__file__).parents[3] / "src")


@pytest.fixture(params=["grouped", "pivoted before"])
def store(tmp_path, request, monkeypatch):
    """Every table is asked for in both ways that it can be made."""
    monkeypatch.setattr(points_module, "ENOUGH", 0 if request.param == "pivoted before" else 10**9)
    return Recorded(tmp_path)


def training(epochs=3, steps=2, scale=1.0):
    yield at(), {"seed": 7}
    for i in range(epochs):
        for j in range(steps):
            yield at(epoch=i, step=j), {"loss": scale / (1 + i + j)}
        yield at(epoch=i), {"acc": i / 10}
    yield at(), {"final": math.inf}


def rows(store, *args, **options):
    return [tuple(row.values()) for row in Tables(store.project).table(*args, **options)]


def test_outer_values_are_repeated_on_inner_rows(store):
    run = store.run(*training(2), args={"lr": 0.1})
    table = Tables(store.project).table(["loss", "acc", "seed", "final", "lr", "status"])
    assert table.columns == ["run", "epoch", "step", "loss", "acc", "seed", "final", "lr", "status"]
    rest = (7, math.inf, 0.1, "finished")
    assert [tuple(row.values()) for row in table] == [
        (run, 0, 0, 1.0, 0.0, *rest),
        (run, 0, 1, 0.5, 0.0, *rest),
        (run, 1, 0, 0.5, 0.1, *rest),
        (run, 1, 1, 1 / 3, 0.1, *rest),
    ]


def test_a_table_has_the_depth_of_its_names(store):
    run = store.run(*training(3))
    assert rows(store, ["acc"]) == [(run, 0, 0.0), (run, 1, 0.1), (run, 2, 0.2)]
    assert rows(store, ["seed"]) == [(run, 7)]
    assert len(rows(store, ["loss"])) == 6


def test_without_names_a_table_shows_everything_but_printed_lines(store):
    store.run(*training(1), (at(), {"$stdout": "epoch 0"}), args={"lr": 1, "seed": 2})
    table = Tables(store.project).table()
    assert table.columns == [
        "run",
        "epoch",
        "step",
        "seed",
        "loss",
        "acc",
        "final",
        "lr",
        "seed_arg",
    ]


def test_runs_come_in_the_order_they_started(store):
    b = store.run(*training(1, 1), started=20.0)
    a = store.run(*training(1, 1), started=10.0)
    assert rows(store, ["acc"]) == [(a, 0, 0.0), (b, 0, 0.0)]
    assert rows(store, ["acc"], runs=[b]) == [(b, 0, 0.0)]
    with pytest.raises(UsageError, match="no run 'nope'"):
        rows(store, ["acc"], runs=["nope"])


def test_a_point_without_inner_rows_has_its_own_row(store):
    run = store.run((at(e=0, s=0), {"x": 1}), (at(e=0), {"y": 2}), (at(e=1), {"y": 3}))
    assert rows(store, ["x", "y"]) == [(run, 0, 0, 1, 2), (run, 1, None, None, 3)]


def test_a_name_at_two_depths_keeps_both(store):
    run = store.run((at(e=0, s=0), {"loss": 1.0}), (at(e=0), {"loss": 2.0}))
    assert rows(store, ["loss"]) == [(run, 0, 0, 1.0), (run, 0, None, 2.0)]


def test_a_name_logged_twice_at_a_point_has_two_rows(store):
    run = store.run(
        (at(e=0), {"a": 1, "b": 1}), (at(e=0), {"a": 2}), (at(e=0, s=0), {"x": 5}),
    )  # fmt: skip
    assert rows(store, ["a", "b"]) == [(run, 0, 1, 1), (run, 0, 2, None)]
    assert rows(store, ["x", "a", "b"]) == [(run, 0, 0, 5, 2, 1)]


def test_loops_after_one_another_come_in_the_order_of_execution(store):
    calls = [(at(warm=i), {"a": i}) for i in range(2)]
    calls += [(at(epoch=i), {"a": 10 + i}) for i in range(2)]
    run = store.run(*calls)
    assert rows(store, ["a"]) == [
        (run, 0, None, 0),
        (run, 1, None, 1),
        (run, None, 0, 10),
        (run, None, 1, 11),
    ]


def test_loops_are_shown_by_value_and_ordered_by_number(store):
    run = store.run(
        *((at(fold=(i, v), lr=(0, 0.5)), {"a": i}) for i, v in enumerate(["z", "1", "b"])),
        (at(layer=(0, 30)), {"b": 1}),
    )
    assert rows(store, ["a"]) == [(run, "z", 0.5, 0), (run, "1", 0.5, 1), (run, "b", 0.5, 2)]
    assert rows(store, ["b"]) == [(run, 30, 1)]
    (found,) = Tables(store.project).iteration_ranges("a = 1", [run])
    assert (found.loops, found.outer) == (("fold", "lr"), 1)


def test_a_loop_of_the_same_name_inside_itself_and_three_depths(store):
    point = Point((Step("i", 1), Step("j", 2), Step("i", 3)))
    run = store.run((point, {"a": 1, "i": 9}))
    table = Tables(store.project).table()
    assert table.columns == ["run", "i", "j", "i_2", "a", "i_logged"]
    assert [tuple(row.values()) for row in table] == [(run, 1, 2, 3, 1, 9)]


def test_names_that_differ_only_in_case_are_different_names(store):
    store.run((at(Epoch=0, epoch=1), {"Loss": 1, "loss": 2, "LOSS": 3}), args={"lr": 1, "LR": 2})
    store.run((at(Epoch=0, epoch=1), {"loss": 4, "É": 5, "é": 6}), args={"Lr": 3})
    tables = Tables(store.project)
    one, two = tables.table()
    assert (one["Epoch"], one["epoch"], one["Loss"], one["loss"], one["LOSS"]) == (0, 1, 1, 2, 3)
    assert (one["lr"], one["LR"], one["Lr"]) == (1, 2, None)
    assert (two["Loss"], two["loss"], two["É"], two["é"], two["Lr"]) == (None, 4, 5, 6, 3)
    assert tables.table(["loss"], where="loss > 3", order=["-loss"]).pandas()["loss"].tolist() == [
        4
    ]
    assert tables.table(["loss", "Loss"]).arrow().column_names[-2:] == ["loss", "Loss"]
    assert len(tables.sql("SELECT * FROM full_pivot").rows()) == 2


def test_values_of_every_kind_come_back_exactly(store):
    values = {
        "f": -0.0, "tiny": 5e-324, "nan": math.nan, "i": 2**53 + 1, "big": 10**30, "b": True,
        "s": "é\n'\"", "lone": "\ud800", "by": b"\x00\xff", "j": {"a": [1, math.nan]},
        "o": {"$object": 1}, "none": None,
    }  # fmt: skip
    store.run((at(), values))
    (row,) = Tables(store.project).table(list(values)).rows()
    assert repr([row[name] for name in values]) == repr(list(values.values()))


def test_a_column_of_several_kinds_loses_nothing(store):
    values = [1, 0.1, "a", None, True, 10**30, b"x", [1, 2], math.inf, "\ud800", {"a": 1}, 2**60]
    store.run(*((at(i=i), {"v": value}) for i, value in enumerate(values)))
    assert [row["v"] for row in Tables(store.project).table(["v"])] == values
    store.run((at(i=0), {"v": 0.25}))  # and when runs of different kinds meet
    assert [row["v"] for row in Tables(store.project).table(["v"])] == [*values, 0.25]


def test_whole_numbers_and_floats_of_different_runs_meet_in_one_column(store):
    store.run((at(), {"v": 1}))
    store.run((at(), {"v": 0.5}))
    assert [row["v"] for row in Tables(store.project).table(["v"])] == [1.0, 0.5]


def test_conditions_choose_rows_by_any_known_value(store):
    a = store.run(*training(3), args={"lr": 0.1})
    b = store.run(*training(3, scale=10.0), args={"lr": 0.2})
    assert rows(store, ["loss"], where="acc > 0.1 AND lr < 0.15") == [
        (a, 2, 0, 1 / 3),
        (a, 2, 1, 0.25),
    ]
    assert rows(store, ["acc"], where="epoch >= 2 OR status = 'dead'") == [(a, 2, 0.2), (b, 2, 0.2)]
    assert rows(store, ["acc"], where="loss < 0.3") == [(a, 2, 0.2)]  # somewhere inside
    assert rows(store, ["lr"], where=["max_lr IS NULL ", "LOSS > 9"][1]) == [(b, 0.2)]
    found = Tables(store.project).iteration_ranges("acc = 0.2 AND step = 0", [a, b])
    assert {one.run for one in found} == {a, b}


def stretches(store, where, *runs):
    found = Tables(store.project).iteration_ranges(where, runs)
    return sorted((one.run, one.outer, one.first, one.last) for one in found)


def test_a_condition_chooses_stretches_of_the_inner_loop(store):
    a = store.run(*training(3, steps=6))
    assert stretches(store, "step BETWEEN 2 AND 3 AND epoch > 0", a) == [(a, 1, 2, 4), (a, 2, 2, 4)]
    assert stretches(store, "loss < 0.2", a) == [(a, 0, 5, None), (a, 1, 4, None), (a, 2, 3, None)]
    assert stretches(store, "step IN (1, 3)", a)[0] == (a, 0, 1, 4)
    # what holds in all of an iteration, or is known of it as a whole, chooses all of it
    assert stretches(store, "acc > 0.15", a) == [(a, 2, 0, None)]
    assert stretches(store, "epoch = 1", a) == [(a, 1, 0, None)]
    assert stretches(store, "seed = 7", a)
    assert stretches(store, "loss > 99", a) == []


def test_a_selected_range_ends_at_the_next_row_that_does_not_fit_the_condition(store):
    calls = [(at(epoch=0, step=j), {"loss": float(j)}) for j in range(0, 50, 10)]
    run = store.run(*calls)
    assert stretches(store, "step > 10", run) == [(run, 0, 11, None)]
    assert stretches(store, "loss = 20 OR loss = 30", run) == [(run, 0, 11, 40)]


def test_a_condition_on_values_outside_of_loops_chooses_the_run(store):
    run = store.run((at(), {"seed": 7}), args={"lr": 0.1})
    (found,) = Tables(store.project).iteration_ranges("lr = 0.1", [run])
    assert (found.run, found.loops) == (run, ())


def test_order_and_limit(store):
    run = store.run(*training(3))
    assert rows(store, ["acc"], order=["-acc"], limit=2) == [(run, 2, 0.2), (run, 1, 0.1)]
    assert rows(store, ["loss"], order=["acc", "-loss"], limit=1) == [(run, 0, 0, 1.0)]
    with pytest.raises(UsageError, match=r"'loss'.*several values"):
        rows(store, ["acc"], order="-loss")
    with pytest.raises(UsageError, match="'axx'"):
        rows(store, ["acc"], order=["axx"])


def test_an_unknown_name_names_the_nearest(store):
    store.run(*training(1), args={"learning_rate": 1})
    with pytest.raises(UsageError, match=r"'los'.*Did you mean loss"):
        rows(store, ["los"])
    with pytest.raises(UsageError, match=r"'lerning_rate'.*learning_rate"):
        rows(store, ["loss"], where="lerning_rate > 1")
    with pytest.raises(UsageError, match="'loss >' cannot be read"):
        rows(store, ["loss"], where="loss >")


def test_nothing_recorded_is_an_empty_table_or_a_clear_error(store):
    assert Tables(store.project).table().rows() == []
    with pytest.raises(UsageError, match="No run has logged anything yet"):
        Tables(store.project).table(["loss"])
    store.run()
    assert Tables(store.project).sql("SELECT count(*) AS n FROM full_pivot").rows() == [{"n": 1}]


def test_a_fillable_name_is_a_column_of_nulls_at_its_points(store):
    a = store.run(*training(2))
    b = store.run((at(), {"seed": 1}))
    found = rows(store, ["norm"], fillable=[("norm", ("epoch",))])
    assert found == [(a, 0, None), (a, 1, None), (b, None, None)]
    inner = rows(store, ["norm", "acc"], fillable=[("norm", ("epoch", "step"))], runs=[a])
    assert inner == [(a, i, j, None, i / 10) for i in range(2) for j in range(2)]
    assert rows(store, ["top"], fillable=[("top", ())]) == [(a, None), (b, None)]


def test_a_fillable_name_with_some_values_shows_empty_cells(store):
    run = store.run(*training(3))
    store.replay(run, "p", (at(epoch=1), {"norm": 5.0}))
    found = rows(store, ["norm"], fillable=[("norm", ("epoch",))], origins=True)
    assert found == [(run, 0, None, None), (run, 1, 5.0, "replayed"), (run, 2, None, None)]


def test_a_fillable_name_that_has_values_deeper_has_no_empty_row_at_its_place(store):
    a = store.run(*((at(epoch=i), {"l": i / 2}) for i in range(3)))
    full = [(a, i, i / 2) for i in range(3)]
    assert rows(store, ["l"], fillable=[("l", ())]) == full
    b = store.run(*((at(epoch=i), {"acc": i}) for i in range(2)))
    assert rows(store, ["l"], fillable=[("l", ())]) == [*full, (b, None, None)]
    assert rows(store, ["l", "acc"], fillable=[("l", ())]) == [
        *((*row, None) for row in full),
        *((b, i, None, i) for i in range(2)),
    ]


def test_a_fillable_name_in_a_loop_of_an_outer_loops_name_has_no_empty_rows(store):
    inner = [
        (Point((Step("i", e), Step("i", k))), {"l": e + k}) for e in range(2) for k in range(2)
    ]
    run = store.run(*inner)
    found = rows(store, ["l"], fillable=[("l", ("i",))])
    assert found == [(run, e, k, e + k) for e in range(2) for k in range(2)]


def test_a_fillable_name_takes_no_row_from_other_names(store):
    a = store.run((at(), {"seed": 7}), (at(epoch=0), {"l": 1}))
    b = store.run((at(), {"seed": 8}), (at(epoch=0), {"acc": 1}))
    found = rows(store, ["seed", "l"], fillable=[("l", ())])
    assert found == [(a, 0, 7, 1), (b, None, 8, None)]


def test_values_of_replays_never_hide_recorded_values(store):
    run = store.run((at(e=0), {"a": 1}), (at(e=1), {"a": 2}))
    store.replay(run, "p1", (at(e=0), {"a": 99, "g": 10}), (at(e=1), {"g": 11}), proved=False)
    store.replay(run, "p2", (at(e=0), {"g": 20}))
    store.replay(run, "p3", (at(e=0), {"g": 30}), proved=False)
    tables = Tables(store.project)
    found = [tuple(row.values())[1:] for row in tables.table(["a", "g"], origins=True)]
    assert found == [
        (0, 1, "recorded", 20, "replayed"),
        (1, 2, "recorded", 11, "unproved"),
    ]
    every = tables.sql("SELECT number, origin FROM records WHERE name = 'a' ORDER BY 1").rows()
    assert [(row["number"], row["origin"]) for row in every] == [
        (1, "recorded"),
        (2, "recorded"),
        (99, "unproved"),
    ]


def test_a_resumed_run_shows_its_last_attempt_and_all_of_its_processes(store):
    run = store.run((at(e=0), {"a": 1}), (at(e=1), {"a": 2}))
    store.add(run, (at(e=1), {"a": 20}), attempt=1)
    store.add(run, (at(e=1), {"a": 21}), attempt=1)
    assert [row[1:] for row in rows(store, ["a"])] == [(0, 1), (1, 20), (1, 21)]


def test_a_running_run_and_one_with_a_torn_end_are_in_the_table(store):
    run = store.run(*training(1), over=False)
    assert len(rows(store, ["loss"])) == 2
    (file,) = store.runs.folder(run).glob("records-*.jsonl")  # its writer lives: not sealed
    data = file.read_bytes()
    file.write_bytes(data[:-20])
    assert Tables(store.project).loops_by_name().keys() == {"seed", "loss", "acc"}
    store.runs.end(run, 1)
    assert len(rows(store, ["loss"])) == 2
    assert file.exists()
    dead = rechecked(re.sub(rb'"born":\d+', b'"born":1', data))
    file.write_bytes(dead[:-20])  # and now it is dead
    assert len(rows(store, ["loss"])) == 2
    assert not file.exists()


MANY = [1, 0.5, "abc", None, True, 10**30, [1, {"a": "b"}], b"x", math.inf, '"quoted"', "1"]


def test_values_of_several_types_keep_their_types_in_data_frames(store):
    store.run(*((at(i=i), {"v": value, "n": i}) for i, value in enumerate(MANY)))
    table = Tables(store.project).table(["v", "n"])
    frame = table.pandas()
    assert [(type(one), one) for one in frame["v"]] == [(type(one), one) for one in MANY]
    assert frame["n"].tolist() == list(range(len(MANY)))
    assert frame["n"].dtype.kind == "i"
    assert frame[frame["v"] == "abc"]["n"].tolist() == [2]
    assert table.polars()["v"].to_list() == MANY
    # Arrow has one type for a column: the text from which each of them can be told
    assert table.arrow()["v"].to_pylist()[:3] == ["1", "0.5", '"abc"']


@pytest.mark.parametrize(
    "values", [[10**30, 1, None], [{"lr": 0.1}, None, [1, 2]], [b"a", None, b"\x00"]]
)
def test_values_without_a_pandas_type_stay_python_values(store, values):
    store.run(*((at(i=i), {"v": value}) for i, value in enumerate(values)))
    table = Tables(store.project).table(["v"])
    assert table.pandas()["v"].tolist() == values == [row["v"] for row in table]


def test_an_empty_table_of_several_types_is_a_data_frame(store):
    store.run((at(i=0), {"v": 1}), (at(i=1), {"v": "a"}))
    table = Tables(store.project).table(["v"], where="i > 5")
    assert (len(table.pandas()), len(table.polars())) == (0, 0)


def test_data_frames_of_all_kinds_hold_the_same(store):
    store.run(*training(2))
    table = Tables(store.project).table(["loss", "acc"])
    wanted = [1.0, 0.5, 0.5, 1 / 3]
    assert table.pandas()["loss"].tolist() == wanted
    assert table.polars()["loss"].to_list() == wanted
    assert table.arrow()["loss"].to_pylist() == wanted
    assert table.count() == 4


def test_sql_sees_every_table_and_view_as_described(store, tmp_path):
    write(tmp_path, {"train.py": "x\n"})
    kept = versions_of(tmp_path)
    run = store.run(*training(2), args={"lr": 0.1, "deep": {"a": 1}})
    version = kept.save(run)
    ref = ObjectRef("0" * 64, 10)
    saved = Checkpoint(
        "c1", run, 0, at(epoch=1), Edge.START, {"a": ref}, missing=(MissingPart("", "why"),)
    )
    tables = Tables(store.project, checkpoints=lambda: [saved], versions=kept)
    for name, (_, columns) in schema.TABLES.items():
        described = tables.sql(f"DESCRIBE {name}").rows()
        found = {row["column_name"]: row["column_type"] for row in described}
        assert found == {column: kind for column, (kind, _) in columns.items()}, name
    assert tables.sql("SELECT path, hash FROM files WHERE path = 'train.py'").count() == 1
    assert tables.sql("SELECT version, run FROM versions").rows() == [
        {"version": version, "run": run}
    ]
    (row,) = tables.sql("SELECT point, bytes, missing FROM checkpoints").rows()
    assert row == {"point": "epoch=1", "bytes": 10, "missing": ["why"]}
    loops = tables.sql("SELECT path, depth, iterations FROM loops ORDER BY path").rows()
    assert [tuple(row.values()) for row in loops] == [("epoch", 1, 2), ("epoch/step", 2, 2)]
    assert tables.sql("SELECT count(*) AS n FROM points").rows() == [{"n": 7}]
    for view, n in {"setup_pivot": 1, "outer_pivot": 2, "inner_pivot": 4, "pivot_1": 2}.items():
        assert tables.sql(f"SELECT * FROM {view}").count() == n, view
    full = tables.sql("SELECT avg(loss) AS m FROM full_pivot WHERE lr = 0.1 GROUP BY epoch").rows()
    assert len(full) == 2


@pytest.mark.parametrize(
    "query",
    [
        "CREATE TABLE x (a INT)",
        "DELETE FROM records",
        "COPY (SELECT 1) TO '{store}/stolen.csv'",
        "SELECT 1; SELECT 2",
        "ATTACH '{store}/x.db'",
        "SET memory_limit = '1GB'",
        "INSTALL httpfs",
        "",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}/stolen.csv'",
        "SELECT * FROM nowhere",
    ],
)
def test_sql_that_writes_or_reads_elsewhere_is_refused(tmp_path, query):
    store = Recorded(tmp_path)
    store.run(*training(1))
    with pytest.raises(UsageError):
        Tables(store.project).sql(query.format(store=store.project.store)).rows()
    assert not list(tmp_path.rglob("stolen*"))


def test_a_condition_cannot_smuggle_in_another_statement(tmp_path):
    store = Recorded(tmp_path)
    store.run(*training(1))
    evil = f"1=1) ORDER BY 1; COPY (SELECT 1) TO '{store.project.store}/stolen.csv'; SELECT (1"
    with pytest.raises(UsageError, match="cannot be read"):
        Tables(store.project).table(["loss"], where=evil).rows()
    assert not list(tmp_path.rglob("stolen*"))


def test_a_condition_that_cannot_be_read_is_shown_unchanged(tmp_path):
    store = Recorded(tmp_path)
    store.run(*training(1))
    with pytest.raises(UsageError, match="'loss < '") as caught:
        Tables(store.project).table(["loss"], where="loss < ")
    assert "LINE" not in str(caught.value)


def test_a_comment_at_the_end_of_a_condition_does_no_harm(tmp_path):
    store = Recorded(tmp_path)
    store.run(*training(1))
    assert Tables(store.project).table(["loss"], where="loss is not null -- all").rows()


def test_the_list_of_tables_has_the_pivoted_views(tmp_path):
    store = Recorded(tmp_path)
    store.run((at(fold=0, epoch=0, step=0), {"loss": 1.0}))
    found = {row["name"] for row in Tables(store.project).sql("SHOW TABLES")}
    assert found >= {
        "full_pivot",
        "setup_pivot",
        "outer_pivot",
        "inner_pivot",
        "pivot_3",
        "records",
    }
    assert "pivot_4" not in found


def test_loops_deeper_than_any_have_no_points(tmp_path):
    store = Recorded(tmp_path)
    store.run(*training(1))
    assert Tables(store.project).sql("SELECT * FROM pivot_7").rows() == []


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from recorded import Recorded, at, rechecked
store, k = Recorded(Path(sys.argv[1])), int(sys.argv[2])
store.run(*((at(i=i), {"who": k, "i": i, "x": i / 7}) for i in range(500)), args={"k": k})
"""


def test_eight_processes_recording_at_once_lose_nothing(tmp_path):
    env = os.environ | {"PYTHONPATH": SRC}
    store = Recorded(tmp_path)

    def start(k):
        argv = [sys.executable, "-c", WRITER, str(tmp_path), str(k), str(Path(__file__).parents[2])]
        subprocess.run(argv, env=env, check=True)

    with ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(start, k) for k in range(8)]
        while not all(job.done() for job in jobs):  # a reader in between seals what is complete
            Tables(store.project).table().count()
        for job in jobs:
            job.result()
    found = Tables(store.project).sql(
        "SELECT k, count(*) n, sum(i) s FROM full_pivot GROUP BY k ORDER BY k"
    )
    assert [tuple(row.values()) for row in found] == [(k, 500, 499 * 250) for k in range(8)]


def test_records_of_a_newer_format_are_refused(tmp_path):
    store = Recorded(tmp_path)
    run = store.run(*training(1), over=False)
    (store.runs.folder(run) / "records-1-0.jsonl").write_bytes(b'{"format":3,"run":"r"}\n')
    with pytest.raises(StoreError, match="format 3"):
        rows(store, ["loss"])
    (store.project.store / "format").write_text("99\n")
    with pytest.raises(StoreError, match="format 99"):
        store.project.check()


def test_the_page_about_the_tables_is_current():
    page = Path(__file__).parents[3] / "docs/schema.md"
    assert page.read_text() == schema.markdown(), "make docs writes it anew"


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN SELECT * FROM records",
        "explain analyze select count(*) from full_pivot where step > 0;",
        "EXPLAIN (FORMAT JSON) SELECT * FROM outer_pivot -- how",
        "-- how\nEXPLAIN /* this */ WITH a AS (SELECT 1 AS x) SELECT * FROM a",
    ],
)
def test_sql_can_explain_the_plan_of_a_query(store, query):
    store.run(*training(2))
    table = Tables(store.project).sql(query)
    assert table.columns == ["explain_key", "explain_value"]
    assert table.count() == len(table.rows()) >= 1


@pytest.mark.parametrize(
    "query",
    [
        "DESCRIBE records",
        "SHOW TABLES",
        "SUMMARIZE SELECT step FROM full_pivot",
        "PRAGMA table_info('runs')",
        "pragma show_tables;",
    ],
)
def test_sql_can_describe_and_summarize_a_table(store, query):
    store.run(*training(2))
    assert Tables(store.project).sql(query).rows()


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN DELETE FROM own.runs",
        "EXPLAIN ANALYZE DELETE FROM own.runs",
        "EXPLAIN (ANALYZE) INSERT INTO own.runs SELECT * FROM own.runs",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}'",
        "EXPLAIN ANALYZE WITH a AS (COPY (SELECT 1) TO '{file}') SELECT * FROM a",
        "WITH a AS (COPY (SELECT 1) TO '{file}') SELECT * FROM a",
        "EXPLAIN SELECT 1; DROP TABLE own.runs",
        "EXPLAIN SELECT 1) x; DROP TABLE own.runs; SELECT * FROM (SELECT 1",
        "EXPLAIN ANALYZE CREATE TABLE own.more AS SELECT 1",
        "PRAGMA enable_profiling",
        "PRAGMA threads = 1",
        "PRAGMA table_info('runs'); DROP TABLE own.runs",
        "SET threads = 1",
        "CALL pragma_version()",
        "EXPLAIN",
    ],
)
def test_every_query_that_writes_is_refused(store, query):
    store.run(*training(2))
    file = store.project.store / "written.csv"
    tables = Tables(store.project)
    with pytest.raises(UsageError):
        tables.sql(query.format(file=file)).rows()
    assert not file.exists()
    assert tables.sql("SELECT count(*) AS n FROM runs").rows() == [{"n": 1}]
