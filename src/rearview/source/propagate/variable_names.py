"""Find the names that the variables of a new statement have in an older text, and the variables that it lacks."""

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
    """The names that the variables which a new statement reads have in the old text."""

    renamed: Mapping[str, str]
    """New name -> old name, if the two differ."""
    missing_names: tuple[str, ...]
    """New names of the variables that do not exist in the old text."""
    certainty: float
    """Confidence in all old names together, from 0 to 1."""
    reasons: tuple[str, ...]


class Votes:
    """Counts which names of the old text are at the positions of names of the new text, in all paired statements.

    `table` maps a new name to {another old name: count}; `unchanged` maps a name to its count in both texts.
    """

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        self.table: dict[str, Counter[str]] = defaultdict(Counter)
        self.unchanged: Counter[str] = Counter()
        for new, old in matching.old_of.items():
            if new.is_block:
                continue
            if new.words == old.words:
                self.unchanged.update(set(new.words))
                continue
            if _trivial(new) and not similar(new.words[0], old.words[0]):
                continue  # `x = []` does not show that `x` is the variable of the old statement
            for new_word, old_word in aligned(new.words, old.words):
                if new_word == old_word:
                    self.unchanged[new_word] += 1
                elif _NAME.match(new_word) and _NAME.match(old_word):
                    self.table[new_word][old_word] += 1

    def best(self, name: str) -> list[tuple[str, int]]:
        """Return up to four (old name, number of votes) for the new name `name`, most votes first."""
        return self.table[name].most_common(4)


