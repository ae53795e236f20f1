"""A recorded program ends as under plain Python: the same output, exit code and bytes in its files."""

import re
import textwrap
from pathlib import Path

import pytest

from plainly import plain, recorded, run_as_started
from rearview._history import history

NOISY = """
class Noisy:
    def __init__(self, name): self.name = name
    def __del__(self): print("del", self.name, flush=True)
"""

PROGRAMS = {
    "a zip file is not closed": """
        import zipfile
        archive = zipfile.ZipFile("out.zip", "w")
        for i in range(3):
            archive.writestr(zipfile.ZipInfo(f"part{i}"), "text" * i)
    """,
    "a gzip file is not closed": """
        import gzip
        raw = open("out.gz", "wb")
        packed = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="")
        for i in range(3):
            packed.write(b"line %d" % i)
    """,
    "a tar file is not closed": """
        import io, tarfile
        archive = tarfile.open("out.tar", "w")
        for i in range(3):
            info = tarfile.TarInfo(f"part{i}"); info.size = 5
            archive.addfile(info, io.BytesIO(b"hello"))
    """,
    "bz2 and lzma files are not closed": """
        import bz2, lzma
        one, two = bz2.open("out.bz2", "wt"), lzma.open("out.xz", "wt")
        for i in range(100):
            one.write(f"{i}\\n"); two.write(f"{i}\\n")
    """,
    "a csv writer and a text file are not flushed": """
        import csv
        file = open("out.csv", "w", newline="")
        writer = csv.writer(file)
        for i in range(10):
            writer.writerow([i, i * i])
    """,
    "a shelf is not closed": """
        import shelve, dbm.dumb
        shelf = shelve.Shelf(dbm.dumb.open("out"), writeback=True)
        for i in range(3):
            shelf[str(i)] = [i]
            shelf[str(i)].append("more")
    """,
    "a database is not committed": """
        import sqlite3
        base = sqlite3.connect("out.db")
        base.execute("create table t (a int)"); base.commit()
        for i in range(3):
            base.execute("insert into t values (?)", (i,))
    """,
    "a temporary folder and file are not removed": """
        import tempfile, os
        folder = tempfile.TemporaryDirectory(dir=".", prefix="scratch")
        file = tempfile.NamedTemporaryFile(dir=".", prefix="scratch")
        for i in range(2):
            open(os.path.join(folder.name, f"{i}"), "w").write("x")
    """,
    "globals have finalizers": NOISY
    + """
a, b = Noisy("a"), Noisy("b")
def use(): return a
for i in range(3):
    c = Noisy(f"c{i}")
print("end")
""",
    # When the collector runs depends on how many objects exist, so the program
    # switches it off: what is left is what happens at the end.
    "globals form cycles": NOISY
    + """
import gc; gc.disable()
class Pair: pass
for i in range(2):
    pair = Pair(); pair.self = pair; pair.noisy = Noisy(f"cycle {i}")
kept = pair
print("end")
""",
    "weak references call back": """
        import weakref
        class Thing: pass
        thing, other = Thing(), Thing()
        weakref.finalize(thing, print, "finalize thing")
        last = weakref.finalize(other, print, "not at exit"); last.atexit = False
        watch = weakref.ref(other, lambda ref: print("other is gone"))
        for i in range(2): pass
        print("end")
    """,
    "handlers run at exit in their order": """
        import atexit
        for i in range(3):
            atexit.register(print, "handler", i)
        @atexit.register
        def fails(): raise ValueError("in a handler")
    """,
    "a handler at exit uses globals and loops": """
        import atexit
        values = []
        for i in range(3): values.append(i)
        @atexit.register
        def last():
            for value in values: print("still", value)
            while values: print("popped", values.pop())
    """,
    "a finalizer loops and logs when modules are torn down": """
        import rearview
        class Last:
            def __del__(self):
                for i in range(2):
                    print("last", i)
                while True:
                    break
        last = Last()
        for i in range(2): pass
    """,
    "a finalizer raises": """
        class Bad:
            def __del__(self): raise RuntimeError("in __del__")
        bad = Bad()
        for i in range(2): pass
    """,
    "a class and a module have finalizers": NOISY
    + """
import types, sys
class Holder: noisy = Noisy("of a class")
module = types.ModuleType("made"); module.noisy = Noisy("of a module"); sys.modules["made"] = module
del module
for i in range(2): pass
""",
    "a project module is torn down": """
        import helper
        for i in range(2): helper.step(i)
        print("end")
    """,
    "a project module is forgotten while the program runs": """
        import sys, gc, helper
        for i in range(2): print(helper.noisy is None)
        del sys.modules["helper"]; del helper; gc.collect()
        print("forgotten")
    """,
    "objects end inside a loop": NOISY
    + """
model, held = Noisy("model"), [Noisy("item 0"), Noisy("item 1")]
for epoch in range(4):
    if epoch == 1: del model
    if epoch == 2: held.pop()
    if epoch == 3: held.clear()
    print("epoch", epoch)
""",
    "an iterator ends with its loop": NOISY
    + """
class Items:
    def __init__(self): self.noisy = Noisy("items")
    def __iter__(self): return iter([1, 2, 3])
def numbers():
    noisy = Noisy("generator")
    try:
        yield from range(3)
    finally:
        print("generator closed")
for item in Items(): print(item)
for number in numbers():
    if number == 1: break
print("end")
""",
    "a generator is not exhausted": """
        def endless():
            try:
                while True: yield 1
            finally:
                print("closed")
        source = endless()
        for i in range(2): next(source)
        print("end")
    """,
    "threads are joined": """
        import threading
        start = threading.Event()
        def work():
            start.wait()
            for i in range(3): print("work", i)
        thread = threading.Thread(target=work); thread.start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        for i in range(2): print("main", i)
        start.set()
    """,
    "a thread raises": """
        import threading
        def work(): raise ValueError("in a thread")
        thread = threading.Thread(target=work, name="worker")
        thread.start(); thread.join()
        for i in range(2): print(i)
    """,
    "a thread exits": """
        import sys, threading
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start(); thread.join()
        for i in range(2): print(i)
    """,
    "a thread ends the process": """
        import os, threading
        print("before", flush=True)
        thread = threading.Thread(target=os._exit, args=(9,))
        for i in range(2): pass
        thread.start(); thread.join()
    """,
    "a pool of threads is left": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        for i in range(3): pool.submit(print, "job", i)
    """,
    "the program leaves at once": NOISY
    + """
import os, sys
noisy = Noisy("never")
for i in range(2): print(i)
sys.stdout.flush()
os._exit(4)
""",
    "an exit code is too large": "import sys\nfor i in range(2): pass\nsys.exit(256 + 7)\n",
    "an exit code is an object": "import sys\nfor i in range(2): pass\nsys.exit({'a': 1})\n",
    "an exit code is a bool": "import sys\nfor i in range(2): pass\nsys.exit(True)\n",
    "an uncaught exception holds frames": NOISY
    + """
def fail():
    local = Noisy("local")
    raise ValueError("bad")
noisy = Noisy("global")
for i in range(2):
    if i: fail()
""",
    "the last exception is seen by a handler": """
        import atexit, sys
        atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback is not None))
        for i in range(2):
            if i: raise KeyError("last")
    """,
    "the excepthook fails": """
        import sys
        def hook(*args): raise RuntimeError("in the hook")
        sys.excepthook = hook
        for i in range(2):
            if i: raise KeyError("first")
    """,
    "the excepthook exits": """
        import sys
        def hook(*args): print("hook"); sys.exit(6)
        sys.excepthook = hook
        for i in range(2):
            if i: raise KeyError("first")
    """,
    "an interrupted program cleans up": NOISY
    + """
