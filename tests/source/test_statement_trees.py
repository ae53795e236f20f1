from rearview.source.statement_trees import grow, words
from rearview.source.text import try_parse


def tree(text, **options):
    return grow(try_parse(text), **options)


def test_formatting_does_not_change_the_words():
    one = words("f(a, 'x', b=[1, 2])")
    two = words('f(\n    a,\n    "x",  # why\n    b=[\n        1,\n        2,\n    ],\n)')
    assert one == two


def test_type_hints_do_not_change_the_words():
    one = tree("def f(a, b=1):\n    x = a\n").statements()
    two = tree("def f(a: int, b: float = 1) -> int:\n    x: int = a\n").statements()
    assert [node.words for node in one] == [node.words for node in two]


def test_every_block_of_a_compound_statement_is_a_node():
    text = "try:\n    a\nexcept E as e:\n    b\nelse:\n    c\nfinally:\n    d\n"
    roles = [node.role for node in tree(text).nodes if node.is_block]
    assert roles == ["body", "body", "handler", "orelse", "finalbody"]


def test_a_decorator_belongs_to_its_function():
    node = tree("@cache\n@other(1)\ndef f():\n    pass\n").statements()[0]
    assert (node.start, node.end) == (1, 4)


def test_left_out_lines_are_not_in_the_tree():
    nodes = tree("for x in y:\n    a\n    b\nc\n", without=(3, 3)).statements()
    assert [node.start for node in nodes] == [1, 2, 4]


def test_a_statement_after_a_semicolon_does_not_lead_its_line():
    assert [node.leads for node in tree("a; b\nif x: c\n").statements()] == [
        True,
        False,
        True,
        False,
    ]


def test_a_chain_of_a_thousand_branches_is_no_problem():
    text = "if x == 0:\n    a\n" + "".join(f"elif x == {n}:\n    a\n" for n in range(400))
    assert len(tree(text).statements()) == 802


def test_names_outside_ascii_do_not_shift_the_words():
    assert tree("größe = 'ü'; b = größe\n").statements()[1].words == ("b", "=", "größe")
