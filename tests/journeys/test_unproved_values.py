"""Values of a replay that is not exact are withheld, unproved ones are marked, and all commands agree."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.store.checkpoints.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """\
import os
import time
{head}
weight = 1.0
for epoch in range(6):
    for step in range(3):
        weight = (weight * 1.5 + {term}) % 7
        time.sleep(0.01)
{tail}"""
PROBE = "        rearview.log('w', weight)\n"
FIELDS = ("run", "epoch", "step", "w")


def script(head="", term="0.0", tail=""):
    return SCRIPT.format(head=head, term=term, tail=tail)


def probed(text):
    return "import rearview\n" + text.replace(
        "        time.sleep(0.01)\n", "        time.sleep(0.01)\n" + PROBE
    )


def run(folder, text, *, keep=None):
    """Record a script; `keep` says which of its checkpoints stay, as after a `gc`."""
    write(folder, train=text)
    assert recorded(folder, "train.py").code == 0
    if keep is not None:
        past = history(folder)
        for one in Checkpoints(past.project).of(past.run().id):
            if not keep(one.point.indices):
                (manifest,) = (folder / ".rearview" / "checkpoints").rglob(f"{one.seq:08d}.json")
                manifest.unlink()
    (folder / "train.py").write_text(probed(text))


def ask(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def values(folder, *words):
    _, out, _ = ask(folder, "table", "w", "--format", "json", *words)
    return {(r["epoch"], r["step"]): r["w"] for r in json.loads(out) if r["w"] is not None}


def test_values_that_are_not_exact_are_given_out_only_if_asked_for(tmp_path):
    run(tmp_path, script(term="os.getpid() * 1e-9"))
    code, out, _ = ask(tmp_path, "backfill", "w", "--workers", "1")
    assert code == 1
    assert "left out of tables, because not exact: 18 records" in out
    assert values(tmp_path) == {}
    assert len(values(tmp_path, "--unproved")) == 18
    _, out, err = ask(tmp_path, "table", "w")
    assert "w: 18 cells missing" in err, "it is an empty column again"
    assert "*" not in out
    past = history(tmp_path)
    assert past.table("w").pandas()["w"].isna().all()
    assert past.table("w").arrow()["w"].null_count == len(past.table("w").rows())
    assert "w" not in past.sql("SELECT * FROM full_pivot").columns
    full = past.sql("SELECT w, unproved FROM full_pivot", unproved=True).rows()
    assert [row["unproved"] for row in full] == ["w"] * 18
    raw = past.sql(
        "SELECT DISTINCT origin FROM records WHERE name = 'w' AND (origin = 'recorded' OR replay IS NOT NULL)"
    ).rows()
    assert raw == [{"origin": "not exact"}]


def test_cells_of_a_replay_that_was_not_exact_are_missing_again(tmp_path):
    run(tmp_path, script(term="os.getpid() * 1e-9"))
    report = history(tmp_path).backfill(["w"], workers=1)
    assert report.verdict == "not exact"
    plan = history(tmp_path).plan(["w"])
    assert (plan.nothing, plan.missing.cells) == (False, 18)
    assert "Nothing is missing" not in "".join(ask(tmp_path, "backfill", "w", "--explain")[1:])


def test_every_command_tells_the_same_verdict(tmp_path):
    run(tmp_path, script(term="os.getpid() * 1e-9"))
    code, out, _ = ask(tmp_path, "replay", "--json")
    told = json.loads(out)
    assert (code, told["exact"], told["verdict"]) == (1, False, "not exact")
    shown = json.loads(ask(tmp_path, "show", "--json")[1])
    assert shown["verdict"] == "not exact"
    kept = [one for one in shown["replays"] if one["verdict"] != "redone"]
    reasons = {one["why"] for one in told["segments"]}
    assert {(one["verdict"], one["why"]) for one in kept} == {("not exact", why) for why in reasons}
    assert shown["exact"].partition(": ")[2] in reasons
    assert any(told["proof"].endswith(why) for why in reasons)
    asked = "SELECT DISTINCT why FROM replays WHERE verdict = 'not exact'"
    assert {row["why"] for row in history(tmp_path).sql(asked)} == reasons


def unproved(folder):
    """Fill two epochs after the last checkpoint: nothing was recorded to compare them with."""
    run(folder, script(), keep=lambda indices: len(indices) == 1 and indices[0] <= 2)
    code, _, _ = ask(folder, "backfill", "w", "--at", "epoch=3:5")
    assert code == 1


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unproved")
    unproved(folder)
    return folder


def test_unproved_values_carry_a_sign_and_a_legend_in_the_table(doubtful):
    code, out, err = ask(doubtful, "table", "w")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == list(FIELDS), "the sign needs no column"
    assert [line.endswith("*") for line in lines[1:-1] if len(line.split()) == 4] == [True] * 6
    assert lines[-1].startswith("* unproved: ")
    assert "unproved: values of w are among these" in err


def test_unproved_values_are_named_in_a_column_of_csv_and_json(doubtful):
    _, out, err = ask(doubtful, "table", "w", "--format", "csv")
    rows = [row for row in csv.DictReader(io.StringIO(out)) if row["w"]]
    assert [row["unproved"] for row in rows] == ["w"] * 6
    assert "unproved: values of w are among these" in err
    found = json.loads(ask(doubtful, "table", "w", "--format", "json")[1])
    assert {row["unproved"] for row in found if row["w"] is not None} == {"w"}
    assert {row["unproved"] for row in found if row["w"] is None} <= {None}


def test_unproved_values_are_signed_in_markdown(doubtful):
    _, out, _ = ask(doubtful, "table", "w", "--format", "markdown")
    assert out.count("* |") == 6
    assert "* unproved: " in out.splitlines()[-1]


def test_unproved_values_are_named_in_data_frames_and_sql(doubtful):
    past = history(doubtful)
    for frame in (
        past.table("w").pandas(),
        past.table("w").polars().to_pandas(),
        past.table("w").arrow().to_pandas(),
        past.sql("SELECT * FROM full_pivot").pandas(),
    ):
        held = frame[frame["w"].notna()]
        assert list(held["unproved"]) == ["w"] * 6
    assert past.table("w", where="unproved IS NULL AND w IS NOT NULL").rows() == []
    assert "may be among these" in ask(doubtful, "sql", "SELECT w FROM full_pivot")[2]


def test_show_says_that_a_replay_without_a_comparison_is_unproved(doubtful):
    out = ask(doubtful, "show")[1]
    assert "w: unproved: nothing was recorded after the last part that it computed" in out
    assert "exact        unproved: " in out


def test_values_without_a_doubt_have_no_column_and_no_sign(tmp_path):
    run(tmp_path, script())
    assert ask(tmp_path, "backfill", "w")[0] == 0
    _, out, err = ask(tmp_path, "table", "w", "--format", "csv")
    assert out.splitlines()[0] == ",".join(FIELDS)
    assert "unproved" not in err
    rows = history(tmp_path).table("w", where="unproved IS NULL").rows()
    assert len(rows) == 18


def test_an_interrupted_backfill_leaves_marked_values_until_it_is_done(tmp_path):
    project, hold = tmp_path / "project", tmp_path / "hold"
    waits = f"    while epoch == 3 and os.path.exists({str(hold)!r}): time.sleep(0.01)\n"
    run(project, script(tail=waits))
    hold.touch()
    backfill = subprocess.Popen(
        [sys.executable, "-m", "rearview", "backfill", "w", "--workers", "1", "--quiet"],
        cwd=project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def logged():
        files = (project / ".rearview" / "runs").glob("*/records-*.jsonl")
        texts = [file.read_bytes() for file in files]
        return sum(text.count(b'"n":["w"]') for text in texts if b'"origin":"$' not in text)

    while logged() < 12:
        assert backfill.poll() is None, "it ended before it was interrupted"
        time.sleep(0.02)
    backfill.send_signal(signal.SIGINT)
    assert backfill.wait() != 0
    rows = json.loads(ask(project, "table", "w", "--format", "json")[1])
    assert [row["unproved"] for row in rows if row["w"] is not None] == ["w"] * 12
    assert "w: incomplete: it was interrupted" in ask(project, "show")[1]
    hold.unlink()
    code, out, _ = ask(project, "backfill", "w", "--workers", "1")
    assert (code, "18 records written" in out) == (0, True)
    assert len(values(project)) == 18
    found = history(project).table("w").pandas()
    assert found["unproved"].isna().all(), "the exact values win"
    assert history(project).show().verdict == "exact"


COUNTS = "import string; string.counted = getattr(string, 'counted', 0)"
"""State in a library's module, which no checkpoint holds."""
HIDDEN = """\
    string.counted += 1
    weight += string.counted * 1e-3
"""


