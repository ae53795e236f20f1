import csv
import doctest
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rearview.cli import demo, doctor_verify_gc, options
from rearview.cli.terminal import output

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.lists(st.tuples(scalars, scalars)))
def test_json_lines_bring_back_every_row(rows):
    text = "\n".join(output.json_lines(["a", "b"], rows))
    back = json.loads(text)
    assert back == [{"a": named(a), "b": named(b)} for a, b in rows]


def named(value):
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


@given(st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.text())))
def test_csv_brings_back_every_float_and_text(rows):
    text = "\n".join(output.csv_lines(["a", "b"], rows))
    back = list(csv.reader(io.StringIO(text, newline="")))[1:]
    assert [(float(number), text) for number, text in back] == rows


@pytest.mark.parametrize("module", [output, options, doctor_verify_gc, demo])
def test_examples_in_the_source_are_true(module):
    assert doctest.testmod(module).failed == 0
