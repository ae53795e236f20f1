"""What a name of the new text is called in the old one, and whether it is there at all."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from rearview.source.flow import definition, visible
from rearview.source.match import Matching
from rearview.source.tree import Node
from rearview.source.uses import BUILTINS, Uses

_NAME = re.compile(r"^[^\W\d]\w*$")


@dataclass(frozen=True, slots=True)
class Names:
    """New name to old name where they differ, what is missing, and how sure that is."""

    renamed: Mapping[str, str]
    missing: tuple[str, ...]
    certainty: float
    reasons: tuple[str, ...]


class Votes:
    """How often a name of the new text stands where another stands in the old one."""

    def __init__(self, found: Matching) -> None:
        self.found = found
        self.table: dict[str, Counter[str]] = defaultdict(Counter)
        self.kept: Counter[str] = Counter()
        for new, old in found.there.items():
            if new.is_block:
                continue
            if new.words == old.words:
                self.kept.update(set(new.words))
                continue
            for one, two in aligned(new.words, old.words):
                if one == two:
                    self.kept[one] += 1
                elif _NAME.match(one) and _NAME.match(two):
                    self.table[one][two] += 1

    def best(self, name: str) -> list[tuple[str, int]]:
        """Return what the name may be called in the old text, most votes first."""
        return self.table[name].most_common(4)


def aligned(ones: tuple[str, ...], twos: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of words that stand at the same place of two statements.

    >>> aligned(("a", "=", "f", "b"), ("c", "=", "f", "b"))
    [('a', 'c'), ('=', '='), ('f', 'f'), ('b', 'b')]
    """
    if len(ones) == len(twos):
        differ = sum(one != two for one, two in zip(ones, twos, strict=True))
        if differ * 2 <= len(ones):
            return list(zip(ones, twos, strict=True))
    if len(ones) * len(twos) > 40_000:
        return []
    found: list[tuple[str, str]] = []
    for kind, i, k, j, m in SequenceMatcher(None, ones, twos, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and k - i == m - j):
            found.extend(zip(ones[i:k], twos[j:m], strict=True))
    return found


def resolve(
    found: Matching, votes: Votes, used: Uses, here: tuple[Node, int], there: tuple[Node, int]
) -> Names:
    """Say for every name the statement needs what it is at the old place.

    `here` and `there` are (block, index) in the new and the old tree.
    """
    seen = visible(*there)
    at_home = visible(*here)
    renamed: dict[str, str] = {}
    missing: list[str] = []
    reasons: list[str] = []
    certainty = 1.0
    for name in sorted(used.reads):
        if name not in at_home:
            # a builtin, or unknown in the new text as well: nothing to follow
            if name not in BUILTINS and name not in seen and "*" not in at_home:
                certainty *= 0.9
            continue
        home = definition(*here, name)
        partner = found.there.get(home) if home is not None else None
        target = _target(home, partner, name)
        if name in seen:
            if target in {None, name} or votes.kept[name] > votes.table[name][target or ""]:
                continue
            if target in seen and not votes.kept[name]:
                renamed[name] = target or name
                certainty *= 0.8
            continue
        if target is not None and target in seen:
            renamed[name] = target
            certainty *= 0.95
            continue
        options = [
            (other, count)
            for other, count in votes.best(name)
            if other in seen and not (other in at_home and votes.kept[other])
        ]
        total = sum(votes.table[name].values())
        if options and options[0][1] * 2 > total:
            renamed[name] = options[0][0]
            certainty *= 0.9 if options[0][1] > 1 else 0.75
        elif "*" in seen:
            certainty *= 0.8
        else:
            missing.append(name)
    reasons += [f"`{one}` is called `{two}` there" for one, two in sorted(renamed.items())]
    return Names(renamed, tuple(missing), certainty, tuple(reasons))


def _target(new: Node | None, old: Node | None, name: str) -> str | None:
    """Return what the partner of a definition binds where the definition binds `name`."""
    if new is None or old is None:
        return None
    if isinstance(new.tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(
        old.tree, (ast.FunctionDef, ast.AsyncFunctionDef)
    ):
        ones = [arg.arg for arg in (*new.tree.args.posonlyargs, *new.tree.args.args)]
        twos = [arg.arg for arg in (*old.tree.args.posonlyargs, *old.tree.args.args)]
        if name in twos:
            return name
        if name in ones and len(ones) == len(twos):
            other = twos[ones.index(name)]
            return other if other not in ones else None
        return None
    ones, twos = _bound_list(new.tree), _bound_list(old.tree)
    if name in twos:
        return name
    if name in ones and len(ones) == len(twos):
        other = twos[ones.index(name)]
        return other if other not in ones else None
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


def absent_members(found: Matching, used: Uses) -> list[tuple[str, str]]:
    """Return attributes that the new text defines and the old one never mentions."""
    if not used.members:
        return []
    asked = {member for _, member in used.members}
    known = {word.lstrip("'") for node in found.old.nodes for word in node.words}
    asked -= known
    if not asked:
        return []
    defined: set[str] = set()
    for node in found.new.nodes:
        if node.is_block or asked.isdisjoint(word.lstrip("'") for word in node.words):
            continue
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
    return sorted(pair for pair in used.members if pair[1] in asked & defined)


def imports_for(missing: tuple[str, ...], found: Matching) -> dict[str, str]:
    """Return an import line for each missing name that the new text imports and that is safe to add.

    Safe are our own package and packages the old text imports from anyway; whether another one
    existed for that version nobody knows.
    """
    lines: dict[str, str] = {}
    if not missing:
        return lines
    known = {"rearview"}
    for node in found.old.nodes:
        if isinstance(node.tree, ast.Import):
            known |= {each.name.split(".")[0] for each in node.tree.names}
        elif isinstance(node.tree, ast.ImportFrom) and not node.tree.level and node.tree.module:
            known.add(node.tree.module.split(".")[0])
    for node in found.new.root.children:
        tree = node.tree
        if isinstance(tree, ast.ImportFrom) and (tree.level or not tree.module):
            continue
        if not isinstance(tree, (ast.Import, ast.ImportFrom)):
            continue
        for each in tree.names:
            bound = (each.asname or each.name).split(".")[0]
            package = (tree.module or "") if isinstance(tree, ast.ImportFrom) else each.name
            if bound in missing and package.split(".")[0] in known:
                alias = f"{each.name} as {each.asname}" if each.asname else each.name
                source = f"from {package} " if isinstance(tree, ast.ImportFrom) else ""
                lines[bound] = f"{source}import {alias}"
    return lines


def overwritten(used: Uses, found: Matching, blocks: tuple[Node, Node]) -> str | None:
    """Return a name the statement sets that only the old code around it uses, if there is one."""
    here, there = (names_in(block) for block in blocks)
    del found
    fresh = used.writes - used.reads
    return next((name for name in sorted(fresh) if name in there and name not in here), None)


def names_in(block: Node) -> set[str]:
    """Return the words of the scope that a block, or a statement, stands in."""
    scope = block if block.parent is None else block.scope()
    found: set[str] = set()
    stack = list(scope.children)
    while stack:
        node = stack.pop()
        found.update(node.words)
        if not node.is_scope:
            stack.extend(node.children)
    return found
