"""Find the place in the old tree that corresponds to a place in the new tree.

A place is between two statements of a block. The anchors of a new place are the old partners of the new statements
around it; if several old places are between the same two anchors, `place_between_anchors` chooses.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from rearview.source.data_flow import (
    Uses,
    binds,
    bound_in,
    definition,
    uses,
    visible,
)
from rearview.source.propagate.match import Matching
from rearview.source.propagate.place_between_anchors import (
    LEAVING,
    REACH,
    NewPlace,
    NoPlace,
    choose_place,
    index_of_child,
    siblings,
)
from rearview.source.propagate.splice import indent_of
from rearview.source.statement_trees import StatementNode, StatementTree, similarity


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the old tree, before child `index` of `block`, with the evidence for this place."""

    block: StatementNode
    index: int
    confidence: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Anchor:
    """An old statement that is paired with a new statement near the statement to carry."""

    old: StatementNode
    before: bool  # the new statement is above the statement to carry
    weight: float
    near: bool  # the new statement is directly above or below the statement to carry
    far: int  # number of statements between the new statement and the statement to carry
    sets_variable: bool  # the new statement sets a variable that the statement to carry reads
    exact: bool = False  # the old and the new statement have the same text
    inside: bool = True  # the new statement is in the same block as the statement to carry


def locate(matching: Matching, new_place: NewPlace) -> Place | NoPlace:
    """Return the place in the old tree where the statement at `new_place` belongs, or why no place is certain."""
    place = _by_statements(matching, new_place)
    if isinstance(place, Place) and place.confidence >= 0.85:
        return place
    under_comment = _by_comment(matching, new_place)
    if under_comment is None or not _same_values(matching, new_place, *under_comment):
        return place
    if isinstance(place, Place) and (place.block, place.index) == under_comment:
        return replace(place, confidence=max(place.confidence, 0.85))
    return Place(*under_comment, 0.75, ("the comment above it is there",))


def _by_comment(matching: Matching, new_place: NewPlace) -> tuple[StatementNode, int] | None:
    """Return (block, index) below the old comment that equals the comment above the statement to carry.

    Return None if one of the texts does not have the comment exactly once, or if the comment is short.
    """
    comment = new_place.comment[-1] if new_place.comment else ""
    if len(comment) < 10:
        return None
    comment_lines = [
        at for at, line in enumerate(matching.old.parsed.lines, 1) if line.strip() == comment
    ]
    if (
        len(comment_lines) != 1
        or sum(line.strip() == comment for line in matching.new.parsed.lines) != 1
    ):
        return None
    statement_below = next(
        (n for n in matching.old.nodes if not n.is_block and n.start > comment_lines[0]), None
    )
    new_scope = new_place.block if new_place.block.parent is None else new_place.block.scope()
    if (
        statement_below is None
        or statement_below.parent is None
        or _scope_of(statement_below.parent) is not matching.old_of.get(new_scope)
    ):
        return None
    if any(
        line.strip() and not line.strip().startswith("#")
        for line in matching.old.parsed.lines[comment_lines[0] : statement_below.start - 1]
    ):
        return None
    return statement_below.parent, statement_below.index


