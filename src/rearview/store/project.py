"""A project and its store: find or create the `.rearview` folder; its layout and its format number."""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rearview.config import Settings
from rearview.durable_files import sync_folder
from rearview.errors import StoreError
from rearview.store import trust
from rearview.store.create_files import GROUP, OWNER, make_folder, make_store_folder, publish

FOLDER = ".rearview"
EVENT_FILES = "tensorboard"
"""Folder of the store with TensorBoard event files of backfilled values: one subfolder per run, in it one per replay."""
FORMAT = 2
"""Newest format of a store that this Rearview can read. A store with a higher format is refused."""
MARK = "carried"
"""Name of the file in a store which says that the store is a copy on a node of a cluster."""
PLAIN, COMPRESSED = 1, 2
"""Formats of a store without and with compressed objects; a new store has the format `PLAIN`."""


@dataclass(frozen=True, slots=True)
class Project:
    """A folder of code with its store.

    ::

        .rearview/
          format                       the format number
          identity.json                which store this is (`store.trust`), and its format again
          .gitignore                   *
          config.toml                  settings (optional)
          objects/ab/cdef…             large parts, named by their BLAKE3 hash; some compressed
          packs/<run>/<seq>-<x>.pack   small parts of one checkpoint
          checkpoints/<run>/<seq>.json manifests; renamed into place last
          runs/<run>/run.json          the start of the run: its version, command, process
          runs/<run>/heartbeat         its mtime is the last sign of life
          runs/<run>/end.json          how the run ended
          runs/<run>/events.jsonl      what was added later: arguments, resumptions, labels
          runs/<run>/replays.jsonl     replays of the run, and whether each was proved exact
          runs/<run>/clock.bin         the times that the program read, eight bytes each
          runs/<run>/printed.jsonl     the lines that the run printed, with their points
          runs/<run>/energy.jsonl      when the run was active, and the energy that it used
          runs/<run>/records-*.jsonl   records, one file per process
          runs/<run>/records-*.parquet records converted to Parquet; the JSON lines are removed
          corrections.json             positions that the user gave for statements in past versions
          versions.git/                source, where the project has no git
          replays/                     outputs of replays
          backfills/                   running backfills, and how many workers they should have
          writing/                     one file per save in flight (`store.checkpoints.checkpoints.save_in_flight`)
          damaged/                     damaged files that `verify` moved away
          cache/                       anything here can be deleted
    """

    root: Path

    @property
    def store(self) -> Path:
        """The `.rearview` folder."""
        return self.root / FOLDER

    @property
    def objects(self) -> Path:
        """Folder of objects."""
        return self.store / "objects"

    @property
    def packs(self) -> Path:
        """Folder of packs: files that hold the small parts of checkpoints."""
        return self.store / "packs"

    @property
    def checkpoints(self) -> Path:
        """Folder of manifests, one subfolder per run."""
        return self.store / "checkpoints"

    @property
    def runs(self) -> Path:
        """Folder with one subfolder per run."""
        return self.store / "runs"

    @property
    def replays(self) -> Path:
        """Folder of the outputs of replays, one subfolder per replay."""
        return self.store / "replays"

    @property
    def writing(self) -> Path:
        """Folder with one file for each save of a checkpoint that is in progress."""
        return self.store / "writing"

    @property
    def damaged(self) -> Path:
        """Folder of damaged files that `verify` moved away."""
        return self.store / "damaged"

    @property
    def cache(self) -> Path:
        """Folder of caches, which may be deleted at any time."""
        return self.store / "cache"

    @classmethod
    def find(cls, start: Path) -> Project | None:
        """Return the project of the nearest folder with a store, from `start` upwards, or None if there is none."""
        start = start.resolve()
        for folder in (start, *start.parents):
            if (folder / FOLDER / "format").is_file():
                project = cls(folder)
                project.check()
                return project
        return None

    @classmethod
    def open(cls, start: Path) -> Project:
        """Return the project of the nearest folder with a store, from `start` upwards; raise if there is none."""
        project = cls.find(start)
        if project is None:
            below = _project_below(start)
            do = (
                f"There is one in {below}: `cd {shlex.quote(str(below))}`, then ask again."
                if below is not None
                else "Record a run first: `rearview run train.py`. If you did, go to the folder of that "
                "script."
            )
            raise StoreError(
                f"There is no {FOLDER} folder in {start} or above it, so there is no history. {do}",
                slug="no-store",
            )
        trust.check_links(project.store, Settings.read(project.store).trust)
        return project

    @classmethod
    def create(cls, root: Path) -> Project:
        """Return the project at `root`; create its store if there is none."""
        project = cls(root.resolve())
        shared = Settings.read(project.store).shared
        mode = GROUP if shared == "group" else OWNER
        if (project.store / "format").is_file():
            project.check()
            trust.check_links(project.store, Settings.read(project.store).trust)
            with contextlib.suppress(OSError):  # the file system may not support modes
                make_store_folder(project.store, mode)
            return project
        try:
            make_store_folder(project.store, mode)
            # a folder that already held more than settings may come from a stranger, and is not trusted
            new = {entry.name for entry in project.store.iterdir()} <= {"config.toml", MARK}
            for folder in (project.objects, project.packs, project.checkpoints, project.runs):
                make_folder(folder)
            publish(project.store / ".gitignore", b"*\n", durable=False)
            if new:
                trust.create_identity(project.store, PLAIN)
            publish(project.store / "format", b"%d\n" % PLAIN, durable=False)
        except OSError as exc:
            raise StoreError(
                f"No store can be created in {root}: {exc.strerror or exc}. Make the folder writable, "
                "or copy the project to a folder that is writable.",
                slug="store-unwritable",
            ) from exc
        return project

    def check(self) -> int:
        """Return the format of the store; raise if it cannot be read, or is newer than this Rearview."""
        file = self.store / "format"
        try:
            text = file.read_text("ascii").strip()
            number = int(text)
        except (OSError, ValueError) as exc:
            raise StoreError(
                f"{file} cannot be read as a format number ({exc}). If the folder is readable, "
                "`rearview verify --repair` rewrites it.",
                slug="store-unreadable",
            ) from exc
        layout = trust.layout_of(self.store) if number > FORMAT else None
        if layout is not None and layout <= FORMAT and _differ_in_one_bit(text, str(layout)):
            raise StoreError(
                f"The store {self.store} has format {number}; this Rearview reads up to {FORMAT}. "
                f"Upgrade with `pip install --upgrade rearview`; or, as its {trust.FILE} says "
                f"{layout}, the number is damaged, and `rearview verify --repair` rewrites it.",
                slug="store-unreadable",
            )
        if number > FORMAT:
            raise StoreError(
                f"The store {self.store} has format {number}; this Rearview reads up to {FORMAT}. "
                "Upgrade with `pip install --upgrade rearview`.",
                slug="store-newer",
            )
        return number

    def needs(self, number: int) -> None:
        """Increase the format of the store to `number` if it is lower, so that an older Rearview refuses the store."""
        if self.check() < number:
            trust.store_layout(self.store, number)
            publish(self.store / "format", b"%d\n" % number)
            sync_folder(self.store)


