"""Programs that make it hard: recording neither breaks them nor pretends."""

from plainly import plain, recorded, write
from rearview._history import history

LOOP = "total = 0\nfor epoch in range(3):\n    for i in range(3000): total += i\n"


def test_a_program_that_does_not_parse_ends_as_under_python(tmp_path):
    write(tmp_path, train="for epoch in range(3)\n    pass\n")
    ours, alone = recorded(tmp_path, "train.py"), plain(tmp_path, "train.py")
    assert (ours.code, ours.out, ours.err) == (alone.code, alone.out, alone.err)
    assert history(tmp_path).run().status.value == "failed"


def test_a_program_that_leaves_by_os_exit_is_recorded_whole(tmp_path):
    write(tmp_path, train=f"import os\n{LOOP}print('said', flush=True)\nos._exit(3)\n")
    assert recorded(tmp_path, "train.py").code == 3
    shown = history(tmp_path).show()
    assert shown.checkpoints
    main = shown.run.end.main  # loops of microseconds may be missing in `shown.loops`
    assert (main.name, sum(count for count, _ in main.iterations)) == ("epoch", 3)
    assert [line.text for line in history(tmp_path).printed()] == ["said"]


def test_children_of_a_program_that_forks_leave_the_run_alone(tmp_path):
    text = f"import os\nfor k in range(2):\n    if os.fork() == 0:\n        {'x = 1'}\n        os._exit(k)\n    os.wait()\n{LOOP}"
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    assert len(history(tmp_path).runs()) == 1
    report = history(tmp_path).replay()
    assert report.proved, report.proof


def test_a_program_that_deletes_the_store_runs_to_its_end(tmp_path):
    text = f"import shutil\n{LOOP}    if epoch == 1: shutil.rmtree('.rearview')\nprint(total)\n"
    write(tmp_path, train=text)
    ended = recorded(tmp_path, "train.py")
    assert (ended.code, ended.out) == (0, "13495500\n")
    assert not (tmp_path / ".rearview" / "runs").exists()


def test_a_program_that_is_edited_while_it_runs_is_replayed_with_its_old_source(tmp_path):
    text = f"{LOOP}    if epoch == 0: open('train.py', 'a').write('total = 7  # edited\\n')\nprint(total)\n"
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").out == "13495500\n"
    assert (tmp_path / "train.py").read_text().endswith("# edited\n")
    (tmp_path / "train.py").write_text(text)
    report = history(tmp_path).replay()
    assert report.proved, report.proof
    assert report.outcomes[0].report.states > 0
