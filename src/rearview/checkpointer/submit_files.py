"""The texts of HTCondor submit files and Slurm batch scripts, for jobs that save and are started again.

The functions are pure: the texts depend on the arguments only, not on the machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from rearview.errors import UsageError
from rearview.model.run import EXIT_PAUSED


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch job: its program saves when it is asked to stop, and continues when it is started again."""

    name: str
    command: tuple[str, ...]
    """The command line of the program: the interpreter, then its arguments."""
    folder: str
    """Absolute path of the folder in which the program starts."""
    retries: int = 1000
    """Number of times that the job may be started again."""
    inputs: tuple[str, ...] = ()
    """Absolute paths of files and folders to transfer to the job; needed if the machines share no disk."""
    results: tuple[str, ...] = ()
    """Files to transfer back when the job ends; if empty, all new files."""
    settings: dict[str, str] = field(default_factory=dict)
    """Option name -> value, as given by the user; replaces the value that Rearview would write to the file."""


STORE = ".rearview"


def submit_file(job: BatchJob, *, results: str) -> str:
    """Return the text of the HTCondor submit file for `job`; files are transferred back to the folder `results`.

    When the job exits with code 85, HTCondor transfers the folder `.rearview` and starts the job again at once.
    If a machine dies, everything since the last exit with code 85 is lost.
    """
    executable, *arguments = job.command
    lines = {
        "universe": "vanilla",
        "executable": _line(executable),
        "transfer_executable": "False",
        "arguments": words(arguments),
        "initialdir": _line(results),
        "transfer_input_files": _files(job.inputs),
        "should_transfer_files": "YES",
        "when_to_transfer_output": "ON_EXIT_OR_EVICT",
        "checkpoint_exit_code": str(EXIT_PAUSED),
        "transfer_checkpoint_files": STORE,
        "transfer_output_files": _files((STORE, *job.results)) if job.results else ".",
        "output": f"{_line(job.name)}.out",
        "error": f"{_line(job.name)}.err",
        "log": f"{_line(job.name)}.log",
        # a held job keeps its checkpoint and can be released; a removed job would lose it
        "periodic_hold": f"NumJobStarts > {job.retries}",
        "periodic_hold_reason": '"started too often; see rearview run --retries"',
        **job.settings,
    }
    text = "".join(f"{name} = {value}\n" for name, value in lines.items() if value)
    return f"# written by `rearview submit --condor`, for condor_submit\n{text}queue\n"


def words(arguments: Iterable[str]) -> str:
    r"""Return `arguments` as one text in HTCondor's quoting, which keeps spaces and quotes inside an argument.

    >>> print(words(["train.py", "--name", "it's \"me\"", "$(pwd)"]))
    "train.py --name 'it''s ""me""' $(DOLLAR)(pwd)"
    """
    return '"' + " ".join(_word(argument) for argument in arguments) + '"'


def _word(text: str) -> str:
    text = _line(text).replace('"', '""')
    if not text or any(letter in text for letter in " \t'"):
        return "'" + text.replace("'", "''") + "'"
    return text


def _line(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise UsageError(
            f"{text!r} has a line break, which a submit file cannot hold. Put it into a file that "
            "the script reads.",
            slug="submit-quoting",
        )
    return text.replace("$", "$(DOLLAR)")


def _files(paths: Iterable[str]) -> str:
    names = list(paths)
    for path in names:
        if "," in path or path != path.strip():
            raise UsageError(
                f"HTCondor cannot transfer {path!r}: a comma or a space at an end of a name means "
                "something else in its list of files. Rename it.",
                slug="submit-quoting",
            )
    return ",".join(map(_line, names))


WARNING = 60
"""Seconds before the time limit of a Slurm job at which the program gets a signal, so that it can save."""


def batch_script(job: BatchJob) -> str:
    """Return the text of the Slurm batch script for `job`, to submit with `sbatch`.

    The program runs under `srun`, so that Slurm sends the signal to the program and not to the shell.
    """
    options = {
        "job-name": job.name,
        "output": f"{job.name}.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR1@{WARNING}",
        **job.settings,
    }
    lines = "".join(f"#SBATCH --{_option(name, value)}\n" for name, value in options.items())
    return f"""\
#!/bin/sh
# written by `rearview submit --slurm`, for sbatch
{lines}cd {shlex.quote(job.folder)} || exit
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {job.retries} ]; then
  echo "started too often; see rearview run --retries" >&2
  exit 1
fi
srun {shlex.join(job.command)}
code=$?
# saved, to be continued
[ "$code" = {EXIT_PAUSED} ] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def _option(name: str, value: str) -> str:
    if any(letter in value for letter in "\n\r\"'"):
        raise UsageError(
            f"The option --{name}={value!r} of sbatch cannot hold quotes or line breaks. Give "
            "another value.",
            slug="submit-quoting",
        )
    if not value:
        return name
    return f'{name}="{value}"' if any(letter in value for letter in " \t#") else f"{name}={value}"


__all__ = ["BatchJob", "batch_script", "submit_file"]
