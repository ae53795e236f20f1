"""Random edits of public notebooks through papermill's engine `rearview`: are outputs right, what is saved.

    python benchmarks/multiversion/edits.py NOTEBOOK…

Every notebook is copied with the files beside it; cells that fail here are left out. It is executed once, to
fill the store. Then five random edits follow, one after another; each edited notebook is executed by papermill
with the engine `rearview` and, for comparison, by nbclient in a fresh kernel. An output is wrong if it differs
from nbclient's; outputs of cells that differ between two nbclient executions of the unedited notebook are not
compared. Wall and CPU seconds of the processes are those of the machine at the time.
"""

import ast
import contextlib
import copy
import json
import logging
import os
import random
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import nbformat
import papermill
from dateutil.parser import parse as parse_time
from papermill.engines import papermill_engines
from papermill.exceptions import PapermillExecutionError

from rearview.notebook.engine import RearviewEngine

EDITS = 5
LIMIT = 300
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def plain(book, folder):
    """Execute a notebook by papermill's own engine, in a fresh kernel; cells that fail are passed over."""
    book = copy.deepcopy(book)
    for cell in code_cells(book):
        cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "raises-exception"]
    return with_engine(book, folder, "plain", engine="nbclient")


def without_failures(book, folder):
    """Leave out cells that fail here; what later cells need of them is then missing as well."""
    for _ in range(4):
        done = plain(book, folder)
        bad = [
            i
            for i, cell in enumerate(done.cells)
            if cell.cell_type == "code" and any(o.output_type == "error" for o in cell.outputs)
        ]
        if not bad:
            return book, done
        book.cells = [cell for i, cell in enumerate(book.cells) if i not in bad]
    return None, None


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]


def shown(cell):
    """Return the outputs of a cell in a form that can be compared."""
    outputs = []
    for output in json.loads(json.dumps(cell.outputs)):
        output.pop("execution_count", None)
        output.pop("traceback", None)
        before = outputs[-1] if outputs else {}
        if output["output_type"] == "stream" and before.get("name") == output["name"]:
            before["text"] += output[
                "text"
            ]  # how a text is cut into messages is a matter of timing
        else:
            outputs.append(output)
    return ADDRESS.sub("0x", json.dumps(outputs, sort_keys=True))


def edited(book, draw):
    """Return the notebook with one random edit, and the index of the cell among the code cells."""
    book = copy.deepcopy(book)
    cells = code_cells(book)
    for _ in range(50):
        at = draw.randrange(len(cells))
        source = cells[at].source
        if source.lstrip().startswith(("%", "!")):
            continue
        kind = draw.choice(["number", "print", "statement"])
        if kind == "number":
            try:
                numbers = [
                    node
                    for node in ast.walk(ast.parse(source))
                    if isinstance(node, ast.Constant)
                    and type(node.value) in (int, float)
                    and node.lineno == node.end_lineno
                ]
            except SyntaxError:
                continue
            if not numbers:
                continue
            node = draw.choice(numbers)
            lines = source.split("\n")
            line = lines[node.lineno - 1].encode()
            new = (
                line[: node.col_offset] + str(node.value + 1).encode() + line[node.end_col_offset :]
            )
            lines[node.lineno - 1] = new.decode()
            cells[at].source = "\n".join(lines)
        elif kind == "print":
            cells[at].source = f"print('edited {draw.randrange(1000)}')\n{source}"
        else:
            cells[at].source = f"extra_{draw.randrange(1000)} = {draw.randrange(1000)}\n{source}"
        return book, at, kind
    return book, 0, "none"