def test_a_first_replay_that_was_redone_is_reported_everywhere(tmp_path):
    run(tmp_path, script(head=COUNTS, tail=HIDDEN))
    code, out, _ = ask(tmp_path, "backfill", "w", "--at", "epoch=3:5", "--workers", "1")
    assert code == 0, out
    assert "redone from the start: " in out
    assert "weight at epoch=" in out
    assert out.splitlines()[-1].startswith("exact: ")
    shown = ask(tmp_path, "show")[1]
    assert "w: redone from the start: weight at epoch=" in shown
    assert "w: exact (from the start of the run)" in shown
    assert "exact        exact: 1 replay, " in shown
    told = json.loads(ask(tmp_path, "show", "--json")[1])
    assert [one["verdict"] for one in told["replays"]] == ["redone", "exact"]
    assert told["replays"][1]["redoes"] == told["replays"][0]["id"]
    assert told["verdict"] == "exact"
    assert len(values(tmp_path)) == len(values(tmp_path, "--unproved")) == 6


def test_a_redone_segment_is_an_event_and_part_of_the_end(tmp_path):
    run(tmp_path, script(head=COUNTS, tail=HIDDEN))
    _, out, _ = ask(tmp_path, "backfill", "w", "--at", "epoch=3:5", "--workers", "1", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    again = [event for event in events if event["event"] == "again"]
    assert len(again) == 1
    assert "weight at epoch=" in again[0]["message"]
    assert events[-1]["redone"][0]["why"] == again[0]["message"]
    assert (events[-1]["exact"], events[-1]["verdict"]) == (True, "exact")


def test_a_file_that_the_run_made_is_not_called_gone(tmp_path):
    keeps = """\
    os.close(os.open('model.bin', os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
with open('model.bin') as file: file.read()
"""
    run(tmp_path, script(term="os.getpid() * 1e-9", tail=keeps))
    report = history(tmp_path).backfill(["w"], workers=1)
    assert report.verdict == "not exact"
    assert "model.bin" not in report.proof
    assert "model.bin" not in history(tmp_path).show().exact
