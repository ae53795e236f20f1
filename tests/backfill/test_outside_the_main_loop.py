"""A statement outside the main loop is filled wherever it runs: before that loop, after it, or both."""

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.model import Verdict

PROBE = '    rearview.log("largest", w)'
SETUP = """
import random
import rearview
random.seed(1)
w = 1.0
"""
LOOPS = """
for epoch in range(4):
    for step in range(3):
        w += random.random()
    rearview.log("w", w)
"""
SHAPES = {
    "a function with a loop of its own, called after": SETUP
    + """
def measure():
{probe}
    total = 0
    for part in range(3):
        total += w * part
    return total
"""
    + LOOPS
    + "print(measure())\n",
    "a method that another function calls after the loop": SETUP
    + """
class Report:
    def __init__(self):
        self.rows = []
    def fill(self):
    {probe}
        for part in range(3):
            self.rows.append(part)
def finish(report):
    report.fill()
"""
    + LOOPS
    + "finish(Report())\n",
    "a function that is called before and after": SETUP
    + """
def measure():
{probe}
    for part in range(3):
        pass
measure()
"""
    + LOOPS
    + "measure()\n",
    "a method that the end of a with statement calls": SETUP
    + """
class Report:
    def __enter__(self):
        pass
    def __exit__(self, *error):
    {probe}
        for part in range(3):
            pass
def train(epochs):
    global w
    for epoch in range(epochs):
        for step in range(3):
            w += random.random()
        rearview.log("w", w)
with Report():
    train(4)
""",
    "a function that the else clause of the loop calls": SETUP
    + """
def measure():
{probe}
    for part in range(3):
        pass
"""
    + LOOPS
    + "else:\n    measure()\n",
    "a function that is called only before": SETUP
    + """
def measure():
{probe}
    for part in range(3):
        pass
measure()
"""
    + LOOPS,
    "a function whose result the training function gets": SETUP
    + """
def measure():
{probe}
    for part in range(3):
        pass
    return 4
def train(epochs):
    global w
    for epoch in range(epochs):
        for step in range(3):
            w += random.random()
        rearview.log("w", w)
train(measure())
""",
    "a function that gets the result of the training function": SETUP
    + """
def measure(value):
{probe}
    for part in range(3):
        pass
def train(epochs):
    global w
    for epoch in range(epochs):
        for step in range(3):
            w += random.random()
        rearview.log("w", w)
    return w
measure(train(4))
""",
    "a function that is handed on and called after": SETUP
    + """
def measure():
{probe}
    for part in range(3):
        pass
def at_the_end(functions):
    for function in functions:
        function()
"""
    + LOOPS
    + "at_the_end([measure])\n",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_statement_outside_the_main_loop_gets_every_value(shape, tmp_path):
    without, probed = (SHAPES[shape].replace("{probe}", line) for line in ("    pass", PROBE))
    write(tmp_path, train=without)
    assert recorded(tmp_path, "train.py").code == 0
    truth = []
    counted = probed.replace(PROBE.strip(), "truth.append(w)").replace("import rearview\n", "")
    exec(counted.replace('rearview.log("w", w)', "pass"), {"truth": truth})
    assert truth
    write(tmp_path, train=probed)
    past = history(tmp_path)
    report = past.backfill(["largest"])
    values = [row["number"] for row in past.sql("FROM records WHERE name = 'largest' ORDER BY seq")]
    assert values == truth
    verdicts = {outcome.proof.verdict for outcome in report.outcomes}
    assert verdicts <= {Verdict.EXACT, Verdict.UNPROVED}  # before the loop, little was recorded
    assert past.plan(["largest"]).nothing
