"""How similar two statements are, by the words they share, and what identifies a simple statement."""

from collections import Counter
from collections.abc import Sequence

from rearview.source.trees import StatementNode

_SIMPLE = {"Assign", "Expr", "AugAssign"}
_REWRITTEN = {"If", "For", "While", "With", "Try", "Assert"}
KEYWORDS = {"if", "for", "while", "with", "try", "in", "as", "assert", "raise", "not", ":"}
_SETS = {"=", "+=", "-=", "*=", "/="}


def likeness(first: StatementNode, second: StatementNode) -> float:
    """Return how similar two statements are, from 0 to 1, by the words they share.

    The variables a statement sets, and the function it calls, count more than the rest.
    """
    if first.kind == second.kind:
        value = _dice(first.words, second.words)
        target = lead(first)
        if target and target == lead(second):
            value = max(value, 0.35 + 0.65 * value)
        return value
    if {first.kind, second.kind} <= _SIMPLE:
        return 0.9 * _dice(_tail(first), _tail(second))
    if {first.kind, second.kind} <= {"Return", *_SIMPLE}:  # what is computed, returned or not
        short = min(len(first.words), len(second.words)) < 4
        return 0.0 if short else 0.9 * _dice(_tail(first), _tail(second))
    if first.is_block or second.is_block or first.is_scope or second.is_scope:
        return 0.0
    if {first.kind, second.kind} & _REWRITTEN:
        # a loop or a check that was written with another keyword says most of the same words
        first_words, second_words = whole_words(first), whole_words(second)
        if max(len(first_words), len(second_words)) <= 120:
            value = _dice(first_words, second_words)
            return 0.85 * value if value >= 0.7 else 0.0
    return 0.0


def whole_words(node: StatementNode) -> list[str]:
    """Return the words of a statement and of all statements inside it, without keywords."""
    return [word for each in node.walk() for word in each.words if word not in KEYWORDS]


def value_of(node: StatementNode) -> tuple[str, ...]:
    """Return what a simple assignment computes; empty if the value is trivial."""
    if node.kind != "Assign" or not lead(node):
        return ()
    value = node.words[len(lead(node)) + 1 :]
    return value if len(value) >= 5 else ()


def lead(node: StatementNode) -> tuple[str, ...]:
    """Return what a simple statement sets, or the dotted name it calls; empty if neither."""
    words = node.words
    if node.kind in {"Assign", "AugAssign"}:
        for at, word in enumerate(words[:12]):
            if word in _SETS:
                return words[:at]
        return ()
    if node.kind == "Expr":
        at = 1
        while at + 1 < len(words) and words[at] == ".":
            at += 2
        return words[:at] if at > 1 else ()
    return ()


def _tail(node: StatementNode) -> tuple[str, ...]:
    return node.words[len(lead(node)) + 1 :] if node.kind != "Expr" else node.words


def _dice(first: Sequence[str], second: Sequence[str]) -> float:
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
