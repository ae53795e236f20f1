"""Find the name that a variable of the newest text has in an older text, and whether it exists there."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from rearview.source.data_flow import BUILTINS, Uses, binds, definition, parameters, uses, visible
from rearview.source.mutations import last_name
from rearview.source.propagate.match import Matching
from rearview.source.statement_trees import StatementNode, StatementTree

_NAME = re.compile(r"^[^\W\d]\w*$")


@dataclass(frozen=True, slots=True)
class VariableNames:
    """New name -> old name where they differ, the names that are missing, and the confidence."""

    renamed: Mapping[str, str]
    missing: tuple[str, ...]
    certainty: float
    reasons: tuple[str, ...]


class Votes:
    """How often a name of the new text is at the position of another name in the old text."""

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        self.table: dict[str, Counter[str]] = defaultdict(Counter)
        self.kept: Counter[str] = Counter()
        for new, old in matching.old_of.items():
            if new.is_block:
                continue
            if new.words == old.words:
                self.kept.update(set(new.words))
                continue
            if _trivial(new) and not similar(new.words[0], old.words[0]):
                continue  # `x = []` says nothing about the name
            for new_word, old_word in aligned(new.words, old.words):
                if new_word == old_word:
                    self.kept[new_word] += 1
                elif _NAME.match(new_word) and _NAME.match(old_word):
                    self.table[new_word][old_word] += 1

    def best(self, name: str) -> list[tuple[str, int]]:
        """Return the candidates for the old name of a variable, the one with most votes first."""
        return self.table[name].most_common(4)


def aligned(new_words: tuple[str, ...], old_words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of words at the same position of two statements.

    >>> aligned(("a", "=", "f", "b"), ("c", "=", "f", "b"))
    [('a', 'c'), ('=', '='), ('f', 'f'), ('b', 'b')]
    """
    if len(new_words) == len(old_words):
        differ = sum(
            new_word != old_word for new_word, old_word in zip(new_words, old_words, strict=True)
        )
        if differ * 2 <= len(new_words):
            return list(zip(new_words, old_words, strict=True))
    if len(new_words) * len(old_words) > 40_000:
        return []
    pairs: list[tuple[str, str]] = []
    for kind, i, k, j, m in SequenceMatcher(
        None, new_words, old_words, autojunk=False
    ).get_opcodes():
        if kind == "equal" or (kind == "replace" and k - i == m - j):
            pairs.extend(zip(new_words[i:k], old_words[j:m], strict=True))
    return pairs


def resolve(
    matching: Matching,
    votes: Votes,
    used: Uses,
    here: tuple[StatementNode, int],
    there: tuple[StatementNode, int],
) -> VariableNames:
    """Return the old name of every variable that the statement needs.

    `here` and `there` are (block, index) in the new and the old tree.
    """
    resolver = _Resolver(matching, votes, used, here, there)
    renamed: dict[str, str] = {}
    missing: list[str] = []
    certainty = 1.0
    for name in sorted(used.reads):
        called, sure = resolver.called(name, set(renamed.values()))
        certainty *= sure
        if called is None:
            missing.append(name)
        elif called != name:
            renamed[name] = called
    reasons = [f"`{new}` is called `{old}` there" for new, old in sorted(renamed.items())]
    return VariableNames(renamed, tuple(missing), certainty, tuple(reasons))


class _Resolver:
    """Finds the old names of variables at one place of the old text."""

    def __init__(
        self,
        matching: Matching,
        votes: Votes,
        used: Uses,
        here: tuple[StatementNode, int],
        there: tuple[StatementNode, int],
    ) -> None:
        self.matching = matching
        self.votes = votes
        self.used = used
        self.here = here
        self.seen = visible(*there)
        self.at_home = visible(*here)
        self.modules = imported_names(matching.old)
        self.new_modules = imported_names(matching.new)
        self.free = free_names(matching.old)

    def called(self, name: str, taken: set[str]) -> tuple[str | None, float]:
        """Return (the old name of a variable or None, confidence)."""
        votes, seen = self.votes, self.seen
        if name not in self.at_home:
            # a builtin, or a name that the new text does not bind either: there is no definition to compare
            lost = name not in BUILTINS and name not in seen and "*" not in self.at_home
            return name, 0.9 if lost else 1.0
        home = definition(*self.here, name)
        partner = self.matching.old_of.get(home) if home is not None else None
        target = _target(home, partner, name)
        if target == "*":  # a star import of the same module
            return name, 0.95
        if name in seen:
            if target in {None, name} or votes.kept[name] > votes.table[name][target or ""]:
                return name, 1.0
            exchanged = (
                target in seen and not votes.kept[name] and votes.table[name][target or ""] > 1
            )
            return (target, 0.8) if exchanged else (name, 1.0)
        if target is not None and votes.table[name] and not votes.table[name][target]:
            target = None  # wherever the new text reads it, the old one has another name
        defined = target in seen and (not _trivial(home) or bool(votes.table[name][target or ""]))
        if defined:
            return target, 0.95
        return self.renamed(name, home, target, taken)

    def renamed(
        self, name: str, home: StatementNode | None, target: str | None, taken: set[str]
    ) -> tuple[str | None, float]:
        """Return the old name of a variable that is unknown there, from names at the same positions."""
        votes, seen = self.votes, self.seen
        options = [
            (other, count)
            for other, count in votes.best(name)
            if other in seen
            and other not in self.used.reads  # the statement reads both: they are two values
            and not self.used_otherwise(name, other)
            and not (other in self.at_home and votes.kept[other])
            and (other not in self.modules or name in self.new_modules)
        ]
        total = sum(votes.table[name].values())
        if options and options[0][1] * 2 > total:
            return options[0][0], 0.9 if options[0][1] > 1 else 0.75
        candidates = votes.best(name)
        variables = seen - self.modules - self.used.reads
        if (
            len(candidates) == 1
            and not votes.kept[name]
            and candidates[0][0] in variables
            and not self.used_otherwise(name, candidates[0][0])
        ):
            # the old text has no other name at the positions of this name: the name is new
            return candidates[0][0], 0.8
        logger = self.logger(name)
        if logger is not None:
            return logger, 0.85
        fresh = seen - self.at_home - self.modules - taken
        same = [each for each in fresh if each.lower() == name.lower()]
        if len(same) == 1:
            return same[0], 0.9
        alike = [each for each in fresh if similar(name, each)]
        if len(alike) == 1:
            return alike[0], 0.75
        longer = [each for each in fresh if _extends(name, each) or _extends(each, name)]
        if len(longer) == 1:
            return longer[0], 0.7
        if target in fresh and not votes.table[name] and _exchanged(self.matching, home):
            return target, 0.7
        if name in self.free:  # the old text reads it without binding it, as the new text does
            return name, 0.9
        return None, 1.0

    def used_otherwise(self, name: str, other: str) -> bool:
        """Return True if a variable of the new text and one of the old text have no attribute in common."""
        new_members = {member for root, member in self.used.members if root == name}
        if not new_members or name in self.new_modules:
            return False
        old_members = members_of(self.matching.old, other)
        new_members |= members_of(self.matching.new, name)
        return bool(old_members) and new_members.isdisjoint(old_members)

    def logger(self, name: str) -> str | None:
        """Return the object with which the old text logs or prints where the new text uses `name`."""
        methods = {method for root, method in self.used.members if root == name}
        if methods and methods <= _SEVERITIES:
            tally = Counter(
                node.words[0]
                for node in self.matching.old.nodes
                if node.kind == "Expr"
                and node.words[1:2] == (".",)
                and node.words[2] in _SEVERITIES
            )
            loggers = [each for each, _ in tally.most_common() if each in self.seen]
            if loggers:
                return loggers[0]
            makers = {value_call(n.tree) for n in self.matching.new.nodes if name in binds(n)}
            return "logging" if "getLogger" in makers and "logging" in self.seen else None
        if not methods and "print" in name.lower():
            calls = sum(node.words[:1] == ("print",) for node in self.matching.old.nodes)
            return "print" if calls > 1 else None
        return None


_SEVERITIES = frozenset(
    ["debug", "info", "warn", "warning", "error", "critical", "exception", "log"]
)


def value_call(tree: ast.AST) -> str:
    """Return the last name of the function that an assignment calls; empty if it calls none."""
    value = getattr(tree, "value", None)
    return last_name(value.func) if isinstance(value, ast.Call) else ""


def _extends(longer: str, name: str) -> bool:
    """Return True if a name is another name with words before or after it.

    >>> _extends("tensorboard_writer", "writer"), _extends("rewriter", "writer")
    (True, False)
    """
    return len(name) > 3 and (longer.endswith(f"_{name}") or longer.startswith(f"{name}_"))


def members_of(tree: StatementTree, name: str) -> set[str]:
    """Return the attributes and methods of a variable that a text mentions."""
    return {
        node.words[at + 2]
        for node in tree.nodes
        for at, word in enumerate(node.words[:-2])
        if word == name and node.words[at + 1] == "." and (not at or node.words[at - 1] != ".")
    }


def free_names(tree: StatementTree) -> set[str]:
    """Return the names that a text reads and nothing in it binds: from a star import, or injected."""
    bound: set[str] = set()
    for node in tree.nodes:
        bound |= binds(node)
        if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.is_block:
            bound |= parameters(node.tree.args)
    return set(uses(tree.parsed.tree.body).reads) - bound


