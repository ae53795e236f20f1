"""What the text of a program tells before it runs."""

import ast
from textwrap import dedent

import pytest

from rearview.source.inspection import inspect, library_facts


def look(text, script="train.py", **files):
    others = {f"{name}.py": dedent(body) for name, body in files.items()}
    return inspect(script, {script: dedent(text), **others})


TRAINING = """
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 3)

    def train(epoch):
        for step, batch in enumerate(loader):
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss, step)

    for row in table:
        prepare(row)

    for epoch in range(10):
        train(epoch)
        scheduler.step()
        print(epoch)
"""


def test_the_loop_that_trains_is_the_main_loop_though_the_training_is_in_a_function():
    assert look(TRAINING).main.id.name == "epoch"


def test_a_loop_in_a_called_function_is_named_by_the_whole_way_to_it():
    points = {loop.id.name: loop.point for loop in look(TRAINING).loops}
    assert points == {"row": ("row",), "epoch": ("epoch",), "step": ("epoch", "step")}


def test_the_scheduler_leads_to_the_optimizer_and_the_optimizer_to_the_model():
    assert look(TRAINING).main.changes.names == ("scheduler", "optimizer", "model")


@pytest.mark.parametrize(
    ("text", "models", "optimizers"),
    [
        ("o = SGD(m.parameters())", {"o": ("m",)}, {}),
        ("self.o = AdamW([*a.parameters(), *b.parameters()])", {"self.o": ("a", "b")}, {}),
        ("o = SGD(m.parameters())\ns = StepLR(optimizer=o)", {"o": ("m",)}, {"s": ("o",)}),
        ("n = count(m.parameters())", {}, {}),
    ],
)
def test_facts_of_the_library_are_read_from_constructors(text, models, optimizers):
    facts = library_facts(ast.parse(text))
    assert (facts.models, facts.optimizers) == (models, optimizers)


def test_logs_are_listed_with_their_logger_and_loops():
    named = [log for log in look(TRAINING).logs if log.names]
    assert [(log.logger, log.names, log.loops) for log in named] == [
        ("writer.add_scalar", ("loss",), ("step",))
    ]


def test_places_for_probes_are_inner_outer_and_after():
    inner, outer, after = look(TRAINING).places
    assert (inner.after, outer.after, after.after) == (11, 19, 19)
    assert "loss" in inner.reads


def test_a_probe_is_never_proposed_behind_a_statement_that_leaves_the_loop():
    found = look("for epoch in data:\n    loss = fit(epoch)\n    continue\n")
    assert found.places[0].after == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sqlite3\ndb = sqlite3.connect('x')", "database"),
        ("loader = DataLoader(d, persistent_workers=True)", "persistent_workers"),
        ("with open('log') as f:\n    for i in x:\n        f.write(i)", "with open"),
        ("async def main():\n    for i in x:\n        await f(i)", "coroutine"),
        ("rows = (r for r in table)", "generator expression"),
        ("mp.spawn(train, nprocs=2)", "worker processes"),
    ],
)
def test_an_object_that_cannot_be_saved_is_reported_with_its_line(text, words):
    (found,) = look(text).obstacles
    assert words in found.what
    assert found.effect


@pytest.mark.parametrize(
    "text",
    [
        "a, b = (f(x) for x in pair)",
        "loader = DataLoader(d, persistent_workers=False)",
        "with open('c') as f:\n    config = f.read()",
    ],
)
def test_an_object_that_can_be_saved_is_not_reported(text):
    assert look(text).obstacles == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("@njit\ndef f(x):\n    for i in x:\n        pass", "@njit"),
        ("while f():\n    pass\nelse:\n    g()", "else"),
    ],
)
def test_loops_that_are_not_watched_say_why(text, why):
    (loop,) = look(text).loops
    assert why in loop.left_alone
    assert look(text).main is None


def test_a_file_that_does_not_parse_is_named_and_the_rest_is_read():
    found = look("for i in x:\n    pass", broken="def (")
    assert list(found.unread) == ["broken.py"]
    assert found.main.id.name == "i"


def test_a_program_without_loops_has_no_places():
    found = look("print(1)")
    assert (found.main, found.places, found.loops) == (None, (), ())
