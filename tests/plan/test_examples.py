"""The examples in the docstrings of the room hold."""

import doctest
import importlib
import pkgutil

import pytest

import rearview.plan

NAMES = [m.name for m in pkgutil.iter_modules(rearview.plan.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples_hold(name):
    module = importlib.import_module(f"rearview.plan.{name}")
    assert doctest.testmod(module).failed == 0
