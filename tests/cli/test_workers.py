import json

from rearview._history import BackfillStatus


def status(name="20260101-000000-abcd", **changes):
    facts = {"workers": 2, "busy": 2, "segments": 9, "ended": 4, "left": 75.0, **changes}
    return BackfillStatus(name, ("grad_norm",), 1_767_225_600.0, **facts)


def test_backfills_under_way_are_shown_with_their_workers(command, past):
    past.under_way = [status()]
    code, out, _ = command("workers")
    assert code == 0
    assert "grad_norm" in out
    assert "4 of 9" in out
    assert "1 min 15 s" in out
    told = json.loads(command("workers", "--json")[1])
    assert told[0]["busy"] == 2


def test_a_note_says_that_no_backfill_is_under_way(command, past):
    code, out, err = command("workers")
    assert (code, out) == (1, "")
    assert "No backfill is running" in err


def test_a_number_sets_the_workers_from_now_on(command, past):
    past.under_way = [status()]
    code, out, _ = command("workers", "5", "--of", "abcd")
    assert code == 0
    assert past.asked == [("set_workers", 5, {"of": "abcd"})]
    assert "5 workers from now on" in out


def test_no_worker_at_all_is_wrong_use(command, past):
    assert command("workers", "0")[0] == 2
