import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "state.md"


def rows():
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def test_every_row_of_the_table_names_a_test_that_exists():
    defined = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set()
    for row in rows():
        last = row.rstrip(" |").rpartition("|")[2].strip()
        if last in {"test", "how"}:
            continue
        assert re.fullmatch(r"`test_\w+`", last), f"no test in the row {row}"
        named.add(last.strip("`"))
    assert named - defined == set()
    assert len(named) > 60
