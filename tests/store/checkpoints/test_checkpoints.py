import json
import os

import pytest

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import CheckpointMeta, Edge, MissingPart, Part, Point, Snapshot, Step
from rearview.store.checkpoints.checkpoints import OBJECT_FROM, Checkpoints
from rearview.store.checkpoints.manifest_and_packs import FORMAT, INLINE

MISSING = (MissingPart("log", "a pipe"), MissingPart("plug", "a socket"))
POINT = Point((Step("epoch", 3, "third"), Step("step", 20, 0.5)))


def test_a_saved_checkpoint_is_loaded_unchanged(checkpoints, save, holds):
    saved = save(4)
    found = Checkpoints(checkpoints.project).get("r/4")
    assert found == saved
    assert holds(4)


def test_all_facts_about_a_checkpoint_are_stored(checkpoints):
    saved = checkpoints.save(
        Snapshot("r", 7, POINT, Edge.END, meta=CheckpointMeta(records=7), missing=MISSING),
        [Part("a", b"1")],
    )
    found = Checkpoints(checkpoints.project).get("r/7")
    assert (found.point, found.edge, found.meta) == (POINT, "end", CheckpointMeta(records=7))
    assert (found.complete, found.missing) == (False, MISSING)
    assert found.time == saved.time
    assert found.nbytes == 1


def test_many_parts_stay_out_of_the_manifest(checkpoints):
    parts = [Part(f"layer.{i}", b"%d" % i) for i in range(5000)]
    checkpoints.save(Snapshot("r", 0, POINT, Edge.START), parts)
    path = checkpoints.project.checkpoints / "r" / "00000000.json"
    assert path.stat().st_size < 1000
    found = Checkpoints(checkpoints.project).of("r")[0]
    assert len(found.parts) == 5000
    assert list(found.parts)[:2] == ["layer.0", "layer.1"]
    assert checkpoints.load(found)["layer.4999"] == b"4999"


def test_small_parts_share_one_file_and_can_be_mapped(checkpoints):
    parts = [Part(f"p{i}", bytes([i]) * (i + 1)) for i in range(INLINE)]
    saved = checkpoints.save(Snapshot("r", 0, POINT, Edge.START), parts)
    assert len({ref.pack for ref in saved.parts.values()}) == 1
    assert all(ref.offset % 64 == 0 for ref in saved.parts.values())
    assert list(checkpoints.objects.all()) == []
    assert len(list(checkpoints.objects.packs())) == 1


def test_only_new_content_is_stored(checkpoints):
    big, small = b"a" * OBJECT_FROM, b"b" * 100
    first = checkpoints.save(
        Snapshot("r", 0, POINT, Edge.START), [Part("big", big), Part("small", small)]
    )
    assert first.stored > OBJECT_FROM
    same = [Part("big", b"", first.parts["big"]), Part("small", b"", first.parts["small"])]
    second = checkpoints.save(Snapshot("r", 1, POINT, Edge.START), [*same, Part("new", b"c")])
    assert second.stored < 1000
    third = checkpoints.save(Snapshot("other", 0, POINT, Edge.START), [Part("big", big)])
    assert third.stored == 0
    assert checkpoints.load(second)["big"] == big
    assert checkpoints.load(second)["small"] == small


def test_a_shared_object_that_is_gone_is_not_pretended(checkpoints):
    first = checkpoints.save(Snapshot("r", 0, POINT, Edge.START), [Part("big", b"a" * OBJECT_FROM)])
    checkpoints.objects.delete(first.parts["big"].oid)
    with pytest.raises(StoreError, match=r"removed from .* during the save"):
        checkpoints.save(
            Snapshot("r", 1, POINT, Edge.START), [Part("big", b"", first.parts["big"])]
        )
    assert [each.id for each in checkpoints.of("r")] == ["r/0"]


def test_checkpoints_come_in_order(checkpoints, save):
    for seq in (3, 10, 1, 200):
        save(seq)
    assert [each.seq for each in checkpoints.of("r")] == [1, 3, 10, 200]
    checkpoints.delete("r/10")
    assert [each.seq for each in checkpoints.of("r")] == [1, 3, 200]
    assert checkpoints.of("unknown") == []
    assert checkpoints.runs() == ["r"]


