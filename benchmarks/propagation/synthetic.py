"""Cases made from training scripts by known mutations: the truth is known by construction.

A probe with a unique mark is put at a random place of a script; the script is mutated with the probe
in it, so the mutation moves and renames the probe as well; then it is taken out of one side.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mine import Case, parse

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
MARK = "probe-7f3a"


def blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Return every block but the inside of the probe itself, which is not mutated."""
    found = []
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not isinstance(body, list) or not body or not isinstance(body[0], ast.stmt):
                continue
            inside = len(body) == 1 and marked(body[0]) and isinstance(node, ast.If)
            if not inside:
                found.append(body)
    return found


def near(options: list, rng: random.Random):
    """Choose a block, most often one around the probe."""
    close = [body for body in options if any(map(marked, body))]
    return rng.choice(close if close and rng.random() < 0.7 else options)


def marked(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and n.value == MARK for n in ast.walk(node))


def names(node: ast.AST, kind: type) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}


def simple(stmt: ast.stmt) -> bool:
    return isinstance(stmt, (ast.Assign, ast.AugAssign, ast.Expr))


def rename(tree: ast.AST, rng: random.Random) -> None:
    """Rename a local of one function, or a parameter, everywhere in that function."""
    scopes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] or [tree]
    scope = rng.choice(scopes)
    arguments = {a.arg for n in ast.walk(scope) if isinstance(n, ast.arguments) for a in n.args}
    options = sorted((names(scope, ast.Store) | arguments) - {"self", "_", "__name__"})
    if not options:
        return
    before = rng.choice(options)
    after = before + rng.choice(["_now", "2", "_value"])
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == before:
            node.id = after
        elif isinstance(node, ast.arg) and node.arg == before:
            node.arg = after


def rename_function(tree: ast.AST, rng: random.Random) -> None:
    options = [
        n.name
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")
    ]
    before = rng.choice(options)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == before:
            node.name = before + "_all"
        elif isinstance(node, ast.Name) and node.id == before:
            node.id = before + "_all"
        elif isinstance(node, ast.Attribute) and node.attr == before:
            node.attr = before + "_all"


def rename_attribute(tree: ast.AST, rng: random.Random) -> None:
    options = sorted({n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)})  # fmt: skip
    if options:
        before = rng.choice(options)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == before:
                node.attr = "its_" + before


def reorder(tree: ast.AST, rng: random.Random) -> None:
    """Swap two neighbours that share no name."""
    bodies = blocks(tree)
    rng.shuffle(bodies)
    for body in [near(bodies, rng), *bodies]:
        for at in rng.sample(range(len(body)), len(body)):
            pair = body[at : at + 2]
            if len(pair) < 2 or not all(map(simple, pair)) or any(map(marked, pair)):
                continue
            used = [names(s, ast.Load) | names(s, ast.Store) for s in pair]
            if not used[0] & used[1]:
                body[at : at + 2] = pair[::-1]
                return


def wrap(tree: ast.AST, rng: random.Random) -> None:
    """Put a run of statements under a new `with`, `if` or `try`."""
    bodies = [b for b in blocks(tree) if len(b) >= 3 and any(map(simple, b))]
    body = near(bodies, rng)
    start = rng.randrange(len(body) - 1)
    end = rng.randrange(start + 1, len(body)) + 1
    run = body[start:end]
    if any(isinstance(s, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) for s in run):
        return
    if isinstance(run[0], ast.Expr) and isinstance(run[0].value, ast.Constant):
        return
    head = rng.choice(
        ["with torch.profiler.record_function('part'):", "if enabled():", "with timer:"]
    )
    shell = ast.parse(head + "\n    pass").body[0]
    shell.body = run
    body[start:end] = [shell]


def loop_around(tree: ast.AST, rng: random.Random) -> None:
    """Put a new loop around a loop."""
    loops = [
        (b, i) for b in blocks(tree) for i, s in enumerate(b) if isinstance(s, (ast.For, ast.While))
    ]
    body, at = rng.choice(loops)
    shell = ast.parse("for repeat in range(repeats):\n    pass").body[0]
    shell.body = [body[at]]
    body[at] = shell


