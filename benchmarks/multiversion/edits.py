"""Random edits of public notebooks through papermill's engine `rearview`: are outputs right, what is saved.

    python benchmarks/multiversion/edits.py --references FOLDER [--why] NOTEBOOK…

Every notebook is copied with the files beside it; cells that fail here are left out. Five random edits, one after
another, make five more versions. *References:* papermill's own engine executes each version in a fresh kernel, the
first version twice; an edit that makes a cell fail is taken back before the next one. Outputs, CPU seconds of the kernel and a digest of each variable that a cell left are written to
FOLDER, and are not computed again if they are there. *Engine:* papermill executes the six versions with the engine
`rearview`, the first one to fill the store.

An output is wrong if it differs from that of the reference; outputs that differ between the two executions of the
first version are not compared. Generators that a notebook does not seed begin with the same states everywhere, so what
they draw is compared too. (By itself the engine begins with those of the notebook's last run.)

A cell must run if it was edited, or if its output or a variable that it left differs between the references before
and after the edit: whatever reuses results has to run it. So do cells whose output differs between the two executions
of the first version, except if it was measured by a magic such as `%timeit`: those must run if a variable that they
name is another one. Of cells before one that must run, the imports must run as well. The CPU seconds of all that are
the ideal: no correct engine can save more.
"""

import argparse
import ast
import contextlib
import copy
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import nbformat
import papermill
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import papermill_engines
from papermill.exceptions import PapermillExecutionError

from rearview.notebook.papermill_engine import RearviewEngine

EDITS = 5
LIMIT = 300
"""Seconds that a cell may take."""
KEY = "5e" * 32
"""The first states of random generators that a notebook does not seed follow from it, in all kernels."""
PLACES = re.compile(
    r"0x[0-9a-f]{6,}|/\S{0,60}?/lib/python3\.\d+/site-packages|/tmp/ipykernel_\d+|/tmp/edits-\w+/(?:plain|engine)"
)
"""Addresses, and folders that are others in each process."""
MEASURES = re.compile(r"^\s*(\w+\s*=\s*)?%%?(time|timeit|prun)\b", re.MULTILINE)
LEFT_BY_CELLS = """
def _install():
    import hashlib, importlib.util, io, json, os, random, sys, time, types

    import cloudpickle

    shell, file = get_ipython(), os.environ["EDITS_LEFT"]
    hidden, known = {*shell.user_ns, "exit", "quit"}, {}
    key = bytes.fromhex(os.environ["REARVIEW_ENTROPY"])
    random.seed(int.from_bytes(hashlib.sha256(key + bytes(8)).digest(), "big"))
    state = [random.getstate()]

    class Seeds:  # NumPy's generator begins as in the engine
        busy = False

        def find_spec(self, name, path=None, target=None):
            if name != "numpy.random" or self.busy:
                return None
            self.busy = True
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_seed(module):
                load(module)
                module.seed(int.from_bytes(hashlib.sha256(key + b"numpy").digest()[:4], "big"))

            spec.loader.exec_module = load_and_seed
            return spec

    sys.meta_path.insert(0, Seeds())

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj):
            if type(obj).__module__.startswith(("matplotlib.", "mpl_toolkits.")):
                return str, (type(obj).__name__,)  # to pickle a part of a figure is to pickle all of it
            return super().reducer_override(obj)

    def digest(value):
        out = io.BytesIO()
        try:
            Pickler(out, protocol=5).dump(value)
        except Exception:
            return type(value).__name__
        return hashlib.sha256(out.getvalue()).hexdigest()[:24]

    def write(result):
        begin = time.process_time()
        now = {
            name: digest(value)
            for name, value in list(shell.user_ns.items())
            if name not in hidden and not name.startswith("_") and not isinstance(value, types.ModuleType)
        }
        changed = {name: each for name, each in now.items() if known.get(name) != each}
        changed |= dict.fromkeys(known.keys() - now.keys(), "")
        known.clear()
        known.update(now)
        state[0] = random.getstate()  # the kernel draws between cells
        line = {"text": result.info.raw_cell, "left": changed, "cost": time.process_time() - begin}
        with open(file, "a") as log:
            log.write(json.dumps(line) + "\\n")

    shell.events.register("pre_run_cell", lambda info: random.setstate(state[0]))
    shell.events.register("post_run_cell", write)


_install()
del _install
"""
"""Startup file of the reference kernels: writes a digest of what each cell left in the variables."""

