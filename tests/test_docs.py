"""What the documents say exists, and what exists is in the documents."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from rearview.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "rearview"
DOCS = ROOT / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def used_slugs():
    found = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (isinstance(node, ast.keyword) and node.arg == "slug") or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "slug"
            ):
                values = [node.value]
            else:
                continue
            for value in values:
                for leaf in ast.walk(value):
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                        found.setdefault(leaf.value, path)
    return found


def documented_slugs():
    return re.findall(r"^### (\S+)$", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)


def test_every_error_slug_is_documented():
    missing = {
        slug: str(path.relative_to(ROOT))
        for slug, path in used_slugs().items()
        if slug not in documented_slugs()
    }
    assert not missing, f"docs/errors.md lacks {missing}"


def test_every_documented_error_slug_is_used():
    assert not set(documented_slugs()) - set(used_slugs())


def test_no_error_slug_is_documented_twice():
    assert len(documented_slugs()) == len(set(documented_slugs()))


def test_the_page_of_commands_is_current():
    assert (DOCS / "cli.md").read_text("utf-8") == generator().cli_page(), "run `make docs`"


def test_the_page_of_settings_is_current():
    assert (DOCS / "settings.md").read_text("utf-8") == generator().settings_page(), (
        "run `make docs`"
    )


def test_the_picture_of_the_architecture_is_drawn_from_the_imports_of_today():
    spec = importlib.util.spec_from_file_location("drawing", DOCS / "draw_architecture.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert (DOCS / "architecture.svg").read_text("utf-8") == drawing.draw(), "run `make docs`"


def test_the_picture_of_a_terminal_shows_what_the_guide_shows():
    spec = importlib.util.spec_from_file_location("session", DOCS / "draw_session.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert (DOCS / "images" / "session.svg").read_text("utf-8") == drawing.draw(), "run `make docs`"


PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_documents_exist(page):
    shown = re.findall(r"(?:`|\$ )rearview ([a-z]+)", page.read_text("utf-8"))
    assert not set(shown) - set(COMMANDS)


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text("utf-8")
    pages = {
        str(page.relative_to(DOCS)) for page in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")]
    }
    assert not {page for page in pages - {"index.md"} if f"({page})" not in index}


ROOMS = {path.name for path in SRC.iterdir() if path.is_dir()}


def is_module(dotted):
    """Return True if a dotted name below the package is a module, a room, or a name in one of them."""
    at = SRC
    for part in dotted.split("."):
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").is_file():
            return True
        else:
            return at != SRC and part[0].isupper()
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_in_the_documents_exist(page):
    text = page.read_text("utf-8")
    dotted = re.findall(r"`((?:rearview\.)?([a-z_]+)\.[a-z_.]+)`", text)
    other = (".pt", ".pth", ".fit", ".md", ".json", ".jsonl", ".py", ".toml", ".sqlite")
    named = {
        name for name, room in dotted if room in ROOMS - {"state"} and not name.endswith(other)
    }
    assert not {name for name in named if not is_module(name.removeprefix("rearview."))}
    files = re.findall(r"`((?:src/rearview/|tests/)?([a-z_]+)/[\w/]+\.py)`", text)
    places = (ROOT, SRC, ROOT / "tests", DOCS)
    missing = {
        name for name, room in files
        if room in ROOMS | {"journeys"} and not any((place / name).exists() for place in places)
    }  # fmt: skip
    assert not missing


def test_the_first_sections_a_newcomer_needs_are_there():
    readme = (ROOT / "README.md").read_text("utf-8")
    for needed in ("make demo", "make test", "rearview run", "rearview backfill", "picture.svg"):
        assert needed in readme
