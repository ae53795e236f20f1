"""A job for the HTCondor tests: submitted, waited for."""

import os
import shutil

import pytest

from servers.daemons import UnavailableError
from sites.common import HERE, until

SUBMIT = """
executable = run.sh
transfer_input_files = train.py
transfer_checkpoint_files = state.json.saves
checkpoint_exit_code = 85
should_transfer_files = YES
when_to_transfer_output = ON_EXIT_OR_EVICT
environment = "PYTHONPATH=/rearview"
output = out.txt
error = err.txt
log = log.txt
request_memory = 100
queue
"""

RUN = """#!/bin/sh
exec python3 -m rearview.checkpointer.supervisor -- \\
  python3 train.py {steps} {seconds} /jobs/{name} 'checkpoint_transfer_mode="htcondor"' {options}
"""


def enter(context):
    try:
        return context.__enter__()
    except UnavailableError as exc:
        if os.environ.get("REARVIEW_REQUIRE_SERVERS"):
            raise
        pytest.skip(f"NOT TESTED under a real HTCondor: {exc}")


def submit(site, jobs, name, *, steps, seconds, options=""):
    folder = jobs / name
    folder.mkdir()
    folder.chmod(0o777)
    shutil.copy(HERE / "train.py", folder)
    run = folder / "run.sh"
    run.write_text(RUN.format(steps=steps, seconds=seconds, name=name, options=options))
    run.chmod(0o755)
    (folder / "submit").write_text(SUBMIT)
    site.run("condor_submit", "-terse", "submit", folder=f"/jobs/{name}")
    return folder


def finished(site, folder, seconds=90):
    def said():
        files = "".join(
            f"--- {name}\n{(folder / name).read_text()[-1500:]}"
            for name in ("log.txt", "err.txt", "trace.txt")
            if (folder / name).exists()
        )
        return f"{site.run('condor_q', '-better-analyze', check=False)[-800:]}\n{files}"

    until((folder / "final.txt").exists, seconds, said)
    return (folder / "final.txt").read_text()
