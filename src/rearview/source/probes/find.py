"""Find the probes that an edit adds to a recorded program, or the reasons to refuse the edit.

A backfill calls `find`, which calls the other modules of this folder.
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
from rearview.source.probes.align import AddedStatement, StatementComparison, compare
from rearview.source.probes.extracted_variables import ExtractedVariable, Rebindable, rebindable
from rearview.source.probes.loop_carried import START, Need, needs
from rearview.source.probes.probe import (
    Position,
    Probe,
    ProbeKind,
    Probes,
    VariableExtraction,
    fits,
)
from rearview.source.probes.refused_edits import (
    class_refusal,
    extracted_variable_refusal,
    missing_file_refusal,
    missing_statement_refusal,
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
    """Return the probes that `new` adds to the recorded source `old`; raise if `new` changes the computation.

    `used` has the paths of the files that the run executed; edits of other files are ignored. None: all files
    count. `names` has the new names of renamed files; the result uses the old names.
    """
    probes, refusals = check(old, new, used=used, names=names)
    if refusals:
        first = refusals[0]
        new_names = names.changed if names is not None else {}
        path = new_names.get(first.path, first.path)
        old_name = f" ({first.path} in the run)" if first.path in new_names else ""
        other_places = dict.fromkeys(
            f"{new_names.get(r.path, r.path)}:{r.line}" for r in refusals[1:]
        )
        listed = ", ".join([place for place in other_places if place != f"{path}:{first.line}"][:3])
        further = (
            f" Also refused: {listed}{' and more' if len(refusals) > 4 else ''}." if listed else ""
        )
        raise ProbeError(
            f"{path}:{first.line}{old_name} is not a probe: {first.code}: {first.why}. "
            f"{first.remedy}{further}",
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
    """Return (probes of an edit, all reasons to refuse the edit); the arguments are those of `find`."""
    names = names or FileNames()
    new = names.with_old_names(new, old)
    used_paths = [path for path in old if path.endswith(".py") and (used is None or path in used)]
    edited = [path for path in used_paths if path in new and new[path] != old[path]]
    refusals = [
        missing_file_refusal(path, names.doubtful.get(path, ()))
        for path in used_paths
        if path not in new
    ]
    trees: dict[str, ast.Module] = {}
    for path in used_paths:
        try:
            trees[path] = parse(old[path], path)
        except SourceError:
            if path in edited:
                raise
    context = _Context(trees, old)
    collector = _ProbeCollector(context)
    for path in edited:
        collector.add_file(path, compare(trees[path], parse(new[path], path), context.rebindable))
    collector.add_modules(old, new)
    refusals += [*collector.refusals, *shadow_refusals(trees, set(new) - set(old))]
    # refusals of changed statements come first: they may be the cause of other refusals
    all_refusals = dict.fromkeys([*sorted(collector.changed_refusals), *sorted(refusals)])
    source = {**old, **{path: new[path] for path in (*edited, *collector.modules)}}
    probes = Probes(
        tuple(collector.probes),
        source,
        collector.variables,
        collector.loops,
        tuple(collector.modules),
        tuple(collector.extractions),
        context.known_loops,
    )
    return probes, tuple(all_refusals)


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """Names and calls that occur in one recorded file; the syntax tree is not kept."""

    program: ProgramFacts
    calls: FileCalls
    rebindable: Rebindable
    attributes: frozenset[str]
    methods: frozenset[str]


_MAX_FILES = 4096
"""Number of files from which on the cache `_facts_of_files` is emptied before the next file is added."""
_facts_of_files: dict[tuple[str, str], _FileFacts] = {}
"""(path, text) -> facts about the file. A cache: most files are equal in all versions that a backfill examines."""


def _facts_of(path: str, text: str, tree: ast.Module) -> _FileFacts:
    file_facts = _facts_of_files.get((path, text))
    if file_facts is None:
        if len(_facts_of_files) >= _MAX_FILES:
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
    """Names and calls that occur in all recorded files together, and loop paths to their functions."""

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
        """Name without class and module -> functions of all files with this name."""
        functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, FUNCTIONS):
                    functions.setdefault(node.name, []).append(node)
        return functions

    @cached_property
    def _calls(self) -> dict[str, list[_CallSite]]:
        """Called name -> calls of this name that are in no loop of their function."""
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
        """Return True if a call of `function` that is in no loop may run after a loop has run."""
        key = (path, function)
        if function == MODULE:
            return False
        if key not in self._after_loops:
            self._after_loops[key] = False  # the result for calls of the function by itself
            self._after_loops[key] = any(
                site.follows_loops(self.loopers)
                or self.is_called_after_loops(site.path, site.function)
                for site in self._calls.get(name_in_calls(function), ())
            )
        return self._after_loops[key]


@dataclass(frozen=True, slots=True)
class _CallSite:
    """A call that is in no loop of its function."""

    path: str
    function: str
    """The name of the function that contains the call."""
    call: ast.AST
    level: ast.AST
    """The syntax tree of the function that contains the call, or of the module."""

    def follows_loops(self, loopers: frozenset[str]) -> bool:
        """Return True if a loop, or a call of a function in `loopers`, may run in `level` before this call.

        `loopers` are the names of functions that run loops.
        """
        line: int = self.call.lineno  # type: ignore[attr-defined]
        arguments = {id(node) for node in ast.walk(self.call)} - {id(self.call)}
        return any(
            id(node) in arguments
            or _last_line(node) < line
            or (isinstance(node, ast.Call) and node.lineno <= line and node is not self.call)
            for node in _loops_at(self.level, set(), loopers)
        )


def _last_line(node: Loop | ast.Call) -> int:
    """Return the last line of a call, or of the body of a loop without its `else` clause."""
    last = node if isinstance(node, ast.Call) else node.body[-1]
    return last.end_lineno or 0


class _ProbeCollector:
    """Collects probes, refusals and the facts about them in an edit, file by file."""

    def __init__(self, context: _Context) -> None:
        self.context = context
        self.probes: list[Probe] = []
        self.refusals: list[ProbeRefusal] = []
        self.changed_refusals: list[ProbeRefusal] = []
        self.extractions: list[VariableExtraction] = []
        self.variables: dict[tuple[str, str], frozenset[str]] = {}
        self.loops: dict[str, Mapping[int, LoopId]] = {}
        self.modules: list[str] = []
        self._imports: list[ast.AST] = []

    def add_file(self, path: str, comparison: StatementComparison) -> None:
        """Add the probes of one edited file."""
        self.loops[path] = recorded_loop_ids(comparison.old, comparison.matched, path)
        self.changed_refusals += [
            missing_statement_refusal(path, missing_statement)
            for missing_statement in comparison.missing_statements
        ]
        added_aliases = [alias for _, aliases in comparison.widened for alias in aliases]
        added_statements = [item.node for item in comparison.added_statements]
        if not added_statements and not added_aliases and not comparison.extracted_variables:
            return
        # a statement that replaces recorded code is no probe, but the names that it binds count as added, too
        added_ids = {id(node) for node in (*added_statements, *comparison.changed)}
        for variable, _ in comparison.extracted_variables:
            added_ids |= {id(variable.target), id(variable.read)}
        scopes = Scopes(comparison.new, added_ids, {id(alias) for alias in added_aliases})
        aliases = Aliases(comparison.new)
        self.extractions += extractions(
            path, [variable for variable, _ in comparison.extracted_variables]
        )
        self.changed_refusals += [
            refusal
            for variable, parents in comparison.extracted_variables
            if (
                refusal := extracted_variable_refusal(
                    path, variable, scopes.of[id(variable.stmt)], comparison, parents
                )
            )
        ]
        judge = self._judge(
            path,
            scopes,
            added_statements,
            aliases,
            [variable for variable, _ in comparison.extracted_variables],
        )
        for stmt, added_names in comparison.widened:
            added_import: ast.stmt = ast.Import(names=list(added_names))
            if isinstance(stmt, ast.ImportFrom):
                added_import = ast.ImportFrom(stmt.module, list(added_names), stmt.level)
            ast.copy_location(added_import, stmt)
            scopes.of[id(added_import)] = scopes.of[id(stmt)]
            judge.examine(added_import, aliases)
            self._imports.append(added_import)
        self.refusals += judge.refusals
        needs_of_added = needs(
            comparison.added_statements, scopes, aliases, comparison.extracted_variables
        )
        for item, need in zip(comparison.added_statements, needs_of_added, strict=True):
            self._imports += ast.walk(item.node)
            context = self.context
            refusal = class_refusal(path, item, context.attributes, context.methods)
            if refusal is not None:
                self.refusals.append(refusal)
            names = [name for name, _ in bound_by(item.node)]
            reflection = reflection_refusal(path, item, names, comparison, scopes.of[id(item.node)])
            if reflection is not None:
                self.refusals.append(reflection)
            self.probes.append(
                self._probe(item, need, judge, aliases, set(map(id, added_statements)))
            )
        self._record_variables(path, scopes)

    def _judge(
        self,
        path: str,
        scopes: Scopes,
        added_statements: list[ast.stmt],
        aliases: Aliases,
        extracted_variables: Sequence[ExtractedVariable] = (),
    ) -> Judge:
        bindings = [
            (scope.owner_of(each.target.id) or scope, each.target.id)
            for each in extracted_variables
            if (scope := scopes.of[id(each.stmt)])
        ]
        levels = Levels(scopes, added_statements, bindings)
        judge = Judge(path, scopes, levels, self.context.facts, self.context.functions)
        for (binding_scope, name), each in zip(bindings, extracted_variables, strict=True):
            if each.read is not None:
                judge.relied[id(binding_scope), name] = each.read.lineno
        for stmt in added_statements:
            judge.examine(stmt, aliases)
        return judge

    def _record_variables(self, path: str, scopes: Scopes) -> None:
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
        self, item: AddedStatement, need: Need, judge: Judge, aliases: Aliases, added_ids: set[int]
    ) -> Probe:
        node, path = item.node, judge.path
        function, loops = function_and_loops_around(item.parents)
        caller_paths = self.context.paths.get((path, function), ())
        ids = self.loops[path]
        own_path = _path(item.parents, ids)
        chains = tuple(sorted({caller_path + own_path for caller_path in caller_paths}))
        calls = calls_in(node, aliases)
        decorators = getattr(node, "decorator_list", ())
        place = _place(item, added_ids, self.context.loopers)
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
            chains=tuple(sorted({names + loops for names in with_loop_names(caller_paths)})),
            depth=need.depth,
            feeding_loops=tuple(_chain_names(item.parents, chain) for chain in need.feeding_loops),
            paths=chains,
            feeding_paths=tuple(
                caller_path + _path(chain, ids)
                for caller_path in caller_paths
                for chain in need.feeding_loops
            ),
            generators=tuple(ast.unparse(e) for e in judge.generators.get(node.lineno, ())),
            cautions=tuple(judge.cautions.get(node.lineno, ())),
        )

    def add_modules(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Add the files of `new` that are not in `old` and that added statements import."""
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


