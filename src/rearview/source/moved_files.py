"""Find the files of a version that have another name in a later version.

Files are paired by path, then by text. Imports in a text of the later version can be rewritten to the names that
modules have in the older version.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from rearview.source.text import split, try_parse


def with_old_imports(text: str, path: str, renamed: Mapping[str, str]) -> str:
    r"""Return `text` with each import of a renamed module changed to the module's older name.

    `renamed` maps newer paths to older paths. Lines stay where they are. The name that `import module` binds is
    renamed wherever it is read. If a name cannot be renamed safely, `text` is returned unchanged; a comparison
    with the recorded text then shows the difference.

    >>> with_old_imports("from tools import f\n", "main.py", {"tools.py": "util.py"})
    'from util import f\n'
    >>> with_old_imports("import tools\ntools.f()\n", "main.py", {"tools.py": "util.py"})
    'import util\nutil.f()\n'
    """
    modules = {
        _module_parts(new): _module_parts(old) for new, old in renamed.items() if new != path
    }
    parsed = try_parse(text) if modules else ""
    if isinstance(parsed, str) or parsed.repaired:
        return text
    packages = (_package_path(path), _package_path(renamed.get(path, path)))
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for node in ast.walk(parsed.tree):
        if isinstance(node, ast.ImportFrom):
            changes = _edit_from_import(node, modules, packages)
        elif isinstance(node, ast.Import):
            changes = _edit_import(node, modules, packages)
        else:
            continue
        if changes is None:
            return text
        edits += changes[0]
        bound |= changes[1]
    if bound:
        reads = _edit_reads(parsed.tree, bound)
        if reads is None:
            return text
        edits += reads
    return _edited(text, edits)


_Edit = tuple[int, int, str, str]
"""Replacement of a word: (line, column in bytes, word in the text, new word)."""
_Modules = Mapping[tuple[str, ...], tuple[str, ...]]
"""Name of a module in the newer version -> name in the older version, both split at the dots."""
_Packages = tuple[tuple[str, ...], tuple[str, ...]]
"""Folder of the file with the import in the newer and in the older version, both split at the slashes."""
_ImportChanges = tuple[list[_Edit], dict[str, str]]
"""(edits of an import, {name that the import binds: name that it binds after the edits})."""


def _edit_import(node: ast.Import, modules: _Modules, packages: _Packages) -> _ImportChanges | None:
    """Return the changes of `import …`, or None if they would change a dotted name that the import binds."""
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        old_name = _old_name(alias.name, 0, modules, packages)
        if old_name is None:
            continue
        edits.append((alias.lineno, alias.col_offset, alias.name, old_name))
        if alias.asname is None and "." in alias.name + old_name:
            return None
        if alias.asname is None:
            bound[alias.name] = old_name
    return edits, bound


def _edit_from_import(
    node: ast.ImportFrom, modules: _Modules, packages: _Packages
) -> _ImportChanges | None:
    """Return the changes of `from … import …`, or None if a single statement cannot import the older names.

    The name after `from` and each name after `import` may be the name of a module.
    """
    name = node.module or ""
    usual_base = (_old_name(name, node.level, modules, packages) if name else None) or name
    bases: set[str] = set()
    edits: list[_Edit] = []
    bound: dict[str, str] = {}
    for alias in node.names:
        full_name = f"{name}.{alias.name}".lstrip(".")
        old_name = _old_name(full_name, node.level, modules, packages)
        base, _, last = (
            old_name.rpartition(".") if old_name is not None else (usual_base, "", alias.name)
        )
        bases.add(base)
        if last != alias.name:
            edits.append((alias.lineno, alias.col_offset, alias.name, last))
            if alias.asname is None:
                bound[alias.name] = last
    base = bases.pop()
    if bases or bool(base) != bool(name):
        return None  # in the older version, these names come from two modules
    if base != name:
        edits.append((node.lineno, node.col_offset + len("from ") + node.level, name, base))
    return edits, bound


def _old_name(name: str, level: int, modules: _Modules, packages: _Packages) -> str | None:
    """Return the name by which the older version imports the module `name`, or None to leave it unchanged.

    `level` is the number of dots before the name in a relative import.
    """
    parts = tuple(name.split("."))
    for new, old in modules.items():
        root = new[: len(new) - len(parts)]
        if new[len(root) :] != parts:
            continue
        new_package, old_package = packages
        if level:
            if new_package[: len(new_package) - level + 1] != root:
                continue
            old_root = old_package[: len(old_package) - level + 1]
        else:
            old_root = old_package if root == new_package and old[: len(root)] != root else root
        if old[: len(old_root)] != old_root:
            continue
        old_name = ".".join(old[len(old_root) :])
        return old_name if old_name and old_name != name else None
    return None


def _edit_reads(tree: ast.Module, bound: Mapping[str, str]) -> list[_Edit] | None:
    """Return edits that rename the names in `bound` (name -> new name) wherever the text reads them.

    Return None if the text binds one of these names, or a new name, in another statement than the import.
    """
    names = {*bound, *bound.values()}
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            if node.id not in bound or not isinstance(node.ctx, ast.Load):
                return None
            edits.append((node.lineno, node.col_offset, node.id, bound[node.id]))
        elif names & set(_other_bindings(node, bound)):
            return None
    return edits


def _other_bindings(node: ast.AST, bound: Mapping[str, str]) -> list[str]:
    """Return the names that `node` binds or declares without an `ast.Name`, except imports of `bound` names."""
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
    """Return the text after the edits, or unchanged if a word is not at the position that its edit gives."""
    lines = split(text)
    for line, column, word, replacement in sorted(set(edits), reverse=True):
        raw = lines[line - 1].encode()
        if raw[column : column + len(word.encode())] != word.encode():
            return text
        lines[line - 1] = (
            raw[:column] + replacement.encode() + raw[column + len(word.encode()) :]
        ).decode()
    return "".join(lines)


def _module_parts(path: str) -> tuple[str, ...]:
    """Return the parts of the dotted name under which the project imports the file `path`."""
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == "__init__" else parts


def _package_path(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[:-1])


_LEAST_SHARED = 0.5
"""Least fraction of their text that two files must share to be paired (see `_are_similar`)."""
_EQUAL_SCORES = 0.05
"""Two candidates are taken for equally good if their scores differ by less than this."""
_SAME_NAME = 0.1
"""Amount that is added to the score of two files with equal file names."""
_SAME_FOLDER = 0.06
"""Amount that is added to the score of two files with equal names for each equal folder name directly above them."""
_MOST_COMPARED = 200
"""If one of two versions has more unpaired files than this, only files with equal texts are paired."""

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names that the files of an older version have in a newer version."""

    now: Mapping[str, str] = field(default_factory=dict)
    """Older path -> newer path, for the files that are in both versions."""
    doubtful: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Older path of a file -> newer paths of the files that it may have become."""

    @property
    def changed(self) -> dict[str, str]:
        """Older path -> newer path, for the files whose path changed."""
        return {old: new for old, new in self.now.items() if old != new}

    def after(self, older: FileNames) -> FileNames:
        """Return the renamings from A to C, if `older` has those from version A to B, and this object those from B to C.

        >>> FileNames({"b.py": "c.py"}).after(FileNames({"a.py": "b.py", "x.py": "y.py"})).now
        {'a.py': 'c.py'}
        """
        new_paths = {old: self.now[path] for old, path in older.now.items() if path in self.now}
        candidates = {
            old: self.doubtful[path] for old, path in older.now.items() if path in self.doubtful
        }
        for old, paths in older.doubtful.items():
            new_candidates = tuple(self.now[path] for path in paths if path in self.now)
            if new_candidates:
                candidates[old] = new_candidates
        return FileNames(new_paths, candidates)

    def with_old_names(self, new: Files, old: Files) -> dict[str, str]:
        """Return {older path: text} for the files of the newer version; `new` and `old` map paths to text.

        A file that the older version lacks keeps its path, or is left out if the older version has another file
        there. Imports of renamed files get the older names; every statement stays on its line.
        """
        if not self.changed:
            return dict(new)
        old_paths = {new_path: old_path for old_path, new_path in self.now.items()}
        renamed = {new_path: old_path for old_path, new_path in self.changed.items()}
        files: dict[str, str] = {}
        for path, text in new.items():
            if path in old_paths:
                files[old_paths[path]] = with_old_imports(text, path, renamed)
            elif path not in old:  # if it is, the older version has another file with this path
                files[path] = text
        return files

    def unique_new_paths(self, old: Files) -> dict[str, str]:
        """Return {older path: newer path} for every file in `old`; all newer paths are different.

        A file that the newer version does not have keeps its path. If a renamed file has taken that path, `then/`
        is put before it.
        """
        new_paths = set(self.now.values())
        return {
            path: self.now.get(path, path if path not in new_paths else f"then/{path}")
            for path in old
        }


def renames(old: Files, new: Files) -> FileNames:
    r"""Pair the files of two versions: first files with equal paths, then files with similar text.

    Each file is paired at most once. An older file for which several pairs fit equally well is `doubtful`.

    >>> text = "import data\nfor x in data.load():\n    step(x)\n"
    >>> renames({"train.py": text}, {"main.py": text + "print(x)\n"}).now
    {'train.py': 'main.py'}
    >>> renames({"train.py": text}, {"a.py": text, "b.py": text}).doubtful
    {'train.py': ('a.py', 'b.py')}
    """
    same_paths = {path: path for path in old if path in new}
    old_only = [path for path in old if path not in new]
    new_only = [path for path in new if path not in old]
    if not old_only or not new_only:
        return FileNames(same_paths)
    scores = _scores({path: old[path] for path in old_only}, {path: new[path] for path in new_only})
    paired, doubtful = _pair_by_score(scores)
    _pair_by_folder(paired, doubtful)
    return FileNames({**same_paths, **paired}, doubtful)


_Scores = dict[tuple[str, str], float]
"""(older path, newer path) -> score of the pair: 1 for equal texts, plus a bonus for equal names."""


def _scores(old: Files, new: Files) -> _Scores:
    """Return a score for each pair of an older and a newer file with similar texts."""
    scores: _Scores = {}
    compare_texts = max(len(old), len(new)) <= _MOST_COMPARED
    new_lines = {path: _lines(text) for path, text in new.items()} if compare_texts else {}
    for old_path, old_text in old.items():
        old_lines = _lines(old_text) if compare_texts else Counter()
        for new_path, new_text in new.items():
            equal = old_text == new_text
            if not equal and not (compare_texts and _are_similar(old_lines, new_lines[new_path])):
                continue
            # a probe only adds lines, so the score is the fraction of the older text that remains
            score = 1.0 if equal else _fraction_remaining(old_lines, new_lines[new_path])
            common = _common_end(old_path, new_path)
            bonus = (common > 0) * (_SAME_NAME + _SAME_FOLDER * (common - 1))
            scores[old_path, new_path] = score + bonus
    return scores


def _pair_by_score(scores: _Scores) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return ({older path: newer path} for certain pairs, {older path: newer paths} for doubtful files)."""
    paired: dict[str, str] = {}
    doubtful: dict[str, tuple[str, ...]] = {}
    paired_new: set[str] = set()
    for (old, new), score in sorted(scores.items(), key=lambda item: (-item[1], item[0])):
        if old in paired or new in paired_new or old in doubtful:
            continue
        close = [
            pair
            for pair, other_score in scores.items()
            if pair[0] not in paired
            and pair[1] not in paired_new
            and other_score > score - _EQUAL_SCORES
        ]
        rivals = [pair for pair in close if (pair[0] == old) != (pair[1] == new)]
        if not rivals:
            paired[old] = new
            paired_new.add(new)
            continue
        for each in {old, *(a for a, _ in rivals)}:
            doubtful[each] = tuple(sorted(b for a, b in close if a == each))
    return paired, doubtful


