"""A replay is told the times that the run was told."""

import textwrap

from plainly import recorded, write
from rearview.past import history

TEXT = """
import time
from time import perf_counter, time_ns
begun = time.time()
spent, total = 0.0, 0
for epoch in range(5):
    t0 = perf_counter()
    for i in range(3000):
        total += i
    spent += perf_counter() - t0
    stamp = time_ns()
print(spent, stamp)
"""


def test_states_that_hold_times_are_equal_in_a_replay(tmp_path):
    write(tmp_path, train=TEXT)
    said = recorded(tmp_path, "train.py").out
    probed = TEXT.replace("    stamp", '    rearview.log("spent", spent)\n    stamp')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["spent"], workers=1)
    assert report.proved, report.proof
    assert report.outcomes[0].report.states > 0
    shown = report.outcomes[0].log.read_text()
    assert said in shown or not shown


def test_a_probe_that_reads_the_clock_takes_no_reading_of_the_program(tmp_path):
    write(tmp_path, train=TEXT)
    recorded(tmp_path, "train.py")
    probed = TEXT.replace("    stamp", '    rearview.log("now", time.time())\n    stamp')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["now"], workers=1)
    assert report.proved, report.proof


def test_other_threads_read_the_real_clock(tmp_path):
    text = """
    import threading, time
    def wait():
        end = time.monotonic() + 0.05
        while time.monotonic() < end: pass
    total = 0
    for epoch in range(3):
        thread = threading.Thread(target=wait); thread.start(); thread.join()
        for i in range(3000): total += i
    """
    write(tmp_path, train=textwrap.dedent(text))
    recorded(tmp_path, "train.py")
    report = history(tmp_path).replay()
    assert report.proved, report.proof
