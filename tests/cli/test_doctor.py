import json
import os

import pytest

from rearview.cli import doctor_verify_gc
from rearview.cli.doctor_verify_gc import Check


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REARVIEW_ROOT", raising=False)
    return tmp_path


def test_an_ordinary_machine_has_no_failures(command, here):
    code, out, _ = command("doctor")
    assert code == 0
    for name in ("python", "packages", "git", "disk", "writable", "O_DIRECT", "store", "threads"):
        assert f" {name} " in out


def test_it_leaves_nothing_behind(command, here):
    command("doctor")
    assert list(here.iterdir()) == []


def test_as_json(command, here):
    told = json.loads(command("doctor", "--json")[1])
    assert {"level", "name", "what", "remedy"} == set(told[0])


def test_a_store_of_a_newer_format_fails_with_the_remedy(command, here):
    (here / ".rearview").mkdir()
    (here / ".rearview" / "format").write_text("999\n")
    code, out, _ = command("doctor")
    assert code == 1
    assert "format 999" in out
    assert "store-newer" in out


def test_a_folder_that_is_not_there_is_not_writable(here):
    assert doctor_verify_gc.writable(here / "gone").level == "fail"


def test_no_git_is_a_warning(monkeypatch, here):
    monkeypatch.setenv("PATH", str(here))
    (check,) = doctor_verify_gc.git()
    assert check.level == "warn"


def test_a_disk_that_refuses_direct_writes_is_a_warning(monkeypatch, here):
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(doctor_verify_gc.os, "open", refuse)
    assert doctor_verify_gc.direct_io(here).level == "warn"


def test_a_missing_package_fails_with_how_to_install_it(monkeypatch):
    real = doctor_verify_gc._version
    monkeypatch.setattr(
        doctor_verify_gc, "_version", lambda name: None if name == "duckdb" else real(name)
    )
    first, _ = doctor_verify_gc.packages()
    assert (first.level, first.remedy) == ("fail", "pip install duckdb")


def test_a_check_that_raises_is_reported_as_a_warning(monkeypatch, here):
    monkeypatch.setattr(doctor_verify_gc, "git", lambda: 1 / 0)
    assert Check(
        "warn", "doctor", "a check itself failed: ZeroDivisionError('division by zero')"
    ) in (doctor_verify_gc.examine(here))


def test_a_quota_below_the_number_of_cores_is_a_warning(monkeypatch):
    for name in doctor_verify_gc.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_verify_gc, "_read", lambda file: "50000 100000")
    (check,) = doctor_verify_gc.threads()
    assert check.level == "warn"
    assert "OMP_NUM_THREADS=1" in check.remedy
