"""What statements read, bind and may change, and which names can be seen at a place."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rearview.source.tree import SCOPES, Node

BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "unicode", "xrange", "raw_input"}
# calls that write down what they are given and change nothing they are given
_SINKS = re.compile(
    r"^(print|log\w*|info|debug|warn\w*|error|add_(scalar|image|histogram|text|figure)s?|write|record\w*"
    r"|set_(description|postfix)\w*|flush|report\w*|format|len|str|int|float|min|max|sum|round|abs|range"
    r"|enumerate|zip|item|mean|isinstance|getattr|hasattr|join|time|perf_counter|sorted|list|dict|tuple)$"
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)


@dataclass(frozen=True, slots=True)
class Uses:
    """What a stretch of code does with names."""

    reads: frozenset[str]  # needed from outside
    writes: frozenset[str]  # bound
    changes: frozenset[str]  # objects that may be changed in place
    members: frozenset[tuple[str, str]]  # attributes read of a name
    leaves: bool  # control may leave the block


def uses(trees: Iterable[ast.AST]) -> Uses:
    """Return what statements, taken in order, do with names.

    >>> found = uses(ast.parse("x = f(y)\\nprint(x.a, [z for z in w])").body)
    >>> sorted(found.reads), sorted(found.writes)
    (['f', 'print', 'w', 'y'], ['x'])
    """
    reader = _Reader()
    for tree in trees:
        reader.visit(tree)
    return Uses(
        frozenset(reader.reads),
        frozenset(reader.writes),
        frozenset(reader.changes),
        frozenset(reader.members),
        reader.leaves,
    )


class _Reader:
    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.changes: set[str] = set()
        self.members: set[tuple[str, str]] = set()
        self.leaves = False
        self.hidden: list[set[str]] = []

    def read(self, name: str) -> None:
        if name not in self.writes and not any(name in names for names in self.hidden):
            self.reads.add(name)

    def visit(self, tree: ast.AST) -> None:
        if isinstance(tree, ast.Name):
            if isinstance(tree.ctx, ast.Load):
                self.read(tree.id)
            elif not any(tree.id in names for names in self.hidden):
                self.writes.add(tree.id)
            return
        if isinstance(tree, _LEAVES):
            self.leaves = True
        if isinstance(tree, ast.Assign):
            self.all([tree.value, *tree.targets])
        elif isinstance(tree, ast.AnnAssign):
            self.all([each for each in (tree.value, tree.target) if each is not None])
        elif isinstance(tree, ast.AugAssign):
            root = root_name(tree.target)
            if isinstance(tree.target, ast.Name):
                self.read(tree.target.id)
            elif root:
                self.read(root)
                self.changes.add(root)
            self.all([tree.value, tree.target])
        elif isinstance(tree, (ast.For, ast.AsyncFor)):
            self.all([tree.iter, tree.target, *tree.body, *tree.orelse])
        elif isinstance(tree, _COMPREHENSIONS):
            self.comprehension(tree)
        elif isinstance(tree, _FUNCTIONS):
            self.function(tree)
        elif isinstance(tree, ast.ClassDef):
            self.children(tree)
            self.writes.add(tree.name)
        elif isinstance(tree, (ast.Import, ast.ImportFrom)):
            self.writes.update((name.asname or name.name).split(".")[0] for name in tree.names)
        elif isinstance(tree, ast.ExceptHandler):
            if tree.name:
                self.writes.add(tree.name)
            self.children(tree)
        elif isinstance(tree, (ast.MatchAs, ast.MatchStar)):
            if tree.name:
                self.writes.add(tree.name)
            self.children(tree)
        elif isinstance(tree, (ast.Attribute, ast.Subscript)):
            self.part(tree)
        elif isinstance(tree, ast.Call):
            self.call(tree)
        else:
            self.children(tree)

    def all(self, trees: Iterable[ast.AST]) -> None:
        for each in trees:
            self.visit(each)

    def children(self, tree: ast.AST) -> None:
        self.all(ast.iter_child_nodes(tree))

    def part(self, tree: ast.Attribute | ast.Subscript) -> None:
        root = root_name(tree)
        if root and not isinstance(tree.ctx, ast.Load):
            self.changes.add(root)
        if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name):
            self.members.add((tree.value.id, tree.attr))
        self.children(tree)

    def call(self, tree: ast.Call) -> None:
        called = tree.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if not _SINKS.match(name):
            if isinstance(called, ast.Attribute) and (root := root_name(called)):
                self.changes.add(root)
            for each in (*tree.args, *(keyword.value for keyword in tree.keywords)):
                if root := root_name(each):
                    self.changes.add(root)
        self.children(tree)

    def comprehension(self, tree: ast.AST) -> None:
        bound: set[str] = set()
        generators: list[ast.comprehension] = tree.generators  # type: ignore[attr-defined]
        for each in generators:
            bound |= {n.id for n in ast.walk(each.target) if isinstance(n, ast.Name)}
        self.visit(generators[0].iter)
        self.hidden.append(bound)
        self.children(tree)
        self.hidden.pop()

    def function(self, tree: ast.AST) -> None:
        args: ast.arguments = tree.args  # type: ignore[attr-defined]
        self.all([*args.defaults, *(each for each in args.kw_defaults if each is not None)])
        self.all(getattr(tree, "decorator_list", ()))
        name = getattr(tree, "name", None)
        body = tree.body if isinstance(tree.body, list) else [tree.body]  # type: ignore[attr-defined]
        inner = _Reader()
        inner.writes |= parameters(args)
        if name:
            inner.writes.add(name)
        stored = _Reader()
        stored.all(body)
        inner.writes |= stored.writes
        inner.all(body)
        for each in inner.reads:
            self.read(each)
        self.members |= inner.members
        if name:
            self.writes.add(name)


def parameters(args: ast.arguments) -> set[str]:
    """Return the names of a function's parameters."""
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {each.arg for each in every if each is not None}


