"""The batch script of a job that Slurm queues again until it is done."""

from __future__ import annotations

import shlex

from rearview.errors import UsageError
from rearview.sites.job import EXIT_CODE, Job

WARNING = 60
"""Seconds before the end of its time at which a job is told, so that it can save."""


def batch_script(job: Job) -> str:
    """Return the script; `sbatch` takes it.

    The signal goes to the step, hence `srun`, and there is no shell between Slurm and the program.
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
# written by `rearview submit --slurm`; sbatch takes it
{lines}cd {shlex.quote(job.folder)} || exit
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {job.retries} ]; then
  echo "started too often; see rearview run --retries" >&2
  exit 1
fi
srun {shlex.join(job.command)}
code=$?
# saved, to be continued
[ "$code" = {EXIT_CODE} ] && exec scontrol requeue "$SLURM_JOB_ID"
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
