"""Everything that writes, failing at every step."""

import errno
import os
import random
from pathlib import Path

import pytest

from faults import Faults
from rearview.errors import StoreError
from rearview.model import ObjectRef
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.checkpoints.objects import Batch, Objects, digest
from rearview.store.maintenance.thin_and_collect import gc, usage
from rearview.store.maintenance.verify import verify


def leftovers(project):
    return [
        name for _, _, names in os.walk(project.store) for name in names if name.startswith(".part")
    ]


FORMS = pytest.mark.parametrize("compress", ["never", "auto"], ids=["plain", "compressed"])


@FORMS
@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "from then on"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_save_that_fails_at_any_step_leaves_the_store_whole(
    project, save, holds, monkeypatch, times, error, compress
):
    slug = "disk-full" if error == errno.ENOSPC else "store-unwritable"
    save(0)
    save(1)
    for step in range(1, 10**6):
        store, said = Checkpoints(project, CompressionPolicy.of(compress)), []
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=step, times=times, error=error)
            try:
                save(2, seed=100 + step, store=store)
            except StoreError as exc:
                said.append((exc.slug, "intact" in str(exc)))
        assert said in ([], [(slug, True)])
        assert holds(0)
        assert holds(1)
        assert verify(project).ok
        if not faults.failed:
            break
        seen = {each.seq for each in Checkpoints(project).of("r")}
        if 2 in seen:
            assert holds(2, seed=100 + step)
        if "unlink" not in faults.failed:
            assert leftovers(project) == []
        store.delete("r/2")
    assert step > 20
    assert holds(2, seed=100 + step)


def test_a_put_that_fails_at_any_step_leaves_nothing_behind(project, monkeypatch):
    objects = Objects(project)
    for step in range(1, 10**6):
        data = b"%d" % step * 1000
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=step)
            try:
                objects.put(data)
            except StoreError:
                assert faults.failed
        assert leftovers(project) == []
        assert objects.get(objects.put(data)) == data
        if not faults.failed:
            break
    assert step > 4


def test_a_compressed_put_that_fails_at_any_step_leaves_nothing_behind(project, monkeypatch):
    objects, worth = Objects(project), CompressionPolicy()
    dense = random.Random(3).randbytes(4 << 20)
    for step in range(1, 10**6):
        data = dense + b"%d" % step + bytes(6 << 20)  # a part of the file is written before its end
        (project.store / "format").write_text("1")
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=step)
            try:
                put(objects, data, worth)
            except StoreError:
                assert faults.failed
            else:
                assert not faults.failed or objects.get(ObjectRef(digest(data), len(data))) == data
        assert leftovers(project) == []
        assert objects.get(put(objects, data, worth)) == data
        assert project.check() == 2
        if not faults.failed:
            break
    assert step > 8
    assert usage(project) < 0.5 * step * len(data)


def put(objects, data, worth):
    with Batch(objects, worth) as batch:
        ref = batch.put(data)
        batch.commit()
    return ref


@FORMS
def test_a_process_that_dies_at_any_step_loses_at_most_its_own_checkpoint(
    project, save, holds, monkeypatch, compress
):
    save(0)
    for step in range(1, 10**6):
        pid = os.fork()
        if not pid:
            try:
                Faults(monkeypatch, at=step, die=True)
                save(step, store=Checkpoints(project, CompressionPolicy.of(compress)))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in {0, 9}
        assert holds(0)
        assert verify(project).ok
        if status == 0:
            break
        if step in {each.seq for each in Checkpoints(project).of("r")}:
            assert holds(step)
    assert step > 20
    assert leftovers(project) != []
    age(project)
    gc(project, referenced=tuple)
    assert leftovers(project) == []
    assert holds(step)


def test_a_sweep_that_dies_at_any_step_frees_nothing_that_is_needed(
    project, save, holds, monkeypatch
):
    for step in range(1, 10**6):
        store = Checkpoints(project)
        for seq in range(3):
            save(seq, store=store)
        store.delete("r/1")
        age(project)
        pid = os.fork()
        if not pid:
            try:
                Faults(monkeypatch, at=step, die=True)
                gc(project, referenced=tuple)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in {0, 9}
        assert verify(project).ok
        for seq in (0, 2):
            assert holds(seq)
        if status == 0:
            break
    assert step > 5


def age(project):
    for folder, _, names in os.walk(project.store):
        for name in names:
            os.utime(Path(folder, name), (1e9, 1e9))
