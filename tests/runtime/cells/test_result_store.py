"""Several notebooks may use the stored results of cells at the same time."""

import os
import time

from rearview.runtime.cells.result_store import DRAFT_SECONDS, ResultStore


def test_pruning_ignores_files_that_another_process_removes_or_is_writing(tmp_path):
    store = ResultStore(tmp_path)
    digest = store.put_bytes(b"x" * 100)
    contents = tmp_path / "contents"
    (contents / "removed").symlink_to("nowhere")  # listed, and gone when its status is read
    (contents / ".draft.1").write_bytes(b"y" * 100)
    store.prune(most=0)
    assert not store.has(digest)
    assert (contents / ".draft.1").exists()


def test_pruning_removes_drafts_of_processes_that_were_killed(tmp_path):
    store = ResultStore(tmp_path)
    draft = tmp_path / "contents" / ".draft.1"
    draft.write_bytes(b"y" * 100)
    before = time.time() - 2 * DRAFT_SECONDS
    os.utime(draft, (before, before))
    store.prune()
    assert not draft.exists()


def test_bytes_that_were_removed_are_stored_again(tmp_path):
    store = ResultStore(tmp_path)
    digest = store.put_bytes(b"x")
    store.prune(most=0)
    assert store.put_bytes(b"x") == digest
    assert store.get_bytes(digest) == b"x"
