"""Every page of docs/guides does what it shows, as it stands."""

from pathlib import Path

import pytest
from guide_pages import Reader, differs

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_does_what_it_shows(page, tmp_path):
    reader = Reader(page, tmp_path)
    steps = 0
    for step in reader.steps():
        printed = reader.run(step.command).replace(str(tmp_path), "/home/you/project")
        assert not (why := differs(step.shown, printed)), f"$ {step.command}\n{why}"
        steps += 1
    assert steps > 1


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 0.5000 in 3.1 s\n", "loss 0.5001 in 12 ms\n", True),
        ("loss 0.5000\n", "loss 0.6000\n", False),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\n…\nz\n", "a\nb\nc\n", False),
        ("4 records written in …\n", "4 records written in 3 s; the rest\n", True),
        ("4 records written in …\n", "5 records written in 3 s; the rest\n", False),
        (
            "exact: 0 states restored, 2 states equal\n",
            "exact: 1 state restored, 1 state equal\n",
            True,
        ),
        ("exact: 0 states restored, 2 states equal\n", "not exact: w differs\n", False),
        ("run 20260101-120000-aaaa ended\n", "run 20271231-235959-0f0f ended\n", True),
    ],
)
def test_only_times_ids_last_digits_and_counted_states_may_differ_from_a_page(shown, printed, same):
    assert bool(differs(shown, printed)) is not same
