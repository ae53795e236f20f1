"""Which files of one version are files of a later version under another name.

Files are paired by path, then by text. Imports in a newer text are rewritten to the names that modules had.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from rearview.source.text import split, try_parse


def imports_as_then(text: str, path: str, renamed: Mapping[str, str]) -> str:
    r"""Return a text that imports modules by the names they had; its lines stay where they are.

    `renamed` is path now -> path then. The name that `import module` binds is renamed wherever it is read.
    If that is not certain, the text is returned unchanged, so it differs from the recorded text.

    >>> imports_as_then("from tools import f\n", "main.py", {"tools.py": "util.py"})
    'from util import f\n'
    >>> imports_as_then("import tools\ntools.f()\n", "main.py", {"tools.py": "util.py"})
    'import util\nutil.f()\n'
    """
    modules = {_parts(now): _parts(then) for now, then in renamed.items() if now != path}
    parsed = try_parse(text) if modules else ""
    if isinstance(parsed, str) or parsed.repaired:
        return text
    here = (_package_path(path), _package_path(renamed.get(path, path)))
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for node in ast.walk(parsed.tree):
        if isinstance(node, ast.ImportFrom):
            done = _from(node, modules, here)
        elif isinstance(node, ast.Import):
            done = _import(node, modules, here)
        else:
            continue
        if done is None:
            return text
        edits += done[0]
        bound |= done[1]
    if bound:
        reads = _reads(parsed.tree, bound)
        if reads is None:
            return text
        edits += reads
    return _edited(text, edits)


_Edit = tuple[int, int, str, str]
"""(Line, column, present word, its replacement)."""
_Modules = Mapping[tuple[str, ...], tuple[str, ...]]
_Here = tuple[tuple[str, ...], tuple[str, ...]]
_Done = tuple[list[_Edit], dict[str, str]]
"""Edits of an import, and name that it binds now -> name that it bound then."""


def _import(node: ast.Import, modules: _Modules, here: _Here) -> _Done | None:
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        then = _then(alias.name, 0, modules, here)
        if then is None:
            continue
        edits.append((alias.lineno, alias.col_offset, alias.name, then))
        if alias.asname is None and "." in alias.name + then:
            return None
        if alias.asname is None:
            bound[alias.name] = then
    return edits, bound


def _from(node: ast.ImportFrom, modules: _Modules, here: _Here) -> _Done | None:
    """Return the changes of `from … import …`; either part may name a module."""
    name = node.module or ""
    usual = (_then(name, node.level, modules, here) if name else None) or name
    bases: set[str] = set()
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        then = _then(f"{name}.{alias.name}".lstrip("."), node.level, modules, here)
        base, _, last = then.rpartition(".") if then is not None else (usual, "", alias.name)
        bases.add(base)
        if last != alias.name:
            edits.append((alias.lineno, alias.col_offset, alias.name, last))
            if alias.asname is None:
                bound[alias.name] = last
    base = bases.pop()
    if bases or bool(base) != bool(name):
        return None  # in the older version, these names came from two modules
    if base != name:
        edits.append((node.lineno, node.col_offset + len("from ") + node.level, name, base))
    return edits, bound


def _then(name: str, level: int, modules: _Modules, here: _Here) -> str | None:
    """Return the dotted name that a module had in the older version; None if it was the same."""
    parts = tuple(name.split("."))
    for now, then in modules.items():
        root = now[: len(now) - len(parts)]
        if now[len(root) :] != parts:
            continue
        mine, was = here
        if level:
            if mine[: len(mine) - level + 1] != root:
                continue
            before = was[: len(was) - level + 1]
        else:
            before = was if root == mine and then[: len(root)] != root else root
        if then[: len(before)] != before:
            continue
        old = ".".join(then[len(before) :])
        return old if old and old != name else None
    return None


def _reads(tree: ast.Module, bound: Mapping[str, str]) -> list[_Edit] | None:
    """Return edits where names of modules are read; None if a name, old or new, has another meaning."""
    other = {*bound, *bound.values()}
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in other:
            if node.id not in bound or not isinstance(node.ctx, ast.Load):
                return None
            edits.append((node.lineno, node.col_offset, node.id, bound[node.id]))
        elif other & set(_named(node, bound)):
            return None
    return edits


def _named(node: ast.AST, bound: Mapping[str, str]) -> list[str]:
    """Return the names that a node binds or declares without a `Name` node."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.alias):
        return [node.asname or ("" if node.name in bound else node.name)]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name or ""]
    return []


def _edited(text: str, edits: list[_Edit]) -> str:
    """Return the text with words replaced; unchanged if a word is not at its position in the tree."""
    lines = split(text)
    for line, column, now, then in sorted(set(edits), reverse=True):
        raw = lines[line - 1].encode()
        if raw[column : column + len(now.encode())] != now.encode():
            return text
        lines[line - 1] = (
            raw[:column] + then.encode() + raw[column + len(now.encode()) :]
        ).decode()
    return "".join(lines)


def _parts(path: str) -> tuple[str, ...]:
    """Return the dotted name of a file's module, in parts, from the project's folder."""
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == "__init__" else parts


def _package_path(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[:-1])


