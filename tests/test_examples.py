"""Every example in a docstring is true."""

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
WITH = sorted(
    path for path in (SRC / "rearview").rglob("*.py") if ">>> " in path.read_text("utf-8")
)


def name_of(path):
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH, ids=name_of)
def test_the_examples_of_a_module_hold(path):
    module = importlib.import_module(name_of(path))
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed
