"""Versions whose scripts begin with the same set-up run it once in a backfill, and nobody can tell."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from limits import HUNG
from plainly import SOURCE
from rearview._history import history
from rearview.backfill import setup_sharing
from rearview.execute import local
from rearview.plan import divide_work

pytestmark = [
    pytest.mark.usefixtures("warm_start"),
    pytest.mark.skipif(not local.FORK_SERVER_SUPPORTED, reason="LOUD: no pidfd, nothing is shared"),
]

READ = """
def read(name):
    with open({count!r}, "a") as counted:
        counted.write("r")
    with open(name) as file:
        return float(file.read())
"""
"""Reads a file and notes the call, so that a test can count how often a set-up ran."""
SCRIPT = """
import os
import random
import sys
import threading
import time

{read}
{before}
data = [read(f"part{{k}}.txt") for k in range(3)]
{between}
rate = {rate}
weight = sum(data)
for epoch in range(3):
    weight = weight * (1 - rate) + {value}
    print("said", repr(weight))
"""
ASKED = "    rearview.log('asked', weight)\n"
READS = 3
"""Files that one set-up reads."""


@dataclass
class Project:
    """A project with runs of several versions, and a statement to be filled."""

    folder: Path
    count: Path
    script: str = SCRIPT
    asked: str = ASKED
    said: list[float] = field(default_factory=list)
    text: str = ""
    setups: list[object] = field(default_factory=list)

    def record(
        self, rate=0.1, *words, before="pass", between="pass", value="0.5", text=None, env=None
    ):
        """Record one run of a version."""
        fill = {"read": READ.format(count=str(self.count)), "rate": rate, "value": value}
        self.text = (text or self.script).format(before=before, between=between, **fill)
        (self.folder / "train.py").write_text(self.text)
        done = subprocess.run(
            [sys.executable, "-m", "rearview", "run", "-q", "--every", "train.py", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
            env={**os.environ, **(env or {})},
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        self.said += [float(words[1]) for words in lines if words[:1] == ["said"]]

    def ask(self):
        """Add the statement to the newest version, and count reads from now on."""
        needs = "" if "import rearview" in self.text else "import rearview\n"
        (self.folder / "train.py").write_text(needs + self.text + self.asked)
        self.count.write_text("")

    def fill(self, **options):
        """Fill, compare with what the runs said, and return how many files were read."""
        self.ask()
        report = history(self.folder).backfill(["asked"], workers=2, **options)
        assert report.proved, report.proof
        assert not report.redone, [outcome.redone for outcome in report.redone]
        rows = history(self.folder).table("asked").pandas()
        assert list(rows["asked"]) == self.said
        assert not list((self.folder / ".rearview" / "replays").glob("*-setup*"))
        return len(self.count.read_text())

    def reasons(self):
        """Return why set-ups were not shared to their end."""
        known = setup_sharing.read_obstacles(self.folder / ".rearview" / "cache")
        return [reason.text for reason in known.values()]


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("REARVIEW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setattr(setup_sharing, "WORTH_SHARING", 0.0)
    folder = tmp_path / "project"
    folder.mkdir()
    for k in range(READS):
        (folder / f"part{k}.txt").write_text(f"{k}.5")
    made = Project(folder, tmp_path / "count")
    made.count.write_text("")
    spawn = local.ForkServerClient.spawn_setup

    def watched(server, *args):
        made.setups.append(args[1].start)
        return spawn(server, *args)

    monkeypatch.setattr(local.ForkServerClient, "spawn_setup", watched)
    return made


def record_versions(project, count=4, **options):
    for k in range(count):
        project.record(0.1 + k / 10, **options)


def test_the_set_up_of_four_versions_runs_once(project):
    record_versions(project)
    assert len(project.count.read_text()) == 4 * READS
    assert project.fill() == READS
    assert project.reasons() == []


def test_formatting_and_comments_do_not_count(project):
    project.record(0.1)
    project.record(0.2, text="# another remark\n" + SCRIPT.replace("sum(data)", "sum( data )"))
    assert project.fill() == READS


def test_versions_share_as_much_as_each_two_have_in_common(project):
    project.record(0.1, between="extra = 1.5", value="extra")
    project.record(0.2, between="extra = 1.5", value="extra")
    project.record(0.3, between="extra = read('part1.txt')", value="extra")
    project.record(0.4, between="extra = read('part1.txt')", value="extra")
    assert project.fill() == READS + 1


def test_versions_with_other_data_share_with_those_that_have_the_same(project):
    for k, part in enumerate(("0.5", "0.5", "7.5", "7.5")):
        (project.folder / "part0.txt").write_text(part)
        project.record(0.1 + k / 10)
    assert project.fill() == 2 * READS


def test_versions_with_other_arguments_share_nothing(project):
    before = "level = float(sys.argv[1])"
    for k, level in enumerate(("1", "1", "2")):
        project.record(0.1 + k / 10, level, before=before, value="level")
    assert project.fill() == 2 * READS


def test_versions_that_read_another_variable_share_nothing(project):
    before = "level = float(os.environ['LEVEL'])"
    for k, level in enumerate(("1", "1", "2")):
        project.record(0.1 + k / 10, before=before, value="level", env={"LEVEL": level})
    assert project.fill() == 2 * READS


OWN = {
    "random numbers": ("noise = random.random()", "noise"),
    "random numbers ": ("noise = random.Random().random()", "noise"),
    "the clock": ("noise = time.time() % 1", "noise"),
    "logs values": ("import rearview; rearview.log('seen', 1.5)", "0.5"),
    "thread": (
        "threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()",
        "0.5",
    ),
    "leaves open": ("kept = open('part0.txt')", "0.5"),
    "starts a process": ("os.waitpid(os.spawnlp(os.P_NOWAIT, 'true', 'true'), 0)", "0.5"),
    "copies the environment": ("copied = len(dict(os.environ)) > 0", "0.5 * copied"),
    "changes part1.txt": ("os.utime('part1.txt')", "0.5"),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_statement_whose_effect_belongs_to_one_run_ends_the_shared_set_up(project, kind):
    """Everything before the statement is shared, and the reason is remembered."""
    between, value = OWN[kind]
    record_versions(project, 2, between=between, value=value)
    assert project.fill() == READS
    assert kind.strip() in project.reasons()[0]
    project.asked = project.asked.replace("asked", "asked_next")
    project.ask()
    plan = history(project.folder).plan(["asked_next"])
    assert kind.strip() in plan.shared.sentences[0]


@pytest.mark.parametrize("kind", ["random numbers", "thread"])
def test_nothing_after_such_a_statement_is_shared(project, kind):
    before, value = OWN[kind]
    record_versions(project, 2, before=before, value=value)
    assert project.fill() == 2 * READS


SEEDS = "def set_seed(number):\n    random.seed(number)\n\n\nset_seed(3)\nnoise = random.random()"


def test_numbers_drawn_after_a_seed_are_the_same_in_all_runs(project):
    record_versions(project, 3, before=SEEDS, value="noise + random.random()")
    assert project.fill() == READS
    assert project.reasons() == []


def test_a_run_draws_its_own_numbers_after_a_shared_set_up(project):
    record_versions(project, 3, value="random.random() + time.time() % 1")
    assert project.fill() == READS


def test_files_that_the_set_up_writes_are_there_for_each_run(project):
    between = (
        "os.makedirs('out')\n"
        "with open('out/sum.txt', 'w') as file: file.write(str(sum(data)))\n"
        "os.chdir('out')"
    )
    value = "float(open('sum.txt').read())"
    project.record(0.1, between=between, value=value)
    for path in (project.folder / "out").iterdir():
        path.unlink()
    (project.folder / "out").rmdir()
    project.record(0.2, between=between, value=value)
    assert project.fill() == READS
    assert project.reasons() == []


def test_modules_of_the_project_must_be_the_same(project):
    (project.folder / "helper.py").write_text("def level():\n    return 1.5\n")
    before = "import helper"
    project.record(0.1, before=before, value="helper.level()")
    project.record(0.2, before=before, value="helper.level()")
    (project.folder / "helper.py").write_text("def level():\n    return 2.5\n")
    project.record(0.3, before=before, value="helper.level()")
    assert project.fill() == 2 * READS


def test_a_set_up_process_that_dies_costs_nothing_but_time(project):
    flag = project.folder.parent / "flag"
    between = f"if os.path.exists({str(flag)!r}): os.remove({str(flag)!r}); os.kill(os.getpid(), 9)"
    record_versions(project, 2, between=between)
    flag.touch()
    assert project.fill() == READS
    assert not flag.exists()


def test_sharing_can_be_switched_off(project, monkeypatch):
    monkeypatch.setenv("REARVIEW_SHARED_START", "false")
    record_versions(project, 2)
    assert project.fill() == 2 * READS
    assert project.setups == []


DIVIDED = """
import random
import time

