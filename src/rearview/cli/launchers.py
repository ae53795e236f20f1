"""What a command line means that names an interpreter, a shell script, a notebook or a launcher.

People put `rearview run` in front of what they type anyway. Where that is `python train.py`, it is
understood; where it cannot be recorded as it stands, the message is the command to type instead.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rearview.errors import UsageError

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?\Z")
_FLAGS = {
    "-u": {"PYTHONUNBUFFERED": "1"},
    "-B": {"PYTHONDONTWRITEBYTECODE": "1"},
    "-O": {"PYTHONOPTIMIZE": "1"},
    "-OO": {"PYTHONOPTIMIZE": "2"},
    "-v": {"PYTHONVERBOSE": "1"},
    "-s": {"PYTHONNOUSERSITE": "1"},
}
"""Options of Python that a variable sets just as well."""
_LAUNCHERS = {
    "torchrun": "torchrun {options} --no-python rearview run {program}",
    "accelerate": "accelerate launch {options} --no_python rearview run {program}",
    "deepspeed": "deepspeed {options} --no_python rearview run {program}",
    "mpirun": "mpirun {options} rearview run {program}",
    "mpiexec": "mpiexec {options} rearview run {program}",
    "srun": "srun {options} rearview run {program}",
    "horovodrun": "horovodrun {options} rearview run {program}",
}
"""Programs that start others, and where `rearview run` stands on their command line."""
_WRAPPERS = {"uv", "poetry", "pdm", "hatch", "pipenv", "conda", "nohup", "time", "env", "nice"}
"""Programs that start one other program as it is: Rearview stands behind them."""
_SHELL = re.compile(rb"#!.*\b(ba|da|z|k|fi)?sh\b")


@dataclass(frozen=True, slots=True)
class Meant:
    """The program that a command line means."""

    target: str
    args: tuple[str, ...]
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set for it."""


def meant(words: Sequence[str]) -> Meant:
    """Return the script or module that `words` start; raise with what to type where none is.

    >>> meant([sys.executable, "-u", "train.py", "--lr", "1"])
    Meant(target='train.py', args=('--lr', '1'), module=False, environment={'PYTHONUNBUFFERED': '1'})
    >>> meant([sys.executable, "-m", "pkg.train"]).module
    True
    """
    first, *rest = words
    name = Path(first).name
    if not Path(first).is_file() or _PYTHON.match(name):
        if _PYTHON.match(name):
            return _python(first, rest)
        if name in _LAUNCHERS:
            raise UsageError(_launcher(name, rest), slug="launcher")
        if name in _WRAPPERS:
            raise UsageError(_wrapper(words), slug="launcher")
        if found := shutil.which(first):
            raise UsageError(_command(first, Path(found), rest), slug="launcher")
        return Meant(first, tuple(rest))
    if not name.endswith(".py") and _is_shell(Path(first)):
        raise UsageError(_shell_script(Path(first)), slug="launcher")
    return Meant(first, tuple(rest))


def _python(first: str, rest: list[str]) -> Meant:
    _check_interpreter(first)
    environment: dict[str, str] = {}
    words = list(rest)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m" or (word.startswith("-m") and len(word) > 2):
            target = word[2:] or (words.pop(0) if words else "")
            if target:
                return Meant(target, tuple(words), module=True, environment=environment)
            break
        if word in _FLAGS:
            environment |= _FLAGS[word]
        elif word.startswith("-W"):
            environment["PYTHONWARNINGS"] = word[2:] or (words.pop(0) if words else "")
        else:
            raise UsageError(
                f"`rearview run` cannot pass {word} on to Python. Record a script or module: "
                "`rearview run train.py`, `rearview run -m package.train`.",
                slug="launcher",
            )
    if not words:
        raise UsageError(
            "Which script? `rearview run train.py`, or `rearview run -m package.train`.",
            slug="no-script",
        )
    return Meant(words[0], tuple(words[1:]), environment=environment)


def _check_interpreter(first: str) -> None:
    """Raise if `first` is a Python of another environment, whose packages this one does not have."""
    found = shutil.which(first)
    if found is None or Path(found).parent == Path(sys.executable).parent:
        return
    if Path(found).resolve() == Path(sys.executable).resolve() and sys.prefix == sys.base_prefix:
        return
    raise UsageError(
        f"{first} is {found}, but this `rearview` belongs to {sys.executable}. Record without naming "
        f"it (`rearview run train.py`), or install Rearview there: `{found} -m pip install rearview`.",
        slug="launcher",
    )


def _split(words: Sequence[str]) -> tuple[str, str]:
    """Return a launcher's own options, and the program it starts, as text."""
    for at, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return shlex.join(_without_python(words[:at])), shlex.join(words[at:])
        if word == "-m" and at + 1 < len(words):
            return shlex.join(_without_python(words[:at])), shlex.join(words[at:])
    return shlex.join(words), "train.py"


def _without_python(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _PYTHON.match(Path(word).name) and word != "launch"]


def _launcher(name: str, rest: list[str]) -> str:
    options, program = _split(rest)
    line = " ".join(_LAUNCHERS[name].format(options=options, program=program).split())
    return (
        f"{name} starts the processes, so Rearview goes behind it: `{line}`. Each process is recorded "
        "as a run of its own; runs of several processes that talk to each other cannot be replayed yet."
    )


def _wrapper(words: Sequence[str]) -> str:
    first, *rest = words
    for at, word in enumerate(rest):
        if _PYTHON.match(Path(word).name) or word.endswith(".py"):
            behind = rest[at + 1 :] if _PYTHON.match(Path(word).name) else rest[at:]
            line = shlex.join([first, *rest[:at], "rearview", "run", *behind])
            return f"{first} starts the program, so Rearview goes behind it: `{line}`."
    return f"{first} starts the program, so `rearview run` goes behind it, before the script."


def _command(first: str, found: Path, rest: list[str]) -> str:
    line = shlex.join(["rearview", "run", str(found), *rest])
    try:
        with found.open("rb") as file:
            head = file.readline(200)
    except OSError:
        head = b""
    if head.startswith(b"#!") and b"python" in head:
        module = shlex.join(["rearview", "run", "-m", first, *rest])
        return f"{first} is a command, not a script. Record its module: `{module}`; or its file: `{line}`."
    return (
        f"{first} is a program, not a Python script. Put `rearview run` in front of the Python script "
        "that it starts."
    )


def _is_shell(file: Path) -> bool:
    if file.suffix in {".sh", ".bash", ".zsh", ".slurm", ".sbatch"}:
        return True
    try:
        with file.open("rb") as lines:
            return bool(_SHELL.match(lines.readline(200)))
    except OSError:
        return False


def _shell_script(file: Path) -> str:
    """Return what to change in a shell script: the first line that starts Python, and what it becomes."""
    head = f"{file} is a shell script; Rearview records the Python program that it starts."
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            continue
        match = re.search(r"(?<!\S)\S*python[\d.]*\s+(-u\s+)?(?P<rest>(-m\s+)?[\w./$\"{].*)", text)
        if match:
            changed = f"{text[: match.start()]}rearview run {match['rest']}"
            return f"{head} Change its line {number} to `{changed}` and run {file} as before."
        if re.search(r"\b(torchrun|accelerate launch|deepspeed|srun|mpirun)\b", text):
            return (
                f"{head} Its line {number} starts processes through a launcher: try `rearview run -- "
                f"{text.split('#')[0].strip()}` to see where Rearview goes."
            )
    return f"{head} Put `rearview run` in front of the script's name in it, in place of `python`."
