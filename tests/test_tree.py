"""A newcomer finds a module by its path: few files in a folder, few levels, one meaning for each name."""

import ast
from collections import Counter, defaultdict

from imports import MODULES, SRC, own_imports, room_of

MOST_FILES = 16
DEEPEST = 3
SMALL = 90
"""Lines below which a module is read as a paragraph of the one that imports it."""

CROWDED: dict[str, str] = {}
"""Folders with more files than that, with the reason. It only shrinks."""

SHARED_STEMS: dict[str, str] = {}
"""Stems of modules in more than two rooms, with the reason. It only shrinks."""

SATELLITES: dict[str, str] = {}
"""Small modules with one importer, in the same room, with the reason. It only shrinks."""

SHARED_CLASSES = {
    "RearviewCallback": "each framework calls its callbacks by their class",
}
"""Class names with more than one meaning, with the reason. It only shrinks."""


def folders():
    files = defaultdict(list)
    for path in MODULES.values():
        if path.name != "__init__.py":
            files[path.parent].append(path.name)
    return files


def test_a_folder_holds_few_files():
    crowded = {
        str(folder.relative_to(SRC)): len(names)
        for folder, names in folders().items()
        if len(names) > MOST_FILES
    }
    assert set(crowded) == set(CROWDED), crowded


def test_no_folder_is_deep():
    deep = [folder for folder in folders() if len(folder.relative_to(SRC).parts) > DEEPEST]
    assert not deep


def test_a_small_module_is_not_a_satellite_of_one_other():
    importers = defaultdict(set)
    for each in own_imports():
        if each.imported in MODULES and each.imported != each.importer:
            importers[each.imported].add(each.importer)
    satellites = {
        module
        for module, path in MODULES.items()
        if path.name != "__init__.py"
        and len(path.read_text("utf-8").splitlines()) < SMALL
        and {room_of(importer) for importer in importers[module]} == {room_of(module)}
        and len(importers[module]) == 1
    }
    assert satellites == set(SATELLITES), satellites ^ set(SATELLITES)


def test_a_stem_means_one_thing():
    rooms = defaultdict(set)
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            rooms[path.stem].add(module.rpartition(".")[0])
    shared = {stem for stem, homes in rooms.items() if len(homes) > 2}
    assert shared == set(SHARED_STEMS), shared ^ set(SHARED_STEMS)


def test_a_class_name_means_one_thing():
    counts = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    shared = {name for name, count in counts.items() if count > 1}
    assert shared == set(SHARED_CLASSES), shared ^ set(SHARED_CLASSES)


def test_a_package_offers_no_name_that_one_of_its_modules_has():
    # importing the module would put it in the place of what the package offers
    for path in SRC.rglob("__init__.py"):
        stems = {each.stem for each in path.parent.iterdir()} - {"__init__"}
        offered = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if node.module != "rearview"
        }
        assert not stems & offered, path
