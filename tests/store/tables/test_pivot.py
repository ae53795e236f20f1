"""The pivot by SQL equals a pivot by plain Python, for programs of any shape."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rearview.model import Point, Step
from rearview.store.tables import read_record_files as points_module
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.pivot import depth, inside, loop_columns, prefixes, rows_of
from recorded import Recorded

NAMES = ("a", "b", "c")
log = st.tuples(st.just("log"), st.sampled_from(NAMES), st.none() | st.integers(0, 9))
program = st.recursive(
    st.lists(log, max_size=2),
    lambda body: st.lists(
        log | st.tuples(st.just("loop"), st.sampled_from("ij"), st.integers(1, 2), body), max_size=3
    ),
    max_leaves=6,
)


START = Point()


def execute(body, point=START):
    """Yield (point, name, value) as a program would log."""
    for what, name, *rest in body:
        if what == "log":
            yield point, name, rest[0]
        else:
            for i in range(rest[0]):
                yield from execute(rest[1], Point((*point.steps, Step(name, i))))


def expected(runs, names):
    """Return the rows of the table, by the rules that docs/schema.md states."""
    paths = {
        name: {"/".join(p.loops) for _, log in runs for p, n, _ in log if n == name}
        for name in names
    }
    kept = rows_of(paths).always_shown
    ranks: dict[str, int] = {}
    for _, records in runs:  # as the store sees them: by name, each at its first record
        firsts: dict[tuple[str, str], int] = {}
        for k, (p, n, _) in enumerate(records):
            firsts.setdefault(("/".join(p.loops), n), k)
        for path, _ in sorted(firsts, key=firsts.get):
            for one in (*prefixes(path), path):
                ranks.setdefault(one, len(ranks))
    loops = [
        c
        for path in sorted({p for found in paths.values() for p in found}, key=lambda p: ranks[p])
        for c in loop_columns(path)
    ]
    loops = list(dict.fromkeys(loops))
    out = []
    for order, (run, records) in enumerate(runs):
        cells: dict[Point, dict[str, list]] = {}
        numbers: dict[tuple[Point, int], int] = {}
        for number, (p, n, v) in enumerate(records):
            if n in names:
                cells.setdefault(p, {}).setdefault(n, []).append(v)
                numbers.setdefault((p, len(cells[p][n]) - 1), number)
        for p, found in cells.items():
            path = "/".join(p.loops)
            deeper = any(q != p and q.steps[: len(p.steps)] == p.steps for q in cells)
            if deeper and path not in kept:
                continue
            for occ in range(max(map(len, found.values()))):
                row = {"run": run, **dict.fromkeys(loops)}
                row |= {c: s.label for c, s in zip(loop_columns(path), p.steps, strict=True)}
                for n in names:
                    here = found.get(n, [])
                    value = here[occ] if occ < len(here) else None
                    for k in range(len(p.steps) - 1, -1, -1):
                        if value is None:
                            outer = cells.get(Point(p.steps[:k]), {}).get(n, [])
                            value = next((v for v in reversed(outer) if v is not None), None)
                    row[f"{n}"] = value
                out.append(((order, numbers[p, occ]), row))
    return [row for _, row in sorted(out, key=lambda item: item[0])]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(program, min_size=1, max_size=2),
    st.sets(st.sampled_from(NAMES), min_size=1),
    st.booleans(),
)
def test_a_table_equals_a_pivot_of_the_records_in_plain_python(
    tmp_path_factory, monkeypatch, programs, names, before
):
    monkeypatch.setattr(points_module, "ENOUGH", 0 if before else 10**9)
    store = Recorded(tmp_path_factory.mktemp("p"))
    runs = []
    for body in programs:
        records = list(execute(body))
        runs.append((store.run(*((p, {n: v}) for p, n, v in records)), records))
    logged = {n for _, log in runs for _, n, _ in log}
    names = sorted(names & logged)
    if names:
        tables, wanted = Tables(store.project), expected(runs, names)
        assert tables.table(names).rows() == wanted
        for limit in range(4):
            assert tables.table(names, limit=limit).rows() == wanted[:limit]


def test_paths():
    assert (depth(""), depth("a"), depth("a/b")) == (0, 1, 2)
    assert inside("a/b", "a")
    assert inside("a", "")
    assert not inside("ab", "a")


def test_rows_of_a_table():
    rows = rows_of({"loss": {"e/s"}, "acc": {"e"}, "seed": {""}})
    assert (rows.paths, rows.always_shown) == (("", "e", "e/s"), {"e/s"})
    assert rows_of({"loss": {"e/s", "e"}}).always_shown == {"e/s", "e"}
    assert rows_of({"a": {"e/s"}, "b": {"e/v"}}).always_shown == {"e/s", "e/v"}
