"""Loops that share a name are still two loops: a backfill finds every value, or says what is missing."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from plainly import recorded, write
from rearview._history import history
from rearview.durable_files import add_check

pytestmark = pytest.mark.usefixtures("warm_start")

PROBE = "# probe"

HEAD = """
import time
import rearview

ticks = [0]


def tick():
    ticks[0] += 1
    time.sleep(0.001)
    return ticks[0]


"""

PROGRAMS = {
    "a loop in a function called in a loop of its name": """
        def f():
            for i in range(5):
                x = tick()
                # probe
        for i in range(2):
            f()
    """,
    "a loop after the main one, named as one inside it": """
        for epoch in range(4):
            for i in range(0, 6, 2):
                y = tick()
            y = tick()
        for i in range(15):
            x = tick()
            # probe
    """,
    "a loop before the main one, named as it": """
        for i in range(3):
            x = tick()
            # probe
        for i in range(12):
            y = tick()
    """,
    "the main loop, named as others before and after it": """
        for i in range(3):
            y = tick()
        for i in range(12):
            for j in range(2):
                x = tick()
                # probe
        for i in range(4):
            y = tick()
    """,
    "one function called in two loops and in none": """
        def f(n):
            for i in range(n):
                x = tick()
                # probe
        f(2)
        for i in range(6):
            f(3)
            for j in range(2):
                f(1)
        for j in range(2):
            f(2)
        f(2)
    """,
    "the main loop entered twice": """
        def fit(n):
            for epoch in range(n):
                for i in range(3):
                    x = tick()
                    # probe
        fit(5)
        fit(2)
    """,
    "a loop that calls itself": """
        def walk(depth):
            for i in range(2):
                x = tick()
                # probe
                if depth:
                    walk(depth - 1)
        for i in range(3):
            walk(2)
    """,
    "recursion deeper than it is followed": """
        def walk(depth):
            for i in range(1 + (depth % 3 == 0)):
                x = tick()
                # probe
                if depth:
                    walk(depth - 1)
        walk(11)
    """,
    "two loops of a name, one after the other": """
        def fit():
            for i in range(4):
                y = tick()
            for i in range(3):
                x = tick()
                # probe
        for epoch in range(5):
            fit()
    """,
    "directly inside a loop of its name": """
        for i in range(4):
            for i in range(3):
                x = tick()
                # probe
    """,
    "left early, and not always": """
        for i in range(6):
            for j in range(9):
                x = tick()
                # probe
                if (i + j) % 4 == 3:
                    break
            else:
                continue
            y = tick()
    """,
    "in a generator that several loops draw from": """
        def fit(n):
            for epoch in range(n):
                for i in range(2):
                    y = tick()
                x = tick()
                # probe
                yield epoch
        for epoch in fit(5):
            y = tick()
        for run in range(2):
            for epoch in fit(3):
                y = tick()
    """,
    "in a function that a generator calls": """
        def step():
            x = tick()
            # probe
            return x
        def fit(n):
            for epoch in range(n):
                yield step()
        for epoch in fit(6):
            y = tick()
        for other in fit(3):
            y = tick()
    """,
    "in a generator kept open over a loop": """
        def source():
            while True:
                x = tick()
                # probe
                yield x
        items = source()
        for epoch in range(4):
            for i in range(3):
                y = next(items)
    """,
    "named by the program": """
        def f():
            for i in rearview.loop("i", range(4)):
                x = tick()
                # probe
        for i in rearview.loop("epoch", range(3)):
            f()
    """,
    "a while loop in a function of its name": """
        def i():
            n = 0
            while n < 3:
                x = tick()
                # probe
                n += 1
        for k in range(4):
            i()
        i()
    """,
    "only sometimes": """
        for i in range(8):
            for j in range(3):
                x = tick()
                if i % 3 == j:
                    pass
                    # probe
    """,
}


def with_probe(text):
    return text.replace(PROBE, 'rearview.log("x", x)')


def truth(text):
    """Return what the probe logs in a plain run."""
    found = []
    space = {"rearview": SimpleNamespace(log=lambda _, x: found.append(x), loop=lambda _, xs: xs)}
    exec(with_probe(text).replace("import rearview\n", ""), space)
    return found


def filled(folder, text, **asked):
    """Record a program, add its probe, ask twice; return the values and the report."""
    write(folder, train=text)
    ended = recorded(folder, "train.py")
    assert ended.code == 0, ended.err
    (folder / "train.py").write_text(with_probe(text))
    past = history(folder)
    report = past.backfill(["x"], **asked)
    rows = list(
        past.sql(
            "SELECT number FROM records WHERE name = 'x' AND (origin = 'recorded' OR replay IS NOT NULL) ORDER BY seq"
        )
    )
    assert past.plan(["x"], **asked).nothing or not report.proved
    return [int(row["number"]) for row in rows], report


def invoke(folder, *words):
    """Run a command of Rearview in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "REARVIEW_ROOT": str(folder)},
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_value_is_filled_for_any_names_of_loops(program, tmp_path):
    text = HEAD + textwrap.dedent(PROGRAMS[program])
    values, report = filled(tmp_path, text)
    assert report.proved, report.proof
    assert sorted(values) == truth(text)