{read}

def main():
    begun = time.time()
    data = [read(f"part{{k}}.txt") for k in range(3)]
    {between}
    weight = sum(data) + random.random()
    for epoch in range(6):
        weight = weight * (1 - {rate}) + {value} + random.random() + begun % 1
        time.sleep(0.2)
        print("said", repr(weight))


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def divided(project, monkeypatch):
    monkeypatch.setattr(divide_work, "NOTICED", 0.0)
    project.script, project.asked = DIVIDED, ""
    return project


def ask_inside(project):
    project.text = project.text.replace(
        'print("said"', 'rearview.log("asked", weight); print("said"'
    )


def test_the_segments_of_one_run_share_its_set_up_up_to_the_loop(divided):
    divided.record()
    ask_inside(divided)
    assert divided.fill() == READS
    assert [start.statements for start in divided.setups] == [None]
    assert len(list((divided.folder / ".rearview" / "replays").iterdir())) > 1
    assert divided.reasons() == []


def test_segments_of_a_run_that_opens_a_file_before_its_loop_start_on_their_own(divided):
    divided.record(between="kept = open('part0.txt')")
    ask_inside(divided)
    reads = divided.fill()
    assert "leaves open" in divided.reasons()[0]
    segments = len(list((divided.folder / ".rearview" / "replays").iterdir()))
    assert reads == READS * (segments + 1)