def _exchanged(matching: Matching, home: StatementNode | None) -> bool:
    """Return True if a definition is between the same two statements in both texts."""
    partner = matching.old_of.get(home) if home is not None else None
    if home is None or partner is None or home.parent is None or partner.parent is None:
        return False
    for step in (-1, 1):
        sides = []
        for node in (home, partner):
            at = node.index + step
            siblings = node.parent.children if node.parent is not None else []
            sides.append(siblings[at] if 0 <= at < len(siblings) else None)
        new, old = sides
        if (matching.old_of.get(new) if new is not None else None) is not old:
            return False
    return True


def similar(name: str, other: str) -> bool:
    """Return True if two names share most of their parts, or nearly all of their letters.

    >>> similar("has_any_unknown_label", "has_unknown_label"), similar("texts", "lengths")
    (True, False)
    """
    parts, other_parts = (set(filter(None, each.lower().split("_"))) for each in (name, other))
    if 2 * len(parts & other_parts) > max(len(parts), len(other_parts)):
        return True
    return len(name) > 3 and SequenceMatcher(None, name, other).ratio() >= 0.85


def imported_names(tree: StatementTree) -> set[str]:
    """Return the names that imports bind anywhere in a text."""
    return {
        (each.asname or each.name).split(".")[0]
        for node in tree.nodes
        if isinstance(node.tree, (ast.Import, ast.ImportFrom)) and not node.is_block
        for each in node.tree.names
    }


def _trivial(node: StatementNode | None) -> bool:
    """Return True if a statement sets variables to trivial values: `x = []`, `n = 0`."""
    value = getattr(node.tree, "value", None) if node is not None else None
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        return not value.args and not value.keywords and isinstance(value.func, ast.Name)
    return isinstance(value, ast.Constant)


