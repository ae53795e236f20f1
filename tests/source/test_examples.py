"""The examples in the docstrings of the room hold."""

import doctest
import importlib
import pkgutil

import pytest

import rearview.source

NAMES = [m.name for m in pkgutil.iter_modules(rearview.source.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples_hold(name):
    module = importlib.import_module(f"rearview.source.{name}")
    assert doctest.testmod(module).failed == 0
