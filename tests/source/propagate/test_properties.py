import ast
import sys
from pathlib import Path

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from programs import programs, written

from rearview.source.propagate.carry_statement import carry
from rearview.source.propagate.match import match
from rearview.source.statement_trees import first_line, grow, last_line
from rearview.source.text import split, try_parse

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def parsed(text):
    found = try_parse(text)
    assume(not isinstance(found, str))
    return found


@QUIET
@given(programs())
def test_a_program_matched_with_itself_is_the_identity(program):
    one, two = grow(parsed(written(*program))), grow(parsed(written(*program)))
    pairs = match(one, two).old_of
    assert {new.order: old.order for new, old in pairs.items()} == {
        node.order: node.order for node in one.nodes
    }


@QUIET
@given(programs(), st.data())
def test_an_inserted_statement_parses_and_can_be_removed_byte_for_byte(program, data):
    parts, indent, end = program
    new = written(parts, indent, end)
    tree = parsed(new).tree
    every = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assume(every)
    chosen = data.draw(st.sampled_from(every))
    lines = (first_line(chosen), last_line(chosen))
    dropped = data.draw(st.sets(st.integers(0, max(0, len(parts) - 1)), max_size=3))
    renamed = data.draw(st.sampled_from(["loss", "x", "total", "nothing"]))
    kept = [part for at, part in enumerate(parts) if at not in dropped]
    old = written(
        kept, data.draw(st.sampled_from(["    ", "\t"])), data.draw(st.sampled_from(["\n", "\r\n"]))
    )
    old = old.replace(renamed, "former")
    if data.draw(st.booleans()):
        old = old.rstrip("\r\n")
    parsed(old)
    found = carry(new, lines, old)
    if found.line is None:
        assert found.reason
        return
    result = found.into(old)
    assert not isinstance(try_parse(result), str)
    before, after = split(old)[: found.line - 1], split(old)[found.line - 1 :]
    assert "".join(before) + found.text + "".join(after) == result
    assert result.replace(found.text, "", 1) == old or found.text in old
    assert 0.0 < found.confidence <= 1.0


@QUIET
@given(programs(), st.data())
def test_a_statement_taken_out_goes_back_where_it_was(program, data):
    parts, indent, end = program
    new = written(parts, indent, end)
    every = [node for node in ast.walk(parsed(new).tree) if isinstance(node, ast.stmt)]
    assume(every)
    chosen = data.draw(st.sampled_from(every))
    start, stop = first_line(chosen), last_line(chosen)
    lines = split(new)
    old = "".join(lines[: start - 1] + lines[stop:])
    parsed(old)
    found = carry(new, (start, stop), old)
    if found.line is not None:
        # equal up to which of several identical neighbours is called the inserted one
        assert ast.dump(ast.parse(found.into(old))) == ast.dump(ast.parse(new))
