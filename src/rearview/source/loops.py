"""Name the loops of a program, and find the loops that may be running when a function is called.

`loop_ids` gives each loop of a text an id; `recorded_loop_ids` finds the loops with these ids in an edited text.
`find_loop_paths` follows calls by name and returns the loop paths on which each function may be called.
`assigned_names` returns the plain variables that the body of a loop assigns: their values can be captured as columns.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rearview.model.process_messages import DEEPEST
from rearview.model.run import name_of

Loop = ast.For | ast.AsyncFor | ast.While
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULE = "<module>"


@dataclass(frozen=True, slots=True)
class LoopId:
    """The id of a loop of a version. The loop keeps its id in every text that adds probes to the version."""

    path: str
    function: str
    """Qualified name of the function around the loop: `Trainer.fit`, `outer.<locals>.inner`, `<module>`."""
    ordinal: int
    """Number of the loop among the recorded loops of the function, from 0, in the order of the text."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}:{self.ordinal}:{self.name}"


def loop_name(node: Loop, function: str) -> str:
    """Return the name of a loop that is shown to the user, such as `epoch` for `for epoch in range(3)`.

    It is the name in `rearview.loop("name", …)`. Otherwise it is the first name in the target of a `for` that is
    not `_`. Otherwise, and for every `while`, it is the name of the `function` (`main` at the top level).

    >>> loop_name(ast.parse("for i, (x, y) in data: pass").body[0], "<module>")
    'i'
    >>> loop_name(ast.parse("while True: pass").body[0], "Trainer.fit")
    'fit'
    >>> loop_name(ast.parse("while True: pass").body[0], "<module>")
    'main'
    """
    if not isinstance(node, ast.While):
        name = _name_argument(node.iter)
        if name is not None:
            return name
        for name in _target_names(node.target):
            if name.strip("_"):
                return name
    last = function.rpartition(".")[2]
    return "main" if last == MODULE else last


