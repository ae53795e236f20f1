"""Find the statements of a program that keep checkpoints from being complete, or loops from being resumed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rearview.source.loops import LOOPS, called_name


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A statement that keeps a checkpoint from being complete, or a loop from being resumed."""

    path: str
    line: int
    what: str
    """Sentence that says what the statement does, without a capital at its start and a full stop."""
    effect: str
    """Consequence for recording, replay and resume, in words."""
    loop_line: int = 0
    """Line of the only loop that the obstacle affects; 0 if it affects all loops."""
    starts: str = ""
    """Function of the program that the statement runs in another process; empty if it runs none."""


_FROM_START = "a replay or resume starts at an earlier checkpoint, or from the start"
_CHILDREN = "loops in child processes are not recorded"
_OBSTACLES: Mapping[str, tuple[str, str]] = {
    "init_process_group": ("joins a process group", "each process is recorded by itself"),
    "Manager": ("keeps state in a manager process", _FROM_START),
    "SharedMemory": ("keeps state in shared memory", _FROM_START),
    "Thread": ("runs a thread", f"while it runs, {_FROM_START}"),
    "socket": ("opens a socket", _FROM_START),
    "Popen": ("starts another program", "its state is not saved"),
}
"""Name of a called function -> (what the call does, its consequence)."""
_OBSTACLES_OF_OWNER: Mapping[tuple[str, str], tuple[str, str]] = {
    ("sqlite3", "connect"): ("keeps a database connection", _FROM_START),
    ("h5py", "File"): ("keeps an HDF5 file open", _FROM_START),
    ("lgb", "Dataset"): ("makes a LightGBM data set, which cannot be saved", _FROM_START),
    ("lightgbm", "Dataset"): ("makes a LightGBM data set, which cannot be saved", _FROM_START),
}
"""(module, name of a called function) -> (what the call does, its consequence)."""
_PROCESSES = frozenset({"mp", "xmp", "multiprocessing", "ctx", "context"})
"""Names that programs usually give to the modules and contexts whose `spawn` starts processes."""


def obstacles_in(path: str, tree: ast.Module) -> tuple[Obstacle, ...]:
    r"""Return the obstacles in the file `path`, ordered by line.

    >>> [o.what for o in obstacles_in("t.py", ast.parse("db = sqlite3.connect('x')"))]
    ['`sqlite3.connect` keeps a database connection']
    """
    obstacles: list[Obstacle] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            obstacles.extend(_obstacles_in_call(path, node))
        elif isinstance(node, ast.With | ast.AsyncWith):
            loops = [part for part in ast.walk(node) if isinstance(part, LOOPS)]
            opened = [item for item in node.items if called_name(item.context_expr) == "open"]
            if loops and opened:
                line = min(loop.lineno for loop in loops)
                text = f"the loop at line {line} runs inside `with open(…)`"
                effect = "a replay cannot skip iterations of that loop: it runs from the start"
                obstacles.append(Obstacle(path, node.lineno, text, effect, loop_line=line))
        elif isinstance(node, ast.AsyncFunctionDef) and any(
            isinstance(part, LOOPS) for part in ast.walk(node)
        ):
            text = f"`{node.name}` is a coroutine with loops"
            effect = "nothing is saved in coroutines; values are filled by running again, unproved"
            obstacles.append(Obstacle(path, node.lineno, text, effect))
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.GeneratorExp)
            # unpacking a generator into a tuple or list runs it to its end at once
            and not isinstance(node.targets[0], ast.Tuple | ast.List)
        ):
            text = f"`{_short(node.targets[0])}` keeps a generator expression"
            obstacles.append(
                Obstacle(path, node.lineno, text, f"while it is half used, {_FROM_START}")
            )
    return tuple(sorted(dict.fromkeys(obstacles), key=lambda each: each.line))


def _obstacles_in_call(path: str, node: ast.Call) -> Iterator[Obstacle]:
    name = called_name(node)
    owner = ""
    if isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value).rpartition(".")[2]
    obstacle = _OBSTACLES_OF_OWNER.get((owner, name)) or _OBSTACLES.get(name)
    if obstacle is not None:
        what, effect = obstacle
        yield Obstacle(path, node.lineno, f"`{_short(node.func)}` {what}", effect)
        return
    target = next((k.value for k in node.keywords if k.arg == "target"), None)
    if name == "Process" and target is not None:
        text = f"`{_short(node.func)}` starts a process that runs `{_short(target)}`"
        yield Obstacle(path, node.lineno, text, _CHILDREN, starts=_last_word(target))
    elif name == "spawn" and owner in _PROCESSES:
        text = f"`{_short(node.func)}` starts worker processes"
        first = node.args[0] if node.args else next((k.value for k in node.keywords), None)
        yield Obstacle(path, node.lineno, text, _CHILDREN, starts=_last_word(first))
    elif any(k.arg == "persistent_workers" and _may_be_true(k.value) for k in node.keywords):
        text = "`persistent_workers=True` keeps loader processes between epochs"
        yield Obstacle(path, node.lineno, text, _FROM_START)


def _last_word(node: ast.expr | None) -> str:
    return ast.unparse(node).rpartition(".")[2] if node is not None else ""


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) < 40 else "…" + text[-38:]


def _may_be_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and not node.value)