def _by_statements(matching: Matching, new_place: NewPlace) -> Place | NoPlace:
    anchors = _anchors(matching, new_place)
    old_block = matching.old_block(new_place.block)
    if old_block is None and not anchors:
        old_block = _copied_block(matching, new_place)
    target = _block_of_inverted_nesting(anchors) or _block(anchors, old_block)
    if target is not old_block and _stays_at_edge(anchors, new_place, target, old_block):
        target = old_block
    if target is None:
        return NoPlace(_why_no_block(new_place.block))
    target = _block_of_definition(matching, new_place, target)
    anchor_indexes = {a: at for a in anchors if (at := index_of_child(a.old, target)) is not None}
    if not anchor_indexes:
        return _between_copies(matching, new_place, target) or _at_edge(matching, new_place, target)
    low, high, agreement = _range(anchor_indexes, len(target.children))
    low, high = _range_at_neighbour(anchor_indexes, low, high, len(target.children))
    low, high, reachable = _reachable(target, low, high)
    after_definitions = max([low, *_after_definitions(matching, new_place, target)])
    if after_definitions > high:
        if not _values_are_set(anchor_indexes, new_place, target, high):
            return NoPlace("what it reads is set only after the place where it belongs")
        reachable *= 0.9
    else:
        low = after_definitions
    choice = choose_place(matching, new_place, target, low, high)
    if isinstance(choice, NoPlace):
        return choice
    at, certainty = choice
    certainty *= reachable
    if not _same_values(matching, new_place, target, at):
        at = _with_same_values(matching, new_place, target, anchor_indexes, at)
        certainty *= 0.92
    in_branch = _inside_branch(new_place, anchors, target, at)
    if in_branch is not None:
        block, index = in_branch
        return Place(
            block,
            index,
            0.8 * agreement * certainty,
            ("it is next to the statement that sets what it reads",),
        )
    refusal = _refusal_of_split_neighbours(anchors, target, old_block, new_place.uses)
    if refusal is not None:
        return refusal
    strength, reasons = _evidence(anchor_indexes, target, at)
    if old_block is not target:
        reasons.append("the block around it has changed")
        strength *= 0.9
        if old_block is None and not any(
            a.inside and a.old.parent is target for a in anchor_indexes
        ):
            strength *= 0.8  # the chosen block contains no statement of the new block
    return Place(target, at, agreement * certainty * strength, tuple(reasons))


def _evidence(
    anchor_indexes: dict[_Anchor, int], target: StatementNode, at: int
) -> tuple[float, list[str]]:
    """Return (strength from 0 to 1, reasons) of the evidence for the place at index `at` of `target`."""
    touching = {
        a.before
        for a in anchor_indexes
        if a.near and a.old.parent is target and a.old.index == (at - 1 if a.before else at)
    }
    if len(touching) == 2:
        return 1.0, ["both neighbours are there"]
    if touching:
        return 0.97, ["one neighbour is there"]
    if any(a.old.parent is target for a in anchor_indexes):
        return 0.82, ["statements around it are there"]
    return 0.75, ["code inside the same block is there"]


def _with_same_values(
    matching: Matching,
    new_place: NewPlace,
    target: StatementNode,
    anchor_indexes: dict[_Anchor, int],
    at: int,
) -> int:
    """Return an index in `target` next to an unchanged neighbour for which `_same_values` is True, else `at`."""
    neighbouring_indexes = [
        a.old.index + a.before
        for a in anchor_indexes
        if a.near and a.exact and a.old.parent is target
    ]
    return next(
        (
            index
            for index in neighbouring_indexes
            if _same_values(matching, new_place, target, index)
        ),
        at,
    )


def _anchors(matching: Matching, new_place: NewPlace) -> list[_Anchor]:
    anchors: list[_Anchor] = []
    for before in (True, False):
        side = siblings(matching, new_place, before=before)
        for position, new in enumerate(side[:REACH]):
            far = position
            old = matching.old_of.get(new)
            sets_variable = before and bool(uses([new.tree]).writes & new_place.uses.reads)
            inside = new.parent is new_place.block
            if not inside:
                far += 2  # the new statement is outside the block: weaker evidence
            if old is not None:
                likeness = max(similarity(new, old), 0.6) if new.children else similarity(new, old)
                exact = old.words == new.words and (len(new.words) > 2 or far == 0)
                weight = likeness / (1 + far)
                anchors.append(
                    _Anchor(old, before, weight, far == 0, far, sets_variable, exact, inside)
                )
            elif (
                new.children and (inner := _paired_at_edge(matching, new, last=before)) is not None
            ):
                # the new text has an additional block around statements that the old text has, too
                anchors.append(
                    _Anchor(
                        inner, before, 0.7 / (1 + far), False, far, sets_variable, inside=inside
                    )
                )
    return anchors


def _paired_at_edge(matching: Matching, new: StatementNode, *, last: bool) -> StatementNode | None:
    """Return the old statement that is paired with the first paired statement inside `new`.

    With `last`, the last paired statement counts. Return None if no statement inside is paired, or if `new` is a
    function or class.
    """
    inner = [node for node in new.walk() if not node.is_block and node in matching.old_of]
    if not inner or new.is_scope:
        return None
    return matching.old_of[inner[-1 if last else 0]]