def aligned(new_words: tuple[str, ...], old_words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (new word, old word) for the corresponding positions of two statements; words without one are left out.

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


def resolve_variables(
    matching: Matching,
    votes: Votes,
    statement_uses: Uses,
    new_position: tuple[StatementNode, int],
    old_position: tuple[StatementNode, int],
) -> VariableNames:
    """Return the old names of all variables that a statement reads.

    `statement_uses` has the names in the statement. The positions are (block, index) of the statement in the new
    tree, and of its place in the old tree.
    """
    resolver = _Resolver(matching, votes, statement_uses, new_position, old_position)
    renamed: dict[str, str] = {}
    missing_names: list[str] = []
    certainty = 1.0
    for name in sorted(statement_uses.reads):
        old_name, certainty_of_name = resolver.old_name(name, set(renamed.values()))
        certainty *= certainty_of_name
        if old_name is None:
            missing_names.append(name)
        elif old_name != name:
            renamed[name] = old_name
    reasons = [f"`{new}` is called `{old}` there" for new, old in sorted(renamed.items())]
    return VariableNames(renamed, tuple(missing_names), certainty, tuple(reasons))


class _Resolver:
    """Finds the old names of the variables of one new statement at one position of the old text."""

    def __init__(
        self,
        matching: Matching,
        votes: Votes,
        statement_uses: Uses,
        new_position: tuple[StatementNode, int],
        old_position: tuple[StatementNode, int],
    ) -> None:
        self.matching = matching
        self.votes = votes
        self.uses = statement_uses
        self.new_position = new_position
        self.old_visible = visible(*old_position)
        self.new_visible = visible(*new_position)
        self.old_modules = imported_names(matching.old)
        self.new_modules = imported_names(matching.new)
        self.old_unbound = unbound_names(matching.old)

    def old_name(self, name: str, assigned_names: set[str]) -> tuple[str | None, float]:
        """Return (old name of a variable, confidence), or (None, 1.0) if the old text has no such variable.

        `assigned_names` are the old names that other variables of the statement got.
        """
        votes, old_visible = self.votes, self.old_visible
        if name not in self.new_visible:
            # a builtin, or a name that the new text does not define: keep the name
            unknown = (
                name not in BUILTINS and name not in old_visible and "*" not in self.new_visible
            )
            return name, 0.9 if unknown else 1.0
        new_definition = definition(*self.new_position, name)
        old_definition = (
            self.matching.old_of.get(new_definition) if new_definition is not None else None
        )
        defined_name = _name_in_old_definition(new_definition, old_definition, name)
        if (
            defined_name == "*"
        ):  # the old text has a star import of the module that defines the name
            return name, 0.95
        if name in old_visible:
            if (
                defined_name in {None, name}
                or votes.unchanged[name] > votes.table[name][defined_name or ""]
            ):
                return name, 1.0
            replaced = (
                defined_name in old_visible
                and not votes.unchanged[name]
                and votes.table[name][defined_name or ""] > 1
            )
            return (defined_name, 0.8) if replaced else (name, 1.0)
        if defined_name is not None and votes.table[name] and not votes.table[name][defined_name]:
            # the old text never has `defined_name` where the new text has `name`
            defined_name = None
        is_defined = defined_name in old_visible and (
            not _trivial(new_definition) or bool(votes.table[name][defined_name or ""])
        )
        if is_defined:
            return defined_name, 0.95
        return self.guess(name, new_definition, defined_name, assigned_names)

    def guess(
        self,
        name: str,
        new_definition: StatementNode | None,
        defined_name: str | None,
        assigned_names: set[str],
    ) -> tuple[str | None, float]:
        """Return (old name, confidence) for a variable whose name the old text does not have at the old position.

        The votes, then similar names decide. Return (None, 1.0) if no old variable seems to correspond.
        """
        votes, old_visible = self.votes, self.old_visible
        options = [
            (old_name, count)
            for old_name, count in votes.best(name)
            # if the new statement also reads `old_name`, that is the name of another variable
            if old_name in old_visible
            and old_name not in self.uses.reads
            and not self.used_otherwise(name, old_name)
            and not (old_name in self.new_visible and votes.unchanged[old_name])
            and (old_name not in self.old_modules or name in self.new_modules)
        ]
        total = sum(votes.table[name].values())
        if options and options[0][1] * 2 > total:
            return options[0][0], 0.9 if options[0][1] > 1 else 0.75
        candidates = votes.best(name)
        variables = old_visible - self.old_modules - self.uses.reads
        if (
            len(candidates) == 1
            and not votes.unchanged[name]
            and candidates[0][0] in variables
            and not self.used_otherwise(name, candidates[0][0])
        ):
            # the old text always has this one name where the new text has `name`
            return candidates[0][0], 0.8
        logger = self.logger(name)
        if logger is not None:
            return logger, 0.85
        new_in_old = old_visible - self.new_visible - self.old_modules - assigned_names
        equal_letters = [each for each in new_in_old if each.lower() == name.lower()]
        if len(equal_letters) == 1:
            return equal_letters[0], 0.9
        similar_names = [each for each in new_in_old if similar(name, each)]
        if len(similar_names) == 1:
            return similar_names[0], 0.75
        extended_names = [
            each for each in new_in_old if _extends(name, each) or _extends(each, name)
        ]
        if len(extended_names) == 1:
            return extended_names[0], 0.7
        if (
            defined_name in new_in_old
            and not votes.table[name]
            and _between_same_neighbours(self.matching, new_definition)
        ):
            return defined_name, 0.7
        if name in self.old_unbound:  # the old text, too, reads the name without binding it
            return name, 0.9
        return None, 1.0

    def used_otherwise(self, name: str, old_name: str) -> bool:
        """Return True if the attributes show that new `name` and old `old_name` are different variables.

        Both texts then mention attributes of the variable, but none in common.
        """
        new_members = {member for root, member in self.uses.members if root == name}
        if not new_members or name in self.new_modules:
            return False
        old_members = members_of(self.matching.old, old_name)
        new_members |= members_of(self.matching.new, name)
        return bool(old_members) and new_members.isdisjoint(old_members)

    def logger(self, name: str) -> str | None:
        """Return the logger of the old text if the statement uses `name` only as a logger, or None.

        The result is `print` if `name` contains that word and the old text prints.
        """
        methods = {method for root, method in self.uses.members if root == name}
        if methods and methods <= _SEVERITIES:
            tally = Counter(
                node.words[0]
                for node in self.matching.old.nodes
                if node.kind == "Expr"
                and node.words[1:2] == (".",)
                and node.words[2] in _SEVERITIES
            )
            loggers = [each for each, _ in tally.most_common() if each in self.old_visible]
            if loggers:
                return loggers[0]
            makers = {value_call(n.tree) for n in self.matching.new.nodes if name in binds(n)}
            return "logging" if "getLogger" in makers and "logging" in self.old_visible else None
        if not methods and "print" in name.lower():
            calls = sum(node.words[:1] == ("print",) for node in self.matching.old.nodes)
            return "print" if calls > 1 else None
        return None


_SEVERITIES = frozenset(
    ["debug", "info", "warn", "warning", "error", "critical", "exception", "log"]
)


def value_call(tree: ast.AST) -> str:
    """Return the last word of the function whose result an assignment assigns, or '' if the value is no call."""
    value = getattr(tree, "value", None)
    return last_name(value.func) if isinstance(value, ast.Call) else ""


def _extends(longer: str, name: str) -> bool:
    """Return True if `longer` is `name` with words before or after it.

    >>> _extends("tensorboard_writer", "writer"), _extends("rewriter", "writer")
    (True, False)
    """
    return len(name) > 3 and (longer.endswith(f"_{name}") or longer.startswith(f"{name}_"))


def members_of(tree: StatementTree, name: str) -> set[str]:
    """Return the names of the attributes and methods of the variable `name` that a text mentions."""
    return {
        node.words[at + 2]
        for node in tree.nodes
        for at, word in enumerate(node.words[:-2])
        if word == name and node.words[at + 1] == "." and (not at or node.words[at - 1] != ".")
    }


def unbound_names(tree: StatementTree) -> set[str]:
    """Return the names that a text reads but never binds, such as builtins and names from a star import."""
    bound: set[str] = set()
    for node in tree.nodes:
        bound |= binds(node)
        if isinstance(node.tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.is_block:
            bound |= parameters(node.tree.args)
    return set(uses(tree.parsed.tree.body).reads) - bound


def _between_same_neighbours(matching: Matching, home: StatementNode | None) -> bool:
    """Return True if `home` is paired with an old statement, and both are between the same two statements."""
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


def similar(name: str, other_name: str) -> bool:
    """Return True if two names share most of their words (separated by `_`), or nearly all of their letters.

    >>> similar("has_any_unknown_label", "has_unknown_label"), similar("texts", "lengths")
    (True, False)
    """
    parts, other_parts = (set(filter(None, each.lower().split("_"))) for each in (name, other_name))
    if 2 * len(parts & other_parts) > max(len(parts), len(other_parts)):
        return True
    return len(name) > 3 and SequenceMatcher(None, name, other_name).ratio() >= 0.85


def imported_names(tree: StatementTree) -> set[str]:
    """Return the names that imports bind anywhere in a text."""
    return {
        (each.asname or each.name).split(".")[0]
        for node in tree.nodes
        if isinstance(node.tree, (ast.Import, ast.ImportFrom)) and not node.is_block
        for each in node.tree.names
    }


def _trivial(node: StatementNode | None) -> bool:
    """Return True if a statement assigns a constant or an empty container: `n = 0`, `x = []`, `x = dict()`."""
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


def _name_in_old_definition(
    new: StatementNode | None, old: StatementNode | None, name: str
) -> str | None:
    """Return the name that the statement `old` binds where the statement `new` binds `name`, or None if unclear.

    Return `*` if `old` is a star import of the same module.
    """
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
            old_name = old_names[new_names.index(name)]
            return old_name if old_name not in new_names else None
        return None
    new_names, old_names = _bound_list(new.tree), _bound_list(old.tree)
    if name in old_names:
        return name
    if old_names == ["*"]:
        same_module = getattr(new.tree, "module", None) == getattr(old.tree, "module", None)
        return "*" if same_module else None
    if name in new_names and len(new_names) == len(old_names):
        old_name = old_names[new_names.index(name)]
        return old_name if old_name not in new_names else None
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


def resolve_attributes(
    matching: Matching, votes: Votes, statement_uses: Uses
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return ({new name: old name} of renamed attributes, (object, attribute) for those that the old text lacks).

    Only attributes of the statement that the old text never mentions are examined. They count as renamed if another
    name is at their positions in most paired statements. Otherwise, the old text lacks those that the new text
    itself defines.
    """
    old_words = {word.lstrip("'") for node in matching.old.nodes for word in node.words}
    unmentioned = set(statement_uses.attributes) - old_words if statement_uses.attributes else set()
    if not unmentioned:
        return {}, []
    renamed = _renamed_members(matching, votes, unmentioned)
    unmentioned -= renamed.keys()
    missing_attributes = unmentioned & _defined(matching, unmentioned) if unmentioned else set()
    return renamed, sorted(pair for pair in statement_uses.members if pair[1] in missing_attributes)


def _renamed_members(matching: Matching, votes: Votes, unmentioned: set[str]) -> dict[str, str]:
    """Return {new name: old name} for those attributes `unmentioned` by the old text that seem to be renamed."""
    new_words = {word.lstrip("'") for node in matching.new.nodes for word in node.words}
    dotted = {
        word for node in matching.old.nodes for dot, word in pairwise(node.words) if dot == "."
    }
    renamed: dict[str, str] = {}
    functions = _renamed_functions(matching, unmentioned)
    for member in sorted(unmentioned):
        if functions.get(member, member) not in new_words | {member}:
            renamed[member] = functions[member]
            continue
        ranked = votes.best(member)
        candidates = [(old_word, n) for old_word, n in ranked if old_word not in new_words]
        if len(candidates) == 1 or (candidates and candidates[0][1] > 2 * candidates[1][1]):
            renamed[member] = candidates[0][0]
            continue
        if len(ranked) == 1 and ranked[0][1] > 1 and not votes.unchanged[member]:
            renamed[member] = ranked[0][0]
            continue
        same_stem = {each for each in dotted if each.strip("_") == member.strip("_")}
        if len(same_stem) == 1:  # the names differ only in underscores at their ends
            renamed[member] = same_stem.pop()
    return renamed


def _defined(matching: Matching, attributes: set[str]) -> set[str]:
    """Return the names that the new text defines in statements which mention one of `attributes`."""
    defined: set[str] = set()
    for node in matching.new.nodes:
        if node.is_block or attributes.isdisjoint(word.lstrip("'") for word in node.words):
            continue
        if isinstance(node.tree, ast.AugAssign):
            continue  # `+=` needs an attribute that exists already, maybe from a class of another file
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


def resolve_keywords(matching: Matching, statements: list[ast.stmt]) -> dict[str, str]:
    """Return {new name: old name} for the keyword arguments in `statements` whose parameter was renamed."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    renamed: dict[str, str] = {}
    calls = [
        n for stmt in statements for n in ast.walk(stmt) if isinstance(n, ast.Call) and n.keywords
    ]
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
            old_parameter = old_parameters[new_parameters.index(word)]
            if old_parameter not in new_parameters:
                renamed[word] = old_parameter
    return renamed


def _renamed_functions(matching: Matching, names: set[str]) -> dict[str, str]:
    """Return {new name: old name} for the functions with the new names `names` that have an old partner."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        new.tree.name: old.tree.name
        for new, old in matching.old_of.items()
        if isinstance(new.tree, functions)
        and isinstance(old.tree, functions)
        and new.tree.name in names
        and not new.is_block
    }


def imports_for(missing_names: tuple[str, ...], matching: Matching) -> dict[str, str]:
    """Return {missing name: line of code that imports it} for names that the new text imports.

    Only names from Rearview and from packages that the old text imports count: the environment of the old version
    may not have had other packages.
    """
    lines: dict[str, str] = {}
    if not missing_names:
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
            if bound in missing_names and package.split(".")[0] in packages:
                alias = f"{each.name} as {each.asname}" if each.asname else each.name
                source = f"from {package} " if isinstance(tree, ast.ImportFrom) else ""
                lines[bound] = f"{source}import {alias}"
    return lines


def overwritten_variable(
    statement_uses: Uses, blocks: tuple[StatementNode, StatementNode]
) -> str | None:
    """Return a variable that the statement would overwrite in the old function around it, or None.

    The old function uses a variable of this name, and the new function does not, outside the statement. `blocks` are
    the (new, old) blocks of the statement.
    """
    new_words, old_words = (words_in_scope(block) for block in blocks)
    assigned_names = statement_uses.writes - statement_uses.reads
    return next(
        (name for name in sorted(assigned_names) if name in old_words and name not in new_words),
        None,
    )


def words_in_scope(block: StatementNode) -> set[str]:
    """Return all words of the function, class or module around `block`, without those of functions in it."""
    scope = block if block.parent is None else block.scope()
    words: set[str] = set()
    stack = list(scope.children)
    while stack:
        node = stack.pop()
        words.update(node.words)
        if not node.is_scope:
            stack.extend(node.children)
    return words