def _differ_in_one_bit(a: str, b: str) -> bool:
    """Return True if two texts differ in a single bit.

    >>> _differ_in_one_bit("3", "1"), _differ_in_one_bit("99", "1")
    (True, False)
    """
    pairs = zip(a.encode(), b.encode(), strict=False)
    return len(a) == len(b) and sum((x ^ y).bit_count() for x, y in pairs) == 1


def root_of(script: Path) -> Path:
    """Return the folder of the project to which a script belongs.

    This is the nearest folder above the script that has a store. If there is no store, it is the top of the git
    repository, if the script adds a folder above its own to `sys.path`; else the current folder, if it contains
    the script; else the folder of the script. The environment variable REARVIEW_ROOT overrides all this.
    """
    root_setting = os.environ.get("REARVIEW_ROOT")
    if root_setting:
        return Path(root_setting).resolve()
    project = Project.find(script.parent)
    if project is not None:
        return project.root
    current = Path.cwd().resolve()
    usual = current if current in script.resolve().parents else script.resolve().parent
    return _repository_imported_from(script.resolve(), usual) or usual


def _repository_imported_from(script: Path, below: Path) -> Path | None:
    """Return the top of the git repository around `below` if the script imports from folders above `below`, else None."""
    top = repository_top(below)
    if top is None or top == below:
        return None
    try:
        text = script.read_text("utf-8")
    except (OSError, ValueError):
        return None
    return top if imports_from_above(text) else None


def imports_from_above(text: str) -> bool:
    r"""Return True if a script changes `sys.path` and computes a folder above its own.

    >>> imports_from_above("import sys\nsys.path.append('../..')\nfrom lib import step\n")
    True
    >>> imports_from_above("import sys\nroot = Path(__file__).parents[1]\nsys.path.insert(0, str(root))\n")
    True
    >>> imports_from_above("sys.path.append('tools')\n"), imports_from_above("open('../data.csv')\n")
    (False, False)
    """
    from rearview.source.text import try_parse

    parsed = try_parse(text)
    if isinstance(parsed, str):
        return False
    nodes = list(ast.walk(parsed.tree))
    return any(map(_changes_sys_path, nodes)) and sum(map(_folders_up, nodes)) >= 2


def _is_sys_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _changes_sys_path(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in {"append", "extend", "insert"} and _is_sys_path(node.func.value)
    if isinstance(node, ast.Assign):
        return any(
            _is_sys_path(getattr(target, "value", target)) for target in node.targets
        ) or any(map(_is_sys_path, node.targets))
    return isinstance(node, ast.AugAssign) and _is_sys_path(node.target)


def _folders_up(node: ast.AST) -> int:
    """Return how many folders up from a script the AST node `node` leads, not counting its inner nodes.

    This is 1 for `dirname` and `.parent`, which lead to the script's own folder, 2 for `..` and `parents`, else 0.
    """
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        return 2 if ".." in text.replace("\\", "/").split("/") else 0
    if isinstance(node, ast.Attribute):
        return {"parents": 2, "pardir": 2, "parent": 1, "dirname": 1}.get(node.attr, 0)
    return int(isinstance(node, ast.Name) and node.id == "dirname")


def repository_top(folder: Path) -> Path | None:
    """Return the top folder of the git repository around `folder`, or None if there is no repository to use.

    A repository whose top is the home folder or `/` is not used: people keep settings there under git, and the
    folder holds more than one project.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - `Path.home` raises where there is none
    for above in (folder, *folder.parents):
        if (above / ".git").exists():
            return None if above in {home, Path(above.anchor)} else above
    return None


_MOST_FOLDERS = 200
"""Most folders in which a project is searched, to name it in an error message."""


def _project_below(start: Path) -> Path | None:
    """Return the path, relative to `start`, of the only project directly below `start`.

    Return None if there is no project or more than one.
    """
    try:
        folders = list(islice(start.iterdir(), _MOST_FOLDERS))
    except OSError:
        return None
    projects = [folder for folder in folders if (folder / FOLDER / "format").is_file()]
    return Path(projects[0].name) if len(projects) == 1 else None
