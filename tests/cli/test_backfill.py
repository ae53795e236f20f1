import json
import sys
from types import SimpleNamespace

from fakehistory import an_outcome
from rearview._history import BackfillReport, Question, Refusal, Unproved
from rearview.cli import backfill
from rearview.cli.backfill import refusal_lines
from rearview.plan.explain_cost import CheaperQuestion, WorkerEstimate


def test_backfill_prints_its_records_and_their_proof(command, past):
    code, out, err = command("backfill", "g")
    assert code == 0
    assert "1 segment of 1 run, about 4.0 s of computing (3.0 s to 6.0 s)" in err
    assert "5 records written in 2.0 s; that is 10.0 times faster than the 20.0 s" in out
    assert "exact: 1 state restored, 3 states and 4 recorded values equal" in out


def test_all_bounds_are_passed_on(command, past):
    words = "backfill g h --where acc<1 --runs -1 --at epoch=3:5 --workers 2 --budget 10m"
    assert command(*words.split())[0] == 0
    question = Question(
        ("g", "h"), runs=("-1",), where="acc<1", at="epoch=3:5", workers=2, budget=600.0
    )
    assert past.asked == [("plan", question, {}), ("backfill", question, {})]


def test_explain_runs_nothing(command, past):
    code, out, _ = command("backfill", "g", "--explain")
    assert code == 0
    assert [verb for verb, _, _ in past.asked] == ["plan"]
    assert "epoch=3:5" in out
    assert "inner loop: only the chosen iterations run" in out
    assert "DPi" not in out


def test_explain_as_json(command, past):
    told = json.loads(command("backfill", "g", "--explain", "--json")[1])
    assert told["missing"] == 5
    assert told["plan"]["segments"][0]["operator"] == "DPi"


def test_explain_lists_numbers_of_workers_and_cheaper_questions(command, past):
    past.explained = SimpleNamespace(
        cells=5,
        nbytes_written=320,
        nbytes_read=2_000_000,
        startup=1.0,
        restoring=0.5,
        running=2.5,
        wasted=1.5,
        workers=[WorkerEstimate(1, 4.0, 1, 1.0), WorkerEstimate(2, 2.2, 2, 0.9)],
        cheaper=[CheaperQuestion(1.5, "Ask for less.")],
    )
    _, out, _ = command("backfill", "g", "--explain")
    assert "5 cells to fill, about 320 B to write, 2.0 MB of checkpoints to read" in out
    assert "1.0 s to start and set up, 500 ms to restore, 2.5 s to run (1.5 s only to get" in out
    assert out.split("done after")[1].split()[1:7] == ["1", "4.0", "s", "1", "2", "2.2"]
    assert "cheaper by 1.5 s: Ask for less." in out


def test_a_backfill_as_json_is_one_event_a_line_from_planned_to_done(command, past):
    code, out, err = command("backfill", "g", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [one["event"] for one in told] == ["planned", "done"]
    assert told[0]["segments"] == 1
    assert (told[-1]["exact"], told[-1]["written"], told[-1]["unproved"]) == (True, 5, [])


def test_nothing_missing_as_json_is_done_at_once(command, past):
    past.segments = ()
    code, out, _ = command("backfill", "g", "--json")
    assert code == 0
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["planned", "done"]


def test_nothing_missing_is_well_and_runs_nothing(command, past):
    past.segments = ()
    code, _, err = command("backfill", "g")
    assert code == 0
    assert "Nothing is missing." in err
    assert [verb for verb, _, _ in past.asked] == ["plan"]


def test_a_refused_run_is_named_with_its_reason_and_the_answer_is_no(command, past):
    past.segments = ()
    past.refusals = [Refusal("r1", "train.py:3 changes the computation.")]
    code, _, err = command("backfill", "g")
    assert code == 1
    assert "refused: r1: train.py:3 changes the computation." in err


def test_a_replay_that_differs_names_the_first_difference_and_its_output(command, past):
    past.report = BackfillReport([an_outcome(difference="model.0.weight")], [], 1.0, 2.0)
    code, out, _ = command("replay")
    assert code == 1
    assert "not exact:" in out
    assert "model.0.weight" in out
    assert "/replays/1/output.txt" in out


def test_a_replay_as_json_tells_everything(command, past):
    code, out, _ = command("replay", "-2", "--at", "epoch=1", "--json")
    told = json.loads(out)
    assert code == 0
    assert past.asked == [("replay", "-2", {"at": "epoch=1"})]
    assert told["exact"] is True
    assert told["speedup"] == 10.0
    assert told["segments"][0]["states"] == 3


def test_bounds_that_cannot_be_read_are_explained(command, past):
    for words, told in (
        (["--at", "epoch"], "names no iterations"),
        (["--budget", "soon"], "is not a span of time"),
        (["--workers", "0"], "0"),
    ):
        code, _, err = command("backfill", "g", *words)
        assert code == 2
        assert told in err
    assert past.asked == []


def test_a_name_is_required(command, past):
    assert command("backfill")[0] == 2


class Terminal:
    def isatty(self):
        return True


def test_the_user_is_asked_before_a_long_backfill(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    questions = []
    monkeypatch.setattr(backfill.click, "confirm", lambda text, **_: questions.append(text))
    backfill.ask_to_run(1.0)
    assert questions == []
    assert not backfill.ask_to_run(7200.0)
    assert questions == ["That takes about 2 h 0 min. Go on?"]


def test_without_a_terminal_a_backfill_asks_nothing(monkeypatch):
    monkeypatch.setattr(backfill.click, "confirm", None)
    assert backfill.ask_to_run(1e9)


def test_a_reason_that_many_runs_share_is_printed_once():
    reason = "x: nothing in the work tree logs this beyond what run r{} logged."
    shared = "x: nothing in the work tree logs this beyond what the run logged."
    few = [Refusal(f"r{k}", reason.format(k), shared) for k in range(2)]
    assert refusal_lines(few) == [f"refused: r0, r1: {shared}"]
    many = [Refusal(f"r{k}", reason.format(k), shared) for k in range(40)]
    assert refusal_lines(many) == [f"refused: 40 runs, such as r39: {shared}"]


def test_values_that_could_not_be_proved_are_reported_and_run_again_only_with_again(command, past):
    past.segments = ()
    past.unproved = [Unproved("r1", ("g",))]
    code, _, err = command("backfill", "g")
    assert code == 1
    assert "not proved: g of r1 has values" in err
    assert "`--again` runs it again" in err
    command("backfill", "g", "--again")
    assert [question.again for _, question, _ in past.asked] == [False, True]


def test_segments_that_another_backfill_filled_are_counted(command, past):
    past.report = BackfillReport(elsewhere=2)
    code, out, _ = command("backfill", "g")
    assert code == 0
    assert "2 segments filled by another backfill meanwhile\nnothing was replayed here" in out


def test_a_statement_that_was_never_reached_is_named_and_the_answer_is_no(command, past):
    past.report = BackfillReport([an_outcome(written=0), an_outcome(written=0)], names=("g",))
    code, out, _ = command("backfill", "g")
    assert code == 1
    assert f"never reached: {an_outcome().run}" in out
    assert out.count("never reached") == 1


def test_a_run_with_some_values_was_reached(command, past):
    past.report = BackfillReport([an_outcome(written=0), an_outcome(written=1)], names=("g",))
    code, out, _ = command("backfill", "g")
    assert code == 0
    assert "never reached" not in out


def test_a_replay_without_names_fills_nothing_and_is_well(command, past):
    past.report = BackfillReport([an_outcome(written=0)])
    assert command("replay")[0] == 0