def _pair_by_folder(paired: dict[str, str], doubtful: dict[str, tuple[str, ...]]) -> None:
    """Pair a doubtful file with a candidate if only this one is in a folder to which files of its folder moved.

    `paired` and `doubtful` are changed in place.
    """
    moves = {(_folder_of(old), _folder_of(new)) for old, new in paired.items()}
    for old, candidates in list(doubtful.items()):
        in_folder = [
            new
            for new in candidates
            if (_folder_of(old), _folder_of(new)) in moves
            and _common_end(old, new)
            and new not in paired.values()
        ]
        if len(in_folder) == 1:
            paired[old] = in_folder[0]
            del doubtful[old]


def _common_end(first: str, second: str) -> int:
    """Return the number of equal parts at the ends of two paths: 2 for `a/x/f.py` and `b/x/f.py`."""
    pairs = zip(reversed(first.split("/")), reversed(second.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _lines(text: str) -> Counter[str]:
    return Counter(line for each in split(text) if (line := each.strip()))


def _are_similar(first: Counter[str], second: Counter[str]) -> bool:
    """Return True if at least half of the characters of two texts are in lines that both texts have."""
    total = _size(first.items()) + _size(second.items())
    return 2 * _size((first & second).items()) >= _LEAST_SHARED * total


def _fraction_remaining(old: Counter[str], new: Counter[str]) -> float:
    """Return the fraction of the older text's characters that are in lines of the newer text."""
    total = _size(old.items())
    return _size((old & new).items()) / total if total else 1.0


def _size(lines: Iterable[tuple[str, int]]) -> int:
    return sum(len(line) * count for line, count in lines)
