"""Find the log calls of a program and the names that they log, for every logger that Rearview knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rearview.errors import SourceError
from rearview.source.loops import FUNCTIONS, LOOPS, MODULE, loop_name, unique_name
from rearview.source.text import parse

NAME_METHODS = {
    "add_scalar", "add_scalars", "add_histogram", "add_histogram_raw", "add_image", "add_images",
    "add_text", "add_figure", "add_video", "add_audio", "add_pr_curve", "add_mesh",
    "log_metric", "log_param", "log_parameter", "log_text", "log_image", "log_figure",
    "log_value", "log_scalar", "log_histogram",
}  # fmt: skip
"""Methods of TensorBoard, MLflow, Comet and similar trackers whose first argument is the name of one value."""
DICT_METHODS = {"log_metrics", "log_params", "log_parameters", "log_dict", "log_values"}
"""Methods of MLflow, Comet and similar trackers whose first argument is a dict with the names of many values."""
SUMMARY_FUNCTIONS = {"scalar", "histogram", "image", "text", "audio"}
"""Functions of `tf.summary`."""
LINE_METHODS = {"debug", "info", "warning", "warn", "error", "critical", "exception"}
"""Methods of a logger that write a line of text."""
_LOGGER_NAMES = {"logging", "logger", "log", "_logger", "LOGGER", "_LOGGER", "LOG", "warnings"}
TRACKERS = {"rearview", "flor", "wandb", "mlflow", "trackio", "swanlab", "neptune", "comet_ml"}
"""Top-level packages of trackers."""
OPTIONS = {"step", "commit", "epoch", "prog_bar", "on_step", "on_epoch", "logger", "sync_dist",
           "batch_size", "reduce_fx", "context", "global_step", "walltime"}  # fmt: skip
"""Keyword arguments of log calls that are not logged values."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """One log call in a syntax tree."""

    names: tuple[str, ...]
    """Names of the values that the call logs: names of columns."""
    line: bool
    """Whether the call prints or logs a line of text, and so fills no column."""
    node: ast.Call


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A line of the source with a call that logs a name."""

    path: str
    line: int
    loops: tuple[str, ...]
    """Names of the loops around the call in its function, outermost first."""
    function: str = MODULE


class Aliases:
    """The names under which a file imports trackers and their `log` functions."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: set[str] = set()
        """Names under which the file imports trackers."""
        self.logs: set[str] = set()
        """Names under which the file imports the function `log` of a tracker."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in TRACKERS:
                        self.modules.add(alias.asname or alias.name.split(".")[0])
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TRACKERS:
                self.logs |= {a.asname or "log" for a in node.names if a.name == "log"}


def log_call(node: ast.AST, aliases: Aliases | None = None) -> LogCall | None:
    """Return `node` as a `LogCall`, or None if it is not a log call.

    Trackers that the file imports under other names are recognized only with `aliases`.

    >>> call = ast.parse('writer.add_scalar("loss", loss, step)').body[0].value
    >>> log_call(call).names
    ('loss',)
    >>> log_call(ast.parse("math.log(x)").body[0].value) is None
    True
    """
    if not isinstance(node, ast.Call):
        return None
    func = node.func
    if isinstance(func, ast.Name):
        called, owner = func.id, ""
    elif isinstance(func, ast.Attribute):
        called = func.attr
        owner = func.value.id if isinstance(func.value, ast.Name) else _last_word(func.value)
    else:
        return None
    first = node.args[0] if node.args else None
    if called in {"print", "pprint"} and not (owner and owner != "pprint"):
        return LogCall((), line=True, node=node)
    if called in LINE_METHODS and (
        owner in _LOGGER_NAMES or owner.lower().endswith(("log", "logger"))
    ):
        return LogCall((), line=True, node=node)
    if called in NAME_METHODS:
        name_node = first if first is not None else _keyword(node, "tag", "key", "name")
        if called == "add_scalars" and len(node.args) > 1:
            inner = _dict_names(node.args[1])
            return LogCall(
                tuple(f"{a}/{b}" for a in _names_in(name_node) for b in inner), False, node
            )
        return LogCall(_names_in(name_node), line=False, node=node)
    if called in DICT_METHODS:
        name_node = (
            first if first is not None else _keyword(node, "metrics", "params", "dictionary")
        )
        return LogCall(_dict_names(name_node), line=False, node=node)
    if called in SUMMARY_FUNCTIONS and owner == "summary":
        return LogCall(_names_in(first), line=False, node=node)
    if called == "track" and (name_node := _keyword(node, "name")) is not None:
        return LogCall(_names_in(name_node), line=False, node=node)
    if called == "report_scalar" and len(node.args) >= 2:
        pairs = [f"{a}/{b}" for a in _names_in(first) for b in _names_in(node.args[1])]
        return LogCall(tuple(pairs), line=False, node=node)
    tracker = aliases is not None and (
        (not owner and called in aliases.logs) or owner in aliases.modules
    )
    if called == "log" or (tracker and not owner):
        return _call_of_log(node, first, of_tracker=tracker or owner in TRACKERS)
    return None


