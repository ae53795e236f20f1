"""Journey: a replay starts with the environment variables that the run read."""

import json
import os
import subprocess
import sys

import pytest

from plainly import SOURCE
from rearview.execute import local
from rearview.store.recorded_inputs import ENVIRONMENT_FILE, read_environment

READS = {
    "os.environ[…]": 'value = os.environ["KNOB"]',
    "os.environ.get": 'value = os.environ.get("KNOB", "absent")',
    "os.getenv": 'value = os.getenv("KNOB", "absent")',
    "os.environb": 'value = os.environb.get(b"KNOB", b"absent").decode()',
    "in": 'value = str("KNOB" in os.environ)',
    "dict": 'value = dict(os.environ).get("KNOB", "absent")',
    "copy": 'value = os.environ.copy().get("KNOB", "absent")',
    "iteration": 'value = "".join(v for k, v in os.environ.items() if k == "KNOB")',
    "expandvars": 'value = os.path.expandvars("$KNOB/data")',
    "a child": (
        "import subprocess, sys\n"
        "value = subprocess.run([sys.executable, '-c', "
        "'import os; print(os.getenv(\"KNOB\"))'], capture_output=True, text=True).stdout"
    ),
    "a shell": "os.system('echo $KNOB > knob.txt')\nvalue = open('knob.txt').read()",
}
SCRIPT = """
import os, rearview
{read}
total = 0.0
for epoch in range(4):
    total += len(value) + epoch
    rearview.log("value", f"{{value}} {{total}}")
"""


class Project:
    """A project whose commands run in chosen environments."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, text):
        (self.folder / "train.py").write_text(text)

    def rearview(self, *words, **variables):
        ours = {k: v for k, v in os.environ.items() if k not in {"KNOB", "REARVIEW_ROOT"}}
        return subprocess.run(
            [sys.executable, "-m", "rearview", *words],
            cwd=self.folder,
            env={**ours, "PYTHONPATH": SOURCE, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    @property
    def run(self):
        return max(self.folder.glob(".rearview/runs/2*"))


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.parametrize("how", READS)
def test_a_variable_that_was_read_is_restored(how, project):
    project.write(SCRIPT.format(read=READS[how]))
    assert project.rearview("run", "--every", "train.py", KNOB="7").returncode == 0
    for now in ({"KNOB": "changed"}, {}):
        replayed = project.rearview("replay", **now)
        assert (replayed.returncode, "exact:" in replayed.stdout) == (0, True), replayed.stdout


def test_a_variable_that_was_not_set_is_removed(project):
    project.write(SCRIPT.format(read=READS["os.getenv"]))
    project.rearview("run", "--every", "train.py")
    assert project.rearview("replay", KNOB="7").returncode == 0


def test_a_run_that_was_killed_is_resumed_and_replayed_with_its_variables(project):
    text = SCRIPT.format(read=READS["os.getenv"])
    crash = "    if epoch == 2 and not os.path.exists('go'): os.kill(os.getpid(), 9)\n"
    project.write(text + crash)
    project.rearview("run", "--every", "train.py", KNOB="7")
    (project.folder / "go").touch()
    resumed = project.rearview("resume", KNOB="changed")
    assert resumed.returncode == 0, resumed.stderr
    shown = project.rearview("table", "value", "--format", "csv").stdout
    assert shown.count(",7 ") == 4
    assert "changed" not in shown


def test_segments_that_share_their_start_have_the_variables_of_their_runs(project):
    if not local.FORK_SERVER_SUPPORTED:
        pytest.skip("LOUD: no pidfd, nothing is shared")
    text = "import os\nimport numpy\n" + SCRIPT.format(read=READS["os.getenv"])
    text = text.replace('rearview.log("value"', 'print("value"')
    project.write(text)
    for knob in ("a", "b", "b"):
        assert project.rearview("run", "--every", "train.py", KNOB=knob).returncode == 0
    project.write(text + '    rearview.log("asked", value)\n')
    filled = project.rearview("backfill", "asked", "--workers", "2", KNOB="changed")
    assert filled.returncode == 0, filled.stdout + filled.stderr
    table = json.loads(project.rearview("table", "asked", "--format", "json").stdout)
    rows = table["rows"] if isinstance(table, dict) else table
    values = [row["asked"] if isinstance(row, dict) else row[-1] for row in rows]
    assert values == ["a"] * 4 + ["b"] * 8


def test_a_variable_that_differs_and_is_not_restored_is_named_once(project):
    project.write(SCRIPT.format(read='value = os.environ["HOME"] * 0 + "x"'))
    project.rearview("run", "--every", "train.py", HOME="/root")
    said = project.rearview("replay", HOME="/elsewhere")
    assert said.stderr.count("HOME was /root, is /elsewhere") == 1
    assert "HOME was /root, is /elsewhere" in project.rearview("show", HOME="/elsewhere").stdout
    assert "not restored" not in project.rearview("replay", HOME="/root").stderr
    project.write((project.folder / "train.py").read_text() + "    rearview.log('asked', epoch)\n")
    planned = project.rearview("backfill", "asked", HOME="/elsewhere")
    assert planned.stderr.count("HOME was /root, is /elsewhere") == 1


def test_a_resumed_run_names_the_variables_that_differ(project):
    crash = "    if epoch == 2 and not os.path.exists('go'): os._exit(3)\n"
    project.write(SCRIPT.format(read='value = os.environ["HOME"] * 0 + "x"') + crash)
    project.rearview("run", "--every", "train.py", HOME="/root")
    (project.folder / "go").touch()
    resumed = project.rearview("resume", HOME="/elsewhere")
    assert resumed.stderr.count("HOME was /root, is /elsewhere") == 1


def test_credentials_are_never_stored(project):
    read = "value = str(sorted(os.environ.items()))[:0] + str(os.getenv('MY_TOKEN'))[:0]"
    project.write(SCRIPT.format(read=read))
    secrets = {
        "MY_TOKEN": "topsecret-1",
        "SERVICE_API_KEY": "topsecret-2",
        "DATABASE": "postgres://me:topsecret-3@host/base",
        "HARMLESS": "ghp_" + "topsecret4" * 4,
    }
    project.rearview("run", "--every", "train.py", **secrets)
    for file in project.folder.rglob(".rearview/**/*"):
        assert not file.is_file() or b"topsecret" not in file.read_bytes(), file
    found = read_environment(project.run)
    assert found is not None
    assert {name: found.secrets[name] for name in secrets} == dict.fromkeys(secrets, True)
    said = project.rearview("replay")
    assert "MY_TOKEN was set and its value is not stored" in said.stderr


def test_a_run_recorded_without_its_environment_replays_as_before(project):
    project.write(SCRIPT.format(read=READS["os.getenv"]))
    project.rearview("run", "--every", "train.py", KNOB="7", OMP_NUM_THREADS="1")
    (project.run / ENVIRONMENT_FILE).unlink()
    assert project.rearview("replay", KNOB="7").returncode == 0
    assert project.rearview("replay", KNOB="changed").returncode == 1


def test_a_variable_that_is_not_set_raises_as_under_plain_python(project):
    project.write(
        "import os, traceback\nfor i in range(2):\n    try:\n        os.environ['KNOB']\n"
        "    except KeyError:\n        traceback.print_exc()\n"
    )
    plain = subprocess.run(
        [sys.executable, str(project.folder / "train.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert project.rearview("run", "-q", "train.py").stderr.replace(
        str(project.folder) + "/", ""
    ) == plain.stderr.replace(str(project.folder) + "/", "")
