"""Bring segments to Ray nodes that do not see the project's folder, and bring their results back.

A node gets the files that the segment needs and no more: its tree, its inputs, and the checkpoints that its
replay can reach. What all segments of a backfill share is sent once. Results are copied into the store all
or nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute import ray_node
from rearview.execute.executor import Task
from rearview.execute.scratch_tree import recorded_texts
from rearview.model import (
    Checkpoint,
    Control,
    Edge,
    LoopStep,
    Origin,
    ReplayReport,
    Run,
    SegmentFile,
)
from rearview.model.plan import VARIABLE, may_hold
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.objects import Objects, content_hash
from rearview.store.machine import process_identity
from rearview.store.project import Project
from rearview.store.runs import ACCOUNT, Runs

FAR = 1 << 62


class CheckpointUse(Enum):
    """What a replay does with a checkpoint."""

    RESTORED = "restored"
    """The state may be put back: every part of it is read."""
    COMPARED = "compared"
    """The state is compared with what was reached: large parts by their names alone, if equal."""
    ANCHORS = "anchors"
    """Only what the loop was entered with is looked up."""


@dataclass(frozen=True, slots=True)
class Touch:
    """A checkpoint that a replay can come to."""

    checkpoint: Checkpoint
    use: CheckpointUse


def touched(wanted: SegmentFile, checkpoints: Sequence[Checkpoint]) -> list[Touch]:
    """Return the checkpoints, in order, that a replay of `wanted` can come to.

    Those outside the stretch that it runs are left out. What is kept is enough to decide at
    every boundary as with all of them: where to begin, whether to wait for a proof, and when.
    """
    loops: dict[tuple[str, int], list[Checkpoint]] = {}
    out: list[Touch] = []
    for one in checkpoints:
        if not one.meta.path:
            out.append(Touch(one, CheckpointUse.RESTORED))
            continue
        site, ordinal, _ = one.meta.path[0]
        loops.setdefault((site, ordinal), []).append(one)
    for (site, _), group in loops.items():
        out += _of_loop(wanted, site, group)
    return sorted(out, key=lambda touch: touch.checkpoint.seq)


def _of_loop(wanted: SegmentFile, site: str, group: Sequence[Checkpoint]) -> Iterator[Touch]:
    ranges = wanted.ranges.get(site) if site == wanted.main else None
    begins: set[int] = set()
    spans = [(0, FAR)]
    if ranges is not None and _reached(wanted, [site]):
        starts = sorted(
            _index(one)
            for one in group
            if one.complete and one.edge == Edge.START and len(one.meta.path) == 1
        )
        jumps = wanted.jump and wanted.levels >= 1
        spans = list(_spans(sorted(ranges), starts, jumps=jumps))
        begins = {first for first, _ in spans} if jumps else set()
    anchored: dict[int, Checkpoint] = {}
    for one in sorted(group, key=lambda one: not one.complete):
        anchored.setdefault(one.meta.anchored, one)
    for one in group:
        after = one.edge == Edge.END and len(one.meta.path) == 1
        if after or any(first <= _index(one) <= last for first, last in spans):
            restored = one.complete and _restored(wanted, one, begins)
            yield Touch(one, CheckpointUse.RESTORED if restored else CheckpointUse.COMPARED)
        elif any(one is first for first in anchored.values()):
            yield Touch(one, CheckpointUse.ANCHORS)


def _spans(
    ranges: Sequence[tuple[int, int]], starts: Sequence[int], *, jumps: bool
) -> Iterator[tuple[int, int]]:
    """Yield where each stretch begins, and the checkpoint up to which it may wait for its proof.

    >>> list(_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=True))
    [(4, 9)]
    >>> list(_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=False))
    [(0, 9)]
    """
    at = 0
    for first, last in ranges:
        nearest = max((start for start in starts if start <= first), default=0)
        begin = max(at, nearest) if jumps else at
        yield begin, min((start for start in starts if start >= last), default=FAR)
        at = last


def _restored(wanted: SegmentFile, one: Checkpoint, begins: set[int]) -> bool:
    """Return True if a replay may put this state back, rather than only compare with it."""
    path = one.meta.path
    sites = [step.loop for step in path]
    limited = len(path) == 2 and sites[0] == wanted.main and sites[1] in wanted.ranges
    if not wanted.jump:
        return False
    if one.edge == Edge.START:
        if len(path) == 1:
            return _index(one) in begins
        return limited and len(path) <= wanted.levels
    needed = all(_in_range(wanted, path, level) for level in range(len(path) - 1))
    if not needed or not _reached(wanted, sites):
        return True
    return wanted.after if len(path) == 1 else limited


def _reached(wanted: SegmentFile, sites: Sequence[str]) -> bool:
    """Return True if something wanted may stand inside the loops `sites`."""
    return wanted.everywhere or any(may_hold(chain, sites) for chain in wanted.chains)


def _in_range(wanted: SegmentFile, path: Sequence[LoopStep], level: int) -> bool:
    """Return True if the iteration of one loop of a path is wanted."""
    if path[0].loop != wanted.main or level > 1:
        return True
    ranges = wanted.ranges.get(path[level].loop)
    index = path[level].iteration
    return ranges is None or any(first <= index < last for first, last in ranges)


def _index(one: Checkpoint) -> int:
    return one.meta.path[0].iteration


_SMALL = ("roots", "skeleton", "anchors")
"""Parts that a comparison always reads."""
_NOT_READ = {"replays.jsonl", "heartbeat", ACCOUNT}
"""Files of a run that no replay of it reads."""


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """One file or link, as it is to stand on the node."""

    path: str
    size: int
    mode: int
    mtime: int
    """Nanoseconds."""
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Cargo:
    """All that one segment needs."""

    root: Path
    run: str
    replay: str
    folders: tuple[Path, ...]
    """Folders of the replay; what it changes there is its own."""
    own: tuple[ShippedFile, ...]
    """Its scratch tree and segment file."""
    shared: tuple[ShippedFile, ...]
    """What other segments read too: the run, its checkpoints, inputs that the tree links to."""
    spared: tuple[ShippedFile, ...]
    """Large parts of checkpoints that are only read if the replay differs from them."""
    outside: tuple[str, ...]
    """Files outside the project that the run read; they do not travel."""


def segment_of(task: Task) -> Path | None:
    """Return the segment file of a task; None for one that replays nothing."""
    told = task.environment.get(VARIABLE)
    if told is None:
        return None
    segment = msgspec.json.decode(told, type=Control).segment
    return None if segment is None else Path(segment)


def home_of(project: Project) -> str:
    """Return what tells this store from one that stands at the same path elsewhere."""
    about, here = project.store.stat(), process_identity(0)
    return f"{here['host']} {here['boot']} {about.st_dev} {about.st_ino}"


def pack(task: Task, checkpoints: Checkpoints) -> Cargo:
    """Return what `task` needs of the project that `checkpoints` belong to."""
    project = checkpoints.project
    segment = segment_of(task)
    assert segment is not None
    wanted = msgspec.json.decode(segment.read_bytes(), type=SegmentFile)
    run = Runs(project).get(wanted.run)
    tree = Path(wanted.tree)
    own = [_entry(segment), *_tree(tree), *_tree(recorded_texts(tree))]
    linked = [Path(one.link) for one in own if one.link and one.link.startswith(os.sep)]
    shared = {entry.path: entry for entry in _inside(project.root, linked)}
    needed, spared = _parts(checkpoints, touched(wanted, checkpoints.of(run.id)))
    for path in (*_store(project, run), *needed):
        shared[str(path)] = _entry(path)
    return Cargo(
        root=project.root,
        run=run.id,
        replay=wanted.replay,
        folders=tuple(dict.fromkeys((segment.parent, tree.parent))),
        own=tuple(own),
        shared=tuple(shared.values()),
        spared=tuple(_entry(path) for path in spared),
        outside=tuple(_outside(project.root, run)),
    )


def _store(project: Project, run: Run) -> Iterator[Path]:
    """Yield the files of the store that every replay of a run reads."""
    yield project.store / "format"
    if (project.store / "config.toml").is_file():
        yield project.store / "config.toml"
    for entry in sorted(os.scandir(project.runs / run.id), key=lambda entry: entry.name):
        if entry.name in _NOT_READ or entry.name.startswith(".") or not entry.is_file():
            continue
        if entry.name.endswith(".jsonl") and entry.name.startswith("records-"):
            with Path(entry.path).open("rb") as file:
                head = file.readline(1 << 20)
            if origin_of(head) != Origin.RECORDED:
                continue  # another replay's
        yield Path(entry.path)


def origin_of(head: bytes) -> str:
    """Return whose records a file holds, by its first line."""
    try:
        return str(msgspec.json.decode(head).get("origin", ""))
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return ""


def _parts(checkpoints: Checkpoints, touches: Iterable[Touch]) -> tuple[list[Path], list[Path]]:
    """Return the files of checkpoints that are read, and those that are read only in doubt."""
    needed: dict[Path, None] = {}
    doubtful: dict[Path, None] = {}
    folder, objects = checkpoints.project.checkpoints, checkpoints.objects
    for touch in touches:
        one = touch.checkpoint
        needed[folder / one.run / f"{one.seq:08d}.json"] = None
        table = checkpoints.table(one)
        if table is not None:
            needed[objects.file(table)] = None
        for key, ref in one.parts.items():
            read = touch.use is CheckpointUse.RESTORED or key in _SMALL
            packed = ref.pack is not None and touch.use is CheckpointUse.COMPARED
            (needed if read or packed else doubtful)[objects.file(ref)] = None
    return list(needed), [path for path in doubtful if path not in needed]


def _tree(tree: Path) -> Iterator[ShippedFile]:
    for folder, folders, names in os.walk(tree):
        for name in sorted(
            (*names, *(name for name in folders if Path(folder, name).is_symlink()))
        ):
            entry = _entry(Path(folder, name))
            if stat.S_ISREG(entry.mode) or entry.link is not None:
                yield entry


def _inside(root: Path, linked: Iterable[Path]) -> Iterator[ShippedFile]:
    """Yield the files that links lead to, as far as they lie in the project."""
    seen: set[Path] = set()
    todo = list(linked)
    while todo:
        path = todo.pop()
        if path in seen or root not in path.parents or not os.path.lexists(path):
            continue
        seen.add(path)
        entry = _entry(path)
        if stat.S_ISDIR(entry.mode):
            yield from _tree(path)
            continue
        yield entry
        if entry.link is not None:  # the user's own, which leads on
            todo.append(Path(os.path.normpath(path.parent / entry.link)))


def _entry(path: Path) -> ShippedFile:
    about = path.lstat()
    link = str(path.readlink()) if stat.S_ISLNK(about.st_mode) else None
    return ShippedFile(str(path), about.st_size, about.st_mode, about.st_mtime_ns, link)


def _outside(root: Path, run: Run) -> Iterator[str]:
    inputs = run.end.inputs
    for path in inputs:
        now = run.now(path, str(root))
        if root not in Path(now).parents:
            yield path


CHUNK = 64 << 20
"""Bytes that travel at once."""
SMALL = 1 << 20
"""Files below this travel together, without a place of their own in Ray's store."""
KEPT = 16 * CHUNK
"""Bytes that stay in Ray's store for other nodes; older ones are put again when asked for."""


