"""A store that cannot be written costs one warning; the training runs to its own end."""

import os
import resource
import subprocess
import sys

import pytest

JOB = """\
import sys
import rearview

total = 0.0
for epoch in rearview.loop("epoch", range(4)):
    for step in range(50):
        total += step
    rearview.log("total", total)
lr = rearview.arg("lr", 0.5)
with rearview.checkpointing(total=total):
    pass
print("end", total, lr)
sys.exit(7)
"""


def is_a_file(folder):
    (folder / ".rearview").write_text("mine\n")


def is_a_broken_link(folder):
    (folder / ".rearview").symlink_to("/proc/1/nowhere/.rearview")


def is_of_a_system_without_files(folder):
    (folder / ".rearview").symlink_to("/proc/sys")


def has_files_for_folders(folder):
    (folder / ".rearview").mkdir()
    (folder / ".rearview" / "format").write_text("1\n")
    (folder / ".rearview" / "runs").write_text("a file\n")


BROKEN = [is_a_file, is_a_broken_link, is_of_a_system_without_files, has_files_for_folders]


def ran(folder, *words, **options):
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("REARVIEW")},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.parametrize("words", [("run",), ("run", "--preemptible")], ids=lambda words: words[-1])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.__name__)
def test_a_store_that_cannot_be_written_at_the_start_gives_one_warning(tmp_path, broken, words):
    (tmp_path / "job.py").write_text(JOB)
    broken(tmp_path)
    done = ran(tmp_path, "-m", "rearview", *words, "-q", "job.py", "--lr", "0.25")
    assert (done.returncode, done.stdout) == (7, "end 4900.0 0.25\n"), done.stderr
    assert done.stderr.count("is not recorded") == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.__name__)
def test_under_plain_python_too(tmp_path, broken):
    (tmp_path / "job.py").write_text(JOB)
    broken(tmp_path)
    done = ran(tmp_path, "job.py", "--lr", "0.25")
    assert (done.returncode, done.stdout) == (7, "end 4900.0 0.25\n"), done.stderr
    assert done.stderr.count("is not recorded") == 1


@pytest.mark.parametrize("bound", [0, 4096])
def test_files_that_may_not_grow_do_not_end_the_training(tmp_path, bound):
    (tmp_path / "job.py").write_text(JOB)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound))

    # stdout and stderr are pipes, which the limit leaves alone
    command = ("-m", "rearview", "run", "-q", "--every", "job.py")
    done = ran(tmp_path, *command, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (7, "end 4900.0 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_written_in_the_middle_gives_one_warning(tmp_path):
    program = JOB.replace(
        "    for step",
        "    if epoch == 2:\n"
        "        import shutil, pathlib\n"
        "        shutil.rmtree('.rearview'); pathlib.Path('.rearview').write_text('x')\n"
        "    for step",
    )
    (tmp_path / "job.py").write_text(program)
    done = ran(tmp_path, "-m", "rearview", "run", "-q", "job.py")
    assert (done.returncode, done.stdout) == (7, "end 4900.0 0.5\n"), done.stderr
    assert done.stderr.count("Warning") <= 1
    assert "Traceback" not in done.stderr
