"""A package travels: what comes out is what went in, and a hostile one does nothing."""

import hashlib
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from studies import notebook, printed, scripts

from rearview.errors import RearviewError, ReplayError, SourceError, StoreError
from rearview.multiversion.execution_tree import CellFacts, Measurements, build_tree
from rearview.multiversion.package import open_package, pack
from rearview.multiversion.package_metadata import (
    Manifest,
    PackageEnvironment,
    requirements,
    study_from_crate,
)
from rearview.multiversion.replay_study import ReplayOptions, plan_study
from rearview.multiversion.study import study_from_files


def packed(tmp_path, files, measurements=None, **more):
    study = study_from_files(files)
    programs = {v.name: f.read_bytes() for v, f in zip(study.versions, files, strict=True)}
    target = tmp_path.parent / f"{tmp_path.name}.rvz"
    return pack(
        target, study, programs=programs, measurements=measurements or Measurements(), **more
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "study"
    folder.mkdir()
    (folder / "data.csv").write_text("a,b\n1,2\n")
    files = [
        notebook(folder / f"v{n}.ipynb", ["x = 1", f"print({n})"], [[], printed(f"{n}\n")])
        for n in range(3)
    ]
    known = Measurements()
    for node in build_tree(study_from_files(files)).nodes:
        known.add(node.chain, CellFacts(2.5, 1000, ("data.csv",)))
    return packed(folder, files, known).file


@pytest.fixture
def package(good, tmp_path):
    return Path(shutil.copy(good, tmp_path / "study.rvz"))


def test_a_package_extracts_to_the_packed_files(package, tmp_path):
    reader = open_package(package)
    study, programs = reader.extract(tmp_path / "out")
    assert [v.name for v in study.versions] == ["v0", "v1", "v2"]
    cell = study.versions[1].cells[1]
    assert (cell.seconds, cell.size, cell.reads) == (2.5, 1000, ("data.csv",))
    assert cell.outputs[0]["text"] == "1\n"
    assert study.versions[0].files["data.csv"].file.read_text() == "a,b\n1,2\n"
    assert b"print(2)" in programs["v2"]
    assert len(reader.manifest.tree["nodes"]) == 4
    assert reader.manifest.environment.python.startswith("3.")


def test_equal_contents_are_packed_once_and_no_checkpoints_at_all(package):
    names = zipfile.ZipFile(package).namelist()
    assert len(names) == 2 + 3 + 1  # manifest and crate, three notebooks, one table
    assert all(name.startswith("objects/") or name.endswith(".json") for name in names)


def test_large_data_is_referenced_and_found_by_its_hash(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "big.bin").write_bytes(b"x" * 5000)
    result = packed(folder, scripts(folder, a="x = open('big.bin').read()\n"), embed=1000)
    assert result.referenced == ("big.bin",)
    reader = open_package(result.file)
    lost, _ = reader.extract(tmp_path / "one")
    assert "big.bin" in build_tree(lost).unavailable["a"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "big.bin").write_bytes(b"y" * 5000)
    wrong, _ = reader.extract(tmp_path / "two", data=[other])
    assert wrong.versions[0].files["big.bin"].file is None
    found, _ = reader.extract(tmp_path / "three", data=[other, folder])
    assert found.versions[0].files["big.bin"].file == folder / "big.bin"


def test_the_metadata_is_an_ro_crate_whose_parts_are_in_the_package(package):
    archive = zipfile.ZipFile(package)
    crate = json.loads(archive.read("ro-crate-metadata.json"))
    entities = {entity["@id"]: entity for entity in crate["@graph"]}
    root = entities["ro-crate-metadata.json"]["about"]["@id"]
    parts = {part["@id"] for part in entities[root]["hasPart"]}
    assert parts == {name for name in archive.namelist() if name.startswith("objects/")}
    for part in parts:
        assert hashlib.sha256(archive.read(part)).hexdigest() == entities[part]["sha256"]
    assert [e["name"] for e in crate["@graph"] if e["@type"] == "CreateAction"] == [
        "v0",
        "v1",
        "v2",
    ]


def test_an_ro_crate_folder_is_read_as_a_study(tmp_path):
    scripts(tmp_path, a="x = 1\n", b="x = 1\n\nprint(x)\n")
    graph = [{"@id": "./", "name": "Tides"}] + [
        {"@id": name, "@type": ["File", "SoftwareSourceCode"]}
        for name in ("a.py", "b.py", "../../etc/passwd", "gone.py")
    ]
    (tmp_path / "ro-crate-metadata.json").write_text(json.dumps({"@graph": graph}))
    study, title = study_from_crate(tmp_path)
    assert ([v.name for v in study.versions], title) == (["a", "b"], "Tides")
    (tmp_path / "ro-crate-metadata.json").write_text("[]")
    with pytest.raises(SourceError):
        study_from_crate(tmp_path)


# Hostile and damaged packages. Each rewrites a good one.


def rewritten(package, change, *, entries=None):
    archive = zipfile.ZipFile(package)
    contents = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(contents["manifest.json"])
    change(manifest, contents)
    if "manifest.json" in contents:
        contents["manifest.json"] = json.dumps(manifest).encode()
    target = package.with_name("hostile.rvz")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in contents.items():
            out.writestr(name, data)
        for info, data in entries or []:
            out.writestr(info, data)
    return target


def opened(file, tmp_path, **more):
    return open_package(file, **more).extract(tmp_path / "contents")


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/passwd", "a/../../evil", "a//b", "./a", "a\\b", "C:a", "a\0b", "", "a/", "x" * 300, "a\nb"],
)  # fmt: skip
@pytest.mark.parametrize("where", ["program", "file", "cwd"])
def test_paths_cannot_lead_out(package, tmp_path, path, where):
    def change(manifest, _):
        version = manifest["versions"][0]
        if where == "file":
            version["files"] = {path: next(iter(version["files"].values()))}
        else:
            version[where] = path

    if where == "cwd" and not path:
        return  # the project folder itself
    with pytest.raises(StoreError) as caught:
        opened(rewritten(package, change), tmp_path)
    assert caught.value.slug == "package-refused"
    assert not (tmp_path / "evil").exists()


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, target


