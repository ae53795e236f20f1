import shlex
import stat
import sys
from pathlib import Path

import pytest

from rearview.checkpointer.submit_files import BatchJob, batch_script, submit_file

HARD = """it's "me" $(HOME), a,b"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "my project"
    for name in ("train.py", "conf.yaml", "pkg/net.py", "data/rows.csv", ".venv/x.py", "big.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


def lines(text):
    return dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)


def test_a_submit_file_is_that_of_a_self_checkpointing_job(command, project):
    words = ("--condor", "--set", "request_gpus=1", "--input", "data", "train.py", "--lr", "0.1")
    code, out, err = command("submit", *words)
    assert (code, out) == (0, "")
    assert "condor_submit train.sub" in err
    found = lines(Path("train.sub").read_text())
    assert found["executable"] == sys.executable
    assert found["arguments"] == (
        '"-m rearview run --preemptible --exit-every 1h train.py --lr 0.1"'
    )
    assert found["checkpoint_exit_code"] == "85"
    assert found["transfer_checkpoint_files"] == ".rearview"
    assert found["when_to_transfer_output"] == "ON_EXIT_OR_EVICT"
    assert found["request_gpus"] == "1"
    there = [str(project / name) for name in ("conf.yaml", "pkg", "train.py", "data")]
    assert found["transfer_input_files"].split(",") == there
    # what comes back goes to a folder of its own, a new one for each submit file
    assert found["initialdir"] == str(project / "train.results")
    command("submit", "--condor", "train.py")
    found = lines(Path("train.sub").read_text())
    assert found["initialdir"] == str(project / "train.2.results")


def test_options_of_run_are_passed_on_unchanged(command, project):
    options = ("--every", "--arg", "a=b c", "--retries", "7", "--green", "--by", "18:00")
    command("submit", "--slurm", *options, "-o", "job.sh", "-m", "pkg.train", "--slurm", HARD)
    text = Path("job.sh").read_text()
    (started,) = (line for line in text.splitlines() if line.startswith("srun "))
    assert shlex.split(started) == [
        *("srun", sys.executable, "-m", "rearview", "run", "--preemptible", "--arg", "a=b c"),
        *("--every", "--retries", "7", "--green", "--by", "18:00"),
        *("-m", "pkg.train", "--slurm", HARD),
    ]
    assert '"${SLURM_RESTART_COUNT:-0}" -gt 7' in text
    assert "#SBATCH --signal=USR1@60\n" in text
    assert "#SBATCH --requeue\n" in text
    assert f"cd {shlex.quote(str(project))} ||" in text


def test_every_argument_stays_one_argument_under_htcondor():
    job = BatchJob(
        "x", ("/usr/bin/python3", "a b", "", HARD, "tab\there"), "/", 3, results=("m.pt",)
    )
    found = lines(submit_file(job, results="/r"))
    assert found["arguments"] == (""""'a b' '' 'it''s ""me"" $(DOLLAR)(HOME), a,b' 'tab\there'\"""")
    assert found["periodic_hold"] == "NumJobStarts > 3"
    assert found["transfer_output_files"] == ".rearview,m.pt"


@pytest.mark.parametrize(
    "words",
    [
        ("--condor", "train.py", "a\nb"),
        ("--slurm", "--set", 'comment="x"', "train.py"),
        ("--condor", "--result", "a,b", "train.py"),
    ],
)
def test_words_that_a_job_file_cannot_hold_are_refused(command, project, words):
    code, _, err = command("submit", *words)
    assert code == 2
    assert "#submit-quoting" in err
    assert not list(project.glob("*.results"))
    assert not list(project.glob("train.s*"))


def test_missing_arguments_scripts_and_inputs_are_reported(command, project):
    assert "For which batch system" in command("submit", "train.py")[2]
    assert "#no-script" in command("submit", "--condor", "trian.py")[2]
    assert "#no-script" in command("submit", "--condor", sys.executable)[2]
    assert "#submit-input" in command("submit", "--condor", "--input", "gone", "train.py")[2]


def test_a_missing_batch_system_and_its_refusal_are_reported(command, project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))
    code, _, err = command("submit", "--condor", "--submit", "train.py")
    assert code == 2
    assert "#no-submit" in err
    fake = project / "sbatch"
    fake.write_text("#!/bin/sh\necho 'no such partition' >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    code, _, err = command("submit", "--slurm", "--submit", "train.py")
    assert "refused train.sbatch: no such partition" in err
    fake.write_text('#!/bin/sh\necho "Submitted batch job 7"\n')
    assert command("submit", "-q", "--slurm", "--submit", "train.py")[:2] == (
        0,
        "Submitted batch job 7\n",
    )


def test_the_script_of_slurm_says_no_more_than_it_must():
    text = batch_script(BatchJob("n", ("python", "x"), "/p", settings={"partition": "a b"}))
    assert text.startswith("#!/bin/sh\n")
    assert '#SBATCH --partition="a b"\n' in text
