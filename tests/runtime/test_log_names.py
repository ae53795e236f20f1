"""Any name may be logged: it becomes a column, or is refused with a warning that breaks nothing."""

import json
import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rearview.runtime import api
from rearview.runtime.base_session import current_session, use_session


class Kept:
    """A session that remembers what it was told."""

    def __init__(self):
        self.items = {}

    def place(self, frame):
        return b""

    def log(self, items, place=b""):
        self.items.update(items)


@pytest.fixture
def kept():
    before, session = current_session(), Kept()
    use_session(session)
    api._REFUSED.clear()
    yield session
    use_session(before)


class Unprintable:
    def __repr__(self):
        raise ValueError

    __str__ = __repr__


ANY = st.one_of(
    st.text(), st.text(st.characters(codec=None)), st.none(), st.integers(), st.floats(),
    st.binary(), st.booleans(), st.just("$occ"), st.just("x" * 5000), st.builds(Unprintable),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ANY)
def test_no_name_raises_and_every_accepted_name_can_be_stored(kept, name):
    kept.items.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert api.log(name, 1) == 1
        api.log({name: 2} if not isinstance(name, Unprintable) else {"a": 1})
    for one in kept.items:
        assert isinstance(one, str)
        assert one.strip()
        assert not one.startswith("$")
        assert "\0" not in one
        one.encode()


@pytest.mark.parametrize(
    "name", ["", "  ", "$occ", "$stdout", 5, None, "a\0b", "x" * 5000, "\ud800"]
)
def test_a_refused_name_is_reported_once(kept, name):
    with pytest.warns(RuntimeWarning, match="not recorded") as said:
        assert [api.log(name, 1) for _ in range(3)] == [1, 1, 1]
    assert len(said) == 1
    assert kept.items == {}


NAMES = [
    "a.b",
    'quo"te',
    "it's",
    "new\nline",
    "tab\t",
    "semi;colon",
    "--",
    "ünï",
    "a" * 1000,
    "run",
]


def test_odd_names_are_columns(tmp_path):
    (tmp_path / "job.py").write_text(
        f"import rearview\nfor epoch in range(2):\n    for name in {NAMES!r}:\n"
        "        rearview.log(name, epoch)\n    rearview.log('', 1)\n    rearview.log('$occ', 1)\n"
    )

    def rearview(*words):
        done = subprocess.run(
            [sys.executable, "-m", "rearview", *words],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    assert rearview("run", "-q", "job.py").stderr.count("not recorded") == 2
    query = "select name, count(*) as n from records group by name"
    rows = json.loads(rearview("sql", query, "--format", "json").stdout)
    found = {row["name"]: row["n"] for row in rows}
    assert {name: found.get(name) for name in NAMES} == dict.fromkeys(NAMES, 2)
    assert not {"", "$occ"} & found.keys()