def _name_argument(iterable: ast.expr) -> str | None:
    """Return the name in `rearview.loop("name", …)` or `rearview.block("name")`, or None for other expressions."""
    if not isinstance(iterable, ast.Call) or not iterable.args:
        return None
    func = iterable.func
    called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    first = iterable.args[0]
    if (
        called in {"loop", "block"}
        and isinstance(first, ast.Constant)
        and isinstance(first.value, str)
    ):
        return first.value
    return None


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Starred):
        yield from _target_names(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _target_names(item)


def walk_loops(tree: ast.Module) -> Iterator[tuple[Loop, str, tuple[str, ...]]]:
    """Yield (loop, qualified name of its function, loop names) for each loop of a text, in order.

    The loop names are the names of the loops around the loop in its function, outermost first, then its own.
    """
    yield from _walk(tree, MODULE, "", ())


def _walk(
    node: ast.AST, function: str, prefix: str, around: tuple[str, ...]
) -> Iterator[tuple[Loop, str, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            inner = prefix + child.name
            yield from _walk(child, inner, f"{inner}.<locals>.", ())
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, function, f"{prefix}{child.name}.", around)
        elif isinstance(child, LOOPS):
            chain = (*around, unique_name(loop_name(child, function), around))
            yield child, function, chain
            for block, inside in ((child.body, chain), (child.orelse, around)):
                yield from _walk(ast.Module(block, []), function, prefix, inside)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _walk(child, function, prefix, around)


def unique_name(name: str, around: tuple[str, ...]) -> str:
    """Return `name`, or `name_2`, `name_3`, … if loops `around` already have the name."""
    if name not in around:
        return name
    count = 2
    while f"{name}_{count}" in around:
        count += 1
    return f"{name}_{count}"


def loop_ids(tree: ast.Module, path: str = "") -> dict[int, LoopId]:
    r"""Return {first line of a loop: id of the loop} for all loops of the file `path`.

    >>> tree = ast.parse("for epoch in range(3):\n  for x in data: pass")
    >>> [str(i) for i in loop_ids(tree, "t.py").values()]
    ['t.py:<module>:0:epoch', 't.py:<module>:1:x']
    """
    counts: dict[str, int] = {}
    ids: dict[int, LoopId] = {}
    for node, function, chain in walk_loops(tree):
        ordinal = counts.get(function, 0)
        counts[function] = ordinal + 1
        ids[node.lineno] = LoopId(path, function, ordinal, chain[-1])
    return ids


def recorded_loop_ids(
    recorded: ast.Module, pairs: Iterable[tuple[ast.stmt, ast.stmt]], path: str = ""
) -> dict[int, LoopId]:
    """Return {first line of a loop in an edited text: its id in the `recorded` text}.

    `pairs` are (recorded statement, its counterpart in the edited text). Loops that only one of both texts has
    are left out.
    """
    ids = loop_ids(recorded, path)
    return {edited.lineno: ids[old.lineno] for old, edited in pairs if isinstance(old, LOOPS)}


def function_and_loops_around(parents: tuple[ast.AST, ...]) -> tuple[str, tuple[str, ...]]:
    """Return (function around a node, names of the loops around the node in that function, outermost first).

    `parents` are the syntax nodes around the node, from the module inwards. The function is given by its
    qualified name.
    """
    function, prefix = MODULE, ""
    names: tuple[str, ...] = ()
    for node in parents:
        if isinstance(node, FUNCTIONS):
            function, names = prefix + node.name, ()
            prefix = f"{function}.<locals>."
        elif isinstance(node, ast.ClassDef):
            prefix = f"{prefix}{node.name}."
        elif isinstance(node, LOOPS):
            names = (*names, unique_name(loop_name(node, function), names))
    return function, names


LoopPaths = Mapping[tuple[str, str], tuple[tuple[str, ...], ...]]
"""(file path, function) -> loop paths that may be running when the function is called.

The loop paths consist of names of loops (`find_loop_names`) or of ids of loops (`find_loop_paths`)."""


def find_loop_names(trees: Mapping[str, ast.Module], *, limit: int = 64) -> LoopPaths:
    r"""Return, for each (file path, function), the names of the loops that may be running when it is called.

    Calls are followed by name: `fit(...)` and `anything.fit(...)` may both mean any function called `fit`.
    Some functions are left out, because the text does not show which loops run around a call: functions that no
    call names (a callback, `forward`), functions that are also passed as a value (`opt.step(closure)`),
    generators (any loop may iterate over a generator), and all functions that these functions call.

    >>> text = "def step(): pass\ndef fit():\n  for i in x: step()\nfor epoch in y: fit()"
    >>> find_loop_names({"t.py": ast.parse(text)})["t.py", "step"]
    (('epoch', 'i'),)
    """
    files = tuple([calls_of_file(tree, path) for path, tree in trees.items()])
    return {
        key: with_loop_names(loop_paths)
        for key, loop_paths in find_loop_paths(files, limit=limit).items()
    }


def with_loop_names(loop_paths: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return `loop_paths` with each id replaced by the name of its loop, sorted and without duplicates."""
    return tuple(sorted({tuple(map(name_of, loop_path)) for loop_path in loop_paths}))


@dataclass(frozen=True, slots=True, eq=False)
class FileCalls:
    """The functions and calls of one file, and the names that are read as values, which any code may call."""

    path: str
    functions: frozenset[str]
    """Qualified names of the functions, `<module>` included."""
    calls: frozenset[tuple[str, str, tuple[str, ...]]]
    """(called name, calling function, ids of the loops of the calling function around the call)."""
    names: frozenset[str]
    """Names that the file reads as values, without calling them."""
    attributes: frozenset[str]
    """Names of attributes that the file reads as values, without calling them."""
    of_modules: frozenset[str]
    """Those of the `attributes` that are read from imported modules."""
    generators: frozenset[str]
    """Qualified names of the functions that are generators or coroutines."""
    looping: frozenset[str]
    """Names, without their prefixes, of functions that contain a loop and of classes whose constructor does."""
    called: Mapping[str, frozenset[str]]
    """Name of a function or class, without its prefix -> names that it calls; for a class, its bases, too."""
    loops: frozenset[LoopId]


def calls_of_file(tree: ast.Module, path: str) -> FileCalls:
    """Return the functions and calls of one file."""
    ids = loop_ids(tree, path)
    collector = _CallCollector({line: str(loop) for line, loop in ids.items()})
    nodes = list(ast.walk(tree))
    names, attributes, of_modules = _read_as_values(nodes)
    bodies: dict[str, list[ast.AST]] = {}
    called: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            bodies.setdefault(node.name, []).extend(ast.walk(node))
        elif isinstance(node, ast.ClassDef):  # a call of the class calls its constructor
            called.setdefault(node.name, set()).update(map(_last_name, node.bases))
            bodies.setdefault(node.name, []).extend(
                part
                for stmt in node.body
                if isinstance(stmt, FUNCTIONS) and stmt.name == "__init__"
                for part in ast.walk(stmt)
            )
    for name, body in bodies.items():
        called.setdefault(name, set()).update(map(called_name, body))
    return FileCalls(
        path,
        frozenset((MODULE, *collector.functions(tree))),
        frozenset(collector.calls(tree, MODULE, "", ())),
        frozenset(names),
        frozenset(attributes),
        frozenset(of_modules),
        frozenset(_generators(tree)),
        frozenset(name for name, body in bodies.items() if any(isinstance(n, LOOPS) for n in body)),
        {name: frozenset(callees) for name, callees in called.items()},
        frozenset(ids.values()),
    )


@functools.lru_cache(maxsize=8)
def find_loop_paths(files: tuple[FileCalls, ...], *, limit: int = 64) -> LoopPaths:
    r"""Return, for each (file path, function), the loop paths that may be running when the function is called.

    Functions are left out as by `find_loop_names`, and also functions with more than `limit` loop paths. A loop
    path with more than `DEEPEST` loops is shortened to its outermost loops.

    >>> text = "def f():\n  for i in x: g()\nfor i in y: f()\ndef g(): pass"
    >>> find_loop_paths((calls_of_file(ast.parse(text), "t.py"),))["t.py", "g"]
    (('t.py:<module>:0:i', 't.py:f:0:i'),)
    """
    calls: dict[str, set[tuple[str, str, tuple[str, ...]]]] = {}
    for file in files:
        for name, function, around in file.calls:
            calls.setdefault(name, set()).add((file.path, function, around))
    functions = {(file.path, function) for file in files for function in file.functions}
    loop_paths, too_many = _follow_calls(functions, calls, limit)
    unknown = {key for key in functions if key not in loop_paths} | too_many
    unknown |= _passed_as_values(files, functions)
    unknown |= {(file.path, function) for file in files for function in file.generators}
    growing = True
    while growing:
        callees = {
            key
            for key in functions - unknown
            if any((path, by) in unknown for path, by, _ in calls.get(name_in_calls(key[1]), ()))
        }
        growing = bool(callees)
        unknown |= callees
    return {
        key: tuple(sorted(paths_of_key))
        for key, paths_of_key in loop_paths.items()
        if key not in unknown
    }


_Function = tuple[str, str]
"""(file path, qualified name) of a function."""
_Calls = Mapping[str, set[tuple[str, str, tuple[str, ...]]]]
"""Called name -> calls: (file path, calling function, ids of the loops of the calling function around the call)."""


def _follow_calls(
    functions: set[_Function], calls: _Calls, limit: int
) -> tuple[dict[_Function, set[tuple[str, ...]]], set[_Function]]:
    """Return ({function: its loop paths}, functions with more than `limit` loop paths).

    The first result has the functions that are called from the top level of a file, directly or through other
    functions. Calls inside a function with too many loop paths are not followed.
    """
    callees: dict[_Function, list[tuple[_Function, tuple[str, ...]]]] = {}
    for key in functions:
        for path, caller, around in calls.get(name_in_calls(key[1]), ()):
            callees.setdefault((path, caller), []).append((key, around))
    loop_paths: dict[_Function, set[tuple[str, ...]]] = {
        key: {()} for key in functions if key[1] == MODULE
    }
    too_many: set[_Function] = set()
    remaining: list[tuple[_Function, tuple[str, ...]]] = [(key, ()) for key in loop_paths]
    while remaining:
        caller_key, caller_path = remaining.pop()
        if caller_key in too_many:
            continue
        for key, around in callees.get(caller_key, ()):
            callee_path = (caller_path + around)[:DEEPEST]
            callee_paths = loop_paths.setdefault(key, set())
            if callee_path in callee_paths:
                continue
            if len(callee_paths) >= limit:
                too_many.add(key)
                continue
            callee_paths.add(callee_path)
            remaining.append((key, callee_path))
    return loop_paths, too_many


def _passed_as_values(files: Sequence[FileCalls], functions: set[_Function]) -> set[_Function]:
    """Return those of `functions` that `files` use as values, so that any code may call them."""
    names = frozenset[str]().union(*(file.names for file in files))
    attributes = frozenset[str]().union(*(file.attributes for file in files))
    of_modules = frozenset[str]().union(*(file.of_modules for file in files))
    passed = set()
    for path, function in functions:
        *outer, name = function.split(".")
        is_method = bool(outer) and outer[-1] != "<locals>"
        if name in attributes if is_method else name in names or name in of_modules:
            passed.add((path, function))
    return {key for key in passed if key[1] != MODULE}


def _read_as_values(nodes: Sequence[ast.AST]) -> tuple[set[str], set[str], set[str]]:
    """Return (names, attributes, attributes of modules) that `nodes` read as values, without calling them."""
    names: set[str] = set()
    attributes: set[str] = set()
    of_modules: set[str] = set()
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        if id(node) in called or not isinstance(getattr(node, "ctx", None), ast.Load):
            continue
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
            if getattr(node.value, "id", None) in modules:
                of_modules.add(node.attr)
    return names, attributes, of_modules


def _generators(tree: ast.Module) -> Iterator[str]:
    """Yield the qualified name of each generator and coroutine."""
    remaining: list[tuple[ast.AST, str]] = [(tree, "")]
    while remaining:
        node, prefix = remaining.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                name = prefix + child.name
                if isinstance(child, ast.AsyncFunctionDef) or _yields(child):
                    yield name
                remaining.append((child, f"{name}.<locals>."))
            elif isinstance(child, ast.ClassDef):
                remaining.append((child, f"{prefix}{child.name}."))
            else:
                remaining.append((child, prefix))


def _yields(function: ast.FunctionDef) -> bool:
    remaining: list[ast.AST] = list(function.body)
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            remaining.extend(ast.iter_child_nodes(node))
    return False


def functions_that_loop(files: Iterable[FileCalls]) -> frozenset[str]:
    r"""Return the names of functions and classes whose call runs a loop, in their own code or in code that it calls.

    >>> text = "def a(): b()\ndef b():\n  for i in x: c()\ndef c(): pass"
    >>> sorted(functions_that_loop([calls_of_file(ast.parse(text), "t.py")]))
    ['a', 'b']
    >>> text = "class A:\n  def __init__(self):\n    for i in x: pass\nclass B(A): pass"
    >>> sorted(functions_that_loop([calls_of_file(ast.parse(text), "t.py")]))
    ['A', 'B', '__init__']
    """
    looping: set[str] = set()
    calls: dict[str, set[str]] = {}
    for file in files:
        looping |= file.looping
        for name, called in file.called.items():
            calls.setdefault(name, set()).update(called)
    growing = True
    while growing:
        callers = {
            name for name, called in calls.items() if name not in looping and called & looping
        }
        growing = bool(callers)
        looping |= callers
    return frozenset(looping)


def called_name(node: ast.AST) -> str:
    """Return the last word of the function that a call names: `fit` for `trainer.fit()`; "" if `node` is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return _last_name(node.func)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def name_in_calls(function: str) -> str:
    """Return the name by which code calls `function`, a qualified name: its last word.

    For `__init__`, that is the name of the class.
    """
    parts = function.split(".")
    return parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]


class _CallCollector:
    """Lists the functions and calls of a text. `ids` maps lines to the ids of the loops that begin there."""

    def __init__(self, ids: Mapping[int, str]) -> None:
        self.ids = ids

    def functions(self, node: ast.AST, prefix: str = "") -> Iterator[str]:
        """Yield the qualified name of each function inside `node`; each begins with `prefix`."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield prefix + child.name
                yield from self.functions(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from self.functions(child, f"{prefix}{child.name}.")
            else:
                yield from self.functions(child, prefix)

    def calls(
        self, node: ast.AST, function: str, prefix: str, around: tuple[str, ...]
    ) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield (called name, calling function, ids of the loops around the call) for each call inside `node`.

        `function` and `around` are the function and the loops around `node`. The qualified name of a function or
        class that is defined directly inside `node` begins with `prefix`.
        """
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                func = child.func
                if isinstance(func, ast.Attribute | ast.Name):
                    name = func.attr if isinstance(func, ast.Attribute) else func.id
                    yield name, function, around
            if isinstance(child, FUNCTIONS):
                inner = prefix + child.name
                yield from self.calls(child, inner, f"{inner}.<locals>.", ())
            elif isinstance(child, ast.ClassDef):
                yield from self.calls(child, function, f"{prefix}{child.name}.", around)
            elif isinstance(child, LOOPS):
                chain = (*around, self.ids[child.lineno])
                first: ast.expr = child.test if isinstance(child, ast.While) else child.iter
                yield from self.calls(ast.Expr(first), function, prefix, around)
                for block, inside in ((child.body, chain), (child.orelse, around)):
                    yield from self.calls(ast.Module(block, []), function, prefix, inside)
            else:
                yield from self.calls(child, function, prefix, around)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned_names(loop: Loop) -> tuple[str, ...]:
    r"""Return the variables that the body of a loop assigns, in order.

    Assignments in inner loops, names that begin with an underscore, and targets of loops are left out.

    >>> text = "for e in r:\n  if e:\n    loss = 1\n  a, (b, _c) = f()\n  for i in a:\n    i += 1; x = 2"
    >>> assigned_names(ast.parse(text).body[0])
    ('loss', 'a', 'b')
    """
    names: dict[str, None] = {}
    for node in _statements(loop):
        for target in _targets(node):
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    names.setdefault(part.id)
    targets = _loop_targets(loop)
    return tuple(name for name in names if not name.startswith("_") and name not in targets)


def loops_inside(loop: Loop) -> list[Loop]:
    """Return the loops in the body of `loop`, at any depth, without loops of functions defined there."""
    return [node for node in _inside(loop, into_loops=True) if isinstance(node, Loop)]


def _statements(loop: Loop) -> Iterator[ast.AST]:
    for node in _inside(loop, into_loops=False):
        if not isinstance(node, Loop):
            yield node


def _inside(loop: Loop, *, into_loops: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a loop's body, and of the test of a `while`, in the order of the text.

    Functions, classes and comprehensions are not entered, nor the bodies of inner loops unless `into_loops`.
    """
    remaining: list[ast.AST] = list(reversed(loop.body))
    if isinstance(loop, ast.While):
        remaining.append(loop.test)
    while remaining:
        node = remaining.pop()
        yield node
        if isinstance(node, Loop) and not into_loops:
            remaining.extend(reversed(node.orelse))
        elif not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            remaining.extend(reversed(list(ast.iter_child_nodes(node))))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        return [node.target]
    return []


def _loop_targets(loop: Loop) -> set[str]:
    loops = [loop, *loops_inside(loop)]
    return {
        part.id
        for each in loops
        if not isinstance(each, ast.While)
        for part in ast.walk(each.target)
        if isinstance(part, ast.Name)
    }
