"""Which loop of a program is taken for the one that trains."""

from textwrap import dedent

import pytest

from rearview.source.inspection.inspection import inspect

STEP = "loss.backward(); opt.step()"
BATCHES = f"""
def train(loader):
    for batch in loader:
        {STEP}
"""
FIT = f"def fit():\n    for epoch in r:\n        for x in data:\n            {STEP}\n"
TRAINER = (
    f"class T:\n    def run(self, train):\n        for x in data:\n            f(train); {STEP}\n"
)


def look(text, **files):
    others = {f"{name}.py": dedent(body) for name, body in files.items()}
    return inspect("t.py", {"t.py": dedent(text), **others})


def main(text, **files):
    loop = look(text, **files).main
    return (loop.id.path, loop.id.name) if loop is not None else None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"{BATCHES}\nfor epoch in range(3):\n    train(loader)", "epoch"),
        (f"for fold in folds:\n    for epoch in range(3):\n        {STEP}", "fold"),
        (f"while True:\n    {STEP}", "main"),
        (f"for word in words:\n    count(word)\nfor i in range(3):\n    {STEP}", "i"),
        # handed to a function that calls it
        (f"{BATCHES}\ndef main():\n    for epoch in r:\n        train(x)\napp.run(main)", "epoch"),
        # the epoch's function is called by itself and by a search over settings
        (
            f"{FIT}def search():\n    for lr in grid:\n        fit()\nsearch() if args.search else fit()",
            "epoch",
        ),
        # an evaluation after the training has more lines
        (f"for e in r:\n    {STEP}\nfor x in test:\n    a(x)\n    b(x)\n    c(x)\n    d(x)", "e"),
        # a parameter that is called like a function
        (
            f"{TRAINER}    def train(self):\n        for epoch in r:\n            self.run(True)\nT().train()",
            "epoch",
        ),
    ],
)
def test_the_outermost_loop_around_the_training_steps_is_the_main_loop(text, name):
    assert main(text) == ("t.py", name)


def test_a_trainer_of_the_project_is_followed_into_its_file():
    trainer = (
        f"class Trainer:\n    def fit(self):\n        while self.step < 9:\n            {STEP}\n"
    )
    assert main("from lib import Trainer\ntrainer = Trainer()\ntrainer.fit()", lib=trainer) == (
        "lib.py",
        "fit",
    )


def test_the_function_of_the_script_wins_over_one_of_the_same_name_elsewhere():
    other = f"def go():\n    for other in range(9):\n        {STEP}\n"
    text = f"import lib\ndef go():\n    for own in range(9):\n        {STEP}\ngo()"
    assert main(text, lib=other) == ("t.py", "own")


def test_loops_that_the_script_never_reaches_do_not_contain_the_training():
    export = "def export():\n    for weights in files:\n        run()\ndef run():\n    pass\n"
    text = f"import lib\ndef run():\n    for epoch in r:\n        {STEP}\nrun()"
    assert main(text, lib=export) == ("t.py", "epoch")


def test_starting_processes_is_not_training():
    text = f"{BATCHES}\nfor rank in range(4):\n    p = mp.Process(target=train, args=(rank,))\n"
    assert main(text) == ("t.py", "batch")


def test_a_loop_that_does_not_seem_to_train_is_said_to_be_a_guess():
    assert not look("for i in x:\n    f(i)").sure
    assert look(f"for i in x:\n    {STEP}").sure


def test_the_loop_of_a_step_is_named_only_if_it_trains():
    text = f"for k in r:\n    {STEP}\n    for p in params:\n        show(p)"
    assert look(text).point == ("k",)
    text = f"for k in r:\n    for p in params:\n        show(p)\n    for x in data:\n        {STEP}"
    assert look(text).point == ("k", "x")
    text = f"def batch(x):\n    {STEP}\nfor k in r:\n    for x in data:\n        batch(x)"
    assert look(text).point == ("k", "x")