def extractions(
    path: str, extracted_variables: Sequence[ExtractedVariable]
) -> list[VariableExtraction]:
    """Return one `VariableExtraction` for each statement that assigns extracted variables."""
    by_statement: dict[int, VariableExtraction] = {}
    for each in extracted_variables:
        earlier = by_statement.get(id(each.stmt))
        names = (*(earlier.names if earlier is not None else ()), each.target.id)
        into = each.into.lineno if each.into is not None else None
        by_statement[id(each.stmt)] = VariableExtraction(path, each.stmt.lineno, names, into)
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
    """Return the ids of the recorded loops that enclose a statement in its function, from the outermost in."""
    loop_path: tuple[str, ...] = ()
    for node in parents:
        if isinstance(node, FUNCTIONS):
            loop_path = ()
        elif isinstance(node, LOOPS) and node.lineno in ids:
            loop_path = (*loop_path, str(ids[node.lineno]))
    return loop_path


def _chain_names(parents: tuple[ast.AST, ...], chain: tuple[ast.AST, ...]) -> tuple[str, ...]:
    enclosing_nodes = [node for node in parents if not isinstance(node, LOOPS)]
    return function_and_loops_around((*enclosing_nodes, *chain))[1]


def _place(item: AddedStatement, added_ids: set[int], loopers: frozenset[str]) -> Position:
    """Return whether an added statement is before, between or after recorded loops, or without such loops.

    Loops count if they are directly in the innermost loop, function or module around the statement. A call of a
    function in `loopers`, which run loops, counts as a loop. Statements in `added_ids` do not count.
    """
    level = next(
        node
        for node in reversed(item.parents)
        if isinstance(node, (*LOOPS, *FUNCTIONS, ast.Module))
    )
    lines = [node.lineno for node in _loops_at(level, added_ids, loopers)]
    loop_before = any(line < item.node.lineno for line in lines)
    loop_after = any(line > item.node.lineno for line in lines)
    if loop_before and loop_after:
        return Position.BETWEEN
    if loop_before or loop_after:
        return Position.AFTER if loop_before else Position.BEFORE
    return Position.ALONE


def _loops_at(
    level: ast.AST, added_ids: set[int], loopers: frozenset[str]
) -> Iterator[Loop | ast.Call]:
    """Yield the loops directly in `level`, and the calls there of functions in `loopers`, which run loops.

    Statements whose `id()` is in `added_ids` are skipped.
    """
    stack: list[ast.AST] = list(ast.iter_child_nodes(level))
    while stack:
        node = stack.pop()
        if id(node) in added_ids or isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, LOOPS):
            yield node
            continue
        if isinstance(node, ast.Call) and called_name(node) in loopers:
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _imported(node: ast.AST, new_files: set[str]) -> list[str]:
    """Return the paths in `new_files` that `node` may load; empty if `node` is not an import."""
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
    return [
        path
        for path in sorted(new_files)
        if any(path == end or path.endswith(f"/{end}") for end in ends)
    ]
