"""Outputs are the same, different with the reason, or not comparable with the reason."""

import base64
import io

import pytest
from PIL import Image

from rearview.multiversion.compare_outputs import OutputMatch, Tolerance, compare


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data):
    return {
        "output_type": "execute_result",
        "data": {k.replace("_", "/"): v for k, v in data.items()},
    }


def error(name, value):
    return {"output_type": "error", "ename": name, "evalue": value, "traceback": ["at 0x7f00aa"]}


def picture(color, size=(8, 8), dot=None):
    image = Image.new("RGB", size, color)
    if dot:
        image.putpixel(dot, (0, 0, 0))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {
        "output_type": "display_data",
        "data": {"image/png": base64.b64encode(buffer.getvalue()).decode()},
    }


TABLE = "<table><tr><th></th><th>acc</th></tr><tr><td>0</td><td>{}</td></tr></table>"
LOOSE = Tolerance(relative=1e-3)


@pytest.mark.parametrize(
    ("author", "replayed", "tolerance", "same", "why"),
    [
        ([stream("a\n"), stream("b\n")], [stream("a\nb\n")], None, "same", ""),
        ([stream("loss 0.5")], [stream("loss 0.6")], None, "different", "'loss 0.6' instead of"),
        ([stream("loss 0.5000")], [stream("loss 0.5001")], LOOSE, "same", ""),
        ([stream("loss 0.5")], [stream("loss 0.6")], LOOSE, "different", "line 1"),
        ([stream("x nan")], [stream("x nan ")], LOOSE, "same", ""),
        ([stream("<A at 0x7f0011223344>")], [stream("<A at 0x7faa11223344>")], None, "not comparable", "address"),
        ([stream("at 2026-01-02 10:00:00")], [stream("at 2026-01-03 11:00:00")], None, "not comparable", "a time"),
        ([stream("took 3.2 s")], [stream("took 4 s")], None, "not comparable", "a duration"),
        ([stream("took 3.2 s, loss 1")], [stream("took 4 s, loss 2")], None, "different", ""),
        ([stream(" 10%\r100%\n")], [stream("100%\n")], None, "same", ""),
        ([stream("a"), stream("warn 1", "stderr")], [stream("a")], None, "not comparable", "standard error"),
        ([stream("a"), stream("w1", "stderr")], [stream("a"), stream("w2", "stderr")], None, "not comparable", "standard error"),
        ([shown(text_plain="3")], [shown(text_plain="3")], None, "same", ""),
        ([shown(text_plain="3")], [], None, "different", "0 outputs instead of 1"),
        ([shown(text_html=TABLE.format(0.5))], [shown(text_html=TABLE.format(0.7))], None, "different", "row 1, acc"),
        ([shown(text_html=TABLE.format(0.5))], [shown(text_html=TABLE.format(0.50001))], LOOSE, "same", ""),
        ([error("ValueError", "bad 3")], [error("ValueError", "bad 3")], None, "same", ""),
        ([error("ValueError", "bad")], [error("KeyError", "bad")], None, "different", "KeyError instead of"),
        ([stream("a")], [stream("a"), error("KeyError", "k")], None, "different", "KeyError: k"),
        (None, [stream("a")], None, "not comparable", "not recorded"),
        ([picture("red")], [picture("red")], None, "same", ""),
        ([picture("red")], [picture("red", dot=(1, 2))], None, "different", "1.56%"),
        ([picture("red")], [picture("red", size=(9, 8))], None, "different", "9x8 instead of 8x8"),
        ([picture("red", (64, 64))], [picture("red", (64, 64), (1, 2))], Tolerance(perceptual=True), "same", ""),
        ([picture("red")], [picture("black")], Tolerance(perceptual=True), "different", "looks different"),
        ([{"output_type": "display_data", "data": {"image/png": "AAAA"}}], [picture("red")], None, "not comparable", "cannot be read"),
        ([shown(application_x="1")], [shown(application_x="2")], None, "not comparable", "cannot be compared"),
    ],
)  # fmt: skip
def test_outputs_are_same_different_or_not_comparable(author, replayed, tolerance, same, why):
    verdict = compare(author, replayed, tolerance)
    assert verdict.match == OutputMatch(same)
    assert why in verdict.why


def test_a_difference_comes_with_a_diff():
    verdict = compare([stream("a\nb\n")], [stream("a\nc\n")])
    assert "-b" in verdict.diff
    assert "+c" in verdict.diff


@pytest.mark.parametrize(
    "text",
    ["/" * 300_000, "".join(f"{i % 17}\n" for i in range(60_000)), "\ud800"],
    ids=["slashes", "lines", "surrogate"],
)
def test_outputs_of_any_shape_are_compared_without_end(text):
    a = [{"output_type": "stream", "name": "stdout", "text": text}]
    b = [{"output_type": "stream", "name": "stdout", "text": f"{text}x\n"}]
    assert compare(a, b).match is OutputMatch.DIFFERENT


@pytest.mark.parametrize(
    "data", [[1], "x", {"image/png": [1]}, {"image/png": "JSFQUy1BZG9iZQ=="}, {"image/png": None}]
)
def test_outputs_that_no_notebook_has_are_judged_without_an_error(data):
    a, b = ([{"output_type": "display_data", "data": d}] for d in (data, {"image/png": "AAAA"}))
    assert compare(a, b).match is not OutputMatch.SAME
