"""The statements of a program as a tree, in which propagation matches statements and finds places for new ones.

A node is a statement or a block (a list of statements). Expressions are not nodes but words of their statement: a
file of 2,000 lines has about 2,000 nodes and is compared in milliseconds. `similarity` compares two statements by
their words.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rearview.source.text import Parsed

_WORD = re.compile(
    r"""(?P<comment>\#[^\r\n]*)
    |(?P<string>[bBrRuUfFtT]{0,3}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"
        |'(?:\\.|[^\\'\r\n])*'|"(?:\\.|[^\\"\r\n])*"))
    |(?P<word>\w+)
    |(?P<mark>->|:=|\*\*|//|<<|>>|[-+*/%@&|^<>=!~]=?|[.\[\]{}:;])""",
    re.VERBOSE | re.DOTALL,
)
_WORD_IN_STRING = re.compile(r"\w+")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Return,
    ast.Import,
    ast.ImportFrom,
)
_SCOPE_KINDS = {"Module", "FunctionDef", "ClassDef"}
_SAME_KIND = {
    "AsyncFunctionDef": "FunctionDef",
    "AsyncFor": "For",
    "AsyncWith": "With",
    "TryStar": "Try",
    "AnnAssign": "Assign",
}
"""Name of the class of a syntax node -> `StatementNode.kind`, if the two differ."""


@dataclass(eq=False, slots=True)
class StatementNode:
    """A statement, or a block: the statements of a module, or those of one branch of a compound statement."""

    kind: str
    """Name of the class of the syntax node, with variants such as `AsyncFor` as `For`; `block` for a block."""
    words: tuple[str, ...]
    """Words of a statement without its blocks. Words of a block: of the exception or pattern in its head."""
    start: int
    end: int
    tree: ast.AST
    """Syntax node of the statement, or of the statement, handler or case that the block belongs to."""
    role: str = ""
    """Which block of its statement the node is: `body`, `handler`, `case`, `orelse` or `finalbody`. Empty for a
    statement."""
    parent: "StatementNode | None" = None
    index: int = 0
    """Index of the node among the children of `parent`."""
    order: int = 0
    """Index of the node among all nodes of the text."""
    depth: int = 0
    children: list["StatementNode"] = field(default_factory=list)
    leads: bool = True
    """Whether the statement is the first one on its line."""
    bound: frozenset[str] | None = None
    """Names that the statement itself binds; None until `data_flow.binds` has computed this set."""
    is_block: bool = False
    """Whether the node is a block; otherwise, it is a statement."""
    is_scope: bool = False
    """Whether the node is a module, function or class, and so has its own variables."""

    def __post_init__(self) -> None:
        self.is_block = self.role != ""
        self.is_scope = self.kind in _SCOPE_KINDS

    def above(self) -> Iterator["StatementNode"]:
        """Yield the nodes around this node, nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def walk(self) -> Iterator["StatementNode"]:
        """Yield this node and all nodes inside it, in the order of the text."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def scope(self) -> "StatementNode":
        """Return the innermost function, class or module around this node; for the root, the node itself."""
        for node in self.above():
            if node.is_scope:
                return node
        return self


@dataclass(frozen=True, slots=True)
class StatementTree:
    """The statement tree of one text."""

    parsed: Parsed
    root: StatementNode
    """The block of the module's statements."""
    nodes: tuple[StatementNode, ...]
    """All statements and blocks, in the order of the text."""

    def statements(self) -> list[StatementNode]:
        """Return all statements, in the order of the text."""
        return [node for node in self.nodes if not node.is_block]


def grow(parsed: Parsed, *, without: tuple[int, int] | None = None) -> StatementTree:
    """Return the statement tree of a text.

    Unless `without` is None, statements between these two lines (inclusive) are left out.
    """
    builder = _Builder(parsed, without)
    body = parsed.tree.body
    root = StatementNode("Module", (), 1, max(1, len(parsed.lines)), parsed.tree, role="body")
    builder.add_statements(root, body)
    return StatementTree(parsed, root, tuple(builder.nodes))


class _Builder:
    """Collects the nodes of a statement tree, in the order of the text."""

    def __init__(self, parsed: Parsed, without: tuple[int, int] | None) -> None:
        self.lines = parsed.code_lines
        self.ascii = parsed.text.isascii()
        self.without = without
        self.nodes: list[StatementNode] = []

    def add_node(self, node: StatementNode, parent: StatementNode | None) -> StatementNode:
        node.order = len(self.nodes)
        self.nodes.append(node)
        if parent is not None:
            node.parent = parent
            node.depth = parent.depth + 1
            node.index = len(parent.children)
            parent.children.append(node)
        return node

    def add_statements(self, root: StatementNode, body: list[ast.stmt]) -> None:
        self.add_node(root, None)
        # a stack instead of recursion: elif chains can be a thousand deep
        remaining = [(root, body, at) for at in reversed(range(len(body)))]
        while remaining:
            block, siblings, at = remaining.pop()
            stmt = siblings[at]
            if at == 0 and block.order < 0:
                self.add_node(block, block.parent)
            start, end = first_line(stmt), last_line(stmt)
            if self.without and self.without[0] <= start and end <= self.without[1]:
                continue
            kind = type(stmt).__name__
            node = StatementNode(_SAME_KIND.get(kind, kind), self.words(stmt), start, end, stmt)
            node.leads = self.is_first_on_line(stmt)
            self.add_node(node, block)
            for role, tree, inner in reversed(blocks_of(stmt)):
                words = self.block_words(tree) if tree is not stmt else ()
                first, last = first_line(inner[0]), last_line(inner[-1])
                child = StatementNode(
                    "block", words, first, last, tree, role, parent=node, order=-1
                )
                remaining.extend(
                    (child, inner, position) for position in reversed(range(len(inner)))
                )

    def is_first_on_line(self, stmt: ast.stmt) -> bool:
        start = first_line(stmt)
        if start != stmt.lineno:
            return True  # the statement begins with a decorator
        return not self.lines[start - 1][: self.column(start, stmt.col_offset)].strip(" \t\f")

    def column(self, line: int, offset: int) -> int:
        if self.ascii:
            return offset
        return len(self.lines[line - 1].encode()[:offset].decode("utf-8", "replace"))

    def span(self, start: int, col: int, end: int, end_col: int) -> str:
        col, end_col = self.column(start, col), self.column(end, end_col)
        if start == end:
            return self.lines[start - 1][col:end_col]
        middle = self.lines[start : end - 1]
        return "".join([self.lines[start - 1][col:], *middle, self.lines[end - 1][:end_col]])

    def words(self, stmt: ast.stmt) -> tuple[str, ...]:
        if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [self.text_of(each) for each in stmt.decorator_list]
            head = (*decorators, f"def {stmt.name}")
            return tuple(word for text in head for word in words(text)) + (
                tuple(self.arguments(stmt.args))
            )
        if isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
            return words(f"{self.text_of(stmt.target)} = {self.text_of(stmt.value)}")
        parts = () if isinstance(stmt, _SIMPLE) else blocks_of(stmt)
        if not parts:
            return words(
                self.span(
                    stmt.lineno, stmt.col_offset, stmt.end_lineno or 0, stmt.end_col_offset or 0
                )
            )
        _, owner, inner = parts[0]
        stop = inner[0]
        if isinstance(stmt, (ast.Try, ast.Match)) or owner is not stmt:
            subject = self.text_of(stmt.subject) if isinstance(stmt, ast.Match) else ""
            return words(f"{type(stmt).__name__.lower()} {subject}")
        at = first_line(stop)
        col = stop.col_offset if at == stop.lineno else 0
        text = self.span(stmt.lineno, stmt.col_offset, at, col)
        if isinstance(stmt, ast.ClassDef):
            text = " ".join([*(self.text_of(each) for each in stmt.decorator_list), text])
        return words(text)

    def text_of(self, node: ast.expr) -> str:
        return self.span(
            node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
        )

    def arguments(self, args: ast.arguments) -> Iterator[str]:
        for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
            yield arg.arg
        for starred in (args.vararg, args.kwarg):
            if starred is not None:
                yield starred.arg
        for default in (*args.defaults, *(d for d in args.kw_defaults if d is not None)):
            yield from words(self.text_of(default))

    def block_words(self, tree: ast.AST) -> tuple[str, ...]:
        if isinstance(tree, ast.ExceptHandler):
            return words(self.text_of(tree.type)) if tree.type is not None else ()
        if isinstance(tree, ast.match_case):
            return words(ast.unparse(tree.pattern))
        return ()


@lru_cache(maxsize=32_768)  # texts that are compared have most of their statements in common
def words(text: str) -> tuple[str, ...]:
    """Return the words of code, without comments and without quotes, round brackets and commas.

    Formatters change these. A word in a string begins with `'`, but not in an f-string.

    >>> words("f(a, 'x y',)  # why")
    ('f', 'a', "'x", "'y")
    """
    tokens: list[str] = []
    for match in _WORD.finditer(text):
        kind = match.lastgroup
        if kind == "string":
            prefix, _, body = match[0].partition(match[0].strip("bBrRuUfFtT")[:1])
            if "f" in prefix.lower():
                tokens.extend(_WORD_IN_STRING.findall(body)[:60])
            else:
                tokens.extend(f"'{word}" for word in _WORD_IN_STRING.findall(body)[:60])
                if not body.strip("'\""):
                    tokens.append("''")
        elif kind != "comment":
            tokens.append(match[0])
    return tuple(tokens)


