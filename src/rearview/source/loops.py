"""The loops of a program: their names and ids, and which of them may be running around a function.

`loop_ids` names each loop of one text; `recorded_loop_ids` finds the same loops in an edited text.
`paths` follows calls by name and says through which loops a function may be entered. `assigned_names` are
the plain variables that the body of a loop assigns: the candidates for captured columns.
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
    """One loop of one version, the same in every text derived from it by probes."""

    path: str
    function: str
    """Qualified as Python does it: `Trainer.fit`, `outer.<locals>.inner`, `<module>`."""
    ordinal: int
    """Counts the recorded loops of that function from 0, in the order of the text."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}:{self.ordinal}:{self.name}"


def loop_name(node: Loop, function: str) -> str:
    """Return the name of a loop, for people.

    A `for` is named by the first name in its target that is not `_`; `rearview.loop("name", …)`
    by its name; a `while`, or a `for` without a named target, by its function.

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
    """Return the name in `rearview.loop("name", …)` or `rearview.block("name")`, else None."""
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
    """Yield (loop, function, names of the loops around it in that function and its own)."""
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
    """Return `name`, numbered if a loop around it in the same function has it already."""
    if name not in around:
        return name
    count = 2
    while f"{name}_{count}" in around:
        count += 1
    return f"{name}_{count}"


def loop_ids(tree: ast.Module, path: str = "") -> dict[int, LoopId]:
    r"""Return the id of each loop by the line it begins on.

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
    """Return the id of each recorded loop by the line it begins on in an edited text.

    `pairs` are (recorded statement, the same statement in the edited text). Loops that only the edited text
    has are left out.
    """
    ids = loop_ids(recorded, path)
    return {edited.lineno: ids[old.lineno] for old, edited in pairs if isinstance(old, LOOPS)}


def enclosing(parents: tuple[ast.AST, ...]) -> tuple[str, tuple[str, ...]]:
    """Return (function, loop names outermost first) for a place below `parents`."""
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


Chains = Mapping[tuple[str, str], tuple[tuple[str, ...], ...]]
"""(path, function) -> stacks of loops, outermost first, by name or by id."""


def chains(trees: Mapping[str, ast.Module], *, limit: int = 64) -> Chains:
    r"""Return, for each (path, function), the loops that may be running when it is entered.

    Calls are followed by name: `fit(...)` and `anything.fit(...)` may both mean any function
    called `fit`. Some functions are left out, because the text does not show which loops run around them:
    functions that no call names (a callback, `forward`), functions that are also passed as a value
    (`opt.step(closure)`), generators (the loop that draws from one may be anywhere), and all
    functions that these call.

    >>> text = "def step(): pass\ndef fit():\n  for i in x: step()\nfor epoch in y: fit()"
    >>> chains({"t.py": ast.parse(text)})["t.py", "step"]
    (('epoch', 'i'),)
    """
    files = tuple([calls_of_file(tree, path) for path, tree in trees.items()])
    return {key: names_of(stacks) for key, stacks in paths(files, limit=limit).items()}