def test_a_second_query_reads_only_new_records(checkpoints, save, monkeypatch):
    for seq in range(5):
        save(seq)
    store = Checkpoints(checkpoints.project)
    store.of("r")
    save(5)
    reads = []
    real = Checkpoints._read
    monkeypatch.setattr(Checkpoints, "_read", lambda s, p: reads.append(p) or real(s, p))
    assert len(store.of("r")) == 6
    assert [path.name for path in reads] == ["00000005.json"]


def test_a_checkpoint_that_was_saved_again_is_the_new_one(checkpoints, save):
    save(1, seed=1)
    assert checkpoints.of("r")[0].meta == CheckpointMeta(records=1)
    checkpoints.save(
        Snapshot("r", 1, POINT, Edge.START, meta=CheckpointMeta(records=2)), [Part("a", b"")]
    )
    assert checkpoints.of("r")[0].meta == CheckpointMeta(records=2)


def test_parts_are_read_one_by_one_or_together(checkpoints, save, state):
    loaded = checkpoints.load(save(9))
    buffers = {key: bytearray(len(data)) for key, data in state(9).items()}
    loaded.prefetch()
    loaded.fill(buffers)
    assert buffers == state(9)
    one = bytearray(len(state(9)["odd"]))
    loaded.read_into("odd", one)
    assert one == state(9)["odd"]
    loaded.fill({})
    loaded.fill({"odd": one})
    assert set(loaded) == set(state(9))
    assert len(loaded) == 5


def test_a_part_is_read_without_the_others(checkpoints, save, state):
    saved = save(9)
    checkpoints.objects.path(saved.parts["large"].oid).unlink()
    loaded = checkpoints.load(saved)
    assert loaded["odd"] == state(9)["odd"]
    with pytest.raises(DamagedError):
        loaded["large"]
    with pytest.raises(DamagedError):
        loaded.fill({"large": bytearray(saved.parts["large"].nbytes), "tiny": bytearray(2)})


def test_an_unknown_part_names_the_known_ones(checkpoints, save):
    with pytest.raises(UsageError, match=r"no part 'weights'.*large, odd"):
        checkpoints.load(save(1))["weights"]


def test_an_unknown_checkpoint_names_the_known_ones(checkpoints, save):
    save(1)
    with pytest.raises(UsageError, match=r"no checkpoint 'r/2'.*r/1"):
        checkpoints.get("r/2")
    with pytest.raises(UsageError, match="The run has none"):
        checkpoints.get("q/2")
    for name in ("r", "../../etc/1", "/etc/1", "r/-1", ""):
        with pytest.raises(UsageError):
            checkpoints.get(name)


def test_a_damaged_manifest_hides_only_itself(checkpoints, save, caplog):
    for seq in range(3):
        save(seq)
    path = checkpoints.project.checkpoints / "r" / "00000001.json"
    path.write_bytes(path.read_bytes().replace(b'"records":1', b'"records":8'))
    store = Checkpoints(checkpoints.project)
    assert [each.seq for each in store.of("r")] == [0, 2]
    assert "checksum" in caplog.text
    with pytest.raises(DamagedError, match="verify --repair"):
        store.get("r/1")


def test_a_manifest_of_a_newer_format_is_refused(checkpoints, save):
    save(1)
    path = checkpoints.project.checkpoints / "r" / "00000001.json"
    text = json.loads(path.read_bytes())
    path.write_text(json.dumps({**text, "format": FORMAT + 1}))
    with pytest.raises(StoreError, match="Upgrade") as caught:
        checkpoints.get("r/1")
    assert caught.value.slug == "store-newer"


def test_a_read_only_folder_is_reported(checkpoints, save, holds, monkeypatch):
    save(0)
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=r"Permission denied.*intact") as caught:
        save(1)
    assert caught.value.slug == "store-unwritable"
    assert holds(0)
