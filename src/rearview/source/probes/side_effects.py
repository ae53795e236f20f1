"""Refuse added statements that would change the recorded computation, and say why."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from rearview.source import mutations
from rearview.source.log_calls import Aliases, log_call
from rearview.source.loops import FUNCTIONS
from rearview.source.mutations import Level, Levels, ProgramFacts, last_name
from rearview.source.scopes import Scope, Scopes, bound_by

Functions = Mapping[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]


@dataclass(frozen=True, slots=True, order=True)
class ProbeRefusal:
    """One reason why an edit is not a probe, with the file and line of the edited source."""

    path: str
    line: int
    code: str
    """The refused code in backquotes, shortened for the message."""
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code}: {self.why}. {self.remedy}"


class Judge(ast.NodeVisitor):
    """Examines the added statements of one file; `refusals`, `cautions` and `generators` are the results."""

    def __init__(
        self, path: str, scopes: Scopes, levels: Levels, facts: ProgramFacts, functions: Functions
    ) -> None:
        self.path = path
        self.scopes = scopes
        self.levels = levels
        self.facts = facts
        self.functions = functions
        self.refusals: list[ProbeRefusal] = []
        self.cautions: dict[int, list[str]] = {}
        self.generators: dict[int, list[ast.expr]] = {}
        self.relied: dict[tuple[int, str], int] = {}
        """(`id()` of a scope, extracted variable) -> line at which recorded code reads the variable."""
        self._scope: Scope = scopes.top
        self._loops = 0
        self._own = False
        """Whether the visitor is inside a function that the edit adds."""
        self._alone: int = 0
        """`id()` of the last visited expression that forms a whole statement: its value is not used. 0 if none."""
        self._line = 0
        self._aliases = Aliases(ast.Module([], []))

    def examine(self, stmt: ast.stmt, aliases: Aliases) -> None:
        """Examine one added statement, and add its refusals, cautions and random generators to the results."""
        self._scope = self.scopes.of[id(stmt)]
        self._loops, self._own, self._line = 0, False, stmt.lineno
        self._aliases = aliases
        self.visit(stmt)

    def _refuse(self, node: ast.AST, why: str, remedy: str) -> None:
        line = getattr(node, "lineno", self._line)
        code = " ".join(ast.unparse(node).split())
        code = f"`{code if len(code) <= 60 else code[:57] + '...'}`"
        self.refusals.append(ProbeRefusal(self.path, line, code, why, remedy))

    def _caution(self, text: str) -> None:
        self.cautions.setdefault(self._line, []).append(text)

    def visit(self, node: ast.AST) -> None:
        """Visit a node and its children, in the scope that the node opens, if it opens one."""
        if isinstance(node, ast.stmt):
            self._bindings(node)
        opens = self.scopes.opened.get(id(node))
        if opens is None:
            super().visit(node)
            return
        outer = self._scope, self._loops, self._own
        self._scope, self._loops = opens, 0
        self._own = self._own or isinstance(node, (*FUNCTIONS, ast.Lambda))
        super().visit(node)
        self._scope, self._loops, self._own = outer

    def _bindings(self, stmt: ast.stmt) -> None:
        # examine only the head of a compound statement: the statements inside are visited later
        holder: list[ast.AST] = [stmt]
        if not isinstance(stmt, (*FUNCTIONS, ast.ClassDef)) and hasattr(stmt, "body"):
            holder = [
                child for child in ast.iter_child_nodes(stmt) if not isinstance(child, ast.stmt)
            ]
        scope = self.scopes.of[id(stmt)]
        for part in holder:
            for name, node in bound_by(part):
                binding_scope = scope.owner_of(name) or scope
                if binding_scope.is_class:
                    continue  # `class_refusal` examines statements in a recorded class
                line = binding_scope.recorded_use(name) or self.relied.get(
                    (id(binding_scope), name)
                )
                if line is None or self._same_import(name, stmt, binding_scope):
                    continue
                verb = "deletes" if isinstance(stmt, ast.Delete) else "rebinds"
                self._refuse(
                    node if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) else ast.Name(name),
                    f"it {verb} `{name}`, which the recorded code uses (line {line})",
                    "Choose a name that the recorded code does not use.",
                )

    def _same_import(self, name: str, stmt: ast.stmt, binding_scope: Scope) -> bool:
        if binding_scope is not self.scopes.top or not isinstance(
            stmt, ast.Import | ast.ImportFrom
        ):
            return False
        own_names = {ast.dump(a) for a in stmt.names}
        module = getattr(stmt, "module", None)
        return any(
            type(node) is type(stmt)
            and getattr(node, "module", None) == module
            and any(
                (alias.asname or alias.name.split(".")[0]) == name and ast.dump(alias) in own_names
                for alias in node.names
            )
            for node in getattr(binding_scope.node, "body", ())
            if isinstance(node, ast.Import | ast.ImportFrom) and node is not stmt
        )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "__future__":
            self._refuse(node, "it changes how the recorded file is compiled", "Leave it out.")
        if any(alias.name == "*" for alias in node.names):
            self._refuse(
                node, "it may rebind any name of the recorded code", "Import names one by one."
            )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._own, outer_own = True, self._own
        self.generic_visit(node)
        self._own = outer_own

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        self._loops += 1
        self._store(getattr(node, "target", None))
        self.generic_visit(node)
        self._loops -= 1

    visit_For = visit_AsyncFor = visit_While = _loop

    def _jump(self, node: ast.Break | ast.Continue) -> None:
        if not self._loops:
            self._refuse(
                node,
                "it leaves a recorded loop early",
                "Leave it out; to see only some iterations, ask for them with `--at`.",
            )

    visit_Break = visit_Continue = _jump

    def visit_Return(self, node: ast.Return) -> None:
        if not self._own:
            self._refuse(
                node, "it leaves a recorded function early", "Leave it out; log and continue."
            )
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if not self._own:
            self._refuse(node, "it would end the run", "Log what is wrong instead of raising.")
        self.generic_visit(node)

    def _suspend(self, node: ast.Yield | ast.YieldFrom | ast.Await) -> None:
        if not self._own:
            self._refuse(
                node,
                "it hands control to recorded code in the middle of the probe",
                "Leave it out.",
            )
        self.generic_visit(node)

    visit_Yield = visit_YieldFrom = visit_Await = _suspend

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._store(target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._store(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._store(target)

    def visit_withitem(self, node: ast.withitem) -> None:
        self._store(node.optional_vars)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._store(node.target)
        target = node.target
        if isinstance(target, ast.Name):
            binding_scope = self._scope.owner_of(target.id)
            used = binding_scope is not None and binding_scope.recorded_use(target.id) is not None
            if not used and self.levels.of(target, self._scope) is Level.LIVE:
                self._refuse(
                    node, f"`{target.id}` may be a live tensor, changed in place", mutations.COPY
                )
        self.generic_visit(node)

    def _store(self, target: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._store(item)
        elif isinstance(target, ast.Starred):
            self._store(target.value)
        elif (
            isinstance(target, ast.Attribute | ast.Subscript)
            and self.levels.of(target.value, self._scope) >= Level.CODE
        ):
            self._refuse(
                target,
                "it stores into an object of the recorded run",
                "Keep the value in a variable that only probes use.",
            )

    def visit_Expr(self, node: ast.Expr) -> None:
        self._alone = id(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        call = log_call(node, self._aliases)
        if call is None:
            verdict = self._verdict(node)
            if verdict is not None:
                self._refuse(node, *verdict)
        self._record_generators(node)
        self.generic_visit(node)

    def _verdict(self, node: ast.Call) -> tuple[str, str] | None:
        called = last_name(node.func)
        keywords = {k.arg: k.value for k in node.keywords}
        arguments = [*node.args, *keywords.values()]
        levels = [self.levels.of(arg, self._scope) for arg in arguments]
        live = any(level in {Level.LIVE, Level.SHALLOW} for level in levels)
        owner = Level.CODE
        if isinstance(node.func, ast.Attribute):
            owner = self.levels.of(node.func.value, self._scope)
        inplace = keywords.get("inplace")
        if isinstance(inplace, ast.Constant) and inplace.value and (live or owner is Level.LIVE):
            return "`inplace=True` changes a live object", mutations.COPY
        if "out" in keywords and self.levels.of(keywords["out"], self._scope) is Level.LIVE:
            return "`out=` writes into a live object", mutations.COPY
        if owner is not Level.CODE:
            return self._method(node, called, owner)
        if called in mutations.CONTAINER_METHODS and isinstance(
            getattr(node.func, "value", None), ast.Attribute
        ):
            return mutations.CHANGING_METHODS[called]  # such as `sys.path.append(...)`
        if called in mutations.ENDING_CALLS and not (called == "kill" and not node.args):
            return "it would end or stop the run", "Log what you want to see instead."
        if called in mutations.SETTING_CALLS and (
            self._alone == id(node) or called != "set_grad_enabled"
        ):
            return (
                "it changes a setting of the whole process",
                "Use its `with` form, or leave it out.",
            )
        if called.endswith("_") and not called.endswith("__") and live and not _harmless(node):
            return mutations.IN_PLACE
        if called in mutations.FIRST_ARGUMENT_FUNCTIONS and levels and levels[0] is not Level.FRESH:
            return mutations.FIRST_ARGUMENT_FUNCTIONS[called]
        first_is_object = arguments and isinstance(
            arguments[0], ast.Name | ast.Attribute | ast.Subscript
        )
        if called == "next" and first_is_object and levels[0] is Level.LIVE:
            return (
                "it takes an item from an iterator of the run",
                "Draw from a new iterator: `next(iter(...))`.",
            )
        if called == "grad" and live and not {"retain_graph", "create_graph"} & keywords.keys():
            return (
                "it frees the graph that the recorded code still needs",
                "Pass `retain_graph=True`.",
            )
        if called == "exec":
            return "the code that it executes cannot be judged", "Write the statements out."
        return self._project_call(node, called)

    def _method(self, node: ast.Call, called: str, owner: Level) -> tuple[str, str] | None:
        assert isinstance(node.func, ast.Attribute)
        receiver = ast.unparse(node.func.value)
        if owner is Level.LIVE:
            if called in mutations.CHANGING_METHODS:
                return mutations.CHANGING_METHODS[called]
            if called.endswith("_") and not called.endswith("__"):
                return mutations.IN_PLACE
            is_module = receiver in self.facts.modules
            if called in mutations.UNUSED_RESULT_METHODS and (is_module or self._alone == id(node)):
                return mutations.UNUSED_RESULT_METHODS[called]
        return self._project_call(node, called)

    def _project_call(self, node: ast.Call, called: str) -> tuple[str, str] | None:
        if ast.unparse(node.func) in self.facts.modules:
            self._caution(
                f"calls the live `{called}`: in training mode a module may change its running "
                f"statistics (BatchNorm); the replay reports it if it does"
            )
        effect = self._effect(called, set())
        if effect in mutations.TRAINING_METHODS:
            return (
                f"`{called}` calls `.{effect}()` on its argument",
                "Call only functions that read and change nothing.",
            )
        if effect:
            self._caution(f"`{called}` calls `.{effect}()`: the model's mode may stay switched")
        return None

    def _effect(self, name: str, visited: set[str]) -> str:
        """Return a training method that the project's function `name` calls, directly or through other functions.

        Training methods are `mutations.TRAINING_METHODS`. If the function calls none, return a method that it calls
        to switch the mode of a model (`mutations.MODE_METHODS`), or ''.
        """
        if name in visited or name not in self.functions:
            return ""
        visited.add(name)
        switch = ""
        for function in self.functions[name]:
            locals_ = {n for stmt in function.body for n, _ in bound_by(stmt)}
            for node in ast.walk(function):
                if not isinstance(node, ast.Call):
                    continue
                called = last_name(node.func)
                if isinstance(node.func, ast.Attribute):
                    base = node.func.value
                    is_local = isinstance(base, ast.Name) and base.id in locals_
                    if called in mutations.TRAINING_METHODS and not is_local:
                        return called
                    if called in mutations.MODE_METHODS:
                        switch = called
                inner_effect = self._effect(called, visited)
                if inner_effect in mutations.TRAINING_METHODS:
                    return inner_effect
                switch = switch or inner_effect
        return switch

    def _record_generators(self, node: ast.Call) -> None:
        expressions: list[ast.expr] = [k.value for k in node.keywords if k.arg == "generator"]
        expressions += node.args
        if isinstance(node.func, ast.Attribute):
            expressions.append(node.func.value)
        for expr in expressions:
            if ast.unparse(expr) in self.facts.generators:
                generators = self.generators.setdefault(self._line, [])
                if ast.dump(expr) not in {ast.dump(generator) for generator in generators}:
                    generators.append(expr)


def _harmless(node: ast.Call) -> bool:
    """Return True if a call is `clip_grad_norm_` with an infinite limit, which only computes the norm."""
    if last_name(node.func) != "clip_grad_norm_":
        return False
    limit = node.args[1] if len(node.args) > 1 else None
    limit = next((k.value for k in node.keywords if k.arg == "max_norm"), limit)
    text = ast.unparse(limit) if limit is not None else ""
    return text in {"float('inf')", "math.inf", "torch.inf", "np.inf", "numpy.inf", "inf"}