def _block(anchors: list[_Anchor], old_block: StatementNode | None) -> StatementNode | None:
    """Return the old block that most of the evidence supports, or None if there is no evidence.

    `old_block` is the old block that corresponds to the new block of the statement to carry, or None.
    """
    votes: dict[StatementNode, float] = defaultdict(float)
    if old_block is not None:
        votes[old_block] += 0.6
    for anchor in anchors:
        fraction = 1.0
        node: StatementNode = anchor.old
        while node.parent is not None:
            node = node.parent
            if node.is_block:
                votes[node] += fraction * anchor.weight
                fraction = min(0.3, fraction * 0.3)
            elif node.is_scope:
                break
    if not votes:
        return None
    best = max(votes, key=lambda node: (votes[node], node.order))
    common_block = _common_block(anchors)
    if common_block is not None:
        return common_block
    for anchor in anchors:  # if a loop sets the variable, it is read in the loop, too
        sets = anchor.sets_variable and bool(uses([anchor.old.tree]).writes)
        if sets and anchor.near and anchor.old.parent is not None:
            for node in anchor.old.above():
                if node is best:
                    break
                if isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While)):
                    return anchor.old.parent
    return best


def _block_of_inverted_nesting(anchors: list[_Anchor]) -> StatementNode | None:
    """Return the block of the old neighbour below if this block is inside the old neighbour above, else None.

    `with a: for x in y: f(x)` and then `g()` may have been `for x in y: with a: f(x)`, then `g()`.
    """
    near = {a.before: a for a in anchors if a.near}
    if len(near) < 2 or near[True].old not in list(near[False].old.above()):
        return None
    inner = near[False].old.parent
    exact = near[True].exact and near[False].exact
    return (
        inner if exact or (inner is not None and _is_other_branch(inner, near[True].old)) else None
    )


def _is_other_branch(block: StatementNode, condition: StatementNode) -> bool:
    """Return True if `block` is the `else` of the `if` statement `condition`, whose body ends in a jump.

    A jump is a `return`, `raise`, `continue` or `break`.
    """
    tree = condition.tree
    return (
        isinstance(tree, ast.If)
        and block.parent is condition
        and block.role == "orelse"
        and isinstance(tree.body[-1], LEAVING)
    )


def _common_block(anchors: list[_Anchor]) -> StatementNode | None:
    """Return the block that contains both old neighbours, if both are unchanged, or one is and they are adjacent.

    If no neighbour is unchanged, return the block that contains all unchanged anchors nearby, if there are several.
    Otherwise, return None.
    """
    exact = [a for a in anchors if a.exact]
    near = [a for a in exact if a.near]
    if len(near) == 2 and near[0].old.parent is near[1].old.parent:
        return near[0].old.parent
    pair = sorted((a.old for a in anchors if a.near), key=lambda node: node.order)
    if (
        near
        and len(pair) == 2
        and pair[0].parent is pair[1].parent
        and pair[0].index + 1 == pair[1].index
    ):
        return pair[0].parent  # the neighbours are adjacent, and one of them is unchanged
    close = [a for a in exact if a.far < 3]
    if near or len(close) < 2 or len({a.old.parent for a in close}) > 1:
        return None
    return close[0].old.parent


def _block_of_definition(
    matching: Matching, new_place: NewPlace, target: StatementNode
) -> StatementNode:
    """Return `target`, or the deeper old block in which a variable is set that the statement to carry reads.

    After a loop, the variable would have only its last value; after a branch, it might have no value.
    """
    around = {target, *target.above()}
    for name in sorted(new_place.uses.reads):
        new_definition = definition(new_place.block, new_place.index, name)
        old_definition = (
            matching.old_of.get(new_definition)
            if new_definition is not None and not new_definition.is_scope
            else None
        )
        if (
            new_definition is None
            or old_definition is None
            or old_definition.scope() is not _scope_of(target)
        ):
            continue
        if new_definition.parent is not new_place.block or old_definition.parent is None:
            continue  # the new text, too, sets the variable in another block
        if not binds(old_definition) and name in bound_in(target):
            continue  # the inner block only adds to the value, which is complete after that block
        enclosing = [n for n in old_definition.above() if n not in around and not n.is_block]
        if not enclosing:
            continue
        outermost = enclosing[-1]
        if outermost.parent is not target:
            continue
        branches = any(isinstance(n.tree, (ast.If, ast.Match)) for n in enclosing)
        if any(map(_is_loop, enclosing)) or (
            branches and definition(target, outermost.index, name) is None
        ):
            return old_definition.parent
    return target


