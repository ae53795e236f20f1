"""Match the statements of two texts: which statement of one corresponds to which of the other.

There are two phases, as in GumTree: equal subtrees from the top, then containers from the bottom by their
contents, with a recovery in between that aligns the others by similarity. Statements are the nodes. Functions
and classes are paired first, so that the rest is many small problems. `probes.align` answers another
question: docs/decisions/two-matchings.md.
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
EMPTIED = 5  # a function with at most this many statements is paired by its name alone
MANY = 10  # this many equal statements identify a function that was mostly rewritten
MAX_GAP = 40_000  # beyond this product of lengths a gap is aligned by identical statements only
MAX_TABLE = 250_000  # beyond this product of lengths only items that occur once are aligned


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs of statements: `there` maps new statements to old ones, `back` old ones to new ones."""

    new: StatementTree
    old: StatementTree
    there: dict[StatementNode, StatementNode] = field(default_factory=dict)
    back: dict[StatementNode, StatementNode] = field(default_factory=dict)

    def pair(self, new: StatementNode, old: StatementNode) -> None:
        """Pair two nodes; earlier pairs of either node are removed."""
        before = self.there.pop(new, None)
        if before is not None:
            del self.back[before]
        other = self.back.pop(old, None)
        if other is not None:
            del self.there[other]
        self.there[new] = old
        self.back[old] = new

    def same(self, new: StatementNode) -> bool:
        """Return True if a node has a partner with exactly the same text."""
        old = self.there.get(new)
        return old is not None and old.words == new.words and old.kind == new.kind

    def block(self, new: StatementNode) -> StatementNode | None:
        """Return the old block that corresponds to a block of a new statement that is paired."""
        if new.parent is None:
            return self.old.root
        owner = self.there.get(new.parent)
        if owner is None:
            return None
        roles = [each for each in owner.children if each.role == new.role]
        exact = [each for each in roles if each.words == new.words]
        return (exact or roles or [None])[0]  # type: ignore[list-item]


def match(new: StatementTree, old: StatementTree) -> Matching:
    r"""Return the pairs of statements of two trees.

    >>> from rearview.source.text import try_parse
    >>> from rearview.source.statement_trees import grow
    >>> new, old = (grow(try_parse(t)) for t in ("a = 1\nf(a)", "if on:\n    a = 1\n    f(a)"))
    >>> [(n.start, o.start) for n, o in match(new, old).there.items() if not n.is_block]
    [(1, 2), (2, 3)]
    """
    return _Matcher(new, old).run()