def blocks_of(stmt: ast.AST) -> list[tuple[str, ast.AST, list[ast.stmt]]]:
    """Return (role, owner, statements) for each block of a statement, in order; roles as in `StatementNode.role`.

    The owner is the syntax node of the statement itself, or of its exception handler or case with the block.
    """
    blocks: list[tuple[str, ast.AST, list[ast.stmt]]] = []
    if isinstance(stmt, _SIMPLE):
        return blocks
    body = getattr(stmt, "body", None)
    if isinstance(body, list) and body:
        blocks.append(("body", stmt, body))
    blocks.extend(("handler", each, each.body) for each in getattr(stmt, "handlers", ()))
    blocks.extend(("case", each, each.body) for each in getattr(stmt, "cases", ()))
    for role in ("orelse", "finalbody"):
        inner = getattr(stmt, role, None)
        if isinstance(inner, list) and inner:
            blocks.append((role, stmt, inner))
    return blocks


def first_line(stmt: ast.stmt) -> int:
    """Return the number of the first line of a statement, including its decorators."""
    if isinstance(stmt, SCOPES) and stmt.decorator_list:
        return min(stmt.lineno, *(decorator.lineno for decorator in stmt.decorator_list))
    return stmt.lineno


def last_line(stmt: ast.stmt) -> int:
    """Return the number of the last line of a statement."""
    return stmt.end_lineno or stmt.lineno


_SIMPLE_KINDS = {"Assign", "Expr", "AugAssign"}
_INTERCHANGEABLE = {"If", "For", "While", "With", "Try", "Assert"}
"""Kinds of statements, of which an edit may replace one by another and keep most words."""
KEYWORDS = {"if", "for", "while", "with", "try", "in", "as", "assert", "raise", "not", ":"}
_ASSIGNMENT_SIGNS = {"=", "+=", "-=", "*=", "/="}


def similarity(first: StatementNode, second: StatementNode) -> float:
    """Return how similar two statements are, from 0 to 1, by the words that both have.

    Statements that assign the same variables, or call the same function, count as more similar.
    """
    if first.kind == second.kind:
        value = _dice(first.words, second.words)
        target = lead(first)
        if target and target == lead(second):
            value = max(value, 0.35 + 0.65 * value)
        return value
    if {first.kind, second.kind} <= _SIMPLE_KINDS:
        return 0.9 * _dice(_value_words(first), _value_words(second))
    if {first.kind, second.kind} <= {"Return", *_SIMPLE_KINDS}:
        # one of the statements is a `return`: compare the returned value with the value of the other
        short = min(len(first.words), len(second.words)) < 4
        return 0.0 if short else 0.9 * _dice(_value_words(first), _value_words(second))
    if first.is_block or second.is_block or first.is_scope or second.is_scope:
        return 0.0
    if {first.kind, second.kind} & _INTERCHANGEABLE:
        # a loop or a test that was rewritten with another keyword keeps most of its words
        first_words, second_words = whole_words(first), whole_words(second)
        if max(len(first_words), len(second_words)) <= 120:
            value = _dice(first_words, second_words)
            return 0.85 * value if value >= 0.7 else 0.0
    return 0.0


def whole_words(node: StatementNode) -> list[str]:
    """Return the words of a statement and of all statements inside it, without keywords."""
    return [word for each in node.walk() for word in each.words if word not in KEYWORDS]


def value_of(node: StatementNode) -> tuple[str, ...]:
    """Return the words of the value that an assignment assigns.

    Return () if the value has fewer than five words, or if the statement is not an assignment.
    """
    if node.kind != "Assign" or not lead(node):
        return ()
    value = node.words[len(lead(node)) + 1 :]
    return value if len(value) >= 5 else ()


def lead(node: StatementNode) -> tuple[str, ...]:
    """Return the words of the target of an assignment, or of the function of a call; () for other statements."""
    words = node.words
    if node.kind in {"Assign", "AugAssign"}:
        for at, word in enumerate(words[:12]):
            if word in _ASSIGNMENT_SIGNS:
                return words[:at]
        return ()
    if node.kind == "Expr":
        at = 1
        while at + 1 < len(words) and words[at] == ".":
            at += 2
        return words[:at] if at > 1 else ()
    return ()


def _value_words(node: StatementNode) -> tuple[str, ...]:
    """Return the words of the value of a simple statement: without its target, and without `=` or `return`."""
    return node.words[len(lead(node)) + 1 :] if node.kind != "Expr" else node.words


def _dice(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the fraction of words, from 0 to 1, that two lists have in common (Sørensen-Dice coefficient)."""
    if first == second:
        return 1.0
    if not first or not second:
        return 0.0
    count = Counter(first)
    shared = 0
    for word in second:
        if count.get(word, 0) > 0:
            count[word] -= 1
            shared += 1
    return 2 * shared / (len(first) + len(second))