samples = []
"""(kernel, cell, CPU seconds of the kernel when the cell begins): filled while papermill executes."""


def cpu_of(pid):
    """Return the CPU seconds that a process, and children for which it waited, have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime((~pid << 3) | 2) + children  # the CPU clock of that process


def sample_cells():
    """Let papermill's client take samples before each cell and after the last one."""
    execute = PapermillNotebookClient.execute_cell

    def sampled(self, cell, index, *args, **kwargs):
        if cell.cell_type != "code" or not cell.source.strip():
            return execute(self, cell, index, *args, **kwargs)
        pid = self.km.provisioner.pid
        samples.append((pid, index, cpu_of(pid)))
        try:
            return execute(self, cell, index, *args, **kwargs)
        finally:
            with contextlib.suppress(OSError):
                samples.append((pid, None, cpu_of(pid)))

    PapermillNotebookClient.execute_cell = sampled


def seconds_of_cells():
    """Return the seconds from the begin of each cell to the begin of the next one, by index; empty `samples`."""
    seconds = {}
    for number, (pid, index, begin) in enumerate(samples):
        if index is None:
            continue
        until = [each for each in samples[number + 1 :] if each[0] == pid]
        end = next(
            (cpu for _, at, cpu in until if at is not None), until[-1][2] if until else begin
        )
        seconds[index] = seconds.get(index, 0.0) + end - begin
    samples.clear()
    return seconds


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]


def execute(book, folder, engine):
    """Execute a notebook by papermill; return its code cells, and the CPU seconds of each."""
    source, out = folder / "source.ipynb", folder / "out.ipynb"
    nbformat.write(book, source)
    samples.clear()
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
    by_index = seconds_of_cells()
    places = [i for i, c in enumerate(done.cells) if c.cell_type == "code" and c.source.strip()]
    return code_cells(done), [by_index.get(i, 0.0) for i in places]


def plain(book, folder):
    """Execute a notebook by papermill's own engine; cells that fail are passed over."""
    book = copy.deepcopy(book)
    for cell in code_cells(book):
        cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "raises-exception"]
    log = folder / "left.jsonl"
    log.unlink(missing_ok=True)
    os.environ["EDITS_LEFT"] = str(log)
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    try:
        cells, seconds = execute(book, folder, "nbclient")
    finally:
        del os.environ["IPYTHONDIR"]
    lines = iter([json.loads(line) for line in log.read_text().splitlines()])
    run = []
    for cell, cpu in zip(cells, seconds, strict=True):
        line = next(each for each in lines if each["text"] == cell.source)
        run.append(
            {
                "source": cell.source,
                "shown": shown(cell),
                "failed": any(o.output_type == "error" for o in cell.outputs),
                "seconds": max(0.0, cpu - line["cost"]),
                "left": line["left"],
            }
        )
    return run


def shown(cell):
    """Return the outputs of a cell in a form that can be compared."""
    outputs = []
    for output in json.loads(json.dumps(cell.outputs)):
        output.pop("execution_count", None)
        output.pop("traceback", None)
        before = outputs[-1] if outputs else {}
        if output["output_type"] == "stream" and before.get("name") == output["name"]:
            # how a text is cut into messages is a matter of timing
            before["text"] += output["text"]
        else:
            outputs.append(output)
    return PLACES.sub("0x", json.dumps(outputs, sort_keys=True))


def edited(book, draw):
    """Return the notebook with one random edit, the index of the cell among the code cells, and its kind."""
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


def only_imports(book):
    """Return the notebook with the imports of its cells alone."""
    book = copy.deepcopy(book)
    for cell in code_cells(book):
        try:
            body = ast.parse(without_magics(cell.source)).body
        except SyntaxError:
            body = []
        found = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        cell.source = "\n".join(map(ast.unparse, found)) or "None"
    return book


def without_magics(source):
    return "\n".join(
        "" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")
    )


def copy_beside(file, folder):
    ignore = shutil.ignore_patterns("*.ipynb", ".*", "figures", "images")
    shutil.copytree(file.parent, folder, ignore=ignore)


