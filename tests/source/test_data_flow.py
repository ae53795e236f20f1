import ast

from rearview.source.data_flow import conflict, definition, uses, visible
from rearview.source.statement_trees import grow
from rearview.source.text import try_parse


def of(text):
    return uses(ast.parse(text).body)


def place(text, line):
    tree = grow(try_parse(text))
    node = next(node for node in tree.statements() if node.start == line)
    return node.parent, node.index


def test_reads_are_the_names_that_the_code_does_not_set_itself():
    assert of("y = x\nz = y").reads == {"x"}
    assert of("a += b").reads == {"a", "b"}
    assert of("[i for i in xs if i > k]").reads == {"xs", "k"}
    assert of("f = lambda a, b=c: a + d").reads == {"c", "d"}
    assert of("if (n := len(xs)) > 2:\n    print(n)").reads == {"len", "xs", "print"}
    assert of("def f(a):\n    b = a\n    return b + c").reads == {"c"}
    assert of("print(f'{a:{w}} {b!r}')").reads == {"print", "a", "w", "b"}
    assert of("match v:\n    case [p, *q]:\n        print(p, q)").reads == {"v", "print"}


def test_writes_are_every_kind_of_binding():
    text = "import a.b\nfrom c import d as e\nfor f in x: pass\nwith x as (g, h): pass\n(i := 1)"
    assert of(text).writes == {"a", "e", "f", "g", "h", "i"}


def test_a_log_call_changes_nothing_it_is_given():
    assert of("print(model)").changes == set()
    assert of("fit(model)").changes == {"model"}
    assert of("model.step()").changes == {"model"}


def test_the_order_of_statements_matters_only_if_they_share_variables():
    assert not conflict(of("print(loss)"), of("acc = f(y)"))
    assert conflict(of("print(loss)"), of("loss = loss / 2"))
    assert conflict(of("print(loss)"), of("if bad: break"))


def test_names_of_another_branch_are_not_visible():
    text = "def f(p):\n    if p:\n        a = 1\n    else:\n        b = 2\n        use\n    c = 3\n"
    seen = visible(*place(text, 6))
    assert {"p", "b"} <= seen
    assert not {"a", "c"} & seen


def test_names_of_the_previous_iteration_are_visible():
    text = "for x in y:\n    use\n    a = 1\n"
    assert {"x", "a"} <= visible(*place(text, 2))


def test_globals_set_later_are_visible_inside_functions_only():
    text = "def f():\n    use\n\nuse2\nlater = 1\n"
    assert "later" in visible(*place(text, 2))
    assert "later" not in visible(*place(text, 4))


def test_the_nearest_definition_counts():
    text = "def f(a):\n    b = 1\n    for b in a:\n        use\n"
    assert definition(*place(text, 4), "b").start == 3
    assert definition(*place(text, 4), "a").start == 1
    assert definition(*place(text, 4), "c") is None
