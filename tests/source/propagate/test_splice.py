import ast

import pytest

from rearview.source.propagate.splice import insert_lines, rename, render
from rearview.source.text import try_parse


def shown(text, lines, **options):
    parsed = try_parse(text)
    trees = [
        node
        for node in ast.walk(parsed.tree)
        if isinstance(node, ast.stmt) and lines[0] <= node.lineno <= lines[1]
    ]
    given = {"renamed": {}, "indent": "", "unit": "    ", "end": "\n", **options}
    return render(parsed, lines, trees, **given)


def test_inner_lines_keep_their_depth():
    text = "if a:\n    if b:\n        c\n"
    assert shown(text, (2, 3), indent="\t", unit="\t") == "\tif b:\n\t\tc\n"
    assert shown(text, (2, 3), indent="  ", end="\r\n") == "  if b:\r\n      c\r\n"


def test_the_inside_of_a_string_is_not_indented():
    text = 'if a:\n    print("""one\n  two\n""")\n'
    assert shown(text, (2, 4), indent="        ") == '        print("""one\n  two\n""")\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f(x, x=x, y=lambda: x)", "f(z, x=z, y=lambda: z)"),
        ("a.x + x.a", "a.x + z.a"),
        ("f'{x} x {{x}} {x!r:>{x}} {y[\"x\"]}'", "f'{z} x {{x}} {z!r:>{z}} {y[\"x\"]}'"),
        ("'x' + rb'x' + x  # x", "'x' + rb'x' + z  # x"),
        ("f'''{\n x}'''", "f'''{\n z}'''"),
        ("f'{x=}'", "f'{z=}'"),
        ("x2 + xx + x", "x2 + xx + z"),
        (r"'\'' + x", r"'\'' + z"),
        ("d[x:x] == x", "d[z:z] == z"),
    ],
)
def test_only_the_name_itself_is_renamed(before, after):
    assert rename(before, {"x": "z"}) == after


def test_lines_are_put_before_a_line_and_nothing_else_moves():
    assert insert_lines("a\r\nb", 2, "new\r\n") == "a\r\nnew\r\nb"
    assert insert_lines("a", 2, "\nb") == "a\nb"
