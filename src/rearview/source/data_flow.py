"""Find the names that statements read, bind and may change, and the last statement before a place that bound a name.

Propagation uses this module to carry a statement to another version. Probes use `scopes`, which resolves names
differently: docs/decisions/two-matchings.md says why both modules exist.
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
_READ_ONLY_CALLS = re.compile(
    r"^(print|log\w*|info|debug|warn\w*|error|add_(scalar|image|histogram|text|figure)s?|write|record\w*"
    r"|set_(description|postfix)\w*|flush|report\w*|format|len|str|int|float|min|max|sum|round|abs|range"
    r"|enumerate|zip|item|mean|isinstance|getattr|hasattr|join|time|perf_counter|sorted|list|dict|tuple)$"
)
"""Matches names of functions and methods that change neither their arguments nor the method's object."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


@dataclass(frozen=True, slots=True)
class Uses:
    """The names that a piece of code reads, binds and may change."""

    reads: frozenset[str]
    """Names that the code reads before it binds them: their values come from earlier code."""
    writes: frozenset[str]
    """Names that the code binds."""
    changes: frozenset[str]
    """Names of objects that the code may change in place."""
    members: frozenset[tuple[str, str]]
    """(name, attribute) for each `name.attribute`, read or assigned."""
    attributes: frozenset[str]
    """Names of all attributes, read or assigned: `b` and `c` for `a.b.c`."""
    leaves: bool
    """Whether the code contains a `return`, `break`, `continue` or `raise`, outside functions that it defines."""
    sets: frozenset[str] = frozenset()
    """Dotted names that are assigned, such as `self.rate`."""
    gets: frozenset[str] = frozenset()
    """Dotted names that are read."""


