"""One bit of a store is changed: no answer is wrong without `verify` saying so, and no other run is hurt.

`benchmarks/damage` does the same a thousand times.
"""

import pytest

from damage import build, expected_of, flips, judge
from rearview.store.tables import read_record_files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    enough = read_record_files.ENOUGH
    yield build(tmp_path_factory.mktemp("whole"))
    read_record_files.ENOUGH = enough


@pytest.fixture(scope="module")
def expected(whole, tmp_path_factory):
    return expected_of(whole, tmp_path_factory.mktemp("asked") / "copy")


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_bit_is_found_or_changes_nothing(whole, expected, tmp_path, seed):
    found = [
        judge(whole, expected, flip, tmp_path / f"{number}")
        for number, flip in enumerate(flips(whole, 10, seed))
    ]
    assert [one for one in found if one.wrong] == []
    assert any(one.named for one in found)