def names_of(stacks: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the loops in stacks of loop ids, each stack of names once."""
    return tuple(sorted({tuple(map(name_of, stack)) for stack in stacks}))


@dataclass(frozen=True, slots=True, eq=False)
class FileCalls:
    """The functions of one file, the calls in it, and other uses through which a function may be called."""

    path: str
    functions: frozenset[str]
    """Their qualified names, `<module>` among them."""
    calls: frozenset[tuple[str, str, tuple[str, ...]]]
    """(name called, function it is called in, loops of that function around it)."""
    names: frozenset[str]
    """Names that are read other than to call them."""
    attributes: frozenset[str]
    """The same for attributes."""
    of_modules: frozenset[str]
    """The same for attributes of imported modules."""
    generators: frozenset[str]
    """Functions that are generators or coroutines."""
    looping: frozenset[str]
    """Last names of functions with a loop in their text, and of classes with one in their constructor."""
    called: Mapping[str, frozenset[str]]
    """Last name of a function or class -> names that it calls; of a class also its bases."""
    loops: frozenset[LoopId]


def calls_of_file(tree: ast.Module, path: str) -> FileCalls:
    """Return the functions of one file and the calls in it."""
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
def paths(files: tuple[FileCalls, ...], *, limit: int = 64) -> Chains:
    r"""Like `chains`, with the ids of the loops instead of their names, which may be shared.

    A function that more than `limit` stacks lead to is left out, too. A stack deeper than `DEEPEST`
    is cut off: its outermost loops are returned.

    >>> text = "def f():\n  for i in x: g()\nfor i in y: f()\ndef g(): pass"
    >>> paths((calls_of_file(ast.parse(text), "t.py"),))["t.py", "g"]
    (('t.py:<module>:0:i', 't.py:f:0:i'),)
    """
    calls: dict[str, set[tuple[str, str, tuple[str, ...]]]] = {}
    for file in files:
        for name, function, around in file.calls:
            calls.setdefault(name, set()).add((file.path, function, around))
    functions = {(file.path, function) for file in files for function in file.functions}
    stacks, unlimited = _follow_calls(functions, calls, limit)
    unknown = {key for key in functions if key not in stacks} | unlimited
    unknown |= _passed_as_values(files, functions)
    unknown |= {(file.path, function) for file in files for function in file.generators}
    grown = True
    while grown:
        callees = {
            key
            for key in functions - unknown
            if any((path, by) in unknown for path, by, _ in calls.get(called_as(key[1]), ()))
        }
        grown = bool(callees)
        unknown |= callees
    return {
        key: tuple(sorted(loop_stacks)) for key, loop_stacks in stacks.items() if key not in unknown
    }


_Function = tuple[str, str]
"""(path, qualified name)."""
_Calls = Mapping[str, set[tuple[str, str, tuple[str, ...]]]]
"""Name called -> (path, calling function, loops of that function around the call)."""


def _follow_calls(
    functions: set[_Function], calls: _Calls, limit: int
) -> tuple[dict[_Function, set[tuple[str, ...]]], set[_Function]]:
    """Return the stacks of loops that lead to each function, and the functions with too many.

    Calls made by a function with too many stacks are not followed.
    """
    callees: dict[_Function, list[tuple[_Function, tuple[str, ...]]]] = {}
    for key in functions:
        for path, caller, around in calls.get(called_as(key[1]), ()):
            callees.setdefault((path, caller), []).append((key, around))
    stacks: dict[_Function, set[tuple[str, ...]]] = {
        key: {()} for key in functions if key[1] == MODULE
    }
    unlimited: set[_Function] = set()
    todo: list[tuple[_Function, tuple[str, ...]]] = [(key, ()) for key in stacks]
    while todo:
        caller_key, stack = todo.pop()
        if caller_key in unlimited:
            continue
        for key, around in callees.get(caller_key, ()):
            longer = (stack + around)[:DEEPEST]
            own = stacks.setdefault(key, set())
            if longer in own:
                continue
            if len(own) >= limit:
                unlimited.add(key)
                continue
            own.add(longer)
            todo.append((key, longer))
    return stacks, unlimited


def _passed_as_values(files: Sequence[FileCalls], functions: set[_Function]) -> set[_Function]:
    """Return the functions that are used other than in a call, so that any code may call them."""
    names = frozenset[str]().union(*(file.names for file in files))
    attributes = frozenset[str]().union(*(file.attributes for file in files))
    of_modules = frozenset[str]().union(*(file.of_modules for file in files))
    passed = set()
    for path, function in functions:
        *outer, name = function.split(".")
        method = bool(outer) and outer[-1] != "<locals>"
        if name in attributes if method else name in names or name in of_modules:
            passed.add((path, function))
    return {key for key in passed if key[1] != MODULE}


def _read_as_values(nodes: Sequence[ast.AST]) -> tuple[set[str], set[str], set[str]]:
    """Return the names, attributes, and attributes of modules that are read other than to call them."""
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
    todo: list[tuple[ast.AST, str]] = [(tree, "")]
    while todo:
        node, prefix = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                name = prefix + child.name
                if isinstance(child, ast.AsyncFunctionDef) or _yields(child):
                    yield name
                todo.append((child, f"{name}.<locals>."))
            elif isinstance(child, ast.ClassDef):
                todo.append((child, f"{prefix}{child.name}."))
            else:
                todo.append((child, prefix))


def _yields(function: ast.FunctionDef) -> bool:
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
    return False


def loopers(files: Iterable[FileCalls]) -> frozenset[str]:
    r"""Return the names of functions and classes whose call runs a loop, in their text or in what they call.

    >>> text = "def a(): b()\ndef b():\n  for i in x: c()\ndef c(): pass"
    >>> sorted(loopers([calls_of_file(ast.parse(text), "t.py")]))
    ['a', 'b']
    >>> text = "class A:\n  def __init__(self):\n    for i in x: pass\nclass B(A): pass"
    >>> sorted(loopers([calls_of_file(ast.parse(text), "t.py")]))
    ['A', 'B', '__init__']
    """
    looping: set[str] = set()
    calls: dict[str, set[str]] = {}
    for file in files:
        looping |= file.looping
        for name, called in file.called.items():
            calls.setdefault(name, set()).update(called)
    grown = True
    while grown:
        callers = {
            name for name, called in calls.items() if name not in looping and called & looping
        }
        grown = bool(callers)
        looping |= callers
    return frozenset(looping)


def called_name(node: ast.AST) -> str:
    """Return the last word of the called name: `fit` for `trainer.fit()`; "" for nodes that are no call."""
    if not isinstance(node, ast.Call):
        return ""
    return _last_name(node.func)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def called_as(function: str) -> str:
    """Return the word by which a function is called: its last name, or that of its class."""
    parts = function.split(".")
    return parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]


class _CallCollector:
    """Lists the functions of a text and the calls in it, with the loops around each call."""

    def __init__(self, ids: Mapping[int, str]) -> None:
        self.ids = ids

    def functions(self, node: ast.AST, prefix: str = "") -> Iterator[str]:
        """Yield the qualified name of each function below a node."""
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
        """Yield (name called, function it is called in, loops of that function around it)."""
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
    r"""Return the variables that a loop's body assigns outside loops inside it, in order.

    Names that begin with an underscore, and targets of loops, are left out.

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
    """Return the loops in a loop's body, at any depth, that belong to the same function."""
    return [node for node in _inside(loop, into_loops=True) if isinstance(node, Loop)]


def _statements(loop: Loop) -> Iterator[ast.AST]:
    for node in _inside(loop, into_loops=False):
        if not isinstance(node, Loop):
            yield node


def _inside(loop: Loop, *, into_loops: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a loop's body in the order of the text, without entering other scopes."""
    todo: list[ast.AST] = list(reversed(loop.body))
    if isinstance(loop, ast.While):
        todo.append(loop.test)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, Loop) and not into_loops:
            todo.extend(reversed(node.orelse))
        elif not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


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
