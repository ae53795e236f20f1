"""A script or module that was renamed or moved since is still the same one."""

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.source.moved_files import renames

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
import rearview
from util import double

total = 0
for epoch in range(3):
    for step in range(2):
        total += double(epoch + step)
    print(epoch, total)
rearview.log("end", total)
"""
MODULE = """
def double(value):
    # twice as much
    result = 2 * value
    return result
"""
PROBE = '        total += double(epoch + step)\n        rearview.log("t", total)\n'


def probed(text):
    return text.replace("        total += double(epoch + step)\n", PROBE)


@pytest.fixture
def project(tmp_path):
    write(tmp_path, train=SCRIPT, util=MODULE)
    assert recorded(tmp_path, "train.py").code == 0
    return tmp_path


def filled(project, *names):
    past = history(project)
    plan = past.plan(list(names))
    assert not plan.refusals
    report = past.backfill(list(names), plan=plan)
    assert report.proved, report.proof
    assert history(project).plan(list(names)).nothing
    return plan.notes


def values(project, name):
    return [row[name] for row in history(project).table(name)]


@pytest.mark.parametrize("name", ["main", "src__dot__train"])
def test_a_renamed_script_takes_statements_under_its_old_name(project, name):
    (project / "train.py").unlink()
    write(project, **{name: probed(SCRIPT)})
    now = name.replace("__dot__", "/")
    notes = filled(project, "t")
    assert f"{now}.py is assumed to be the file that was train.py in 1 run" in notes
    assert values(project, "t") == [0, 2, 4, 8, 12, 18]


def test_a_renamed_module_takes_statements_and_is_imported_under_its_old_name(project):
    (project / "util.py").unlink()
    text = "import rearview\n" + MODULE.replace(
        "    return result", "    rearview.log('r', result)\n    return result"
    )
    write(project, train=SCRIPT.replace("from util", "from tools"), tools=text)
    assert filled(project, "r") == ["tools.py is assumed to be the file that was util.py in 1 run"]
    assert values(project, "r") == [0, 2, 2, 4, 4, 6]


def notes_of(*which):
    return "".join(f'{each}_setting = "as it is in the version named {each}"\n' for each in which)


def test_a_script_renamed_twice_is_followed_through_the_versions_between(project):
    # what it is in the end shares too little with what it was to be known without the step between
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = {
        "train": notes_of(*words) + SCRIPT,
        "main": notes_of(*words[:4], *"abcde") + SCRIPT,
        "app/fit": notes_of(*"abcdefghi") + SCRIPT.replace("from util", "from helpers"),
    }
    assert renames({"a.py": texts["train"]}, {"b.py": texts["app/fit"]}).now == {}
    for name, text in texts.items():
        for file in project.glob("**/[!u]*.py"):
            file.unlink()
        if name == "app/fit":
            (project / "util.py").unlink()
            write(project, app__dot__helpers=MODULE)
        write(project, **{name.replace("/", "__dot__"): text})
        assert recorded(project, f"{name}.py").code == 0
    write(project, app__dot__fit=probed(texts["app/fit"]))
    assert filled(project, "t") == [
        "app/fit.py is assumed to be the file that was main.py in 1 run",
        "app/fit.py is assumed to be the file that was train.py in 2 runs",
    ]
    assert values(project, "t") == [0, 2, 4, 8, 12, 18] * 4
    assert "--- a/train.py" in history(project).propagate("t")[-1].diff


def test_a_change_in_a_renamed_file_is_refused_with_both_its_names(project):
    (project / "train.py").unlink()
    write(project, main=probed(SCRIPT).replace("range(3)", "range(4)"))
    (refusal,) = history(project).plan(["t"]).refusals
    assert "main.py:6 (train.py in the run) is not a probe" in refusal.reason


def test_a_file_that_may_be_either_of_two_is_refused(project):
    (project / "train.py").unlink()
    write(project, one=probed(SCRIPT), two=SCRIPT)
    (refusal,) = history(project).plan(["t"]).refusals
    assert "it may be `one.py` or `two.py` now" in refusal.reason


def test_a_place_given_by_hand_uses_the_old_name_of_the_file(project):
    (project / "train.py").unlink()
    text = SCRIPT.replace("    print(epoch, total)", "    print(epoch, total, flush=True)")
    write(project, main=text)
    assert recorded(project, "main.py").code == 0
    added = '    rearview.log("t", epoch)\n    print(epoch'
    write(project, main=text.replace("    print(epoch", added))
    past = history(project)
    first = past.runs()[0]
    past.correct(first.id, "train.py", 9)
    (told,) = [one for one in history(project).propagate("t") if first.id in one.runs]
    assert "--- a/train.py" in told.diff
    assert told.reasons == ("put there by hand", "main.py was train.py then")
    filled(project, "t")
    assert values(project, "t") == [0, 1, 2] * 2