def insert(tree: ast.AST, rng: random.Random) -> None:
    extra = rng.choice(
        [
            "counter = tick()",
            "check(state_of_things)",
            "notes.append('here')",
            "if debug:\n    dump()",
        ]
    )
    options = [b for b in blocks(tree) if not isinstance(b[0], (ast.Import, ast.ImportFrom))]
    body = near(options, rng)
    body.insert(rng.randrange(len(body) + 1), ast.parse(extra).body[0])


def delete(tree: ast.AST, rng: random.Random) -> None:
    """Delete a statement that binds nothing, near or far from the probe."""
    options = [
        (b, s)
        for b in blocks(tree)
        for s in b
        if len(b) > 2 and isinstance(s, ast.Expr) and not marked(s)
    ]
    if options:
        body, stmt = rng.choice(options)
        body.remove(stmt)


def header(tree: ast.AST, rng: random.Random) -> None:
    """Change the header of a loop."""
    loop = rng.choice([n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))])
    if isinstance(loop, ast.While):
        loop.test = ast.parse(f"({ast.unparse(loop.test)}) and not stopped()").body[0].value
    elif rng.random() < 0.5:
        loop.iter = ast.parse(f"progress({ast.unparse(loop.iter)})").body[0].value
    else:
        loop.target = (
            ast.parse(f"index, {'(' + ast.unparse(loop.target) + ')'} = 1").body[0].targets[0]
        )
        loop.iter = ast.parse(f"enumerate({ast.unparse(loop.iter)})").body[0].value


def extract(tree: ast.AST, rng: random.Random) -> None:
    """Move a run of simple statements into a new function of the module."""
    bodies = [b for b in blocks(tree) if len(b) >= 4]
    rng.shuffle(bodies)
    for body in [near(bodies, rng), *bodies]:
        start = rng.randrange(len(body) - 2)
        run = body[start : start + 3]
        if not all(map(simple, run)) or any(
            isinstance(n, ast.Await) for s in run for n in ast.walk(s)
        ):
            continue
        if body is tree.body or (
            isinstance(run[0], ast.Expr) and isinstance(run[0].value, ast.Constant)
        ):
            continue
        bound = sorted(set().union(*(names(s, ast.Store) for s in run)))
        known = {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in n.args}
        known |= names(tree, ast.Store)
        read = sorted(set().union(*(names(s, ast.Load) for s in run)) & known | {b for b in bound if any(isinstance(s, ast.AugAssign) for s in run)})  # fmt: skip
        result = ", ".join(bound)
        function = ast.parse(
            f"def part({', '.join(read)}):\n    pass" + (f"\n    return {result}" if bound else "")
        )
        shell = function.body[0]
        shell.body[:1] = run
        call = f"{result} = " * bool(bound) + f"part({', '.join(read)})"
        body[start : start + 3] = ast.parse(call).body
        at = next(
            i for i, s in enumerate(tree.body) if isinstance(s, (ast.FunctionDef, ast.ClassDef))
        )
        tree.body.insert(at, shell)
        return


