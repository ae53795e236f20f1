"""Find the probes that an edit adds to a recorded program, or the reasons to refuse the edit.

A backfill calls `find`; the other modules of this package serve it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rearview.errors import ProbeError, SourceError
from rearview.source.log_calls import Aliases, calls_in
from rearview.source.loops import (
    FUNCTIONS,
    LOOPS,
    MODULE,
    FileCalls,
    Loop,
    LoopId,
    LoopPaths,
    called_name,
    calls_of_file,
    find_loop_paths,
    function_and_loops_around,
    functions_that_loop,
    name_in_calls,
    recorded_loop_ids,
    with_loop_names,
)
from rearview.source.moved_files import FileNames
from rearview.source.mutations import Levels, ProgramFacts, program_facts
from rearview.source.probes.align import Added, StatementComparison, compare
from rearview.source.probes.loop_carried import START, Need, needs
from rearview.source.probes.naming_edits import NamedValue, Rebindable, rebindable
from rearview.source.probes.probe import Naming, Position, Probe, ProbeKind, Probes, fits
from rearview.source.probes.refused_edits import (
    class_refusal,
    missing_file_refusal,
    missing_statement_refusal,
    named_value_refusal,
    reflection_refusal,
    shadow_refusals,
)
from rearview.source.probes.side_effects import Judge, ProbeRefusal
from rearview.source.scopes import Scopes, bound_by
from rearview.source.text import parse

__all__ = ["START", "Position", "Probe", "ProbeKind", "Probes", "check", "find", "fits"]


def find(
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    used: Collection[str] | None = None,
    names: FileNames | None = None,
) -> Probes:
    """Return the probes that `new` adds to the recorded source `old`; raise if it changes the computation.

    `used` names the files that the run executed; edits of other files do not matter. `names` gives the new
    names of renamed files; the result has their old names.
    """
    probes, refusals = check(old, new, used=used, names=names)
    if refusals:
        first = refusals[0]
        now = names.changed if names is not None else {}
        path = now.get(first.path, first.path)
        was = f" ({first.path} in the run)" if first.path in now else ""
        other_places = dict.fromkeys(f"{now.get(r.path, r.path)}:{r.line}" for r in refusals[1:])
        listed = ", ".join([place for place in other_places if place != f"{path}:{first.line}"][:3])
        also = (
            f" Also refused: {listed}{' and more' if len(refusals) > 4 else ''}." if listed else ""
        )
        raise ProbeError(
            f"{path}:{first.line}{was} is not a probe: {first.what}: {first.why}. "
            f"{first.remedy}{also}",
            path=path,
            line=first.line,
        )
    return probes


def check(
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    used: Collection[str] | None = None,
    names: FileNames | None = None,
) -> tuple[Probes, tuple[ProbeRefusal, ...]]:
    """Return the probes of an edit and every reason to refuse it; nothing is raised."""
    names = names or FileNames()
    new = names.with_old_names(new, old)
    kept = [path for path in old if path.endswith(".py") and (used is None or path in used)]
    edited = [path for path in kept if path in new and new[path] != old[path]]
    refusals = [
        missing_file_refusal(path, names.doubtful.get(path, ())) for path in kept if path not in new
    ]
    trees: dict[str, ast.Module] = {}
    for path in kept:
        try:
            trees[path] = parse(old[path], path)
        except SourceError:
            if path in edited:
                raise
    context = _Context(trees, old)
    collector = _ProbeCollector(context)
    for path in edited:
        collector.file(path, compare(trees[path], parse(new[path], path), context.rebindable))
    collector.modules_of(old, new)
    refusals += [*collector.refusals, *shadow_refusals(trees, set(new) - set(old))]
    # changed statements first: other refusals may follow from them
    all_refusals = dict.fromkeys([*sorted(collector.changed), *sorted(refusals)])
    source = {**old, **{path: new[path] for path in (*edited, *collector.modules)}}
    probes = Probes(
        tuple(collector.probes),
        source,
        collector.variables,
        collector.loops,
        tuple(collector.modules),
        tuple(collector.namings),
        context.known_loops,
    )
    return probes, tuple(all_refusals)


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """The names and calls of one recorded file, without its syntax tree."""

    program: ProgramFacts
    calls: FileCalls
    rebindable: Rebindable
    attributes: frozenset[str]
    methods: frozenset[str]


_FILES = 4096
"""Most files whose facts are cached."""
_facts_of_files: dict[tuple[str, str], _FileFacts] = {}
"""By path and text: most files are the same in all versions, and one question looks at each often."""


def _facts_of(path: str, text: str, tree: ast.Module) -> _FileFacts:
    file_facts = _facts_of_files.get((path, text))
    if file_facts is None:
        if len(_facts_of_files) >= _FILES:
            _facts_of_files.clear()
        nodes = list(ast.walk(tree))
        file_facts = _facts_of_files[path, text] = _FileFacts(
            program_facts([tree]),
            calls_of_file(tree, path),
            rebindable([tree]),
            frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
            frozenset(
                stmt.name
                for node in nodes
                if isinstance(node, ast.ClassDef)
                for stmt in node.body
                if isinstance(stmt, FUNCTIONS)
            ),
        )
    return file_facts


class _Context:
    """The names and calls of all recorded files together."""

    def __init__(self, trees: Mapping[str, ast.Module], texts: Mapping[str, str]) -> None:
        self.trees = trees
        files = [_facts_of(path, texts[path], tree) for path, tree in trees.items()]
        calls = tuple([file.calls for file in files])
        self.facts = ProgramFacts(
            frozenset[str]().union(*(file.program.modules for file in files)),
            frozenset[str]().union(*(file.program.generators for file in files)),
        )
        self.rebindable = Rebindable(
            frozenset[str]().union(*(file.rebindable.names for file in files)),
            frozenset[str]().union(*(file.rebindable.attributes for file in files)),
        )
        self.paths: LoopPaths = find_loop_paths(calls)
        self.loopers = functions_that_loop(calls)
        self.known_loops = frozenset(
            loop
            for file in calls
            for loop in file.loops
            if (file.path, loop.function) in self.paths
        )
        self.attributes = frozenset[str]().union(*(file.attributes for file in files))
        self.methods = frozenset[str]().union(*(file.methods for file in files))
        self._after_loops: dict[tuple[str, str], bool] = {}

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        """The functions of all files, by last name."""
        functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, FUNCTIONS):
                    functions.setdefault(node.name, []).append(node)
        return functions

    @cached_property
    def _calls(self) -> dict[str, list[_CallSite]]:
        """The calls outside loops, by the name that is called."""
        calls: dict[str, list[_CallSite]] = {}
        for path, tree in self.trees.items():
            todo: list[tuple[ast.AST, ast.AST, str, str]] = [(tree, tree, MODULE, "")]
            while todo:
                node, level, function, prefix = todo.pop()
                if name := called_name(node):
                    calls.setdefault(name, []).append(_CallSite(path, function, node, level))
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, FUNCTIONS):
                        inner = prefix + child.name
                        todo.append((child, child, inner, f"{inner}.<locals>."))
                    elif isinstance(child, ast.ClassDef):
                        todo.append((child, level, function, f"{prefix}{child.name}."))
                    elif isinstance(child, LOOPS):
                        head = child.test if isinstance(child, ast.While) else child.iter
                        parts = (head, *child.orelse)
                        todo.extend((part, level, function, prefix) for part in parts)
                    else:
                        todo.append((child, level, function, prefix))
        return calls

    def is_called_after_loops(self, path: str, function: str) -> bool:
        """Return True if a call of a function, outside all loops, may follow a loop."""
        key = (path, function)
        if function == MODULE:
            return False
        if key not in self._after_loops:
            self._after_loops[key] = False  # a function that calls itself says nothing new
            self._after_loops[key] = any(
                site.follows_loops(self.loopers)
                or self.is_called_after_loops(site.path, site.function)
                for site in self._calls.get(name_in_calls(function), ())
            )
        return self._after_loops[key]


@dataclass(frozen=True, slots=True)
class _CallSite:
    """A call in the text, outside loops."""

    path: str
    function: str
    """The function that it is in."""
    call: ast.AST
    level: ast.AST
    """That function, or the module."""

    def follows_loops(self, loopers: frozenset[str]) -> bool:
        """Return True if a loop, or a function that loops, runs before the call at its level."""
        line: int = self.call.lineno  # type: ignore[attr-defined]
        arguments = {id(node) for node in ast.walk(self.call)} - {id(self.call)}
        return any(
            id(node) in arguments
            or _last_line(node) < line
            or (isinstance(node, ast.Call) and node.lineno <= line and node is not self.call)
            for node in _loops_at(self.level, set(), loopers)
        )


def _last_line(node: Loop | ast.Call) -> int:
    """Return the last line of a call, or of the body of a loop: its `else` clause runs after it."""
    last = node if isinstance(node, ast.Call) else node.body[-1]
    return last.end_lineno or 0


class _ProbeCollector:
    """Collects the probes, file by file."""

    def __init__(self, context: _Context) -> None:
        self.context = context
        self.probes: list[Probe] = []
        self.refusals: list[ProbeRefusal] = []
        self.changed: list[ProbeRefusal] = []
        self.namings: list[Naming] = []
        self.variables: dict[tuple[str, str], frozenset[str]] = {}
        self.loops: dict[str, Mapping[int, LoopId]] = {}
        self.modules: list[str] = []
        self._imports: list[ast.AST] = []

    def file(self, path: str, comparison: StatementComparison) -> None:
        """Add the probes of one edited file."""
        self.loops[path] = recorded_loop_ids(comparison.old, comparison.matched, path)
        self.changed += [missing_statement_refusal(path, missing) for missing in comparison.missing]
        extra = [alias for _, aliases in comparison.widened for alias in aliases]
        added = [item.node for item in comparison.added]
        if not added and not extra and not comparison.named_values:
            return
        # a statement that replaces recorded code is no probe
        fresh = {id(node) for node in (*added, *comparison.changed)}
        for named_value, _ in comparison.named_values:
            fresh |= {id(named_value.target), id(named_value.read)}
        scopes = Scopes(comparison.new, fresh, {id(alias) for alias in extra})
        aliases = Aliases(comparison.new)
        self.namings += namings(path, [named_value for named_value, _ in comparison.named_values])
        self.changed += [
            refusal
            for named_value, parents in comparison.named_values
            if (
                refusal := named_value_refusal(
                    path, named_value, scopes.of[id(named_value.stmt)], comparison, parents
                )
            )
        ]
        judge = self._judge(
            path,
            scopes,
            added,
            aliases,
            [named_value for named_value, _ in comparison.named_values],
        )
        for stmt, added_names in comparison.widened:
            narrow: ast.stmt = ast.Import(names=list(added_names))
            if isinstance(stmt, ast.ImportFrom):
                narrow = ast.ImportFrom(stmt.module, list(added_names), stmt.level)
            ast.copy_location(narrow, stmt)
            scopes.of[id(narrow)] = scopes.of[id(stmt)]
            judge.look(narrow, aliases)
            self._imports.append(narrow)
        self.refusals += judge.refusals
        needs_of_added = needs(comparison.added, scopes, aliases, comparison.named_values)
        for item, need in zip(comparison.added, needs_of_added, strict=True):
            self._imports += ast.walk(item.node)
            context = self.context
            refusal = class_refusal(path, item, context.attributes, context.methods)
            if refusal is not None:
                self.refusals.append(refusal)
            names = [name for name, _ in bound_by(item.node)]
            reflection = reflection_refusal(path, item, names, comparison, scopes.of[id(item.node)])
            if reflection is not None:
                self.refusals.append(reflection)
            self.probes.append(self._probe(item, need, judge, aliases, set(map(id, added))))
        self._note_variables(path, scopes)

    def _judge(
        self,
        path: str,
        scopes: Scopes,
        added: list[ast.stmt],
        aliases: Aliases,
        named_values: Sequence[NamedValue] = (),
    ) -> Judge:
        homes = [
            (scope.owner_of(each.target.id) or scope, each.target.id)
            for each in named_values
            if (scope := scopes.of[id(each.stmt)])
        ]
        levels = Levels(scopes, added, homes)
        judge = Judge(path, scopes, levels, self.context.facts, self.context.functions)
        for (home, name), each in zip(homes, named_values, strict=True):
            if each.read is not None:
                judge.relied[id(home), name] = each.read.lineno
        for stmt in added:
            judge.look(stmt, aliases)
        return judge

    def _note_variables(self, path: str, scopes: Scopes) -> None:
        stack = [scopes.top]
        while stack:
            scope = stack.pop()
            stack.extend(scope.children)
            names = {
                name
                for name in scope.added_bound
                if name not in scope.outer and scope.recorded_use(name) is None
            }
            if names and not scope.added:
                key = (path, scope.name)
                self.variables[key] = self.variables.get(key, frozenset()) | names

    def _probe(
        self, item: Added, need: Need, judge: Judge, aliases: Aliases, added: set[int]
    ) -> Probe:
        node, path = item.node, judge.path
        function, loops = function_and_loops_around(item.parents)
        outer = self.context.paths.get((path, function), ())
        ids = self.loops[path]
        own = _path(item.parents, ids)
        chains = tuple(sorted({path + own for path in outer}))
        calls = calls_in(node, aliases)
        decorators = getattr(node, "decorator_list", ())
        place = _place(item, added, self.context.loopers)
        return Probe(
            path=path,
            first=min([node.lineno, *(d.lineno for d in decorators)]),
            last=node.end_lineno or node.lineno,
            column=node.col_offset,
            line=node.lineno,
            kind=_kind(node, logs=any(not c.line for c in calls), prints=bool(calls)),
            names=tuple(dict.fromkeys(name for call in calls for name in call.names)),
            function=function,
            loops=loops,
            place=place,
            runs_first=place is Position.BEFORE
            and not self.context.is_called_after_loops(path, function),
            chains=tuple(sorted({names + loops for names in with_loop_names(outer)})),
            depth=need.depth,
            feeds=tuple(_chain_names(item.parents, chain) for chain in need.feeds),
            paths=chains,
            fed_by=tuple(path + _path(chain, ids) for path in outer for chain in need.feeds),
            generators=tuple(ast.unparse(e) for e in judge.generators.get(node.lineno, ())),
            cautions=tuple(judge.cautions.get(node.lineno, ())),
        )

    def modules_of(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Add the new files that added code imports."""
        while self._imports:
            node = self._imports.pop()
            for imported in _imported(node, set(new) - set(old)):
                if imported in self.modules:
                    continue
                self.modules.append(imported)
                tree = parse(new[imported], imported)
                body = list(tree.body)
                scopes = Scopes(tree, {id(stmt) for stmt in body}, set())
                self.refusals += self._judge(imported, scopes, body, Aliases(tree)).refusals
                self._imports += ast.walk(tree)