import atexit, os, signal
atexit.register(print, "handler")
noisy = Noisy("global")
file = open("out.txt", "w"); file.write("unflushed")
for i in range(2):
    if i: os.kill(os.getpid(), signal.SIGINT)
""",
    "KeyboardInterrupt is raised by hand": """
        import atexit
        atexit.register(print, "handler")
        for i in range(2):
            if i: raise KeyboardInterrupt("by hand")
    """,
    "an interrupt is a subclass": """
        class Mine(KeyboardInterrupt): pass
        for i in range(2):
            if i: raise Mine("by hand")
    """,
    "output is not flushed": """
        import sys
        sys.stdout.write("no newline"); sys.stderr.write("neither")
        for i in range(2): pass
    """,
    "stdout is closed": "import sys\nfor i in range(2): print(i)\nsys.stdout.close()\n",
    "stdout is replaced": """
        import sys
        class Upper:
            def write(self, text): sys.__stdout__.write(text.upper())
            def flush(self): sys.__stdout__.flush()
        sys.stdout = Upper()
        for i in range(2): print("text", i)
    """,
    "files are not closed and warnings are on": """
        import warnings
        warnings.simplefilter("always")
        file = open("out.txt", "w")
        for i in range(2): file.write("x")
        del file
        other = open("other.txt", "w"); other.write("y")
    """,
    "logging has handlers with memory": """
        import logging, logging.handlers
        target = logging.FileHandler("out.log")
        handler = logging.handlers.MemoryHandler(100, target=target)
        logging.getLogger().addHandler(handler)
        for i in range(3): logging.warning("message %d", i)
    """,
    "a process pool is left": """
        import multiprocessing, os
        def square(x): return x * x
        if __name__ == "__main__":
            pool = multiprocessing.get_context("fork").Pool(2)
            for i in range(2): print(pool.map(square, range(3)))
            pool.terminate()
    """,
    "a child is forked and returns": """
        import os, atexit
        atexit.register(lambda: print("handler", flush=True))
        for i in range(2): pass
        print("before", flush=True)
        pid = os.fork()
        if pid: os.waitpid(pid, 0)
        print("child" if pid == 0 else "parent", flush=True)
    """,
    "an event loop is left open": """
        import asyncio
        async def work():
            for i in range(3): await asyncio.sleep(0)
            return "worked"
        loop = asyncio.new_event_loop()
        print(loop.run_until_complete(work()))
        loop.close()
    """,
    "the order of teardown": NOISY
    + """