@pytest.mark.parametrize(
    "entry",
    [
        link("objects/" + "a" * 64, "/etc/passwd"),
        ("../../evil", b"x"),
        ("objects/../evil", b"x"),
        ("objects/" + "A" * 64, b"x"),
        ("state.pkl", b"cos\nsystem\n(S'true'\ntR."),
        ("objects/", b""),
    ],
)
def test_entries_that_packages_do_not_have_are_refused(package, tmp_path, entry):
    with pytest.raises(StoreError) as caught:
        opened(rewritten(package, lambda *_: None, entries=[entry]), tmp_path)
    assert caught.value.slug == "package-refused"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(package, tmp_path):
    with pytest.raises(StoreError, match="two entries"):
        opened(rewritten(package, lambda *_: None, entries=[("manifest.json", b"{}")]), tmp_path)


def test_bombs_are_refused_before_they_are_unpacked(package, tmp_path):
    bomb = ("objects/" + "b" * 64, bytes(40 << 20))
    with pytest.raises(StoreError, match="times when unpacked"):
        opened(rewritten(package, lambda *_: None, entries=[bomb]), tmp_path)
    with pytest.raises(StoreError) as caught:
        opened(package, tmp_path, most_bytes=1000)
    assert caught.value.slug == "package-too-large"


def test_data_that_compresses_like_a_bomb_can_be_packed_and_read(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "zeros.bin").write_bytes(bytes(4 << 20))
    study, _ = opened(packed(folder, scripts(folder, a="x = 1\n")).file, tmp_path)
    assert study.versions[0].files["zeros.bin"].file.stat().st_size == 4 << 20


def test_an_entry_that_lies_about_its_size_is_refused(package, tmp_path):
    data = bytearray(package.read_bytes())
    name = next(n for n in zipfile.ZipFile(package).namelist() if n.startswith("objects/"))
    at = data.rindex(name.encode()) - 46  # its record in the central directory
    size = struct.unpack_from("<I", data, at + 24)[0]
    struct.pack_into("<I", data, at + 24, size - 1)
    lying = package.with_name("lying.rvz")
    lying.write_bytes(bytes(data))
    with pytest.raises(StoreError):
        opened(lying, tmp_path)


def test_changed_contents_are_found(package, tmp_path):
    def change(_, contents):
        name = next(n for n in contents if n.startswith("objects/"))
        contents[name] = contents[name][:-1] + b"!"

    with pytest.raises(StoreError) as caught:
        opened(rewritten(package, change), tmp_path)
    assert caught.value.slug == "package-damaged"