def _same_values(matching: Matching, new_place: NewPlace, target: StatementNode, at: int) -> bool:
    """Return True if corresponding statements set the variables that the statement to carry reads in both texts.

    In the old text, the statement is at index `at` of `target`. A variable does not count if the new statement that
    sets it is not paired with an old one.
    """
    for name in new_place.uses.reads:
        new_definition = definition(new_place.block, new_place.index, name)
        old_definition = (
            matching.old_of.get(new_definition)
            if new_definition is not None and not new_definition.is_scope
            else None
        )
        if old_definition is None or old_definition.scope() is not _scope_of(target):
            continue
        if name in binds(old_definition) and definition(target, at, name) not in {
            old_definition,
            None,
        }:
            return False
    return True


def _inside_branch(
    new_place: NewPlace, anchors: list[_Anchor], target: StatementNode, at: int
) -> tuple[StatementNode, int] | None:
    """Return (block, index) of the place in a branch after the assignment of a variable, or None.

    The place is needed if the statement to carry reads a variable that has a value only in this branch.
    """
    above = next((a.old for a in anchors if a.near and a.before and a.exact), None)
    for name in sorted(new_place.uses.reads):
        new_definition = definition(new_place.block, new_place.index, name)
        if new_definition is None or new_definition.is_scope:
            continue
        old_definition = definition(target, at, name)
        if (
            old_definition is not None
            and above is not None
            and above.parent is old_definition.parent
        ):
            old_definition = above if above.index > old_definition.index else old_definition
        elif new_definition.parent is not new_place.block:
            continue
        if (
            old_definition is None
            or old_definition.is_scope
            or old_definition.parent in {None, target, *target.above()}
        ):
            continue
        outer = index_of_child(old_definition, target)
        branch = target.children[outer].tree if outer is not None else None
        if outer is None or not isinstance(branch, ast.If):
            continue
        if branch.orelse or definition(target, outer, name) is not None:
            continue
        assert old_definition.parent is not None
        return old_definition.parent, old_definition.index + 1
    return None


def _scope_of(block: StatementNode) -> StatementNode:
    return block if block.parent is None else block.scope()


def _is_loop(node: StatementNode) -> bool:
    return not node.is_block and isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While))


def _stays_at_edge(
    anchors: list[_Anchor],
    new_place: NewPlace,
    target: StatementNode | None,
    old_block: StatementNode | None,
) -> bool:
    """Return True if the first or last statement of a block belongs into `old_block`, and not deeper into `target`.

    A neighbour may have moved from the block into a deeper one; other neighbours are still in `old_block`.
    """
    if old_block is None or target is None or old_block not in list(target.above()):
        return False
    if 0 < new_place.index < len(new_place.block.children) or any(a.sets_variable for a in anchors):
        return False
    enclosing = list(takewhile(lambda node: node is not old_block, target.above()))
    if any(a.near and a.exact and a.old.parent is target for a in anchors) and all(
        node.is_block or node.kind == "With" for node in enclosing
    ):
        return False  # code in a `with` runs as often as the code around it
    return any(anchor.old.parent is old_block for anchor in anchors)


def _refusal_of_split_neighbours(
    anchors: list[_Anchor],
    target: StatementNode,
    old_block: StatementNode | None,
    statement_uses: Uses,
) -> NoPlace | None:
    """Return a refusal if the old neighbours are in blocks that run under different conditions, else None."""
    neighbours = {
        a.before: a.old for a in anchors if a.near and a.old.scope() is _scope_of(target)
    }  # a neighbour that moved to another function is no evidence
    if len(neighbours) < 2 or neighbours[True].parent is neighbours[False].parent:
        return None
    follows = any(a.near and a.sets_variable and a.old.parent is target for a in anchors)
    if follows and neighbours[False].parent in list(target.above()):
        return None  # the deeper block is right: it contains the statement that sets the variable
    if neighbours[True] in list(neighbours[False].above()) and target is neighbours[False].parent:
        return None
    if any(a.near and a.sets_variable and a.exact and a.old.parent is target for a in anchors):
        return None  # the neighbour that sets the variable is unchanged; only the other one moved
    if (
        target is old_block is neighbours[False].parent
        and index_of_child(neighbours[True], target) == neighbours[False].index - 1
    ):
        inner = target.children[neighbours[False].index - 1]
        if isinstance(inner.tree, ast.If) and statement_uses.reads & bound_in(inner) <= visible(
            target, inner.index
        ):
            return None  # the branch only sets variables that already have a value before it
    for old in neighbours.values():
        for node in old.above():
            if node is target:
                break
            if node.is_scope:
                return None
            loop = isinstance(node.tree, (ast.For, ast.AsyncFor, ast.While))
            if (
                loop
                and target is old_block
                and (follows or not uses([node.tree]).writes & statement_uses.reads)
            ):
                continue  # outside this loop, the statement runs as often as in the new text
            if isinstance(node.tree, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match)):
                return NoPlace(
                    "two places are equally good: its neighbours are in different blocks, at lines "
                    "{} and {} of the old text",
                    (neighbours[True].start, neighbours[False].start),
                )
    return None


