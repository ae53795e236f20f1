"""A replay is told the times that the run was told."""

import subprocess
import sys
import textwrap
from pathlib import Path

from plainly import recorded, write
from rearview._history import history

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


DATES = """
import copy, datetime as dt, pickle, time
from datetime import datetime, date
class Mine(datetime):
    pass
seen = []
for epoch in range(4):
    for i in range(3000): pass
    seen.append(datetime.now())
    seen.append(dt.datetime.now(dt.timezone.utc))
    seen.append(Mine.now().isoformat())
    seen.append(date.today())
    seen.append(time.strftime("%H:%M:%S") + time.ctime() + time.asctime())
    seen.append(time.localtime())
    assert type(seen[0]) is datetime and pickle.loads(pickle.dumps(seen[0])) == seen[0]
    assert isinstance(Mine.now(), Mine) and type(datetime.today()) is datetime
"""


def test_dates_are_repeated_too(tmp_path):
    write(tmp_path, train=DATES)
    recorded(tmp_path, "train.py")
    report = history(tmp_path).replay()
    assert report.proved, report.proof
    assert report.outcomes[0].report.states > 0


LIKE = """
import datetime as dt, sys, time
from rearview.runtime.sandbox.clock import patch_datetime
moment = 1_700_000_000_123_456_789
plain = dt.datetime.now
assert patch_datetime(lambda: moment)
now, zone = dt.datetime.now(), dt.timezone(dt.timedelta(hours=5))
assert type(now) is dt.datetime and now == dt.datetime.fromtimestamp(1_700_000_000.123456)
assert dt.datetime.now(zone).isoformat() == "2023-11-15T03:13:20.123456+05:00"
assert dt.datetime.now(tz=zone) == dt.datetime.now(dt.timezone.utc)
class Mine(dt.datetime):
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls, *args, **kwargs)
assert type(Mine.now(zone)) is Mine and Mine.now(zone).tzinfo is zone
for wrong in (3, "UTC"):
    try:
        dt.datetime.now(wrong)
    except TypeError as error:
        told = str(error)
    try:
        plain(wrong)
    except TypeError as error:
        assert told == str(error)
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert dt.datetime.utcnow().isoformat() == "2023-11-14T22:13:20.123456"
    assert bool(seen) == (sys.version_info >= (3, 12))
import copy, pickle
assert copy.deepcopy(now) == pickle.loads(pickle.dumps(now)) == now
assert pickle.loads(pickle.dumps(dt.datetime.now))() == now
"""


def test_the_type_of_dates_stays_the_same():
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", LIKE],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


BAR = """
import time, os, signal
class Bar:
    def __init__(self):
        self.clock = time.time
        self.n = 0
    def update(self):
        self.n += 1
        return self.clock() > 0
bar = Bar()
for epoch in range(5):
    bar.update()
    inner = Bar()
    time.sleep(0.01)
    if epoch == 3 and os.environ.get("REARVIEW_DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
print(bar.n, bar.update(), inner.update())
"""


def test_a_clock_kept_in_a_variable_is_still_the_clock_after_a_resume(tmp_path, monkeypatch):
    import subprocess

    write(tmp_path, train=BAR)
    monkeypatch.setenv("REARVIEW_DIES", "1")
    assert recorded(tmp_path, "train.py").code == -9
    monkeypatch.delenv("REARVIEW_DIES")
    how = history(tmp_path).resume()
    done = subprocess.run(
        how.command,
        cwd=how.folder,
        env=how.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "5 True True\n", done.stderr
    assert "starting over" not in done.stderr