def test_a_package_truncated_anywhere_is_refused(package, tmp_path):
    whole = package.read_bytes()
    short = package.with_name("short.rvz")
    for length in [0, 1, 10, *range(50, len(whole), max(1, len(whole) // 40)), len(whole) - 1]:
        short.write_bytes(whole[:length])
        with pytest.raises(StoreError) as caught:
            opened(short, tmp_path / str(length))
        assert caught.value.slug in {"package-damaged", "package-refused"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m, _: m.update(format=99),
        lambda m, _: m.update(versions=[]),
        lambda m, _: m.update(versions="no"),
        lambda m, _: m["versions"].append(m["versions"][0]),
        lambda m, _: m["versions"][0].update(source="0" * 64),
        lambda m, _: m["versions"][0].update(source="../../x"),
        lambda m, _: m["versions"][0].update(environment={"LD_PRELOAD=x": "1"}),
        lambda m, _: m["versions"][0].update(argv=["a\0b"]),
        lambda m, _: m["versions"][0].update(
            files={
                "v0.ipynb/x": {"sha256": m["versions"][0]["source"], "size": 1, "embedded": True}
            }
        ),
        lambda _, c: c.pop("manifest.json"),
        lambda _, c: c.pop(next(n for n in c if n.startswith("objects/"))),
    ],
)
def test_manifests_that_make_no_sense_are_refused(package, tmp_path, change):
    with pytest.raises(RearviewError):
        opened(rewritten(package, change), tmp_path)


def test_deep_json_is_refused(package, tmp_path):
    target = package.with_name("deep.rvz")
    with zipfile.ZipFile(target, "w") as out:
        out.writestr("manifest.json", b'{"format":1,"tree":' + b"[" * 200_000)
    with pytest.raises(StoreError):
        opened(target, tmp_path)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("numpy @ http://x/y.whl", "1"),
        ("-r/etc/passwd", "1"),
        ("numpy", "1; x"),
        ("a b", "1"),
        ("", "1"),
    ],
)
def test_requirements_are_names_and_versions_only(name, version):
    with pytest.raises(ReplayError):
        requirements(PackageEnvironment("3.12", "", {name: version}))


def test_nothing_runs_before_the_user_agreed(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    mark = tmp_path / "ran"
    file = packed(folder, scripts(folder, a=f"open({str(mark)!r}, 'w')\n")).file
    command = [sys.executable, "-m", "rearview", "replay", str(file), "--offline"]
    clean = {**os.environ, "HOME": str(tmp_path)}
    for words in ([], ["--dry-run"]):
        done = subprocess.run(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=clean,
        )
        assert done.returncode == (0 if words else 2), done.stderr
        assert not mark.exists()
    done = subprocess.run(
        [*command, "--yes"], capture_output=True, check=False, env=clean, text=True
    )
    assert done.returncode == 0, done.stderr
    assert mark.exists()


def test_the_manifest_of_today_is_read_by_its_own_schema(package):
    data = zipfile.ZipFile(package).read("manifest.json")
    assert msgspec.json.decode(data, type=Manifest).format == 1


def with_program(package, text, **facts):
    """The package with another text as the program of its first version."""
    data = text if isinstance(text, bytes) else text.encode()
    digest = hashlib.sha256(data).hexdigest()

    def change(manifest, contents):
        contents[f"objects/{digest}"] = data
        version = manifest["versions"][0]
        version.update(
            {"source": digest, "program": "a.py", "notebook": False, "cells": []} | facts
        )

    return rewritten(package, change)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\0\n",
        "# coding: nosuch\nx = 1\n",
        b"x = '\xff'\n",
        "x = " + "-" * 200_000 + "1\n",
        "x = a" + ".b" * 100_000 + "\n",
        "x = " + "(" * 5000 + ")" * 5000 + "\n",
        "x = " + "9" * 100_000 + "\n",
        "x = = 1\n",
    ],
    ids=["nul", "encoding", "bytes", "minus", "attributes", "brackets", "number", "syntax"],
)
def test_programs_that_cannot_be_parsed_are_refused(package, tmp_path, text):
    with pytest.raises(RearviewError):
        opened(with_program(package, text), tmp_path)


@pytest.mark.parametrize(
    "cost", [{"seconds": 1e308}, {"seconds": -5.0}, {"size": 10**30}, {"size": -1}]
)
def test_absurd_costs_are_bounded_so_that_a_plan_can_be_made(package, tmp_path, cost):
    def change(manifest, _):
        for version in manifest["versions"]:
            for cell in version["cells"]:
                cell.update(cost)

    study, _ = opened(rewritten(package, change), tmp_path)
    plan = plan_study(study, ReplayOptions(), Measurements())
    assert 0 <= plan.order.bound <= plan.order.seconds < 1e12


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PYTHONPATH", "PATH", "HOME", "BASH_ENV", "PYTHONSTARTUP"]
)
def test_variables_that_describe_the_machine_are_not_taken_over(package, tmp_path, name):
    def change(manifest, _):
        manifest["versions"][0]["environment"] = {name: "/evil", "LR": "1"}

    study, _ = opened(rewritten(package, change), tmp_path)
    assert study.versions[0].environment == {"LR": "1"}


