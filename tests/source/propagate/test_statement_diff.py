"""What became of each statement between two versions."""

from rearview.source.propagate.statement_diff import Edit, statement_diff

OLD = """import os

def train(data):
    total = 0
    for x in data:
        loss = f(x)
        total += loss
        save(total, folder, when, where)
    return total
"""


def edits(old, new):
    return {
        (one.edit, one.old_line, one.new_line)
        for one in statement_diff({"t.py": old}, {"t.py": new})
        if one.edit is not Edit.SAME
    }


def test_equal_versions_have_no_changed_statement():
    assert edits(OLD, OLD) == set()


def test_layout_and_comments_are_no_change():
    assert edits(OLD, OLD.replace("f(x)", "f( x )  # why")) == set()


def test_a_renamed_variable_is_renamed_everywhere():
    new = OLD.replace("loss", "cost")
    assert edits(OLD, new) == {(Edit.RENAMED, 6, 6), (Edit.RENAMED, 7, 7)}


def test_a_statement_in_another_block_has_moved():
    new = OLD.replace(
        "        save(total, folder, when, where)\n    return",
        "    save(total, folder, when, where)\n    return",
    )
    assert edits(OLD, new) == {(Edit.MOVED, 8, 8)}


def test_statements_in_another_order_have_moved():
    new = OLD.replace(
        "        total += loss\n        save(total, folder, when, where)",
        "        save(total, folder, when, where)\n        total += loss",
    )
    assert len(edits(OLD, new)) == 1
    assert {edit for edit, _, _ in edits(OLD, new)} == {Edit.MOVED}


def test_changed_added_removed():
    new = OLD.replace("import os\n", "").replace("total = 0", "total = start(data, 0)")
    new = new.replace("    return", "    print(total)\n    return")
    assert edits(OLD, new) == {
        (Edit.REMOVED, 1, None),
        (Edit.CHANGED, 4, 3),
        (Edit.ADDED, None, 8),
    }


def test_a_file_that_one_version_lacks_is_added_or_removed():
    found = statement_diff({"a.py": "x = 1\n"}, {"b.py": "y = 2\n"})
    assert [(one.edit, one.path) for one in found] == [
        (Edit.REMOVED, "a.py"),
        (Edit.ADDED, "b.py"),
    ]