def namings(path: str, named_values: Sequence[NamedValue]) -> list[Naming]:
    """Return the recorded statements that now name their values, one entry per statement."""
    by_statement: dict[int, Naming] = {}
    for each in named_values:
        before = by_statement.get(id(each.stmt))
        names = (*(before.names if before is not None else ()), each.target.id)
        into = each.into.lineno if each.into is not None else None
        by_statement[id(each.stmt)] = Naming(path, each.stmt.lineno, names, into)
    return list(by_statement.values())


def _kind(node: ast.stmt, *, logs: bool, prints: bool) -> ProbeKind:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return ProbeKind.DEFINITION
    if isinstance(node, ast.Import | ast.ImportFrom):
        return ProbeKind.IMPORT
    if logs:
        return ProbeKind.LOG
    return ProbeKind.PRINT if prints else ProbeKind.VALUE


def _path(parents: tuple[ast.AST, ...], ids: Mapping[int, LoopId]) -> tuple[str, ...]:
    """Return the ids of the recorded loops among the nodes around a statement, in its function."""
    own: tuple[str, ...] = ()
    for node in parents:
        if isinstance(node, FUNCTIONS):
            own = ()
        elif isinstance(node, LOOPS) and node.lineno in ids:
            own = (*own, str(ids[node.lineno]))
    return own