class _Matcher:
    def __init__(self, new: StatementTree, old: StatementTree) -> None:
        self.matching = Matching(new, old)
        self.ids: dict[object, int] = {}
        self.head: dict[StatementNode, int] = {}  # the statement alone
        self.whole: dict[StatementNode, int] = {}  # the statement with all below it
        self.size: dict[StatementNode, int] = {}
        self.count: dict[StatementNode, int] = {}  # statements, blocks not counted
        self.words_below: dict[StatementNode, Counter[str]] = {}
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
        self.identical_subtrees()
        self.scopes()
        gaps = [
            gap
            for new, old in sorted(matching.there.items(), key=lambda pair: pair[0].order)
            if new.is_scope and not self.same_below(new)
            for gap in self.inside(new, old)
        ]
        self.moved()
        self.next_to_pairs()
        self.same_in_scope(self.identifying_key)
        self.same_in_scope(value_of)
        for news, olds in gaps:
            self.pair_similar(news, olds)
        self.containers()
        self.rest()
        self.same_in_scope(_assigned_key)
        self.repair_repeated()
        return matching

    def same_below(self, new: StatementNode) -> bool:
        return bool(new.children) and all(each in self.matching.there for each in new.children)

    def pair_subtrees(self, new: StatementNode, old: StatementNode) -> None:
        for new_node, old_node in zip(new.walk(), old.walk(), strict=True):
            self.matching.pair(new_node, old_node)

    def identical_subtrees(self) -> None:
        """Pair whole functions and classes that are equal and occur once on each side."""
        there = self.by_whole(self.matching.new.nodes)
        back = self.by_whole(self.matching.old.nodes)
        for key, news in there.items():
            olds = back.get(key, [])
            if len(news) == len(olds) == 1 and news[0] not in self.matching.there:
                self.pair_subtrees(news[0], olds[0])

    def by_whole(self, nodes: Iterable[StatementNode]) -> dict[int, list[StatementNode]]:
        by_number: dict[int, list[StatementNode]] = defaultdict(list)
        for node in nodes:
            if node.is_scope and not node.is_block:
                by_number[self.whole[node]].append(node)
        return by_number

    def scopes(self) -> None:
        """Pair functions and classes: by full name, by contents, by their own name."""
        matching = self.matching
        news = {name: node for name, node in _named(matching.new) if node not in matching.there}
        olds = {name: node for name, node in _named(matching.old) if node not in matching.back}
        for name in [name for name in news if name in olds]:
            same_kind = news[name].kind == olds[name].kind
            if same_kind and not self.emptied(news[name], olds[name]):
                matching.pair(news.pop(name), olds.pop(name))
        for kind in ("ClassDef", "FunctionDef"):
            self.scopes_by_contents(
                [node for node in news.values() if node.kind == kind],
                [node for node in olds.values() if node.kind == kind],
            )
            self.scopes_by_own_name(emptied=kind == "FunctionDef")

    def emptied(self, new: StatementNode, old: StatementNode) -> bool:
        """Return True if the contents of one of two functions are mostly not in the other one.

        Its body may have been moved into another function, which it now calls.
        """
        if new.kind != "FunctionDef" or max(self.count[new], self.count[old]) <= EMPTIED:
            return False
        new_contents, old_contents = Counter(self.contents(new)), Counter(self.contents(old))
        return 2 * (new_contents & old_contents).total() < 0.1 * (
            new_contents.total() + old_contents.total()
        )

    def scopes_by_own_name(self, *, emptied: bool) -> None:
        """Pair functions and classes of paired scopes that have the same name.

        Functions whose contents were moved elsewhere are paired only with `emptied`.
        """
        matching = self.matching
        theirs: dict[tuple[StatementNode, str, str], list[StatementNode]] = defaultdict(list)
        for old in matching.old.nodes:
            if old.is_scope and not old.is_block and old not in matching.back:
                theirs[old.scope(), _name(old), old.kind].append(old)
        if not theirs:
            return
        for new in matching.new.nodes:
            if not new.is_scope or new.is_block or new in matching.there:
                continue
            around = matching.there.get(new.scope())
            same = theirs.get((around, _name(new), new.kind), []) if around is not None else []
            if len(same) == 1 and same[0] not in matching.back:
                if emptied or not self.emptied(new, same[0]):
                    matching.pair(new, same[0])

    def scopes_by_contents(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair functions, or classes, that contain the same statements."""
        matching = self.matching
        news = [node for node in news if node not in matching.there]
        olds = [node for node in olds if node not in matching.back]
        votes: list[tuple[float, int, StatementNode, StatementNode]] = []
        where: dict[int, list[StatementNode]] = defaultdict(list)
        held = {node: Counter(self.contents(node)) for node in (*news, *olds)}
        for old in olds:
            for key in held[old]:
                where[key].append(old)
        for new in news:
            shared: Counter[StatementNode] = Counter()
            for key, times in held[new].items():
                if len(where[key]) <= 8:
                    for old in where[key]:
                        shared[old] += min(times, held[old][key])
            for old, count in shared.items():
                total = held[new].total() + held[old].total()
                alike = 2 * count / total + (0.3 if _name(old) == _name(new) else 0.0)
                many = count >= MANY and alike >= 0.15  # rewritten; no other function is as similar
                if many or (alike >= 0.4 and (count > 1 or alike > 0.8)):
                    votes.append((-alike, abs(new.order - old.order), new, old))
        votes.sort(key=lambda vote: (vote[0], vote[1], vote[2].order, vote[3].order))
        for _, _, new, old in votes:
            if new not in matching.there and old not in matching.back:
                matching.pair(new, old)

    def contents(self, scope: StatementNode) -> list[int]:
        return [self.head[node] for node in scope.walk() if not node.is_block and node is not scope]

    def items(self, scope: StatementNode) -> list[StatementNode]:
        """Return the statements of a scope in text order, without those of scopes inside it."""
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

    def inside(
        self, new: StatementNode, old: StatementNode
    ) -> list[tuple[list[StatementNode], list[StatementNode]]]:
        """Pair the equal statements of two paired scopes, in order; return the gaps between the pairs."""
        news, olds = self.items(new), self.items(old)
        pairs = align_items(
            [self.key(node) for node in news],
            [self.key(node) for node in olds],
            [1 + min(len(node.words), 9) + 4 * bool(node.children) for node in news],
        )
        for new_at, old_at in pairs:
            self.offer(news[new_at], olds[old_at])
        edges = [(-1, -1), *pairs, (len(news), len(olds))]
        return [(news[i + 1 : k], olds[j + 1 : m]) for (i, j), (k, m) in pairwise(edges)]

    def key(self, node: StatementNode) -> int:
        # a paired function counts as one item, however much its header changed
        partner = self.matching.there.get(node)
        if node.is_scope and partner is not None:
            return self.number(("pair", id(partner)))
        if node.is_scope and node in self.matching.back:
            return self.number(("pair", id(node)))
        return self.head[node]

    def offer(self, new: StatementNode, old: StatementNode) -> None:
        if new.is_scope or old.is_scope:
            return  # functions and classes are paired as a whole, or not at all
        if new not in self.matching.there and old not in self.matching.back:
            self.matching.pair(new, old)

    def pair_similar(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair, in order, the statements of a gap so that the sum of their similarity is largest."""
        news = [node for node in news if node not in self.matching.there and not node.is_scope]
        olds = [node for node in olds if node not in self.matching.back and not node.is_scope]
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
            value = 0.45 * value + 0.55 * self.shared_below(new, old)
        return value if value >= SIMILAR else 0.0

    def shared_below(self, new: StatementNode, old: StatementNode) -> float:
        """Return how many of the words below two statements are the same, from 0 to 1."""
        new_words, old_words = self.below(new), self.below(old)
        shared = (new_words & old_words).total()
        return 2 * shared / max(1, new_words.total() + old_words.total())

    def below(self, node: StatementNode) -> Counter[str]:
        if node not in self.words_below:
            inner = (each for each in node.walk() if each is not node)
            self.words_below[node] = Counter(word for each in inner for word in each.words)
        return self.words_below[node]

    def moved(self) -> None:
        """Pair statements that are equal and occur once on each side, wherever they are."""
        for least in (2, 1):
            there: dict[int, list[StatementNode]] = defaultdict(list)
            back: dict[int, list[StatementNode]] = defaultdict(list)
            for node in self.matching.new.statements():
                if node not in self.matching.there and self.size[node] >= least:
                    there[self.whole[node]].append(node)
            for node in self.matching.old.statements():
                if node not in self.matching.back and self.size[node] >= least:
                    back[self.whole[node]].append(node)
            for key, news in there.items():
                olds = back.get(key, [])
                telling = least > 1 or len(news[0].words) >= 5
                if len(news) == len(olds) == 1 and telling and self.free(news[0], olds[0]):
                    self.pair_subtrees(news[0], olds[0])

    def next_to_pairs(self) -> None:
        """Pair equal statements next to a pair: a whole run of statements has moved."""
        matching = self.matching
        for step, nodes in ((1, matching.new.nodes), (-1, reversed(matching.new.nodes))):
            for new in nodes:
                if new.is_block or new in matching.there or new.is_scope:
                    continue
                beside = _next(new, -step)
                partner = matching.there.get(beside) if beside is not None else None
                old = _next(partner, step) if partner is not None else None
                if old is not None and self.whole[new] == self.whole[old] and self.free(new, old):
                    self.pair_subtrees(new, old)

    def same_in_scope(self, key: Callable[[StatementNode], Hashable | None]) -> None:
        """Pair statements of paired scopes that have the same key, if the key occurs once on each side."""
        matching = self.matching
        for new_scope, old_scope in [(n, o) for n, o in matching.there.items() if n.is_scope]:
            there: dict[Hashable, list[StatementNode]] = defaultdict(list)
            back: dict[Hashable, list[StatementNode]] = defaultdict(list)
            for scope, done, keyed in (
                (new_scope, matching.there, there),
                (old_scope, matching.back, back),
            ):
                for node in self.items(scope):
                    if node not in done and not node.is_scope and (own := key(node)):
                        keyed[own].append(node)
            for own, news in there.items():
                olds = back.get(own, [])
                if len(news) == len(olds) == 1 and not (news[0].children or olds[0].children):
                    matching.pair(news[0], olds[0])

    def identifying_key(self, node: StatementNode) -> Hashable | None:
        """Return a key that identifies a simple statement within its function; None if it is too short."""
        least = 4 if node.kind == "Return" else 2  # `return 0` is in many blocks
        return (self.whole[node], "same") if len(node.words) >= least else None

    def free(self, new: StatementNode, old: StatementNode) -> bool:
        return not any(each in self.matching.there for each in new.walk()) and not any(
            each in self.matching.back for each in old.walk()
        )

    def containers(self) -> None:
        """Pair compound statements by their contents, from the bottom."""
        matching = self.matching
        for new in reversed(matching.new.nodes):
            if new.is_block or not new.children or new.is_scope:
                continue
            partner = matching.there.get(new)
            if partner is not None and self.whole[partner] == self.whole[new]:
                continue
            shared: Counter[StatementNode] = Counter()
            for node in new.walk():
                partner = matching.there.get(node) if not node.is_block else None
                if partner is None or node is new:
                    continue
                for around in partner.above():
                    if around.is_scope:
                        break
                    if around.kind == new.kind and not around.is_block:
                        shared[around] += 1
            if not shared:
                continue
            current = matching.there.get(new)
            ranked = sorted(
                shared, key=lambda old: (-self.shared_fraction(new, old, shared), old.order)
            )
            best = ranked[0]
            score = self.shared_fraction(new, best, shared)
            if current is None:
                if score >= 0.35 and best not in matching.back:
                    matching.pair(new, best)
                elif score >= 0.35 and self.head[new] == self.head[best]:
                    self.claim(new, best, shared[best])
            elif (
                best is not current
                and score > 0.5
                and self.shared_fraction(new, current, shared) == 0
            ):
                rival = matching.back.get(best)
                if rival is None:
                    matching.pair(new, best)

    def claim(self, new: StatementNode, old: StatementNode, shared: int) -> None:
        """Pair two equal headers if the old one's partner has fewer of its statements."""
        matching = self.matching
        rival = matching.back[old]
        inside = set(old.walk())
        held = [n for n in rival.walk() if n is not rival and matching.there.get(n) in inside]
        if self.head[rival] != self.head[old] or len(held) >= shared:
            return
        matching.pair(new, old)
        free: dict[int, list[StatementNode]] = defaultdict(list)
        for node in new.walk():
            if not node.is_block and node not in matching.there:
                free[self.whole[node]].append(node)
        for node in held:
            equal = free.get(self.whole[node], [])
            if len(equal) == 1 and not node.is_block:
                partner = matching.there[node]
                if self.whole[partner] == self.whole[node] and not node.children:
                    matching.pair(equal[0], partner)

    def shared_fraction(
        self, new: StatementNode, old: StatementNode, shared: Counter[StatementNode]
    ) -> float:
        return 2 * shared[old] / max(1, self.count[new] + self.count[old] - 2)

    def rest(self) -> None:
        """Align the remaining statements inside paired compound statements."""
        for new in self.matching.new.nodes:
            if not new.is_block:
                continue
            old = self.matching.block(new)
            if old is not None:
                self.matching.pair(new, old)
            else:
                old = self.former_block(new)
            if old is None:
                continue
            news = [each for each in new.children if each not in self.matching.there]
            if not news:
                continue
            edges_old = -1
            pending: list[StatementNode] = []
            for each in [*new.children, None]:
                partner = self.matching.there.get(each) if each is not None else None
                if each is not None and (partner is None or partner.parent is not old):
                    pending.append(each)
                    continue
                stop = partner.index if partner is not None else len(old.children)
                if pending and stop > edges_old:
                    self.pair_similar(pending, old.children[edges_old + 1 : stop])
                    self.only_container(pending, old.children[edges_old + 1 : stop])
                pending = []
                edges_old = max(edges_old, stop)

    def only_container(self, news: list[StatementNode], olds: list[StatementNode]) -> None:
        """Pair the compound statements of a gap that has one on each side, if their heads are similar."""
        new_containers = [
            each for each in news if each.children and each not in self.matching.there
        ]
        old_containers = [each for each in olds if each.children and each not in self.matching.back]
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
        """Pair a statement that occurs several times with the occurrence next to its neighbour's partner."""
        matching = self.matching
        for new in matching.new.nodes:
            old = matching.there.get(new)
            if old is None or new.children or new.is_block or self.paired_neighbours(new, old):
                continue
            for step in (-1, 1):
                next_new = _next(new, step)
                partner = matching.there.get(next_new) if next_new is not None else None
                better = _next(partner, -step) if partner is not None else None
                if better is None or self.head[better] != self.head[new] or better.children:
                    continue
                rival = matching.back.get(better)
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
        """Return how many neighbours of a statement are paired with the same neighbour of another."""
        count = 0
        for step in (-1, 1):
            new_neighbour, old_neighbour = _next(new, step), _next(old, step)
            count += (
                new_neighbour is not None
                and old_neighbour is not None
                and self.matching.there.get(new_neighbour) is old_neighbour
            )
        return count

    def former_block(self, new: StatementNode) -> StatementNode | None:
        """Return the old block that contained most statements of a new block without a partner."""
        homes = Counter(
            partner.parent
            for each in new.children
            if (partner := self.matching.there.get(each)) is not None
        )
        best = homes.most_common(1)
        if not best or best[0][1] < 2 or best[0][1] * 2 < homes.total():
            return None
        return best[0][0]


def _next(node: StatementNode, step: int) -> StatementNode | None:
    """Return the statement before (-1) or after (1) a statement of a block."""
    at = node.index + step
    siblings = node.parent.children if node.parent is not None else []
    return siblings[at] if 0 <= at < len(siblings) else None


def _assigned_key(node: StatementNode) -> Hashable | None:
    """Return the variables that an assignment sets, as a key; None for other statements."""
    return ("sets", *lead(node)) if node.kind == "Assign" and lead(node) else None


def _name(node: StatementNode) -> str:
    return str(getattr(node.tree, "name", ""))


def _named(tree: StatementTree) -> list[tuple[str, StatementNode]]:
    named_scopes: list[tuple[str, StatementNode]] = []
    seen: Counter[str] = Counter()
    for node in tree.nodes:
        if node.is_scope and not node.is_block:
            around = [_name(each) for each in node.above() if each.is_scope and not each.is_block]
            name = ".".join([*reversed(around), _name(node)])
            seen[name] += 1
            named_scopes.append((f"{name}#{seen[name]}", node))
    return named_scopes


def align_items(
    firsts: Sequence[int], seconds: Sequence[int], weights: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the pairs of positions that have the same items, in order.

    Items that occur once on both sides are paired first (patience); where these cross, the heavier run by
    `weights` of the first sequence wins. Between them, the longest common subsequence decides.

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
        anchors = _unique(firsts, seconds, (i, k), (j, m), weights)
        if not anchors:
            if (k - i) * (m - j) <= MAX_TABLE:
                pairs.extend(_longest(firsts, seconds, (i, k), (j, m)))
            continue
        pairs.extend(anchors)
        edges = [(i - 1, j - 1), *anchors, (k, m)]
        work.extend((a + 1, b, c + 1, d) for (a, c), (b, d) in pairwise(edges))
    return sorted(pairs)


def _unique(
    firsts: Sequence[int],
    seconds: Sequence[int],
    here: tuple[int, int],
    there: tuple[int, int],
    weights: Sequence[int] | None,
) -> list[tuple[int, int]]:
    (i, k), (j, m) = here, there
    once, also = Counter(firsts[i:k]), Counter(seconds[j:m])
    place = {seconds[at]: at for at in range(j, m) if also[seconds[at]] == 1}
    pairs = [
        (at, place[firsts[at]])
        for at in range(i, k)
        if once[firsts[at]] == 1 and firsts[at] in place
    ]
    # find the heaviest run of pairs whose second positions rise; `ends` and `totals` both rise, because a
    # run that ends later than another one and is not heavier is never extended
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


def _longest(
    firsts: Sequence[int], seconds: Sequence[int], here: tuple[int, int], there: tuple[int, int]
) -> list[tuple[int, int]]:
    (i, k), (j, m) = here, there
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
