"""Which module of the package imports which, read from the source: for the tests of layers and the picture."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "rearview"
PUBLIC = "public"
"""Stands for the package's own face, `import rearview`."""


@dataclass(frozen=True)
class Import:
    """One import statement."""

    importer: str
    """Module, dotted, without `rearview.`; the face is `__init__`."""
    imported: str
    """Module, dotted as well; of another package, its full name."""
    own: bool
    """It imports a module of this package."""
    at_top: bool
    """It is executed when the module is imported: not in a function, not only for types."""


def module_of(path: Path) -> str:
    """Return the dotted name of a file: `store.runs`, `model` for `model/__init__.py`."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


def room_of(module: str) -> str:
    """Return the folder that a module is in, such as `source/probes`; a module of the face itself.

    >>> room_of("source.probes.find"), room_of("model"), room_of("errors")
    ('source/probes', 'model', 'errors')
    """
    folder = MODULES[module].parent
    if folder == SRC:
        return module
    return folder.relative_to(SRC).as_posix()


def imports_of(module: str) -> Iterator[Import]:
    """Yield every import of a module, those in functions and for types included."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for name in _names(node, module):
            own = name == "rearview" or name.startswith("rearview.")
            inner = name.removeprefix("rearview").lstrip(".")
            target = (inner if inner in MODULES else PUBLIC) if own else name
            yield Import(module, target, own, id(node) in top)


def _names(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: relative import"
        base = node.module or ""
        for alias in node.names:
            inner = f"{base}.{alias.name}".removeprefix("rearview.")
            yield f"{base}.{alias.name}" if inner in MODULES else base


@functools.cache
def all_imports() -> tuple[Import, ...]:
    """Return every import of every module."""
    return tuple(each for module in MODULES for each in imports_of(module))


@functools.cache
def own_imports() -> tuple[Import, ...]:
    """Return the imports of modules of this package."""
    return tuple(each for each in all_imports() if each.own)


def named_modules(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module names in a string: to load or look up at run time."""
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value.removeprefix("rearview.")
            if node.value.startswith("rearview.") and named in MODULES:
                yield named


def room_edges() -> dict[str, dict[str, int]]:
    """Return how many imports lead from each room to each other room."""
    edges: dict[str, dict[str, int]] = {}
    for each in own_imports():
        room = room_of(each.importer)
        target = PUBLIC if each.imported == PUBLIC else room_of(each.imported)
        if room != target:
            counts = edges.setdefault(room, {})
            counts[target] = counts.get(target, 0) + 1
    return edges


def cycles() -> list[frozenset[str]]:
    """Return each set of modules that import one another, imports in functions included."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in own_imports():
        if each.imported in graph and each.imported != each.importer:
            graph[each.importer].add(each.imported)
    reach = {module: _reached(graph, module) for module in graph}
    found = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(found, key=sorted)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    remaining = list(graph[start])
    while remaining:
        module = remaining.pop()
        if module not in reached:
            reached.add(module)
            remaining.extend(graph[module])
    return reached
