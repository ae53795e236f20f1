"""Which names can hold a value at a place, and which statement set them."""

import ast
from collections.abc import Iterator

from rearview.source.tree import SCOPES, Node
from rearview.source.uses import parameters, uses


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
    own = block.scope().tree if block.parent is not None else None
    for node in earlier(block, index):
        if node.tree is own and not node.is_block:
            if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found |= parameters(node.tree.args)
        else:
            found |= binds(node)
            if isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While)) and not node.is_block:
                found |= bound_in(node)  # by an earlier turn of the loop
    scope = block.scope() if block.parent is not None else block
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