def uses(trees: Iterable[ast.AST]) -> Uses:
    r"""Return the names that a sequence of statements or expressions reads, binds and may change.

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
    """Collects the uses of names in the syntax trees that it visits, in the order of evaluation."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.changes: set[str] = set()
        self.members: set[tuple[str, str]] = set()
        self.attributes: set[str] = set()
        self.sets: set[str] = set()
        self.gets: set[str] = set()
        self.leaves = False
        self.comprehension_variables: list[set[str]] = []
        """For each comprehension around the current node, outermost first: the variables that it binds."""

    def add_read(self, name: str) -> None:
        if name not in self.writes and not any(
            name in names for names in self.comprehension_variables
        ):
            self.reads.add(name)

    def visit(self, tree: ast.AST) -> None:  # noqa: C901, PLR0912 - one dispatch over kinds of node
        if isinstance(tree, ast.Name):
            if isinstance(tree.ctx, ast.Load):
                self.add_read(tree.id)
            elif not any(tree.id in names for names in self.comprehension_variables):
                self.writes.add(tree.id)
            return
        if isinstance(tree, _JUMPS):
            self.leaves = True
        if isinstance(tree, ast.Assign):
            self.visit_all([tree.value, *tree.targets])
        elif isinstance(tree, ast.AnnAssign):
            self.visit_all([each for each in (tree.value, tree.target) if each is not None])
        elif isinstance(tree, ast.AugAssign):
            root = root_name(tree.target)
            if isinstance(tree.target, ast.Name):
                self.add_read(tree.target.id)
            elif root:
                self.add_read(root)
                self.changes.add(root)
                self.gets.add(dotted(tree.target))
            self.visit_all([tree.value, tree.target])
        elif isinstance(tree, (ast.For, ast.AsyncFor)):
            self.visit_all([tree.iter, tree.target, *tree.body, *tree.orelse])
        elif isinstance(tree, _COMPREHENSIONS):
            self.visit_comprehension(tree)
        elif isinstance(tree, _FUNCTIONS):
            self.visit_function(tree)
        elif isinstance(tree, ast.ClassDef):
            self.visit_children(tree)
            self.writes.add(tree.name)
        elif isinstance(tree, (ast.Import, ast.ImportFrom)):
            self.writes.update((name.asname or name.name).split(".")[0] for name in tree.names)
        elif isinstance(tree, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            if tree.name:
                self.writes.add(tree.name)
            self.visit_children(tree)
        elif isinstance(tree, (ast.Attribute, ast.Subscript)):
            self.visit_attribute_or_item(tree)
        elif isinstance(tree, ast.Call):
            self.visit_call(tree)
        else:
            self.visit_children(tree)

    def visit_all(self, trees: Iterable[ast.AST]) -> None:
        for each in trees:
            self.visit(each)

    def visit_children(self, tree: ast.AST) -> None:
        self.visit_all(ast.iter_child_nodes(tree))

    def visit_attribute_or_item(self, tree: ast.Attribute | ast.Subscript) -> None:
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
        self.visit_children(tree)

    def visit_call(self, tree: ast.Call) -> None:
        called = tree.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if not _READ_ONLY_CALLS.match(name):
            if isinstance(called, ast.Attribute) and (root := root_name(called)):
                self.changes.add(root)
            for each in (*tree.args, *(keyword.value for keyword in tree.keywords)):
                if root := root_name(each):
                    self.changes.add(root)
        self.visit_children(tree)

    def visit_comprehension(self, tree: ast.AST) -> None:
        bound: set[str] = set()
        generators: list[ast.comprehension] = tree.generators  # type: ignore[attr-defined]
        for each in generators:
            bound |= {n.id for n in ast.walk(each.target) if isinstance(n, ast.Name)}
        self.visit(generators[0].iter)
        self.comprehension_variables.append(bound)
        self.visit_children(tree)
        self.comprehension_variables.pop()

    def visit_function(self, tree: ast.AST) -> None:
        args: ast.arguments = tree.args  # type: ignore[attr-defined]
        self.visit_all([*args.defaults, *(each for each in args.kw_defaults if each is not None)])
        self.visit_all(getattr(tree, "decorator_list", ()))
        name = getattr(tree, "name", None)
        body = tree.body if isinstance(tree.body, list) else [tree.body]  # type: ignore[attr-defined]
        inner = _UseReader()
        inner.writes |= parameters(args)
        if name:
            inner.writes.add(name)
        stored = _UseReader()
        stored.visit_all(body)
        inner.writes |= stored.writes
        inner.visit_all(body)
        for each in inner.reads:
            self.add_read(each)
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
    """Return the variable that a chain of attributes and items starts from, such as `a` for `a.b[c].d`.

    Return "" if the chain starts from another expression, such as a call.
    """
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


def rebinds(reader: Uses, writer: Uses) -> bool:
    """Return True if the code of `writer` assigns a name or an attribute that the code of `reader` reads.

    An assigned attribute counts if `reader` reads that attribute or the whole object. An object does not
    count if `writer` only passes it to a call or calls its methods, because such a call may change nothing.
    """
    if writer.writes & reader.reads:
        return True
    for target in writer.sets:
        root = target.partition(".")[0]
        if root not in reader.reads:
            continue
        of_root = [each for each in reader.gets if each.partition(".")[0] == root]
        if not of_root or any(
            f"{each}.".startswith(f"{target}.") or f"{target}.".startswith(f"{each}.")
            for each in of_root
        ):
            return True
    return False


def conflict(first_uses: Uses, second_uses: Uses) -> bool:
    """Return True if two pieces of code may compute something else when they run in the other order."""
    first, second = first_uses.writes | first_uses.changes, second_uses.writes | second_uses.changes
    if first_uses.leaves or second_uses.leaves:
        return True
    return bool(
        first & second_uses.reads
        or second & first_uses.reads
        or first_uses.writes & second_uses.writes
    )


def header(node: StatementNode) -> list[ast.AST]:
    """Return the expressions before the body of a loop, `if`, `with` or `match`, such as the test of an `if`.

    Return an empty list for other statements.
    """
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
    """Return the names that a statement itself binds, without those that statements inside it bind."""
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
    """Yield the nodes that may have run before the statement at `index` of `block`, nearest first.

    The nodes are inside the function, class or module that contains `block`; the last node is that function,
    class or module itself. Branches of an `if` or `match` that cannot run with the statement are left out.
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
            for sibling in reversed(owner.children[: block.index]):
                yield from _backwards(sibling)
        yield owner
        index = owner.index
        assert owner.parent is not None
        block = owner.parent


def _backwards(node: StatementNode) -> Iterator[StatementNode]:
    """Yield the nodes inside `node`, last first, then `node`. Do not enter functions and classes."""
    if not (node.is_scope and not node.is_block):
        for child in reversed(node.children):
            yield from _backwards(child)
    yield node


def visible(block: StatementNode, index: int) -> set[str]:
    """Return the names that may have a value before the statement at `index` of `block`, without builtins."""
    names: set[str] = set()
    own = block.scope().tree if block.parent is not None else None
    for node in earlier(block, index):
        if node.tree is own and not node.is_block:
            if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names |= parameters(node.tree.args)
        else:
            names |= binds(node)
            if isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While)) and not node.is_block:
                names |= bound_in(node)  # an earlier iteration of the loop may have bound the names
    scope = block.scope() if block.parent is not None else block
    while scope.parent is not None:
        scope = scope.scope()
        if not isinstance(scope.tree, ast.ClassDef):
            names |= bound_in(scope)
            if isinstance(scope.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names |= parameters(scope.tree.args)
    return names


def bound_in(scope: StatementNode) -> set[str]:
    """Return every name that statements inside `scope` bind. Do not enter functions and classes in it."""
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
    """Return the nearest node that binds `name` before the statement at `index` of `block`.

    If `name` is a parameter, return its function. Return None if no earlier node of the function, class or
    module around the statement binds the name.
    """
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
