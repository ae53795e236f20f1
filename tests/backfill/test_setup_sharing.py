"""Runs share the statements with which their scripts begin, by code, arguments and modules."""

import ast

import pytest

from rearview.backfill.setup_sharing import (
    SetupText,
    SharingObstacle,
    _common_depths,
    read_obstacles,
    save_obstacles,
    setup_text,
)
from rearview.model import Run, Status
from rearview.model.run import MainLoop, RunEnd, RunStart
from rearview.runtime.replay.shareable_statements import is_safe, only_gives_seeds

HOME = "/home/project"
LOADS = b"import numpy\nRATE = 1\ndata = load()\nx = data * 2\nfor epoch in x:\n    pass\n"


def text_of(source, *argv, **modules):
    files = {"train.py": source, **{f"{name}.py": text for name, text in modules.items()}}
    site = "train.py:<module>:0:epoch"
    run = Run(
        *("r", "v", "train.py", argv, 0.0, Status.FINISHED),
        cwd=HOME,
        facts=RunStart(target="train.py"),
        end=RunEnd(main=MainLoop(site=site)),
    )
    return setup_text(run, files, HOME)


def shared(*texts):
    """Return at how many statements each run parts from others."""
    depths = _common_depths({str(k): text for k, text in enumerate(texts)})
    return list(depths.values())


def test_statements_are_shared_up_to_the_main_loop():
    assert shared(text_of(LOADS), text_of(LOADS)) == [[4], [4]]


def test_versions_part_at_the_first_statement_that_differs():
    other = LOADS.replace(b"data * 2", b"data * 3")
    third = LOADS.replace(b"load()", b"load(1)")
    texts = [text_of(text) for text in (LOADS, LOADS, other, other, third)]
    assert shared(*texts) == [[3, 4], [3, 4], [3, 4], [3, 4], []]


def test_imports_and_constants_alone_are_not_worth_a_process():
    texts = [text_of(LOADS.replace(b"load()", str(k).encode() + b" + load()")) for k in range(2)]
    assert shared(*texts) == [[], []]


def test_formatting_does_not_count_and_arguments_do():
    spaced = LOADS.replace(b"data * 2", b"( data*2 )  # doubled")
    assert shared(text_of(LOADS), text_of(spaced)) == [[4], [4]]
    assert shared(text_of(LOADS, "--fast"), text_of(LOADS)) == [[], []]


def test_modules_of_the_project_count_from_the_statement_that_imports_them():
    late = LOADS.replace(b"x = data * 2", b"import helper; x = data * 2")
    one, other = (text_of(late, helper=text) for text in (b"A = 1", b"A = 2"))
    assert shared(one, other) == [[3], [3]]


def test_a_script_that_does_not_parse_shares_nothing():
    assert len(text_of(b"x = (").prefixes) == 1
    assert shared(SetupText(), SetupText()) == [[], []]


def test_obstacles_are_kept_in_a_cache_folder_that_is_created(tmp_path):
    save_obstacles(tmp_path / "cache", {"k": ("it reads the clock", True)})
    assert read_obstacles(tmp_path / "cache") == {"k": SharingObstacle("it reads the clock")}


def test_a_cache_that_cannot_be_written_does_not_fail_a_backfill(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    save_obstacles(tmp_path / "cache", {"k": ("it reads the clock", True)})
    assert read_obstacles(tmp_path / "cache") == {}


def test_obstacles_are_remembered_and_the_oldest_forgotten(tmp_path):
    save_obstacles(tmp_path, {f"k{n}": ("it reads the clock", True) for n in range(300)})
    save_obstacles(tmp_path, {"last": ("a thread was left behind", False)})
    known = read_obstacles(tmp_path)
    assert known["last"] == SharingObstacle("a thread was left behind", usable=False)
    assert "k0" not in known
    assert "k299" in known
    (tmp_path / "shared-setup.json").write_text("{")
    assert read_obstacles(tmp_path) == {}


def parsed(text):
    body = ast.parse(text).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    return body[-1], functions


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("random.seed(3)", True),
        ("random.seed()", False),
        ("np.random.seed(random.randint(0, 9))", False),
        ("x = random.seed(3)", False),
        ("def fix(n):\n    random.seed(n)\n    torch.manual_seed(n)\nfix(args.seed)", True),
        ("def fix(n):\n    random.seed(n)\n    random.random()\nfix(3)", False),
        ("def fix(random):\n    random.seed(3)\nfix(other)", False),
        ("def fix(n):\n    random.seed(n)\nfix(random.random())", False),
    ],
)
def test_only_statements_that_draw_nothing_give_seeds(text, seeds):
    assert only_gives_seeds(*parsed(text)) is seeds


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("import os", True),
        ("import not_loaded_yet", False),
        ("from os import path", True),
        ("def f(a=1): ...", True),
        ("def f(a=g()): ...", False),
        ("x = 1", True),
        ("x = f()", False),
        ("x.y = 1", False),
    ],
)
def test_statements_that_only_bind_names_need_no_standby(text, safe):
    assert is_safe(parsed(text)[0]) is safe
