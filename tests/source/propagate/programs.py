"""Random programs for property tests: nested, with names that are defined before they are read."""

from hypothesis import strategies as st

NAMES = st.sampled_from(["loss", "x", "model", "epoch", "acc", "batch", "total"])
INDENTS = st.sampled_from(["    ", "  ", "\t"])
ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def simple(draw):
    one, two = draw(NAMES), draw(NAMES)
    number = draw(st.integers(0, 99))
    forms = [
        f"{one} = {two} + {number}",
        f"{one} = step({two}, k={number})",
        f"print({one}, {number})",
        f"log('{one} {number}', f'{{{two}:.{number}f}} of {{{one}}}')",
        f"{one} += {two}.item()",
        f"{one}.append({two}[{number}])",
        f"text = '''a\n   b{number}\n'''",
        f"# note {number}",
        f"assert {one} is not {two}",
    ]
    return [draw(st.sampled_from(forms))]


def block(depth):
    return st.lists(statement(depth), min_size=1, max_size=4).map(
        lambda parts: [each for part in parts for each in part]
    )


def statement(depth):
    if depth == 0:
        return simple()
    return st.one_of(simple(), simple(), compound(depth))


@st.composite
def compound(draw, depth):
    one = draw(NAMES)
    number = draw(st.integers(0, 9))
    head = draw(
        st.sampled_from(
            [
                f"for {one} in range({number}):",
                f"if {one} > {number}:",
                f"with scope({one}):",
                f"while {one} < {number}:",
                f"def f{number}({one}, *rest):",
                f"class C{number}:",
                "try:",
                f"match {one}:",
            ]
        )
    )
    inner = [("I", line) for line in ["pass", *draw(block(depth - 1))]]
    if head == "try:":
        return [head, *inner, "except ValueError as error:", ("I", "print(error)")]
    if head.startswith("match"):
        return [head, ("I", "case {'k': value}:"), *[("I", each) for each in inner]]
    if head.startswith("if") and draw(st.booleans()):
        return [
            head,
            *inner,
            "else:",
            *[("I", line) for line in draw(block(depth - 1))],
            ("I", "pass"),
        ]
    return [head, *inner]


def written(parts, indent, end):
    """Return the program as text."""
    lines = []
    for each in parts:
        depth, part = 0, each
        while isinstance(part, tuple):
            depth, part = depth + 1, part[1]
        lines.append(indent * depth + part.replace("\n", end))
    return end.join(lines) + end


@st.composite
def programs(draw):
    parts = draw(block(3))
    return parts, draw(INDENTS), draw(ENDS)