def _chain_names(parents: tuple[ast.AST, ...], chain: tuple[ast.AST, ...]) -> tuple[str, ...]:
    outside = [node for node in parents if not isinstance(node, LOOPS)]
    return function_and_loops_around((*outside, *chain))[1]


def _place(item: Added, added: set[int], loopers: frozenset[str]) -> Position:
    """Return where a statement is among the loops of its level, including loops in functions it calls."""
    level = next(
        node
        for node in reversed(item.parents)
        if isinstance(node, (*LOOPS, *FUNCTIONS, ast.Module))
    )
    lines = [node.lineno for node in _loops_at(level, added, loopers)]
    before = any(line < item.node.lineno for line in lines)
    after = any(line > item.node.lineno for line in lines)
    if before and after:
        return Position.BETWEEN
    if before or after:
        return Position.AFTER if before else Position.BEFORE
    return Position.ALONE


def _loops_at(
    level: ast.AST, added: set[int], loopers: frozenset[str]
) -> Iterator[Loop | ast.Call]:
    """Yield the recorded loops of one level, and its calls of functions that loop."""
    stack: list[ast.AST] = list(ast.iter_child_nodes(level))
    while stack:
        node = stack.pop()
        if id(node) in added or isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, LOOPS):
            yield node
            continue
        if isinstance(node, ast.Call) and called_name(node) in loopers:
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _imported(node: ast.AST, new_files: set[str]) -> list[str]:
    """Return the new files that an import may load."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        modules = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    ends = [
        f"{name.replace('.', '/')}{end}"
        for name in modules
        if name
        for end in (".py", "/__init__.py")
    ]
    return [c for c in sorted(new_files) if any(c == end or c.endswith(f"/{end}") for end in ends)]
