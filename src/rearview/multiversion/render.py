"""Show execution trees, plans and results of replays as text, JSON, SVG or one HTML page."""

from __future__ import annotations

import html
from typing import Any

from rearview.model.wording import duration, plural, size
from rearview.multiversion.compare_outputs import OutputMatch
from rearview.multiversion.execution_tree import ExecutionTree
from rearview.multiversion.replay_study import StudyPlan, StudyReport, VersionReport
from rearview.plan.versions.tree import START

MOST_IMAGE = 4 << 20
"""Length, in base64 characters, up to which an image is shown in the HTML page."""
_MARKS = {OutputMatch.SAME: "=", OutputMatch.DIFFERENT: "!", OutputMatch.NOT_COMPARABLE: "?"}


def tree_lines(tree: ExecutionTree) -> list[str]:
    """Return an execution tree as lines of text: one line per cell, with branches indented."""
    plan = tree.tree
    ends: dict[int, list[str]] = {}
    for version, end in zip(tree.study.versions, plan.versions, strict=True):
        ends.setdefault(end, []).append(version.name)
    lines: list[str] = []
    stack = [(root, 0) for root in reversed(plan.roots)]
    while stack:
        node, depth = stack.pop()
        tree_node = tree.nodes[node]
        cell = plan.cells[node]
        cost = (
            f"{duration(cell.seconds)}, {size(cell.size)}" if tree_node.measured else "not measured"
        )
        stored = ", stored" if cell.has_checkpoint else ""
        share = f"  x{len(tree_node.versions)}" if len(tree_node.versions) > 1 else ""
        names = f"  <- {', '.join(ends[node])}" if node in ends else ""
        lines.append(
            f"{'  ' * depth}[{tree_node.number}] {tree_node.cell.title}  ({cost}{stored}){share}{names}"
        )
        below = plan.children[node]
        deeper = depth + 1 if len(below) > 1 else depth
        stack.extend((child, deeper) for child in reversed(below))
    return lines


def _escaped(text: str) -> str:
    """Return `text` escaped for HTML and SVG; characters that XML does not allow become question marks."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t " else "?" for c in text))


def tree_svg(tree: ExecutionTree) -> str:
    """Return an execution tree as SVG; slower cells have wider bars, and each last cell shows its version's name."""
    plan = tree.tree
    rows: dict[int, float] = {}
    next_row = 0
    for node in depth_first(tree):
        if not plan.children[node]:
            rows[node] = next_row
            next_row += 1
    for node in range(len(plan) - 1, -1, -1):
        below = plan.children[node]
        if below:
            rows[node] = sum(rows[child] for child in below) / len(below)
    depth = [0] * len(plan)
    for node, above in enumerate(plan.parent):
        depth[node] = 0 if above == START else depth[above] + 1
    column, row = 150, 34
    slowest = max((cell.seconds for cell in plan.cells), default=1.0) or 1.0
    ends = {
        end: version.name for version, end in zip(tree.study.versions, plan.versions, strict=True)
    }
    width, height = (max(depth, default=0) + 2) * column, (next_row + 1) * row
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="11"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    for node, above in enumerate(plan.parent):
        x, y = depth[node] * column + 10, rows[node] * row + row / 2
        if above != START:
            x0, y0 = depth[above] * column + 140, rows[above] * row + row / 2
            parts.append(
                f'<path d="M{x0},{y0:.1f} C{x0 + 10},{y0:.1f} {x - 10},{y:.1f} {x},{y:.1f}" '
                'fill="none" stroke="#999"/>'
            )
        tree_node = tree.nodes[node]
        bar = 4 + 126 * plan.cells[node].seconds / slowest
        title = (
            tree_node.cell.title
            if len(tree_node.cell.title) <= 22
            else tree_node.cell.title[:20] + "…"
        )
        parts.append(
            f"<g><title>{_escaped(tree_node.cell.text[:600])}</title>"
            f'<rect x="{x}" y="{y - 12:.1f}" width="130" height="24" rx="3" fill="#f4f4f4" '
            f'stroke="{"#2a6" if len(tree_node.versions) > 1 else "#bbb"}"/>'
            f'<rect x="{x}" y="{y + 8:.1f}" width="{bar:.1f}" height="4" fill="#47a"/>'
            f'<text x="{x + 4}" y="{y + 2:.1f}">{_escaped(title)}</text></g>'
        )
        if node in ends:
            parts.append(
                f'<text x="{x + 136}" y="{y + 4:.1f}" font-weight="bold">'
                f"{_escaped(ends[node])}</text>"
            )
    return "\n".join([*parts, "</svg>"])