def names_of(source):
    text = "\n".join(
        "" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")
    )
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set(), set()
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    return names, {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def affected(cells, at):
    """Return the cells that an edit may reach, by names alone: an estimate that is not Rearview's.

    Cells with imports count too: nothing runs in a new process without them.
    """
    found, dirty = {at}, names_of(cells[at].source)[1]
    found |= {
        i for i in range(at) if re.search(r"^\s*(import|from) ", cells[i].source, re.MULTILINE)
    }
    for i in range(at + 1, len(cells)):
        names, stored = names_of(cells[i].source)
        if names & dirty:
            found.add(i)
            dirty |= stored
    return found


def with_engine(book, folder, name, engine="rearview"):
    """Execute a notebook by papermill; its cells then have their seconds in their metadata."""
    source, out = folder / "source.ipynb", folder / f"{name}.ipynb"
    nbformat.write(book, source)
    with contextlib.suppress(PapermillExecutionError):
        papermill.execute_notebook(
            *(str(source), str(out)),
            engine_name=engine,
            progress_bar=False,
            cwd=str(folder),
            execution_timeout=LIMIT,
        )
    done = nbformat.read(out, as_version=4)
    # papermill puts a cell before one that failed
    done.cells = [
        c for c in done.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", ())
    ]
    return done


def seconds_of(cell):
    """Return the seconds between the kernel's message that it begins a cell and its answer."""
    times = cell.metadata.get("execution", {})
    begun, ended = times.get("iopub.execute_input"), times.get("shell.execute_reply")
    if begun is None or ended is None:
        return 0.0
    return (parse_time(ended) - parse_time(begun)).total_seconds()


def study(file):
    """Run one notebook; return one row for each edit."""
    draw = random.Random(file.name)
    with tempfile.TemporaryDirectory(prefix="edits-") as scratch:
        folders = [Path(scratch) / name for name in ("plain", "engine")]
        for folder in folders:
            ignore = shutil.ignore_patterns("*.ipynb", ".git", "figures")
            shutil.copytree(file.parent, folder, ignore=ignore)
        book = nbformat.read(file, as_version=4)
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "x", "language": "python"}
        for cell in code_cells(book):
            cell.outputs = []
            # styles have other names in today's matplotlib
            cell.source = re.sub(r"(['\"])seaborn-(?!v0)", r"\1seaborn-v0_8-", cell.source)
        book, first = without_failures(book, folders[0])
        if book is None or len(code_cells(book)) < 6:
            return None
        again = plain(book, folders[0])
        steady = [
            shown(a) == shown(b) for a, b in zip(code_cells(first), code_cells(again), strict=True)
        ]
        os.chdir(folders[1])
        filled = with_engine(book, folders[1], "out")
        rows = [("unedited", filled, first, -1, book)]
        for _ in range(EDITS):
            book, at, kind = edited(book, draw)
            reference = plain(book, folders[0])
            rows.append((kind, with_engine(book, folders[1], "out"), reference, at, book))
        os.chdir("/")
        results = []
        for kind, ours, theirs, at, version in rows:
            mine, other = code_cells(ours), code_cells(theirs)
            stop = next(
                (
                    i
                    for i, c in enumerate(other)
                    if any(o.output_type == "error" for o in c.outputs)
                ),
                len(other) - 1,
            )
            wrong = [
                i
                for i in range(min(stop + 1, len(mine)))
                if steady[i] and shown(mine[i]) != shown(other[i])
            ]
            full = [seconds_of(cell) for cell in other[: stop + 1]]
            took = [seconds_of(cell) for cell in mine[: stop + 1]]
            reach = affected(code_cells(version), at) if at >= 0 else set(range(len(full)))
            free = sum(s for i, s in enumerate(full) if i not in reach)
            results.append((kind, wrong, sum(full), sum(took), free, stop + 1))
        return results


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    papermill_engines.register("rearview", RearviewEngine)
    print(
        "| notebook | cells | edits | wrong outputs | cell s, full | cell s, engine | saved | edits that allow 80 % | saved there |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    saved_all, wrong_all, count = [], 0, 0
    begin = time.perf_counter()
    for file in [Path(word).absolute() for word in sys.argv[1:]]:
        try:
            results = study(file)
        except Exception as exc:
            print(f"  {file.name}: {type(exc).__name__}: {exc}", file=sys.stderr)
            continue
        if results is None:
            print(f"  {file.name}: too few cells run here", file=sys.stderr)
            continue
        edits = results[1:]
        wrong = sum(len(row[1]) for row in results)
        full, took = sum(row[2] for row in edits), sum(row[3] for row in edits)
        allowed = [row for row in edits if row[4] >= 0.8 * row[2] > 0]
        saved = [1 - row[3] / row[2] for row in allowed]
        saved_all += saved
        wrong_all, count = wrong_all + wrong, count + len(edits)
        there = f"{statistics.mean(saved):.0%}" if saved else "-"
        print(
            f"| {file.stem} | {results[0][5]} | {len(edits)} | {wrong} | {full:.1f} | {took:.1f} | "
            f"{1 - took / full:.0%} | {len(allowed)} | {there} |",
            flush=True,
        )
        for kind, bad, *_ in results:
            if bad:
                print(f"  {file.name}: {kind}: cells {bad} differ", file=sys.stderr, flush=True)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"\n{count} edits, {wrong_all} wrong outputs; where the edit allows 80 %: {len(saved_all)} edits, "
        f"median saved {statistics.median(saved_all) if saved_all else 0:.0%}. "
        f"{time.perf_counter() - begin:.0f} s wall, {cpu.ru_utime + cpu.ru_stime:.0f} s CPU."
    )


if __name__ == "__main__":
    main()