def _range(anchor_indexes: dict[_Anchor, int], count: int) -> tuple[int, int, float]:
    """Return (first index, last index, fraction of the weight of the anchors that agree with these indexes).

    An anchor agrees with an index if it is on the same side as in the new text. `count` is the number of
    statements in the block.
    """
    gains = [0.0] * (count + 1)
    for anchor, index in anchor_indexes.items():
        for at in range(index + 1, count + 1) if anchor.before else range(index + 1):
            gains[at] += anchor.weight
    total = sum(anchor.weight for anchor in anchor_indexes)
    best = max(gains)
    first = next(at for at, gain in enumerate(gains) if gain > best - 1e-9)
    last = first
    while last < count and gains[last + 1] > best - 1e-9:
        last += 1
    return first, last, best / total


def _reachable(target: StatementNode, low: int, high: int) -> tuple[int, int, float]:
    """Return (low, high, factor): no index after a `return` or other jump, and a factor for the confidence.

    The factor is less than 1 if `low` was after the jump.
    """
    end = next((n.index for n in target.children if isinstance(n.tree, LEAVING)), high)
    return min(low, end), min(high, end), 0.9 if end < low else 1.0


def _range_at_neighbour(
    anchor_indexes: dict[_Anchor, int], low: int, high: int, count: int
) -> tuple[int, int]:
    """Return the range (low, high) of possible indexes, corrected by the nearest anchor.

    If the nearest anchor contradicts the range, which is the result of all anchors, the distant anchors probably
    moved: then return a range at the nearest anchor.
    """
    close = [
        (a, at) for a, at in anchor_indexes.items() if a.far < 3 and a.weight * (1 + a.far) >= 0.5
    ]
    nearest = min((a.far for a, _ in close), default=0)
    setting = [(a, at) for a, at in close if a.sets_variable]
    neighbouring_indexes = [(a.before, at + 1 if a.before else at) for a, at in close if a.near]
    if (True, low) in neighbouring_indexes and low == high:
        return low, high
    ranges = [
        (at + 1, at + 1 + a.far) if a.before else (at - a.far, at)
        for a, at in setting[:1] or [each for each in close if each[0].far == nearest]
    ]
    if not ranges or any(first <= high and low <= last for first, last in ranges):
        return low, high
    first, last = ranges[0]
    if (False, low) in neighbouring_indexes and low == high and abs(low - last) <= 2:
        return low, high
    return max(0, first), min(last, count)


def _after_definitions(
    matching: Matching, new_place: NewPlace, target: StatementNode
) -> Iterable[int]:
    """Yield the index in `target` after the assignment of each variable that the statement to carry reads.

    Only variables that the new text sets in the block of the statement count.
    """
    for name in new_place.uses.reads:
        new_definition = definition(new_place.block, new_place.index, name)
        if (
            new_definition is None
            or new_definition.is_scope
            or index_of_child(new_definition, new_place.block) is None
        ):
            continue
        old_definition = matching.old_of.get(new_definition)
        at = index_of_child(old_definition, target) if old_definition is not None else None
        if at is not None:
            yield at + 1