def root_name(tree: ast.AST) -> str:
    """Return the name at the bottom of `a.b[c].d`, or an empty text."""
    while isinstance(tree, (ast.Attribute, ast.Subscript, ast.Starred)):
        tree = tree.value
    return tree.id if isinstance(tree, ast.Name) else ""


def header(node: Node) -> list[ast.AST]:
    """Return the parts of a compound statement that are not its blocks."""
    tree = node.tree
    if isinstance(tree, (ast.For, ast.AsyncFor)):
        return [tree.iter, tree.target]
    if isinstance(tree, (ast.While, ast.If)):
        return [tree.test]
    if isinstance(tree, (ast.With, ast.AsyncWith)):
        return list(tree.items)
    if isinstance(tree, ast.Match):
        return [tree.subject]
    return []


def binds(node: Node) -> frozenset[str]:
    """Return the names that a statement itself binds, not those bound in its blocks."""
    if node.bound is None:
        node.bound = _binds(node)
    return node.bound


def _binds(node: Node) -> frozenset[str]:
    tree = node.tree
    if node.is_block:
        if isinstance(tree, ast.ExceptHandler) and tree.name:
            return frozenset({tree.name})
        return uses([tree.pattern]).writes if isinstance(tree, ast.match_case) else frozenset()
    if isinstance(tree, SCOPES):
        return frozenset({tree.name})
    if not node.children:
        return uses([tree]).writes
    return uses(header(node)).writes


def conflict(one: Uses, two: Uses) -> bool:
    """Say whether the order of two stretches of code can matter to what they compute."""
    first, second = one.writes | one.changes, two.writes | two.changes
    if one.leaves or two.leaves:
        return True
    return bool(first & two.reads or second & one.reads or one.writes & two.writes)


def earlier(block: Node, index: int) -> Iterator[Node]:
    """Yield the nodes that may have run before a place of a scope, nearest first.

    Other branches of an `if` or `match` around the place are left out; the scope itself is last.
    """
    while True:
        for child in reversed(block.children[:index]):
            yield from _backwards(child)
        yield block
        owner = block.parent
        if owner is None or (owner.is_scope and not owner.is_block):
            if owner is not None:
                yield owner
            return
        if not isinstance(owner.tree, (ast.If, ast.Match)):
            for other in reversed(owner.children[: block.index]):
                yield from _backwards(other)
        yield owner
        index = owner.index
        assert owner.parent is not None
        block = owner.parent


def _backwards(node: Node) -> Iterator[Node]:
    if not (node.is_scope and not node.is_block):
        for child in reversed(node.children):
            yield from _backwards(child)
    yield node


def visible(block: Node, index: int) -> set[str]:
    """Return the names that can hold a value at a place, builtins not counted."""
    found: set[str] = set()
    for node in earlier(block, index):
        if node.is_scope and not node.is_block:
            if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found |= parameters(node.tree.args)
        else:
            found |= binds(node)
            if isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While)) and not node.is_block:
                found |= bound_in(node)  # by an earlier turn of the loop
    scope = block.scope() if not (block.parent is None) else block
    while scope.parent is not None:
        scope = scope.scope()
        if not isinstance(scope.tree, ast.ClassDef):
            found |= bound_in(scope)
            if isinstance(scope.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found |= parameters(scope.tree.args)
    return found


def bound_in(scope: Node) -> set[str]:
    """Return every name bound below a node, scopes inside it left out."""
    found: set[str] = set()
    stack = list(scope.children)
    while stack:
        node = stack.pop()
        found |= binds(node)
        if isinstance(node.tree, ast.Global) and not node.is_block:
            found |= set(node.tree.names)
        if node.is_block or not node.is_scope:
            stack.extend(node.children)
    return found


def definition(block: Node, index: int, name: str) -> Node | None:
    """Return the nearest statement before a place that binds a name, or the function it is given to."""
    for node in earlier(block, index):
        if node.is_scope and not node.is_block:
            tree = node.tree
            if isinstance(tree, SCOPES) and not isinstance(tree, ast.ClassDef):
                if name in parameters(tree.args):
                    return node
            if tree is not getattr(block.scope(), "tree", None) and name in binds(node):
                return node
        elif name in binds(node):
            return node
    return None