def _target(new: StatementNode | None, old: StatementNode | None, name: str) -> str | None:
    """Return the name that the partner of a definition binds in the position of `name`."""
    if new is None or old is None:
        return None
    if isinstance(new.tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(
        old.tree, (ast.FunctionDef, ast.AsyncFunctionDef)
    ):
        new_names = [arg.arg for arg in (*new.tree.args.posonlyargs, *new.tree.args.args)]
        old_names = [arg.arg for arg in (*old.tree.args.posonlyargs, *old.tree.args.args)]
        if name in old_names:
            return name
        if name in new_names and len(new_names) == len(old_names):
            other = old_names[new_names.index(name)]
            return other if other not in new_names else None
        return None
    new_names, old_names = _bound_list(new.tree), _bound_list(old.tree)
    if name in old_names:
        return name
    if old_names == ["*"]:
        same = getattr(new.tree, "module", None) == getattr(old.tree, "module", None)
        return "*" if same else None
    if name in new_names and len(new_names) == len(old_names):
        other = old_names[new_names.index(name)]
        return other if other not in new_names else None
    return None


def _bound_list(tree: ast.AST) -> list[str]:
    targets: list[ast.AST] = []
    if isinstance(tree, ast.Assign):
        targets = list(tree.targets)
    elif isinstance(tree, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        targets = [tree.target]
    elif isinstance(tree, (ast.With, ast.AsyncWith)):
        targets = [each.optional_vars for each in tree.items if each.optional_vars is not None]
    elif isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [tree.name]
    elif isinstance(tree, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).split(".")[0] for each in tree.names]
    return [
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]


def members(
    matching: Matching, votes: Votes, used: Uses
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the old names of attributes, and the attributes that do not exist in the old text.

    An attribute that the old text never mentions counts as renamed if another one is at its position in all
    statements that both texts have; it is missing if the new text defines it.
    """
    old_words = {word.lstrip("'") for node in matching.old.nodes for word in node.words}
    unmentioned = set(used.attributes) - old_words if used.attributes else set()
    if not unmentioned:
        return {}, []
    renamed = _renamed_members(matching, votes, unmentioned)
    unmentioned -= renamed.keys()
    gone = unmentioned & _defined(matching, unmentioned) if unmentioned else set()
    return renamed, sorted(pair for pair in used.members if pair[1] in gone)


def _renamed_members(matching: Matching, votes: Votes, unmentioned: set[str]) -> dict[str, str]:
    """Return the old names of attributes that the old text never mentions."""
    still = {word.lstrip("'") for node in matching.new.nodes for word in node.words}
    dotted = {
        word for node in matching.old.nodes for dot, word in pairwise(node.words) if dot == "."
    }
    renamed: dict[str, str] = {}
    functions = _renamed_functions(matching, unmentioned)
    for member in sorted(unmentioned):
        if functions.get(member, member) not in still | {member}:
            renamed[member] = functions[member]
            continue
        every = votes.best(member)
        candidates = [(other, n) for other, n in every if other not in still]
        if len(candidates) == 1 or (candidates and candidates[0][1] > 2 * candidates[1][1]):
            renamed[member] = candidates[0][0]
            continue
        if len(every) == 1 and every[0][1] > 1 and not votes.kept[member]:
            renamed[member] = every[0][0]
            continue
        plain = {each for each in dotted if each.strip("_") == member.strip("_")}
        if len(plain) == 1:  # the attribute has become private, or public
            renamed[member] = plain.pop()
    return renamed


def _defined(matching: Matching, attributes: set[str]) -> set[str]:
    """Return those of `attributes` that the new text itself defines."""
    defined: set[str] = set()
    for node in matching.new.nodes:
        if node.is_block or attributes.isdisjoint(word.lstrip("'") for word in node.words):
            continue
        if isinstance(node.tree, ast.AugAssign):
            continue  # the attribute was defined before, maybe in a class of another file
        if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.tree.name)
            continue
        if node.children and not node.is_scope:
            continue
        for each in ast.walk(node.tree) if not node.is_scope else ():
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                defined.add(each.attr)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                defined.add(each.id)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                defined.add(each.value.lstrip("-").replace("-", "_"))
    return defined


def keywords(matching: Matching, chosen: list[ast.stmt]) -> dict[str, str]:
    """Return, for keywords of calls, the name of that parameter of the called function in the old text."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    renamed: dict[str, str] = {}
    calls = [n for stmt in chosen for n in ast.walk(stmt) if isinstance(n, ast.Call) and n.keywords]
    for call in calls:
        called = last_name(call.func)
        pairs = [
            (new.tree.args, old.tree.args)
            for new, old in matching.old_of.items()
            if isinstance(new.tree, functions)
            and isinstance(old.tree, functions)
            and not new.is_block
            and new.tree.name == called
        ]
        if len(pairs) != 1:
            continue
        new_parameters, old_parameters = (
            [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            for args in pairs[0]
        )
        for keyword in call.keywords:
            word = keyword.arg
            if (
                word is None
                or word in old_parameters
                or word not in new_parameters
                or len(new_parameters) != len(old_parameters)
            ):
                continue
            other = old_parameters[new_parameters.index(word)]
            if other not in new_parameters:
                renamed[word] = other
    return renamed


def _renamed_functions(matching: Matching, names: set[str]) -> dict[str, str]:
    """Return new name -> old name of the functions called `names`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        new.tree.name: old.tree.name
        for new, old in matching.old_of.items()
        if isinstance(new.tree, functions)
        and isinstance(old.tree, functions)
        and new.tree.name in names
        and not new.is_block
    }


def imports_for(missing: tuple[str, ...], matching: Matching) -> dict[str, str]:
    """Return an import line for each missing name that the new text imports and that is safe to add.

    Safe are our own package and packages that the old text imports anyway; it is not known whether another
    package was installed for that version.
    """
    lines: dict[str, str] = {}
    if not missing:
        return lines
    packages = {"rearview"}
    for node in matching.old.nodes:
        if isinstance(node.tree, ast.Import):
            packages |= {each.name.split(".")[0] for each in node.tree.names}
        elif isinstance(node.tree, ast.ImportFrom) and not node.tree.level and node.tree.module:
            packages.add(node.tree.module.split(".")[0])
    for node in matching.new.root.children:
        tree = node.tree
        if isinstance(tree, ast.ImportFrom) and (tree.level or not tree.module):
            continue
        if not isinstance(tree, (ast.Import, ast.ImportFrom)):
            continue
        for each in tree.names:
            bound = (each.asname or each.name).split(".")[0]
            package = (tree.module or "") if isinstance(tree, ast.ImportFrom) else each.name
            if bound in missing and package.split(".")[0] in packages:
                alias = f"{each.name} as {each.asname}" if each.asname else each.name
                source = f"from {package} " if isinstance(tree, ast.ImportFrom) else ""
                lines[bound] = f"{source}import {alias}"
    return lines


def overwritten(used: Uses, blocks: tuple[StatementNode, StatementNode]) -> str | None:
    """Return a variable that the statement sets and that the old code around it uses, if there is one."""
    here, there = (names_in(block) for block in blocks)
    fresh = used.writes - used.reads
    return next((name for name in sorted(fresh) if name in there and name not in here), None)


def names_in(block: StatementNode) -> set[str]:
    """Return the words of the scope that contains a block or a statement."""
    scope = block if block.parent is None else block.scope()
    words: set[str] = set()
    stack = list(scope.children)
    while stack:
        node = stack.pop()
        words.update(node.words)
        if not node.is_scope:
            stack.extend(node.children)
    return words
