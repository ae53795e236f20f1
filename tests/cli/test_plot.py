"""Logged values as lines: in the terminal, as SVG, as PNG."""

import math
import sys
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rearview._history import history
from rearview._history.text_and_svg_plots import ChartLine, braille, svg
from recorded import Recorded, at

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Recorded(tmp_path)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8), max_size=4))
def test_any_numbers_can_be_drawn(points):
    lines = [ChartLine("a<b>&\x1b", each) for each in points]
    rows = braille(lines, 10, 4)
    assert [len(row) for row in rows] == [10] * 4
    drawn = ET.fromstring(svg(lines, "t", "x"))
    texts = "".join(drawn.itertext())
    assert "nan" not in texts
    finite = any(math.isfinite(x) and math.isfinite(y) for each in points for x, y in each)
    assert finite == any(char != " " for row in rows for char, _ in row)


def test_a_rising_line_rises():
    rows = braille([ChartLine("a", [(0, 0), (1, 1)])], 4, 2)
    assert ["".join(char for char, _ in row) for row in rows] == ["  ⡠⠊", "⡠⠊  "]


def test_several_runs_are_overlaid_with_their_names(command, project):
    runs = [project.run(*((at(epoch=k), {"acc": k * s}) for k in range(5))) for s in (1.0, 2.0)]
    command("name", runs[0], "base")
    code, out, _ = command("plot", "acc")
    assert code == 0
    assert "base" in out
    assert runs[1] in out
    assert "epoch" in out
    assert any("\u2800" < char < "\u28ff" for char in out)
    assert max(map(len, out.splitlines())) <= 80
    assert command("plot", "acc", "--runs", "base", "-o", "a.svg")[0] == 0
    one = ET.parse("a.svg").getroot()
    command("plot", "acc", "-o", "a.svg")
    two = ET.parse("a.svg").getroot()
    counts = [len(root.findall("{http://www.w3.org/2000/svg}polyline")) for root in (one, two)]
    assert counts == [1, 2]


def test_a_nan_breaks_a_line_and_texts_are_left_out(command, project):
    values = [1.0, 2.0, math.nan, 3.0, 4.0, "text"]
    project.run(*((at(epoch=k), {"acc": v}) for k, v in enumerate(values)))
    assert command("plot", "acc", "-o", "a.svg")[0] == 0
    assert len(ET.parse("a.svg").getroot().findall("{*}polyline")) == 2


def test_values_of_nested_loops_follow_each_other(command, project):
    points = [at(epoch=k, step=i) for k in range(2) for i in range(3)]
    project.run(*((point, {"loss": n}) for n, point in enumerate(points)))
    out = command("plot", "loss")[1]
    assert "values logged" in out
    assert out.splitlines()[-2].split()[0] == "0"


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (("nothing",), "unknown-name"),
        (("text",), "nothing-to-plot"),
        (("acc", "-o", "no/folder/a.svg"), "file-unwritable"),
        (("acc", "-o", "a.gif"), ".svg"),
        (("acc", "--runs", "nothing"), "no-run"),
    ],
)
def test_a_name_that_cannot_be_plotted_is_explained(command, project, words, slug):
    project.run((at(epoch=0), {"acc": 1, "text": "a"}))
    code, _, err = command("plot", *words)
    assert code == 2
    assert slug in err


def test_without_matplotlib_a_png_is_refused_with_advice(command, project, monkeypatch):
    project.run((at(epoch=0), {"acc": 1}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = command("plot", "acc", "-o", "a.png")
    assert code == 2
    assert "pip install matplotlib" in err


def test_with_matplotlib_a_png_is_written(command, project, tmp_path):
    pytest.importorskip("matplotlib")
    project.run((at(epoch=0), {"acc": 1}), (at(epoch=1), {"acc": 2}))
    assert command("plot", "acc", "-o", "a.png")[0] == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_argument_are_drawn_as_their_mean(command, project):
    for lr, seed in ((0.1, 0.0), (0.1, 2.0), (0.5, 5.0)):
        calls = ((at(epoch=k), {"acc": k + seed}) for k in range(3))
        project.run(*calls, args={"lr": lr})
    found = history(project.project.root).plot("acc", by="lr")
    assert [line.label for line in found.lines] == ["lr=0.1", "lr=0.5"]
    assert found.lines[0].points == [(0, 1), (1, 2), (2, 3)]
    assert found._repr_html_().startswith("<svg")
    assert command("plot", "acc", "--by", "lr")[0] == 0
    code, _, err = command("plot", "acc", "--by", "rate")
    assert code == 2
    assert "lr" in err
