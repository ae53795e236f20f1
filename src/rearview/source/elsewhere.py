"""Files of an older version that may hold the code which now stands in another file."""

from collections.abc import Mapping

from rearview.source.text import split

NEAR = 12  # lines on either side that say what the surroundings are
MOST = 3  # files tried


def candidates(
    files: Mapping[str, str], new: str, path: str, lines: tuple[int, int], old: Mapping[str, str]
) -> list[str]:
    r"""Return paths of the old version that hold the surroundings of lines, best first.

    A file that holds them in the new version as well is a copy, not the place they came from.

    >>> new = {"a.py": "loss = compute(x)\nprint(loss)\nstep_with(loss)\n"}
    >>> old = {"b.py": "loss = compute(x)\nstep_with(loss)\n", "c.py": "other()\n"}
    >>> candidates(new, new["a.py"], "a.py", (2, 2), old)
    ['b.py']
    """
    all_lines = split(new)
    start, end = lines
    near = all_lines[max(0, start - 1 - NEAR) : start - 1] + all_lines[end : end + NEAR]
    context = {line.strip() for line in near}
    context = {line for line in context if len(line) > 8 and not line.startswith("#")}
    ranked: list[tuple[int, str]] = []
    for other, text in old.items():
        if other == path or not other.endswith(".py"):
            continue
        shared = _shared(context, text)
        still = _shared(context, files[other]) if other in files else 0
        if shared >= 2 and shared > still:
            ranked.append((-shared, other))
    ranked.sort()
    best = -ranked[0][0] if ranked else 0
    return [other for score, other in ranked[:MOST] if -score * 2 > best]


def _shared(context: set[str], text: str) -> int:
    return len(context & {line.strip() for line in split(text)})