def _values_are_set(
    anchor_indexes: dict[_Anchor, int], new_place: NewPlace, target: StatementNode, at: int
) -> bool:
    """Return True if the unchanged neighbour below is at index `at`, and the variables have values there.

    These are the variables that the statement to carry reads. The new statement that sets one of them was then
    wrongly paired with an equal statement farther down.
    """
    at_neighbour = any(
        a.near and a.exact and not a.before and anchor_indexes[a] == at for a in anchor_indexes
    )
    return at_neighbour and all(
        definition(target, at, name) is not None
        for name in new_place.uses.reads
        if definition(new_place.block, new_place.index, name) is not None
    )


def _copied_block(matching: Matching, new_place: NewPlace) -> StatementNode | None:
    """Return the old block for a place in a compound statement that the new text has copied, or None.

    The old text has only the original. The new text has one paired statement with the same head in the function: this
    is the original, and its old counterpart contains the result.
    """
    owner = new_place.block.parent
    if owner is None or owner.is_scope:
        return None
    twins = [
        node
        for node in owner.scope().walk()
        if node.kind == owner.kind and node.words == owner.words and node in matching.old_of
    ]
    if len(twins) != 1 or twins[0].is_block:
        return None
    same_role = [
        block for block in matching.old_of[twins[0]].children if block.role == new_place.block.role
    ]
    return same_role[0] if same_role else None


def _between_copies(matching: Matching, new_place: NewPlace, target: StatementNode) -> Place | None:
    """Return the place between old statements that equal the new statements around the place, or None.

    These old statements are paired with other copies of the same statements in the new text.
    """
    low, high, copies = 0, len(target.children), 0
    neighbouring_indexes: list[int] = []
    for before in (True, False):
        for far, new in enumerate(siblings(matching, new_place, before=before)[:REACH]):
            equal = [
                old for old in target.children if old.words == new.words and len(old.words) > 1
            ]
            if len(equal) == 1:
                copies += 1
                at = equal[0].index + before
                low, high = (max(low, at), high) if before else (low, min(high, at))
                neighbouring_indexes += [at] * (far == 0)
    if (
        copies < 2
        or low > high
        or not neighbouring_indexes
        or neighbouring_indexes[0] not in {low, high}
    ):
        return None
    return Place(target, neighbouring_indexes[0], 0.75, ("the code around it was copied since",))


def _at_edge(matching: Matching, new_place: NewPlace, target: StatementNode) -> Place | NoPlace:
    """Return the first or last place of `target`, whose statements were all rewritten, or why neither is right."""
    owner = new_place.block.parent
    if not target.children:
        return Place(target, 0, 0.8, ("the block is empty there",))
    if (
        owner is not None
        and matching.is_unchanged(owner)
        and not owner.is_scope
        and new_place.index == 0
    ):
        return Place(target, 0, 0.7, ("it is the first of the same block",))
    if (
        owner in matching.old_of
        and owner is not None
        and not owner.is_scope
        and new_place.index == 0
    ):
        return Place(target, 0, 0.65, ("it is the first of a block that is there",))
    if owner is not None and matching.is_unchanged(owner) and not owner.is_scope:
        last = len(target.children)
        leaves = isinstance(target.children[-1].tree, LEAVING)
        if new_place.index == len(new_place.block.children) and not leaves:
            return Place(target, last, 0.8, ("it is the last of the same block",))
    only = _only_place(target)
    if only is not None and owner is not None and owner.is_scope and owner in matching.old_of:
        return Place(target, only, 0.75, ("it is the only place in that function",))
    return NoPlace("none of the statements around it can be found there")


def _only_place(block: StatementNode) -> int | None:
    """Return the index before the `return` if a block has only this statement and perhaps a docstring, else None."""
    first = block.children[0].tree
    has_docstring = isinstance(getattr(first, "value", None), ast.Constant) and isinstance(
        first, ast.Expr
    )
    at = int(has_docstring)
    remaining = block.children[at:]
    return at if len(remaining) == 1 and isinstance(remaining[0].tree, LEAVING) else None


def _why_no_block(block: StatementNode) -> str:
    for node in (block, *block.above()):
        tree = node.tree
        if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return f"the code around it in `{tree.name}` cannot be found there"
        if isinstance(tree, (ast.For, ast.AsyncFor, ast.While)):
            return f"the loop around it (line {tree.lineno} now) cannot be found there"
    return "the code around it cannot be found there"