@dataclass
class Pieces:
    """Parts of files in Ray's object store, each put there once while it is remembered."""

    _refs: OrderedDict[tuple[str, int, int], tuple[Any, int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0

    def get(self, entry: ShippedFile, at: int) -> Any:
        """Return a part of a file: its bytes if they are few, else where Ray keeps them."""
        import ray

        if entry.size < SMALL:
            return _read(entry, at)
        key = (entry.path, entry.mtime, at)
        with self._lock:
            if key not in self._refs:
                data = _read(entry, at)
                self._refs[key] = (ray.put(data), len(data))
                self._size += len(data)
            self._refs.move_to_end(key)
            while self._size > KEPT:
                _, (_, size) = self._refs.popitem(last=False)
                self._size -= size
            return self._refs[key][0]


class Carrier:
    """What all segments of one backfill share: what was put, and where room was made."""

    def __init__(self, gpus: float) -> None:
        import ray

        for module in (ray_node, ray_node):
            ray.cloudpickle.register_pickle_by_value(module)
        self.gpus = gpus
        self.away = False
        """A node was met that does not see the project."""
        self.pieces = Pieces()
        self.lock = threading.Lock()
        self._nodes: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._keepers: dict[str, Any] = {}
        self._stores: dict[Path, Checkpoints] = {}
        self._aboard = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(ray_node.Aboard)
        self._keeper = ray.remote(num_cpus=0, max_restarts=0)(ray_node.Keeper)

    def place(self) -> Any:
        """Return a place for one segment, wherever Ray has room; it holds its share there."""
        return self._aboard.remote()

    def pack(self, task: Task) -> tuple[Project, Cargo]:
        """Return what a task needs, and whose it is."""
        segment = segment_of(task)
        assert segment is not None
        root = segment.parents[3]
        with self.lock:
            store = self._stores.setdefault(root, Checkpoints(Project(root)))
            return store.project, pack(task, store)

    def node(self, name: str) -> threading.RLock:
        """Return what is held while things are laid out that segments on a node share."""
        with self.lock:
            return self._nodes[name]

    def keep(self, project: Project, look: dict[str, Any]) -> Any:
        """Return who holds the folder on a node, making room for it there if nobody does yet."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = look["node"]
        with self.node(node):
            if node not in self._keepers:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                one = self._keeper.options(scheduling_strategy=there).remote()
                refusal = ray.get(one.begin.remote(str(project.root), home_of(project)))
                if refusal is not None:
                    ray.kill(one)
                    raise SiteError(
                        f"The node {look['host']} of the Ray cluster does not see {project.root}, "
                        f"and what a replay needs cannot be laid out there: {refusal}. Make that "
                        "path free and writable on the node, or share the folder with it.",
                        slug="ray-node",
                    )
                self._keepers[node] = one
            return self._keepers[node]

    def forget(self, look: dict[str, Any], lost: Any) -> None:
        """Let room be made anew on a node whose keeper was lost."""
        with self.node(look["node"]):
            if self._keepers.get(look["node"]) is lost:
                del self._keepers[look["node"]]

    def close(self) -> None:
        """Remove what was laid out on all nodes."""
        import ray

        for one in self._keepers.values():
            # one that went with its node was watched, and what is left is removed there
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(one.end.remote(), timeout=60)
            ray.kill(one)
        self._keepers.clear()


def _read(entry: ShippedFile, at: int) -> bytes:
    count = min(CHUNK, entry.size - at)
    with Path(entry.path).open("rb") as file:
        data = os.pread(file.fileno(), count, at)
    if len(data) < count:
        raise FileNotFoundError(entry.path)  # it was replaced by a shorter one
    return data


Read = Callable[[list[tuple[str, int, int]]], list[bytes]]
"""Returns pieces of files on the node: path, position and length each."""
Sized = tuple[str, int, int]
"""Path on the node, size and mode."""


@dataclass
class Landing:
    """What was fetched from the node and stands aside until all of it is there.

    Nothing of the store is changed before `publish`; left without it, nothing stays.
    """

    project: Project
    cargo: Cargo
    read: Read
    chunk: int

    def __post_init__(self) -> None:
        self.aside = self.cargo.folders[0] / ".landing"
        self.objects = Objects(self.project)
        self.files: dict[Path, Path] = {}
        """Where they go -> where they stand aside."""
        self.records: list[Path] = []
        self.values: dict[str, Path] = {}
        self.links: dict[Path, str] = {}
        self.deleted: list[Path] = []
        self._count = 0

    def fetch(self, found: dict[str, Any], values: Sequence[Sized]) -> None:
        """Bring everything here, piece by piece; `values` are objects that are new to us."""
        files = [(self._mine(path), (path, size, mode)) for path, size, mode in found["files"]]
        self.links = {self._mine(path): link for path, link in found["links"].items()}
        self.deleted = [self._mine(path) for path in found["deleted"]]
        self.aside.mkdir(parents=True, exist_ok=True)
        staged = self._stage([sized for _, sized in files])
        self.files = {target: file for (target, _), file in zip(files, staged, strict=True)}
        self.records = list(self._stage(found["records"]))
        for (path, _, _), file in zip(values, self._stage(values), strict=True):
            oid = "".join(Path(path).parts[-2:])
            if not _holds(file, oid):
                raise SiteError(
                    f"Object {oid[:12]}, which the replay {self.cargo.replay} logged, came damaged "
                    "from its node. Ask for the backfill again.",
                    slug="ray-node",
                )
            self.values[oid] = file

    def publish(self, last: Path) -> None:
        """Give everything its name: objects before the records that name them, `last` at the end."""
        for oid, file in self.values.items():
            target = self.objects.path(oid)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
        for target in self.deleted:
            with contextlib.suppress(OSError):
                target.unlink()
        for target, link in self.links.items():
            _make_way(target)
            target.symlink_to(link)
        for target in sorted(self.files, key=lambda target: target == last):
            if target == last:
                self._publish_records()
            _make_way(target)
            self.files[target].replace(target)
        self._publish_records()

    def close(self) -> None:
        """Remove what still stands aside."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def _publish_records(self) -> None:
        folder = self.project.runs / self.cargo.run
        while self.records:
            file, n = self.records[0], 0
            while True:  # another process here may have had the same number
                target = folder / f"records-{os.getpid()}-{n}.jsonl"
                n += 1
                if target.with_suffix(".parquet").exists():
                    continue
                with contextlib.suppress(FileExistsError):
                    target.touch(exist_ok=False)
                    break
            file.replace(target)
            self.records.pop(0)

    def _stage(self, files: Sequence[Sized]) -> list[Path]:
        """Return copies of files of the node, fetched so many bytes at a time."""
        out = []
        for _, _, mode in files:
            out.append(self.aside / str(self._count))
            self._count += 1
            out[-1].touch()
            out[-1].chmod(stat.S_IMODE(mode) | stat.S_IWUSR)
        places = {path: file for (path, _, _), file in zip(files, out, strict=True)}
        for batch in _batches(files, self.chunk):
            for (path, _, _), data in zip(batch, self.read(batch), strict=True):
                with places[path].open("ab") as file:
                    file.write(data)
        return out

    def _mine(self, path: str) -> Path:
        """Return `path` if it lies in the replay's own folders; a node writes nothing else."""
        if (
            not any(folder in Path(path).parents for folder in self.cargo.folders)
            or ".." in Path(path).parts
        ):
            raise SiteError(
                f"A node brings {path} as a result of the replay {self.cargo.replay}, whose folder "
                f"is {self.cargo.folders[0]}. Do not trust that node.",
                slug="ray-node",
            )
        return Path(path)


def _holds(file: Path, oid: str) -> bool:
    try:
        return content_hash(file) == oid
    except OSError:
        return False


def _make_way(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink():
        target.unlink()


def _batches(files: Sequence[Sized], chunk: int) -> Iterator[list[tuple[str, int, int]]]:
    """Yield pieces (path, position, length) of files, in groups of about `chunk` bytes.

    >>> list(_batches([("a", 5, 0), ("b", 2, 0), ("c", 0, 0)], 3))
    [[('a', 0, 3)], [('a', 3, 2), ('b', 0, 2)]]
    """
    batch: list[tuple[str, int, int]] = []
    size = 0
    for path, whole, _ in files:
        for at in range(0, whole, chunk):
            batch.append((path, at, min(chunk, whole - at)))
            size += batch[-1][2]
            if size >= chunk:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


TRIES = 3
"""How often a segment is packed anew whose files were replaced meanwhile: records get sealed."""


class Passage:
    """One segment on its way to a node, there, and back."""

    def __init__(self, carrier: Carrier, task: Task) -> None:
        self.carrier = carrier
        self.task = task
        self._place: Any = carrier.place()
        self._stopped = False
        self._lock = threading.Lock()
        self._code: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, name=f"rearview-{task.id}", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it is still under way after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._code

    def stop(self) -> None:
        """End it, now. What has not landed by then never does."""
        import ray

        with self._lock:
            self._stopped = True
        ray.kill(self._place)
        self._thread.join(10.0)

    def _go(self) -> None:
        import ray

        try:
            self._code = self._travel()
        except ray.exceptions.RayTaskError as exc:
            last = str(exc).strip().splitlines()[-1]
            self._error = SiteError(
                f"A node of the Ray cluster could not run the replay {self.task.id}: {last}. See "
                "that the node has room on its disk; or share the project's folder with it.",
                slug="ray-node",
            )
        except ray.exceptions.RayError:
            self._code = -1  # its worker or node was lost, or it was stopped
        except BaseException as exc:
            self._error = exc
        finally:
            if not self._stopped:
                ray.kill(self._place)

    def _travel(self) -> int:
        import ray

        sign = sign_of(self.task)
        assert sign is not None
        project, cargo = self.carrier.pack(self.task)
        outside = [self.task.command[0], *cargo.outside]
        if cargo.root not in self.task.folder.parents:
            outside.append(str(self.task.folder))
        look = self._ask("look", sign, outside)
        if look["seen"]:
            return int(self._ask("run", *self._words(), []))
        if look["lost"]:
            raise SiteError(
                f"The node {look['host']} of the Ray cluster has no {look['lost'][0]}, which the "
                f"run {cargo.run} needs and which lies outside the project {cargo.root}. What lies "
                "outside does not travel: bring it to the node, or share it.",
                slug="ray-node",
            )
        keeper = self.carrier.keep(project, look)
        try:
            return self._replay(project, cargo, look, keeper)
        except ray.exceptions.RayError:
            self._check(keeper, look)
            raise

    def _replay(self, project: Project, cargo: Cargo, look: dict[str, Any], keeper: Any) -> int:
        where = ([str(folder) for folder in cargo.folders], str(project.store))
        whose = (cargo.run, cargo.replay)
        whole = False
        while True:
            cargo = self._lay_out(cargo, look, whole=whole)
            code = int(self._ask("run", *self._words(), where[0]))
            landing = Landing(project, cargo, lambda pieces: self._ask("read", pieces), CHUNK)
            try:
                found = self._ask("found", *where, *whose)
                new = [oid for oid in found["objects"] if not landing.objects.has(oid)]
                values = self._ask("sized", [str(landing.objects.path(oid)) for oid in new])
                landing.fetch(found, values)
                if not whole and cargo.spared and _differs(landing.files.get(self.task.report)):
                    whole = True  # what it differs from was not there to be looked at
                    self._ask("clear", *where, *whose)
                    continue
                self._check(keeper, look)
                with self._lock:
                    if self._stopped:
                        return -1
                    landing.publish(self.task.report)
            finally:
                landing.close()
            self._ask("clear", *where, *whose)
            return code

    def _lay_out(self, cargo: Cargo, look: dict[str, Any], *, whole: bool) -> Cargo:
        """Lay out what is needed, `whole` with what was spared; return what that was."""
        for left in reversed(range(TRIES)):
            try:
                needed = (*cargo.shared, *cargo.spared) if whole else cargo.shared
                self._fill(cargo, needed, look)
                break
            except FileNotFoundError:
                if not left:
                    raise
                _, cargo = self.carrier.pack(self.task)
        return cargo

    def _fill(self, cargo: Cargo, needed: Sequence[ShippedFile], look: dict[str, Any]) -> None:
        with self.carrier.node(look["node"]):
            told = [(one.path, one.size, one.link) for one in needed]
            self._bring(needed[k] for k in self._ask("lacks", told))
        self._bring(cargo.own)

    def _bring(self, entries: Iterable[ShippedFile]) -> None:
        """Lay entries out on the node, so many bytes at a time."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for one in entries:
            about = (one.path, one.size, one.mode, one.mtime, one.link)
            for at in range(0, max(1, one.size), CHUNK):
                data = b"" if one.link is not None else self.carrier.pieces.get(one, at)
                batch.append((*about, at, data))
                size += min(CHUNK, one.size - at)
                if size >= CHUNK:
                    self._ask("take", batch)
                    batch, size = [], 0
        if batch:
            self._ask("take", batch)

    def _words(self) -> tuple[Any, ...]:
        task = self.task
        where = (str(task.folder), str(task.log))
        return (list(task.command), dict(task.environment), *where, bool(self.carrier.gpus))

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        if self._stopped:  # the cluster may have been left, and is not to be joined again
            raise ray.exceptions.RayError
        return ray.get(getattr(self._place, method).remote(*args))

    def _check(self, keeper: Any, look: dict[str, Any]) -> None:
        """Take nothing for true that was done in a folder that may have been removed meanwhile."""
        import ray

        try:
            ray.get(keeper.there.remote())
        except ray.exceptions.RayError:
            self.carrier.forget(look, keeper)
            raise


def sign_of(task: Task) -> tuple[str, bytes] | None:
    """Return the file by which a node shows that it sees the project; None if it need not."""
    segment = segment_of(task)
    return None if segment is None else (str(segment), segment.read_bytes())


def _differs(report: Path | None) -> bool:
    """Return True if a replay found a difference, or something that it could not restore."""
    if report is None:
        return False
    try:
        said = msgspec.json.decode(report.read_bytes(), type=ReplayReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return said.retry or said.difference is not None