@pytest.mark.parametrize("cwd", ["data.csv", "data.csv/below"])
def test_a_working_folder_below_a_file_is_refused(package, tmp_path, cwd):
    with pytest.raises(StoreError, match="lies below another file"):
        opened(rewritten(package, lambda m, _: m["versions"][0].update(cwd=cwd)), tmp_path)


@pytest.mark.parametrize("zip64", [False, True])
def test_a_long_table_of_contents_is_refused_before_it_is_read(package, tmp_path, zip64):
    """It is only stated in the end record: reading it would take memory that nobody agreed to."""
    data = bytearray(package.read_bytes())
    end = data.rindex(b"PK\5\6")
    if zip64:
        record = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 9**8, 9**8, 1 << 40, 0)
        locator = struct.pack("<IIQI", 0x07064B50, 0, end, 1)
        struct.pack_into("<I", data, end + 12, 0xFFFFFFFF)
        data[end:end] = record + locator
    else:
        struct.pack_into("<I", data, end + 12, 1 << 30)
    package.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="table of contents"):
        opened(package, tmp_path)


@pytest.mark.parametrize(
    "kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK, stat.S_IFDIR]
)
def test_entries_that_are_no_regular_files_are_refused(package, tmp_path, kind):
    info = zipfile.ZipInfo("objects/" + "a" * 64)
    info.external_attr = (kind | 0o777) << 16
    with pytest.raises(StoreError, match="link or a device"):
        opened(rewritten(package, lambda *_: None, entries=[(info, b"")]), tmp_path)


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"


def test_names_and_texts_of_a_package_cannot_control_the_terminal_or_the_page(package, tmp_path):
    evil = f"</title><script>alert(1)</script>{ESCAPES}"

    def change(manifest, contents):
        manifest["title"] = evil
        manifest["environment"]["python"] = f"3.1{ESCAPES}"
        manifest["environment"]["system"] = ESCAPES
        version = manifest["versions"][0]
        version.update(name=f"v{evil}", argv=[ESCAPES])
        book = json.loads(contents[f"objects/{version['source']}"])
        # another program as a kernel: it is never started
        book["metadata"]["kernelspec"] = {"name": "evil", "display_name": "x", "language": "python"}
        book["cells"][1]["source"] = [f"print('{evil}')"]
        book["cells"][1]["outputs"] = [
            {"output_type": "display_data", "metadata": {},
             "data": {"text/html": "<img src=x onerror=alert(1)>", "text/plain": evil,
                      "image/png": '"><script>', "image/svg+xml": "<svg onload='alert(1)'/>"}}
        ]  # fmt: skip
        data = json.dumps(book).encode()
        version.update(source=hashlib.sha256(data).hexdigest(), cells=[])
        contents[f"objects/{version['source']}"] = data

    hostile = rewritten(package, change)
    page = tmp_path / "page.html"
    for words in (["--dry-run"], ["--yes", "--html", str(page)]):
        done = subprocess.run(
            [sys.executable, "-m", "rearview", "replay", str(hostile), "--offline", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        text = (done.stdout + done.stderr).decode()
        assert "owned" in text
        assert not set("\x1b\x07\u202e") & set(text)
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert "<img src=x" not in text
    assert not re.search(r"<[^>]* on\w+=", text)
    assert not set("\x1b\x07") & set(text)


@pytest.mark.parametrize(
    "name",
    ["--index-url=http://x", "git+https://x/y", "./local", "file:///x", "x[extra]", "x\n-r y", "é"],
)
def test_requirements_cannot_be_options_addresses_or_paths(name):
    with pytest.raises(ReplayError):
        requirements(PackageEnvironment("3.12", "", {name: "1"}))
    with pytest.raises(ReplayError):
        requirements(PackageEnvironment("3.12", "", {"numpy": f"1 {name}"}))


def test_data_folders_give_only_files_with_the_hash_that_is_named(package, tmp_path):
    secret = tmp_path / "data" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("secret")

    def change(manifest, _):
        ref = {"sha256": "0" * 64, "size": 6, "embedded": False}
        manifest["versions"][0]["files"] = {"secret.txt": ref}

    study, _ = opened_with_data(rewritten(package, change), tmp_path)
    assert study.versions[0].files["secret.txt"].file is None


def opened_with_data(file, tmp_path):
    return open_package(file).extract(tmp_path / "contents", data=[tmp_path / "data"])
