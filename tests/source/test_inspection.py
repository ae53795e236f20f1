"""What the text of a program tells before it runs."""

import ast
import json
from textwrap import dedent

import pytest

from rearview.source import notebooks
from rearview.source.inspection.changed_variables import library_updates
from rearview.source.inspection.inspection import Answer, inspect


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
        ("o = m.configure_optimizers(lr)", {"o": ("m",)}, {}),
        ("o = getattr(optim, name)(m.parameters())", {"o": ("m",)}, {}),
        ("o = create_optimizer(m, cfg)", {"o": ("m",)}, {}),
        ("o = hvd.DistributedOptimizer(optimizer)", {}, {}),
    ],
)
def test_facts_of_the_library_are_read_from_constructors(text, models, optimizers):
    facts = library_updates(ast.parse(text))
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
    assert why in loop.why_unwatched
    assert look(text).main is None


def test_a_file_that_does_not_parse_is_named_and_the_rest_is_read():
    found = look("for i in x:\n    pass", broken="def (")
    assert list(found.unread) == ["broken.py"]
    assert found.main.id.name == "i"


def test_a_program_without_loops_has_no_places():
    found = look("print(1)")
    assert (found.main, found.places, found.loops) == (None, (), ())


def test_an_optimizer_of_another_function_does_not_bring_in_its_model():
    text = """
        def demo():
            dummy = Net()
            optimizer = SGD(dummy.parameters())
        def epoch(loader, model, optimizer):
            for x in loader:
                optimizer.step()
    """
    (loop,) = look(text).loops
    assert loop.changes.names == ("optimizer",)


STEP = "for i in x:\n    loss.backward()\n    opt.step()"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (STEP, Answer.YES),
        (f"db = sqlite3.connect('x')\n{STEP}", Answer.LIMITED),
        ("", Answer.WHOLE),
        ("print(1)", Answer.WHOLE),
        ("async def f():\n    for i in x:\n        loss.backward()", Answer.WHOLE),
        (f"def go():\n    {STEP.replace(chr(10), chr(10) + '    ')}\nmp.Process(target=go)", Answer.WHOLE),
        (f"def go():\n    {STEP.replace(chr(10), chr(10) + '    ')}\nmp.spawn(go)\ngo()", Answer.LIMITED),
        ("for i in", Answer.NO),
        ("print 'a'\nfor i in x:\n    print i", Answer.NO),
        ("# caf\udce9\nfor i in x:\n    f(i)", Answer.NO),
        ("x = 1\0", Answer.NO),
        ("x = " + "+".join("1" * 20000), Answer.NO),
    ],
)  # fmt: skip
def test_the_answer_says_whether_it_will_work_and_why_not(text, answer):
    found = look(text)
    assert found.answer is answer
    assert bool(found.reasons) == (answer is not Answer.YES)


def test_a_byte_order_mark_and_crlf_are_read():
    found = inspect("t.py", {"t.py": "\ufefffor i in x:\r\n    opt.step()\r\n"})
    assert (found.answer, found.main.line) == (Answer.YES, 1)


def test_reading_a_file_line_by_line_before_the_training_is_no_obstacle():
    data = "def read():\n    with open('x') as f:\n        for row in f:\n            add(row)\n"
    assert look(f"{data}read()\n{STEP}").answer is Answer.YES


def test_writing_a_file_around_the_training_loop_is_an_obstacle():
    text = "with open('log', 'w') as f:\n    " + STEP.replace("\n", "\n    ")
    assert look(text).answer is Answer.LIMITED


@pytest.mark.parametrize("text", ["rng.spawn(3)", "Process()", "a.Process(pid=3)"])
def test_calls_that_only_look_like_starting_processes_are_not_reported(text):
    assert look(f"{text}\n{STEP}").obstacles == ()


def notebook(*cells):
    parts = [{"cell_type": "code", "source": cell, "metadata": {}} for cell in cells]
    data = json.dumps({"cells": parts, "metadata": {}, "nbformat": 4}).encode()
    parsed = notebooks.parse(data)
    return inspect("a.ipynb.py", {"a.ipynb.py": parsed.text}, {"a.ipynb.py": parsed})


def test_lines_of_a_notebook_are_counted_in_their_cells():
    found = notebook(
        "x = 1", "y = 2\nfor epoch in r:\n    best = f(x)\n    opt.step()", "print(best)"
    )
    assert found.cell_and_line(found.main.id.path, found.main.line) == ("a.ipynb", 2, 2)
    assert found.main.sentences[0].endswith("(line 3).")
    assert found.answer is Answer.YES


def test_a_cell_that_is_not_python_is_a_limit():
    found = notebook("for epoch in r:\n    opt.step()", "for in")
    assert found.answer is Answer.LIMITED
    assert found.reasons == ("a.ipynb cell 2 cannot be read as Python.",)
