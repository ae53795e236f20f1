"""Loops of libraries are found by function, and their frames count while they run."""

import ast
import sys

from rearview.runtime.program_frames import CLOCKS, Modules, project_frames, roots
from rearview.source.instrument import instrument
from rearview.source.library_loops import LOOPS, loops_of

TEXT = """\
def helper(rows):
    for row in rows:
        pass

def train(evals, rounds):
    for name in evals:
        pass
    for i in range(rounds):
        helper(evals)
"""


def test_only_the_named_loops_of_a_library_are_rewritten():
    tree = ast.parse(TEXT)
    ids = loops_of("xgboost.training", tree)
    assert ids == {8: "xgboost.training:train:1:round"}
    sites = instrument(tree, "xgboost.training", ids=ids, only=True)
    assert [(site.line, site.name) for site in sites] == [(8, "round")]
    assert ast.unparse(tree).count("__rearview_parts__") == 1


def test_a_library_that_is_not_known_is_left_alone():
    assert loops_of("somebody.else", ast.parse(TEXT)) == {}


def test_names_are_those_of_epochs_steps_and_trials():
    names = {name for functions in LOOPS.values() for names in functions.values() for name in names}
    assert {"epoch", "step", "eval_step", "trial", "round"} <= names


def call(file, text, **given):
    space = dict(given)
    exec(compile(text, file, "exec"), space)
    return space["run"]


def test_frames_between_the_project_and_a_running_loop_count_and_others_do_not():
    found = []
    look = call(
        "/lib/deep.py", "def run():\n deep = 3\n see()", see=lambda: found.append(sys._getframe(1))
    )
    loop = call("/lib/loop.py", "def run():\n start_time = 9\n i = 2\n look()", look=look)
    middle = call("/lib/middle.py", "def run():\n held = 1\n loop()", loop=loop)
    main = call("/project/main.py", "def run():\n mine = 0\n middle()", middle=middle)
    main()

    def belongs(file):
        return file.startswith("/project/")

    alone = project_frames(found[0], belongs)
    assert [frame.f_code.co_filename for frame in alone] == ["/project/main.py"]
    frames = project_frames(found[0], belongs, {"/lib/loop.py"})
    files = [frame.f_code.co_filename for frame in frames]
    assert files == ["/project/main.py", "/lib/middle.py", "/lib/loop.py"]
    locals_ = {key for key in roots(frames, Modules(belongs)) if key.startswith("local:")}
    assert locals_ == {"local:0:run:mine", "local:1:run:held", "local:2:run:i"}
    assert "start_time" in CLOCKS
