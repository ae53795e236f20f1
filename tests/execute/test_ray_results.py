"""Results of a replay on a node are published whole, or not at all."""

import os
from pathlib import Path

import pytest

from rearview.errors import SiteError
from rearview.execute.ray_files import ShippingList, StagedResults
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.checkpoints.objects import Batch, Objects, digest
from rearview.store.project import Project

REPLAY = "run.abcd"


@pytest.fixture
def project(tmp_path):
    made = Project.create(tmp_path / "home")
    (made.runs / "run").mkdir(parents=True)
    (made.replays / REPLAY / "tree").mkdir(parents=True)
    return made


class Node:
    """Files of a node, by the paths they have there; reading may fail at the n-th time."""

    def __init__(self, files, fails=None):
        self.files = {str(path): data for path, data in files.items()}
        self.fails = fails

    def read(self, pieces):
        if self.fails is not None:
            self.fails -= 1
            if self.fails < 0:
                raise ConnectionError("lost")
        return [self.files[path][at : at + length] for path, at, length in pieces]

    def sized(self, paths):
        return [(str(path), len(self.files[str(path)]), 0o644) for path in paths]


def staged_results(project, node):
    shipping_list = ShippingList(
        project.root, "run", REPLAY, (project.replays / REPLAY,), (), (), (), ()
    )
    return StagedResults(project, shipping_list, node.read, 4)


def brought(project, fails=None):
    folder = project.replays / REPLAY
    value = b"a logged value"
    oid = digest(value)
    place = project.objects / oid[:2] / oid[2:]
    files = {
        folder / "report.json": b"{}",
        folder / "output.txt": b"printed lines",
        folder / "tree" / "out" / "model.bin": bytes(range(11)),
        folder / "tree" / "empty": b"",
        project.runs / "run" / "records-7-0.jsonl": b'{"origin":"run.abcd"}\n{"end":true}\n',
        place: value,
    }
    node = Node(files, fails)
    names = list(files)
    found = {
        "files": node.sized(names[:4]),
        "links": {str(folder / "tree" / "link"): "out/model.bin"},
        "deleted": [str(folder / "tree" / "old.txt")],
        "records": node.sized(names[4:5]),
    }
    return node, found, node.sized([place]), files


def everything(project):
    return {
        str(file.relative_to(project.root)): file.read_bytes()
        for file in project.store.rglob("*")
        if file.is_file()
    }


def test_published_results_have_their_final_names(project):
    node, found, values, files = brought(project)
    tree = project.replays / REPLAY / "tree"
    (tree / "old.txt").touch()
    (tree / "empty").symlink_to("/nowhere")
    results = staged_results(project, node)
    results.fetch(found, values)
    results.publish(project.replays / REPLAY / "report.json")
    results.close()
    for path, data in files.items():
        if "records" not in path.name:
            assert Path(path).read_bytes() == data
    records = [file.read_bytes() for file in (project.runs / "run").iterdir()]
    assert records == [files[project.runs / "run" / "records-7-0.jsonl"]]
    assert (tree / "link").readlink() == Path("out/model.bin")
    assert not (tree / "old.txt").exists()
    assert not (tree / "empty").is_symlink()
    assert not (project.replays / REPLAY / ".landing").exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_compressed_object_is_checked_by_the_hash_of_its_content(project, tmp_path, damaged):
    away = Project.create(tmp_path / "away")
    with Batch(Objects(away), CompressionPolicy()) as batch:
        ref = batch.put(bytes(1 << 20))
        batch.commit()
    data = Objects(away).file(ref).read_bytes()[: -1 if damaged else None]
    place = Objects(project).path(ref.oid)
    node = Node({place: data})
    results = staged_results(project, node)
    found = {"files": [], "links": {}, "deleted": [], "records": []}
    if damaged:
        with pytest.raises(SiteError, match="arrived damaged"):
            results.fetch(found, node.sized([place]))
        return
    results.fetch(found, node.sized([place]))
    results.publish(project.replays / REPLAY / "report.json")
    assert Objects(project).get(ref) == bytes(1 << 20)


def test_a_node_lost_during_any_chunk_leaves_nothing_in_the_store(project):
    before = everything(project)
    for step in range(20):
        node, found, values, _ = brought(project, fails=step)
        results = staged_results(project, node)
        try:
            results.fetch(found, values)
        except ConnectionError:
            results.close()
            assert everything(project) == before
        else:
            break
    assert step > 5


def test_fetched_records_get_a_file_name_that_is_free(project):
    for name in (f"records-{os.getpid()}-0.jsonl", f"records-{os.getpid()}-1.parquet"):
        (project.runs / "run" / name).write_text("another's")
    node, found, values, _ = brought(project)
    results = staged_results(project, node)
    results.fetch(found, values)
    results.publish(project.replays / REPLAY / "report.json")
    assert (project.runs / "run" / f"records-{os.getpid()}-0.jsonl").read_text() == "another's"
    assert (project.runs / "run" / f"records-{os.getpid()}-2.jsonl").exists()


def test_an_object_whose_content_does_not_match_its_hash_is_refused(project):
    node, found, values, _ = brought(project)
    node.files[values[0][0]] = b"another valu3!"
    with pytest.raises(SiteError, match="damaged"):
        staged_results(project, node).fetch(found, values)


@pytest.mark.parametrize("path", ["/etc/passwd", "{folder}/../other/report.json"])
def test_a_node_cannot_write_elsewhere(project, path):
    node, found, values, _ = brought(project)
    found["links"] = {path.format(folder=project.replays / REPLAY): "x"}
    with pytest.raises(SiteError, match="Do not trust"):
        staged_results(project, node).fetch(found, values)
