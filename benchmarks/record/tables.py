"""The tables of `bench.py`, as Markdown, from its measurements."""

import datetime as dt
import os
import platform
import statistics

HEAD = (
    "way", "wall", "with the first epoch", "cpu", "blocks ms", "checkpoints per epoch", "logical MB", "stored MB",
    "restore ms", "extra MB", "told",
)  # fmt: skip


def report(found, args, seconds):
    """Return everything as one text."""
    head = (
        f"Measured {dt.datetime.now().astimezone():%-d %B %Y} in {seconds / 60:.0f} minutes: "
        f"{args.threads} torch threads on {os.cpu_count()} cores ({platform.machine()}, "
        f"{memory()} GB), {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, {args.epochs} epochs, {args.rounds} rounds "
        f"({args.peer_rounds} for all but hands-free training)."
    )
    lines = [head, ""]
    if args.tiny:
        lines += ["**Tiny: epochs of a step or two. These numbers mean nothing.**", ""]
    names = list(dict.fromkeys(row["workload"] for row in found))
    overheads = {}
    for name in names:
        rows = [row for row in found if row["workload"] == name]
        lines += table(name, rows, args.epochs, overheads)
    return "\n".join(lines + summary(names, overheads))


def memory():
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)


def table(name, rows, epochs, overheads):
    plain = [row["plain"] for row in rows if "wall" in row["plain"]]
    epoch = median([row["wall"] / epochs for row in plain])
    lines = [f"### {name} (an epoch takes {epoch:.2f} s)", "", *heading(HEAD)]
    base = median([row["peak_mb"] for row in plain])
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        good = [row for row in mine if "wall" in row and "wall" in row["plain"]]
        if not good:
            lines.append(f"| {way} | failed: {mine[0].get('error', 'no plain run')} |")
            continue
        wall, cpu = ([row[key] / row["plain"][key] - 1 for row in good] for key in ("wall", "cpu"))
        overheads[name, way] = (median(wall), median(cpu))
        cells = [
            way,
            spread(wall),
            spread([row["whole"] / row["plain"]["whole"] - 1 for row in good if "whole" in row]),
            f"{median(cpu):+.1%}",
            number(good, "blocking_ms"),
            f"{median([row.get('saved', 0) for row in good]) / epochs:.2f}",
            number(good, "logical_mb"),
            number(good, "stored_mb"),
            number(good, "restore_ms"),
            f"{median([row['peak_mb'] for row in good]) - base:.0f}",
            f"{median([row['told'] for row in good]):.1%}" if "told" in good[0] else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def summary(names, overheads):
    """Return the mean and the worst over all workloads, way by way."""
    lines = ["### All workloads", "", *heading(("way", "mean wall", "worst wall", "mean cpu"))]
    for way in dict.fromkeys(way for _, way in overheads):
        mine = [overheads[name, way] for name in names if (name, way) in overheads]
        walls, cpus = zip(*mine, strict=True)
        some = "" if len(mine) == len(names) else f" ({len(mine)} of {len(names)} workloads)"
        mean = f"{statistics.mean(walls):+.1%} | {max(walls):+.1%} | {statistics.mean(cpus):+.1%}"
        lines.append(f"| {way}{some} | {mean} |")
    return [*lines, ""]


def heading(cells):
    return ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]


def median(values):
    values = list(values)
    return statistics.median(values) if values else float("nan")


def number(rows, key):
    values = [row[key] for row in rows if key in row]
    return f"{median(values):,.1f}" if values else ""


def spread(ratios):
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f"{ratios[0]:+.1%}"
    return f"{median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
