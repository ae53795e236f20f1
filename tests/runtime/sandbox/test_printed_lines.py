"""What a program prints is kept with its point; what it prints stays the same, byte for byte."""

import os
import subprocess
import sys

from plainly import SOURCE, plain, recorded, write
from rearview._history import history
from rearview.store.printed_lines import read_printed_lines

TEXT = """
import sys
print("begin", 1, sep="-")
for epoch in range(3):
    for step in range(2):
        print("loss", epoch * step, flush=True)
    print("no end", end=" ")
    sys.stdout.write("of line\\nnext ")
    print("ümlaut\\n\\nafter an empty one")
    print("wrong", file=sys.stderr)
sys.stdout.writelines(["a\\n", "b\\n"])
held = sys.stdout
print(type(held).__name__, held is sys.__stdout__, end="")
"""


def lines(folder):
    return [(one.where, one.text) for one in history(folder).printed() if one.stream == "out"]


def test_lines_are_kept_with_the_point_at_which_they_were_printed(tmp_path):
    write(tmp_path, train=TEXT)
    done, alone = recorded(tmp_path, "train.py"), plain(tmp_path, "train.py")
    assert (done.out, done.err, done.code) == (alone.out, alone.err, 0)
    kept = lines(tmp_path)
    assert kept[:4] == [
        ("", "begin-1"),
        ("epoch=0/step=0", "loss 0"),
        ("epoch=0/step=1", "loss 0"),
        ("epoch=0", "no end of line"),
    ]
    assert [text for _, text in kept] == [line for line in alone.out.split("\n") if line]
    errors = [one.where for one in history(tmp_path).printed() if one.stream == "err"]
    assert errors == ["epoch=0", "epoch=1", "epoch=2"]


def test_a_progress_bar_leaves_its_last_form(tmp_path):
    text = "import sys\nfor i in range(30):\n    sys.stderr.write(f'\\r{i} of 30')\nprint(file=sys.stderr)\n"
    write(tmp_path, train=text)
    recorded(tmp_path, "train.py")
    assert [one.text for one in history(tmp_path).printed()] == ["29 of 30"]


def test_a_program_that_prints_very_much_keeps_some_and_says_so(tmp_path):
    write(tmp_path, train="for i in range(200_000):\n    print(i)\nprint('end')\n")
    done = recorded(tmp_path, "train.py", every=False)
    assert done.out.count("\n") == 200_001
    found = history(tmp_path).printed()
    kept = [int(one.text) for one in found if one.text.isdigit()]
    assert kept[:2000] == list(range(2000))
    assert len(kept) < 200_000
    assert any("too fast" in one.text for one in found if not one.stream)


def test_the_lines_of_a_killed_run_are_there_up_to_the_last_second(tmp_path):
    write(tmp_path, train="import os, time\nprint('a')\ntime.sleep(1.1)\nprint('b')\nos.abort()\n")
    recorded(tmp_path, "train.py")
    assert lines(tmp_path) == [("", "a"), ("", "b")]


def test_children_and_redirected_output_are_not_kept(tmp_path):
    text = """
import contextlib, io, os
with contextlib.redirect_stdout(io.StringIO()):
    print("hidden")
if os.fork() == 0:
    print("child", flush=True)
    os._exit(0)
os.wait()
print("parent")
"""
    write(tmp_path, train=text)
    assert "child" in recorded(tmp_path, "train.py").out
    assert lines(tmp_path) == [("", "parent")]


def test_a_stream_that_the_program_holds_is_no_difference(tmp_path):
    write(tmp_path, train=TEXT.replace("import sys", "import sys\nout = sys.stdout"))
    recorded(tmp_path, "train.py")
    report = history(tmp_path).replay()
    assert report.proved, report.proof


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    whole = b'{"format":1}\n[["epoch"],[2],1,"text"]\n[["epoch"],[3],1,"te'
    (tmp_path / "printed.jsonl").write_bytes(whole)
    assert [(one.where, one.text) for one in read_printed_lines(tmp_path)] == [("epoch=2", "text")]


def test_the_command_shows_printed_lines(tmp_path):
    write(tmp_path, train=TEXT)
    recorded(tmp_path, "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "rearview", "show", "--printed"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[epoch=1/step=1] loss 1\n" in done.stdout, done.stderr