def further_places(matching: Matching, new_place: NewPlace) -> list[Place]:
    """Return further places for the statement at `new_place`, the most likely first.

    They are tried after a replay has shown that the first place is wrong. They are below the comment of the
    statement, next to each old neighbour, and after the statements that set the variables which it reads.
    """
    candidates: list[tuple[StatementNode, int, float]] = []
    under_comment = _by_comment(matching, new_place)
    if under_comment is not None:
        candidates.append((*under_comment, 0.75))
    for anchor in _anchors(matching, new_place):
        if anchor.near and anchor.old.parent is not None:
            confidence = 0.75 if anchor.exact else 0.65
            candidates.append((anchor.old.parent, anchor.old.index + anchor.before, confidence))
    for name in sorted(new_place.uses.reads):
        new_definition = definition(new_place.block, new_place.index, name)
        old_definition = (
            matching.old_of.get(new_definition)
            if new_definition is not None and not new_definition.is_scope
            else None
        )
        if (
            old_definition is not None
            and new_definition is not None
            and new_definition.parent is new_place.block
        ):
            assert old_definition.parent is not None
            candidates.append((old_definition.parent, old_definition.index + 1, 0.65))
    reasons = ("a replay disproved the likelier place",)
    return [Place(block, index, confidence, reasons) for block, index, confidence in candidates]


def place_of_definitions(
    statements: list[ast.stmt], new_place: NewPlace, old: StatementTree
) -> Place | None:
    """Return a place after the imports of the old module if the statements can be anywhere among the definitions.

    Return None unless all `statements` are imports, functions and classes at the top level.
    """
    definition_types = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
    )
    if new_place.block.parent is not None or not all(
        isinstance(each, definition_types) for each in statements
    ):
        return None
    imports = [n for n in old.root.children if isinstance(n.tree, (ast.Import, ast.ImportFrom))]
    at = imports[-1].index + 1 if imports else 0
    for node in old.root.children[:at]:
        if node.kind not in {"Import", "ImportFrom", "Expr", "Try", "If", "Assign"}:
            at = node.index
            break
    first = old.root.children[0] if old.root.children else None
    if (
        at == 0
        and first is not None
        and isinstance(getattr(first.tree, "value", None), ast.Constant)
    ):
        at = 1  # the module's docstring stays first
    return Place(old.root, at, 0.9, ("it can be anywhere among the module's definitions",))


def place_at_line(
    old: StatementTree, line: int, *, after: bool = False
) -> tuple[StatementNode, int, int] | NoPlace:
    """Return (block, index in the block, line) for a line that the user gave, or a refusal.

    The place is before `line`, at the depth of that line or, with `after`, after the statement on that line.
    """
    lines = old.parsed.lines
    statements_on_line = [
        n for n in old.nodes if not n.is_block and n.leads and n.start <= line <= n.end
    ]
    if after:
        inside = [n for n in statements_on_line if not n.children or n.start == line]
        if not inside:
            return NoPlace("no statement ends on line {} to go after", (line,))
        node = inside[-1]
        assert node.parent is not None
        return node.parent, node.index + 1, node.end + 1
    starts = next((node for node in statements_on_line if node.start == line), None)
    if starts is not None:
        assert starts.parent is not None
        return starts.parent, starts.index, line
    interrupted = next((node for node in statements_on_line if not node.children), None)
    if interrupted is not None:
        return NoPlace(
            "line {} is inside the statement that starts on line {}", (line, interrupted.start)
        )
    line_text = lines[line - 1] if line <= len(lines) else lines[-1] if lines else ""
    depth = len(indent_of(line_text)) if line_text.strip() else None
    candidates: list[tuple[StatementNode, int]] = []
    last = max((n.start for n in old.nodes if not n.is_block and n.start < line), default=0)
    for block in (node for node in old.nodes if node.is_block and node.children):
        before = [child for child in block.children if child.end < line]
        index = len(before)
        if index < len(block.children) and block.children[index].start < line:
            continue
        if block.parent is not None and not (index and block.end >= last):
            continue  # the line is not directly below a statement of this block
        candidates.append((block, index))
    following = next((n for n in old.nodes if not n.is_block and n.start >= line and n.leads), None)
    for block, index in reversed(candidates):
        block_depth = len(indent_of(lines[block.children[0].start - 1]))
        if depth is None and following is not None and following.parent is not block:
            continue
        if depth is None or block_depth == depth:
            return block, index, line
    return (*candidates[0], line) if candidates else (old.root, 0, line)
