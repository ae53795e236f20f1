"""The first top-level statements of a script, which one process executes for several segments (the set-up).

The process is then forked for each segment. `SetupScript` compiles the statements one by one. A statement is *safe* if
its text alone shows that a forked process inherits all its effects. A statement that only gives seeds makes the states
of random generators independent of the run.
"""

from __future__ import annotations
import __future__ as features

import ast
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from rearview.runtime.base_session import Session
from rearview.runtime.replay.replayer import Replayer
from rearview.runtime.sandbox.file_view import PathUse
from rearview.source.cells import code_hash

_SEEDS = frozenset(
    {
        *("random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed"),
        *("torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
    }
)
"""Functions that give a seed to a random generator."""
_HARMLESS = frozenset({"torch.use_deterministic_algorithms", "torch.cuda.is_available"})
"""Functions that draw no random number; a statement that only gives seeds may also call these."""
_SEEDED = {"random": "random", "np": "numpy", "numpy": "numpy", "torch": "torch"}
"""Name that a script uses in calls of `_SEEDS` -> library to which it must be bound."""
_PLAIN = (ast.Constant, ast.Name, ast.Attribute, ast.Load)
_BEYOND_SEEDS = (
    *(ast.Import, ast.ImportFrom, ast.For, ast.While, ast.With, ast.Global, ast.Lambda),
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.comprehension, ast.FunctionDef, ast.ClassDef),
)
"""Syntax nodes in a function that show that it does more than give seeds."""


@dataclass(frozen=True, slots=True)
class SetupStatement:
    """One compiled top-level statement of the script."""

    code: CodeType
    safe: bool
    """Whether the text of the statement shows that a forked process inherits all its effects."""
    seeds: bool
    """Whether the statement only gives seeds to random generators."""
    first_line: int


@dataclass
class SetupScript:
    """The script of the program to replay, divided into its top-level statements."""

    path: str
    relative: str
    """Path of the script relative to the project."""
    source: ast.Module
    """The syntax tree of the script as the user wrote it."""
    tree: ast.Module
    """The syntax tree of the script with instrumented loops and probes."""
    flags: int
    """Compiler flags of the script's `from __future__` imports."""

    @classmethod
    def read(cls, session: Replayer, path: str) -> SetupScript:
        """Return the script at `path`, in the version that the segment of `session` runs."""
        data = Path(session.real(path, PathUse.RUN)).read_bytes()
        source = ast.parse(data)
        tree = session.compiler.instrumented(data, path)
        flags = 0
        for node in source.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for name in node.names:
                    flags |= getattr(features, name.name).compiler_flag
        relative = os.path.relpath(os.path.realpath(path), session.root)
        return cls(path, relative, source, tree, flags)

    def statements(self, session: Replayer, count: int) -> list[SetupStatement]:
        """Return the compiled instrumented statements for the first `count` statements of the source."""
        functions = {
            node.name: node for node in self.source.body if isinstance(node, ast.FunctionDef)
        }
        next_line = _line(self.source.body[count]) if count < len(self.source.body) else sys.maxsize
        by_line = {_line(node): node for node in self.source.body}
        statements = []
        for node in self.tree.body:
            if _line(node) >= next_line:
                break
            source_statement = by_line.get(_line(node), node)
            statements.append(
                SetupStatement(
                    self._code(session, [node]),
                    safe=is_safe(source_statement),
                    seeds=only_gives_seeds(source_statement, functions),
                    first_line=_line(node),
                )
            )
        return statements

    def code_after(self, session: Replayer, count: int) -> CodeType:
        """Return the compiled code of all instrumented statements after the first `count` ones."""
        return self._code(session, self.tree.body[count:])

    def _code(self, session: Replayer, body: list[ast.stmt]) -> CodeType:
        code: CodeType = session.compiler.code(ast.Module(body, []), self.path, self.flags)
        return code

    def sharing_key(self, session: Replayer, count: int) -> tuple[Any, ...]:
        """Return a key of this script: two versions with equal keys can share their first `count` statements.

        `session` replays this version of the script.
        """
        last_line = max((node.end_lineno or 0 for node in self.tree.body[:count]), default=0)
        loops = [
            history.site.id
            for history in session.histories.values()
            if history.site.path == self.relative and history.site.line <= last_line
        ]
        probes = session.segment.probes.get(self.relative, [])
        drawn = [drawn for line, _, drawn in sorted(probes) if line <= last_line]
        body = [node for node in self.source.body if (node.end_lineno or 0) <= last_line]
        code = code_hash(ast.unparse(ast.Module(body, [])))
        return (count, code, sorted(loops), drawn, session.compiler.autolog)

    def forget_loops_after(self, session: Session, count: int) -> None:
        """Remove the loops that come after the script's first `count` statements from `session.histories`."""
        last_line = max((node.end_lineno or 0 for node in self.tree.body[:count]), default=0)
        for name, history in list(session.histories.items()):
            if history.site.path == self.relative and history.site.line > last_line:
                del session.histories[name]


def _line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def is_safe(node: ast.stmt) -> bool:
    """Return True if the statement `node` only binds names to functions, constants or modules that are already loaded.

    A statement that is only a constant, such as a docstring, is safe too.
    """
    if isinstance(node, ast.Import):
        return all(alias.name in sys.modules for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = sys.modules.get(node.module or "") if not node.level else None
        return module is not None and all(hasattr(module, name.name) for name in node.names)
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        return all(isinstance(default, ast.Constant) for default in defaults)
    if isinstance(node, ast.Assign):
        plain = all(isinstance(each, ast.Name) for each in node.targets)
        return plain and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def only_gives_seeds(node: ast.stmt, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Return True if the statement `node` is a call that gives seeds to random generators and does nothing else.

    It may call a function of the script (`functions`: name -> definition) that only gives seeds.
    """
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    own_function = functions.get(function.id) if isinstance(function, ast.Name) else None
    if own_function is None:
        return _calls_only_seeds([node])
    arguments = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
    plain = all(isinstance(part, _PLAIN) for argument in arguments for part in ast.walk(argument))
    return (
        plain
        and not own_function.decorator_list
        and _calls_only_seeds([own_function.args, *own_function.body])
    )


def _calls_only_seeds(body: Sequence[ast.AST]) -> bool:
    for node in body:
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                name = ast.unparse(part.func)
                if name not in _SEEDS | _HARMLESS:
                    return False
                if name in _SEEDS and not (part.args or part.keywords):
                    return False  # without an argument, the function draws a random seed
            elif isinstance(part, _BEYOND_SEEDS):
                return False
            elif isinstance(part, (ast.Name, ast.arg)):
                # refuse if the code binds the name of a library to another object
                bound = isinstance(part, ast.arg) or not isinstance(part.ctx, ast.Load)
                name = part.arg if isinstance(part, ast.arg) else part.id
                if bound and name in _SEEDED:
                    return False
    return True


def names_mean_libraries(namespace: Mapping[str, Any]) -> bool:
    """Return True if each name of `_SEEDED` that is in `namespace` (name -> value) is bound to its library there."""
    return all(
        name not in namespace or namespace[name] is sys.modules.get(library)
        for name, library in _SEEDED.items()
    )
