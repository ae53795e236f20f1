"""Objects that are compressed are the same objects."""

import os
import random
import struct
import subprocess
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.errors import DamagedError, StoreError
from rearview.model import Edge, ObjectRef, Part, Point, Snapshot
from rearview.store.checkpoints import compression
from rearview.store.checkpoints import objects as objects_module
from rearview.store.checkpoints.checkpoints import OBJECT_FROM, Checkpoints
from rearview.store.checkpoints.compression import MARK, CompressionPolicy, zstd_library
from rearview.store.checkpoints.objects import Batch, Objects, digest
from rearview.store.maintenance.thin_and_collect import gc, usage
from rearview.store.maintenance.verify import verify
from rearview.store.project import COMPRESSED, PLAIN, Project

DENSE = random.Random(7).randbytes(1 << 20)
KINDS = {
    "zeros": bytes,
    "tokens": lambda n: (b"".join(b"%c\0\0\0\0\0\0\0" % k for k in DENSE[:60_000]) * 7)[:n],
    "partly filled": lambda n: (DENSE * (n // len(DENSE) + 1))[: n // 3] + bytes(n - n // 3),
    "booleans": lambda n: bytes(byte & 1 for byte in DENSE[:4096]) * (n // 4096) + bytes(n % 4096),
    "marked": lambda n: MARK + DENSE[: n - len(MARK)],
    "dense": lambda n: (DENSE * (n // len(DENSE) + 1))[:n],
}


@pytest.fixture
def objects(project):
    return Objects(project)


def put(objects, data, worth=None, key="buffer"):
    with Batch(objects, worth or CompressionPolicy()) as batch:
        ref = batch.put(data, key=key)
        batch.commit()
    return ref


def compressed(objects, ref):
    return objects.file(ref).read_bytes().startswith(MARK)


@given(kind=st.sampled_from(sorted(KINDS)), nbytes=st.integers(OBJECT_FROM, 3 * OBJECT_FROM))
@settings(max_examples=25, deadline=None)
def test_an_object_of_any_kind_of_data_is_read_back(tmp_path_factory, kind, nbytes):
    objects = Objects(Project.create(tmp_path_factory.mktemp("store")))
    data = KINDS[kind](nbytes)
    ref = put(objects, data)
    assert ref == ObjectRef(digest(data), len(data))
    assert objects.ref(ref.oid) == ref
    assert compressed(objects, ref) == (kind != "dense")
    assert objects.get(ref) == data
    into = bytearray(len(data))
    objects.read_into(ref, memoryview(into))
    assert into == data
    objects.check(ref)


def test_an_object_is_not_stored_both_compressed_and_plain(objects):
    data = bytes(OBJECT_FROM)
    for first, second in ((CompressionPolicy(), None), (None, CompressionPolicy())):
        for worth in (first, second):
            with Batch(objects, worth) as batch:
                ref = batch.put(data)
                batch.commit()
            assert compressed(objects, ref) == (first is not None)
            assert (batch.stored == 0) == (worth is second)
            assert objects.get(ref) == data
        assert objects.delete(ref.oid) > 0
        assert not objects.has(ref.oid)


def test_the_reported_stored_bytes_are_the_bytes_on_disk(project):
    store = Checkpoints(project, CompressionPolicy())
    saved = store.save(Snapshot("r", 0, Point(), Edge.START), [Part("a", bytes(4 * OBJECT_FROM))])
    assert saved.stored == usage(project) < 10_000
    assert saved.shrunk + saved.stored == saved.nbytes == 4 * OBJECT_FROM
    assert Checkpoints(project).get("r/0").shrunk == saved.shrunk


def test_a_sample_that_misled_costs_no_space(objects, project, monkeypatch):
    worth = CompressionPolicy()
    monkeypatch.setattr(worth, "predicted_share", lambda *_: 0.1)
    refused = []
    monkeypatch.setattr(worth, "pause_sampling", refused.append)
    ref = put(objects, DENSE, worth)
    assert not compressed(objects, ref)
    assert objects.get(ref) == DENSE
    assert refused == ["buffer"]
    assert usage(project) == len(DENSE)


def test_only_a_store_with_compressed_objects_needs_a_newer_rearview(objects, project):
    put(objects, DENSE)
    assert project.check() == PLAIN
    with Batch(objects, CompressionPolicy()) as batch:
        batch.put(bytes(OBJECT_FROM))
    assert project.check() == PLAIN  # it was not committed
    put(objects, bytes(OBJECT_FROM))
    assert project.check() == COMPRESSED


def test_a_store_of_a_number_we_do_not_know_is_refused(project):
    (project.store / "format").write_text(f"{COMPRESSED + 1}\n")
    with pytest.raises(StoreError, match=r"has format 3; .* up to 2. Upgrade"):
        Project.open(project.root)


def test_large_ones_go_past_the_page_cache_in_whole_blocks(objects, monkeypatch):
    flags = []
    opened = os.open

    def noted(path, how, *args, **kwargs):
        flags.append(how)
        return opened(path, how, *args, **kwargs)

    data = KINDS["partly filled"](12 * OBJECT_FROM)
    monkeypatch.setattr(os, "open", noted)
    ref = put(objects, data)
    monkeypatch.undo()
    assert compressed(objects, ref)
    assert any(how & os.O_DIRECT for how in flags)
    assert objects.get(ref) == data


def test_the_zstd_tool_reads_a_compressed_object(objects):
    data = KINDS["tokens"](OBJECT_FROM)
    file = objects.file(put(objects, data))
    try:
        found = subprocess.run(
            ["zstd", "-dc"], input=file.read_bytes(), capture_output=True, check=True
        )
    except FileNotFoundError:
        assert zstd_library().decompress(file.read_bytes()) == data
    else:
        assert found.stdout == data


def test_restoring_takes_little_memory_in_addition_to_the_buffer(objects):
    data = bytes(64 << 20)
    ref = put(objects, data)
    into = memoryview(bytearray(len(data)))
    objects.check(ref)
    tracemalloc.start()
    objects.read_into(ref, into)
    objects.check(ref)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def header(nbytes):
    return MARK + struct.pack("<Q", nbytes)


def frame(data, **parameters):
    zstd = zstd_library()
    kinds = zstd.CompressionParameter
    chosen = {getattr(kinds, name): value for name, value in parameters.items()}
    return zstd.compress(data, options={kinds.compression_level: 1, **chosen})


ZEROS = bytes(OBJECT_FROM)
WRONG = {
    "nothing": b"",
    "half of its head": header(len(ZEROS))[:20],
    "only its head": header(len(ZEROS)),
    "no frame": header(len(ZEROS)) + b"no frame at all, but some text",
    "cut off": header(len(ZEROS)) + frame(ZEROS)[:-5],
    "other content": header(len(ZEROS)) + frame(b"\1" + ZEROS[1:]),
    "too little": header(len(ZEROS)) + frame(ZEROS[1:]),
    "too much": header(len(ZEROS)) + frame(ZEROS + b"\0"),
    "another size told": header(len(ZEROS) + 1) + frame(ZEROS + b"\0"),
    "a size that cannot be": header(2**64 - 1) + frame(ZEROS),
    "a bomb": header(len(ZEROS)) + frame(bytes(256 << 20)),
    "a bomb that says so": header(256 << 20) + frame(bytes(256 << 20)),
    "a window as large as a machine": header(len(ZEROS)) + frame(bytes(64 << 20), window_log=26),
    "something after the end": header(len(ZEROS)) + frame(ZEROS) + b"?",
    "two frames": header(len(ZEROS)) + frame(ZEROS[: 1 << 19]) + frame(ZEROS[: 1 << 19]),
    "frames to be skipped": header(len(ZEROS)) * 4000,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_damage_is_found_and_takes_no_memory(project, wrong):
    store = Checkpoints(project, CompressionPolicy())
    ref = store.save(Snapshot("r", 0, Point(), Edge.START), [Part("a", ZEROS)]).parts["a"]
    file = store.objects.file(ref)
    file.write_bytes(WRONG[wrong])
    into = bytearray(len(ZEROS))
    tracemalloc.start()
    for read in (store.objects.check, lambda ref: store.objects.read_into(ref, into)):
        with pytest.raises(DamagedError, match="is damaged") as caught:
            read(ref)
        assert caught.value.slug == "object-damaged"
    assert not verify(project).ok
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    report = verify(project, repair=True)
    assert {each for problem in report.problems for each in problem.lost} == {"r/0"}
    assert [path.read_bytes() for path in project.damaged.rglob(file.name)] == [WRONG[wrong]]
    assert verify(project).problems == ()


def test_every_flipped_bit_is_found_or_changes_nothing(objects):
    data = KINDS["booleans"](OBJECT_FROM)
    ref = put(objects, data)
    file = objects.file(ref)
    whole = file.read_bytes()
    places = [*range(48), *random.Random(1).sample(range(48, len(whole)), 60)]
    for at in places:
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        file.write_bytes(broken)
        try:
            found = objects.get(ref)
        except DamagedError:
            continue
        assert found == data


def test_a_damaged_object_is_replaced_from_a_copy_elsewhere(project):
    store = Checkpoints(project, CompressionPolicy())
    ref = store.save(Snapshot("r", 0, Point(), Edge.START), [Part("a", ZEROS)]).parts["a"]
    os.truncate(store.objects.file(ref), 30)
    report = verify(project, repair=True, fetch={ref.oid: ZEROS}.get)
    assert report.ok
    assert store.load(store.get("r/0"))["a"] == ZEROS


def test_verify_counts_the_content(project):
    Checkpoints(project, CompressionPolicy()).save(
        Snapshot("r", 0, Point(), Edge.START), [Part("a", ZEROS)]
    )
    report = verify(project)
    assert (report.problems, report.objects, report.nbytes) == ((), 1, len(ZEROS))


def test_a_sweep_frees_unneeded_compressed_objects_and_keeps_the_others(project):
    store = Checkpoints(project, CompressionPolicy())
    for seq in range(3):
        store.save(Snapshot("r", seq, Point(), Edge.START), [Part("a", bytes([seq]) * OBJECT_FROM)])
    store.delete("r/1")
    for folder, _, names in os.walk(project.store):
        for name in names:
            os.utime(Path(folder, name), (1e9, 1e9))
    before = usage(project)
    freed = gc(project, referenced=tuple)
    assert 0 < freed.nbytes == before - usage(project) < 1000
    assert store.load(store.get("r/2"))["a"] == b"\2" * OBJECT_FROM
    assert verify(project).problems == ()


def test_a_python_without_the_library_says_so_and_records_all_the_same(objects, monkeypatch):
    ref = put(objects, ZEROS)

    def absent():
        raise StoreError("no zstd", slug="zstd-missing")

    monkeypatch.setattr(compression, "zstd_library", absent)
    assert CompressionPolicy.of("auto") is None
    with pytest.raises(StoreError, match="no zstd"):
        objects.get(ref)


def test_never_is_never(objects, project):
    assert CompressionPolicy.of("never") is None
    assert CompressionPolicy.of("auto") is not None
    assert objects_module.LARGEST_SHARE < 1
    with Batch(objects, CompressionPolicy.of("never")) as batch:
        ref = batch.put(ZEROS)
        batch.commit()
    assert objects.file(ref).read_bytes() == ZEROS
    assert project.check() == PLAIN
