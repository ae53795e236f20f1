"""The tree shows the architecture only if imports keep to it."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "rearview"

# room -> rooms it may import, besides itself; `public` is the package's own face
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "model": {"errors"},
    "media": {"errors"},
    "source": {"model", "errors"},
    "plan": {"model", "errors"},
    "remote": {"model", "errors", "config"},
    "energy": {"model", "errors", "config"},
    "store": {"model", "media", "errors", "config", "source", "plan", "remote"},
    "runtime": {"model", "errors", "config", "source", "plan", "remote", "store", "energy"},
    "execute": {"model", "errors", "config", "source", "plan", "remote", "store"},
    "past": {
        *("model", "errors", "config", "source", "plan", "remote", "store", "execute"),
        "runtime.state.variables",  # reads a state as data: docs/decisions/state-as-data.md
    },
    "sites": {"errors"},
    "notebook": {"model", "errors", "config", "source", "plan", "store", "execute", "past"},
    "bridges": {"model", "media", "errors", "config", "store", "_history"},
    "frameworks": {"public"},
    "checkpointer": {"public", "frameworks"},
    "web": {"model", "errors", "config", "past", "store"},
    "cli": {
        *("model", "errors", "config", "past", "notebook", "web", "energy", "store", "remote"),
        *("sites", "bridges"),
    },
}
HEAVY = {
    "torch",
    "numpy",
    "ray",
    "pandas",
    "polars",
    "pyarrow",
    "duckdb",
    "rich",
    "fsspec",
    "keras",
    "lightning",
    "transformers",
    "starlette",
    "uvicorn",
    "submitit",
    "sklearn",
}
PURE_FORBIDS = {
    "os",
    "io",
    "time",
    "pathlib",
    "subprocess",
    "socket",
    "shutil",
    "random",
    "sys",
    "tempfile",
}


def room_of(path: Path) -> str:
    part = path.relative_to(SRC).parts[0]
    return part.removesuffix(".py")


def imports(path: Path, *, top_only: bool = False):
    tree = ast.parse(path.read_text())
    type_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "rearview":
                yield from (f"rearview.{alias.name}" for alias in node.names)


FILES = sorted(p for p in SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_room_imports_only_what_stands_before_it(path):
    room = room_of(path)
    if room in {"__init__", "__main__"}:
        return
    public = {p.name.removesuffix(".py") for p in SRC.iterdir()}
    for name in imports(path):
        if name.split(".")[0] != "rearview":
            continue
        parts = name.split(".")
        target = parts[1] if len(parts) > 1 and parts[1] in public else "public"
        if target == "public" and len(parts) == 1:
            continue
        allowed = target == room or target in MAY_IMPORT[room]
        assert allowed or ".".join(parts[1:]) in MAY_IMPORT[room], f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_heavy_libraries_are_imported_only_where_used(path):
    heavy = {n.split(".")[0] for n in imports(path, top_only=True)} & HEAVY
    if room_of(path) == "frameworks" or path.name == "show.py":
        return
    assert not heavy, f"{path} imports {heavy} at the top"


@pytest.mark.parametrize("room", ["source", "plan", "model", "sites"])
def test_pure_rooms_touch_nothing_outside(room):
    for path in (SRC / room).rglob("*.py"):
        found = {n.split(".")[0] for n in imports(path)} & PURE_FORBIDS
        assert not found, f"{path} imports {found}"
