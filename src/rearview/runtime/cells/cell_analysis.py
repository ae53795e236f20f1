"""Analyse the source of a cell: its names, its definitions, and its calls whose result is not used.

`CellReads` finds the names whose values a cell uses before it binds them itself.
"""

from __future__ import annotations

import ast
import hashlib
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rearview.source.cells import code_hash
from rearview.source.notebooks import is_unreadable, python_of

HARMLESS_MAGICS = ("matplotlib", "config", "load_ext", "reload_ext", "autoreload", "precision")
"""Names of line magics that only change settings, so that running them again is harmless."""
SHOWING_MAGICS = frozenset({"html", "HTML", "latex", "markdown", "javascript", "js", "svg", "SVG"})
"""Names of cell magics that only display their text."""
PROFILERS = frozenset({"prun", "lprun", "memit", "mprun"})
_MEASURED = re.compile(
    r"(?P<indent>\s*)(?:(?P<target>\w+)\s*=\s*)?%%?(?P<magic>timeit|time)\b(?P<rest>.*)\Z",
    re.DOTALL,
)
"""Matches a line with `%time` or `%timeit`, which measure how long a statement takes."""
_OPTIONS = re.compile(r"(?:\s*-(?:[nrpv]\s*\d+|[tcqo]+)(?=\s|\Z))*")
"""Matches the options of `%timeit` before the statement."""
FILE_QUESTIONS = frozenset(
    {"exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "stat", "lstat", "access"}
    | {"getmtime", "getctime", "getatime", "getsize", "disk_usage"}
)
"""Names of functions that get facts about a file without opening it, which are not recorded as inputs."""
CLOCKS = frozenset(
    {"time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime", "clock"}
    | {"time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns", "now", "utcnow", "today"}
    | {"localtime", "gmtime", "ctime", "strftime", "asctime"}
)
"""Names of functions that read the clock."""
UNDOING = frozenset(
    {"catch_warnings", "printoptions", "errstate", "option_context", "rc_context", "context"}
    | {"config_context"}
)
"""Names of context managers that restore the settings of their module when they end."""
SHOWN = frozenset({"_", "__", "___", "Out", "_oh", "In", "_ih", "_i", "_ii", "_iii"})
"""Names of variables in which a kernel keeps the sources and results of earlier cells."""

EVALUATING = frozenset(
    {"query", "eval", "ols", "glm", "logit", "from_formula", "dmatrices", "dmatrix"}
)
"""Names of methods of pandas and statsmodels that evaluate a string with the variables of the notebook."""
_NUMBERED = re.compile(r"_i?\d+\Z")


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class that a cell defines at its top level."""

    name: str
    digest: str
    names: frozenset[str]
    """Names that the body uses and does not define itself."""
    attributes: frozenset[str]
    at_once: frozenset[str]
    """Names that are looked up when the definition itself runs: in decorators, defaults and base classes."""
    calls_at_once: bool
    """Whether running the definition calls something: a decorator, or a call in a default or a class body."""
    calls: frozenset[str]
    """Dotted names of the calls in the body whose result is not used, as in `CellAnalysis.calls`."""


@dataclass(frozen=True, slots=True)
class StatementEffect:
    """A call whose result is not used, so it is made for its effect, and the top-level statement that contains it."""

    call: str
    digest: str
    """Hash of the statement's syntax tree."""
    names: frozenset[str]
    """Names of the variables in the statement."""
    node: ast.stmt


@dataclass(frozen=True, slots=True)
class CellAnalysis:
    """Facts about one cell that were found in its source."""

    digest: str
    """Hash of the cell's code."""
    names: frozenset[str]
    """Names of variables in the cell, except in the bodies of functions that it defines and does not call."""
    imports: frozenset[str]
    """Full names of the modules that the cell imports, such as `os.path`."""
    statement_names: frozenset[str]
    """Names of variables in the statements that are neither imports nor definitions."""
    reads: frozenset[str]
    """Variables whose value from earlier cells the cell may use, because it does not bind them first."""
    attributes: frozenset[str]
    definitions: tuple[Definition, ...]
    preamble: str
    """The cell with only its imports and definitions; all other lines are blank. Empty if there are none."""
    only_preamble: bool
    """Whether the cell has no statements except imports and definitions."""
    calls: frozenset[str]
    """Dotted names of calls whose result is not used (`plt.style.use`), and of assigned attributes (`np.x=`)."""
    last_call: str
    """Dotted name of the call that is the last statement, whose result the cell may display; empty if there is none."""
    text: str
    """The source as Python code, without `setup_magics`; a line `%timeit f(x)` became the statement `f(x)`."""
    setup_magics: tuple[tuple[int, str], ...]
    """(line number from 0, text) of each magic of the cell that is in `HARMLESS_MAGICS`."""
    effects: tuple[StatementEffect, ...]
    """All calls and assignments as in `calls`, with their statements, including the last statement."""
    reads_clock: bool
    """Whether the name of a function that reads the clock occurs in the cell."""
    refused: str
    """Reason in the source why the results of the cell cannot be reused; empty if there is none."""
    reads_outputs: bool
    """Whether the cell reads sources or results of earlier cells through `_`, `Out`, `In` and similar variables."""

    def setup_text(self, effects: Iterable[StatementEffect]) -> str:
        r"""Return as Python the imports, definitions and `setup_magics` of the cell, and the statements of `effects`.

        >>> cell = analyse("%matplotlib inline\nimport seaborn as sns\nsns.set(); x = 1\nx")
        >>> print(cell.setup_text([each for each in cell.effects if each.call == "sns.set"]))
        get_ipython().run_line_magic('matplotlib', 'inline')
        import seaborn as sns
        sns.set()
        """
        body = ast.parse(self.text).body
        nodes = [node for node in body if _is_preamble(node)]
        nodes += {id(each.node): each.node for each in effects}.values()
        lines = _only_lines(self.text, sorted(nodes, key=lambda node: node.lineno)).split("\n")
        for number, magic in self.setup_magics:
            lines += [""] * (number + 1 - len(lines))
            lines[number] = python_of(magic)
        return "\n".join(lines).rstrip()


@lru_cache(maxsize=4096)
def analyse(source: str) -> CellAnalysis:
    r"""Return the facts that the source of a cell shows.

    >>> cell = analyse("import numpy as np\nx = np.ones(3)\nnp.seterr(all='raise')")
    >>> sorted(cell.names), cell.preamble, cell.only_preamble, cell.last_call
    (['np', 'x'], 'import numpy as np', False, 'np.seterr')
    >>> sorted(analyse("%timeit -n 10 f(x)").names), analyse("%prun f(x)").refused
    (['f', 'x'], 'it is profiled')
    """
    lines: list[str] = []
    setup_magics: list[tuple[int, str]] = []
    is_python = _parses(source)
    for number, line in enumerate(source.split("\n")):
        if is_python:
            lines.append(line)
            continue
        bare = line.strip()
        timed = _MEASURED.match(line)
        if timed is not None and (not bare.startswith("%%") or number == 0):
            lines.append(_timed_statement(timed))
            continue
        if bare.startswith("%") and not bare.startswith("%%"):
            if bare.lstrip("%").split()[:1] and bare.lstrip("%").split()[0] in HARMLESS_MAGICS:
                setup_magics.append((number, bare))
                lines.append("")
                continue
        lines.append(line)
    text = python_of("\n".join(lines)) if "\n".join(lines).strip() else ""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    magics = _magics(source)
    refused = ""
    if magics & PROFILERS:
        refused = "it is profiled"
    elif is_unreadable(text):
        refused = "it is not Python"
    refused = refused or _uncommon_magic(tree)
    top = list(tree.body)
    definitions = tuple(_definition(node) for node in top if _defined_name(node))
    plain = [node for node in top if not _is_preamble(node)]
    preamble = [node for node in top if _is_preamble(node)]
    last = plain[-1] if plain and plain[-1] is top[-1] and isinstance(plain[-1], ast.Expr) else None
    names, attributes = names_in(tree)
    loads = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    reads_outputs = any(name in SHOWN or _NUMBERED.match(name) for name in loads)
    questions = attributes & FILE_QUESTIONS or names & (FILE_QUESTIONS - {"stat", "access"})
    if not refused and questions:
        refused = f"it asks the file system ({min(questions)})"
    return CellAnalysis(
        code_hash(source),
        frozenset(_names_at_once(top, definitions)),
        frozenset(_imported(tree)),
        frozenset(name for node in plain for name in names_in(node)[0]),
        frozenset(CellReads(definitions).of(top)),
        frozenset(attributes),
        definitions,
        _only_lines(text, preamble),
        not plain,
        frozenset(_effect_calls([node for node in plain if node is not last])),
        next(_effect_calls([last]), "") if last is not None else "",
        text,
        tuple(setup_magics),
        tuple(
            StatementEffect(call, _digest(node), frozenset(names_in(node)[0]), node)
            for node in plain
            for call in sorted({*_effect_calls([node])})
        ),
        bool((attributes | names) & CLOCKS),
        refused,
        reads_outputs,
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _uncommon_magic(tree: ast.Module) -> str:
    """Return a reason if a cell has a shell line or a magic of unknown effect, so that it must run; else empty."""
    for node in ast.walk(tree):
        call = node.func if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or not isinstance(call, ast.Attribute):
            continue
        shell = call.value.func if isinstance(call.value, ast.Call) else None
        if not isinstance(shell, ast.Name) or shell.id != "get_ipython":
            continue
        argument = node.args[0] if node.args else None
        magic = str(argument.value) if isinstance(argument, ast.Constant) else ""
        if call.attr in {"system", "getoutput"}:
            return "it starts a process (a shell line)"
        if call.attr.startswith("run_") and magic not in SHOWING_MAGICS:
            return f"it uses the magic %{magic}"
    return ""


def _timed_statement(timed: re.Match[str]) -> str:
    """Return the statement that `%time` or `%timeit` runs, followed by `x = None` if the line assigns to `x`."""
    statement = timed["rest"].strip()
    if timed["magic"] == "timeit":
        # the pattern matches any string, so the result is never None
        statement = statement[_OPTIONS.match(statement).end() :].strip()  # type: ignore[union-attr]
    parts = [
        part for part in (statement, f"{timed['target']} = None" if timed["target"] else "") if part
    ]
    return timed["indent"] + "; ".join(parts)


def _names_at_once(body: Iterable[ast.stmt], definitions: Iterable[Definition]) -> set[str]:
    """Return the names that are looked up when a cell runs, also in functions that it defines and may call."""
    names: set[str] = set()
    for node in body:
        if not _defined_name(node):
            names |= names_in(node)[0]
    for definition in definitions:
        names |= definition.at_once
    uncalled = list(definitions)
    while True:
        called = [each for each in uncalled if each.name in names]
        if not called:
            return names
        uncalled = [each for each in uncalled if each not in called]
        for each in called:
            names |= each.names


def _magics(source: str) -> set[str]:
    """Return the first words of the lines that may be magics, without `%`."""
    words = (line.strip().lstrip("%").split() for line in source.split("\n") if "%" in line[:9])
    return {word[0] for word in words if word}


def _defined_name(node: ast.stmt) -> str:
    """Return the name that a definition of a function, class or named lambda binds; empty for other statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        target = node.targets[0]
        return target.id if len(node.targets) == 1 and isinstance(target, ast.Name) else ""
    return ""


def _is_preamble(node: ast.stmt) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return bool(isinstance(node, ast.Import | ast.ImportFrom) or _defined_name(node) or text)


def _definition(node: ast.stmt) -> Definition:
    """Return the facts about the definition of a function, class or named lambda."""
    attributes = names_in(node)[1]
    parts_at_once: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts_at_once = [
            *node.decorator_list,
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
        ]
        body: list[ast.stmt] = node.body
    elif isinstance(node, ast.ClassDef):
        inner = (ast.FunctionDef, ast.AsyncFunctionDef)
        parts_at_once = [*node.decorator_list, *node.bases, *(each.value for each in node.keywords)]
        parts_at_once += [each for each in node.body if not isinstance(each, inner)]
        parts_at_once += [
            part for each in node.body if isinstance(each, inner) for part in each.decorator_list
        ]
        body = node.body
    else:
        body = []
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            parameters = node.value.args
            parts_at_once = [*parameters.defaults, *filter(None, parameters.kw_defaults)]
    at_once = {name for part in parts_at_once for name in names_in(part)[0]}
    decorated = bool(getattr(node, "decorator_list", ()))
    calls_at_once = decorated or any(
        isinstance(inner, ast.Call) for part in parts_at_once for inner in ast.walk(part)
    )
    calls = frozenset(_effect_calls(body, deep=True))
    return Definition(
        _defined_name(node),
        _digest(node),
        frozenset(names_used(node, when_called=True) | names_in_texts(node)),
        frozenset(attributes),
        frozenset(at_once),
        calls_at_once,
        calls,
    )


def _only_lines(text: str, statements: Iterable[ast.stmt]) -> str:
    """Return `text` with only the given statements, on their original lines; all other lines are blank."""
    lines = text.split("\n")
    kept_lines = [""] * len(lines)
    for node in statements:
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        end = node.end_lineno or node.lineno
        if first == end and kept_lines[first - 1]:
            kept_lines[first - 1] += "; " + (ast.get_source_segment(text, node) or "")
        elif first == end:
            kept_lines[first - 1] = ast.get_source_segment(text, node) or ""
        else:
            kept_lines[first - 1 : end] = lines[first - 1 : end]
    return "\n".join(kept_lines).rstrip()


def _effect_calls(body: Iterable[ast.stmt], *, deep: bool = False) -> Iterator[str]:
    """Yield the dotted name of each call whose result is not used, and `a.b=` for an assignment to `a.b` or `a.b[0]`.

    Bodies of functions and classes in `body` are included only if `deep` is True.
    """
    for statement in body:
        todo: list[ast.AST] = [statement]
        while todo:
            node = todo.pop()
            inner = isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
            )
            if inner and not deep:
                continue
            if isinstance(node, ast.With):
                undone = {
                    name.partition(".")[0]
                    for name in (_dotted(item.context_expr) for item in node.items)
                    if name.rpartition(".")[2] in UNDOING
                }
                if undone:
                    inside = _effect_calls(node.body, deep=deep)
                    yield from (each for each in inside if each.partition(".")[0] not in undone)
                    continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                call = node.value.value if isinstance(node.value, ast.Await) else node.value
                name = _dotted(call.func) if isinstance(call, ast.Call) else ""
                if name in {"setattr", "delattr"} and isinstance(call, ast.Call) and call.args:
                    yield f"{_dotted(call.args[0])}.="
                elif name:
                    yield name
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                for target in targets:
                    if isinstance(target, ast.Attribute | ast.Subscript):
                        yield f"{_dotted(target)}="
            todo += ast.iter_child_nodes(node)


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an expression such as `a.b[0].c()`; empty if the expression does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return (names of variables, names of attributes) that occur in a syntax tree."""
    names: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Global):
            names.update(node.names)
    return names | names_in_texts(tree), attributes


def names_in_texts(node: ast.AST) -> set[str]:
    """Return the names in strings that a library evaluates with the notebook's variables: `frame.query("x > @y")`."""
    return {
        name
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in EVALUATING
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for name in re.findall(r"[^\W\d]\w*", text.value)
    }


def names_used(node: ast.AST, *, when_called: bool = False) -> set[str]:
    """Return the names of variables whose value a statement or expression uses, without its own local variables.

    Local variables are those of functions, lambdas and comprehensions. `when_called` also leaves out names that are
    looked up while a function or class is defined.

    >>> sorted(names_used(ast.parse("y = [f(i) for i in x]").body[0]))
    ['f', 'x']
    """
    if isinstance(node, ast.Expr) and _is_shell_line(node.value):
        return {
            name
            for text in ast.walk(node)
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
            for name in re.findall(r"[^\W\d]\w*", text.value)
        }
    try:
        table = symtable.symtable(ast.unparse(node), "<cell>", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return names_in(node)[0]  # `symtable` refuses `await` outside functions
    names: set[str] = set()
    if not when_called:
        for each in ast.walk(node):
            targets: list[ast.expr] = [each.target] if isinstance(each, ast.AugAssign) else []
            targets += each.targets if isinstance(each, ast.Delete) else []
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    todo = table.get_children() if when_called else [table]
    while todo:
        scope = todo.pop()
        names |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if (symbol.is_referenced() if scope is table else symbol.is_global())
        }
        todo += scope.get_children()
    return names


def _is_shell_line(node: ast.expr) -> bool:
    """Return True if `node` is the call that IPython makes of a line `!command`, which can use variables."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "system"
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    )


class CellReads:
    r"""Collects the names whose value a cell may use before it binds them, statement by statement.

    >>> cell = ast.parse("x = 1\nfor i in y:\n    x += i\nprint(x, z)")
    >>> sorted(CellReads([]).of(cell.body))
    ['print', 'y', 'z']
    """

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self._definitions: dict[str, list[Definition]] = {}
        for each in definitions:
            self._definitions.setdefault(each.name, []).append(each)
        self._reads: set[str] = set()

    def of(self, body: Iterable[ast.stmt]) -> set[str]:
        """Return the names whose values the statements of `body` may use before they bind them, on any branch."""
        bound: frozenset[str] = frozenset()
        for node in body:
            name = _defined_name(node)
            definitions = self._definitions.get(name, [])
            for each in definitions:
                self._reads |= each.at_once - bound
            bound = bound | {name} if definitions else self._walk([node], bound)
        return self._reads

    def _read(self, node: ast.AST | None, bound: frozenset[str]) -> None:
        """Add the names that `node` uses and that are not in `bound`, the names that the cell has bound before."""
        if node is None:
            return
        names = names_used(node) | names_in_texts(node)
        uncalled = set(self._definitions)
        while called := uncalled & names:  # add the names in the bodies of functions of this cell
            uncalled -= called
            for name in called:
                names = names.union(*(each.names for each in self._definitions[name]))
        self._reads |= names - bound

    def _read_target(self, target: ast.expr, bound: frozenset[str]) -> None:
        """Add the names that an assignment to `target` looks up, such as `x` for the target `x[0]`."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._read_target(part, bound)
        elif isinstance(target, ast.Starred):
            self._read_target(target.value, bound)
        elif not isinstance(target, ast.Name):
            self._read(target, bound)

    def _walk(self, body: Iterable[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        """Add the names that the statements of `body` use; return the names that are certainly bound after them."""
        for node in body:
            if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try):
                bound = self._branches(node, bound)
            elif isinstance(node, ast.With | ast.AsyncWith):
                bound = self._block(node, bound)
            else:
                bound = self._simple(node, bound)
        return bound

    def _simple(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bound | {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        self._read(node, bound)
        if isinstance(node, ast.Assign):
            return bound | {name for target in node.targets for name in _bound_by(target)}
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return bound | _bound_by(node.target)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return bound | {node.name}
        if isinstance(node, ast.Delete):
            return bound - {each.id for each in node.targets if isinstance(each, ast.Name)}
        return bound

    def _block(self, node: ast.With | ast.AsyncWith, bound: frozenset[str]) -> frozenset[str]:
        for item in node.items:
            self._read(item.context_expr, bound)
            if item.optional_vars is not None:
                self._read_target(item.optional_vars, bound)
                bound |= _bound_by(item.optional_vars)
        self._walk(node.body, bound)
        return bound  # without names of the body, which a suppressed error may end early

    def _branches(
        self, node: ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try, bound: frozenset[str]
    ) -> frozenset[str]:
        if isinstance(node, ast.If):
            self._read(node.test, bound)
            return self._walk(node.body, bound) & self._walk(node.orelse, bound)
        inside = bound
        if isinstance(node, ast.While):
            self._read(node.test, bound)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                self._read(handler.type, bound)
                self._walk(handler.body, bound | ({handler.name} if handler.name else set()))
            self._walk(node.finalbody, bound)
        else:
            self._read(node.iter, bound)
            self._read_target(node.target, bound)
            inside = bound | _bound_by(node.target)
        self._walk(node.body, inside)
        self._walk(node.orelse, bound)
        return bound


def _bound_by(target: ast.expr) -> set[str]:
    """Return the names that an assignment to `target` binds."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Starred):
        return _bound_by(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return {name for part in target.elts for name in _bound_by(part)}
    return set()
