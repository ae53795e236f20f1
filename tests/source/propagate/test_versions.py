from rearview.source.propagate.versions import HandPlace, Statement, through

NEW = """import rearview

def norm(model):
    return sum(p.norm() for p in model)

for epoch in range(3):
    loss = train(model)
    rearview.log("norm", norm(model))
    save(model, loss)
"""
OLD = "for epoch in range(3):\n    loss = train(model)\n    save(model, loss)\n"
ALL = [Statement("t.py", (8, 8)), Statement("t.py", (1, 1)), Statement("t.py", (3, 4))]


def test_a_helper_and_its_import_come_with_the_statement():
    (found,) = through({"t.py": NEW}, ALL, [{"t.py": "import os\n\n" + OLD}])
    assert not found.refused
    text = found.files["t.py"]
    assert text.index("import rearview") < text.index("def norm") < text.index("rearview.log")
    assert [
        line for line in found.diff.split("\n") if line.startswith("-") and line[1] != "-"
    ] == []
    assert [placed.path for placed in found.placed] == ["t.py"] * 3


def test_a_version_gets_all_statements_or_none():
    (found,) = through({"t.py": NEW}, ALL, [{"t.py": "import os\n\nprint(os)\n"}])
    assert found.refused
    assert found.files == {}
    assert found.diff == ""


def test_code_that_was_in_another_file_is_found_there():
    new = {"t.py": OLD.replace("    save", "    print(loss)\n    save")}
    (found,) = through(new, [Statement("t.py", (3, 3))], [{"main.py": OLD, "other.py": "x = 1\n"}])
    assert list(found.files) == ["main.py"]
    assert "that code was in main.py then" in found.reasons


def test_an_existing_file_does_not_count_as_the_origin_of_a_copy():
    new = {"t.py": OLD.replace("    save", "    print(loss)\n    save"), "copy.py": OLD}
    (found,) = through(new, [Statement("t.py", (3, 3))], [{"copy.py": OLD}])
    assert found.refused
    assert "t.py is not in that version" in found.reason


def test_a_moved_file_with_two_possible_origins_is_refused():
    new = {"t.py": OLD.replace("    save", "    print(loss)\n    save")}
    (found,) = through(new, [Statement("t.py", (3, 3))], [{"a.py": OLD, "b.py": OLD}])
    assert "a.py and b.py" in found.reason


def test_step_by_step_reaches_places_that_a_direct_step_misses():
    new = "def t(m):\n    score = m.run(data)\n    print(score)\n    m.save(score, 'a', 'b')\n"
    one = "def t(m):\n    score = m.run(data)\n    m.save(score)\n"
    two = "def t(m):\n    s = m.run(data)\n    m.save(s)\n"
    three = "def t(m):\n    s = m.go(items, 3, key=None)\n    m.save(s)\n"
    found = through(
        {"t.py": new}, [Statement("t.py", (3, 3))], [{"t.py": t} for t in (one, two, three)]
    )
    assert [outcome.refused for outcome in found] == [False, False, False]
    assert "print(s)" in found[2].files["t.py"]


def test_a_statement_that_the_text_already_has_is_not_inserted_twice():
    new = OLD.replace("    save", "    print(loss)\n    save")
    (found,) = through({"t.py": new}, [Statement("t.py", (3, 3))], [{"t.py": new + "x = 1\n"}])
    assert found.files == {}
    assert "it is there already" in found.reasons


def test_a_correction_by_hand_serves_its_neighbours():
    new = {"t.py": "for x in d:\n    a = f(x)\n    print(a)\n    g(a)\n"}
    early = "for x in d:\n    a = f(x)\n    a = a / 2\n    g(a)\n"
    chain = [{"t.py": early}, {"t.py": early + "end()\n"}]
    statements = [Statement("t.py", (3, 3))]
    assert all(outcome.refused for outcome in through(new, statements, chain))
    by_hand = {0: {0: HandPlace("t.py", 4)}}
    first, second = through(new, statements, chain, by_hand)
    assert first.reasons == ("put there by hand",)
    assert second.files["t.py"] == early.replace("    g", "    print(a)\n    g") + "end()\n"


def test_a_chain_of_nothing_is_an_answer_of_nothing():
    assert through({"t.py": NEW}, ALL, []) == ()


def test_line_numbers_of_a_refusal_are_those_of_the_version_as_it_was_run():
    head = "def size(x):\n    return abs(x)\n\n\n"
    loop = "for x in data:\n    loss = f(x)\n    step(loss)\n"
    new = head + loop.replace("    step", "    log(size(loss))\n    step")
    old = loop.replace("    step", "    loss = loss / 2\n    step")
    (outcome,) = through(
        {"t.py": new}, [Statement("t.py", (1, 2)), Statement("t.py", (7, 7))], [{"t.py": old}]
    )
    assert outcome.refused
    assert "before or after line 3 of the old text" in outcome.reason
