"""Draw docs/architecture.svg from the imports of the source. `make docs` runs this.

A box is a room with its inner rooms; an arrow says that a room imports another. A room stands above all
that it imports. Arrows that follow from others are left out. An import that closes a circle is red.
"""

import sys
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from imports import MODULES, PUBLIC, SRC, room_edges, room_of  # noqa: E402 - after the path is set

FACE = "import rearview"
"""The public face: it loads names from rooms on first use, and outer rooms import only it."""
NOT_DRAWN = {"__main__", "errors", "config", "durable_files", "media", "opened_files"}
"""Single modules that nearly every room imports, and the entry of `python -m`."""
FITS = 30
"""Letters of a purpose that fit into a box."""
WIDTH, HEIGHT, GAP, RISE, MARGIN = 164, 62, 26, 46, 28


def rooms() -> dict[str, list[str]]:
    """Return the top rooms with their inner rooms."""
    found: dict[str, list[str]] = {}
    for room in sorted({room_of(module) for module in MODULES} - NOT_DRAWN):
        top, _, inner = (FACE if room == "__init__" else room).partition("/")
        found.setdefault(top, []).extend([inner] if inner else [])
    return found


def edges() -> dict[str, dict[str, int]]:
    """Return how many imports lead from each top room to each other."""
    found: dict[str, dict[str, int]] = {}
    for room, targets in room_edges().items():
        for target, count in targets.items():
            one, two = (_top(each) for each in (room, target))
            if one != two and not {one, two} & NOT_DRAWN:
                counts = found.setdefault(one, {})
                counts[two] = counts.get(two, 0) + count
    return found


def _top(room: str) -> str:
    return FACE if room in {"__init__", PUBLIC} else room.partition("/")[0]


def against_the_order(arrows: dict[str, dict[str, int]]) -> set[tuple[str, str]]:
    """Return the weakest import of each circle of rooms, so that the rest has an order."""
    left = {room: dict(targets) for room, targets in arrows.items()}
    weakest: set[tuple[str, str]] = set()
    while circle := _circle(left):
        one, two = min(circle, key=lambda edge: (left[edge[0]][edge[1]], edge))
        weakest.add((one, two))
        del left[one][two]
    return weakest


def _circle(arrows: dict[str, dict[str, int]]) -> list[tuple[str, str]]:
    def search(room: str, path: list[str]) -> list[str]:
        if room in path:
            return [*path[path.index(room) :], room]
        for target in sorted(arrows.get(room, ())):
            if found := search(target, [*path, room]):
                return found
        return []

    for room in sorted(arrows):
        if found := search(room, []):
            return list(pairwise(found))
    return []


def levels(names: list[str], arrows: dict[str, set[str]]) -> dict[str, int]:
    """Return the level of each room: above all that it imports."""
    found: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in found:
            found[room] = 1 + max((level(each) for each in arrows.get(room, ())), default=-1)
        return found[room]

    for name in names:
        level(name)
    return found


def needed(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the arrows that do not follow from others."""

    def reached(room: str) -> set[str]:
        return {each for target in arrows.get(room, ()) for each in ({target} | reached(target))}

    return [
        (room, target)
        for room, targets in sorted(arrows.items())
        for target in sorted(targets)
        if not any(target in reached(other) for other in targets - {target, FACE})
    ]


def purpose(room: str) -> str:
    """Return the first words of a room's docstring."""
    if room == FACE:
        return "the public face"
    text = (SRC / room / "__init__.py").read_text("utf-8").split('"""')[1].splitlines()[0]
    for end in ".:;,(":  # as much as fits into the box
        if len(text) > FITS or end == ".":
            text = text.partition(end)[0]
    return text if len(text) <= FITS else text[: FITS - 1] + "…"


def draw() -> str:
    """Return the picture."""
    boxes, counts = rooms(), edges()
    weak = against_the_order(counts)
    arrows = {
        room: {target for target in targets if (room, target) not in weak}
        for room, targets in counts.items()
    }
    level = levels(list(boxes), arrows)
    rows = [
        sorted(room for room in boxes if level[room] == each)
        for each in range(max(level.values()) + 1)
    ]
    rows = [row for row in rows if row]
    wide = max(len(row) for row in rows) * (WIDTH + GAP) - GAP + 2 * MARGIN
    high = len(rows) * (HEIGHT + RISE) - RISE + 2 * MARGIN
    place = {}
    for number, row in enumerate(reversed(rows)):
        left = (wide - len(row) * (WIDTH + GAP) + GAP) / 2
        for k, room in enumerate(row):
            place[room] = (left + k * (WIDTH + GAP), MARGIN + number * (HEIGHT + RISE))
    lines = [_arrow(place[one], place[two], "#888") for one, two in needed(arrows)]
    lines += [_arrow(place[one], place[two], "#c00") for one, two in sorted(weak)]
    size = f'width="{wide}" height="{high}"'
    view = f'viewBox="0 0 {wide} {high}" {size} font-family="sans-serif"'
    tip = '<path d="M0 0L8 4L0 8z" fill="#888"/>'
    marker = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    drawn = [_box(room, boxes[room], *place[room]) for row in rows for room in row]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
            "<title>The rooms of Rearview, and what each imports</title>",
            f'<defs><marker id="tip" {marker}>{tip}</marker></defs>',
            f'<rect {size} fill="#fff"/>',
            *lines,
            *drawn,
            "</svg>",
            "",
        ]
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1]
    if y2 < y1:  # upwards: against the order
        y1, y2 = start[1], end[1] + HEIGHT
    middle = (y1 + y2) / 2
    path = f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    return f'<path d="{path}" fill="none" stroke="{color}" marker-end="url(#tip)"/>'


def _box(room: str, inner: list[str], x: float, y: float) -> str:
    below = ", ".join(inner) if inner else ""
    texts = [
        (room, 20, 15, "bold"),
        (purpose(room), 37, 10.5, "normal"),
        (below, 53, round(min(10.5, 350 / max(1, len(below))), 1), "normal"),  # fits into the box
    ]
    written = "".join(
        f'<text x="{x + WIDTH / 2:g}" y="{y + down:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="middle" fill="#222">{escape(text)}</text>'
        for text, down, size, weight in texts
        if text
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#f4f7fb" '
        f'stroke="#46648c"/>{written}'
    )


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(draw(), "utf-8")
