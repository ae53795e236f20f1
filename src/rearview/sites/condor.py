"""The submit file of a self-checkpointing job for HTCondor."""

from __future__ import annotations

from collections.abc import Iterable

from rearview.errors import UsageError
from rearview.sites.job import EXIT_CODE, Job

STORE = ".rearview"


def submit_file(job: Job, *, results: str) -> str:
    """Return the submit file; whatever the job makes comes back to the folder `results`.

    HTCondor takes the store when the job exits with 85, and starts it again at once; a machine
    that dies costs what came after the last such exit.
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
        "checkpoint_exit_code": str(EXIT_CODE),
        "transfer_checkpoint_files": STORE,
        "transfer_output_files": _files((STORE, *job.results)) if job.results else ".",
        "output": f"{_line(job.name)}.out",
        "error": f"{_line(job.name)}.err",
        "log": f"{_line(job.name)}.log",
        # it keeps its checkpoint and can be released, where a removed job would lose it
        "periodic_hold": f"NumJobStarts > {job.retries}",
        "periodic_hold_reason": '"started too often; see rearview run --retries"',
        **job.settings,
    }
    text = "".join(f"{name} = {value}\n" for name, value in lines.items() if value)
    return f"# written by `rearview submit --condor`; condor_submit takes it\n{text}queue\n"


def words(arguments: Iterable[str]) -> str:
    r"""Return arguments in HTCondor's own quoting, each of them one argument whatever it holds.

    >>> print(words(["train.py", "--name", "it's \"me\"", "$(pwd)"]))
    "train.py --name 'it''s ""me""' $(DOLLAR)(pwd)"
    """
    return '"' + " ".join(_word(one) for one in arguments) + '"'


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
    found = list(paths)
    for path in found:
        if "," in path or path != path.strip():
            raise UsageError(
                f"HTCondor cannot transfer {path!r}: a comma or a space at an end of a name means "
                "something else in its list of files. Rename it.",
                slug="submit-quoting",
            )
    return ",".join(map(_line, found))
