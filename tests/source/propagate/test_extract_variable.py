"""What the newest source names is named in older versions too, or refused with the reason."""

import pytest

from rearview.source.probes.find import check, find
from rearview.source.probes.probe import VariableExtraction
from rearview.source.propagate.extract_variable import extract_variables
from rearview.source.propagate.versions import HandPlace, Statement, through

NEWEST = """\
from torch.nn.utils import clip_grad_norm_
rate = 0.1
for epoch in range(3):
    for x in data:
        loss = f(x)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    history.append(loss.item())
    if evaluate(net) < best:
        save(net)
"""
OLDER = """\
from torch.nn.utils import clip_grad_norm_

for epoch in range(5):
    for x in data:
        cost = f(x)
        cost.backward()
        clip_grad_norm_(net.parameters(), 0.5)  # half
        opt.step()
    history.append(cost.item())
    if evaluate(net) < best:
        save(net)
"""
CLIP = "clip_grad_norm_(net.parameters(), 1.0)\n"
NAMED = (CLIP, f"v = {CLIP}        rearview.log('v', v)\n")
LIFTED = (
    "history.append(loss.item())\n",
    "v = loss.item()\n    rearview.log('v', v)\n    history.append(v)\n",
)


def carried(change, *older, corrections=None):
    new = "import rearview\n" + NEWEST.replace(*change)
    probes, refusals = check({"t.py": NEWEST}, {"t.py": new})
    assert not refusals
    statements = [Statement(p.path, (p.first, p.last)) for p in probes.probes]
    chain = [{"t.py": NEWEST}, *({"t.py": text} for text in older)]
    outcomes = through({"t.py": new}, statements, chain, corrections, probes.extractions)
    for outcome, text in zip(outcomes, chain, strict=True):
        if not outcome.refused:  # what is carried is a probe there as well
            assert find(text, {**text, **outcome.files}).names == ("v",)
    return outcomes


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (NAMED, "        v = clip_grad_norm_(net.parameters(), 0.5)  # half\n"),
        (LIFTED, "    v = cost.item()\n    rearview.log('v', v)\n    history.append(v)\n"),
        (
            (
                "if evaluate(net) < best:\n",
                "v = evaluate(net)\n    rearview.log('v', v)\n    if v < best:\n",
            ),
            "    v = evaluate(net)\n    rearview.log('v', v)\n    if v < best:\n",
        ),
        (
            (
                "if evaluate(net) < best:\n",
                "if (v := evaluate(net)) < best:\n        rearview.log('v', v)\n",
            ),
            "    if (v := evaluate(net)) < best:\n        rearview.log('v', v)\n",
        ),
        (
            (
                "clip_grad_norm_(net.parameters(), 1.0)\n",
                "v = clip_grad_norm_(\n            net.parameters(),\n            1.0,\n        )\n        rearview.log('v', v)\n",
            ),
            "        v = clip_grad_norm_(net.parameters(), 0.5)  # half\n        rearview.log('v', v)\n",
        ),
        (
            ("loss = f(x)\n", "loss = v = f(x)\n        rearview.log('v', v)\n"),
            "        v = cost = f(x)\n        rearview.log('v', v)\n",
        ),
    ],
)
def test_an_older_version_names_the_values_it_computes_itself(change, line):
    newest, older = carried(change, OLDER)
    assert not newest.refused
    assert line in older.files["t.py"]
    assert "0.5)  # half" in older.files["t.py"]


def test_a_returned_value_is_named_where_it_is_returned():
    old = "def forward(self, x):\n    x = self.a(x)\n    return self.fc(self.drop(x))\n"
    new = old.replace(
        "return self.fc(self.drop(x))", "v = self.fc(self.drop(x))\n    look(v)\n    return v"
    )
    older = old.replace("self.a", "self.b").replace("self.drop(x)", "x")
    text, where = extract_variables(new, VariableExtraction("t.py", 3, ("v",), 5), older)
    assert text.endswith("    v = self.fc(x)\n    return v\n")
    assert where == VariableExtraction("t.py", 3, ("v",), 4)


def test_a_version_that_does_not_compute_the_value_is_refused():
    gone = OLDER.replace("        clip_grad_norm_(net.parameters(), 0.5)  # half\n", "")
    _, older = carried(NAMED, gone)
    assert older.reason == "the statement that computes `v` cannot be found there"


def test_a_version_that_uses_the_name_is_refused():
    _, older = carried(NAMED, OLDER.replace("cost", "v"))
    assert older.reason == "`v` means something else in that version"


def test_a_version_that_computes_something_else_in_its_place_is_refused():
    _, older = carried(LIFTED, OLDER.replace("cost.item()", "float(cost)"))
    assert older.reason == "`v` is computed differently in that version"


def test_names_go_through_a_chain_step_by_step():
    middle = OLDER.replace("cost", "loss")
    outcomes = carried(LIFTED, middle, OLDER)
    assert not any(outcome.refused for outcome in outcomes)
    assert "v = cost.item()" in outcomes[2].files["t.py"]


def test_statements_placed_by_hand_find_the_names_there():
    placed = {0: HandPlace("t.py", 1), 1: HandPlace("t.py", 9)}
    _, older, oldest = carried(LIFTED, OLDER, OLDER, corrections={1: placed})
    expected = "    v = cost.item()\n    rearview.log('v', v)\n    history.append(v)\n"
    assert expected in older.files["t.py"]
    assert expected in oldest.files["t.py"]


def test_columns_count_characters_and_other_bytes_stay():
    old = "\ufeffs = 'é'; f('ü', 1)  # ö\r\ng()\r\n"
    text, where = extract_variables(
        "s = 'é'\nn = f('ü', 2)\ng()\n", VariableExtraction("t.py", 2, ("n",)), old
    )
    assert text == "\ufeffs = 'é'; n = f('ü', 1)  # ö\r\ng()\r\n"
    assert where == VariableExtraction("t.py", 1, ("n",))


def test_a_version_that_names_the_value_already_stays_unchanged():
    old = "n = f(1)\ng()\n"
    assert extract_variables("n = f(2)\ng()\n", VariableExtraction("t.py", 1, ("n",)), old) == (
        old,
        VariableExtraction("t.py", 1, ("n",)),
    )


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ("if a: out.append(f(1), left, right)\n", "cannot have a separate line"),
        ("if a:\n    out.append(f(\n    1), left, right)\n", "several lines"),
        ("if a:\n    pass\n", "cannot be found there"),
        ("def f(:\n", "cannot be read"),
    ],
)
def test_a_value_that_cannot_have_a_separate_line_is_refused(old, why):
    new = "if a:\n    v = f(1)\n    out.append(v, left, right)\n"
    found = extract_variables(new, VariableExtraction("t.py", 2, ("v",), 3), old)
    assert isinstance(found, str)
    assert why in found
