"""A small SVG: how sure insertions were said to be, against how many of them were right."""

from __future__ import annotations

import itertools

EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)
SIZE, MARGIN = 260, 40


def calibration(answers: list[tuple[float, bool]]) -> str:
    """Return the plot for (confidence, right) of every insertion."""

    def x(value: float) -> float:
        return MARGIN + (value - 0.4) / 0.6 * SIZE

    def y(value: float) -> float:
        return MARGIN + SIZE - (value - 0.4) / 0.6 * SIZE

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + 2 * MARGIN}" '
            f'height="{SIZE + 2 * MARGIN}" font-family="sans-serif" font-size="11">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        f'<line x1="{x(0.4)}" y1="{y(0.4)}" x2="{x(1)}" y2="{y(1)}" stroke="#bbb"/>',
        f'<path d="M{x(0.4)} {y(1)}V{y(0.4)}H{x(1)}" fill="none" stroke="black"/>',
        f'<text x="{x(0.7)}" y="{y(0.4) + 32}" text-anchor="middle">said to be sure</text>',
        f'<text x="{x(0.4)}" y="{y(1) - 12}">share that was right (area: number of insertions)</text>',
    ]
    for tick in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts.append(f'<text x="{x(tick)}" y="{y(0.4) + 14}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{x(0.4) - 5}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>')
    total = max(1, len(answers))
    for low, high in itertools.pairwise(EDGES):
        found = [(sure, right) for sure, right in answers if low <= sure < high]
        if found:
            said = sum(sure for sure, _ in found) / len(found)
            was = sum(right for _, right in found) / len(found)
            radius = 3 + 14 * (len(found) / total) ** 0.5
            parts.append(
                f'<circle cx="{x(said):.1f}" cy="{y(max(0.4, was)):.1f}" r="{radius:.1f}" '
                f'fill="#3366cc" fill-opacity="0.6"><title>{len(found)} insertions: said {said:.2f}, '
                f"right {was:.2f}</title></circle>"
            )
    return "\n".join([*parts, "</svg>\n"])
