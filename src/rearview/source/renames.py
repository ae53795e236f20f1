"""Which files of one version are files of a later one under another name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from rearview.source.imports import imports_as_then
from rearview.source.text import split

ALIKE = 0.5  # files that share less than half of their text are two files
CLOSE = 0.05  # a candidate this near to the best one is as good
SAME_NAME = 0.1  # what the last part of a path counts for, and
SAME_FOLDER = 0.06  # each part before it
MOST = 200  # with more files on either side only equal ones are paired

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Names:
    """What the files of an older version are called in a newer one."""

    now: Mapping[str, str] = field(default_factory=dict)
    """Path then -> path now, of the files that are in both."""
    doubtful: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Path then -> paths now of which each may be that file."""

    @property
    def changed(self) -> dict[str, str]:
        """Path then -> path now, where these differ."""
        return {then: now for then, now in self.now.items() if then != now}

    def before(self, older: Names) -> Names:
        """Return what `older`, which leads to where this begins, calls by the names that this leads to.

        >>> Names({"b.py": "c.py"}).before(Names({"a.py": "b.py", "x.py": "y.py"})).now
        {'a.py': 'c.py'}
        """
        now = {a: self.now[b] for a, b in older.now.items() if b in self.now}
        doubt = {a: self.doubtful[b] for a, b in older.now.items() if b in self.doubtful}
        for a, several in older.doubtful.items():
            kept = tuple(self.now[b] for b in several if b in self.now)
            if kept:
                doubt[a] = kept
        return Names(now, doubt)

    def as_then(self, new: Files, old: Files) -> dict[str, str]:
        """Return the files of the newer version under the names of the older one.

        Imports of what has another name are written as they were; every statement stays on its line.
        """
        if not self.changed:
            return dict(new)
        then = {now: path for path, now in self.now.items()}
        renamed = {now: path for path, now in self.changed.items()}
        found: dict[str, str] = {}
        for path, text in new.items():
            if path in then:
                found[then[path]] = imports_as_then(text, path, renamed)
            elif path not in old:  # else the name was another file's then
                found[path] = text
        return found

    def as_now(self, old: Files) -> dict[str, str]:
        """Return the path now of every file of the older version; no two are the same."""
        taken = set(self.now.values())
        return {
            path: self.now.get(path, path if path not in taken else f"then/{path}") for path in old
        }


def renames(old: Files, new: Files) -> Names:
    r"""Return which files are in both: those of the same path, then those of much the same text.

    Each file is paired once. Where two fit equally well, neither is taken.

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
        return Names(now)
    fits = _fits({path: old[path] for path in gone}, {path: new[path] for path in fresh})
    found, doubtful = _paired(fits)
    _by_folder(found, doubtful)
    return Names({**now, **found}, doubtful)


_Fits = dict[tuple[str, str], float]


def _fits(gone: Files, fresh: Files) -> _Fits:
    """Return how well each two files fit, where they do."""
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
    """Return the pairs, best first, and what is as good for one as for another."""
    found: dict[str, str] = {}
    doubtful: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for (then, now), value in sorted(fits.items(), key=lambda item: (-item[1], item[0])):
        if then in found or now in taken or then in doubtful:
            continue
        close = [
            pair
            for pair, other in fits.items()
            if pair[0] not in found and pair[1] not in taken and other > value - CLOSE
        ]
        rivals = [pair for pair in close if (pair[0] == then) != (pair[1] == now)]
        if not rivals:
            found[then] = now
            taken.add(now)
            continue
        for each in {then, *(a for a, _ in rivals)}:
            doubtful[each] = tuple(sorted(b for a, b in close if a == each))
    return found, doubtful


def _by_folder(found: dict[str, str], doubtful: dict[str, tuple[str, ...]]) -> None:
    """Settle what a folder that was moved as a whole settles: its files went the same way."""
    ways = {(_folder(then), _folder(now)) for then, now in found.items()}
    for then, several in list(doubtful.items()):
        free = [
            now
            for now in several
            if (_folder(then), _folder(now)) in ways
            and _ending(then, now)
            and now not in found.values()
        ]
        if len(free) == 1:
            found[then] = free[0]
            del doubtful[then]


def _ending(one: str, two: str) -> int:
    """Return how many parts two paths end with alike."""
    pairs = zip(reversed(one.split("/")), reversed(two.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _lines(text: str) -> Counter[str]:
    return Counter(line for each in split(text) if (line := each.strip()))


def _alike(one: Counter[str], two: Counter[str]) -> bool:
    """Say whether half of two texts, taken together, is in both."""
    whole = _size(one.items()) + _size(two.items())
    return 2 * _size((one & two).items()) >= ALIKE * whole


def _kept(old: Counter[str], new: Counter[str]) -> float:
    """Return which share of a text is in another, by characters, from 0 to 1."""
    whole = _size(old.items())
    return _size((old & new).items()) / whole if whole else 1.0


def _size(lines: Iterable[tuple[str, int]]) -> int:
    return sum(len(line) * count for line, count in lines)
