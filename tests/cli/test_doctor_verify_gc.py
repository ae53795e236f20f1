import json
from pathlib import Path

from rearview.store.maintenance.thin_and_collect import Freed
from rearview.store.maintenance.verify import Problem, VerifyReport


def test_a_store_that_is_well_is_ok(command, past):
    past.checked = VerifyReport(objects=2, packs=1, checkpoints=3, runs=1, nbytes=5000)
    code, out, _ = command("verify")
    assert (code, out) == (0, "ok: 1 run, 3 checkpoints, 2 objects, 1 pack, 5.0 kB read\n")


def test_damage_is_named_and_the_answer_is_no(command, past):
    past.checked = VerifyReport(
        problems=(Problem(Path("objects/ab"), "is damaged", lost=("r/3",)),)
    )
    code, out, err = command("verify")
    assert code == 1
    assert "damaged: objects/ab: is damaged" in out
    assert "cannot be loaded: r/3" in out
    assert "--repair" in err


def test_a_repaired_store_is_reported_as_sound(command, past):
    past.checked = VerifyReport(problems=(Problem(Path("format"), "was empty", done="rewritten"),))
    code, out, _ = command("verify", "--repair")
    assert code == 0
    assert "repaired: format: was empty; rewritten" in out


def test_verify_as_json(command, past):
    past.checked = VerifyReport(problems=(Problem(Path("a"), "is damaged"),))
    code, out, _ = command("verify", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert json.loads(out)["problems"][0]["path"] == "a"


def test_a_format_file_that_cannot_be_read_is_mended(command, tmp_path, monkeypatch):
    store = tmp_path / ".rearview"
    for folder in ("runs", "objects", "packs", "checkpoints"):
        (store / folder).mkdir(parents=True)
    (store / "format").write_text("?")
    monkeypatch.chdir(tmp_path)
    assert "store-unreadable" in command("runs")[2]
    assert "rewritten" in command("verify", "--repair")[2]
    assert (store / "format").read_text() == "2\n"  # it may hold compressed objects


def test_gc_keeps_chosen_runs_and_running_runs(command, past):
    past.freed = Freed(checkpoints=("r/1",), files=2, nbytes=1_500_000, left=10)
    code, out, _ = command("gc", "--budget", "10GB", "--keep-run", past.found[0].id)
    assert code == 0
    assert out == "freed 1.5 MB, 1 checkpoint dropped; 10 B are left\n"
    kept = [run.id for run in past.found]
    assert past.asked == [("gc", (), {"budget": 10**10, "keep": kept, "dry": False})]


def test_gc_dry_run_only_says(command, past):
    past.freed = Freed(nbytes=5)
    assert command("gc", "--dry-run")[1] == "would free 5 B; 0 B are left\n"
    assert past.asked[0][2]["dry"] is True


def test_gc_keeps_the_newest_runs(command, past):
    past.freed = Freed()
    command("gc", "--keep", "2")
    assert past.asked[0][2]["keep"] == [run.id for run in past.found]


def test_gc_says_when_promises_do_not_fit_the_budget(command, past):
    past.freed = Freed(left=3_000_000)
    assert "2.0 MB more than the budget" in command("gc", "--budget", "1MB")[2]


def test_a_size_that_is_none_is_explained(command, past):
    code, _, err = command("gc", "--budget", "lots")
    assert code == 2
    assert "Write it like 500MB" in err
