"""A recorded program gets huge pages where the system offers them, and sees nothing of how."""

import platform
from pathlib import Path

import pytest

from plainly import plain, recorded, write

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SEEN = """
import os, subprocess, sys
for i in range(2):
    print(os.environ.get("GLIBC_TUNABLES"))
ask = "import os; print(os.environ.get('GLIBC_TUNABLES'))"
print(subprocess.check_output([sys.executable, "-c", ask], text=True))
"""
ADVISED = """
import ctypes, re
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
at = libc.malloc(64 << 20)
mappings = re.findall(r"^(\\w+)-(\\w+) [^#]*?^VmFlags:(.*)", open("/proc/self/smaps").read(), re.M)
flags = [each for first, last, each in mappings if int(first, 16) <= at < int(last, 16)]
for i in range(2):
    print("hg" in flags[0].split())
"""


def _offered():
    version = platform.libc_ver()
    recent = version[0] == "glibc" and tuple(map(int, version[1].split("."))) >= (2, 35)
    return recent and MODE.is_file() and "[madvise]" in MODE.read_text()


def test_neither_the_program_nor_its_children_see_the_variables_lent_to_the_interpreter(tmp_path):
    write(tmp_path, train=SEEN)
    assert recorded(tmp_path, "train.py").out == plain(tmp_path, "train.py").out


def test_a_malloc_setting_of_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=3")
    write(tmp_path, train=SEEN)
    assert recorded(tmp_path, "train.py").out.split() == ["glibc.malloc.tcache_count=3"] * 3


@pytest.mark.skipif(not _offered(), reason="the system does not leave huge pages to programs")
@pytest.mark.parametrize("wanted", [True, False])
def test_memory_is_in_huge_pages_unless_that_is_switched_off(tmp_path, wanted):
    write(tmp_path, train=ADVISED)
    assert "True" not in plain(tmp_path, "train.py").out
    told = recorded(tmp_path, "train.py", huge_pages=wanted).out
    assert told.split() == [str(wanted)] * 2