def depth_first(tree: ExecutionTree) -> list[int]:
    """Return the indices of all nodes in the order in which `tree_lines` shows them."""
    nodes: list[int] = []
    stack = list(reversed(tree.tree.roots))
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(reversed(tree.tree.children[node]))
    return nodes


def plan_lines(plan: StudyPlan, *, cache: float, workers: int) -> list[str]:
    """Return a plan as lines of text: its planned time, and a lower bound for the time of any order."""
    tree, order = plan.tree, plan.order
    cells = len(tree.tree)
    count = len(tree.paths)
    alone = tree.tree.one_by_one
    measured = all(node.measured for node in tree.nodes)
    summary = f"{plural(count, 'version')}, {plural(tree.cells_in_all, 'cell')}"
    resources = f"{size(cache)} of memory for states, {plural(workers, 'worker')}"
    lines = [f"{summary}, {cells} of them distinct; {resources}."]
    if order.by == "none" and not order.steps:
        return lines
    remark = "" if measured else " (cells that were never measured are counted as 1 s)"
    lines.append(
        f"One by one: {duration(alone)}. Planned: {duration(order.seconds)}, by "
        f"{order.by}; no order can take less than {duration(order.bound)} "
        f"(gap {order.gap:.1%}){remark}."
    )
    return lines


def report_lines(report: StudyReport) -> list[str]:
    """Return the result of a replay as lines of text: each version with the differences of its outputs, then costs."""
    lines = []
    for version in report.versions:
        marks = "".join(_MARKS[cell.verdict.match] for cell in version.cells)
        lines.append(f"{version.name:24} {version.worst_match:15} {marks}")
        if version.problem:
            lines.append(f"    {version.problem}")
        for cell in version.cells:
            if cell.verdict.match is OutputMatch.DIFFERENT and cell.number != version.ended_by:
                lines.append(f"    cell {cell.number} ({cell.title}): {cell.verdict.why}")
                lines.extend(f"        {line}" for line in cell.verdict.diff.splitlines()[2:12])
        for why, numbers in _not_comparable(version).items():
            cells = "cell" if len(numbers) == 1 else "cells"
            lines.append(f"    {cells} {', '.join(map(str, numbers))}: not comparable: {why}")
    result = report.result
    alone = report.computed_alone
    saved = 1 - result.seconds / alone if alone > result.seconds else 0.0
    lines += ["", (
        f"{plural(result.computed, 'cell')} computed in {duration(result.seconds)}, "
        f"{plural(result.checkpoints, 'state')} kept (at most {size(result.peak)}), {result.restores} restored. "
        f"One by one the cells take {duration(alone)}: {saved:.0%} saved."
    )]  # fmt: skip
    lines.extend(f"note: {note}" for note in result.notes)
    return lines


def _not_comparable(version: VersionReport) -> dict[str, list[int]]:
    """Return reason -> numbers of the cells whose outputs cannot be compared for this reason."""
    reasons: dict[str, list[int]] = {}
    for cell in version.cells:
        if cell.verdict.match is OutputMatch.NOT_COMPARABLE:
            reasons.setdefault(cell.verdict.why, []).append(cell.number)
    return reasons