def make_references(file):
    """Return the versions of a notebook and what papermill's own engine makes of each; None if it does not run."""
    draw = random.Random(file.name)
    with tempfile.TemporaryDirectory(prefix="edits-") as scratch:
        folder = Path(scratch) / "plain"
        copy_beside(file, folder)
        startup = folder / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00-left.py").write_text(LEFT_BY_CELLS)
        book = nbformat.read(file, as_version=4)
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "x", "language": "python"}
        for cell in code_cells(book):
            cell.outputs = []
            # styles have other names in today's matplotlib
            cell.source = re.sub(r"(['\"])seaborn-(?!v0)", r"\1seaborn-v0_8-", cell.source)
        count = len(code_cells(book))
        for _ in range(4):
            first = plain(book, folder)
            kept = [
                cell for cell, run in zip(code_cells(book), first, strict=True) if not run["failed"]
            ]
            if len(kept) == len(first):
                break
            # what later cells need of those that are left out is then missing as well
            book.cells = [cell for cell in book.cells if any(cell is each for each in kept)]
        else:
            return None
        if len(kept) < 6:
            return None
        facts = {"cells_before": count, "again": plain(book, folder)}
        facts["imports"] = [run["seconds"] for run in plain(only_imports(book), folder)]
        facts["versions"] = [{"book": book, "run": first, "at": -1, "kind": "unedited", "base": 0}]
        base = 0
        for number in range(1, EDITS + 1):
            version, at, kind = edited(book, draw)
            run = plain(version, folder)
            facts["versions"].append(
                {"book": version, "run": run, "at": at, "kind": kind, "base": base}
            )
            if not any(each["failed"] for each in run):
                book, base = version, number
        return json.loads(json.dumps(facts))


def must_run(facts, number):
    """Return the cells that any correct engine runs after an edit, by the references before and after it."""
    after = facts["versions"][number]["run"]
    before = facts["versions"][facts["versions"][number]["base"]]["run"]
    first, again = facts["versions"][0]["run"], facts["again"]
    names_before, names_after, cells = {}, {}, set()
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        measures = MEASURES.search(new["source"])
        if measures:
            words = set(re.findall(r"\w+", new["source"]))
            differ = any(names_before.get(word) != names_after.get(word) for word in words)
        else:
            steady = first[i]["shown"] == again[i]["shown"]
            differ = old["shown"] != new["shown"] or not steady
        names = old["left"].keys() | new["left"].keys()
        # a variable with another digest each time, such as one that holds durations, tells nothing
        names -= {n for n in names if first[i]["left"].get(n) != again[i]["left"].get(n)}
        left = any(old["left"].get(name) != new["left"].get(name) for name in names)
        if old["source"] != new["source"] or differ or left:
            cells.add(i)
        names_before |= {name: old["left"].get(name) for name in names}
        names_after |= {name: new["left"].get(name) for name in names}
    return cells


def reasons(folder):
    """Return why each cell of the newest run was run, by index; empty: its results were reused."""
    runs = sorted((folder / ".rearview" / "runs").iterdir(), key=lambda each: each.stat().st_mtime)
    for run in reversed(runs):
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads((run / "reused.json").read_text())
            return {number - 1: why for number, why in facts["cells"]}
    return {}


def try_engine(file, facts):
    """Execute all versions by the engine; return one row of numbers for each."""
    first, again = facts["versions"][0]["run"], facts["again"]
    steady = [a["shown"] == b["shown"] for a, b in zip(first, again, strict=True)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="edits-") as scratch:
        folder = Path(scratch) / "engine"
        copy_beside(file, folder)
        os.chdir(folder)
        for number, version in enumerate(facts["versions"]):
            book = nbformat.from_dict(version["book"])
            begin = time.perf_counter()
            cells, took = execute(book, folder, "rearview")
            wall = time.perf_counter() - begin
            run = version["run"]
            failed = (i for i, each in enumerate(run) if each["failed"])
            stop = next(failed, len(run) - 1) + 1
            wrong = [
                i
                for i in range(min(stop, len(cells)))
                if steady[i] and shown(cells[i]) != run[i]["shown"]
            ]
            must = must_run(facts, number) if number else set(range(stop))
            full = [each["seconds"] for each in run[:stop]]
            rows.append(
                {
                    "kind": version["kind"],
                    "at": version["at"],
                    "wrong": wrong + list(range(len(cells), stop)),
                    "full": full,
                    "took": took[:stop],
                    "must": sorted(must),
                    "why": reasons(folder),
                    "wall": wall,
                }
            )
        os.chdir("/")
    return rows


