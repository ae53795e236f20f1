"""Names that are Rearview's own never reach a person."""

import ast
import re
from pathlib import Path

import pytest

import rearview
from rearview.model import ReplayReport, proof_of
from rearview.model.wording import in_words
from rearview.state.codecs.rng import read_global
from rearview.state.object_numbers import readable_path

ROOMS = ("runtime", "source", "frameworks", "execute")
"""Rooms in which state is named; what records hold is described in docs/schema.md."""
OWN = re.compile(r"\$[a-z]\w*|__rearview\w*__")


def internal_names():
    """Return every internal name that the source has as a text of its own."""
    root = Path(rearview.__file__).parent
    found = set()
    for room in ROOMS:
        for file in (root / room).rglob("*.py"):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if OWN.search(text) else ():
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {node.value} if OWN.fullmatch(node.value) else set()
    return sorted(found)


def test_the_source_is_searched():
    assert {"$chance", "$clock", "__rearview_walk__"} <= set(internal_names())


@pytest.mark.parametrize("name", internal_names())
def test_every_internal_name_has_words(name):
    for text in (name, f"{name}[0]", f"{name}2", f"train.{name}['a'][1]", f"x, {name} at epoch=3"):
        for said in (in_words(text), readable_path(text)):
            assert not OWN.search(said), said
            assert "[0]" not in said


@pytest.mark.parametrize("library", [*read_global(), "devices", "modes"])
def test_global_state_has_words(library):
    said = readable_path(f"<global state of {library}>['state'][3]")
    assert said.startswith(("the random state of ", "the modes of "))
    assert "<" not in said


def test_a_difference_in_an_older_store_is_put_into_words():
    report = ReplayReport(finished=True, difference="$clock[0] at epoch=3: recorded 1, now 2")
    assert proof_of(report).why == "the clock at epoch=3: recorded 1, now 2"


def test_other_names_stay_as_they_are():
    assert in_words("model.layers[0].weight, cost in $") == "model.layers[0].weight, cost in $"
