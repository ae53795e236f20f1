"""Match the statements of two texts: pair each statement of the new text with its counterpart in the old text.

There are two phases, as in GumTree: equal subtrees from the top, then compound statements from the bottom by their
contents. In between, the remaining statements are aligned by similarity. Functions and classes are paired first, so
that the other statements are paired inside them. The two statements of a pair are called partners. `probes.align`
pairs statements for another purpose: docs/decisions/two-matchings.md.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rearview.source.statement_trees import (
    KEYWORDS,
    StatementNode,
    StatementTree,
    lead,
    similarity,
    value_of,
)

SIMILAR = 0.5  # two statements that are less similar than this are not paired
SMALL_FUNCTION = 5  # functions with at most this many statements are paired by name alone
MANY = 10  # so many shared statements identify a function even if most of it was rewritten
MAX_GAP = 40_000  # most pairs (new statements times old ones) that are compared by similarity
MAX_TABLE = 250_000  # largest product of two lengths for which a common subsequence is computed


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs of statements of two texts: `old_of` maps new statements to old ones, `new_of` old ones to new ones."""

    new: StatementTree
    old: StatementTree
    old_of: dict[StatementNode, StatementNode] = field(default_factory=dict)
    new_of: dict[StatementNode, StatementNode] = field(default_factory=dict)

    def pair(self, new: StatementNode, old: StatementNode) -> None:
        """Pair two nodes, and remove earlier pairs of both nodes."""
        former_old = self.old_of.pop(new, None)
        if former_old is not None:
            del self.new_of[former_old]
        former_new = self.new_of.pop(old, None)
        if former_new is not None:
            del self.old_of[former_new]
        self.old_of[new] = old
        self.new_of[old] = new

    def is_unchanged(self, new: StatementNode) -> bool:
        """Return True if the node `new` is paired with an old node that has the same words and kind."""
        old = self.old_of.get(new)
        return old is not None and old.words == new.words and old.kind == new.kind

    def old_block(self, new: StatementNode) -> StatementNode | None:
        """Return the old block that corresponds to the block `new`, or None.

        It is the block with the same role (`body`, `orelse`, …) in the old statement that is paired with the
        statement around `new`.
        """
        if new.parent is None:
            return self.old.root
        owner = self.old_of.get(new.parent)
        if owner is None:
            return None
        same_role = [each for each in owner.children if each.role == new.role]
        same_words = [each for each in same_role if each.words == new.words]
        return (same_words or same_role or [None])[0]  # type: ignore[list-item]


def match(new: StatementTree, old: StatementTree) -> Matching:
    r"""Return the pairs of statements of two trees.

    >>> from rearview.source.text import try_parse
    >>> from rearview.source.statement_trees import grow
    >>> new, old = (grow(try_parse(t)) for t in ("a = 1\nf(a)", "if on:\n    a = 1\n    f(a)"))
    >>> [(n.start, o.start) for n, o in match(new, old).old_of.items() if not n.is_block]
    [(1, 2), (2, 3)]
    """
    return _Matcher(new, old).run()