def add_ideal(facts, rows):
    """Add the seconds of each cell that no correct engine can save: all of those that must run, imports of those before."""
    for row in rows:
        last = max(row["must"], default=-1)
        row["ideal"] = [
            s if i in row["must"] else min(s, facts["imports"][i]) if i < last else 0.0
            for i, s in enumerate(row["full"])
        ]


def share(part, whole):
    return f"{part / whole:.0%}" if whole > 0 else "-"


def print_row(name, cells, rows):
    """Print one line of the table, for edits whose seconds are summed."""
    full, took, ideal = (sum(sum(row[key]) for row in rows) for key in ("full", "took", "ideal"))
    wrong = sum(len(row["wrong"]) for row in rows)
    allow = [row for row in rows if sum(row["ideal"]) <= 0.2 * sum(row["full"])]
    most, rest = (sum(sum(row[key]) for row in allow) for key in ("full", "took"))
    print(
        f"| {name} | {cells} | {len(rows)} | {wrong} | {full:.1f} | {took:.1f} | {ideal:.1f} | "
        f"{share(full - took, full)} | {share(full - took, full - ideal)} | {len(allow)} | {share(most - rest, most)} |",
        flush=True,
    )


def explain(name, rows):
    """Print the cells that ran without need, and those that took long although they did not run."""
    for row in rows[1:]:
        for i, (took, ideal) in enumerate(zip(row["took"], row["ideal"], strict=False)):
            if took > ideal + 0.05:
                why = row["why"].get(str(i), "?") or "not run"
                need = "must run" if i in row["must"] else "could be reused"
                print(
                    f"  {name}: edit of {row['at']} ({row['kind']}): cell {i} took {took:.2f} s "
                    f"(full {row['full'][i]:.2f}, ideal {ideal:.2f}; {need}): {why}",
                    file=sys.stderr,
                    flush=True,
                )


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--references", type=Path, required=True)
    options.add_argument("--only-references", action="store_true")
    options.add_argument("--only-print", action="store_true", help="print results that are there")
    options.add_argument("--why", action="store_true")
    options.add_argument("notebooks", type=Path, nargs="+")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    # sets in the same order each time
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "REARVIEW_ENTROPY": KEY}
    papermill_engines.register("rearview", RearviewEngine)
    sample_cells()
    references = given.references.absolute()
    references.mkdir(parents=True, exist_ok=True)
    if not given.only_references:
        print(
            "| notebook | cells | edits | wrong outputs | full, s | engine, s | ideal, s | saved | "
            "of what could be saved | edits that allow 80 % | saved there |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            flush=True,
        )
    everything, filling, begin = [], [], time.perf_counter()
    for file in [each.absolute() for each in given.notebooks]:
        store = references / f"{file.parent.name}-{file.stem}.json"
        if given.only_print and not store.is_file():
            continue
        if not store.is_file():
            os.chdir("/")
            facts = make_references(file)
            store.write_text(json.dumps(facts))
        facts = json.loads(PLACES.sub("0x", store.read_text()))
        if facts is None:
            print(f"  {file.name}: too few cells run here", file=sys.stderr, flush=True)
            continue
        if given.only_references:
            continue
        results = references / f"{store.stem}.engine"
        if not given.only_print:
            results.write_text(json.dumps(try_engine(file, facts)))
        elif not results.is_file():
            continue
        rows = json.loads(results.read_text())
        add_ideal(facts, rows)
        for row in rows:
            if row["wrong"]:
                where = f"{row['kind']} of {row['at']}"
                print(f"  {file.name}: {where}: {row['wrong']} differ", file=sys.stderr, flush=True)
        if given.why:
            explain(file.stem, rows)
        everything += rows[1:]
        filling.append(rows[0])
        cells = f"{len(facts['again'])} of {facts['cells_before']}"
        print_row(file.stem, cells, rows[1:])
    if everything:
        print_row("all", "", everything)
        full, took = (sum(sum(row[key]) for row in filling) for key in ("full", "took"))
        print(
            f"\nThe first executions, which fill the store, took {took:.1f} s of CPU time in place of {full:.1f}. "
            f"{time.perf_counter() - begin:.0f} s wall, load {os.getloadavg()[1]:.1f}."
        )


if __name__ == "__main__":
    main()
