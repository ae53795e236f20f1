"""Files are matched between versions by path, then by text; in doubt not at all."""

import pytest

from rearview.source.moved_files import FileNames, renames, with_old_imports
from rearview.source.probes.find import find

TEXT = """import data

total = 0
for epoch in range(3):
    for batch in data.load():
        total += batch
    print(epoch, total)
"""
OTHER = """def load():
    rows = open("rows.txt").read().split()
    return [float(row) for row in rows]
"""


def test_the_same_path_is_the_same_file_with_any_content():
    assert renames({"train.py": TEXT}, {"train.py": OTHER, "main.py": TEXT}).changed == {}


def test_a_renamed_file_is_found_though_it_was_edited():
    edited = TEXT.replace("range(3)", "range(5)") + "print('done')\n"
    found = renames({"train.py": TEXT, "data.py": OTHER}, {"src/fit.py": edited, "data.py": OTHER})
    assert found.changed == {"train.py": "src/fit.py"}
    assert not found.doubtful


def test_files_that_share_little_are_two_files():
    assert renames({"train.py": TEXT}, {"main.py": OTHER}).now == {}


def test_a_small_file_does_not_match_a_large_one_that_contains_it():
    large = OTHER + "".join(f"value_{k} = compute({k})\n" for k in range(40))
    assert renames({"small.py": OTHER}, {"large.py": large}).now == {}


def test_a_copy_next_to_a_renamed_file_leaves_a_doubt():
    probed = TEXT + "import rearview\nrearview.log('total', total)\n"
    found = renames({"train.py": TEXT}, {"a.py": probed, "b.py": TEXT})
    assert found.doubtful == {"train.py": ("a.py", "b.py")}
    with pytest.raises(Exception, match=r"may be `a.py` or `b.py` now, which fit equally well"):
        find({"train.py": TEXT}, {"a.py": probed, "b.py": TEXT}, names=found)


def test_two_old_files_that_may_be_the_same_new_file_leave_a_doubt():
    found = renames({"a.py": TEXT, "b.py": TEXT}, {"c.py": TEXT})
    assert found.doubtful == {"a.py": ("c.py",), "b.py": ("c.py",)}
    with pytest.raises(Exception, match=r"may be `c.py` now, and so may another file"):
        find({"a.py": TEXT, "b.py": TEXT}, {"c.py": TEXT}, names=found)


def test_the_last_part_of_a_path_decides_between_equals():
    old = {"a/train.py": TEXT, "a/same.py": TEXT}
    new = {"b/train.py": TEXT, "b/same.py": TEXT}
    assert renames(old, new).changed == {"a/train.py": "b/train.py", "a/same.py": "b/same.py"}


def test_a_folder_that_moved_takes_its_empty_files_along():
    old = {"one/__init__.py": "", "two/__init__.py": "", "one/x.py": TEXT, "two/y.py": OTHER}
    new = {"p/__init__.py": "", "q/__init__.py": "", "p/x.py": TEXT, "q/y.py": OTHER}
    found = renames(old, new)
    assert found.now["one/__init__.py"] == "p/__init__.py"
    assert found.now["two/__init__.py"] == "q/__init__.py"
    assert not found.doubtful


def test_no_file_is_paired_twice():
    old = {f"{k}.py": TEXT + f"end = {k}\n" * k for k in range(8)}
    new = {f"n{k}.py": TEXT + f"end = {k}\n" * k for k in range(5)}
    now = renames(old, new).now
    assert len(set(now.values())) == len(now)


def test_a_name_that_went_to_another_file_is_not_overwritten():
    names = FileNames({"train.py": "main.py"})
    new = {"main.py": TEXT, "train.py": OTHER}
    assert names.with_old_names(new, {"train.py": TEXT}) == {"train.py": TEXT}


def test_an_unpaired_old_file_keeps_out_of_the_way_of_a_new_name():
    names = FileNames({"a.py": "b.py"})
    assert names.unique_new_paths({"a.py": "", "b.py": "", "c.py": ""}) == {
        "a.py": "b.py",
        "b.py": "then/b.py",
        "c.py": "c.py",
    }


IMPORTS = {
    "from tools import f, g\n": "from util import f, g\n",
    "import tools as t\nt.f()\n": "import util as t\nt.f()\n",
    "import tools\nx = tools.f(tools.g)\n": "import util\nx = util.f(util.g)\n",
    "import os, tools\ntools.f()\n": "import os, util\nutil.f()\n",
    "from .tools import f\n": "from .util import f\n",
    "from . import tools\ntools.f()\n": "from . import util\nutil.f()\n",
    "from . import tools as t, other\nt.f()\n": "from . import util as t, other\nt.f()\n",
    # what cannot be told for certain stays, and is refused as a change
    "import tools\ntools = 3\n": "import tools\ntools = 3\n",
    "import tools\nutil = tools.f()\n": "import tools\nutil = tools.f()\n",
    "import tools\ndef f(tools): pass\n": "import tools\ndef f(tools): pass\n",
    "import tools\nfrom x import util\n": "import tools\nfrom x import util\n",
    "from toolset import f\n": "from toolset import f\n",
    "ä = 'ä'; import tools; tools.f()\n": "ä = 'ä'; import util; util.f()\n",
    "import tools x\n": "import tools x\n",
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports_of_a_renamed_module_read_as_they_did(text):
    assert with_old_imports(text, "main.py", {"tools.py": "util.py"}) == IMPORTS[text]


def test_a_module_that_moved_with_its_script_is_imported_as_before():
    renamed = {"src/main.py": "train.py", "src/tools.py": "util.py", "src/data.py": "data.py"}
    text = "from tools import f\nimport data\n"
    then = "from util import f\nimport data\n"
    assert with_old_imports(text, "src/main.py", renamed) == then


def test_a_module_of_a_package_is_imported_by_its_whole_name():
    renamed = {"pkg/nets/big.py": "pkg/model.py"}
    text = "from pkg.nets.big import Net\n"
    assert with_old_imports(text, "main.py", renamed) == "from pkg.model import Net\n"


@pytest.mark.parametrize("init", [True, False])
def test_a_package_that_was_renamed_with_its_modules(init):
    renamed = {"new/mlp.py": "old/model.py", "new/data.py": "old/data.py"}
    if init:
        renamed["new/__init__.py"] = "old/__init__.py"
    texts = {
        "from new import mlp, data\nmlp.f()\n": "from old import model, data\nmodel.f()\n",
        "from new.mlp import f\n": "from old.model import f\n",
        "import new.data as d\n": "import old.data as d\n",
        "from new import data\n": "from old import data\n",
    }
    for text, then in texts.items():
        assert with_old_imports(text, "main.py", renamed) == then