class _Matcher:
    def __init__(self, new: StatementTree, old: StatementTree) -> None:
        self.matching = Matching(new, old)
        self.ids: dict[object, int] = {}  # key -> number of the key: equal keys, equal numbers
        self.head: dict[StatementNode, int] = {}  # node -> number of its code without its blocks
        self.whole: dict[StatementNode, int] = {}  # node -> number of its code with its blocks
        self.size: dict[StatementNode, int] = {}  # node -> count of statements and blocks in it
        self.count: dict[StatementNode, int] = {}  # node -> count of statements in it and itself
        self.block_words: dict[StatementNode, Counter[str]] = {}
        for tree in (new, old):
            for node in reversed(tree.nodes):
                self.head[node] = self.number((node.kind, node.role, node.words))
                below = tuple(self.whole[each] for each in node.children)
                self.whole[node] = self.number((self.head[node], below))
                self.size[node] = 1 + sum(self.size[each] for each in node.children)
                inner = sum(self.count[each] for each in node.children)
                self.count[node] = inner + (not node.is_block)

    def number(self, key: object) -> int:
        return self.ids.setdefault(key, len(self.ids))

    def run(self) -> Matching:
        matching = self.matching
        matching.pair(matching.new.root, matching.old.root)
        self.pair_identical_subtrees()
        self.pair_scopes()
        gaps = [
            gap
            for new, old in sorted(matching.old_of.items(), key=lambda pair: pair[0].order)
            if new.is_scope and not self.children_are_paired(new)
            for gap in self.pair_in_scope(new, old)
        ]
        self.pair_moved()
        self.pair_neighbours()
        self.pair_by_key(self.identifying_key)
        self.pair_by_key(value_of)
        for news, olds in gaps:
            self.pair_similar(news, olds)
        self.pair_containers()
        self.pair_remaining()
        self.pair_by_key(_assigned_key)
        self.repair_repeated()
        return matching

    def children_are_paired(self, new: StatementNode) -> bool:
        return bool(new.children) and all(each in self.matching.old_of for each in new.children)

    def pair_subtrees(self, new: StatementNode, old: StatementNode) -> None:
        for new_node, old_node in zip(new.walk(), old.walk(), strict=True):
            self.matching.pair(new_node, old_node)

    def pair_identical_subtrees(self) -> None:
        """Pair whole functions and classes that are equal and occur once in each text."""
        new_scopes = self.scopes_by_whole(self.matching.new.nodes)
        old_scopes = self.scopes_by_whole(self.matching.old.nodes)
        for key, news in new_scopes.items():
            olds = old_scopes.get(key, [])
            if len(news) == len(olds) == 1 and news[0] not in self.matching.old_of:
                self.pair_subtrees(news[0], olds[0])

    def scopes_by_whole(self, nodes: Iterable[StatementNode]) -> dict[int, list[StatementNode]]:
        by_number: dict[int, list[StatementNode]] = defaultdict(list)
        for node in nodes:
            if node.is_scope and not node.is_block:
                by_number[self.whole[node]].append(node)
        return by_number

    def pair_scopes(self) -> None:
        """Pair functions and classes by qualified name, then by the statements in them, then by plain name."""
        matching = self.matching
        news = {
            name: node
            for name, node in _scopes_by_name(matching.new)
            if node not in matching.old_of
        }
        olds = {
            name: node
            for name, node in _scopes_by_name(matching.old)
            if node not in matching.new_of
        }
        for name in [name for name in news if name in olds]:
            same_kind = news[name].kind == olds[name].kind
            if same_kind and not self.share_little(news[name], olds[name]):
                matching.pair(news.pop(name), olds.pop(name))
        for kind in ("ClassDef", "FunctionDef"):
            self.pair_scopes_by_contents(
                [node for node in news.values() if node.kind == kind],
                [node for node in olds.values() if node.kind == kind],
            )
            self.pair_scopes_by_plain_name(allow_little_shared=kind == "FunctionDef")

    def share_little(self, new: StatementNode, old: StatementNode) -> bool:
        """Return True if two functions share almost no statements, although at least one of them is not small.

        Two functions with equal names may be so because the body of one was moved into a new function.
        """
        if new.kind != "FunctionDef" or max(self.count[new], self.count[old]) <= SMALL_FUNCTION:
            return False
        new_contents, old_contents = Counter(self.contents(new)), Counter(self.contents(old))
        return 2 * (new_contents & old_contents).total() < 0.1 * (
            new_contents.total() + old_contents.total()
        )

    def pair_scopes_by_plain_name(self, *, allow_little_shared: bool) -> None:
        """Pair functions and classes that have the same name and are in a pair of functions, classes or modules.

        Functions that share almost no statements are paired only with `allow_little_shared`.
        """
        matching = self.matching
        old_scopes: dict[tuple[StatementNode, str, str], list[StatementNode]] = defaultdict(list)
        for old in matching.old.nodes:
            if old.is_scope and not old.is_block and old not in matching.new_of:
                old_scopes[old.scope(), _name(old), old.kind].append(old)
        if not old_scopes:
            return
        for new in matching.new.nodes:
            if not new.is_scope or new.is_block or new in matching.old_of:
                continue
            old_scope = matching.old_of.get(new.scope())
            namesakes = (
                old_scopes.get((old_scope, _name(new), new.kind), [])
                if old_scope is not None
                else []
            )
            if len(namesakes) == 1 and namesakes[0] not in matching.new_of:
                if allow_little_shared or not self.share_little(new, namesakes[0]):
                    matching.pair(new, namesakes[0])

    def pair_scopes_by_contents(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair functions, or classes, that have enough statements in common, the most similar ones first."""
        matching = self.matching
        news = [node for node in news if node not in matching.old_of]
        olds = [node for node in olds if node not in matching.new_of]
        votes: list[tuple[float, int, StatementNode, StatementNode]] = []
        olds_with: dict[int, list[StatementNode]] = defaultdict(list)
        contents = {node: Counter(self.contents(node)) for node in (*news, *olds)}
        for old in olds:
            for key in contents[old]:
                olds_with[key].append(old)
        for new in news:
            shared: Counter[StatementNode] = Counter()
            for key, times in contents[new].items():
                if len(olds_with[key]) <= 8:
                    for old in olds_with[key]:
                        shared[old] += min(times, contents[old][key])
            for old, count in shared.items():
                total = contents[new].total() + contents[old].total()
                similarity = 2 * count / total + (0.3 if _name(old) == _name(new) else 0.0)
                # a long function may be the same one although most of it was rewritten
                rewritten = count >= MANY and similarity >= 0.15
                if rewritten or (similarity >= 0.4 and (count > 1 or similarity > 0.8)):
                    votes.append((-similarity, abs(new.order - old.order), new, old))
        votes.sort(key=lambda vote: (vote[0], vote[1], vote[2].order, vote[3].order))
        for _, _, new, old in votes:
            if new not in matching.old_of and old not in matching.new_of:
                matching.pair(new, old)

    def contents(self, scope: StatementNode) -> list[int]:
        return [self.head[node] for node in scope.walk() if not node.is_block and node is not scope]

    def own_statements(self, scope: StatementNode) -> list[StatementNode]:
        """Return the statements of a function, class or module in order, without those of definitions in it."""
        statements: list[StatementNode] = []
        stack = list(reversed(scope.children))
        while stack:
            node = stack.pop()
            if not node.is_block:
                statements.append(node)
                if node.is_scope:
                    continue
            stack.extend(reversed(node.children))
        return statements

    def pair_in_scope(
        self, new: StatementNode, old: StatementNode
    ) -> list[tuple[list[StatementNode], list[StatementNode]]]:
        """Pair equal statements of `new` and `old`, two paired functions, classes or modules, in order.

        Return (new statements, old statements) of each gap between consecutive pairs.
        """
        news, olds = self.own_statements(new), self.own_statements(old)
        pairs = align_items(
            [self.key(node) for node in news],
            [self.key(node) for node in olds],
            [1 + min(len(node.words), 9) + 4 * bool(node.children) for node in news],
        )
        for new_at, old_at in pairs:
            self.pair_if_free(news[new_at], olds[old_at])
        edges = [(-1, -1), *pairs, (len(news), len(olds))]
        return [(news[i + 1 : k], olds[j + 1 : m]) for (i, j), (k, m) in pairwise(edges)]

    def key(self, node: StatementNode) -> int:
        # two paired functions have equal keys, even if their headers differ
        partner = self.matching.old_of.get(node)
        if node.is_scope and partner is not None:
            return self.number(("pair", id(partner)))
        if node.is_scope and node in self.matching.new_of:
            return self.number(("pair", id(node)))
        return self.head[node]

    def pair_if_free(self, new: StatementNode, old: StatementNode) -> None:
        if new.is_scope or old.is_scope:
            return  # functions and classes are paired by `pair_scopes` only
        if new not in self.matching.old_of and old not in self.matching.new_of:
            self.matching.pair(new, old)

    def pair_similar(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair unpaired statements of two lists, in order, so that the sum of the similarities is largest."""
        news = [node for node in news if node not in self.matching.old_of and not node.is_scope]
        olds = [node for node in olds if node not in self.matching.new_of and not node.is_scope]
        if not news or not olds or len(news) * len(olds) > MAX_GAP:
            return
        best = [[0.0] * (len(olds) + 1) for _ in range(len(news) + 1)]
        gain = [[self.gain(new, old) for old in olds] for new in news]
        for i in range(len(news) - 1, -1, -1):
            row, below, gains = best[i], best[i + 1], gain[i]
            for j in range(len(olds) - 1, -1, -1):
                value = max(below[j], row[j + 1])
                if gains[j] and below[j + 1] + gains[j] > value:
                    value = below[j + 1] + gains[j]
                row[j] = value
        i = j = 0
        while i < len(news) and j < len(olds):
            if gain[i][j] and best[i][j] == best[i + 1][j + 1] + gain[i][j]:
                self.matching.pair(news[i], olds[j])
                i, j = i + 1, j + 1
            elif best[i][j] == best[i + 1][j]:
                i += 1
            else:
                j += 1

    def gain(self, new: StatementNode, old: StatementNode) -> float:
        value = similarity(new, old)
        if value < SIMILAR:
            return 0.0
        if (
            new.children
            and old.children
            and new.kind == old.kind
            and self.head[new] != self.head[old]
        ):
            # two statements with different headers are paired only if their blocks are similar, too
            value = 0.45 * value + 0.55 * self.shared_in_blocks(new, old)
        return value if value >= SIMILAR else 0.0

    def shared_in_blocks(self, new: StatementNode, old: StatementNode) -> float:
        """Return the fraction of equal words in the blocks of two statements, from 0 to 1."""
        new_words, old_words = self.words_in_blocks(new), self.words_in_blocks(old)
        shared = (new_words & old_words).total()
        return 2 * shared / max(1, new_words.total() + old_words.total())

    def words_in_blocks(self, node: StatementNode) -> Counter[str]:
        if node not in self.block_words:
            inner = (each for each in node.walk() if each is not node)
            self.block_words[node] = Counter(word for each in inner for word in each.words)
        return self.block_words[node]

    def pair_moved(self) -> None:
        """Pair equal statements that occur once in each text, also in different functions."""
        for least in (2, 1):
            new_nodes: dict[int, list[StatementNode]] = defaultdict(list)
            old_nodes: dict[int, list[StatementNode]] = defaultdict(list)
            for node in self.matching.new.statements():
                if node not in self.matching.old_of and self.size[node] >= least:
                    new_nodes[self.whole[node]].append(node)
            for node in self.matching.old.statements():
                if node not in self.matching.new_of and self.size[node] >= least:
                    old_nodes[self.whole[node]].append(node)
            for key, news in new_nodes.items():
                olds = old_nodes.get(key, [])
                distinctive = least > 1 or len(news[0].words) >= 5
                if (
                    len(news) == len(olds) == 1
                    and distinctive
                    and self.are_unpaired(news[0], olds[0])
                ):
                    self.pair_subtrees(news[0], olds[0])

    def pair_neighbours(self) -> None:
        """Pair equal statements right before or after a pair, because consecutive statements often move together."""
        matching = self.matching
        for step, nodes in ((1, matching.new.nodes), (-1, reversed(matching.new.nodes))):
            for new in nodes:
                if new.is_block or new in matching.old_of or new.is_scope:
                    continue
                neighbour = _next(new, -step)
                partner = matching.old_of.get(neighbour) if neighbour is not None else None
                old = _next(partner, step) if partner is not None else None
                if (
                    old is not None
                    and self.whole[new] == self.whole[old]
                    and self.are_unpaired(new, old)
                ):
                    self.pair_subtrees(new, old)

    def pair_by_key(self, key: Callable[[StatementNode], Hashable | None]) -> None:
        """Pair simple statements with equal `key` in two paired functions, classes or modules.

        A key must belong to exactly one unpaired statement on both sides. None is not a key.
        """
        matching = self.matching
        for new_scope, old_scope in [(n, o) for n, o in matching.old_of.items() if n.is_scope]:
            new_nodes: dict[Hashable, list[StatementNode]] = defaultdict(list)
            old_nodes: dict[Hashable, list[StatementNode]] = defaultdict(list)
            for scope, paired_nodes, nodes_by_key in (
                (new_scope, matching.old_of, new_nodes),
                (old_scope, matching.new_of, old_nodes),
            ):
                for node in self.own_statements(scope):
                    if node not in paired_nodes and not node.is_scope and (node_key := key(node)):
                        nodes_by_key[node_key].append(node)
            for node_key, news in new_nodes.items():
                olds = old_nodes.get(node_key, [])
                if len(news) == len(olds) == 1 and not (news[0].children or olds[0].children):
                    matching.pair(news[0], olds[0])

    def identifying_key(self, node: StatementNode) -> Hashable | None:
        """Return a key for the code of a statement, for `pair_by_key`, or None if the statement is too short."""
        least = 4 if node.kind == "Return" else 2  # a short `return 0` is too frequent
        return (self.whole[node], "same") if len(node.words) >= least else None

    def are_unpaired(self, new: StatementNode, old: StatementNode) -> bool:
        return not any(each in self.matching.old_of for each in new.walk()) and not any(
            each in self.matching.new_of for each in old.walk()
        )

    def pair_containers(self) -> None:
        """Pair compound statements by the paired statements in them, inner compound statements first."""
        matching = self.matching
        for new in reversed(matching.new.nodes):
            if new.is_block or not new.children or new.is_scope:
                continue
            partner = matching.old_of.get(new)
            if partner is not None and self.whole[partner] == self.whole[new]:
                continue
            shared: Counter[StatementNode] = Counter()
            for node in new.walk():
                partner = matching.old_of.get(node) if not node.is_block else None
                if partner is None or node is new:
                    continue
                for old_container in partner.above():
                    if old_container.is_scope:
                        break
                    if old_container.kind == new.kind and not old_container.is_block:
                        shared[old_container] += 1
            if not shared:
                continue
            current = matching.old_of.get(new)
            ranked = sorted(
                shared, key=lambda old: (-self.shared_fraction(new, old, shared), old.order)
            )
            best = ranked[0]
            score = self.shared_fraction(new, best, shared)
            if current is None:
                if score >= 0.35 and best not in matching.new_of:
                    matching.pair(new, best)
                elif score >= 0.35 and self.head[new] == self.head[best]:
                    self.take_partner(new, best, shared[best])
            elif (
                best is not current
                and score > 0.5
                and self.shared_fraction(new, current, shared) == 0
            ):
                rival = matching.new_of.get(best)
                if rival is None:
                    matching.pair(new, best)

    def take_partner(self, new: StatementNode, old: StatementNode, shared: int) -> None:
        """Pair `new` with `old`, which is paired with another new statement, if that one fits less well.

        That is so if fewer than `shared` statements in the other one are paired with statements in `old`. Pairs of
        equal statements in both are then transferred to statements in `new`.
        """
        matching = self.matching
        rival = matching.new_of[old]
        old_nodes = set(old.walk())
        rival_statements = [
            n for n in rival.walk() if n is not rival and matching.old_of.get(n) in old_nodes
        ]
        if self.head[rival] != self.head[old] or len(rival_statements) >= shared:
            return
        matching.pair(new, old)
        unpaired: dict[int, list[StatementNode]] = defaultdict(list)
        for node in new.walk():
            if not node.is_block and node not in matching.old_of:
                unpaired[self.whole[node]].append(node)
        for node in rival_statements:
            equal = unpaired.get(self.whole[node], [])
            if len(equal) == 1 and not node.is_block:
                partner = matching.old_of[node]
                if self.whole[partner] == self.whole[node] and not node.children:
                    matching.pair(equal[0], partner)

    def shared_fraction(
        self, new: StatementNode, old: StatementNode, shared: Counter[StatementNode]
    ) -> float:
        return 2 * shared[old] / max(1, self.count[new] + self.count[old] - 2)

    def pair_remaining(self) -> None:
        """Pair corresponding blocks, and pair the remaining statements in them by similarity, between earlier pairs."""
        for new in self.matching.new.nodes:
            if not new.is_block:
                continue
            old = self.matching.old_block(new)
            if old is not None:
                self.matching.pair(new, old)
            else:
                old = self.former_block(new)
            if old is None:
                continue
            news = [each for each in new.children if each not in self.matching.old_of]
            if not news:
                continue
            last_paired = -1
            pending: list[StatementNode] = []
            for each in [*new.children, None]:
                partner = self.matching.old_of.get(each) if each is not None else None
                if each is not None and (partner is None or partner.parent is not old):
                    pending.append(each)
                    continue
                stop = partner.index if partner is not None else len(old.children)
                if pending and stop > last_paired:
                    self.pair_similar(pending, old.children[last_paired + 1 : stop])
                    self.pair_only_containers(pending, old.children[last_paired + 1 : stop])
                pending = []
                last_paired = max(last_paired, stop)

    def pair_only_containers(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair the only unpaired compound statement of `news` with that of `olds`, if their heads are similar."""
        new_containers = [
            each for each in news if each.children and each not in self.matching.old_of
        ]
        old_containers = [
            each for each in olds if each.children and each not in self.matching.new_of
        ]
        if (
            len(new_containers) != 1
            or len(old_containers) != 1
            or new_containers[0].is_scope
            or old_containers[0].is_scope
        ):
            return
        new, old = new_containers[0], old_containers[0]
        if new.kind != old.kind:
            return
        heads = [{word for word in each.words if word not in KEYWORDS} for each in (new, old)]
        shared = len(heads[0] & heads[1])
        if 2 * shared > min(map(len, heads)) or heads[0] == heads[1]:
            self.matching.pair(new, old)

    def repair_repeated(self) -> None:
        """Correct the pairs of equal statements that occur several times.

        Pair each of them with the old occurrence next to the old statement that its neighbour is paired with.
        """
        matching = self.matching
        for new in matching.new.nodes:
            old = matching.old_of.get(new)
            if old is None or new.children or new.is_block or self.paired_neighbours(new, old):
                continue
            for step in (-1, 1):
                next_new = _next(new, step)
                partner = matching.old_of.get(next_new) if next_new is not None else None
                better = _next(partner, -step) if partner is not None else None
                if better is None or self.head[better] != self.head[new] or better.children:
                    continue
                rival = matching.new_of.get(better)
                if rival is None:
                    matching.pair(new, better)
                    break
                gain = self.paired_neighbours(new, better) - self.paired_neighbours(rival, better)
                if gain + self.paired_neighbours(rival, old) > 0:
                    matching.pair(new, better)
                    if self.head[rival] == self.head[old]:
                        matching.pair(rival, old)
                    break

    def paired_neighbours(self, new: StatementNode, old: StatementNode) -> int:
        """Return how many neighbours of `new` (0 to 2) are paired with the neighbour of `old` on the same side."""
        count = 0
        for step in (-1, 1):
            new_neighbour, old_neighbour = _next(new, step), _next(old, step)
            count += (
                new_neighbour is not None
                and old_neighbour is not None
                and self.matching.old_of.get(new_neighbour) is old_neighbour
            )
        return count

    def former_block(self, new: StatementNode) -> StatementNode | None:
        """Return the old block from which most statements of the block `new` come, according to their pairs.

        Return None if no old block has at least two, and at least half, of the old statements in these pairs.
        """
        old_blocks = Counter(
            partner.parent
            for each in new.children
            if (partner := self.matching.old_of.get(each)) is not None
        )
        best = old_blocks.most_common(1)
        if not best or best[0][1] < 2 or best[0][1] * 2 < old_blocks.total():
            return None
        return best[0][0]


def _next(node: StatementNode, step: int) -> StatementNode | None:
    """Return the statement before (`step` -1) or after (1) `node` in its block, or None if there is none."""
    at = node.index + step
    siblings = node.parent.children if node.parent is not None else []
    return siblings[at] if 0 <= at < len(siblings) else None


def _assigned_key(node: StatementNode) -> Hashable | None:
    """Return a key made of the variables that an assignment sets, or None for other statements."""
    return ("sets", *lead(node)) if node.kind == "Assign" and lead(node) else None


def _name(node: StatementNode) -> str:
    return str(getattr(node.tree, "name", ""))


def _scopes_by_name(tree: StatementTree) -> list[tuple[str, StatementNode]]:
    """Return (qualified name, node) of each function and class; `f#2` is the second one with the name `f`."""
    named_scopes: list[tuple[str, StatementNode]] = []
    occurrences: Counter[str] = Counter()
    for node in tree.nodes:
        if node.is_scope and not node.is_block:
            outer_names = [
                _name(each) for each in node.above() if each.is_scope and not each.is_block
            ]
            name = ".".join([*reversed(outer_names), _name(node)])
            occurrences[name] += 1
            named_scopes.append((f"{name}#{occurrences[name]}", node))
    return named_scopes


def align_items(
    firsts: Sequence[int], seconds: Sequence[int], weights: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return pairs of positions at which two sequences have equal items; both positions rise from pair to pair.

    Items that occur once in each sequence are paired first, as in patience diff. If such pairs cross, the pairs with
    the largest sum of `weights` are taken (one weight per item of `firsts`). Between these pairs, the longest common
    subsequence decides.

    >>> align_items([1, 2, 3, 2], [2, 3, 1, 2])
    [(1, 0), (2, 1), (3, 3)]
    """
    pairs: list[tuple[int, int]] = []
    work = [(0, len(firsts), 0, len(seconds))]
    while work:
        i, k, j, m = work.pop()
        while i < k and j < m and firsts[i] == seconds[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        while i < k and j < m and firsts[k - 1] == seconds[m - 1]:
            k, m = k - 1, m - 1
            pairs.append((k, m))
        if i == k or j == m:
            continue
        anchors = _pair_unique_items(firsts, seconds, (i, k), (j, m), weights)
        if not anchors:
            if (k - i) * (m - j) <= MAX_TABLE:
                pairs.extend(_longest_common_subsequence(firsts, seconds, (i, k), (j, m)))
            continue
        pairs.extend(anchors)
        edges = [(i - 1, j - 1), *anchors, (k, m)]
        work.extend((a + 1, b, c + 1, d) for (a, c), (b, d) in pairwise(edges))
    return sorted(pairs)


def _pair_unique_items(
    firsts: Sequence[int],
    seconds: Sequence[int],
    first_range: tuple[int, int],
    second_range: tuple[int, int],
    weights: Sequence[int] | None,
) -> list[tuple[int, int]]:
    (i, k), (j, m) = first_range, second_range
    first_counts, second_counts = Counter(firsts[i:k]), Counter(seconds[j:m])
    second_positions = {seconds[at]: at for at in range(j, m) if second_counts[seconds[at]] == 1}
    pairs = [
        (at, second_positions[firsts[at]])
        for at in range(i, k)
        if first_counts[firsts[at]] == 1 and firsts[at] in second_positions
    ]
    # find the sequence of pairs with the largest weight whose second positions rise; `ends` and `totals` both rise,
    # because a sequence that ends later than a sequence of at least the same weight is never extended
    ends: list[int] = []
    totals: list[int] = []
    last: list[int] = []
    before = [-1] * len(pairs)
    for at, (first, second) in enumerate(pairs):
        slot = bisect_left(ends, second)
        before[at] = last[slot - 1] if slot else -1
        total = (totals[slot - 1] if slot else 0) + (weights[first] if weights else 1)
        stop = slot
        while stop < len(ends) and totals[stop] <= total:
            stop += 1
        ends[slot:stop] = [second]
        totals[slot:stop] = [total]
        last[slot:stop] = [at]
    chain: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _longest_common_subsequence(
    firsts: Sequence[int],
    seconds: Sequence[int],
    first_range: tuple[int, int],
    second_range: tuple[int, int],
) -> list[tuple[int, int]]:
    (i, k), (j, m) = first_range, second_range
    width = m - j
    table = [[0] * (width + 1)]
    for at in range(k - 1, i - 1, -1):
        below = table[-1]
        row = [0] * (width + 1)
        item = firsts[at]
        for col in range(width - 1, -1, -1):
            if item == seconds[j + col]:
                row[col] = below[col + 1] + 1
            else:
                row[col] = max(row[col + 1], below[col])
        table.append(row)
    table.reverse()
    pairs: list[tuple[int, int]] = []
    at, col = 0, 0
    while at < k - i and col < width:
        if firsts[i + at] == seconds[j + col] and table[at][col] == table[at + 1][col + 1] + 1:
            pairs.append((i + at, j + col))
            at, col = at + 1, col + 1
        elif table[at + 1][col] >= table[at][col + 1]:
            at += 1
        else:
            col += 1
    return pairs