ALIKE = 0.5  # files that share less than half of their text are two files
CLOSE = 0.05  # a candidate whose score is this close to the best one counts as equally good
SAME_NAME = 0.1  # added if the last part of two paths is the same, and
SAME_FOLDER = 0.06  # for each equal part before it
MOST = 200  # if either version has more files, only equal files are paired

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names that the files of an older version have in a newer one."""

    now: Mapping[str, str] = field(default_factory=dict)
    """Path then -> path now, of the files that are in both."""
    doubtful: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Path then -> the paths now that may be that file."""

    @property
    def changed(self) -> dict[str, str]:
        """Path then -> path now, where these differ."""
        return {then: now for then, now in self.now.items() if then != now}

    def after(self, older: FileNames) -> FileNames:
        """Return the names over both steps: `older` leads to the version at which these names begin.

        >>> FileNames({"b.py": "c.py"}).after(FileNames({"a.py": "b.py", "x.py": "y.py"})).now
        {'a.py': 'c.py'}
        """
        now = {a: self.now[b] for a, b in older.now.items() if b in self.now}
        doubt = {a: self.doubtful[b] for a, b in older.now.items() if b in self.doubtful}
        for a, several in older.doubtful.items():
            kept = tuple(self.now[b] for b in several if b in self.now)
            if kept:
                doubt[a] = kept
        return FileNames(now, doubt)

    def as_then(self, new: Files, old: Files) -> dict[str, str]:
        """Return the files of the newer version under the names of the older one.

        Imports of renamed files are written as they were then; every statement stays on its line.
        """
        if not self.changed:
            return dict(new)
        then = {now: path for path, now in self.now.items()}
        renamed = {now: path for path, now in self.changed.items()}
        files_then: dict[str, str] = {}
        for path, text in new.items():
            if path in then:
                files_then[then[path]] = imports_as_then(text, path, renamed)
            elif path not in old:  # otherwise another file had this path in the older version
                files_then[path] = text
        return files_then

    def as_now(self, old: Files) -> dict[str, str]:
        """Return the path now of every file of the older version; no two are the same."""
        taken = set(self.now.values())
        return {
            path: self.now.get(path, path if path not in taken else f"then/{path}") for path in old
        }


def renames(old: Files, new: Files) -> FileNames:
    r"""Return which files are in both versions: files with the same path, then files with similar text.

    Each file is paired once. If two files fit equally well, neither is paired.

    >>> text = "import data\nfor x in data.load():\n    step(x)\n"
    >>> renames({"train.py": text}, {"main.py": text + "print(x)\n"}).now
    {'train.py': 'main.py'}
    >>> renames({"train.py": text}, {"a.py": text, "b.py": text}).doubtful
    {'train.py': ('a.py', 'b.py')}
    """
    now = {path: path for path in old if path in new}
    gone = [path for path in old if path not in new]
    fresh = [path for path in new if path not in old]
    if not gone or not fresh:
        return FileNames(now)
    fits = _fits({path: old[path] for path in gone}, {path: new[path] for path in fresh})
    paired, doubtful = _paired(fits)
    _by_folder(paired, doubtful)
    return FileNames({**now, **paired}, doubtful)


_Fits = dict[tuple[str, str], float]


def _fits(gone: Files, fresh: Files) -> _Fits:
    """Return how well two files fit, for each pair that fits."""
    fits: _Fits = {}
    few = max(len(gone), len(fresh)) <= MOST
    there = {path: _lines(text) for path, text in fresh.items()} if few else {}
    for then, text in gone.items():
        mine = _lines(text) if few else Counter()
        for now, other in fresh.items():
            if text != other and not (few and _alike(mine, there[now])):
                continue
            # a probe only adds: what counts is how much of the old text is still there
            value = 1.0 if text == other else _kept(mine, there[now])
            same = _ending(then, now)
            fits[then, now] = value + (same > 0) * (SAME_NAME + SAME_FOLDER * (same - 1))
    return fits


def _paired(fits: _Fits) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the certain pairs, and the candidates of each file without a certain pair."""
    paired: dict[str, str] = {}
    doubtful: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for (then, now), value in sorted(fits.items(), key=lambda item: (-item[1], item[0])):
        if then in paired or now in taken or then in doubtful:
            continue
        close = [
            pair
            for pair, other in fits.items()
            if pair[0] not in paired and pair[1] not in taken and other > value - CLOSE
        ]
        rivals = [pair for pair in close if (pair[0] == then) != (pair[1] == now)]
        if not rivals:
            paired[then] = now
            taken.add(now)
            continue
        for each in {then, *(a for a, _ in rivals)}:
            doubtful[each] = tuple(sorted(b for a, b in close if a == each))
    return paired, doubtful


def _by_folder(paired: dict[str, str], doubtful: dict[str, tuple[str, ...]]) -> None:
    """Pair doubtful files whose folder was moved as a whole: they moved with it."""
    ways = {(_folder_of(then), _folder_of(now)) for then, now in paired.items()}
    for then, several in list(doubtful.items()):
        free = [
            now
            for now in several
            if (_folder_of(then), _folder_of(now)) in ways
            and _ending(then, now)
            and now not in paired.values()
        ]
        if len(free) == 1:
            paired[then] = free[0]
            del doubtful[then]


def _ending(first: str, second: str) -> int:
    """Return how many parts, counted from the end, two paths have in common."""
    pairs = zip(reversed(first.split("/")), reversed(second.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _lines(text: str) -> Counter[str]:
    return Counter(line for each in split(text) if (line := each.strip()))


def _alike(first: Counter[str], second: Counter[str]) -> bool:
    """Return True if two texts have half of their characters, or more, in common lines."""
    whole = _size(first.items()) + _size(second.items())
    return 2 * _size((first & second).items()) >= ALIKE * whole


def _kept(old: Counter[str], new: Counter[str]) -> float:
    """Return the fraction of the old text, by characters, whose lines are in the new text."""
    whole = _size(old.items())
    return _size((old & new).items()) / whole if whole else 1.0


def _size(lines: Iterable[tuple[str, int]]) -> int:
    return sum(len(line) * count for line, count in lines)
