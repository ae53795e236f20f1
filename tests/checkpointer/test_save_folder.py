import json
import os

import pytest

from rearview.checkpointer.save_folder import KeepRule, Save, SaveFolder
from rearview.errors import StoreError, UsageError


def save(folder, text, counter, metric=None):
    return folder.write(
        lambda path: path.write_text(text), counter=counter, step=counter, metric=metric
    )


@pytest.fixture
def folder(tmp_path):
    return SaveFolder(tmp_path / "my model.pt")


def test_a_save_is_there_with_its_manifest(folder):
    made = save(folder, "one", 1)
    assert folder.saves() == (made,)
    assert folder.intact(made)
    assert folder.show(made).read_text() == "one"


def test_newer_means_a_higher_count_not_a_later_file_date(folder):
    old, new = save(folder, "old", 1), save(folder, "new", 2)
    os.utime(folder.folder / new.id / "my model.pt", (0, 0))
    assert folder.saves() == (new, old)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_noticed(folder, damage):
    made = save(folder, "some text", 1)
    file = folder.folder / made.id / "my model.pt"
    if damage == "flip":
        file.write_text("same text")
    elif damage == "cut":
        file.write_text("some tex")
    else:
        file.unlink()
    assert not folder.intact(made)


def test_a_folder_without_whole_manifest_is_no_save(folder):
    made = save(folder, "one", 1)
    manifest = folder.folder / made.id / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert folder.saves() == ()
    assert folder.last_counter() == 1


def test_a_manifest_of_a_later_format_is_refused_not_guessed_at(folder):
    made = save(folder, "one", 1)
    manifest = folder.folder / made.id / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(StoreError, match="Upgrade"):
        folder.saves()


def test_a_function_that_fails_leaves_nothing_and_the_save_before(folder):
    first = save(folder, "one", 1)

    def broken(path):
        path.write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        folder.write(broken, counter=2, step=2, metric=None)
    assert folder.saves() == (first,)
    assert [p.name for p in folder.folder.iterdir()] == [first.id]


def test_a_checkpoint_function_that_writes_to_another_path_raises_an_error(folder):
    with pytest.raises(StoreError, match=r"wrote my model\.pt\.npz"):
        folder.write(
            lambda path: path.with_name(path.name + ".npz").write_text("x"),
            counter=1,
            step=1,
            metric=None,
        )


def test_a_folder_can_be_a_checkpoint(folder):
    def write(path):
        (path / "shards").mkdir(parents=True)
        (path / "shards" / "0.bin").write_bytes(b"zero")
        (path / "meta").write_text("m")

    for counter in (1, 2):
        made = folder.write(write, counter=counter, step=1, metric=None)
        shown = folder.show(made)
    assert (shown / "shards" / "0.bin").read_bytes() == b"zero"
    assert shown == folder.file
    assert {file.name for file in made.files} == {"my model.pt/shards/0.bin", "my model.pt/meta"}


def test_showing_works_where_links_do_not(folder, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    assert folder.show(save(folder, "one", 1)).read_text() == "one"


def test_leftovers_of_a_killed_save_are_removed(folder):
    made = save(folder, "one", 1)
    (folder.folder / ".rv-00000002-ffffff").mkdir()
    folder.sweep()
    assert [p.name for p in folder.folder.iterdir()] == [made.id]


def test_a_file_of_another_program_is_foreign_until_we_save(folder):
    assert folder.foreign_file() is None
    folder.file.write_text("theirs")
    assert folder.foreign_file() == folder.file
    folder.show(save(folder, "ours", 1))
    assert folder.foreign_file() is None
    assert folder.file.read_text() == "ours"


def test_the_newest_is_kept_even_if_it_is_the_worst():
    saves = [Save(str(n), n, 0.0, n, m, ()) for n, m in enumerate([3.0, 1.0, float("nan"), 9.0])]
    assert KeepRule(last=1, best=1).choose(saves) == {"1", "3"}
    assert KeepRule(last=1, best=1, mode="max").choose(saves) == {"3"}
    assert KeepRule(last=2, best=2).choose(saves) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("wrong", [{"last": 0}, {"best": -1}, {"mode": "least"}])
def test_keeping_nothing_is_refused(wrong):
    with pytest.raises(UsageError):
        KeepRule(**wrong)
