import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rearview.errors import DamagedError, StoreError
from rearview.model import ObjectRef
from rearview.store.checkpoints.objects import Batch, Objects, digest
from rearview.store.project import Project


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def objects(project):
    return Objects(project)


@given(data=st.binary(max_size=5000))
@settings(max_examples=30, deadline=None)
def test_a_stored_object_is_read_back(tmp_path_factory, data):
    objects = Objects(Project.create(tmp_path_factory.mktemp("store")))
    ref = objects.put(data)
    assert objects.get(ref) == data
    assert ref == ObjectRef(digest(data), len(data))


def test_equal_content_is_stored_once(objects):
    with Batch(objects) as batch:
        first, second = batch.put(b"a" * 100), batch.put(bytearray(b"a" * 100))
        batch.commit()
    assert first == second
    assert batch.stored == 100
    with Batch(objects) as batch:
        batch.put(b"a" * 100)
        batch.commit()
    assert batch.stored == 0
    assert list(objects.all()) == [first.oid]


def test_a_buffer_of_any_type_and_shape_is_its_bytes(objects):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6000, dtype="f8").reshape(20, 300)
    back = numpy.zeros_like(array)
    objects.read_into(objects.put(array), back)
    assert (array == back).all()


def test_a_buffer_of_another_size_is_refused(objects):
    with pytest.raises(StoreError, match=r"has 5 bytes, the buffer 3"):
        objects.read_into(objects.put(b"abcde"), bytearray(3))


@pytest.mark.parametrize("summed", [True, False], ids=["by its sum", "by its name"])
def test_a_flipped_bit_is_found_on_load(objects, summed):
    ref = objects.put(b"a" * 100)
    ref = ref if summed else replace(ref, sum="")
    path = objects.path(ref.oid)
    path.write_bytes(b"a" * 50 + b"b" + b"a" * 49)
    with pytest.raises(DamagedError, match=r"is damaged.*verify --repair") as caught:
        objects.get(ref)
    assert caught.value.slug == "object-damaged"


def test_a_sum_that_fits_does_not_make_up_for_a_name_that_does_not(objects):
    ref, other = objects.put(b"a" * 100), objects.put(b"b" * 100)
    objects.path(ref.oid).write_bytes(b"b" * 100)
    wrong = replace(ref, sum=other.sum)
    assert objects.get(wrong) == b"b" * 100
    with pytest.raises(DamagedError):
        objects.check(wrong)


def test_a_short_file_is_found_on_load(objects):
    ref = objects.put(b"a" * 100)
    os.truncate(objects.path(ref.oid), 40)
    with pytest.raises(DamagedError, match="ends after 40 of 100"):
        objects.get(ref)
    with pytest.raises(DamagedError):
        objects.check(ref)


def test_a_missing_object_says_how_to_bring_it_back(objects):
    with pytest.raises(DamagedError, match="another copy"):
        objects.get(ObjectRef("0" * 64, 3))


def test_deletion_prints_the_freed_bytes(objects):
    ref = objects.put(b"a" * 100)
    assert objects.has(ref.oid)
    assert objects.delete(ref.oid) == 100
    assert objects.delete(ref.oid) == 0
    assert not objects.has(ref.oid)


def test_a_batch_that_is_left_leaves_nothing_behind(objects, project):
    with Batch(objects) as batch:
        batch.put(b"a" * 100)
    assert [name for _, _, names in os.walk(project.objects) for name in names] == []


def test_a_batch_of_many_objects_keeps_few_files_open(objects):
    before = open_files()
    with Batch(objects) as batch:
        for number in range(400):
            batch.put(b"%d" % number)
        assert open_files() - before <= 130
        batch.commit()
    assert len(list(objects.all())) == 400
    assert open_files() == before