import collections
first, _private, second = Noisy("first"), Noisy("_private"), Noisy("second")
class Keeper:
    def __init__(self, *kept): self.kept = kept
    def __del__(self): print("keeper of", len(self.kept), flush=True)
keeper = Keeper(first, second)
def function(): return keeper
table = collections.OrderedDict(a=Noisy("in a table"))
for i in range(2): pass
""",
    "deep in a function": NOISY
    + """
def main():
    noisy = Noisy("local")
    for epoch in range(2):
        for step in range(2):
            noisy.last = Noisy(f"{epoch}.{step}")
    return 3
if __name__ == "__main__":
    import sys
    sys.exit(main())
""",
}
HELPER = """
class Noisy:
    def __del__(self): print("helper is gone", flush=True)
noisy = Noisy()
file = open("helper.txt", "a")
def step(i):
    for k in range(2): file.write(f"{i}{k}")
"""


def ended(folder, run, text):
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(text))
    (folder / "helper.py").write_text(HELPER)
    result = run(folder, "train.py")
    return (
        result.code,
        result.out.replace(str(folder) + "/", ""),
        _without_addresses(result.err.replace(str(folder) + "/", "")),
        {
            file.name: _contents(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file() and ".rearview" not in file.parts and "__pycache__" not in file.parts
        },
    )


def _contents(file: Path):
    data = file.read_bytes()
    # pages that SQLite never wrote are as they were
    return data[100:] if file.suffix == ".db" else data


def _without_addresses(text):
    return re.sub(r"0x[0-9a-f]+|\d{10,}", "…", text)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recorded_program_ends_as_under_plain_python(name, tmp_path):
    expected = ended(tmp_path / "plain", plain, PROGRAMS[name])
    assert ended(tmp_path / "recorded", recorded, PROGRAMS[name]) == expected


RESUMED = (
    NOISY
    + """
import atexit, csv, os, weakref
atexit.register(print, "handler")
noisy = Noisy("global")
weakref.finalize(noisy, print, "finalize")
file = open("out.csv", "w", newline="")
rows = csv.writer(file)
for epoch in range(5):
    rows.writerow([epoch, epoch * epoch])
    if epoch == 3 and not os.path.exists("../go"): os._exit(9)
print("end")
"""
)


def test_a_resumed_program_ends_as_under_plain_python(tmp_path):
    (tmp_path / "go").touch()
    expected = ended(tmp_path / "plain", plain, RESUMED)
    (tmp_path / "go").unlink()
    stopped = ended(tmp_path / "recorded", recorded, RESUMED)
    assert stopped[0] == 9
    (tmp_path / "go").touch()
    how = history(tmp_path / "recorded").resume()
    resumed = run_as_started(how)
    folder = tmp_path / "recorded"
    assert (resumed.code, resumed.out, resumed.err) == expected[:3]
    assert (folder / "out.csv").read_bytes() == expected[3]["out.csv"]
