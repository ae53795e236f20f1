"""Which names statements read, bind and may change, and which statement set a name last.

Propagation uses this to move a statement to another text. Probes use `scopes`, which analyses names in
another way: docs/decisions/two-matchings.md says why there are two.
"""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rearview.source.statement_trees import SCOPES, StatementNode

BUILTINS = frozenset(dir(builtins)) | {
    "__file__",
    "__name__",
    "__doc__",
    "unicode",
    "xrange",
    "raw_input",
}
# calls that read their arguments and do not change them
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
    """How a piece of code uses names."""

    reads: frozenset[str]  # read before the code itself binds them
    writes: frozenset[str]  # bound
    changes: frozenset[str]  # objects that may be changed in place
    members: frozenset[tuple[str, str]]  # attributes read of a name
    attributes: frozenset[str]  # every attribute that is read: `b` and `c` of `a.b.c`
    leaves: bool  # control may leave the block
    sets: frozenset[str] = frozenset()  # dotted names that are assigned, such as `self.rate`
    gets: frozenset[str] = frozenset()  # dotted names that are read


def uses(trees: Iterable[ast.AST]) -> Uses:
    r"""Return what statements, taken in order, do with names.

    >>> used = uses(ast.parse("x = f(y)\nprint(x.a, [z for z in w])").body)
    >>> sorted(used.reads), sorted(used.writes)
    (['f', 'print', 'w', 'y'], ['x'])
    """
    reader = _UseReader()
    for tree in trees:
        reader.visit(tree)
    return Uses(
        frozenset(reader.reads),
        frozenset(reader.writes),
        frozenset(reader.changes),
        frozenset(reader.members),
        frozenset(reader.attributes),
        reader.leaves,
        frozenset(reader.sets),
        frozenset(reader.gets),
    )


class _UseReader:
    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.changes: set[str] = set()
        self.members: set[tuple[str, str]] = set()
        self.attributes: set[str] = set()
        self.sets: set[str] = set()
        self.gets: set[str] = set()
        self.leaves = False
        self.hidden: list[set[str]] = []

    def read(self, name: str) -> None:
        if name not in self.writes and not any(name in names for names in self.hidden):
            self.reads.add(name)

    def visit(self, tree: ast.AST) -> None:  # noqa: C901, PLR0912 - one dispatch over kinds of node
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
                self.gets.add(dotted(tree.target))
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
        elif isinstance(tree, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
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
            self.sets.add(dotted(tree))
        elif root:
            self.gets.add(dotted(tree))
        if isinstance(tree, ast.Attribute):
            self.attributes.add(tree.attr)
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
        inner = _UseReader()
        inner.writes |= parameters(args)
        if name:
            inner.writes.add(name)
        stored = _UseReader()
        stored.all(body)
        inner.writes |= stored.writes
        inner.all(body)
        for each in inner.reads:
            self.read(each)
        self.members |= inner.members
        self.attributes |= inner.attributes
        self.gets |= inner.gets
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


def dotted(tree: ast.AST) -> str:
    """Return the dotted name up to the first subscript: `a.b` for `a.b`, `a.b[i]` and `a.b[i].c`.

    >>> dotted(ast.parse("a.b[0].c", mode="eval").body)
    'a.b'
    """
    parts: list[str] = []
    while isinstance(tree, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(tree, ast.Attribute):
            parts.append(tree.attr)
        else:
            parts.clear()
        tree = tree.value
    return ".".join([getattr(tree, "id", ""), *reversed(parts)])


def rebinds(used: Uses, other: Uses) -> bool:
    """Return True if `other` certainly assigns something that `used` reads.

    An assigned attribute counts if `used` reads that attribute or the whole object. An object that is only
    passed to a call, or whose method is called, does not count.
    """
    if other.writes & used.reads:
        return True
    for target in other.sets:
        root = target.partition(".")[0]
        if root not in used.reads:
            continue
        of_root = [each for each in used.gets if each.partition(".")[0] == root]
        if not of_root or any(
            f"{each}.".startswith(f"{target}.") or f"{target}.".startswith(f"{each}.")
            for each in of_root
        ):
            return True
    return False


def conflict(first_uses: Uses, second_uses: Uses) -> bool:
    """Return True if the order of two pieces of code can affect their results."""
    first, second = first_uses.writes | first_uses.changes, second_uses.writes | second_uses.changes
    if first_uses.leaves or second_uses.leaves:
        return True
    return bool(
        first & second_uses.reads
        or second & first_uses.reads
        or first_uses.writes & second_uses.writes
    )


def header(node: StatementNode) -> list[ast.AST]:
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


def binds(node: StatementNode) -> frozenset[str]:
    """Return the names that a statement itself binds, not those bound in its blocks."""
    if node.bound is None:
        node.bound = _binds(node)
    return node.bound


def _binds(node: StatementNode) -> frozenset[str]:
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


def earlier(block: StatementNode, index: int) -> Iterator[StatementNode]:
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


def _backwards(node: StatementNode) -> Iterator[StatementNode]:
    if not (node.is_scope and not node.is_block):
        for child in reversed(node.children):
            yield from _backwards(child)
    yield node


def visible(block: StatementNode, index: int) -> set[str]:
    """Return the names that can hold a value at a place, builtins not counted."""
    names: set[str] = set()
    own = block.scope().tree if block.parent is not None else None
    for node in earlier(block, index):
        if node.tree is own and not node.is_block:
            if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names |= parameters(node.tree.args)
        else:
            names |= binds(node)
            if isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While)) and not node.is_block:
                names |= bound_in(node)  # by an earlier iteration of the loop
    scope = block.scope() if block.parent is not None else block
    while scope.parent is not None:
        scope = scope.scope()
        if not isinstance(scope.tree, ast.ClassDef):
            names |= bound_in(scope)
            if isinstance(scope.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names |= parameters(scope.tree.args)
    return names


def bound_in(scope: StatementNode) -> set[str]:
    """Return every name bound below a node, scopes inside it left out."""
    names: set[str] = set()
    stack = list(scope.children)
    while stack:
        node = stack.pop()
        names |= binds(node)
        if isinstance(node.tree, ast.Global) and not node.is_block:
            names |= set(node.tree.names)
        if node.is_block or not node.is_scope:
            stack.extend(node.children)
    return names


def definition(block: StatementNode, index: int, name: str) -> StatementNode | None:
    """Return the nearest statement before a place that binds a name, or the function whose parameter it is."""
    inside = block.scope().tree
    for node in earlier(block, index):
        tree = node.tree
        if tree is inside and not node.is_block:
            args = getattr(tree, "args", None)
            if isinstance(args, ast.arguments) and name in parameters(args):
                return node
        elif name in binds(node):
            return node
    return None
