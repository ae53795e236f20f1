"""What makes a replay differ is found and named: files, threads, versions, order, the world."""

import json

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.durable_files import add_check

LOOP = """
for epoch in range(3):
    for i in range(3000): total += 1e-9 * i
    drawn = {value}
    total += drawn
print(total)
"""


def program(head, value):
    return f"{head}\ntotal = 0.0{LOOP.format(value=value)}"


def verdict(folder):
    """Replay the run; returns what was said then and what `show` says later."""
    report = history(folder).replay()
    return report, history(folder).show().exact


def end_facts(folder):
    """Return the file in which a run says how it ended, with what it says."""
    for file in (folder / ".rearview" / "runs").glob("*/*.json*"):
        for line in file.read_text().splitlines():
            if '"surroundings"' in line:
                return file, line
    raise AssertionError("no run has said what it stood on")


def test_a_changed_input_is_named_before_and_after(tmp_path):
    project, data = tmp_path / "project", tmp_path / "data.txt"
    data.write_text("0.5")
    write(project, train=program("import sys", "float(open(sys.argv[1]).read())"))
    recorded(project, "train.py", str(data))
    data.write_text("0.7")
    report, shown = verdict(project)
    assert not report.proved
    for said in (report.proof, shown):
        assert "drawn at epoch=" in said  # iterations this short are looked at in slices
        assert "recorded 0.5, now 0.7" in said
        assert f"{data} has changed since the run read it" in said
    probed = (
        (project / "train.py").read_text().replace("    total += d", "    print(1)\n    total += d")
    )
    probed = "import rearview\n" + probed.replace("print(1)", 'rearview.log("v", drawn)')
    (project / "train.py").write_text(probed)
    assert any(str(data) in text for text in history(project).plan(["v"]).changed_inputs)


def test_a_thread_count_is_named_where_the_environment_was_not_recorded(tmp_path, monkeypatch):
    text = program("import os", "float(os.environ.get('MY_NUM_THREADS', '1'))")
    write(tmp_path, train=text)
    recorded(tmp_path, "train.py")
    monkeypatch.setenv("MY_NUM_THREADS", "2")
    report, _ = verdict(tmp_path)
    assert report.proved, report.proof
    next(tmp_path.glob(".rearview/runs/*/environment.jsonl")).unlink()
    report, shown = verdict(tmp_path)
    assert not report.proved
    for said in (report.proof, shown):
        assert "drawn at epoch=" in said  # iterations this short are looked at in slices
        assert "recorded 1.0, now 2.0" in said
        assert "MY_NUM_THREADS was not set, is 2" in said


def test_the_thread_count_of_a_run_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write(tmp_path, train=program("import os", "float(os.environ['OMP_NUM_THREADS'])"))
    recorded(tmp_path, "train.py")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    report, _ = verdict(tmp_path)
    assert report.proved, report.proof


@pytest.mark.parametrize(
    ("name", "then", "said"),
    [
        ("numpy", "1.0.0", "numpy was 1.0.0, is "),
        ("Python", "3.9.9", "Python was 3.9.9, is "),
        ("threads of torch", "64", None),
    ],
)
def test_another_version_is_named_when_the_state_differs(tmp_path, name, then, said):
    marker = tmp_path / "marker"
    head = f"import os, numpy\nmarker = {str(marker)!r}"
    write(tmp_path / "project", train=program(head, "float(os.path.exists(marker))"))
    recorded(tmp_path / "project", "train.py")
    file, line = end_facts(tmp_path / "project")
    facts = json.loads(line)
    found = _holder(facts)
    found["surroundings"][name] = then
    del facts["c"]
    changed = add_check(json.dumps(facts).encode()).decode()
    file.write_text(file.read_text().replace(line, changed))
    report, _ = verdict(tmp_path / "project")
    assert report.proved  # other versions are no difference as long as the states are equal
    marker.touch()
    report, shown = verdict(tmp_path / "project")
    assert "recorded 0.0, now 1.0" in report.proof
    assert said is None or (said in report.proof and said in shown)


def _holder(facts):
    if "surroundings" in facts:
        return facts
    return next(
        found for one in facts.values() if isinstance(one, dict) and (found := _holder(one))
    )


def test_an_order_by_address_is_never_silently_wrong(tmp_path):
    head = """
class Thing:
    def __init__(self, n): self.n = n
padding = [bytearray(k % 7000) for k in __import__('os').urandom(50)]
things = {Thing(n) for n in range(60)}
"""
    value = "float(sum(k * one.n for k, one in enumerate(things)))"
    write(tmp_path, train=program(head, value))
    recorded(tmp_path, "train.py")
    probed = (tmp_path / "train.py").read_text()
    probed = probed.replace("    total += d", '    rearview.log("v", drawn)\n    total += d')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["v"], workers=1)
    total = float(history(tmp_path).printed()[0].text)
    found = [row["v"] for row in history(tmp_path).table("v", unproved=True).rows()]
    noise = 3 * sum(1e-9 * i for i in range(3000))
    assert abs(sum(found) + noise - total) < 1e-3 or not report.proved


def test_a_difference_caused_by_process_ids_names_the_variable(tmp_path):
    text = program("import os", "float(os.getppid() + os.getpid())")
    write(tmp_path, train=text)
    recorded(tmp_path, "train.py")
    report, shown = verdict(tmp_path)
    assert not report.proved
    assert "drawn at epoch=" in report.proof
    assert "drawn at epoch=" in shown