@st.composite
def programs(draw):
    """Return a program of nested loops in functions that all share two names; one holds the probe."""
    names = st.sampled_from(["i", "i", "j"])
    places = []

    def block(indent, depth, callees):
        lines = []
        for _ in range(draw(st.integers(1, 2))):
            kind = draw(st.sampled_from(["loop", "loop", "call", "tick"] if depth else ["tick"]))
            if kind == "loop":
                over = draw(st.sampled_from(["range({})", "[*range({})]", "iter(range({}))"]))
                count = draw(st.integers(1, 3))
                lines.append(f"{indent}for {draw(names)} in {over.format(count)}:")
                lines += block(indent + "    ", depth - 1, callees)
            elif kind == "call" and callees:
                lines.append(f"{indent}{draw(st.sampled_from(callees))}()")
            else:
                lines.append(f"{indent}x = tick()")
                lines.append(f"{indent}# {len(places)}")
                places.append(len(places))
        return lines

    lines, callees = [], []
    for name in ["f", "g"]:
        lines += [f"def {name}():", *block("    ", 2, list(callees)), "", ""]
        callees.append(name)
    lines += ["for i in range(4):", *block("    ", 2, callees)]
    lines += block("", 2, callees)
    chosen = draw(st.sampled_from(places))
    text = "\n".join(f"{line}\n" for line in lines)
    kept = [
        line[: len(line) - len(line.lstrip())] + PROBE if line.strip() == f"# {chosen}" else line
        for line in text.splitlines()
    ]
    return HEAD + "\n".join(kept) + "\n"


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(text=programs())
def test_any_nest_of_loops_that_share_names_is_filled_as_a_plain_run_logs(text):
    with tempfile.TemporaryDirectory() as folder:
        values, report = filled(Path(folder), text)
    expected = truth(text)
    assert sorted(values) == expected
    assert report.proved or not expected, report.proof


def test_a_replay_that_runs_less_than_the_run_did_says_that_values_are_missing(tmp_path):
    text = HEAD + textwrap.dedent(PROGRAMS["a loop in a function called in a loop of its name"])
    write(tmp_path, train=text)
    recorded(tmp_path, "train.py")
    (end,) = tmp_path.glob(".rearview/runs/*/end.json")
    told = json.loads(end.read_text())
    (site,) = told["main"]["counts"]
    told["main"]["counts"][site] = [5, 6]  # as if one more had run then
    del told["c"]
    end.write_bytes(add_check(json.dumps(told).encode()))
    (tmp_path / "train.py").write_text(with_probe(text))
    past = history(tmp_path)
    report = past.backfill(["x"])
    assert not report.proved
    assert "had 10 iterations, in the run 11" in report.proof
    assert not past.plan(["x"]).nothing
    assert invoke(tmp_path, "backfill", "x", "--yes").code == 1


def test_iterations_of_a_loop_in_one_of_its_name_are_asked_for_by_its_column(tmp_path):
    text = HEAD + textwrap.dedent(PROGRAMS["a loop in a function called in a loop of its name"])
    values, report = filled(tmp_path, text, at="i=1/i_2=2:4")
    assert report.proved, report.proof
    assert sorted(values) == truth(text)[7:9]


def test_a_table_keeps_the_order_of_logging_and_replayed_values_are_at_their_points(tmp_path):
    text = HEAD + textwrap.dedent(
        """
        rearview.log("at", tick())
        for warm in range(2):
            rearview.log("at", tick())
        for epoch in range(2):
            for b in range(2):
                rearview.log("at", tick())
            rearview.log("at", tick())
            for a in range(2):
                x = tick()
                # probe
                rearview.log("at", tick())
        for warm in range(3):
            rearview.log("at", tick())
        rearview.log("at", tick())
        """
    )
    _, report = filled(tmp_path, text)
    assert report.proved, report.proof
    past = history(tmp_path)
    logged = past.table("at").rows()
    recorded_order = past.sql(
        "SELECT number FROM records WHERE name = 'at' AND (origin = 'recorded' OR replay IS NOT NULL) ORDER BY seq"
    )
    expected = [row["number"] for row in list(recorded_order)]
    assert expected == sorted(expected)
    assert [row["at"] for row in logged] == expected
    assert list(past.table("at").pandas()["at"]) == expected
    both = past.table("at", "x").rows()
    assert [row["at"] for row in both] == expected
    assert [row["x"] for row in both if row["x"] is not None] == sorted(
        row["x"] for row in both if row["x"] is not None
    )
    printed = invoke(tmp_path, "table", "at", "--format", "csv").out.split()[1:]
    assert [int(line.rpartition(",")[2]) for line in printed] == expected
