"""What a process is started with."""

from pathlib import Path

import pytest

from rearview.execute.program_command import program_command
from rearview.model import Control


def seed(root, env, **options):
    how = program_command(Control(root=str(root), target="train.py"), env, Path(root), **options)
    return how.environment["PYTHONHASHSEED"]


@pytest.mark.parametrize("env", [{}, {"PYTHONHASHSEED": "random"}])
def test_all_runs_of_a_project_have_the_same_hash_seed(tmp_path, env):
    (tmp_path / "other").mkdir()
    assert seed(tmp_path, env) == seed(tmp_path, {})
    assert seed(tmp_path, env) != seed(tmp_path / "other", env)
    assert 0 <= int(seed(tmp_path, env)) < 2**32


def test_a_seed_that_is_given_is_kept(tmp_path):
    assert seed(tmp_path, {"PYTHONHASHSEED": "7"}) == "7"
    assert seed(tmp_path, {"PYTHONHASHSEED": "7"}, hash_seed="8") == "8"