def _call_of_log(node: ast.Call, first: ast.expr | None, *, of_tracker: bool) -> LogCall | None:
    """Return the call `node` of a function named `log` as a `LogCall`, or None if it seems to log no names.

    With `of_tracker`, the function is known to log; otherwise its `first` argument must contain names as texts.
    """
    names = (*_names_in(first), *_dict_names(first))
    if not names and not of_tracker:
        return None  # such as `math.log(x)`, `torch.log(x)`, `logger.log(level, text)`
    if of_tracker:
        keywords = (k.arg for k in node.keywords if k.arg and k.arg not in OPTIONS)
        names = (*names, *(k for k in keywords if k not in {"name", "value"}))
        names = (*names, *_names_in(_keyword(node, "name")))
    return LogCall(names, line=False, node=node)


def _keyword(node: ast.Call, *names: str) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg in names), None)


def _last_word(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _last_word(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _names_in(node: ast.expr | None) -> tuple[str, ...]:
    """Return the texts that an expression may evaluate to; `*` replaces parts known only at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "*" for p in node.values]
        return ("".join(map(str, parts)),)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _names_in(node.left), _names_in(node.right)
        if left or right:
            return ((left or ("*",))[0] + (right or ("*",))[0],)
    if isinstance(node, ast.IfExp):
        return (*_names_in(node.body), *_names_in(node.orelse))
    return ()


def _dict_names(node: ast.expr | None) -> tuple[str, ...]:
    if isinstance(node, ast.Dict):
        return tuple(
            name
            for key, value in zip(node.keys, node.values, strict=True)
            for name in (_dict_names(value) if key is None else _names_in(key))
        )
    if isinstance(node, ast.DictComp):
        return _names_in(node.key)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        return tuple(k.arg for k in node.keywords if k.arg)
    return ()


def calls_in(node: ast.AST, aliases: Aliases | None = None) -> list[LogCall]:
    """Return the log calls anywhere inside `node`, in the order of the text."""
    calls = [call for sub in ast.walk(node) if (call := log_call(sub, aliases)) is not None]
    return sorted(calls, key=lambda call: (call.node.lineno, call.node.col_offset))


def names_logged(source: Mapping[str, str]) -> dict[str, list[LogPlace]]:
    r"""Return {name: places that log the name}; `source` maps file paths to text.

    In a name, `*` replaces a part that is known only at run time. A file that does not parse is skipped.

    >>> names_logged({"t.py": "for epoch in range(3):\n    rearview.log(f'norm/{k}', 1)"})
    {'norm/*': [LogPlace(path='t.py', line=2, loops=('epoch',), function='<module>')]}
    """
    places: dict[str, list[LogPlace]] = {}
    for path, text in sorted(source.items()):
        if not path.endswith(".py"):
            continue
        try:
            tree = parse(text, path)
        except SourceError:
            continue  # the file is half written, or for another version of Python
        aliases = Aliases(tree)
        for call, function, loops in _calls_with_loops(tree, MODULE, "", (), aliases):
            for name in call.names:
                places.setdefault(name, []).append(
                    LogPlace(path, call.node.lineno, loops, function)
                )
    return places


def _calls_with_loops(
    node: ast.AST, function: str, prefix: str, loops: tuple[str, ...], aliases: Aliases
) -> Iterator[tuple[LogCall, str, tuple[str, ...]]]:
    """Yield (log call, function around the call, names of the loops around the call) for log calls inside `node`.

    `function` and `loops` are around `node`. The qualified name of a function or class that is defined directly
    inside `node` begins with `prefix`.
    """
    for child in ast.iter_child_nodes(node):
        call = log_call(child, aliases)
        if call is not None:
            yield call, function, loops
        if isinstance(child, FUNCTIONS):
            inner = prefix + child.name
            yield from _calls_with_loops(child, inner, f"{inner}.<locals>.", (), aliases)
        elif isinstance(child, ast.ClassDef):
            yield from _calls_with_loops(child, function, f"{prefix}{child.name}.", loops, aliases)
        elif isinstance(child, LOOPS):
            chain = (*loops, unique_name(loop_name(child, function), loops))
            for block, inside in ((child.body, chain), (child.orelse, loops)):
                yield from _calls_with_loops(
                    ast.Module(block, []), function, prefix, inside, aliases
                )
        else:
            yield from _calls_with_loops(child, function, prefix, loops, aliases)