def report_json(report: StudyReport) -> dict[str, Any]:
    """Return the result of a replay as a dict that can be written as JSON."""
    result = report.result
    return {
        "exact": report.exact,
        "seconds": round(result.seconds, 3),
        "one_by_one": round(report.computed_alone, 3),
        "planned": round(report.order.seconds, 3),
        "bound": round(report.order.bound, 3),
        "gap": round(report.order.gap, 4),
        "planner": report.order.by,
        "tried": {name: round(cost, 3) for name, cost in report.order.tried.items()},
        "computed": result.computed,
        "checkpoints": result.checkpoints,
        "restores": result.restores,
        "peak_bytes": result.peak,
        "notes": result.notes,
        "versions": [
            {
                "name": version.name,
                "program": version.program,
                "verdict": version.worst_match.value,
                "problem": version.problem,
                "cells": [
                    {
                        "cell": cell.number,
                        "title": cell.title,
                        "verdict": cell.verdict.match.value,
                        "why": cell.verdict.why,
                        "diff": cell.verdict.diff,
                        "seconds": round(cell.seconds, 6),
                        "shared": cell.shared,
                        "ended": cell.ended,
                    }
                    for cell in version.cells
                ],
            }
            for version in report.versions
        ],
    }


_STYLE = """
body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
pre{background:#f6f6f6;padding:.6em;overflow:auto;max-height:24em}
.same{color:#276}.different{color:#b00}.not{color:#860}
summary{cursor:pointer}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left}
img{max-width:100%;border:1px solid #ddd}
"""


def report_html(report: StudyReport, title: str = "Replay") -> str:
    """Return the result of a replay as one HTML page.

    All text that comes from the study is escaped, and the page loads nothing from elsewhere.
    """
    esc = _escaped
    rows, sections = [], []
    for number, version in enumerate(report.versions):
        kind = version.worst_match.value.partition(" ")[0]
        rows.append(
            f'<tr><td><a href="#v{number}">{esc(version.name)}</a></td>'
            f'<td class="{kind}">{version.worst_match.value}</td>'
            f"<td>{sum(cell.shared for cell in version.cells)} of {len(version.cells)}</td>"
            f"<td>{esc(version.problem)}</td></tr>"
        )
        cells = []
        for cell in version.cells:
            state = cell.verdict.match.value
            body = [f"<p>{esc(cell.verdict.why)}</p>"] if cell.verdict.why else []
            if cell.verdict.diff:
                body.append(f"<pre>{esc(cell.verdict.diff)}</pre>")
            body.extend(_output_html(output) for output in cell.outputs)
            open_attribute = " open" if cell.verdict.match is OutputMatch.DIFFERENT else ""
            cells.append(
                f"<details{open_attribute}><summary>[{cell.number}] <code>{esc(cell.title)}</code> "
                f'<span class="{state.partition(" ")[0]}">{state}</span> '
                f"{esc(duration(cell.seconds))}{' shared' if cell.shared else ''}</summary>"
                f"{''.join(body)}</details>"
            )
        sections.append(
            f'<h2 id="v{number}">{esc(version.name)}</h2><p>{esc(version.problem)}</p>'
            + "".join(cells)
        )
    summary = "<br>".join(
        esc(line) for line in report_lines(report)[-1 - len(report.result.notes) :]
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{esc(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{esc(title)}</h1><p>{summary}</p>"
        "<table><tr><th>version</th><th>verdict</th><th>shared cells</th><th></th></tr>"
        f"{''.join(rows)}</table>{tree_svg(report.tree)}{''.join(sections)}</body></html>"
    )


def _output_html(output: dict[str, Any]) -> str:
    """Return one output of a cell as HTML: a PNG image or escaped text. HTML that a cell displayed is left out."""
    kind = output.get("output_type")
    if kind == "stream":
        return f"<pre>{_escaped(str(output.get('text', ''))[:20000])}</pre>"
    if kind == "error":
        message = f"{output.get('ename')}: {output.get('evalue')}"
        return f"<pre>{_escaped(message[:20000])}</pre>"
    data = output.get("data")
    data = data if isinstance(data, dict) else {}
    picture = data.get("image/png")
    if isinstance(picture, str) and len(picture) <= MOST_IMAGE and _is_base64(picture):
        return f'<img alt="output" src="data:image/png;base64,{"".join(picture.split())}">'
    return f"<pre>{_escaped(str(data.get('text/plain', ''))[:20000])}</pre>"


def _is_base64(text: str) -> bool:
    return all(char.isalnum() or char in "+/=\n\r" for char in text)