def hints(tree: ast.AST, rng: random.Random) -> None:
    for body in blocks(tree):
        for at, stmt in enumerate(body):
            if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name) and rng.random() < 0.5:  # fmt: skip
                body[at] = ast.AnnAssign(
                    stmt.targets[0], ast.Name("object", ast.Load()), stmt.value, 1
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg != "self":
            node.annotation = ast.Name("object", ast.Load())


def reformat(text: str, rng: random.Random) -> str:
    """Lay calls out over several lines and change the quotes, as another formatter would."""
    out = []
    for line in text.split("\n"):
        found = re.fullmatch(r"(\s*)([\w.=, ]*\w\()([^()]+(?:\([^()]*\)[^()]*)*)\)", line)
        if found and rng.random() < 0.7 and "'" not in line:
            lead, head, inner = found.groups()
            out += [f"{lead}{head}", f"{lead}    {inner},", f"{lead})"]
        else:
            out.append(re.sub(r"'([^'\"{}]*)'", r'"\1"', line))
    return "\n".join(out)


def comments(text: str, rng: random.Random) -> str:
    out = []
    for line in text.split("\n"):
        if (
            line.strip()
            and rng.random() < 0.2
            and not line.lstrip().startswith(("else", "elif", "except", ")", "]"))
        ):
            out.append(
                re.match(r"\s*", line)[0]
                + "# "
                + rng.choice(["why", "see the paper", "to be sure"])
            )
        out.append(line)
    return "\n".join(out)


def old_prints(text: str, rng: random.Random) -> str:
    """Write prints as Python 2 did, except the probe."""
    del rng
    return "\n".join(
        line if MARK in line else re.sub(r"^(\s*)print\((.*)\)$", r"\1print \2", line)
        for line in text.split("\n")
    )


TREES: dict[str, Callable] = {f.__name__: f for f in (rename, rename_function, rename_attribute, reorder, wrap, loop_around, insert, delete, header, extract, hints)}  # fmt: skip
TEXTS: dict[str, Callable] = {f.__name__: f for f in (comments, old_prints, reformat)}


def probes(tree: ast.AST, rng: random.Random) -> ast.AST:
    """Put a probe behind a statement that binds something, reading that; return the new tree."""
    tree = copy.deepcopy(tree)
    spots = []
    for body in blocks(tree):
        for at, stmt in enumerate(body):
            bound = (
                sorted(names(stmt, ast.Store))
                if isinstance(stmt, (ast.Assign, ast.AugAssign))
                else []
            )
            if bound and bound != ["_"]:
                spots.append((body, at, next(b for b in bound if b != "_")))
    body, at, name = rng.choice(spots)
    form = rng.choice(
        [
            "print('{m}', {n})",
            "if verbose:\n    print('{m}', {n})",
            "log('{m}', value={n}, note=f'{{{n}}}')",
        ]
    )
    body.insert(at + 1, ast.parse(form.format(m=MARK, n=name)).body[0])
    return tree


def find(text: str) -> tuple[int, int] | None:
    tree = parse(text) or parse(re.sub(r"(?m)^(\s*)print (.*)$", r"\1print(\2)", text))
    if tree is None:
        return None
    for body in blocks(tree):
        for stmt in body:
            inner = [
                s for s in ast.walk(stmt) if isinstance(s, ast.stmt) and s is not stmt and marked(s)
            ]
            short = (
                isinstance(stmt, ast.If)
                and len(inner) == 1
                and len(stmt.body) == 1
                and "verbose" in ast.unparse(stmt.test)
            )
            if marked(stmt) and (not inner or short):
                return stmt.lineno, stmt.end_lineno
    return None


def cases(count: int, seed: int = 0) -> Iterator[tuple[str, Case]]:
    """Yield (mutation, case): every mutation alone, then two to five at once."""
    rng = random.Random(seed)
    sources = {path.name: path.read_text() for path in SCRIPTS}
    plans = [[name] for name in (*TREES, *TEXTS)] * count
    plans += [rng.sample([*TREES, *TEXTS], rng.randint(2, 5)) for _ in range(count * 6)]
    for plan in plans:
        name, text = rng.choice(sorted(sources.items()))
        tree = probes(ast.parse(text), rng)
        new = ast.unparse(tree)
        other = copy.deepcopy(tree)
        for step in plan:
            if step in TREES:
                TREES[step](other, rng)
        old = ast.unparse(ast.fix_missing_locations(other))
        for step in plan:
            if step in TEXTS:
                old = TEXTS[step](old, rng)
        if rng.random() < 0.5 and "old_prints" not in plan:
            new, old = old, new
        one, two = find(new), find(old)
        if one is None or two is None:
            continue
        lines = old.split("\n")
        taken = "\n".join(lines[two[0] - 1 : two[1]])
        without = "\n".join(lines[: two[0] - 1] + lines[two[1] :])
        kind = plan[0] if len(plan) == 1 else f"{len(plan)} at once"
        yield (
            kind,
            Case(
                "synthetic",
                name,
                ("", ""),
                len(plan),
                kind,
                "simple",
                new,
                one,
                without,
                two[0],
                taken,
            ),
        )
