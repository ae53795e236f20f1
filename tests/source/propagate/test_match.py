from rearview.source.propagate.match import match
from rearview.source.statement_trees import grow
from rearview.source.text import try_parse


def lines(new, old):
    found = match(grow(try_parse(new)), grow(try_parse(old)))
    return {one.start: two.start for one, two in found.old_of.items() if not one.is_block}


def test_a_renamed_function_is_found_by_its_statements():
    new = "def fit(m):\n    a = m.loss()\n    a.backward()\n    m.step()\n"
    old = "def helper():\n    pass\n\ndef train(m):\n    a = m.loss()\n    a.backward()\n    m.step()\n"
    assert lines(new, old) == {1: 4, 2: 5, 3: 6, 4: 7}


def test_a_renamed_variable_does_not_lose_its_statements():
    new = "cost = f(x)\ncost.backward()\nprint(1)\n"
    old = "loss = f(x)\nloss.backward()\nprint(1)\n"
    assert lines(new, old) == {1: 1, 2: 2, 3: 3}


def test_statements_put_under_with_are_the_same_statements():
    new = "with autocast():\n    y = model(x)\n    loss = f(y)\nloss.backward()\n"
    old = "y = model(x)\nloss = f(y)\nloss.backward()\n"
    assert lines(new, old) == {2: 1, 3: 2, 4: 3}


def test_code_moved_to_another_function_is_found():
    new = "def a():\n    pass\n\ndef b():\n    value = compute(1, 2)\n    return value\n"
    old = "def a():\n    value = compute(1, 2)\n    return value\n"
    assert lines(new, old)[5] == 2


def test_a_function_moved_between_classes_keeps_its_name():
    new = "class A:\n    x = 1\n\nclass B:\n    def f(self):\n        a = 1\n        return a\n"
    old = "class A:\n    x = 1\n    def f(self):\n        a = 1\n        return a\n"
    assert lines(new, old)[5] == 3


def test_a_loop_with_another_header_is_the_same_loop():
    new = "for i, (x, y) in enumerate(loader):\n    a = f(x)\n    b = g(a, y)\n    b.backward()\n"
    old = "for batch in data:\n    a = f(x)\n    b = g(a, y)\n    b.backward()\n"
    assert lines(new, old)[1] == 1


def test_similarity_weighs_the_variables_that_a_statement_sets():
    new = "loss = criterion(model(x), y)\nacc = accuracy(out, y)\n"
    old = "acc = top1(out, y)\nloss = nll(net(x), y)\n"
    assert lines(new, old) != {1: 1, 2: 2}


def test_twenty_thousand_lines_are_matched():
    body = "".join(f"def f{n}(a):\n    b{n} = a + {n}\n    return b{n}\n\n" for n in range(5000))
    assert len(lines(body, body.replace("+ 77\n", "- 77\n"))) == 15000
